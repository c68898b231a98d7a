"""The momentum of KSPFB: the mean of its directions, debiased, and able to forget."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qbound import checks, trees
from qbound.transforms.options import parameter_dtype
from qbound.types import Scalar, working_dtype

__all__ = ["KspfbMean", "mean_direction", "no_directions_yet", "share_of_next"]


class KspfbMean(NamedTuple):
    """The directions so far.

    Attributes:
      kspfb_mean: their sum, with forgetting.
      kspfb_mean_weight: of how many it is.
    """

    kspfb_mean: Any
    kspfb_mean_weight: Float[Array, ""]


def no_directions_yet(params: Any, momentum: Scalar) -> KspfbMean | None:
    """Before the first; None without momentum, which needs no memory."""
    if checks.is_number(momentum) and momentum == 0:
        return None
    mean = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=working_dtype(leaf)), params)
    return KspfbMean(mean, jnp.zeros((), parameter_dtype(params)))


def share_of_next(directions: KspfbMean | None, momentum: Scalar) -> Float[Array, ""] | float:
    """The share that the next direction will have in the mean."""
    if directions is None:
        return 1.0
    weight = directions.kspfb_mean_weight
    return 1 / (jnp.asarray(checks.fraction("momentum", momentum), weight.dtype) * weight + 1)


def mean_direction(
    directions: KspfbMean | None, s: Any, momentum: Scalar, forget: Bool[Array, ""] | bool
) -> tuple[Any, KspfbMean | None]:
    """sum_i m^i s_{t-i} / sum_i m^i with the latest s, and what to remember. The earlier ones may be forgotten."""
    if directions is None:
        return s, None
    sums, weight = directions
    m = jnp.where(forget, 0, jnp.asarray(checks.fraction("momentum", momentum), weight.dtype))
    sums = jax.tree.map(lambda old, new: m.astype(old.dtype) * old + new.astype(old.dtype), sums, s)
    weight = m * weight + 1
    return trees.scale(1 / weight, sums), KspfbMean(sums, weight)
