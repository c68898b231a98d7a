"""What SPFB and LSPFB remember of earlier batches: a window of examples, a sketch of curvatures, a limit of steps."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qbound import checks, trees
from qbound.curvature import Curvature, LowRank
from qbound.families.low_rank.bound import METHODS, Method, checked_rank, low_rank
from qbound.models.base import axis_flags, join, split
from qbound.types import Scalar, working_dtype

# A window of recent examples: a ring buffer of their inputs and weights in the state of a transform.

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
    examples, _ = split("inputs_like", batch_of_one(inputs_like, axes), axes)
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
    flags = axis_flags("inputs_like", shapes, axes)
    for leaf, has_axis in zip(jax.tree.leaves(shapes), flags, strict=True):
        if has_axis:
            examples.append(jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype))
        else:
            shared.append(leaf)
    return join(jax.tree.structure(shapes), flags, examples, shared)


def check_examples(inputs: Any, inputs_like: Any, axes: Any) -> list[Array]:
    """The arrays of `inputs` that go into a window made for `inputs_like`, which they must be like."""
    like = batch_of_one(inputs_like, axes)
    structure, expected = jax.tree.structure(inputs), jax.tree.structure(like)
    if structure != expected:
        raise ValueError(f"inputs: expected a tree like inputs_like, of structure {expected}; got {structure}")
    examples, _ = split("inputs", inputs, axes)
    examples = [jnp.asarray(leaf) for leaf in examples]
    for leaf, one in zip(examples, split("inputs_like", like, axes)[0], strict=True):
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


def trust(window: SpfbWindow) -> Float[Array, ""]:
    """k/(k + c) for k examples of some weight in the window: what part to take of a step that is right for those."""
    weights = window.window_weights.reshape(window.window_weights.shape[0], -1)
    return trust_in(jnp.sum(jnp.any(weights > 0, axis=1).astype(weights.dtype)))


def trust_in(examples: Float[Array, ""]) -> Float[Array, ""]:
    """As `trust`, for a number of examples."""
    return examples / (examples + HESITATION)


def _shape_of(leaf):
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return jax.eval_shape(lambda: jnp.asarray(leaf))


# The curvature of LSPFB: low-rank, of one batch or of a sketch that is carried from batch to batch.
#
# With decay rho, C_t = compress(rho C_{t-1} + Sigma_t) lies above sum_i rho^i Sigma_{t-i}, each at the parameters of
# its own step. A step is made with C_t / W_t, W_t = sum_i rho^i: an upper bound of the discounted **mean** of the
# curvatures, and not of Sigma_t. Without decay it is one of Sigma_t, and the quadratic is one of the objective of the
# batch.


@dataclasses.dataclass(frozen=True)
class SketchOptions:
    """The options that `qbound.lspfb` has beside those of `qbound.spfb`."""

    rank: int
    method: Method
    decay: Scalar
    block_size: int | None

    def __post_init__(self):
        object.__setattr__(self, "rank", checks.integer("rank", self.rank))
        checks.choice("method", self.method, METHODS)
        checks.fraction("decay", self.decay)
        if self.block_size is not None:
            object.__setattr__(self, "block_size", checks.integer("block_size", self.block_size))


class SpfbSketch(NamedTuple):
    """The sketch C_t = V'S V + D, and of how many batches it is.

    Attributes:
      sketch_basis: V, laid out as `jax.flatten_util.ravel_pytree` does.
      sketch_scales: the diagonal of S.
      sketch_diagonal: that of D.
      sketch_batches: W_t.
    """

    sketch_basis: Float[Array, "k d"]
    sketch_scales: Float[Array, " k"]
    sketch_diagonal: Float[Array, " d"]
    sketch_batches: Float[Array, ""]


def first_sketch(options: SketchOptions, params: Any) -> SpfbSketch | None:
    """Before the first batch; None if none is carried. A decay that is an array is taken not to be 0."""
    size, dtype = trees.size(params), working_dtype(*jax.tree.leaves(params))
    rank = checked_rank(options.rank, size, stacklevel=3) if size else options.rank
    if checks.is_number(options.decay) and options.decay == 0:
        return None
    return SpfbSketch(
        jnp.zeros((rank, size), dtype), jnp.zeros(rank, dtype), jnp.zeros(size, dtype), jnp.zeros((), dtype)
    )


def add_batch(
    options: SketchOptions, sketch: SpfbSketch | None, curvature: Curvature
) -> tuple[LowRank, SpfbSketch | None]:
    """The low-rank curvature to make a step with, and the sketch after a batch of `curvature`."""
    if sketch is None:
        return _compressed(options, curvature, None), None
    decay = jnp.asarray(checks.fraction("decay", options.decay), sketch.sketch_batches.dtype)
    before = LowRank(sketch.sketch_basis, decay * sketch.sketch_scales, decay * sketch.sketch_diagonal)
    total = _compressed(options, curvature, before)
    count = decay * sketch.sketch_batches + 1
    mean = dataclasses.replace(total, scales=total.scales / count, diagonal=total.diagonal / count)
    return mean, SpfbSketch(total.basis, total.scales, total.diagonal, count)


def _compressed(options, curvature, start):
    return low_rank(curvature, rank=options.rank, method=options.method, block_size=options.block_size, start=start)


# How long a step may be that has its gradient from a small batch and its curvature from many.
#
# Along a step of length eta the bound of the batch's own objective changes by -eta g's + eta^2/2 s'Bs, with B the
# curvature of that batch. If the batch has few examples beside the number of parameters, s'Bs is far above g's, and a
# full step makes the objective rise. It does not rise, on average over batches, up to eta = 2 E[g's] / E[s'Bs].
#
# The averages are of earlier batches only: a limit that depends on the current one would bias the step.


class SpfbLimit(NamedTuple):
    """Averages over the batches so far.

    Attributes:
      limit_slope: of g's.
      limit_curvature: of s'Bs, with B the damped curvature of the batch alone.
      limit_updates: how many there were, for learning rates that follow a schedule.
    """

    limit_slope: Float[Array, ""]
    limit_curvature: Float[Array, ""]
    limit_updates: Int[Array, ""]


def no_limit_yet(dtype) -> SpfbLimit:
    """Before the first batch."""
    return SpfbLimit(jnp.zeros((), dtype), jnp.zeros((), dtype), jnp.zeros((), jnp.int32))


def longest_step(limit: SpfbLimit) -> Float[Array, ""]:
    """2 E[g's] / E[s'Bs]; infinite before there was a batch."""
    known = limit.limit_curvature > 0
    return jnp.where(known, 2 * limit.limit_slope / jnp.where(known, limit.limit_curvature, 1), jnp.inf)


def updated_limit(limit: SpfbLimit, slope: Array, curvature: Array, weight: Scalar) -> SpfbLimit:
    """A batch taken into the averages, with `weight`, or in the first steps as one of few; not if it is not finite."""
    count = limit.limit_updates.astype(slope.dtype)
    weight_now = jnp.maximum(1 / (count + 1), jnp.asarray(weight, slope.dtype))
    finite = jnp.isfinite(slope) & jnp.isfinite(curvature)

    def average(old, new):
        return jnp.where(finite, old + weight_now * (new - old), old)

    return SpfbLimit(
        limit_slope=average(limit.limit_slope, slope),
        limit_curvature=average(limit.limit_curvature, curvature),
        limit_updates=limit.limit_updates + 1,
    )


# How far the memory of batches has filled.


class Filling(NamedTuple):
    """Of a window, or a sketch, with the current batch.

    Attributes:
      full: whether it is full.
      trust: what part to take of a step that is right for what there is.
      weight: of one batch in it.
    """

    full: Bool[Array, ""]
    trust: Float[Array, ""]
    weight: Any


def how_full_is_window(window: SpfbWindow, examples: int) -> Filling:
    """With batches of `examples`."""
    size = window.window_weights.shape[0]
    return Filling(window.window_filled == size, trust(window), min(1.0, examples / size))


def how_full_is_sketch(sketch: SpfbSketch, examples: int, decay: Scalar) -> Filling:
    """Full once about as many batches have come as it remembers, 1/(1 - rho): then W_t (1 - rho) = 1 - 1/e."""
    count = sketch.sketch_batches
    decay = jnp.asarray(decay, count.dtype)
    return Filling(count * (1 - decay) >= 0.63, trust_in(count * examples), 1 - decay)


def recent_inputs(window: SpfbWindow, inputs: Any, axes: Any) -> Any:
    """The examples of a window as a batch, with what all examples share taken from `inputs`."""
    _, shared = split("inputs", inputs, axes)
    flags = axis_flags("inputs", inputs, axes)
    return join(jax.tree.structure(inputs), flags, window.window_examples, shared)


def settled_window(window: SpfbWindow, batch: Any, g: Any, damping: Array, sound: Bool[Array, ""]) -> SpfbWindow:
    """The window after an update: with the batch if all went well.

    If not, and the batch is to blame, without it. If the batch alone is fine, some older example is to blame, which the
    parameters have moved away from: then with nothing but the batch.
    """
    kept = withdraw_unless(sound, batch.window, window, batch.weights.shape[0])

    def older_to_blame():
        # Of the size that solvers work with, so that what overflows there does so here.
        size = trees.largest(g)
        unit = trees.scale(1 / jnp.where(size > 0, size, 1), g)
        return trees.all_finite(trees.add_scaled(batch.of_batch().mv(unit), damping, unit))

    restart = jax.lax.cond(sound, lambda: jnp.array(False), older_to_blame)
    return jax.lax.cond(restart, lambda: restarted(window, batch.examples, batch.weights), lambda: kept)
