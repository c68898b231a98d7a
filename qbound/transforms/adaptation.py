"""Damping adapted to how well the quadratic predicted the decrease of the loss: Levenberg and Marquardt's rule.

After a step, the loss should have fallen by what the quadratic said. Where it fell by much less, the model was wrong
that far away, and the damping grows; where it fell by about as much, the damping shrinks. A bound of a convex loss
promises less than it keeps; the bound of a linearised network may not.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import trees

__all__ = ["SpfbAdaptation", "adapted", "first_adaptation", "remember"]

# Below the first ratio of actual to predicted decrease the damping grows, above the second it shrinks.
POOR, GOOD = 0.25, 0.75
GROWTH, SHRINKAGE = 2.0, 1.5
# Losses of different batches differ by noise: both decreases are averaged over about ten steps.
MEMORY = 0.9
# Beyond these multiples of its first value damping means nothing any more.
LOWEST, HIGHEST = 1e-8, 1e8


class SpfbAdaptation(NamedTuple):
    """What the next step needs to judge this one.

    Attributes:
      spfb_adaptive_damping: what is added to the damping.
      spfb_reduction_ratio: actual over predicted decrease, of the last steps; 1 before there are any.
      previous_value: the loss before the last step; NaN before there is one.
      previous_params: the parameters before the last step.
      previous_solution: its direction s.
      slope: g's.
      curvature: s'(C + damping I) s, without the adaptive part of the damping.
      actual: discounted sum of decreases.
      predicted: discounted sum of predictions.
    """

    spfb_adaptive_damping: Float[Array, ""]
    spfb_reduction_ratio: Float[Array, ""]
    previous_value: Float[Array, ""]
    previous_params: Any
    previous_solution: Any
    slope: Float[Array, ""]
    curvature: Float[Array, ""]
    actual: Float[Array, ""]
    predicted: Float[Array, ""]


def first_adaptation(params: Any, initial: Any, dtype: Any) -> SpfbAdaptation:
    """Before the first step. `params` in float32 at least."""

    def number(x):
        return jnp.array(x, dtype)

    return SpfbAdaptation(
        spfb_adaptive_damping=number(initial),
        spfb_reduction_ratio=number(1),
        previous_value=number(jnp.nan),
        previous_params=trees.zeros_like(params),
        previous_solution=trees.zeros_like(params),
        slope=number(0),
        curvature=number(0),
        actual=number(0),
        predicted=number(0),
    )


def adapted(state: SpfbAdaptation, params: Any, value: Float[Array, ""], initial: Any) -> SpfbAdaptation:
    """Judge the last step by the loss `value` at `params`, where it led, and set the damping of the next.

    The step is what the parameters moved by, seen along the direction: so a learning rate, or whatever else follows in
    a chain, is accounted for without being known.
    """
    s = state.previous_solution
    moved = trees.dot(s, trees.add_scaled(state.previous_params, jnp.array(-1.0), params))
    ss = trees.dot(s, s)
    eta = moved / jnp.where(ss == 0, 1, ss)
    predicted = MEMORY * state.predicted + eta * state.slope - eta**2 / 2 * state.curvature
    actual = MEMORY * state.actual + state.previous_value - value
    known = jnp.isfinite(state.previous_value) & (ss > 0) & (predicted > 0)
    broken = known & ~jnp.isfinite(actual)
    ratio = jnp.where(broken, 0, actual / jnp.where(predicted > 0, predicted, 1))
    grows, shrinks = known & (ratio < POOR), known & (ratio > GOOD)
    factor = jnp.where(grows, GROWTH, jnp.where(shrinks, 1 / SHRINKAGE, 1)).astype(ratio.dtype)
    initial = jnp.asarray(initial, ratio.dtype)
    damping = jnp.clip(state.spfb_adaptive_damping * factor, LOWEST * initial, HIGHEST * initial)
    forget = broken | ~known
    return state._replace(
        spfb_adaptive_damping=damping,
        spfb_reduction_ratio=jnp.where(known, ratio, state.spfb_reduction_ratio),
        actual=jnp.where(forget, 0, actual),
        predicted=jnp.where(forget, 0, predicted),
    )


def remember(
    state: SpfbAdaptation, params: Any, value: Float[Array, ""], s: Any, slope: Array, curvature: Array
) -> SpfbAdaptation:
    """What `adapted` will need after the step along `s` from `params`."""
    return state._replace(
        previous_value=value, previous_params=params, previous_solution=s, slope=slope, curvature=curvature
    )
