"""Sums of curvatures: a few of any kind, or a batch of one kind with a weight for each."""

from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import checks, trees
from qbound.curvature.base import Curvature
from qbound.linalg.dense import gram_of_many, safe_sqrt, weighted_sum_of_many
from qbound.records import record


@final
@record
class Scaled(Curvature):
    """The multiple scale C, with scale >= 0."""

    curvature: Curvature
    scale: Float[Array, ""]

    def domain(self):
        return self.curvature.domain()

    def _mv(self, v):
        return jax.tree.map(lambda leaf: self.scale * leaf, self.curvature.mv(v))

    def _quadratic(self, v):
        return self.scale * self.curvature.quadratic(v)

    def _dense(self):
        return self.scale * self.curvature.dense()

    def _factor(self):
        return safe_sqrt(self.scale) * self.curvature.factor()

    def _solve(self, g, damping):
        # (scale C + c I)^-1 g = (C + c/scale I)^-1 g / scale; for scale 0 it is g/c.
        scale = jnp.where(self.scale == 0, 1, self.scale)
        solution = self.curvature.solve(g, jnp.asarray(damping, scale.dtype) / scale)
        return jax.tree.map(lambda s, g: jnp.where(self.scale == 0, g / damping, s / scale), solution, g)


@final
@record
class Sum(Curvature):
    """The sum C_1 + C_2 + ..., of any kinds on the same space."""

    terms: tuple[Curvature, ...]

    def domain(self):
        return self.terms[0].domain()

    def _mv(self, v):
        return _sum_of(term.mv(v) for term in self.terms)

    def _quadratic(self, v):
        return _sum_of(term.quadratic(v) for term in self.terms)

    def _dense(self):
        return _sum_of(term.dense() for term in self.terms)

    def _factor(self):
        return jnp.concatenate([term.factor() for term in self.terms])


@final
@record
class Batch(Curvature):
    """The sum over j of w_j C_j, with the C_j one curvature whose arrays have a leading axis, as `vmap` returns it."""

    terms: Curvature
    weights: Float[Array, " b"]

    def domain(self):
        checks.unbatched("curvature", self.weights, 1)
        return _one_of(self.terms).domain()

    def _mv(self, v):
        return weighted_sum_of_many(self.weights, jax.vmap(lambda term: term.mv(v))(self.terms))

    def _quadratic(self, v):
        return weighted_sum_of_many(self.weights, jax.vmap(lambda term: term.quadratic(v))(self.terms))

    def _dense(self):
        rows, columns = _factor_shape(_one_of(self.terms))
        if rows < columns:
            return gram_of_many(self._factor())
        return weighted_sum_of_many(self.weights, jax.vmap(lambda term: term.dense())(self.terms))

    def _factor(self):
        rows = jax.vmap(lambda term: term.factor())(self.terms)
        return trees.weighted(safe_sqrt(self.weights), rows).reshape(-1, rows.shape[-1])


def _one_of(batch):
    """The shapes of one member of a batch made by `vmap`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)


def _factor_shape(curvature):
    rows, columns = jax.eval_shape(lambda curvature: curvature.factor(), curvature).shape
    return rows, columns


def _sum_of(trees):
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)
