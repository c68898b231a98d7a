"""Low-rank bounds: from the rows of a curvature to V'S V + D above it."""

import functools
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from qbound import checks, trees
from qbound.curvature import Curvature, LowRank
from qbound.families.low_rank import frequent_directions, row_by_row
from qbound.families.low_rank.row_by_row import Split
from qbound.families.low_rank.rows import FeatureSource, RowSource, row_source, scan_rows
from qbound.families.softmax import log_partition_bound
from qbound.linalg.dense import safe_sqrt, sum_of_many, times
from qbound.quadratic import QuadraticBound
from qbound.types import Order, working_dtype

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
    """A low-rank curvature above `curvature`, made by `curvature_by_example`, or above `start` + it."""
    parameters = trees.shapes(curvature.domain())
    size = trees.size(curvature.domain())
    dtype = working_dtype(*jax.tree.leaves(curvature.domain()))
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


# The low-rank bound on a mean of log-partition functions with explicit features.


def low_rank_bound(
    features: ArrayLike,
    theta: ArrayLike,
    *,
    rank: int,
    method: Method = "frequent_directions",
    order: Order = "descending",
    block_size: int | None = None,
) -> QuadraticBound:
    r"""A bound on the mean of log-partition functions with a curvature of low rank and a diagonal.

    .. math:: \frac1m \sum_j \log Z_j(\theta) \le \log z + \mu^\top (\theta - \tilde\theta)
        + \tfrac12 (\theta - \tilde\theta)^\top (V^\top S V + D) (\theta - \tilde\theta)

    Value and gradient are those of the full bound, and V'SV + D lies above its curvature Sigma: a product takes O(k d)
    and a solve O(k^2 d), and no d x d array is formed.

    Args:
      features: f_x(y) of m examples, shape (m, n, d).
      theta: the point of contact, shape (d,).
      rank: k, the number of rows of V. Above d, with a warning, the rows beyond d are zero.
      method: how what does not fit into k directions is accounted for.

        - "frequent_directions": in blocks of rows; D is a multiple of I, by which Sigma is exceeded at most. The
          fastest and, from a rank of about n - 1 on, by far the tightest;
        - "exact": row by row, the least of k + 1 principal directions is moved to the diagonal;
        - "paper": Algorithm 3 of [WC20] with its errors corrected; see docs/theory.md. It does not get tighter with k.

        With k at least the rank of Sigma the first two are equal to Sigma, up to rounding.
      order: of the labels; see `qbound.log_partition_bound`. "given" is the paper's.
      block_size: how many rows to take at a time, about; n - 1 come from each example. Any gives a bound.

    Returns:
      A bound that holds globally. Its curvature has `basis` (k, d), `scales` (k,) and `diagonal` (d,); it is made by
      eigendecompositions of matrices that may be singular, and is not meant to be differentiated.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> features = jax.random.normal(jax.random.key(0), (100, 3, 8))
      >>> bound = qbound.low_rank_bound(features, jnp.zeros(8), rank=4)
      >>> bound.curvature.basis.shape, bound.majorizes
      ((4, 8), 'globally')
      >>> x = jax.random.normal(jax.random.key(1), (8,))
      >>> bool(bound(x) >= jax.nn.logsumexp(features @ x, axis=1).mean())
      True
    """
    checks.choice("method", method, METHODS)
    features = checks.float_array("features", features, ["m", "n", "d"])
    features = features.astype(working_dtype(features))
    theta = checks.matching("theta", checks.float_array("theta", theta, ["d"]), features[0, 0])
    rank = checked_rank(rank, theta.size, stacklevel=2)
    block_size = None if block_size is None else checks.integer("block_size", block_size)
    bounds = jax.vmap(lambda h: log_partition_bound(h, order=order))(times(features, theta))
    m, n, d = features.shape
    weights = jnp.full((m,), 1 / m, features.dtype)
    source = FeatureSource(bounds.curvature, weights, features)
    return QuadraticBound(
        value=sum_of_many(bounds.value) / m,
        grad=sum_of_many((bounds.grad[:, :, None] * features).reshape(m * n, d)) / m,
        curvature=LowRank(
            *compress_rows(source, nothing(rank, d, features.dtype), method=method, block_size=block_size)
        ),
        point=theta,
        majorizes="globally",
    )
