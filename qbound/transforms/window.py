"""A window of recent examples: a ring buffer of their inputs and weights in the state of a transform."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qbound import batches, checks

__all__ = ["SpfbWindow", "batch_of_one", "empty_window", "is_full", "push", "trust", "withdraw_unless"]

# With as many examples in the window, half of a step is taken. Fewer let the objective of small data sets rise by half
# in the first steps with batches of one; more slow down the first steps with batches of a hundred.
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


def push(window: SpfbWindow, examples: list[Array], weights: Float[Array, "..."]) -> SpfbWindow:
    """The window with a batch entered; of a batch larger than the window, its last examples."""
    if len(examples) != len(window.window_examples):
        raise ValueError(
            f"inputs: expected a tree like inputs_like, with {len(window.window_examples)} arrays; got {len(examples)}"
        )
    place = _places(window, weights.shape[0])

    def enter(buffer, new):
        like = jax.ShapeDtypeStruct((place.size, *buffer.shape[1:]), buffer.dtype)
        return buffer.at[place].set(checks.matching("inputs", new[-place.size :], like), unique_indices=True)

    size = window.window_weights.shape[0]
    return SpfbWindow(
        window_examples=[enter(*pair) for pair in zip(window.window_examples, examples, strict=True)],
        window_weights=enter(window.window_weights, weights),
        window_next=(window.window_next + place.size) % size,
        window_filled=jnp.minimum(window.window_filled + place.size, size),
    )


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


def _places(window, count) -> Int[Array, " k"]:
    """Where a batch of `count` goes, or as many of it as there is room for."""
    size = window.window_weights.shape[0]
    return (window.window_next + jnp.arange(min(count, size), dtype=jnp.int32)) % size


def is_full(window: SpfbWindow) -> Bool[Array, ""]:
    """Whether there is an example in every place."""
    return window.window_filled == window.window_weights.shape[0]


def trust(window: SpfbWindow) -> Float[Array, ""]:
    """k/(k + c) for k examples in the window: what part of a step to take that is right for those."""
    k = window.window_filled.astype(window.window_weights.dtype)
    return k / (k + HESITATION)


def _shape_of(leaf):
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return jax.eval_shape(lambda: jnp.asarray(leaf))
