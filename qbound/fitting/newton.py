"""Newton's method on a linear softmax model: certified steps on all examples, and steps on a sample."""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qbound import compiler
from qbound.curvature.kronecker import InputFactor
from qbound.fitting.factors import ExactBlock, kronecker_solve, label_factor
from qbound.fitting.line import step_length
from qbound.fitting.objective import LinearObjective, LinearPoint, centred, contrasts, sample
from qbound.fitting.step import descent_direction, forcing_tolerance
from qbound.linalg import cg
from qbound.linalg.dense import solve_scaled, times

# How Newton's system is solved: by a factorisation, or by CG with a Kronecker-factored or a diagonal preconditioner.
NewtonSolver = Literal["dense", "kronecker", "diagonal"]

# The most iterations of CG.
_MAX_CG_STEPS = 200
# The largest relative residual at which CG may stop.
_LOOSEST = 0.1
# The damping of the Kronecker-factored preconditioner, in its mean eigenvalues.
_RELATIVE_DAMPING = 0.01


class Proposal(NamedTuple):
    """The next step.

    Attributes:
      params: where it leads.
      certified: what the objective falls by, at least.
      actual: what it falls by.
      local: whether the local certificate won.
      length: what the direction was multiplied by.
      cg_steps: iterations of CG for its direction.
    """

    params: Float[Array, "n e"]
    certified: Float[Array, ""]
    actual: Float[Array, ""]
    local: Array
    length: Float[Array, ""]
    cg_steps: Int[Array, ""]


@compiler.jit
def evaluate(objective: LinearObjective, params: Float[Array, "n e"]) -> LinearPoint:
    """The objective at some parameters, without the part of them that is the same for all labels."""
    return objective.evaluate(centred(params))


@functools.partial(compiler.jit, static_argnames="solver")
def newton_step(
    objective: LinearObjective,
    params: Float[Array, "n e"],
    inputs: InputFactor | None,
    block: ExactBlock | None,
    tolerance: Float[Array, ""],
    first_norm: Float[Array, ""],
    *,
    solver: NewtonSolver,
) -> tuple[LinearPoint, Proposal]:
    """The objective at some parameters, and the step to take from there; none if the gradient is in the tolerance.

    Args:
      objective: what to minimise.
      params: W.
      inputs: the factor of inputs, for the solver "kronecker".
      block: the exact block of its preconditioner, or None.
      tolerance: of the gradient norm.
      first_norm: the gradient norm at the start; 0 if this is the start.
      solver: of Newton's system.
    """
    point = objective.evaluate(centred(params), hold=True)
    zero = jnp.zeros_like(point.objective)

    def step():
        cg_tolerance = forcing_tolerance(point.gradient_norm, first_norm, tolerance, _LOOSEST)
        s, cg_steps = newton_direction(objective, point, inputs, block, cg_tolerance, solver)
        line = objective.line(point, s)
        one = jnp.ones_like(zero)
        step = step_length(line, is_local=True, search=True, eta=one)
        params = point.params - step.length * s
        return Proposal(params, step.certified, step.actual, step.local, step.length, cg_steps)

    def stay():
        return Proposal(point.params, zero, zero, jnp.array(False), zero, jnp.zeros((), jnp.int32))

    proposal = jax.lax.cond(point.gradient_norm > tolerance, step, stay)
    return point._replace(probabilities=None), proposal


@compiler.jit
def newton_on_sample(
    objective: LinearObjective,
    rows: Int[Array, " k"],
    params: Float[Array, "n e"],
    tolerance: Float[Array, ""],
    max_steps: Int[Array, ""],
) -> tuple[Float[Array, "n e"], Int[Array, ""]]:
    """Where steps on some of the rows lead, with line searches and no certificates; and how many steps it took.

    They end when the gradient norm is within a tolerance, or the objective of the sample does not fall.
    """
    on_sample = LinearObjective(sample(objective.data, rows, params.dtype), objective.l2, objective.norm)

    def unfinished(carry):
        steps, point, _, falls = carry
        return falls & (point.gradient_norm > tolerance) & (steps < max_steps)

    def step(carry):
        steps, point, _, _ = carry
        s, _ = newton_direction(on_sample, point, None, None, tolerance, "dense")
        length = on_sample.line(point, s).search(jnp.ones_like(point.objective))
        new = on_sample.evaluate(point.params - length * s)
        return steps + 1, new, point.params, new.objective < point.objective

    first = on_sample.evaluate(centred(params))
    start = jnp.zeros((), jnp.int32), first, first.params, jnp.array(True)
    steps, last, before, falls = jax.lax.while_loop(unfinished, step, start)
    return jnp.where(falls, last.params, before), steps


def newton_direction(
    objective: LinearObjective, point: LinearPoint, inputs, block, cg_tolerance, solver: NewtonSolver
) -> tuple[Array, Array]:
    """An approximate solution of H s = g along which the objective falls, and the iterations of CG."""
    g = centred(point.gradient)
    if solver == "dense":
        q = contrasts(len(g), g.dtype)
        z = solve_scaled(objective.hessian(point.params), times(q.T, g).reshape(-1))
        s = times(q, z.reshape(-1, g.shape[1]))
        return descent_direction(s, point.gradient), jnp.zeros((), jnp.int32)
    if solver == "kronecker":
        labels = label_factor(point.label_curvature)

        def precondition(r):
            return kronecker_solve(labels, inputs, r, jnp.max(objective.l2), _RELATIVE_DAMPING, block)
    else:
        scale = objective.hessian_diagonal(point.params)
        scale = 1 / jnp.where(scale > 0, scale, 1)

        def precondition(r):
            return centred(scale * r)

    product = functools.partial(objective.hessian_product, point)
    limits = {"max_steps": _MAX_CG_STEPS, "tolerance": cg_tolerance}
    s, steps = cg.iterate(product, g, **limits, precondition=precondition)
    return descent_direction(s, point.gradient), steps
