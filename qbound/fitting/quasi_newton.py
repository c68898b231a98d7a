r"""Steps of one pass each: L-BFGS with the Kronecker-factored curvature as its metric.

With S and Y (k, N) the last steps and the changes of the gradient along them, the oldest first, R the upper triangle of
S Y' with diagonal D, P a preconditioner and gamma its scale, the direction for a gradient g is

.. math::

    R a = S g, \qquad r = \gamma P (g - Y' a), \qquad R' c = D a - Y r, \qquad s = r + S' c

These are the two loops of Nocedal (1980) as two triangular systems. P may be another one in each step: here it has the
label curvature of where the step begins. At W = 0 the Hessian is a Kronecker product, and P about its inverse.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qbound import compiler
from qbound.curvature.kronecker import InputFactor
from qbound.fitting.factors import ExactBlock, kronecker_solve, label_factor
from qbound.fitting.objective import LinearObjective, LinearPoint
from qbound.fitting.step import has_gained, rounding_of
from qbound.linalg.dense import times

# How many steps are remembered.
_MEMORY = 10
# The damping of the preconditioner, in its mean eigenvalues.
_RELATIVE_DAMPING = 5e-4
# A step is taken if the objective does not rise beyond rounding, and its slope at the end, uphill, is at most this part
# of that at the start (Hager and Zhang 2005): rounding hides differences of the objective long before those of slopes.
_STEEPEST = 0.8
# Otherwise shorter steps are tried, at most this many.
_TRIALS = 10
# A trial is shorter than the one before by a factor between these two.
_SHORTEST, _LONGEST = 0.1, 0.5

_Precondition = Callable[[Float[Array, "n e"]], Float[Array, "n e"]]


class LbfgsMemory(NamedTuple):
    """What is remembered of the last steps.

    Attributes:
      steps: S, the oldest first; zeros where there is none yet.
      changes: Y, the changes of the gradient.
      scale: gamma.
    """

    steps: Float[Array, "k n e"]
    changes: Float[Array, "k n e"]
    scale: Float[Array, ""]


class LbfgsSteps(NamedTuple):
    """Where steps have led.

    Attributes:
      point: the last point that was taken.
      memory: what more steps need.
      steps: how many steps there were.
      least: the least gradient norm so far.
      idle: how many steps ago there was a gain.
      goes_on: whether there may be more steps.
    """

    point: LinearPoint
    memory: LbfgsMemory
    steps: Int[Array, ""]
    least: Float[Array, ""]
    idle: Int[Array, ""]
    goes_on: Bool[Array, ""]


def empty_memory(params: Float[Array, "n e"]) -> LbfgsMemory:
    """The memory before the first step."""
    zeros = np.zeros((_MEMORY, *params.shape), params.dtype)
    return LbfgsMemory(*jax.device_put((zeros, zeros, np.ones((), params.dtype))))


@functools.partial(compiler.jit, static_argnames="patience")
def lbfgs_steps(
    objective: LinearObjective,
    point: LinearPoint,
    memory: LbfgsMemory,
    inputs: InputFactor,
    block: ExactBlock | None,
    tolerance: Float[Array, ""],
    max_steps: Int[Array, ""],
    *,
    patience: int = 5,
) -> LbfgsSteps:
    """Take steps until the gradient norm is within a tolerance, or no step gains anything.

    Args:
      objective: what to minimise.
      point: where to start.
      memory: of the steps before.
      inputs: the factor of inputs.
      block: of the preconditioner, or None.
      tolerance: of the gradient norm.
      max_steps: the most steps to take.
      patience: they have stalled after this many steps without a gain.
    """

    def unfinished(at: LbfgsSteps):
        return at.goes_on & (at.point.gradient_norm > tolerance) & (at.steps < max_steps)

    def step(at: LbfgsSteps) -> LbfgsSteps:
        point = at.point
        labels = label_factor(point.label_curvature)

        def precondition(r):
            return kronecker_solve(labels, inputs, r, jnp.max(objective.l2), _RELATIVE_DAMPING, block)

        s = lbfgs_direction(at.memory, point.gradient, precondition)
        new, is_taken = _search(objective, point, s)
        memory = _remember(at.memory, new.params - point.params, new.gradient - point.gradient, precondition)
        fall = point.objective - new.objective
        idle = jnp.where(has_gained(new.gradient_norm, at.least, fall, point.objective), 0, at.idle + 1)
        return LbfgsSteps(
            point=jax.tree.map(lambda new, old: jnp.where(is_taken, new, old), new, point),
            memory=memory,
            steps=at.steps + is_taken.astype(at.steps.dtype),
            least=jnp.minimum(at.least, new.gradient_norm),
            idle=idle,
            goes_on=is_taken & (idle < patience),
        )

    zero = jnp.zeros((), jnp.int32)
    start = LbfgsSteps(point, memory, zero, point.gradient_norm, zero, jnp.array(True))
    return jax.lax.while_loop(unfinished, step, start)


def lbfgs_direction(memory: LbfgsMemory, g: Float[Array, "n e"], precondition: _Precondition) -> Float[Array, "n e"]:
    """An approximate solution of H s = g."""
    k = len(memory.steps)
    s, y = memory.steps.reshape(k, -1), memory.changes.reshape(k, -1)
    products = times(s, y.T)
    d = jnp.diag(products)
    # Steps that are not there yet are zeros, and have no part in the solutions.
    d = jnp.where(d > 0, d, 1)
    r = jnp.triu(products, 1) + jnp.diag(d)
    a = jax.scipy.linalg.solve_triangular(r, times(s, g.reshape(-1, 1)))
    p = memory.scale * precondition(g - times(y.T, a).reshape(g.shape))
    c = jax.scipy.linalg.solve_triangular(r, d[:, None] * a - times(y, p.reshape(-1, 1)), trans=1)
    return p + times(s.T, c).reshape(g.shape)


def _search(
    objective: LinearObjective, point: LinearPoint, s: Float[Array, "n e"]
) -> tuple[LinearPoint, Bool[Array, ""]]:
    """The first of W - eta s, eta = 1 and less, that is good enough, and whether there is one."""
    slope = jnp.sum(point.gradient * s)
    most = point.objective + rounding_of(point.objective)

    def is_searching(carry):
        trials, _, _, is_taken = carry
        return ~is_taken & (trials < _TRIALS)

    def one(carry):
        trials, eta, _, _ = carry
        new = objective.evaluate(point.params - eta * s)
        rise = -jnp.sum(new.gradient * s)
        is_taken = (slope > 0) & (new.objective <= most) & (rise <= _STEEPEST * slope)
        # Where a parabola with these slopes is least.
        part = jnp.clip(slope / (slope + rise), _SHORTEST, _LONGEST)
        return trials + 1, eta * jnp.where(jnp.isfinite(part), part, _SHORTEST), new, is_taken

    start = jnp.zeros((), jnp.int32), jnp.ones_like(slope), point, jnp.array(False)
    _, _, new, is_taken = jax.lax.while_loop(is_searching, one, start)
    return new, is_taken


def _remember(
    memory: LbfgsMemory, s: Float[Array, "n e"], y: Float[Array, "n e"], precondition: _Precondition
) -> LbfgsMemory:
    """The memory with one more step. The objective is convex: s'y > 0, unless rounding leaves nothing to learn."""
    sy, yy = jnp.sum(s * y), jnp.sum(y * precondition(y))
    is_usable = (sy > 0) & (yy > 0) & jnp.isfinite(sy / yy)

    def appended(old: Array, new: Array) -> Array:
        kept: Array = jnp.where(is_usable, jnp.concatenate([old[1:], new[None]]), old)  # pyright: ignore[reportAssignmentType]
        return kept

    scale = jnp.where(is_usable, sy / yy, memory.scale)
    return LbfgsMemory(appended(memory.steps, s), appended(memory.changes, y), scale)
