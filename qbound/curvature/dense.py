"""A curvature given as a matrix."""

from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import checks
from qbound.curvature.base import Curvature
from qbound.linalg.dense import solve_dense, symmetric_root, times
from qbound.records import record

__all__ = ["Dense"]


@final
@record
class Dense(Curvature):
    """C = `matrix`, which must be symmetric and positive semidefinite."""

    matrix: Float[Array, "d d"]

    def domain(self):
        array = checks.unbatched("curvature", self.matrix, 2)
        return jax.ShapeDtypeStruct(array.shape[-1:], array.dtype)

    def mv(self, v):
        return times(self.matrix, self._vector("v", v))

    def quadratic(self, v):
        v = self._vector("v", v)
        form: Array = times(v, times(self.matrix, v))
        return jnp.where(form < 0, 0, form)  # by rounding; jnp.maximum would halve the Hessian at v = 0

    def dense(self):
        return checks.unbatched("curvature", self.matrix, 2)

    def factor(self):
        return symmetric_root(self.dense())

    def solve(self, g, damping):
        return solve_dense(self.matrix, self._vector("g", g), checks.positive("damping", damping))
