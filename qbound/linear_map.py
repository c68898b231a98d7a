"""Linear maps from parameters to logits: explicit features, or a function with its transpose."""

import abc
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from qbound import checks
from qbound.records import record, static
from qbound.types import Parameters, working_dtype

__all__ = ["Features", "FunctionPair", "LinearMap", "as_linear_map"]


class LinearMap(abc.ABC):
    """A linear map F from a tree of parameters, d numbers in all, to n logits."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """(n, d)."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """Of parameters laid out as one vector."""

    @abc.abstractmethod
    def forward(self, v: Parameters) -> Float[Array, " n"]:
        """F v."""

    @abc.abstractmethod
    def transpose(self, u: Float[Array, " n"]) -> Parameters:
        """F'u."""

    @abc.abstractmethod
    def transpose_rows(self, rows: Float[Array, "r n"]) -> Float[Array, "r d"]:
        """F'u for every row u, each laid out as one vector."""

    @abc.abstractmethod
    def unravel(self, flat: Float[Array, " d"]) -> Parameters:
        """The tree of parameters that is laid out as `flat`."""


@final
@record
class Features(LinearMap):
    """F as a matrix: row y holds the features of label y."""

    matrix: Float[Array, "n d"]

    @property
    def shape(self):
        n, d = self.matrix.shape
        return n, d

    @property
    def dtype(self):
        return self.matrix.dtype

    def forward(self, v):
        return self.matrix @ checks.matching("v", v, self.matrix[0])

    def transpose(self, u):
        return self.matrix.T @ u

    def transpose_rows(self, rows):
        return rows @ self.matrix

    def unravel(self, flat):
        return flat


@final
@record
class FunctionPair(LinearMap):
    """F as two functions, each a pytree: arrays held by a `jax.tree_util.Partial` pass through `jit` and `vmap`."""

    apply: Any
    apply_transpose: Any
    labels: int = static()
    domain: tuple = static()  # the structure and the leaves' shapes and dtypes of the parameters

    @property
    def shape(self):
        _, leaves = self.domain
        return self.labels, sum(leaf.size for leaf in leaves)

    @property
    def dtype(self):
        _, leaves = self.domain
        return jnp.result_type(*(leaf.dtype for leaf in leaves))

    def forward(self, v):
        return self.apply(v)

    def transpose(self, u):
        return self.apply_transpose(u)

    def transpose_rows(self, rows):
        return jax.vmap(lambda u: ravel_pytree(self.apply_transpose(u))[0])(rows)

    def unravel(self, flat):
        structure, leaves = self.domain
        example = structure.unflatten([jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves])
        return ravel_pytree(example)[1](flat)


def as_linear_map(features: object, logits: Float[Array, " n"]) -> LinearMap:
    """`features` as a map to as many logits as `logits` has, in its dtype or a wider one."""
    if isinstance(features, tuple) and any(callable(f) for f in features):
        if len(features) != 2 or not all(callable(f) for f in features):
            raise ValueError(
                f"features: expected a matrix or a pair (forward, transpose) of functions; got {features!r}"
            )
        return _function_pair(*features, logits)
    matrix = checks.float_array("features", features, ["n", "d"])
    if matrix.shape[0] != logits.size:
        raise ValueError(
            f"features: expected one row for each of the {logits.size} labels of the bound, shape ({logits.size}, d); "
            f"got shape {matrix.shape}"
        )
    return Features(matrix.astype(working_dtype(matrix, logits)))


def _function_pair(forward: Callable, transpose: Callable, logits) -> FunctionPair:
    try:
        parameters = jax.eval_shape(transpose, logits)
    except (TypeError, ValueError) as error:
        raise ValueError(f"features: transpose does not take logits of shape {logits.shape}: {error}") from error
    try:
        image = jax.eval_shape(forward, parameters)
    except (TypeError, ValueError) as error:
        raise ValueError(f"features: forward does not take what transpose returns, {parameters}: {error}") from error
    if getattr(image, "shape", None) != logits.shape:
        raise ValueError(f"features: expected forward to return logits of shape {logits.shape}; got {image}")
    leaves, structure = jax.tree.flatten(parameters)
    return FunctionPair(
        apply=_as_pytree(forward),
        apply_transpose=_as_pytree(transpose),
        labels=logits.size,
        domain=(structure, tuple(leaves)),
    )


def _as_pytree(function: Callable) -> Callable:
    """A plain function becomes the structure of a pytree; `jax.linearize` and `Partial` are pytrees already."""
    is_leaf = jax.tree_util.all_leaves([function])
    return jax.tree_util.Partial(function) if is_leaf else function
