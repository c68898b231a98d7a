"""Solvers of (C + c I) s = g for the curvature of a model, by name or by a cost model.

In multiplications, for b rows of n labels and p parameters, each used once for every row as in a linear model:

  cg          2 b p (steps + 1)              a jvp and a vjp for every step, and for the residual
  dense       b n^2 p + b n p^2 + p^3/3      rows of the factor, their Gram matrix, Cholesky
  woodbury    b n^2 p + (b n)^2 p + (b n)^3/3

For `qbound.linear_logits` with d inputs the Gram matrices are Kronecker products: b n^2 d^2 for dense, b^2 d + b^2 n^3
for woodbury, with no rows formed; and a batch of one costs woodbury O(n + p). "auto" takes the cheaper of the direct
solvers if it is at most `DIRECT_ADVANTAGE` times as expensive as `max_steps` of CG, and CG otherwise. A low-rank
curvature has a direct solver of its own.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import trees
from qbound.cg import Solution, checked_solution, conjugate_gradients
from qbound.curvature import Curvature, LowRank, ModelCurvature, Pieces
from qbound.models import KroneckerMap
from qbound.types import Scalar

__all__ = ["DIRECT_ADVANTAGE", "SOLVERS", "Solver", "choose_solver", "solve"]

Solver = Literal["auto", "dense", "woodbury", "cg"]
SOLVERS = ("auto", "dense", "woodbury", "cg")

# Direct solvers are exact, and their matrix products run at several times the speed of the narrow ones of CG.
DIRECT_ADVANTAGE = 8
# Direct solvers for a general model hold its Jacobian: no more than so many numbers.
JACOBIAN_LIMIT = 2**26


def solve(
    solver: Solver,
    curvature: Curvature,
    g: Any,
    damping: Float[Array, ""],
    *,
    max_steps: int,
    tolerance: Scalar,
    precondition: Callable[[Any], Any] | None = None,
    start: Any | None = None,
) -> Solution:
    """(curvature + damping I)^-1 g."""

    def product(v):
        return trees.add_scaled(curvature.mv(v), damping, v)

    if isinstance(curvature, LowRank):
        return checked_solution(product, g, curvature.solve(g, damping), jnp.zeros((), jnp.int32))
    if solver == "auto":
        solver = "cg" if precondition is not None else choose_solver(curvature, max_steps)
    if solver == "cg":
        return conjugate_gradients(
            product,
            g,
            max_steps=max_steps,
            tolerance=tolerance,
            precondition=precondition,
            start=start,
        )
    if solver == "woodbury" and not isinstance(curvature, ModelCurvature):
        raise ValueError('solver: expected "dense" or "cg" for a batch in pieces (microbatch_size=); got "woodbury"')
    by_name = {"dense": lambda c: c.solve_dense(g, damping), "woodbury": lambda c: c.solve_by_rows(g, damping)}
    return checked_solution(product, g, by_name[solver](curvature), jnp.zeros((), jnp.int32))


def choose_solver(curvature: Curvature, max_steps: int) -> Solver:
    """The solver the cost model picks."""
    p = trees.size(curvature.domain())
    if isinstance(curvature, Pieces):
        return "dense" if cheapest(*curvature.rows, p, False, max_steps) == "dense" else "cg"
    assert isinstance(curvature, ModelCurvature)
    return cheapest(*curvature.map.shape(), p, isinstance(curvature.map, KroneckerMap), max_steps)


def cheapest(b: int, n: int, p: int, kronecker: bool, max_steps: int) -> Solver:
    """The solver the cost model picks for b rows of n labels and p parameters."""
    if kronecker:
        if b == 1:
            return "woodbury"
        d = p / n
        dense, woodbury = b * n**2 * d**2, b**2 * d + b**2 * n**3
    else:
        if b * n * p > JACOBIAN_LIMIT:
            return "cg"
        rows = b * n**2 * p
        dense, woodbury = rows + b * n * p**2, rows + (b * n) ** 2 * p
    dense, woodbury = dense + p**3 / 3, woodbury + (b * n) ** 3 / 3
    cg = 2 * b * p * (max_steps + 1)
    if min(dense, woodbury) > DIRECT_ADVANTAGE * cg:
        return "cg"
    return "dense" if dense <= woodbury else "woodbury"
