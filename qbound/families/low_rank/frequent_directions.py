r"""Frequent directions: a sketch of the rows seen, and how far at most it lies below them.

A sketch B of k rows stands for all rows A so far: 0 <= A'A - B'B <= Delta I. A block of c rows R is appended to it. The
Gram matrix of these, G = [B; R][B; R]', has eigenvalues theta_1 >= theta_2 >= ... The k leading directions stay, each
with delta = theta_{k+1} less than it had, the others go, and Delta grows by delta:

  A'A <= B'B + Delta I,    (k + 1) Delta <= |A|^2 - |B|^2,    (k + 1 - j) Delta <= |A - A_j|^2 for every j <= k,

with A_j the best approximation of rank j. Everything is done in the space of the k + c rows. The method is
that of Liberty (2013), its limits are those of Ghashami, Liberty, Phillips and Woodruff (2016).

For large blocks an eigendecomposition would be most of the cost. There, the directions are those of two subspace
iterations from the last sketch. They need not be exact, because a Cholesky factorisation decides whether the bound
holds: for U with orthonormal columns and U'GU = diag(theta), shrinking by sigma leaves a residual of at most delta if
and only if

  delta (I + U diag(max(theta/sigma - 1, 0)) U') - G >= 0.

sigma is a lower estimate of theta_{k+1} and delta is `SLACK` sigma, so the limits above are exceeded by that factor at
most. If the factorisation fails, the eigendecomposition is computed after all.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qbound.families.low_rank.rows import DenseRows, Rows
from qbound.linalg.dense import HIGHEST, safe_sqrt

SLACK = 1.1

# Up to this many rows, the eigendecomposition is faster than what avoids it.
SMALL = 64

# This many rows in one go: of blocks of 108, the smallest by default, the allowance is then at most 0.06 % of the
# largest square in float32.
LARGEST = 2**14


class Sketch(NamedTuple):
    """B, whose rows are orthogonal, and Delta."""

    stack: Float[Array, "..."]  # B, laid out as the rows have it
    squares: Float[Array, " k"]  # |B_i|^2
    delta: Float[Array, ""]


class _Shrunk(NamedTuple):
    """What becomes of k + c rows."""

    directions: Float[Array, "m k"]  # U
    squares: Float[Array, " k"]  # theta
    shrinkage: Float[Array, ""]  # sigma
    delta: Float[Array, ""]


def default_block(rank: int) -> tuple[int, int]:
    """How many rows to append at a time, and how many to fetch.

    Larger blocks are tighter, and cheaper by the row until the c x c matrices count. Products with the sketch, which
    has as many numbers as k gradients, are cheaper by the row still for a few small blocks together.
    """
    block = 100 + 8 * rank
    return block, block * max(1, 400 // block)


def append(sketch: Sketch, rows: Rows, block: int) -> Sketch:
    """The sketch of what it stands for and of `rows`, appended in parts of about `block`.

    The sketch after each part is kept as a combination of the first one and of all rows, and is formed at the end.
    """
    k, gram = sketch.squares.size, rows.products()
    mixed = jnp.concatenate([rows.products_with(sketch.stack), gram], axis=1)  # with the sketch, and with all rows
    c = gram.shape[0]
    parts = next(parts for parts in range(max(1, c // block), 0, -1) if c % parts == 0)
    size = c // parts

    def part(carry, number):
        combination, squares, delta = carry
        first = number * size
        with_sketch = jnp.matmul(jax.lax.dynamic_slice_in_dim(mixed, first, size), combination, precision=HIGHEST)
        own = jax.lax.dynamic_slice(gram, (first, first), (size, size))
        upper = jnp.concatenate([jnp.diag(squares), with_sketch.T], axis=1)
        lower = jnp.concatenate([with_sketch, own], axis=1)
        shrunk = _shrink(jnp.concatenate([upper, lower]), k)
        squares = jnp.maximum(shrunk.squares - shrunk.shrinkage, 0)
        kept = safe_sqrt(squares / jnp.where(shrunk.squares > 0, shrunk.squares, 1))
        new = shrunk.directions * kept[None, :]
        combination = jnp.matmul(combination, new[:k], precision=HIGHEST)
        combination = jax.lax.dynamic_update_slice_in_dim(combination, new[k:], k + first, axis=0)
        return (combination, squares, _above(delta + shrunk.delta, shrunk.squares)), None

    start = jnp.eye(k + c, k, dtype=gram.dtype), sketch.squares, sketch.delta
    (combination, squares, delta), _ = jax.lax.scan(part, start, jnp.arange(parts))
    return Sketch(rows.combine(sketch.stack, combination[:k], combination[k:]), squares, delta)


def merge(sketch: Sketch, other: Sketch) -> Sketch:
    """The sketch of what both stand for."""
    flat = Sketch(_flat(sketch.stack), sketch.squares, sketch.delta + other.delta)
    merged = append(flat, DenseRows(_flat(other.stack)), block=other.squares.size)
    return Sketch(merged.stack.reshape(sketch.stack.shape), merged.squares, merged.delta)


def _flat(stack: Array) -> Array:
    return stack.reshape(stack.shape[0], -1)


def _above(delta: Array, squares: Array) -> Array:
    """Delta with an allowance for the rounding of one step, of its own and of the rows: twice the most ever lost."""
    eps = jnp.finfo(delta.dtype).eps
    return (1 + eps) * delta + 32 * eps * jnp.max(squares)


def _shrink(gram: Float[Array, "m m"], k: int) -> _Shrunk:
    columns = k + max(k, 10)
    if gram.shape[0] <= max(SMALL, 2 * columns):
        return _by_eigenvectors(gram, k)
    shrunk, holds = _by_iteration(gram, k, columns)
    return jax.lax.cond(holds, lambda: shrunk, lambda: _by_eigenvectors(gram, k))


def _by_eigenvectors(gram, k) -> _Shrunk:
    theta, u = jnp.linalg.eigh(gram, symmetrize_input=False)
    delta = jnp.maximum(theta[-k - 1], 0)
    return _Shrunk(u[:, -k:], theta[-k:], delta, delta)


def _by_iteration(gram, k, columns) -> tuple[_Shrunk, Array]:
    """And whether the bound holds."""
    m = gram.shape[0]
    start = np.random.default_rng(0).choice([-1.0, 1.0], size=(m, columns)) / np.sqrt(m)
    start[:k] = np.eye(k, columns)
    y = jnp.matmul(gram, jnp.asarray(start, gram.dtype), precision=HIGHEST)
    y = y / safe_sqrt(jnp.maximum(jnp.sum(y**2, axis=0), jnp.finfo(y.dtype).tiny))[None, :]
    u, _ = jnp.linalg.qr(jnp.matmul(gram, y, precision=HIGHEST))
    projected = jnp.matmul(u.T, jnp.matmul(gram, u, precision=HIGHEST), precision=HIGHEST)
    theta, rotation = jnp.linalg.eigh(projected, symmetrize_input=False)
    u, sigma, theta = jnp.matmul(u, rotation[:, -k:], precision=HIGHEST), theta[-k - 1], theta[-k:]
    delta = SLACK * sigma
    stretch = delta * jnp.maximum(theta / sigma - 1, 0)
    gap = jnp.matmul(u * stretch[None, :], u.T, precision=HIGHEST) - gram + delta * jnp.eye(m, dtype=gram.dtype)
    # NaN unless positive definite; so too where sigma is not above 0.
    holds = jnp.isfinite(jnp.linalg.cholesky(gap, symmetrize_input=False)[-1, -1])
    return _Shrunk(u, theta, sigma, delta), holds & (sigma > 0)
