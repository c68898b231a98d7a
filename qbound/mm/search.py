"""The root of an increasing function of one number."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["increasing_root"]

# The most that one trial may be larger than the one before, while no upper limit is known.
_GROWTH = 10.0


class _Trial(NamedTuple):
    trials: Int[Array, ""]
    x: Float[Array, ""]
    value: Float[Array, ""]
    low: Float[Array, ""]  # the function is not positive here
    high: Float[Array, ""]  # nor negative here
    next: Float[Array, ""]


def increasing_root(
    function: Callable[[Array], tuple[Array, Array]],
    first: Float[Array, ""],
    *,
    low: Float[Array, ""],
    high: Float[Array, ""],
    tolerance: Float[Array, ""],
    max_trials: int,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """X > 0 with |f(x)| <= tolerance, by Newton's method kept between what is known to lie below and above the root.

    Args:
      function: x -> f(x) and its slope; infinite or NaN counts as positive.
      first: the first trial.
      low: a number >= 0 at or below the root.
      high: a number at or above the root; inf if none is known.
      tolerance: of f.
      max_trials: the most values of f to take.

    Returns:
      The last trial, and how many there were.
    """

    def trial(state: _Trial) -> _Trial:
        x = state.next
        value, slope = function(x)
        value = jnp.where(jnp.isnan(value), jnp.inf, value)
        low = jnp.where(value <= 0, x, state.low)
        high = jnp.where(value >= 0, x, state.high)
        newton = x - value / slope
        # In the middle by ratio where both ends are above 0: a root may be many times smaller than its upper limit.
        middle = jnp.where(low > 0, jnp.sqrt(low) * jnp.sqrt(high), high / 2)
        middle = jnp.where(jnp.isfinite(high), middle, _GROWTH * x)
        inside = (newton > low) & (newton < high) & (newton <= _GROWTH * x)
        return _Trial(state.trials + 1, x, value, low, high, jnp.where(inside, newton, middle))

    def unfinished(state: _Trial):
        return (state.trials < max_trials) & ~(jnp.abs(state.value) <= tolerance)

    start = _Trial(jnp.zeros((), jnp.int32), first, jnp.full_like(first, jnp.inf), low, high, first)
    last = jax.lax.while_loop(unfinished, trial, start)
    return last.x, last.trials
