"""Square roots that stay differentiable where the number, or the matrix, is zero."""

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["safe_sqrt", "symmetric_root"]


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
