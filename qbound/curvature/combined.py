"""Sums of curvatures: a few of any kind, or a batch of one kind with a weight for each."""

from collections.abc import Callable
from typing import final

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from qbound import checks
from qbound.curvature.base import Curvature
from qbound.records import record
from qbound.solve import gram, solve_factored

__all__ = ["Batch", "Scaled", "Sum"]


@final
@record
class Scaled(Curvature):
    """scale C, with scale >= 0."""

    curvature: Curvature
    scale: Float[Array, ""]

    def domain(self):
        return self.curvature.domain()

    def mv(self, v):
        return jax.tree.map(lambda leaf: self.scale * leaf, self.curvature.mv(v))

    def quadratic(self, v):
        return self.scale * self.curvature.quadratic(v)

    def dense(self):
        return self.scale * self.curvature.dense()

    def factor(self):
        return jnp.sqrt(self.scale) * self.curvature.factor()

    def solve(self, g, damping):
        # (scale C + c I)^-1 g = (C + c/scale I)^-1 g / scale; for scale 0 it is g/c.
        g, damping = self._vector("g", g), checks.positive("damping", damping)
        scale = jnp.where(self.scale == 0, 1, self.scale)
        solution = self.curvature.solve(g, jnp.asarray(damping, scale.dtype) / scale)
        return jax.tree.map(lambda s, g: jnp.where(self.scale == 0, g / damping, s / scale), solution, g)


@final
@record
class Sum(Curvature):
    """C_1 + C_2 + ..., of any kinds on the same space."""

    terms: tuple[Curvature, ...]

    def domain(self):
        return self.terms[0].domain()

    def mv(self, v):
        return _add_trees(*(term.mv(v) for term in self.terms))

    def quadratic(self, v):
        return _add_trees(*(term.quadratic(v) for term in self.terms))

    def dense(self):
        return _add_trees(*(term.dense() for term in self.terms))

    def factor(self):
        return jnp.concatenate([term.factor() for term in self.terms])

    def solve(self, g, damping):
        return _solve_by_factor(self.factor(), self._vector("g", g), damping)


@final
@record
class Batch(Curvature):
    """sum_j w_j C_j, with the C_j one curvature whose arrays have a leading axis, as `vmap` returns it."""

    terms: Curvature
    weights: Float[Array, " b"]

    def domain(self):
        checks.unbatched("curvature", self.weights, 1)
        one = jax.eval_shape(lambda terms: jax.tree.map(lambda leaf: leaf[0], terms), self.terms)
        return one.domain()

    def mv(self, v):
        return self._sum(lambda term: term.mv(v))

    def quadratic(self, v):
        return self._sum(lambda term: term.quadratic(v))

    def dense(self):
        return gram(self.factor())

    def factor(self):
        rows = jax.vmap(lambda term, w: jnp.sqrt(w) * term.factor())(self.terms, self.weights)
        return rows.reshape(-1, rows.shape[-1])

    def solve(self, g, damping):
        return _solve_by_factor(self.factor(), self._vector("g", g), damping)

    def _sum(self, function: Callable):
        images = jax.vmap(function)(self.terms)
        return jax.tree.map(lambda leaf: jnp.tensordot(self.weights, leaf, axes=1), images)


def _add_trees(*trees):
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)


def _solve_by_factor(factor, g, damping):
    g, unravel = ravel_pytree(g)
    return unravel(solve_factored(factor, g, checks.positive("damping", damping)))
