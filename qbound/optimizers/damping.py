"""Damping adapted to how well the quadratic predicted the decrease of the loss: Levenberg and Marquardt's rule.

After a step, the loss should have fallen by what the quadratic said. Where it fell by much less, the model was wrong
that far away, and the damping grows; where it fell by about as much, the damping shrinks. A bound of a convex loss
promises less than it keeps; the bound of a linearised network may not.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import trees

# Below the first ratio of actual to predicted decrease the damping grows, above the second it shrinks.
POOR, GOOD = 0.25, 0.75

GROWTH, SHRINKAGE = 2.0, 1.5

# Losses of different batches differ by noise. Both decreases are averaged over about ten steps, and a verdict needs a
# distance of this many standard errors of their difference from the ratio in question.
MEMORY = 0.9

STANDARD_ERRORS = 2.0

# Beyond these multiples of its first value damping means nothing any more.
LOWEST, HIGHEST = 1e-6, 1e6


class SpfbAdaptation(NamedTuple):
    """What the next step needs to judge this one.

    Attributes:
      spfb_adaptive_damping: what is added to the damping.
      spfb_reduction_ratio: actual over predicted decrease, of the last steps; 1 before there are any.
      adaptation_value: the objective before the last step; infinite before there is one.
      adaptation_params: the parameters before the last step.
      adaptation_step: the last step, before the learning rate.
      adaptation_slope: g's of it.
      adaptation_curvature: s'(C + damping I) s of it, without the adaptive part of the damping.
      adaptation_sums: discounted sums, over steps, of 1, of the actual decrease, of the predicted one, and of the
        square of their difference.
    """

    spfb_adaptive_damping: Float[Array, ""]
    spfb_reduction_ratio: Float[Array, ""]
    adaptation_value: Float[Array, ""]
    adaptation_params: Any
    adaptation_step: Any
    adaptation_slope: Float[Array, ""]
    adaptation_curvature: Float[Array, ""]
    adaptation_sums: Float[Array, "4"]


def first_adaptation(params: Any, initial: Any, dtype: Any) -> SpfbAdaptation:
    """Before the first step. `params` in float32 at least."""

    def number(x):
        return jnp.array(x, dtype)

    return SpfbAdaptation(
        spfb_adaptive_damping=number(initial),
        spfb_reduction_ratio=number(1),
        adaptation_value=number(jnp.inf),
        adaptation_params=trees.zeros_like(params),
        adaptation_step=trees.zeros_like(params),
        adaptation_slope=number(0),
        adaptation_curvature=number(0),
        adaptation_sums=jnp.zeros(4, dtype),
    )


def adapted(state: SpfbAdaptation, params: Any, value: Float[Array, ""], initial: Any) -> SpfbAdaptation:
    """Judge the last step by the loss `value` at `params`, where it led, and set the damping of the next.

    The step is what the parameters moved by, seen along the direction: so a learning rate, or whatever else follows in
    a chain, is accounted for without being known.
    """
    s = state.adaptation_step
    moved = trees.dot(s, trees.add_scaled(state.adaptation_params, jnp.array(-1.0), params))
    ss = trees.dot(s, s)
    eta = moved / jnp.where(ss > 0, ss, 1)
    predicted = eta * state.adaptation_slope - eta**2 / 2 * state.adaptation_curvature
    actual = state.adaptation_value - value
    known = jnp.isfinite(state.adaptation_value) & (ss > 0) & (predicted > 0)
    new = jnp.stack([jnp.ones_like(actual), actual, predicted, (actual - predicted) ** 2])
    # A loss that is not finite, or whose square is not: sums that took it in would never be finite again.
    broken = known & ~jnp.all(jnp.isfinite(new))
    counted = known & ~broken
    sums = jnp.where(counted, MEMORY * state.adaptation_sums + new, state.adaptation_sums)
    _, actual, predicted, squares = sums / jnp.where(sums[0] > 0, sums[0], 1)
    # The variance of the differences, over how many of them the averages are worth.
    error = STANDARD_ERRORS * jnp.sqrt(jnp.maximum(squares - (actual - predicted) ** 2, 0) / jnp.maximum(sums[0], 1))
    grows = broken | (counted & (actual + error < POOR * predicted))
    shrinks = counted & (actual - error > GOOD * predicted)
    factor = jnp.where(grows, GROWTH, jnp.where(shrinks, 1 / SHRINKAGE, 1)).astype(ss.dtype)
    initial = jnp.asarray(initial, ss.dtype)
    damping = jnp.clip(state.spfb_adaptive_damping * factor, LOWEST * initial, HIGHEST * initial)
    ratio = actual / jnp.where(predicted > 0, predicted, 1)
    return state._replace(
        spfb_adaptive_damping=damping,
        spfb_reduction_ratio=jnp.where(counted, ratio, jnp.where(broken, 0, state.spfb_reduction_ratio)),
        adaptation_sums=jnp.where(broken, 0, sums),
    )


def remember(
    state: SpfbAdaptation, params: Any, value: Float[Array, ""], s: Any, slope: Array, curvature: Array
) -> SpfbAdaptation:
    """What `adapted` will need after the step along `s` from `params`."""
    return state._replace(
        adaptation_value=value,
        adaptation_params=params,
        adaptation_step=s,
        adaptation_slope=slope,
        adaptation_curvature=curvature,
    )
