"""Newton's method on all examples, step by certified step."""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qbound import compiler
from qbound.fitting.block_line import bound_quadratic, line_along
from qbound.fitting.factors import Core, InputFactor, label_factor, solve
from qbound.fitting.line import Line, step_length
from qbound.fitting.objective import Data, Point, centred, contrasts, diagonal, evaluate, hessian, product, sample
from qbound.linalg import cg
from qbound.linalg.dense import solve_scaled, times

__all__ = ["Proposal", "Solver", "advance", "descend"]


Solver = Literal["dense", "kronecker", "diagonal"]


# The most iterations of CG, and the largest relative residual to stop at.
_MAX_CG_STEPS, _LOOSEST = 200, 0.1


# Added to the preconditioner, in its mean eigenvalues.
_RELATIVE_DAMPING = 0.01


class Proposal(NamedTuple):
    """A step.

    Attributes:
      params: where it leads.
      certified: what the objective falls by, at least.
      actual: what it falls by.
      cg_steps: iterations of CG for its direction.
    """

    params: Float[Array, "n e"]
    certified: Float[Array, ""]
    actual: Float[Array, ""]
    cg_steps: Int[Array, ""]


@functools.partial(compiler.jit, static_argnames="solver")
def advance(
    data: Data,
    l2: Float[Array, " e"],
    params: Float[Array, "n e"],
    inputs: InputFactor | None,
    core: Core | None,
    tolerance: Float[Array, ""],
    first_size: Float[Array, ""],
    *,
    solver: Solver,
) -> tuple[Point, Proposal]:
    """The objective at some parameters, and the step to take from there; none where the gradient is in the tolerance.

    Args:
      data: the examples.
      l2: lambda, for each input.
      params: W.
      inputs: the factor of inputs, for the solver "kronecker".
      core: of its preconditioner, or None.
      tolerance: of the largest entry of the gradient.
      first_size: what that was at the start; 0 if this is the start.
      solver: of Newton's system.
    """
    point = evaluate(data, l2, centred(params), hold=True)
    zero = jnp.zeros_like(point.objective)

    def step():
        # CG stops at a relative residual of sqrt(|g|/|g_0|), so that late directions become exact; but the last step
        # needs to reach the tolerance and no more.
        rough = jnp.minimum(_LOOSEST, jnp.sqrt(point.size / first_size))
        cg_tolerance = jnp.maximum(rough, tolerance / (2 * point.size))
        s, cg_steps = _direction(data, l2, point, inputs, core, cg_tolerance, solver)
        s, line = _line(data, l2, point, s)
        one = jnp.ones_like(zero)
        step = step_length(line, lambda: bound_quadratic(line), is_local=True, search=True, eta=one)
        return Proposal(point.params - step.length * s, step.certified, step.actual, cg_steps)

    def stay():
        return Proposal(point.params, zero, zero, jnp.zeros((), jnp.int32))

    proposal = jax.lax.cond(point.size > tolerance, step, stay)
    return point._replace(probabilities=None), proposal


@compiler.jit
def descend(
    data: Data,
    rows: Int[Array, " k"],
    l2: Float[Array, " e"],
    params: Float[Array, "n e"],
    tolerance: Float[Array, ""],
    max_steps: Int[Array, ""],
) -> tuple[Float[Array, "n e"], Int[Array, ""]]:
    """Where steps on some of the rows lead, with line searches and no certificates; and how many it took.

    They end when the largest entry of the gradient is within a tolerance, or the objective does not fall.
    """
    data = sample(data, rows, params.dtype)

    def unfinished(carry):
        steps, point, _, falls = carry
        return falls & (point.size > tolerance) & (steps < max_steps)

    def step(carry):
        steps, point, _, _ = carry
        s, _ = _direction(data, l2, point, None, None, tolerance, "dense")
        s, line = _line(data, l2, point, s)
        new = evaluate(data, l2, point.params - line.search(jnp.ones_like(point.objective)) * s)
        return steps + 1, new, point.params, new.objective < point.objective

    first = evaluate(data, l2, centred(params))
    start = jnp.zeros((), jnp.int32), first, first.params, jnp.array(True)
    steps, last, before, falls = jax.lax.while_loop(unfinished, step, start)
    return jnp.where(falls, last.params, before), steps


def _line(data: Data, l2, point: Point, s) -> tuple[Array, Line]:
    """A direction, the gradient if rounding has left no other, and the line along it."""
    g = point.gradient
    usable = jnp.all(jnp.isfinite(s)) & (jnp.sum(g * s) > 0)
    direction: Array = jnp.where(usable, s, g)  # pyright: ignore[reportAssignmentType]
    slope, penalty = jnp.sum(g * direction), jnp.sum(l2[None, :] * direction**2)
    return direction, line_along(data, point.params, direction, slope, penalty)


def _direction(data, l2, point: Point, inputs, core, cg_tolerance, solver: Solver):
    """About the solution of H s = g, and the iterations of CG."""
    g = centred(point.gradient)
    if solver == "dense":
        q = contrasts(len(g), g.dtype)
        z = solve_scaled(hessian(data, l2, point.params), times(q.T, g).reshape(-1))
        return times(q, z.reshape(-1, g.shape[1])), jnp.zeros((), jnp.int32)
    if solver == "kronecker":
        labels = label_factor(point.label_curvature)

        def precondition(r):
            return solve(labels, inputs, r, jnp.max(l2), _RELATIVE_DAMPING, core)
    else:
        scale = diagonal(data, l2, point.params)
        scale = 1 / jnp.where(scale > 0, scale, 1)

        def precondition(r):
            return centred(scale * r)

    return cg.iterate(
        lambda v: product(data, l2, point, v),
        g,
        max_steps=_MAX_CG_STEPS,
        tolerance=cg_tolerance,
        precondition=precondition,
    )
