"""A Kronecker product A (x) B of a curvature of labels and one of inputs, by the eigenvectors of both."""

import abc
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Shaped

from qbound import checks
from qbound.curvature.base import Curvature
from qbound.linalg.dense import HIGHEST, safe_sqrt, times
from qbound.records import record, static

__all__ = ["BohningLabels", "Kronecker", "LabelFactor", "MatrixLayout", "SpectralLabels"]


@final
@record
class MatrixLayout:
    """How a tree of weights (n, d) or (d, n), and at most one bias (n,), becomes one matrix (e, n), inputs by labels.

    The bias is the last row: then e = d + 1, and inputs have a 1 at their end.
    """

    structure: Any = static()
    shapes: tuple = static()  # of the leaves, with their dtypes
    output_axis: int = static()  # of the weights

    def domain(self) -> Any:
        """The tree, as shapes and dtypes."""
        return self.structure.unflatten(self.shapes)

    def has_bias(self) -> bool:
        """Whether there is a bias."""
        return any(len(leaf.shape) == 1 for leaf in self.shapes)

    def to_matrix(self, tree: Any) -> Float[Array, "e n"]:
        """The matrix of a tree."""
        leaves = jax.tree.leaves(tree)
        weights = next(leaf for leaf in leaves if leaf.ndim == 2)
        matrix = weights if self.output_axis == 1 else weights.T
        bias = [leaf[None, :] for leaf in leaves if leaf.ndim == 1]
        return jnp.concatenate([matrix, *bias]) if bias else matrix

    def to_tree(self, matrix: Float[Array, "e n"]) -> Any:
        """The inverse of `to_matrix`."""
        leaves = zip(self.leaves(matrix), self.shapes, strict=True)
        return self.structure.unflatten([leaf.astype(like.dtype) for leaf, like in leaves])

    def leaves(self, matrix: Shaped[Array, "e n"]) -> list[Array]:
        """The parts of a matrix that are the leaves of the tree."""
        weights = matrix[:-1] if self.has_bias() else matrix
        weights = weights if self.output_axis == 1 else weights.T
        return [weights if len(leaf.shape) == 2 else matrix[-1] for leaf in self.shapes]


class LabelFactor(abc.ABC):
    """A, by its eigenvectors."""

    @abc.abstractmethod
    def apply(self, g: Float[Array, "e n"], function: Callable[[Array], Array]) -> Float[Array, "e n"]:
        """Multiply the part of `g` along each eigenvector, a column, by function(eigenvalue), (e, 1) or (e, n)."""

    @abc.abstractmethod
    def mean_value(self) -> Float[Array, ""]:
        """The mean of its eigenvalues."""

    @abc.abstractmethod
    def dense(self) -> Float[Array, "n n"]:
        """A."""

    @abc.abstractmethod
    def factor(self) -> Float[Array, "n n"]:
        """R with R'R = A."""


@final
@record
class SpectralLabels(LabelFactor):
    """A = U diag(values) U'."""

    values: Float[Array, " n"]
    vectors: Float[Array, "n n"]

    def apply(self, g, function):
        along = function(self.values[None, :]) * jnp.matmul(g, self.vectors, precision=HIGHEST)
        return jnp.matmul(along, self.vectors.T, precision=HIGHEST)

    def mean_value(self):
        return jnp.mean(self.values)

    def dense(self):
        checks.unbatched("curvature", self.values, 1)
        return jnp.matmul(self.vectors * self.values[None, :], self.vectors.T, precision=HIGHEST)

    def factor(self):
        checks.unbatched("curvature", self.values, 1)
        return safe_sqrt(self.values)[:, None] * self.vectors.T


