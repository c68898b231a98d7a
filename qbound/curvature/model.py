"""The curvature of a model on a batch: sum_j w_j J_j'M_j J_j, with J_j the Jacobian of the logits of example j."""

from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import cho_factor, cho_solve
from jaxtyping import Array, Float

from qbound import checks, trees
from qbound.curvature.base import Curvature
from qbound.curvature.roots import safe_sqrt
from qbound.models import BatchMap, KroneckerMap
from qbound.records import record, static
from qbound.solve import HIGHEST, add_to_diagonal, solve_dense

__all__ = ["ModelCurvature", "Pieces"]


@final
@record
class ModelCurvature(Curvature):
    """sum_j w_j J_j'M_j J_j, with one map for all examples: a product costs one `jvp` and one `vjp` of the batch.

    Unlike a `Batch` of pullbacks it has one vector of parameters, not one for each example.
    """

    logits: Curvature  # the M_j, one curvature whose arrays have a leading axis, as `vmap` returns it
    weights: Float[Array, " b"]
    map: BatchMap

    def domain(self):
        checks.unbatched("curvature", self.weights, 1)
        return self.map.domain()

    def mv(self, v):
        u = self.map.forward(self._vector("v", v))
        return self.map.transpose(self._weighted(jax.vmap(lambda m, u: m.mv(u))(self.logits, u)))

    def quadratic(self, v):
        u = self.map.forward(self._vector("v", v))
        return jnp.sum(self._weighted(jax.vmap(lambda m, u: m.quadratic(u))(self.logits, u)))

    def dense(self):
        return self.map.sandwich(self._factors())

    def factor(self):
        return self.map.rows(self._factors())

    def solve(self, g, damping):
        """By whichever space is the smaller: of the parameters, or of examples and labels."""
        b, n = self.map.shape()
        return self.solve_by_rows(g, damping) if b * n < trees.size(self.domain()) else self.solve_dense(g, damping)

    def solve_dense(self, g: Any, damping: Any) -> Any:
        """By Cholesky in the space of the p parameters: O(b n p^2 + p^3)."""
        return _solve_dense(self, self._vector("g", g), damping)

    def solve_by_rows(self, g: Any, damping: Any) -> Any:
        """By Woodbury's identity in the space of the rows R of `factor`: O((b n)^2 p + (b n)^3).

        s = (g - R'(RR' + c I)^-1 R g)/c, where R g and R'y are products with J. A rounding error of the difference in
        the space of the rows counts |RR'|/c times as much, which for small damping leaves no digit in float32: so the
        residual is solved for once more. A batch of one of a linear model has the closed form of
        `KroneckerMap.solve_one`.
        """
        g = self._vector("g", g)
        c = jnp.asarray(checks.positive("damping", damping), self.weights.dtype)
        if isinstance(self.map, KroneckerMap) and self.weights.size == 1:
            weight = self.weights[0]
            one = jax.tree.map(lambda leaf: leaf[0], self.logits)
            return self.map.solve_one(one, trees.scale(1 / weight, g), c / weight)
        factors = self._factors()
        cholesky = cho_factor(add_to_diagonal(self.map.row_products(factors), c))

        def woodbury(g):
            rows_of_g = jnp.einsum("jrn,jn->jr", factors, self.map.forward(g), precision=HIGHEST)
            y = cho_solve(cholesky, rows_of_g.reshape(-1)).reshape(rows_of_g.shape)
            back = self.map.transpose(jnp.einsum("jrn,jr->jn", factors, y, precision=HIGHEST))
            return trees.scale(1 / c, jax.tree.map(jnp.subtract, g, back))

        s = woodbury(g)
        residual = jax.tree.map(jnp.subtract, g, trees.add_scaled(self.mv(s), c, s))
        return trees.add(s, woodbury(residual))

    def _weighted(self, x: Array) -> Array:
        """w_j x_j; a weight of 0 removes its example, even one that is infinite."""
        w = self.weights.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(w == 0, 0, w * x)

    def _factors(self) -> Array:
        """sqrt(w_j) F_j with F_j'F_j = M_j."""
        checks.unbatched("curvature", self.weights, 1)
        factors = jax.vmap(lambda m: m.factor())(self.logits)
        w: Array = safe_sqrt(self.weights)[:, None, None]
        weighted: Array = jnp.where(w == 0, 0, w * factors)  # pyright: ignore[reportAssignmentType]
        return weighted


@final
@record
class Pieces(Curvature):
    """The sum of curvatures made from the pieces of a batch, one after the other, so that memory is that of one piece.

    `make(shared, piece)` is called anew in every product: nothing of a piece is kept.
    """

    shared: Any
    pieces: Any  # a tree of arrays with a leading axis of pieces
    make: Callable[[Any, Any], Curvature] = static()
    parameters: tuple = static()  # their structure, and the shape and dtype of each leaf
    rows: tuple[int, int] = static()  # of logits in all pieces, and how many labels each has
    axes: tuple[int, ...] = static()  # how many axes each of the arrays of `pieces` has

    def domain(self):
        for array, axes in zip(jax.tree.leaves(self.pieces), self.axes, strict=True):
            checks.unbatched("curvature", array, axes)
        structure, leaves = self.parameters
        return structure.unflatten(leaves)

    def mv(self, v):
        v = self._vector("v", v)
        return self._sum(lambda curvature: curvature.mv(v))

    def quadratic(self, v):
        v = self._vector("v", v)
        return self._sum(lambda curvature: curvature.quadratic(v))

    def dense(self):
        return self._sum(lambda curvature: curvature.dense())

    def factor(self):
        self.domain()
        rows = jax.lax.map(lambda piece: self.make(self.shared, piece).factor(), self.pieces)
        return rows.reshape(-1, rows.shape[-1])

    def solve(self, g, damping):
        return self.solve_dense(g, damping)

    def solve_dense(self, g: Any, damping: Any) -> Any:
        """By Cholesky in the space of the p parameters."""
        return _solve_dense(self, self._vector("g", g), damping)

    def _sum(self, function):
        self.domain()

        def of_piece(piece):
            return function(self.make(self.shared, piece))

        one = jax.eval_shape(of_piece, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.pieces))
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), one)
        total, _ = jax.lax.scan(lambda total, piece: (trees.add(total, of_piece(piece)), None), zero, self.pieces)
        return total


def _solve_dense(curvature, g, damping):
    g, unravel = ravel_pytree(g)
    return unravel(solve_dense(curvature.dense(), g, checks.positive("damping", damping)))
