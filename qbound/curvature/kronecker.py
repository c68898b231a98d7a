"""A Kronecker product of a curvature of labels and one of inputs, and its solve, by the eigenvectors of both."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, final

import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound.linalg.dense import times
from qbound.linalg.nystrom import leading_eigenvectors
from qbound.records import record, static


class LabelFactor(abc.ABC):
    """A, by its eigenvectors."""

    @abc.abstractmethod
    def apply(self, g: Float[Array, "n e"], function: Callable[[Array], Array]) -> Float[Array, "n e"]:
        """Multiply the part of `g` along each eigenvector, a row, by function(eigenvalue), (1, e) or (n, e)."""

    @abc.abstractmethod
    def mean_value(self) -> Float[Array, ""]:
        """The mean of its eigenvalues."""


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


@final
@record
class DiagonalLabels(LabelFactor):
    """The factor A = diag(values)."""

    values: Float[Array, " n"]

    def apply(self, g, function):
        return function(self.values[:, None]) * g

    def mean_value(self):
        return jnp.mean(self.values)


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
    """The solution S (A (x) S B S + damping I)^-1 S g: with damping, in scaled inputs.

    What was solved along the eigenvectors of inputs, and what was given there, can be replaced by `on_leading`.
    """

    def inverse(b):
        return lambda a: 1 / (a * b + damping)

    y, of_values = g * inputs.scales[None, :], inverse(inputs.values[None, :])
    if inputs.vectors is None:
        return labels.apply(y, of_values) * inputs.scales[None, :]
    z = times(y, inputs.vectors)
    if inputs.tail_eigenvalue is None:
        leading = labels.apply(z, of_values)
        leading = leading if on_leading is None else on_leading(leading, z)
        return times(leading, inputs.vectors.T) * inputs.scales[None, :]
    # As if the tail's were the eigenvalue everywhere, and then what that leaves out along U.
    of_tail = inverse(inputs.tail_eigenvalue[None, None])
    if on_leading is None:
        leading = labels.apply(z, lambda a: of_values(a) - of_tail(a))
    else:
        leading = on_leading(labels.apply(z, of_values), z) - labels.apply(z, of_tail)
    return (labels.apply(y, of_tail) + times(leading, inputs.vectors.T)) * inputs.scales[None, :]