@final
@record
class BohningLabels(LabelFactor):
    """A = 1/2 (I - 11'/n): eigenvalue 0 along 1, and 1/2 across it. Nothing of size n x n is needed to apply it."""

    labels: int = static()
    dtype: Any = static()

    def apply(self, g, function):
        mean = jnp.mean(g, axis=1, keepdims=True)
        along, across = (function(jnp.full((1, 1), value, self.dtype)) for value in (0.0, 0.5))
        return along * mean + across * (g - mean)

    def mean_value(self):
        return jnp.asarray((1 - 1 / self.labels) / 2, self.dtype)

    def dense(self):
        return (jnp.eye(self.labels, dtype=self.dtype) - 1 / self.labels) / 2

    def factor(self):
        return (jnp.eye(self.labels, dtype=self.dtype) - 1 / self.labels) * 0.5**0.5


@final
@record
class Kronecker(Curvature):
    """C W = B W A for parameters W (e, n), with A of labels and B of inputs.

    On the columns of W, one below the other, that is A (x) B. B has eigenvectors U with `values`, and `rest` for its
    eigenvalue in all other directions: B = U diag(values) U' + rest (I - UU'). Columns of U may be zero.
    Everything but `dense` and `factor` is two products with U and a few with the eigenvectors of A.
    """

    labels: LabelFactor
    values: Float[Array, " r"]
    vectors: Float[Array, "e r"]  # U
    layout: MatrixLayout
    rest: Float[Array, ""] | None = None  # None if U is a square matrix

    def domain(self):
        checks.unbatched("curvature", self.values, 1)
        return self.layout.domain()

    def _mv(self, v):
        return self._apply(v, lambda b, a: b * a)

    def _quadratic(self, v):
        # The square of a product with the root, so that it is never negative.
        v = self.layout.to_matrix(v)
        along = times(self.vectors.T, v)
        root = self.labels.apply(along, lambda a: safe_sqrt(self.values)[:, None] * safe_sqrt(a))
        if self.rest is None:
            return jnp.sum(root**2)
        across = self.labels.apply(v - times(self.vectors, along), safe_sqrt)
        return jnp.sum(root**2) + self.rest * jnp.sum(across**2)

    def _dense(self):
        b = times(self._vectors() * self.values[None, :], self.vectors.T)
        if self.rest is not None:
            b = b + self.rest * self._across()
        matrix, place = jnp.kron(b, self.labels.dense()), self._places()
        return matrix[place][:, place]

    def _factor(self):
        root = safe_sqrt(self.values)[:, None] * self._vectors().T
        if self.rest is not None:
            root = jnp.concatenate([root, safe_sqrt(self.rest) * self._across()])
        return jnp.kron(root, self.labels.factor())[:, self._places()]

    def _solve(self, g, damping):
        c = jnp.asarray(damping, self.values.dtype)
        return self._apply(g, lambda b, a: 1 / (b * a + c))

    def _apply(self, v, function):
        """A function of the eigenvalues of both, applied to a vector."""
        v = self.layout.to_matrix(v)
        along = times(self.vectors.T, v)
        if self.rest is None:
            along = self.labels.apply(along, lambda a: function(self.values[:, None], a))
            return self.layout.to_tree(times(self.vectors, along))
        # As if `rest` were the eigenvalue everywhere, and then what that leaves out along U.
        rest = self.rest[None, None]
        along = self.labels.apply(along, lambda a: function(self.values[:, None], a) - function(rest, a))
        everywhere = self.labels.apply(v, lambda a: function(rest, a))
        return self.layout.to_tree(everywhere + times(self.vectors, along))

    def _across(self) -> Array:
        """I - UU'."""
        u = self._vectors()
        return jnp.eye(len(u), dtype=u.dtype) - times(u, u.T)

    def _vectors(self) -> Array:
        return checks.unbatched("curvature", self.vectors, 2)

    def _places(self):
        """For each parameter, in the order of the leaves of the tree, its place in the matrix."""
        e, n = len(self.vectors), self.labels.dense().shape[0]
        return ravel_pytree(self.layout.leaves(jnp.arange(e * n).reshape(e, n)))[0]
