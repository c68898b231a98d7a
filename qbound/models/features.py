"""Linear maps that a caller gives: explicit features, or a function with its transpose."""

from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import checks
from qbound.linalg.dense import times
from qbound.models.base import FunctionPair, LinearMap, _as_pytree, linearised
from qbound.records import record
from qbound.types import working_dtype


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
