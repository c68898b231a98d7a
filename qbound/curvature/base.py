"""The interface of curvatures: symmetric positive semidefinite operators C, the second-order term of a quadratic."""

import abc
from typing import Any

import jax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from qbound import checks
from qbound.linalg.dense import solve_dense, solve_factored, times
from qbound.types import Parameters, Scalar


class Curvature(abc.ABC):
    """A symmetric positive semidefinite operator on one vector; subclasses are final records.

    A batch of curvatures, as `jax.vmap` returns it, has to go through `jax.vmap` to be used.

    Vectors are trees with the structure of the argument of the bound, one array in the simplest case. Label axes are
    in the caller's order. `dense` and `factor` lay a tree out as one vector, as `jax.flatten_util.ravel_pytree` does.

    The six operations check their arguments and leave the work to a method of the same name with an underscore, which
    takes them for granted: subclasses define those, and a curvature made of others may call them.
    """

    @abc.abstractmethod
    def domain(self) -> Any:
        """The structure, shapes and dtypes of its vectors, a tree of `jax.ShapeDtypeStruct`; an error for a batch."""

    def mv(self, v: Parameters) -> Parameters:
        """The product C v."""
        return self._mv(self._vector("v", v))

    def quadratic(self, v: Parameters) -> Float[Array, ""]:
        """The form v'C v: never negative, and cheaper than a product."""
        return self._quadratic(self._vector("v", v))

    def dense(self) -> Float[Array, "d d"]:
        """C as a matrix."""
        self.domain()
        return self._dense()

    def factor(self) -> Float[Array, "r d"]:
        """A matrix R with R'R = C. Rows may be zero, and their number is not promised."""
        self.domain()
        return self._factor()

    def probe(self, signs: Float[Array, " r"]) -> Float[Array, " d"]:
        """The sum of the rows of `factor` with these signs: for independent random ones, v with E[v v'] = C."""
        self.domain()
        return self._probe(signs)

    def solve(self, g: Parameters, damping: Scalar) -> Parameters:
        """The solution s of (C + damping I) s = g, for damping > 0 (NaN for an array that is not)."""
        return self._solve(self._vector("g", g), checks.positive("damping", damping))

    def solve_dense(self, g: Parameters, damping: Scalar) -> Parameters:
        """As `solve`, by Cholesky in the space of the d parameters: O(d^3), and what `dense` takes."""
        g, unravel = ravel_pytree(self._vector("g", g))
        return unravel(solve_dense(self._dense(), g, checks.positive("damping", damping)))

    @abc.abstractmethod
    def _mv(self, v: Any) -> Any: ...

    @abc.abstractmethod
    def _quadratic(self, v: Any) -> Array: ...

    @abc.abstractmethod
    def _dense(self) -> Array: ...

    @abc.abstractmethod
    def _factor(self) -> Array: ...

    def _probe(self, signs: Array) -> Array:
        """By the factor, where nothing better is known."""
        return times(signs, self._factor())

    def _solve(self, g: Any, damping: Scalar) -> Any:
        """By the factor if it has fewer rows than columns, by the matrix otherwise."""
        rows, columns = jax.eval_shape(lambda curvature: curvature._factor(), self).shape
        if rows >= columns:
            return self.solve_dense(g, damping)
        g, unravel = ravel_pytree(g)
        return unravel(solve_factored(self._factor(), g, damping))

    def _vector(self, name: str, v: Parameters) -> Any:
        """The argument `name`, which must be a vector of the domain."""
        return checks.matching_tree(name, v, self.domain())


def domain_of(array: Array, axes: int) -> jax.ShapeDtypeStruct:
    """The vectors of a curvature made of an array with `axes` axes, the last of which is theirs."""
    checks.unbatched("curvature", array, axes)
    return jax.ShapeDtypeStruct(array.shape[-1:], array.dtype)
