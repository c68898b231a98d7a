"""A curvature given as a matrix."""

from typing import final

import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound.curvature.base import Curvature, domain_of
from qbound.linalg.dense import symmetric_root, times
from qbound.records import record


@final
@record
class Dense(Curvature):
    """C = `matrix`, which must be symmetric and positive semidefinite."""

    matrix: Float[Array, "d d"]

    def domain(self):
        return domain_of(self.matrix, 2)

    def _mv(self, v):
        return times(self.matrix, v)

    def _quadratic(self, v):
        form: Array = times(v, times(self.matrix, v))
        return jnp.where(form < 0, 0, form)  # by rounding; jnp.maximum would halve the Hessian at v = 0

    def _dense(self):
        return self.matrix

    def _factor(self):
        return symmetric_root(self.matrix)
