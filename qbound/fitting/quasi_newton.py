r"""Steps of one pass each: L-BFGS with the Kronecker-factored curvature as its metric.

With S and Y (k, N) the last steps and the changes of the gradient along them, the oldest first, R the upper triangle of
S Y' with diagonal D, P a preconditioner and gamma its scale, the direction for a gradient g is

.. math::

    R a = S g, \qquad r = \gamma P (g - Y' a), \qquad R' c = D a - Y r, \qquad s = r + S' c

These are the two loops of Nocedal (1980) as two triangular systems. P may be another one in each step: here it has the
label curvature of where the step begins. At W = 0 the Hessian is a Kronecker product, and P about its inverse.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qbound import compiler
from qbound.fitting.factors import Core, InputFactor, label_factor, solve
from qbound.fitting.objective import Data, Point, centred, evaluate
from qbound.linalg.dense import times

__all__ = ["Memory", "Walk", "look", "no_memory", "walk"]


# How many steps to remember.
_MEMORY = 10


# Added to the preconditioner, in its mean eigenvalues.
_RELATIVE_DAMPING = 5e-4


# A step is taken if the objective does not rise by more than so many units of its rounding, and its slope at the end,
# uphill, is at most so large a part of that at the start (Hager and Zhang 2005): rounding hides differences of the
# objective long before those of slopes. Else shorter ones are tried, so many at most, each by a factor in between.
_NOISE, _STEEPEST, _TRIALS, _SHORTEST, _LONGEST = 4, 0.8, 10, 0.1, 0.5


# Steps have stalled after so many in which the gradient did not fall below so large a part of its least value, nor the
# objective by more than its noise.
_PATIENCE, _PROGRESS = 5, 0.9


_Precondition = Callable[[Float[Array, "n e"]], Float[Array, "n e"]]


class Memory(NamedTuple):
    """Of the last steps.

    Attributes:
      steps: S, the oldest first; zeros where there is none yet.
      changes: Y.
      scale: gamma.
    """

    steps: Float[Array, "k n e"]
    changes: Float[Array, "k n e"]
    scale: Float[Array, ""]


class Walk(NamedTuple):
    """Where steps have led.

    Attributes:
      point: the last one that was taken.
      memory: for more steps.
      steps: how many there were.
      least: of the gradient's largest entry.
      idle: how many steps ago there was progress.
      goes_on: whether there was a step to take.
    """

    point: Point
    memory: Memory
    steps: Int[Array, ""]
    least: Float[Array, ""]
    idle: Int[Array, ""]
    goes_on: Bool[Array, ""]


def no_memory(params: Float[Array, "n e"]) -> Memory:
    """Before the first step."""
    zeros = np.zeros((_MEMORY, *params.shape), params.dtype)
    return Memory(*jax.device_put((zeros, zeros, np.ones((), params.dtype))))


@compiler.jit
def look(data: Data, l2: Float[Array, " e"], params: Float[Array, "n e"]) -> Point:
    """The point to start from."""
    return evaluate(data, l2, centred(params))


@compiler.jit
def walk(
    data: Data,
    l2: Float[Array, " e"],
    point: Point,
    memory: Memory,
    inputs: InputFactor,
    core: Core | None,
    tolerance: Float[Array, ""],
    max_steps: Int[Array, ""],
) -> Walk:
    """Steps until the largest entry of the gradient is within a tolerance, or there are none that gain anything.

    Args:
      data: the examples.
      l2: lambda, for each input.
      point: where to start.
      memory: of the steps before.
      inputs: the factor of inputs.
      core: of the preconditioner, or None.
      tolerance: of the gradient.
      max_steps: the most steps to take.
    """

    def unfinished(walk: Walk):
        return walk.goes_on & (walk.point.size > tolerance) & (walk.steps < max_steps)

    def step(walk: Walk) -> Walk:
        point = walk.point
        labels = label_factor(point.label_curvature)

        def precondition(r):
            return solve(labels, inputs, r, jnp.max(l2), _RELATIVE_DAMPING, core)

        s = _direction(walk.memory, point.gradient, precondition)
        new, _, is_taken = _search(data, l2, point, s)
        memory = _remember(walk.memory, new.params - point.params, new.gradient - point.gradient, precondition)
        gains = (new.size < _PROGRESS * walk.least) | (new.objective < point.objective - _noise(point))
        idle = jnp.where(gains, 0, walk.idle + 1)
        return Walk(
            point=jax.tree.map(lambda new, old: jnp.where(is_taken, new, old), new, point),
            memory=memory,
            steps=walk.steps + is_taken.astype(walk.steps.dtype),
            least=jnp.minimum(walk.least, new.size),
            idle=idle,
            goes_on=is_taken & (idle < _PATIENCE),
        )

    zero = jnp.zeros((), jnp.int32)
    start = Walk(point, memory, zero, point.size, zero, jnp.array(True))
    return jax.lax.while_loop(unfinished, step, start)


def _direction(memory: Memory, g: Float[Array, "n e"], precondition: _Precondition) -> Float[Array, "n e"]:
    """About the solution of H s = g."""
    k = len(memory.steps)
    s, y = memory.steps.reshape(k, -1), memory.changes.reshape(k, -1)
    products = times(s, y.T)
    d = jnp.diag(products)
    # What is not there yet is zeros, and has no part in the solutions.
    d = jnp.where(d > 0, d, 1)
    r = jnp.triu(products, 1) + jnp.diag(d)
    a = jax.scipy.linalg.solve_triangular(r, times(s, g.reshape(-1, 1)))
    p = memory.scale * precondition(g - times(y.T, a).reshape(g.shape))
    c = jax.scipy.linalg.solve_triangular(r, d[:, None] * a - times(y, p.reshape(-1, 1)), trans=1)
    return p + times(s.T, c).reshape(g.shape)


def _search(
    data: Data, l2: Float[Array, " e"], point: Point, s: Float[Array, "n e"]
) -> tuple[Point, Int[Array, ""], Bool[Array, ""]]:
    """The first of W - eta s, eta = 1 and less, that is good enough; how many were tried, and whether one was."""
    g = point.gradient
    slope = jnp.sum(g * s)
    most = point.objective + _noise(point)

    def is_searching(carry):
        trials, _, _, is_taken = carry
        return ~is_taken & (trials < _TRIALS)

    def one(carry):
        trials, eta, _, _ = carry
        new = evaluate(data, l2, point.params - eta * s)
        rise = -jnp.sum(new.gradient * s)
        is_taken = (slope > 0) & (new.objective <= most) & (rise <= _STEEPEST * slope)
        # Where a parabola with these slopes is least.
        part = jnp.clip(slope / (slope + rise), _SHORTEST, _LONGEST)
        return trials + 1, eta * jnp.where(jnp.isfinite(part), part, _SHORTEST), new, is_taken

    start = jnp.zeros((), jnp.int32), jnp.ones_like(slope), point, jnp.array(False)
    trials, _, new, is_taken = jax.lax.while_loop(is_searching, one, start)
    return new, trials, is_taken


def _noise(point: Point) -> Float[Array, ""]:
    """What differences of the objective are not known to."""
    return _NOISE * jnp.finfo(point.objective.dtype).eps * jnp.abs(point.objective)


def _remember(memory: Memory, s: Float[Array, "n e"], y: Float[Array, "n e"], precondition: _Precondition) -> Memory:
    """The objective is convex: s'y > 0, but for rounding, and then there is nothing to learn from the step."""
    sy, yy = jnp.sum(s * y), jnp.sum(y * precondition(y))
    is_usable = (sy > 0) & (yy > 0) & jnp.isfinite(sy / yy)

    def appended(old: Array, new: Array) -> Array:
        kept: Array = jnp.where(is_usable, jnp.concatenate([old[1:], new[None]]), old)  # pyright: ignore[reportAssignmentType]
        return kept

    scale = jnp.where(is_usable, sy / yy, memory.scale)
    return Memory(appended(memory.steps, s), appended(memory.changes, y), scale)
