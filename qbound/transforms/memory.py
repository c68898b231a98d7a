"""Where the curvature of an update comes from: its batch, a window of examples, or a sketch of the batches before."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qbound import batches, trees
from qbound.curvature import Curvature
from qbound.transforms.options import given, parameter_dtype
from qbound.transforms.sketch import SpfbSketch, add_batch, is_settled
from qbound.transforms.window import (
    SpfbWindow,
    batch_of_one,
    check_examples,
    empty_window,
    is_full,
    push,
    restarted,
    trust,
    trust_in,
    withdraw_unless,
)

__all__ = ["Batch", "Progress", "batch_curvature", "first_window", "progress", "settled_window", "source_curvature"]


class Batch(NamedTuple):
    """The curvature of one update, and the batch that is entered into a window or a sketch for it."""

    source: Curvature  # what the step is made with
    own: Callable[[], Curvature]  # that of the batch alone
    window: SpfbWindow | None = None  # with the batch entered
    examples: Any = None
    weights: Any = None
    sketch: SpfbSketch | None = None  # with the batch entered


def batch_curvature(options, state, params, inputs, example_weights, curvature_inputs, curvature_weights) -> Batch:
    """The curvature of the caller's choice, of the current batch, or of the window or the sketch that it enters."""
    window = state.spfb_window
    if curvature_inputs is not None:
        if window is not None or state.spfb_sketch is not None:
            kept = "window" if window is not None else "decay"
            raise ValueError(f"curvature_inputs: expected None with {kept}=, which keeps its own; got both")
        weights = options.weights("curvature_weights", curvature_weights, params, curvature_inputs)
        curvature, _ = source_curvature(options, None, params, curvature_inputs, weights)
        return Batch(curvature, lambda: curvature)
    if curvature_weights is not None:
        raise ValueError("curvature_weights: expected None without curvature_inputs; got weights")
    inputs = given("inputs", inputs, "the batch that the gradient is of, as logits_fn takes it")
    examples = [] if window is None else check_examples(inputs, options.inputs_like, options.inputs_axes)
    weights = options.weights("example_weights", example_weights, params, inputs)
    own = functools.cache(lambda: options.curvature(params, inputs, weights))
    if window is None:
        curvature, sketch = source_curvature(options, state.spfb_sketch, params, inputs, weights)
        return Batch(curvature, own, weights=weights, sketch=sketch)
    entered = push(window, examples, weights)
    if weights.shape[0] >= options.window:
        return Batch(own(), own, entered, examples, weights)
    _, shared = batches.split("inputs", inputs, options.inputs_axes)
    flags = batches.axis_flags("inputs", inputs, options.inputs_axes)
    recent = batches.join(jax.tree.structure(inputs), flags, entered.window_examples, shared)
    return Batch(options.curvature(params, recent, entered.window_weights), own, entered, examples, weights)


def source_curvature(options, sketch, params, inputs, weights) -> tuple[Curvature, SpfbSketch | None]:
    """The curvature of a batch or, with the options of a sketch, the low-rank one of what has entered it."""
    if options.sketch is None:
        return options.curvature(params, inputs, weights), None
    return add_batch(options.sketch, sketch, options.sketched_curvature(params, inputs, weights))


class Progress(NamedTuple):
    """How far the memory of batches has filled.

    Attributes:
      full: whether it has.
      trust: what part to take of a step that is right for what there is.
      weight: of one batch in it.
    """

    full: Bool[Array, ""]
    trust: Float[Array, ""]
    weight: Any


def progress(options, batch: Batch) -> Progress | None:
    """Of the window or the sketch, the batch included; None without either."""
    if batch.window is not None:
        weight = min(1.0, batch.weights.shape[0] / options.window)
        return Progress(is_full(batch.window), trust(batch.window), weight)
    if batch.sketch is not None:
        examples = batch.sketch.sketch_batches * batch.weights.shape[0]
        decay = jnp.asarray(options.sketch.decay, examples.dtype)
        return Progress(is_settled(batch.sketch, decay), trust_in(examples), 1 - decay)
    return None


def settled_window(window, batch, g, damping, sound) -> SpfbWindow | None:
    """The window after an update: with the batch if all went well.

    If not, and the batch is to blame, without it. If the batch alone is fine, some older example is to blame, which the
    parameters have moved away from: then with nothing but the batch.
    """
    if batch.window is None:
        return window
    kept = withdraw_unless(sound, batch.window, window, batch.weights.shape[0])

    def older_to_blame():
        # Of the size that solvers work with, so that what overflows there does so here.
        size = trees.largest(g)
        unit = trees.scale(1 / jnp.where(size > 0, size, 1), g)
        return trees.all_finite(trees.add_scaled(batch.own().mv(unit), damping, unit))

    restart = jax.lax.cond(sound, lambda: jnp.array(False), older_to_blame)
    return jax.lax.cond(restart, lambda: restarted(window, batch.examples, batch.weights), lambda: kept)


def first_window(options, params) -> SpfbWindow:
    """With nothing in it."""
    like, axes = options.inputs_like, options.inputs_axes
    shape = (1, 1)
    if jax.tree.leaves(params):  # optax.tree.map_params asks for a state without parameters
        shape = batches.logits_shape(options.logits_fn, params, batch_of_one(like, axes))
    return empty_window(options.window, like, axes, shape[1:-1], parameter_dtype(params))
