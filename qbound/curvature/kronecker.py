"""A Kronecker product of a curvature of labels and one of inputs, by the eigenvectors of both."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, final

import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import checks
from qbound.curvature.base import Curvature
from qbound.linalg.dense import safe_sqrt, times
from qbound.linalg.nystrom import leading_eigenvectors
from qbound.models.linear import MatrixLayout
from qbound.records import record, static


class LabelFactor(abc.ABC):
    """A, by its eigenvectors."""

    @abc.abstractmethod
    def apply(self, g: Float[Array, "n e"], function: Callable[[Array], Array]) -> Float[Array, "n e"]:
        """Multiply the part of `g` along each eigenvector, a row, by function(eigenvalue), (1, e) or (n, e)."""

    @abc.abstractmethod
    def mean_value(self) -> Float[Array, ""]:
        """The mean of its eigenvalues."""

    @abc.abstractmethod
    def dense(self) -> Float[Array, "n n"]:
        """The matrix A."""

    @abc.abstractmethod
    def factor(self) -> Float[Array, "n n"]:
        """A matrix R with R'R = A."""


@final
@record
class SpectralLabels(LabelFactor):
    """The factor A = U diag(values) U'."""

    values: Float[Array, " n"]
    vectors: Float[Array, "n n"]

    def apply(self, g, function):
        return times(self.vectors, function(self.values[:, None]) * times(self.vectors.T, g))

    def mean_value(self):
        return jnp.mean(self.values)

    def dense(self):
        return times(self.vectors * self.values[None, :], self.vectors.T)

    def factor(self):
        return safe_sqrt(self.values)[:, None] * self.vectors.T


@final
@record
class DiagonalLabels(LabelFactor):
    """The factor A = diag(values)."""

    values: Float[Array, " n"]

    def apply(self, g, function):
        return function(self.values[:, None]) * g

    def mean_value(self):
        return jnp.mean(self.values)

    def dense(self):
        return jnp.diag(self.values)

    def factor(self):
        return jnp.diag(safe_sqrt(self.values))


@final
@record
class BohningLabels(LabelFactor):
    """The factor A = 1/2 (I - 11'/n): eigenvalue 0 along 1, and 1/2 across it. No n x n array is needed to apply it."""

    labels: int = static()
    dtype: Any = static()

    def apply(self, g, function):
        mean = jnp.mean(g, axis=0, keepdims=True)
        along, across = (function(jnp.full((1, 1), value, self.dtype)) for value in (0.0, 0.5))
        return along * mean + across * (g - mean)

    def mean_value(self):
        return jnp.asarray(0.5 * (self.labels - 1) / self.labels, self.dtype)

    def dense(self):
        return 0.5 * (jnp.eye(self.labels, dtype=self.dtype) - 1 / self.labels)

    def factor(self):
        return self.dense() * 2**0.5


def factorised_labels(curvature: Float[Array, "..."]) -> LabelFactor:
    """Of a matrix (n, n), or of a diagonal (n,)."""
    return DiagonalLabels(curvature) if curvature.ndim == 1 else SpectralLabels(*eigenvectors(curvature))


class InputFactor(NamedTuple):
    """The factor S B S = U diag(values) U' + tail (I - UU'), with B the second moments of inputs, S = diag(scales).

    Scales make columns alike, so that large numbers in one do not hide the others. Without `vectors` it is a diagonal.
    Columns of U may be zero. A tuple, because it is a part of the states of optimizers.
    """

    scales: Float[Array, " e"]
    values: Float[Array, " r"]
    vectors: Float[Array, "e r"] | None
    tail_eigenvalue: Float[Array, ""] | None = None  # in all other directions; None if U is a square matrix

    def mean_value(self) -> Float[Array, ""]:
        """The mean eigenvalue, of all directions."""
        e, r = self.scales.size, self.values.size
        total = jnp.sum(self.values)
        return (total if self.tail_eigenvalue is None else total + (e - r) * self.tail_eigenvalue) / e


def factorised_inputs(moments: Float[Array, "e e"], scales: Float[Array, " e"], rank: int | None) -> InputFactor:
    """Of second moments that are scaled already; with few inputs beside the rank, all eigenvectors are taken."""
    e = len(moments)
    if rank is None or e <= 2 * rank:
        return InputFactor(scales, *eigenvectors(moments))
    values, vectors = leading_eigenvectors(moments, rank)
    return InputFactor(scales, values, vectors, jnp.maximum(jnp.trace(moments) - jnp.sum(values), 0) / (e - rank))


