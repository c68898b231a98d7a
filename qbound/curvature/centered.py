"""The curvature diag(w) - w w'/sum(w): a variance over labels with weights w.

With w = p it is the exact Hessian of log-sum-exp; with w = 1/2 it is Böhning's bound on all of those Hessians.
"""

from typing import final

import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import trees
from qbound.curvature.base import Curvature, domain_of
from qbound.linalg.dense import safe_sqrt
from qbound.records import record


@final
@record
class Centered(Curvature):
    """The operator C v = w (v - mean), with the w-weighted mean of v. Everything but `dense` and `factor` is O(n)."""

    weights: Float[Array, " n"]

    def domain(self):
        return domain_of(self.weights, 1)

    def _mv(self, v):
        return self.weights * self._center(v)

    def _quadratic(self, v):
        # A label without weight adds nothing, even one whose square is infinite.
        return trees.weighted_sum(self.weights, self._center(v) ** 2)

    def _dense(self):
        return jnp.diag(self.weights) - self.weights[:, None] * self._fractions()[None, :]

    def _factor(self):
        # diag(sqrt w) (I - 1 f'), f = w/sum(w).
        rows = jnp.eye(self.weights.size, dtype=self.weights.dtype) - self._fractions()[None, :]
        return safe_sqrt(self.weights)[:, None] * rows

    def _probe(self, signs):
        v = signs * safe_sqrt(self.weights)
        return v - self._fractions() * jnp.sum(v)

    def _solve(self, g, damping):
        # s = (g + w t)/(w + c), t the weighted mean of s. Sherman-Morrison gives t; the denominator
        # sum(w) - sum(w^2/(w + c)) is written as c sum(w/(w + c)), without cancellation.
        share = self.weights / (self.weights + damping)
        t = jnp.sum(share * g) / (damping * self._or_one(jnp.sum(share)))
        return (g + self.weights * t) / (self.weights + damping)

    def _center(self, v):
        # Measured from one of its entries, v loses no digits to a constant it may contain.
        v = v - v[jnp.argmax(self.weights)]
        return v - jnp.sum(self._fractions() * v)

    def _fractions(self):
        return self.weights / self._or_one(jnp.sum(self.weights))

    @staticmethod
    def _or_one(total: Array) -> Array:
        """A sum of weights to divide by; it is zero only where every weight is."""
        return jnp.where(total == 0, 1, total)
