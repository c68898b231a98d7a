"""The interface of curvatures: symmetric positive semidefinite operators C, the second-order term of a quadratic."""

import abc
from typing import Any

from jaxtyping import Array, Float

from qbound import checks
from qbound.types import Parameters, Scalar

__all__ = ["Curvature"]


class Curvature(abc.ABC):
    """A symmetric positive semidefinite operator on one vector; subclasses are final records.

    A batch of curvatures, as `jax.vmap` returns it, has to go through `jax.vmap` to be used.

    Vectors are trees with the structure of the argument of the bound, one array in the simplest case. Label axes are
    in the caller's order. `dense` and `factor` lay a tree out as one vector, as `jax.flatten_util.ravel_pytree` does.
    """

    @abc.abstractmethod
    def domain(self) -> Any:
        """The structure, shapes and dtypes of its vectors, as a tree of `jax.ShapeDtypeStruct`."""

    @abc.abstractmethod
    def mv(self, v: Parameters) -> Parameters:
        """The product C v."""

    @abc.abstractmethod
    def quadratic(self, v: Parameters) -> Float[Array, ""]:
        """The form v'C v: never negative, and cheaper than a product."""

    @abc.abstractmethod
    def dense(self) -> Float[Array, "d d"]:
        """C as a matrix."""

    @abc.abstractmethod
    def factor(self) -> Float[Array, "r d"]:
        """A matrix R with R'R = C. Rows may be zero, and their number is not promised."""

    @abc.abstractmethod
    def solve(self, g: Parameters, damping: Scalar) -> Parameters:
        """The solution s of (C + damping I) s = g, for damping > 0 (NaN for an array that is not)."""

    def _vector(self, name: str, v: Parameters) -> Any:
        """The argument `name`, which must be a vector of the domain."""
        return checks.matching_tree(name, v, self.domain())
