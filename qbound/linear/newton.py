"""One certified step of Newton's method on all examples."""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qbound import cg
from qbound.linear.factors import InputFactor, label_factor, solve
from qbound.linear.line import bound_quadratic, line_along
from qbound.linear.objective import Data, Point, centred, contrasts, diagonal, hessian, product
from qbound.mm.length import step_length
from qbound.mm.results import Certificate
from qbound.solve import solve_scaled

__all__ = ["Proposal", "Solver", "propose"]

Solver = Literal["dense", "kronecker", "diagonal"]

# The most iterations of CG.
_MAX_CG_STEPS = 200
# Added to the preconditioner, in its mean eigenvalues.
_RELATIVE_DAMPING = 0.01


class Proposal(NamedTuple):
    """A step.

    Attributes:
      params: where it leads.
      certified: what the objective falls by, at least.
      actual: what it falls by.
      certificate: which one vouches for it, a `Certificate`.
      cg_steps: iterations of CG for its direction.
    """

    params: Float[Array, "n e"]
    certified: Float[Array, ""]
    actual: Float[Array, ""]
    certificate: Int[Array, ""]
    cg_steps: Int[Array, ""]


@functools.partial(jax.jit, static_argnames="solver")
def propose(
    data: Data,
    l2: Float[Array, " e"],
    point: Point,
    inputs: InputFactor | None,
    cg_tolerance: Float[Array, ""],
    *,
    solver: Solver,
) -> Proposal:
    """A direction from the Hessian, with a length from a certificate or a line search."""
    g = point.gradient
    s, cg_steps = _direction(data, l2, point, inputs, cg_tolerance, solver)
    usable = jnp.all(jnp.isfinite(s)) & (jnp.sum(g * s) > 0)
    s = jnp.where(usable, s, g)
    line = line_along(data, point.params, s, jnp.sum(g * s), jnp.sum(l2[None, :] * s**2))
    step = step_length(
        line,
        lambda: bound_quadratic(line),
        is_local=True,
        search=True,
        eta=jnp.ones_like(point.objective),
    )
    return Proposal(
        params=point.params - step.length * s,
        certified=step.certified,
        actual=step.actual,
        certificate=jnp.where(step.local, jnp.int32(Certificate.LOCAL), jnp.int32(Certificate.BOUND)),
        cg_steps=cg_steps,
    )


def _direction(data, l2, point: Point, inputs, cg_tolerance, solver: Solver):
    """About the solution of H s = g, and the iterations of CG."""
    g = centred(point.gradient)
    if solver == "dense":
        q = contrasts(len(g), g.dtype)
        z = solve_scaled(hessian(data, l2, point.params), (q.T @ g).reshape(-1))
        return q @ z.reshape(-1, g.shape[1]), jnp.zeros((), jnp.int32)
    if solver == "kronecker":
        labels = label_factor(point.label_curvature)

        def precondition(r):
            return solve(labels, inputs, r, jnp.max(l2), _RELATIVE_DAMPING)
    else:
        scale = diagonal(data, l2, point.params)
        scale = 1 / jnp.where(scale > 0, scale, 1)

        def precondition(r):
            return centred(scale * r)

    return cg.iterate(
        lambda v: product(data, l2, point.params, v),
        g,
        max_steps=_MAX_CG_STEPS,
        tolerance=cg_tolerance,
        precondition=precondition,
    )[:2]
