"""Damped linear systems (C + damping I) s = g, for C given as an array.

Each function takes one system. Damping must be above zero, because every curvature of a log-partition function is
singular; a damping that is not makes the result NaN. Products are taken in full precision: the default of accelerators
would undo the factorisation's.
"""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve
from jaxtyping import Array, Float

from qbound.types import Scalar

HIGHEST = jax.lax.Precision.HIGHEST

__all__ = ["HIGHEST", "add_to_diagonal", "gram", "solve_dense", "solve_factored", "solve_scaled", "times"]


def times(a: Array, b: Array) -> Array:
    """The product of two arrays, of which one may be a vector."""
    return jnp.matmul(a, b, precision=HIGHEST)


def gram(factor: Float[Array, "r d"]) -> Float[Array, "d d"]:
    """R'R."""
    return jnp.matmul(factor.T, factor, precision=HIGHEST)


def solve_dense(matrix: Float[Array, "d d"], g: Float[Array, " d"], damping: Scalar) -> Float[Array, " d"]:
    """Cholesky: O(d^3). NaN for a matrix that is not finite: a factorisation could divide by infinity."""
    matrix = add_to_diagonal(matrix, damping)
    matrix = jnp.where(jnp.all(jnp.isfinite(matrix)), matrix, jnp.nan)
    return cho_solve(cho_factor(matrix), g)


def solve_factored(factor: Float[Array, "r d"], g: Float[Array, " d"], damping: Scalar) -> Float[Array, " d"]:
    """For C = R'R with R the `factor`: O(r d min(r, d)).

    With fewer rows than columns, Woodbury's identity in the space of rows:
    s = (g - R'(damping I + RR')^-1 R g) / damping.
    """
    rows, columns = factor.shape
    if rows >= columns:
        return solve_dense(gram(factor), g, damping)
    rows_of_g = jnp.matmul(factor, g, precision=HIGHEST)
    return (g - jnp.matmul(factor.T, solve_dense(gram(factor.T), rows_of_g, damping), precision=HIGHEST)) / damping


def solve_scaled(matrix: Float[Array, "d d"], g: Float[Array, " d"]) -> Float[Array, " d"]:
    """C s = g by Cholesky, with every parameter in a scale of its own, so that none drowns in rounding.

    Some damping keeps the factorisation alive: one unit of rounding if that is enough, as many as it can take if not.
    """
    diagonal = jnp.diag(matrix)
    scale = 1 / jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1))
    matrix = scale[:, None] * matrix * scale[None, :]
    eps = jnp.finfo(g.dtype).eps
    s = solve_dense(matrix, scale * g, eps)
    sound = jnp.all(jnp.isfinite(s))
    return scale * jax.lax.cond(sound, lambda: s, lambda: solve_dense(matrix, scale * g, 4 * g.size * eps))


def add_to_diagonal(matrix: Float[Array, "d d"], number: Scalar) -> Float[Array, "d d"]:
    """C + number I."""
    return matrix + number * jnp.eye(matrix.shape[0], dtype=matrix.dtype)
