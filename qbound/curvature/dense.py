"""A curvature given as a matrix."""

from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import checks
from qbound.curvature.base import Curvature
from qbound.records import record
from qbound.solve import solve_dense

__all__ = ["Dense", "root"]


@final
@record
class Dense(Curvature):
    """C = `matrix`, which must be symmetric and positive semidefinite."""

    matrix: Float[Array, "d d"]

    def domain(self):
        array = checks.unbatched("curvature", self.matrix, 2)
        return jax.ShapeDtypeStruct(array.shape[-1:], array.dtype)

    def mv(self, v):
        return self.matrix @ self._vector("v", v)

    def quadratic(self, v):
        v = self._vector("v", v)
        return jnp.maximum(v @ (self.matrix @ v), 0)

    def dense(self):
        return checks.unbatched("curvature", self.matrix, 2)

    def factor(self):
        return root(self.dense())

    def solve(self, g, damping):
        return solve_dense(self.matrix, self._vector("g", g), checks.positive("damping", damping))


def root(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """R with R'R = `matrix`, also where it is singular; eigenvalues below zero by rounding count as zero."""
    eigenvalues, eigenvectors = jnp.linalg.eigh(matrix)
    return jnp.sqrt(jnp.maximum(eigenvalues, 0))[:, None] * eigenvectors.T
