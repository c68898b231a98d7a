"""How long a step may be that has its gradient from a small batch and its curvature from many.

Along a step of length eta the bound of the batch's own objective changes by -eta g's + eta^2/2 s'Bs, with B the
curvature of that batch. If the batch has few examples beside the number of parameters, s'Bs is far above g's, and a
full step makes the objective rise. It does not rise, on average over batches, up to eta = 2 E[g's] / E[s'Bs].

The averages are of earlier batches only: a limit that depends on the current one would bias the step.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qbound.types import Scalar

__all__ = ["SpfbLimit", "longest_step", "no_limit_yet", "with_batch"]


class SpfbLimit(NamedTuple):
    """Averages over the batches so far.

    Attributes:
      limit_slope: of g's.
      limit_curvature: of s'Bs, with B the damped curvature of the batch alone.
      limit_updates: how many there were, for learning rates that follow a schedule.
    """

    limit_slope: Float[Array, ""]
    limit_curvature: Float[Array, ""]
    limit_updates: Int[Array, ""]


def no_limit_yet(dtype) -> SpfbLimit:
    """Before the first batch."""
    return SpfbLimit(jnp.zeros((), dtype), jnp.zeros((), dtype), jnp.zeros((), jnp.int32))


def longest_step(limit: SpfbLimit) -> Float[Array, ""]:
    """2 E[g's] / E[s'Bs]; infinite before there was a batch."""
    known = limit.limit_curvature > 0
    return jnp.where(known, 2 * limit.limit_slope / jnp.where(known, limit.limit_curvature, 1), jnp.inf)


def with_batch(limit: SpfbLimit, slope: Array, curvature: Array, weight: Scalar) -> SpfbLimit:
    """A batch taken into the averages, with `weight`, or in the first steps as one of few; not if it is not finite."""
    count = limit.limit_updates.astype(slope.dtype)
    weight_now = jnp.maximum(1 / (count + 1), jnp.asarray(weight, slope.dtype))
    finite = jnp.isfinite(slope) & jnp.isfinite(curvature)

    def average(old, new):
        return jnp.where(finite, old + weight_now * (new - old), old)

    return SpfbLimit(
        limit_slope=average(limit.limit_slope, slope),
        limit_curvature=average(limit.limit_curvature, curvature),
        limit_updates=limit.limit_updates + 1,
    )
