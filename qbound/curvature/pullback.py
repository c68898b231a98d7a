"""The curvature F'C F: one of logits, carried to parameters by a linear map F."""

from typing import final

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from qbound.curvature.base import Curvature
from qbound.linalg.dense import gram, symmetric_root
from qbound.models.base import LinearMap
from qbound.records import record


@final
@record
class Pullback(Curvature):
    """The operator F'C F with C the curvature of n logits and F a map from d parameters.

    A product applies F, C and F'. The other operations take the way through the smaller of the two spaces: n x n
    arrays are made only when n <= d, and d x d arrays only by `dense` or when d < n.
    """

    logits: Curvature
    map: LinearMap

    def domain(self):
        return self.map.domain()

    def _mv(self, v):
        return self.map.transpose(self.logits.mv(self.map.forward(v)))

    def _quadratic(self, v):
        return self.logits.quadratic(self.map.forward(v))

    def _dense(self):
        if self.map.labels() <= self.map.size():
            return gram(self._factor())
        example, unravel = ravel_pytree(self.map.zeros())
        columns = jax.vmap(lambda v: ravel_pytree(self.mv(unravel(v)))[0])(jnp.eye(example.size, dtype=example.dtype))
        return (columns + columns.T) / 2

    def _factor(self):
        if self.map.labels() <= self.map.size():
            return self.map.transpose_rows(self.logits.factor())
        return symmetric_root(self._dense())