def eigenvectors(matrix: Float[Array, "k k"]) -> tuple[Float[Array, " k"], Float[Array, "k k"]]:
    """Eigenvalues of a positive semidefinite matrix, and its eigenvectors."""
    values, vectors = jnp.linalg.eigh(matrix, symmetrize_input=False)
    return jnp.maximum(values, 0), vectors


def solve_in_factors(
    labels: LabelFactor,
    inputs: InputFactor,
    g: Float[Array, "n e"],
    damping: Float[Array, ""],
    on_leading: Callable[[Array, Array], Array] | None = None,
) -> Float[Array, "n e"]:
    """S (A (x) S B S + damping I)^-1 S g: with damping, in scaled inputs.

    What was solved along the eigenvectors of inputs, and what was given there, can be replaced by `on_leading`.
    """

    def inverse(b):
        return lambda a: 1 / (a * b + damping)

    y = g * inputs.scales[None, :]
    if on_leading is None or inputs.vectors is None:
        return _apply(labels, inputs, y, inverse) * inputs.scales[None, :]
    z = times(y, inputs.vectors)
    leading = on_leading(labels.apply(z, inverse(inputs.values[None, :])), z)
    if inputs.tail_eigenvalue is None:
        y = times(leading, inputs.vectors.T)
    else:
        elsewhere = inverse(inputs.tail_eigenvalue[None, None])
        y = labels.apply(y, elsewhere) + times(leading - labels.apply(z, elsewhere), inputs.vectors.T)
    return y * inputs.scales[None, :]


def _apply(labels: LabelFactor, inputs: InputFactor, v, function: Callable[[Array], Callable[[Array], Array]]):
    """function(b)(a), for eigenvalues a of labels and b of scaled inputs, applied to a matrix (n, e)."""
    if inputs.vectors is None:
        return labels.apply(v, function(inputs.values[None, :]))
    along = times(v, inputs.vectors)
    if inputs.tail_eigenvalue is None:
        return times(labels.apply(along, function(inputs.values[None, :])), inputs.vectors.T)
    # As if the tail's were the eigenvalue everywhere, and then what that leaves out along U.
    of_values, elsewhere = function(inputs.values[None, :]), function(inputs.tail_eigenvalue[None, None])
    along = labels.apply(along, lambda a: of_values(a) - elsewhere(a))
    return labels.apply(v, elsewhere) + times(along, inputs.vectors.T)


@final
@record
class Kronecker(Curvature):
    """The operator C W = A W SBS for parameters that are one matrix W (n, e), of inputs as they are scaled: A (x) SBS.

    Everything but `dense` and `factor` is two products with the eigenvectors of inputs and a few with those of A.
    """

    labels: LabelFactor
    inputs: InputFactor
    layout: MatrixLayout

    def domain(self):
        checks.unbatched("curvature", self.inputs.values, 1)
        return self.layout.domain()

    def _mv(self, v):
        return self._applied(v, lambda b: lambda a: b * a)

    def _quadratic(self, v):
        # The square of a product with the root, so that it is never negative.
        v, u = self.layout.to_matrix(v), self._vectors()
        along = times(v, u)
        total = jnp.sum(self.labels.apply(along, lambda a: safe_sqrt(self.inputs.values)[None, :] * safe_sqrt(a)) ** 2)
        if self.inputs.tail_eigenvalue is None:
            return total
        across = self.labels.apply(v - times(along, u.T), safe_sqrt)
        return total + self.inputs.tail_eigenvalue * jnp.sum(across**2)

    def _dense(self):
        factor = self._factor()
        return times(factor.T, factor)

    def _factor(self):
        u = self._vectors()
        root = safe_sqrt(self.inputs.values)[:, None] * u.T
        if self.inputs.tail_eigenvalue is not None:
            across = jnp.eye(len(u), dtype=u.dtype) - times(u, u.T)
            root = jnp.concatenate([root, safe_sqrt(self.inputs.tail_eigenvalue) * across])
        rows = jnp.kron(self.labels.factor(), root)
        return self.layout.to_vectors(rows.reshape(-1, *self.layout.shape()))

    def _solve(self, g, damping):
        c = jnp.asarray(damping, self.inputs.values.dtype)
        return self._applied(g, lambda b: lambda a: 1 / (a * b + c))

    def _applied(self, v, function):
        return self.layout.to_tree(_apply(self.labels, self.inputs, self.layout.to_matrix(v), function))

    def _vectors(self) -> Array:
        e = self.inputs.scales.size
        return jnp.eye(e, dtype=self.inputs.values.dtype) if self.inputs.vectors is None else self.inputs.vectors
