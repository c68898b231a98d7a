"""The curvature of LSPFB: low-rank, of one batch or of a sketch that is carried from batch to batch.

With decay rho, C_t = compress(rho C_{t-1} + Sigma_t) lies above sum_i rho^i Sigma_{t-i}, each at the parameters of its
own step. A step is made with C_t / W_t, W_t = sum_i rho^i: an upper bound of the discounted **mean** of the curvatures,
and not of Sigma_t. Without decay it is one of Sigma_t, and the quadratic is one of the objective of the batch.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qbound import checks, trees
from qbound.curvature import Curvature, LowRank
from qbound.low_rank import METHODS, Method, checked_rank, low_rank
from qbound.types import Scalar, working_dtype

__all__ = ["SketchOptions", "SpfbSketch", "add_batch", "first_sketch", "is_settled"]


@dataclasses.dataclass(frozen=True)
class SketchOptions:
    """The options that `qbound.lspfb` has beside those of `qbound.spfb`."""

    rank: int
    method: Method
    decay: Scalar
    block_size: int | None

    def __post_init__(self):
        object.__setattr__(self, "rank", checks.integer("rank", self.rank))
        checks.choice("method", self.method, METHODS)
        checks.fraction("decay", self.decay)
        if self.block_size is not None:
            object.__setattr__(self, "block_size", checks.integer("block_size", self.block_size))


class SpfbSketch(NamedTuple):
    """C_t = V'S V + D, and of how many batches it is.

    Attributes:
      sketch_basis: V, laid out as `jax.flatten_util.ravel_pytree` does.
      sketch_scales: the diagonal of S.
      sketch_diagonal: that of D.
      sketch_batches: W_t.
    """

    sketch_basis: Float[Array, "k d"]
    sketch_scales: Float[Array, " k"]
    sketch_diagonal: Float[Array, " d"]
    sketch_batches: Float[Array, ""]


def first_sketch(options: SketchOptions, params: Any) -> SpfbSketch | None:
    """Before the first batch; None if none is carried. A decay that is an array is taken not to be 0."""
    size, dtype = trees.size(params), working_dtype(*jax.tree.leaves(params))
    rank = checked_rank(options.rank, size, stacklevel=3) if size else options.rank
    if checks.is_number(options.decay) and options.decay == 0:
        return None
    return SpfbSketch(
        jnp.zeros((rank, size), dtype), jnp.zeros(rank, dtype), jnp.zeros(size, dtype), jnp.zeros((), dtype)
    )


def add_batch(
    options: SketchOptions, sketch: SpfbSketch | None, curvature: Curvature
) -> tuple[LowRank, SpfbSketch | None]:
    """The low-rank curvature to make a step with, and the sketch after a batch of `curvature`."""
    if sketch is None:
        return _compressed(options, curvature, None), None
    decay = jnp.asarray(checks.fraction("decay", options.decay), sketch.sketch_batches.dtype)
    before = LowRank(sketch.sketch_basis, decay * sketch.sketch_scales, decay * sketch.sketch_diagonal)
    total = _compressed(options, curvature, before)
    count = decay * sketch.sketch_batches + 1
    mean = dataclasses.replace(total, scales=total.scales / count, diagonal=total.diagonal / count)
    return mean, SpfbSketch(total.basis, total.scales, total.diagonal, count)


def is_settled(sketch: SpfbSketch, decay: Float[Array, ""]) -> Bool[Array, ""]:
    """Whether about as many batches have come as the sketch remembers, 1/(1 - rho): then W_t (1 - rho) = 1 - 1/e."""
    return sketch.sketch_batches * (1 - decay) >= 0.63


def _compressed(options, curvature, start):
    return low_rank(curvature, rank=options.rank, method=options.method, block_size=options.block_size, start=start)
