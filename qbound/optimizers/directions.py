"""The mean of directions, debiased, and able to forget: momentum."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qbound import checks, trees
from qbound.optimizers.base import parameter_dtype
from qbound.types import Scalar, working_dtype


class MeanDirection(NamedTuple):
    """The directions so far.

    Attributes:
      mean_direction: their sum, with forgetting.
      mean_direction_weight: of how many it is.
    """

    mean_direction: Any
    mean_direction_weight: Float[Array, ""]


def no_directions_yet(params: Any, momentum: Scalar) -> MeanDirection | None:
    """Before the first; None without momentum, which needs no memory."""
    if checks.is_number(momentum) and momentum == 0:
        return None
    mean = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=working_dtype(leaf)), params)
    return MeanDirection(mean, jnp.zeros((), parameter_dtype(params)))


def share_of_next(directions: MeanDirection | None, momentum: Scalar) -> Float[Array, ""] | float:
    """The share that the next direction will have in the mean."""
    if directions is None:
        return 1.0
    weight = directions.mean_direction_weight
    return 1 / (jnp.asarray(checks.fraction("momentum", momentum), weight.dtype) * weight + 1)


def mean_direction(
    directions: MeanDirection | None, s: Any, momentum: Scalar, forget: Bool[Array, ""] | bool
) -> tuple[Any, MeanDirection | None]:
    """sum_i m^i s_{t-i} / sum_i m^i with the latest s, and what to remember. The earlier ones may be forgotten."""
    if directions is None:
        return s, None
    sums, weight = directions
    m = jnp.where(forget, 0, jnp.asarray(checks.fraction("momentum", momentum), weight.dtype))
    sums = jax.tree.map(lambda old, new: m.astype(old.dtype) * old + new.astype(old.dtype), sums, s)
    weight = m * weight + 1
    return trees.scale(1 / weight, sums), MeanDirection(sums, weight)
