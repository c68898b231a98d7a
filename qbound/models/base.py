"""The seam between parameters and logits: linear maps, whole batches of them, and what a batch is."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from qbound import checks, trees
from qbound.linalg.dense import HIGHEST, gram
from qbound.records import record, static
from qbound.types import Parameters, working_dtype

# Linear maps from parameters to logits.


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
        """The product F v."""

    @abc.abstractmethod
    def transpose(self, u: Float[Array, " n"]) -> Parameters:
        """The product F'u."""

    @abc.abstractmethod
    def transpose_rows(self, rows: Float[Array, "r n"]) -> Float[Array, "r d"]:
        """The product F'u for every row u, each laid out as one vector."""

    def size(self) -> int:
        """The number d of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.domain()))

    def zeros(self) -> Parameters:
        """The parameters that are all zero."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.domain())


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


def linearised(function: Callable, point: Any) -> tuple[Float[Array, "..."], FunctionPair]:
    """The value of `function` at `point`, and its Jacobian there.

    What the function closes over becomes part of the result.
    """
    point = jax.tree.map(jnp.asarray, point)
    value, forward = jax.linearize(function, point)
    _, pull = jax.vjp(function, point)
    return value, FunctionPair(
        apply=_as_pytree(forward),
        apply_transpose=jax.tree_util.Partial(_first_of_call, pull),
        image=jax.ShapeDtypeStruct(value.shape, value.dtype),
        parameters=trees.shapes(point),
    )


def _first_of_call(function, u):
    """Functions made by `jax.vjp` return a tuple, here of one."""
    return function(u)[0]


def _as_pytree(function: Callable) -> Callable:
    """A plain function becomes the structure of a pytree; `jax.linearize` and `Partial` are pytrees already."""
    is_leaf = jax.tree_util.all_leaves([function])
    return jax.tree_util.Partial(function) if is_leaf else function


# The logits of a batch, as a linear map of parameters.


class BatchMap(abc.ABC):
    """The linear map J from a tree of parameters, p numbers in all, to b rows of n logits.

    Products are those of `map`; subclasses add what direct solvers need.
    """

    map: FunctionPair

    def shape(self) -> tuple[int, int]:
        """(b, n)."""
        b, n = self.map.image.shape
        return b, n

    def domain(self) -> Any:
        """The structure, shapes and dtypes of the parameters, as a tree of `jax.ShapeDtypeStruct`."""
        return self.map.domain()

    def forward(self, v: Any) -> Float[Array, "b n"]:
        """The product J v."""
        return self.map.forward(v)

    def transpose(self, u: Float[Array, "b n"]) -> Any:
        """The product J'u."""
        return self.map.transpose(u)

    @abc.abstractmethod
    def rows(self, factors: Float[Array, "b r n"]) -> Float[Array, "b*r p"]:
        """The rows of F_j J_j for every example, one row after the other, each laid out as one vector."""

    @abc.abstractmethod
    def row_products(self, factors: Float[Array, "b r n"]) -> Float[Array, "b*r b*r"]:
        """All inner products of `rows`."""

    @abc.abstractmethod
    def sandwich(self, factors: Float[Array, "b r n"]) -> Float[Array, "p p"]:
        """The sum over j of J_j'F_j'F_j J_j: `rows` transposed, times `rows`."""


@final
@record
class JacobianMap(BatchMap):
    """The Jacobian of any model. Only the three methods for direct solvers form it."""

    map: FunctionPair

    def rows(self, factors):
        b, r, _ = factors.shape
        return jnp.einsum("jrn,jnp->jrp", factors, self._jacobian(), precision=HIGHEST).reshape(b * r, -1)

    def row_products(self, factors):
        return gram(self.rows(factors).T)

    def sandwich(self, factors):
        return gram(self.rows(factors))

    def _jacobian(self) -> Float[Array, "b n p"]:
        """By whichever of its two sides is the smaller."""
        b, n = self.shape()
        zeros, unravel = ravel_pytree(self.map.zeros())
        if zeros.size <= b * n:
            columns = jax.vmap(lambda v: self.map.forward(unravel(v)))(jnp.eye(zeros.size, dtype=zeros.dtype))
            return jnp.moveaxis(columns, 0, -1)
        units = jnp.eye(b * n, dtype=working_dtype(self.map.image)).reshape(b * n, b, n)
        return self.map.transpose_rows(units).reshape(b, n, -1)


