r"""Leading eigenvectors of a positive semidefinite matrix, from few products with it.

Nyström's approximation from the space that a matrix maps a fixed random one to, stabilised by a shift [FTU23]:

.. math:: C \approx (C Q) (Q^\top C Q)^{-1} (C Q)^\top = U \operatorname{diag}(\lambda) U^\top

It is below C. With r eigenvalues that stand out it takes O(r e^2), where all eigenvectors take O(e^3), and the products
are with wide matrices.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qbound.linalg.dense import times


def leading_eigenvectors(matrix: Float[Array, "e e"], rank: int) -> tuple[Float[Array, " r"], Float[Array, "e r"]]:
    """About the largest eigenvalues of a matrix, and orthonormal eigenvectors.

    Where a matrix has a lower rank, vectors that belong to no eigenvalue above 0 are any, or columns of zeros.
    """
    e = len(matrix)
    first = np.linalg.qr(np.random.default_rng(0).standard_normal((e, rank)))[0]
    basis = jnp.linalg.qr(times(matrix, jnp.asarray(first, matrix.dtype)))[0]
    image = times(matrix, basis)
    eps = jnp.finfo(matrix.dtype).eps
    # As much as rounding may have taken: what is factorised is then positive definite.
    shift = jnp.sqrt(e) * eps * jnp.sqrt(jnp.sum(image**2))
    shift = jnp.where(shift > 0, shift, 1)
    image = image + shift * basis
    root = _divided(image, times(basis.T, image))
    values, vectors = jnp.linalg.eigh(times(root.T, root))
    known = values > rank * eps * jnp.max(values)
    positive: Array = jnp.where(known, values, 1)  # pyright: ignore[reportAssignmentType]
    columns = times(root, vectors) * jnp.where(known, jax.lax.rsqrt(positive), 0)[None, :]
    # Division by small numbers has cost some orthogonality; half of what is amiss is taken off either of two vectors.
    columns = 1.5 * columns - 0.5 * times(columns, times(columns.T, columns))
    return jnp.where(known, jnp.maximum(values - shift, 0), 0), columns


def _divided(columns: Array, products: Array) -> Array:
    """Y L'^-1, with L L' = products."""
    lower = jnp.linalg.cholesky((products + products.T) / 2)
    return jax.scipy.linalg.solve_triangular(lower, columns.T, lower=True).T
