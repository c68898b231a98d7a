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
from qbound.solve import times
from qbound.types import Parameters, working_dtype

__all__ = ["Features", "FunctionPair", "LinearMap", "as_linear_map", "linearised"]


class LinearMap(abc.ABC):
    """A linear map F from a tree of parameters, d numbers in all, to n logits."""

    @abc.abstractmethod
    def labels(self) -> int:
        """The number n of logits."""

    @abc.abstractmethod
    def domain(self) -> Any:
        """The structure, shapes and dtypes of the parameters, as a tree of `jax.ShapeDtypeStruct`."""

    @abc.abstractmethod
    def forward(self, v: Parameters) -> Float[Array, " n"]:
        """F v."""

    @abc.abstractmethod
    def transpose(self, u: Float[Array, " n"]) -> Parameters:
        """F'u."""

    @abc.abstractmethod
    def transpose_rows(self, rows: Float[Array, "r n"]) -> Float[Array, "r d"]:
        """F'u for every row u, each laid out as one vector."""

    def size(self) -> int:
        """The number d of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.domain()))

    def zeros(self) -> Parameters:
        """The parameters that are all zero."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.domain())


@final
@record
class Features(LinearMap):
    """F as a matrix: row y holds the features of label y."""

    matrix: Float[Array, "n d"]

    def labels(self):
        return checks.unbatched("curvature", self.matrix, 2).shape[0]

    def domain(self):
        matrix = checks.unbatched("curvature", self.matrix, 2)
        return jax.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype)

    def forward(self, v):
        return times(self.matrix, v)

    def transpose(self, u):
        return times(self.matrix.T, u)

    def transpose_rows(self, rows):
        return times(rows, self.matrix)


@final
@record
class FunctionPair(LinearMap):
    """F as two functions, each a pytree: arrays held by a `jax.tree_util.Partial` pass through `jit` and `vmap`.

    The functions are called in the dtypes they were made for; outside, everything is float32 or wider.
    """

    apply: Any
    apply_transpose: Any
    image: jax.ShapeDtypeStruct = static()  # the logits, in the dtype that `apply_transpose` takes
    parameters: tuple = static()  # their structure, and the shape and dtype of each leaf, as `apply` takes them

    def labels(self):
        return self.image.size

    def domain(self):
        structure, leaves = self.parameters
        return structure.unflatten([jax.ShapeDtypeStruct(leaf.shape, working_dtype(leaf)) for leaf in leaves])

    def forward(self, v):
        structure, leaves = self.parameters
        v = jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), v, structure.unflatten(leaves))
        logits = self.apply(v)
        return logits.astype(working_dtype(logits))

    def transpose(self, u):
        parameters = self.apply_transpose(u.astype(self.image.dtype))
        return jax.tree.map(lambda leaf: leaf.astype(working_dtype(leaf)), parameters)

    def transpose_rows(self, rows):
        return jax.vmap(lambda u: ravel_pytree(self.transpose(u))[0])(rows)


def as_linear_map(features: Any, logits: Float[Array, " n"], point: Any = None) -> LinearMap:
    """`features` as a map to as many logits as `logits` has, in its dtype or a wider one.

    A matrix, a pair of functions (forward, transpose), or one function, which is linearised at `point`.
    """
    if callable(features):
        if point is None:
            raise ValueError("point: expected the parameters at which to linearise the function `features`; got None")
        return linearised(lambda point: _check_image("the function", features(point), logits), point)[1]
    if isinstance(features, (tuple, list)) and any(callable(f) for f in features):
        if len(features) != 2 or not all(callable(f) for f in features):
            raise ValueError(f"features: expected a pair (forward, transpose) of functions; got {features!r}")
        forward, transpose = features
        return _function_pair(forward, transpose, jax.ShapeDtypeStruct(logits.shape, logits.dtype))
    matrix = checks.float_array("features", features, ["n", "d"])
    if matrix.shape[0] != logits.size:
        raise ValueError(
            f"features: expected one row for each of the {logits.size} labels of the bound, shape ({logits.size}, d); "
            f"got shape {matrix.shape}"
        )
    return Features(matrix.astype(working_dtype(matrix, logits)))


def linearised(function: Callable, point: Any) -> tuple[Float[Array, "..."], FunctionPair]:
    """The value of `function` at `point`, and its Jacobian there.

    What the function closes over becomes part of the result.
    """
    point = jax.tree.map(jnp.asarray, point)
    value, forward = jax.linearize(function, point)
    _, pull = jax.vjp(function, point)
    leaves, structure = jax.tree.flatten(point)
    return value, FunctionPair(
        apply=_as_pytree(forward),
        apply_transpose=jax.tree_util.Partial(_first_of_call, pull),
        image=jax.ShapeDtypeStruct(value.shape, value.dtype),
        parameters=(structure, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)),
    )


def _first_of_call(function, u):
    """Functions made by `jax.vjp` return a tuple, here of one."""
    return function(u)[0]


def _function_pair(forward: Callable, transpose: Callable, logits: jax.ShapeDtypeStruct) -> FunctionPair:
    try:
        parameters = jax.eval_shape(transpose, logits)
    except (TypeError, ValueError) as error:
        raise ValueError(f"features: transpose does not take logits of shape {logits.shape}: {error}") from error
    try:
        image = jax.eval_shape(forward, parameters)
    except (TypeError, ValueError) as error:
        hint = " (jax.vjp returns a tuple: take its entry [0])" if isinstance(parameters, tuple) else ""
        raise ValueError(
            f"features: forward does not take what transpose returns, {parameters}{hint}: {error}"
        ) from error
    _check_image("forward", image, logits)
    leaves, structure = jax.tree.flatten(parameters)
    return FunctionPair(
        apply=_as_pytree(forward),
        apply_transpose=_as_pytree(transpose),
        image=logits,
        parameters=(structure, tuple(leaves)),
    )


def _check_image(name, image, logits):
    if getattr(image, "shape", None) != logits.shape:
        got = jax.tree.map(jnp.shape, image)
        raise ValueError(f"features: expected {name} to return logits of shape {logits.shape}; got shape {got}")
    return image


def _as_pytree(function: Callable) -> Callable:
    """A plain function becomes the structure of a pytree; `jax.linearize` and `Partial` are pytrees already."""
    is_leaf = jax.tree_util.all_leaves([function])
    return jax.tree_util.Partial(function) if is_leaf else function
