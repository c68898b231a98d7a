"""A window of recent examples: a ring buffer of their inputs and weights in the state of a transform."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qbound import batches

__all__ = [
    "SpfbWindow",
    "batch_of_one",
    "empty_window",
    "check_examples",
    "is_full",
    "push",
    "restarted",
    "trust",
    "trust_in",
    "withdraw_unless",
]

# With as many examples in the window, half of a step is taken. Chosen by hand: less is bolder with batches of one, more
# slows down the first steps with large batches.
HESITATION = 30


class SpfbWindow(NamedTuple):
    """The last examples, the current batch among them.

    Attributes:
      window_examples: the leaves of their inputs that have an axis of examples, each (N, ...).
      window_weights: of every row of logits, (N, ...); 0 where there is no example yet.
      window_next: where the next example goes.
      window_filled: how many examples there are.
    """

    window_examples: list[Array]
    window_weights: Float[Array, "..."]
    window_next: Int[Array, ""]
    window_filled: Int[Array, ""]


def empty_window(size: int, inputs_like: Any, axes: Any, weights_shape: tuple[int, ...], dtype: Any) -> SpfbWindow:
    """A window of `size` examples like `inputs_like`, with weights of `weights_shape` each."""
    examples, _ = batches.split("inputs_like", batch_of_one(inputs_like, axes), axes)
    return SpfbWindow(
        window_examples=[jnp.zeros((size, *leaf.shape[1:]), leaf.dtype) for leaf in examples],
        window_weights=jnp.zeros((size, *weights_shape), dtype),
        window_next=jnp.zeros((), jnp.int32),
        window_filled=jnp.zeros((), jnp.int32),
    )


def batch_of_one(inputs_like: Any, axes: Any) -> Any:
    """One example's arrays or shapes, as the shapes of a batch of one."""
    shapes = jax.tree.map(_shape_of, inputs_like)
    examples, shared = [], []
    flags = batches.axis_flags("inputs_like", shapes, axes)
    for leaf, has_axis in zip(jax.tree.leaves(shapes), flags, strict=True):
        if has_axis:
            examples.append(jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype))
        else:
            shared.append(leaf)
    return batches.join(jax.tree.structure(shapes), flags, examples, shared)


def check_examples(inputs: Any, inputs_like: Any, axes: Any) -> list[Array]:
    """The arrays of `inputs` that go into a window made for `inputs_like`, which they must be like."""
    like = batch_of_one(inputs_like, axes)
    structure, expected = jax.tree.structure(inputs), jax.tree.structure(like)
    if structure != expected:
        raise ValueError(f"inputs: expected a tree like inputs_like, of structure {expected}; got {structure}")
    examples, _ = batches.split("inputs", inputs, axes)
    examples = [jnp.asarray(leaf) for leaf in examples]
    for leaf, one in zip(examples, batches.split("inputs_like", like, axes)[0], strict=True):
        if leaf.shape[1:] != one.shape[1:] or leaf.dtype != one.dtype:
            raise ValueError(
                f"inputs: expected examples of shape {one.shape[1:]} and dtype {one.dtype}, as in inputs_like, along a "
                f"first axis; got {leaf.dtype} of shape {leaf.shape}"
            )
    return examples


def push(window: SpfbWindow, examples: list[Array], weights: Float[Array, "..."]) -> SpfbWindow:
    """The window with a batch entered; of a batch larger than the window, its last examples."""
    window = jax.lax.cond(window.window_filled == 0, lambda: _fill(window, examples), lambda: window)
    place = _places(window, weights.shape[0])

    def enter(buffer, new):
        return buffer.at[place].set(_placed_as(buffer, new[-place.size :]), unique_indices=True)

    size = window.window_weights.shape[0]
    return SpfbWindow(
        window_examples=[enter(*pair) for pair in zip(window.window_examples, examples, strict=True)],
        window_weights=enter(window.window_weights, weights),
        window_next=(window.window_next + place.size) % size,
        window_filled=jnp.minimum(window.window_filled + place.size, size),
    )


def _fill(window: SpfbWindow, examples: list[Array]) -> SpfbWindow:
    """An empty window with copies of a real example in every place.

    Their weight is 0, but a model may not be finite at inputs of zero, and 0 times NaN is not 0.
    """

    def copies(buffer, new):
        # The first example as a sum: unlike indexing, this allows batches that are sharded.
        is_first = (jnp.arange(new.shape[0]) == 0).reshape(-1, *(1,) * (new.ndim - 1))
        only_first: Array = jnp.where(is_first, new, 0)  # pyright: ignore[reportAssignmentType]
        return jnp.broadcast_to(jnp.sum(only_first, axis=0).astype(buffer.dtype), buffer.shape)

    return SpfbWindow(
        [copies(*pair) for pair in zip(window.window_examples, examples, strict=True)],
        jnp.zeros_like(window.window_weights),
        jnp.zeros_like(window.window_next),
        jnp.zeros_like(window.window_filled),
    )


def restarted(window: SpfbWindow, examples: list[Array], weights: Float[Array, "..."]) -> SpfbWindow:
    """The window with nothing in it but a batch."""
    return push(_fill(window, examples), examples, weights)


def withdraw_unless(accepted: Bool[Array, ""], pushed: SpfbWindow, window: SpfbWindow, count: int) -> SpfbWindow:
    """`pushed`, or `window`, into which a batch of `count` was pushed: an example that breaks one update must not stay.

    Only the rows of the batch are written, so that the buffers can be updated in place.
    """
    place = _places(window, count)

    def settle(new, old):
        keep = accepted.reshape((1,) * new.ndim)
        return new.at[place].set(jnp.where(keep, new[place], old[place]), unique_indices=True)

    return SpfbWindow(
        window_examples=jax.tree.map(settle, pushed.window_examples, window.window_examples),
        window_weights=settle(pushed.window_weights, window.window_weights),
        window_next=jnp.where(accepted, pushed.window_next, window.window_next),
        window_filled=jnp.where(accepted, pushed.window_filled, window.window_filled),
    )


def _placed_as(buffer, new: Array) -> Array:
    """`new` on the devices of the buffer it goes into: where shardings are part of types, both have to agree."""
    if jax.sharding.get_abstract_mesh().explicit_axes:
        return jax.sharding.reshard(new, jax.typeof(buffer).sharding)
    return new


def _places(window, count) -> Int[Array, " k"]:
    """Where a batch of `count` goes, or as many of it as there is room for."""
    size = window.window_weights.shape[0]
    return (window.window_next + jnp.arange(min(count, size), dtype=jnp.int32)) % size


def is_full(window: SpfbWindow) -> Bool[Array, ""]:
    """Whether there is an example in every place."""
    return window.window_filled == window.window_weights.shape[0]


def trust(window: SpfbWindow) -> Float[Array, ""]:
    """k/(k + c) for k examples of some weight in the window: what part to take of a step that is right for those."""
    weights = window.window_weights.reshape(window.window_weights.shape[0], -1)
    return trust_in(jnp.sum(jnp.any(weights > 0, axis=1).astype(weights.dtype)))


def trust_in(examples: Float[Array, ""]) -> Float[Array, ""]:
    """As `trust`, for so many examples."""
    return examples / (examples + HESITATION)


def _shape_of(leaf):
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return jax.eval_shape(lambda: jnp.asarray(leaf))
