"""The curvature of a model on a batch, whole or in pieces; the one place that says mean.

Inputs are any tree of arrays. Its leaves have a leading axis of examples, except those that all examples share, such
as parameters that are not trained: `axes` says which, as `in_axes` of `jax.vmap` does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import checks
from qbound.curvature import Curvature, ModelCurvature, Pieces
from qbound.models import checked_logits, is_linear_logits, linearise
from qbound.quadratic import QuadraticBound

__all__ = [
    "axis_flags",
    "curvature_by_example",
    "example_count",
    "full_weights",
    "join",
    "logits_shape",
    "mean_curvature",
    "normalised",
    "split",
    "weighted_sum",
]


def mean_curvature(
    logits_fn: Callable,
    params: Any,
    inputs: Any,
    weights: Float[Array, "..."],
    *,
    bound: Callable[[Float[Array, " n"]], QuadraticBound],
    axes: Any = 0,
    microbatch_size: int | None = None,
) -> Curvature:
    """sum_j w_j J_j'M_j J_j / sum_j w_j over examples, and over the positions of sequences, at `params`.

    Args:
      logits_fn: the model.
      params: in float32 at least.
      inputs: a batch.
      weights: one for each row of logits, as `full_weights` returns them; nonnegative and not all 0, or all is NaN.
      bound: from one vector of logits to the quadratic whose curvature is M_j.
      axes: which leaves of `inputs` have an axis of examples.
      microbatch_size: the most examples to linearise at a time.
    """
    weights = normalised(weights)
    if microbatch_size is None or microbatch_size >= example_count("inputs", inputs, axes):
        return _weighted_curvature(logits_fn, bound, params, inputs, weights)

    return _in_pieces_curvature(logits_fn, bound, params, inputs, weights, axes, microbatch_size)


def curvature_by_example(
    logits_fn: Callable,
    params: Any,
    inputs: Any,
    weights: Float[Array, "..."],
    *,
    bound: Callable[[Float[Array, " n"]], QuadraticBound],
    axes: Any = 0,
) -> Curvature:
    """As `mean_curvature`, in the form whose rows can be had a few at a time.

    For `linear_logits` that is the whole batch, whose rows need not be formed. For any other model, pieces of one
    example: a row of its Jacobian is then one `vjp` of one example.
    """
    if is_linear_logits(logits_fn, params, inputs):
        return _weighted_curvature(logits_fn, bound, params, inputs, normalised(weights))
    return _in_pieces_curvature(logits_fn, bound, params, inputs, normalised(weights), axes, 1)


def _in_pieces_curvature(logits_fn, bound, params, inputs, weights, axes, microbatch_size) -> Pieces:
    structure = jax.tree.structure(inputs)
    flags = axis_flags("inputs", inputs, axes)
    examples, shared = split("inputs", inputs, axes)
    pieces = [_in_pieces(leaf, microbatch_size, "edge") for leaf in examples]
    pieces.append(_in_pieces(weights, microbatch_size, "constant"))

    def make(shared, piece):
        params, shared_inputs = shared
        *examples, weights = piece
        inputs = join(structure, flags, examples, shared_inputs)
        return _weighted_curvature(logits_fn, bound, params, inputs, weights)

    leaves, params_structure = jax.tree.flatten(params)
    return Pieces(
        shared=(params, shared),
        pieces=pieces,
        make=make,
        parameters=(params_structure, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)),
        rows=(weights.size, logits_shape(logits_fn, params, inputs)[-1]),
        axes=tuple(piece.ndim for piece in pieces),
    )


def _weighted_curvature(logits_fn, bound, params, inputs, weights):
    """sum_j w_j J_j'M_j J_j."""
    logits, linear_map = linearise(logits_fn, params, inputs)
    terms = jax.vmap(lambda h: bound(h).curvature)(logits)
    return ModelCurvature(terms, weights.reshape(-1).astype(logits.dtype), linear_map)


def _in_pieces(array, size, mode):
    """(m, ...) as (pieces, size, ...). The last piece is filled up with copies of the last example, of weight 0."""
    pieces = -(-array.shape[0] // size)
    padding = [(0, pieces * size - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, padding, mode=mode).reshape(pieces, size, *array.shape[1:])


def normalised(weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """Weights that sum to 1; NaN throughout if one is negative or not finite, or all are 0."""
    weights = jnp.where(weights >= 0, weights, jnp.nan)
    # So that the sum cannot overflow; in two steps, because the reciprocal of a huge number is taken for 0.
    scale = 1 / jnp.sqrt(jnp.max(weights))
    weights = weights * scale * scale
    return weights / jnp.sum(weights)


def weighted_sum(weights: Float[Array, " b"], values: Float[Array, " b"]) -> Float[Array, ""]:
    """sum_j w_j values_j. A weight of 0 removes its example, even one that is infinite."""
    return jnp.sum(jnp.where(weights == 0, 0, weights * values))


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


def logits_shape(logits_fn: Callable, params: Any, inputs: Any) -> tuple[int, ...]:
    """The shape (..., n) of the logits of a batch, without computing them."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(inputs)):
        return checked_logits(jax.eval_shape(logits_fn, params, inputs)).shape
    # Closed over, so that a flag among the inputs stays a Python value.
    return checked_logits(jax.eval_shape(lambda params: logits_fn(params, inputs), params)).shape


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