# What a batch is: weights of its examples, and inputs that are any tree of arrays. Its leaves have a leading axis of
# examples, except those that all examples share, such as parameters that are not trained: `axes` says which, as
# `in_axes` of `jax.vmap` does.


def normalised(weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """Weights that sum to 1; NaN throughout if one is negative or not finite, or all are 0."""
    weights = jnp.where(weights >= 0, weights, jnp.nan)
    # So that the sum cannot overflow; in two steps, because the reciprocal of a huge number is taken for 0.
    scale = 1 / jnp.sqrt(jnp.max(weights))
    weights = weights * scale * scale
    return weights / jnp.sum(weights)


def full_weights(name: str, weights: Any, shape: tuple[int, ...], dtype: Any) -> Float[Array, "..."]:
    """`weights` of examples, or of their first axes, as one for each of the rows (..., ) of logits."""
    if weights is None:
        return jnp.ones(shape, dtype)
    weights = checks.real_array(name, weights)
    if weights.ndim == 0 or weights.shape != shape[: weights.ndim]:
        expected = " or ".join(str(shape[:k]) for k in range(1, len(shape) + 1))
        raise ValueError(f"{name}: expected shape {expected}, one for each example; got shape {weights.shape}")
    weights = weights.astype(dtype).reshape(weights.shape + (1,) * (len(shape) - weights.ndim))
    return jnp.broadcast_to(weights, shape)


def split(name: str, inputs: Any, axes: Any) -> tuple[list[Any], list[Any]]:
    """The leaves of `inputs` with an axis of examples, which must agree in its length, and the leaves without."""
    examples, shared = [], []
    for leaf, has_axis in zip(jax.tree.leaves(inputs), axis_flags(name, inputs, axes), strict=True):
        (examples if has_axis else shared).append(leaf if hasattr(leaf, "shape") else jnp.asarray(leaf))
    if not examples:
        raise ValueError(f"{name}: expected at least one array with a leading axis of examples; got {inputs!r}")
    lengths = {leaf.shape[:1] for leaf in examples}
    if len(lengths) > 1 or lengths == {()} or lengths == {(0,)}:
        raise ValueError(
            f"{name}: expected arrays with the same number of examples, at least one, along their first axis; got "
            f"shapes {[leaf.shape for leaf in examples]} (inputs_axes says which arrays all examples share)"
        )
    return examples, shared


def join(structure: Any, flags: Sequence[bool], examples: Sequence[Any], shared: Sequence[Any]) -> Any:
    """The inverse of `split`, for the structure of the inputs and their `axis_flags`."""
    parts = {True: iter(examples), False: iter(shared)}
    return jax.tree.unflatten(structure, [next(parts[flag]) for flag in flags])


def example_count(name: str, inputs: Any, axes: Any) -> int:
    """How many examples a batch has."""
    return split(name, inputs, axes)[0][0].shape[0]


def axis_flags(name: str, inputs: Any, axes: Any) -> list[bool]:
    """For every leaf of `inputs`, whether it has an axis of examples."""

    def is_none(x):
        return x is None

    try:
        full = jax.tree.leaves(jax.tree.broadcast(axes, inputs, is_leaf=is_none), is_leaf=is_none)
    except ValueError as error:
        raise ValueError(
            f"inputs_axes: expected 0 or None for every leaf of {name}, or for a prefix of its tree; got {axes!r}: "
            f"{error}"
        ) from None
    if any(axis is not None and axis != 0 for axis in full):
        raise ValueError(f"inputs_axes: expected 0 (an axis of examples) or None (shared by all of them); got {axes!r}")
    leaves = jax.tree.leaves(inputs, is_leaf=is_none)
    return [axis is not None for axis, leaf in zip(full, leaves, strict=True) if leaf is not None]
