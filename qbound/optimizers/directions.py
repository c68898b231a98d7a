"""The mean of directions, debiased, and able to forget: momentum."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qbound import checks, trees
from qbound.optimizers.base import known_to_be_zero, parameter_dtype
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
    if known_to_be_zero(momentum):
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


def descent(
    directions: MeanDirection | None, alone: Float[Array, ""], g: Any, momentum: Scalar
) -> tuple[Float[Array, ""], Bool[Array, ""] | bool]:
    """g.u for the mean u with a direction s, of which g.s is known, and whether the earlier ones are to be forgotten.

    They are where u would not be a descent; then u is s.
    """
    if directions is None:
        return alone, False
    weight = directions.mean_direction_weight
    m = jnp.asarray(checks.fraction("momentum", momentum), weight.dtype)
    total = m * trees.dot(g, directions.mean_direction).astype(weight.dtype) + alone.astype(weight.dtype)
    turns_back = total <= 0
    return jnp.where(turns_back, alone.astype(weight.dtype), total / (m * weight + 1)), turns_back
