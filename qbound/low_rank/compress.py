"""From the rows of a curvature to V'S V + D above it."""

import functools
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import checks, trees
from qbound.curvature import Curvature, LowRank
from qbound.curvature.low_rank import vectors_of
from qbound.curvature.roots import safe_sqrt
from qbound.low_rank import frequent_directions, row_by_row
from qbound.low_rank.row_by_row import Split
from qbound.low_rank.sources import RowSource, row_source, scan_rows

__all__ = ["METHODS", "Method", "checked_rank", "compress_rows", "low_rank", "nothing"]

Method = Literal["paper", "exact", "frequent_directions"]
METHODS = ("paper", "exact", "frequent_directions")


def checked_rank(rank: int, size: int, stacklevel: int) -> int:
    """The rank, with a warning, `stacklevel` frames up, if there are fewer parameters than that."""
    rank = checks.integer("rank", rank)
    if rank > size:
        warnings.warn(
            f"rank: expected at most {size}, the number of parameters; got {rank}. The rows of the basis beyond "
            f"{size} are zero",
            stacklevel=stacklevel + 1,
        )
    return rank


def low_rank(
    curvature: Curvature,
    *,
    rank: int,
    method: Method = "frequent_directions",
    block_size: int | None = None,
    start: LowRank | None = None,
) -> LowRank:
    """A low-rank curvature above `curvature`, one of `qbound.batches.curvature_by_example`, or above `start` + it."""
    parameters = vectors_of(curvature)
    size = trees.size(curvature.domain())
    dtype = jax.tree.leaves(curvature.domain())[0].dtype
    first = nothing(rank, size, dtype) if start is None else Split(*_parts(start))
    split = compress_rows(row_source(curvature), first, method=method, block_size=block_size)
    return LowRank(*split, parameters=parameters)


def compress_rows(source: RowSource, start: Split, *, method: Method, block_size: int | None) -> Split:
    """`start` and all rows of `source`, in as many directions as `start` has."""
    rank, size = start.basis.shape
    k = min(rank, size)
    kept = Split(start.basis[:k], start.scales[:k], start.diagonal)
    methods = {
        "paper": functools.partial(_one_by_one, row_by_row.append_paper),
        "exact": functools.partial(_one_by_one, row_by_row.append_exactly),
        "frequent_directions": _frequent_directions,
    }
    basis, scales, diagonal = methods[method](source, kept, block_size)
    return Split(jnp.pad(basis, [(0, rank - k), (0, 0)]), jnp.pad(scales, (0, rank - k)), diagonal)


def _one_by_one(append, source, start, block_size) -> Split:
    def block(split, rows):
        return jax.lax.scan(lambda split, r: (append(split, r), None), split, source.dense_rows(rows))[0]

    block_size = start.scales.size if block_size is None else block_size
    return scan_rows(source, block_size, block, start, functools.partial(row_by_row.merge, append), row_by_row.LARGEST)


def _frequent_directions(source, start, block_size) -> Split:
    k = start.scales.size
    sketch = frequent_directions.Sketch(
        stack=source.to_stack(safe_sqrt(start.scales)[:, None] * start.basis),
        squares=start.scales,
        delta=jnp.zeros_like(start.scales[0]),
    )
    block, fetched = frequent_directions.default_block(k) if block_size is None else (block_size, block_size)
    append = functools.partial(frequent_directions.append, block=block)
    sketch = scan_rows(source, fetched, append, sketch, frequent_directions.merge, frequent_directions.LARGEST)
    rows: Float[Array, "k d"] = source.to_basis(sketch.stack)
    scales = jnp.sum(rows**2, axis=1)
    basis = rows / safe_sqrt(jnp.where(scales > 0, scales, 1))[:, None]
    # Largest first.
    return Split(basis[::-1], scales[::-1], start.diagonal + sketch.delta)


def nothing(rank: int, size: int, dtype: Any) -> Split:
    """Of no rows."""
    return Split(jnp.zeros((rank, size), dtype), jnp.zeros(rank, dtype), jnp.zeros(size, dtype))


def _parts(curvature: LowRank):
    return curvature.basis, curvature.scales, curvature.diagonal
