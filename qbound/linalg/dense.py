"""Dense linear algebra: damped systems, sums of many numbers, and roots."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve
from jaxtyping import Array, Float

from qbound import trees
from qbound.types import Scalar

# Damped linear systems (C + damping I) s = g, for C given as an array.
#
# Each function takes one system. Damping must be above zero, because every curvature of a log-partition function is
# singular; a damping that is not makes the result NaN. Products are taken in full precision: the default of
# accelerators would undo the factorisation's.

HIGHEST = jax.lax.Precision.HIGHEST


def times(a: Array, b: Array) -> Array:
    """The product of two arrays, of which one may be a vector."""
    return jnp.matmul(a, b, precision=HIGHEST)


def gram(factor: Float[Array, "r d"]) -> Float[Array, "d d"]:
    """The matrix R'R."""
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
    """Solve C s = g by Cholesky, with every parameter in a scale of its own, so that none drowns in rounding.

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


# Sums of many numbers whose rounding does not grow with how many they are.
#
# XLA is free to add one after the other, and matrix products do: the sum of 30,000 equal numbers in float32 is then
# off by a thousand units of rounding. Here it is off by a few, whatever the backend.
#
# Where the leading axis is divided over the devices of an explicit mesh it cannot be cut further, and is summed as XLA
# does.

# This many numbers are added one after the other.
BLOCK = 32


def sum_of_many(x: Float[Array, "b ..."]) -> Float[Array, "..."]:
    """The sum over the leading axis: blocks of it, then halves of these, so that errors grow with the logarithm."""
    count = x.shape[0]
    if _is_divided(x):
        return jnp.sum(x, axis=0)
    if count > BLOCK:
        whole = count // BLOCK * BLOCK
        blocks = jnp.sum(x[:whole].reshape(-1, BLOCK, *x.shape[1:]), axis=1)
        x = blocks if whole == count else jnp.concatenate([blocks, jnp.sum(x[whole:], axis=0, keepdims=True)])
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        # Explicit additions: two reductions in a row would be made one again by the compiler.
        pairs = x[:half] + x[half : 2 * half]
        x = pairs if x.shape[0] == 2 * half else jnp.concatenate([pairs, x[-1:]])
    return jnp.sum(x, axis=0)


def weighted_sum_of_many(weights: Float[Array, " b"], tree: Any) -> Any:
    """sum_j w_j x_j over the leading axis of every leaf, without the terms of weight 0."""
    return jax.tree.map(sum_of_many, trees.weighted(weights, tree))


def gram_of_many(rows: Float[Array, "r d"]) -> Float[Array, "d d"]:
    """The matrix R'R, for more rows than columns: the sum of those of parts, which are not larger than R together."""
    count, d = rows.shape
    part = max(BLOCK, d)
    whole = count // part * part
    if whole <= part or _is_divided(rows):
        return gram(rows)
    parts = rows[:whole].reshape(-1, part, d)
    products = jnp.einsum("prd,pre->pde", parts, parts, precision=HIGHEST)
    return sum_of_many(products) + gram(rows[whole:])


def _is_divided(x: Array) -> bool:
    """Whether the leading axis lies on several devices of an explicit mesh."""
    return any(axis is not None for axis in jax.typeof(x).sharding.spec[:1])


# Square roots that stay differentiable where the number, or the matrix, is zero.


def safe_sqrt(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The square root, with derivative 0 at 0.

    The weights that are exactly 0, of removed labels and of the first one, stay 0 when logits move, so that this is the
    right derivative of what is made of a factor.
    """
    zero = x == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, x)))


def symmetric_root(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """R with R'R = `matrix`, also where it is singular; eigenvalues below zero by rounding count as zero."""
    eigenvalues, eigenvectors = jnp.linalg.eigh(matrix)
    return safe_sqrt(jnp.maximum(eigenvalues, 0))[:, None] * eigenvectors.T
