"""One update of KSPFB: what it is told, what it remembers, and what it does."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from qbound import batches, checks, compiler, trees
from qbound.bounds import log_partition_bound
from qbound.curvature.kronecker import MatrixLayout
from qbound.models import checked_logits
from qbound.solve import times
from qbound.transforms.finite import runs_away
from qbound.transforms.kronecker_factors import (
    INPUT_FIELDS,
    KspfbFactors,
    curvature_of,
    empty_factors,
    layout_of,
    mean_input_value,
    with_inputs,
    with_labels,
)
from qbound.transforms.kspfb_limit import KspfbLimit, limited, no_limit_yet, wants_factors
from qbound.transforms.kspfb_mean import KspfbMean, mean_direction, no_directions_yet, share_of_next
from qbound.transforms.options import as_number, given, parameter_dtype
from qbound.transforms.preconditioner import CurvatureTransform, curvature_transform
from qbound.types import Order, Scalar

__all__ = ["KspfbInfo", "KspfbOptions", "LabelCurvature", "ScaleByKspfbState", "kspfb_direction"]

LabelCurvature = Literal["bound", "bohning"]

# With fewer examples in a batch than this, gradients are too noisy for steps damped for larger ones.
TYPICAL_BATCH = 1000


class KspfbInfo(NamedTuple):
    """How the last update went; `optax.tree.get(state, "kspfb_nonfinite")` finds a field in any chain.

    Attributes:
      kspfb_damping: the damping there was, the relative one included.
      kspfb_predicted_decrease: of the objective, by the quadratic, which is no bound, for the direction alone.
      kspfb_step_length: what the direction was multiplied by, before momentum and learning rate: less than 1 where
        the bound of the batch allows no more, 0 if the update was skipped.
      kspfb_nonfinite: whether the update was skipped, because a number was not finite: of the gradient, the factors,
        the curvature or, in `qbound.kspfb`, the parameters that it leads to.
      kspfb_nonfinite_total: how many updates were.
    """

    kspfb_damping: Float[Array, ""]
    kspfb_predicted_decrease: Float[Array, ""]
    kspfb_step_length: Float[Array, ""]
    kspfb_nonfinite: Bool[Array, ""]
    kspfb_nonfinite_total: Int[Array, ""]


class ScaleByKspfbState(NamedTuple):
    """State of `scale_by_kspfb`.

    Attributes:
      kspfb_info: how the last update went.
      kspfb_updates: how many there were.
      kspfb_factors: the two factors, and their eigenvectors.
      kspfb_limit: what limits the step; None in `scale_by_kspfb`, which knows no learning rate.
      kspfb_directions: for the mean of directions; None without momentum.
    """

    kspfb_info: KspfbInfo
    kspfb_updates: Int[Array, ""]
    kspfb_factors: KspfbFactors
    kspfb_limit: KspfbLimit | None = None
    kspfb_directions: KspfbMean | None = None


@dataclasses.dataclass(frozen=True)
class KspfbOptions:
    """The arguments of `kspfb`. With a `learning_rate` of None, as for `scale_by_kspfb`, steps are not limited."""

    learning_rate: optax.ScalarOrSchedule | None
    logits_fn: Callable
    l2: Scalar
    damping: Scalar
    relative_damping: Scalar
    momentum: Scalar
    features_fn: Callable | None
    decay: Scalar
    update_every: int
    input_rank: int | None
    label_curvature: LabelCurvature
    label_every: int
    label_examples: int | None
    order: Order
    output_axis: int | None

    def __post_init__(self):
        checks.function("logits_fn", self.logits_fn)
        checks.nonnegative("relative_damping", self.relative_damping)
        checks.fraction("momentum", self.momentum)
        if self.features_fn is not None:
            checks.function("features_fn", self.features_fn)
        checks.fraction("decay", self.decay)
        object.__setattr__(self, "update_every", checks.integer("update_every", self.update_every))
        if self.input_rank is not None:
            object.__setattr__(self, "input_rank", checks.integer("input_rank", self.input_rank))
        checks.choice("label_curvature", self.label_curvature, ("bound", "bohning"))
        object.__setattr__(self, "label_every", checks.integer("label_every", self.label_every))
        if self.label_examples is not None:
            object.__setattr__(self, "label_examples", checks.integer("label_examples", self.label_examples))
        checks.choice("order", self.order, ("descending", "max_first", "given"))
        if self.output_axis not in (None, 0, 1):
            raise ValueError(f"output_axis: expected 0, 1 or None; got {self.output_axis!r}")

    def is_scaled(self) -> bool:
        """Whether inputs are scaled: with relative damping, which would else be that of the largest columns."""
        return not (checks.is_number(self.relative_damping) and self.relative_damping == 0)

    def layout(self, params: Any) -> MatrixLayout:
        """Of the parameters."""
        return layout_of(params, self.logits_fn, self.features_fn, self.output_axis)

    def rate(self, count: Int[Array, ""], params: Any) -> Array:
        """Of a step."""
        assert self.learning_rate is not None
        rate = self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate
        return as_number(rate, params)  # pyright: ignore[reportArgumentType]


class Batch(NamedTuple):
    """The rows of a batch: what the weights are applied to, the logits, and weights that sum to 1; None if all equal.

    Features are in the dtype they came in.
    """

    features: Array
    logits: Float[Array, "b n"]
    weights: Float[Array, " b"] | None


def kspfb_direction(options: KspfbOptions) -> CurvatureTransform:
    """The transform from gradients to s, (A (x) B + (l2 + damping) I) s = gradient + l2 params."""

    def remember(params) -> tuple[Array, KspfbFactors]:
        dtype = parameter_dtype(params)
        if not jax.tree.leaves(params):  # optax.tree.map_params asks for a state without parameters
            params = jnp.zeros((1, 1), dtype)
            layout = layout_of(params, options.logits_fn, None, 1)
        else:
            layout = options.layout(params)
        return jnp.zeros((), jnp.int32), empty_factors(
            layout, options.label_curvature == "bohning", options.input_rank, dtype
        )

    def init(params) -> Any:
        params = trees.widen(checks.float_tree("params", params))
        dtype = parameter_dtype(params)
        # Each array its own, so that the state can be donated.
        info = KspfbInfo(
            kspfb_damping=jnp.zeros((), dtype),
            kspfb_predicted_decrease=jnp.zeros((), dtype),
            kspfb_step_length=jnp.ones((), dtype),
            kspfb_nonfinite=jnp.array(False),
            kspfb_nonfinite_total=jnp.zeros((), jnp.int32),
        )
        limit = None if options.learning_rate is None else no_limit_yet(dtype)
        return ScaleByKspfbState(info, *remember(params), limit, no_directions_yet(params, options.momentum))

    def entered(memory, batch, layout, params, damping, out_of_turn: Bool[Array, ""] | bool = False):
        """The factors with a batch entered, the solve, and its damping."""
        factors = _with_batch(options, layout, memory, batch, out_of_turn)
        total = damping + as_number(checks.nonnegative("damping", options.damping), params)
        curvature = curvature_of(factors, layout)
        if options.is_scaled():
            share = as_number(checks.nonnegative("relative_damping", options.relative_damping), params)
            mean = mean_input_value(factors) * curvature.labels.mean_value()
            total = total + share * max(1.0, TYPICAL_BATCH / len(batch.logits)) * mean
        known = (total > 0) & (factors.factor_input_batches > 0)
        if factors.factor_labels is not None:
            known = known & (factors.factor_label_batches > 0)
        total: Array = jnp.where(known, total, jnp.nan)  # pyright: ignore[reportAssignmentType]
        scales = factors.factor_scales[:, None]

        def solve(g):
            if not options.is_scaled():
                return curvature.solve(g, total)
            s = curvature.solve(layout.to_tree(scales * layout.to_matrix(g)), total)
            return layout.to_tree(scales * layout.to_matrix(s))

        return factors, solve, total

    def prepare(memory, params, damping, *, inputs=None, example_weights=None):
        layout = options.layout(params)
        batch = _checked_batch(options, layout, params, inputs, example_weights)
        factors, solve, _ = entered(memory, batch, layout, params, damping)
        return (memory[0] + 1, factors), solve

    def update(updates, state, params=None, *, inputs=None, example_weights=None, **ignored) -> Any:
        del ignored
        if params is None:
            raise ValueError("params: expected the parameters; got None. Call update(grads, state, params, inputs=...)")
        compiler.warn_if_wrong()
        checks.outside_shard_map(params=params, updates=updates, inputs=inputs, example_weights=example_weights)
        params = trees.widen(checks.float_tree("params", params))
        updates = jax.tree.map(jnp.asarray, updates)
        l2 = as_number(checks.nonnegative("l2", options.l2), params)
        # 1. The gradient of the objective, which has the l2 term, and the factors, also those of this batch.
        g = trees.add_scaled(checks.matching_tree("updates", updates, params), l2, params)
        layout, count, limit = options.layout(params), state.kspfb_updates, state.kspfb_limit
        batch = _checked_batch(options, layout, params, inputs, example_weights)
        out_of_turn = False
        if limit is not None:
            out_of_turn, limit = wants_factors(limit, count, options.update_every)
        factors, solve, damping = entered((count, state.kspfb_factors), batch, layout, params, l2, out_of_turn)
        # 2. The solution, no longer than the bound of this batch allows.
        s = solve(g)
        length, forget = jnp.ones_like(damping), False
        if limit is not None:
            found = limited(
                limit,
                count,
                options.rate(count, params),
                share_of_next(state.kspfb_directions, options.momentum),
                trees.dot(g, s),
                lambda: _ratio(options, layout, batch, g, s, l2),
            )
            length, forget, limit = jax.lax.stop_gradient(found)
        # 3. The step, unless a number went wrong, and the mean of steps.
        finite = jnp.isfinite(length) & trees.all_finite(trees.cast_like(s, updates))
        if options.learning_rate is None:
            finite = finite & ~runs_away(params, s)
        length = jnp.where(finite, length, 0)
        step = jax.tree.map(lambda leaf: jnp.where(finite, length.astype(leaf.dtype) * leaf, 0), s)
        mean, directions = mean_direction(state.kspfb_directions, step, options.momentum, forget)
        info = KspfbInfo(
            kspfb_damping=damping,
            kspfb_predicted_decrease=jnp.where(finite, (1 - length / 2) * trees.dot(g, step), 0),
            kspfb_step_length=length,
            kspfb_nonfinite=~finite,
            kspfb_nonfinite_total=state.kspfb_info.kspfb_nonfinite_total + (~finite).astype(jnp.int32),
        )
        return trees.cast_like(mean, updates), ScaleByKspfbState(info, count + 1, factors, limit, directions)

    return curvature_transform(init, update, remember, prepare)


def _checked_batch(options, layout, params, inputs, example_weights) -> Batch:
    """The rows of a batch, if they fit the parameters."""
    inputs = given("inputs", inputs, "the batch that the gradient is of, as logits_fn takes it")
    dtype = parameter_dtype(params)
    logits = checked_logits(options.logits_fn(params, inputs))
    e, n = jax.eval_shape(layout.to_matrix, layout.domain()).shape
    if logits.shape[-1] != n:
        raise ValueError(
            f"params: expected weights with an axis of {logits.shape[-1]} labels, as logits_fn returns; got {n} along "
            f"axis {layout.output_axis} (see output_axis)"
        )
    features = inputs if options.features_fn is None else options.features_fn(params, inputs)
    expected = (*logits.shape[:-1], e - layout.has_bias())
    if getattr(features, "shape", None) != expected:
        given_by = "inputs" if options.features_fn is None else "features_fn"
        got = getattr(features, "shape", type(features).__name__)
        hint = " (features_fn says what the weights are applied to)" if options.features_fn is None else ""
        raise ValueError(f"{given_by}: expected features of shape {expected}; got {got}{hint}")
    weights = None
    if example_weights is not None:
        weights = batches.full_weights("example_weights", example_weights, logits.shape[:-1], dtype)
        weights = batches.normalised(weights).reshape(-1)
    logits = logits.reshape(-1, n).astype(dtype)
    return Batch(jnp.asarray(features).reshape(len(logits), -1), logits, weights)


def _with_batch(options, layout, memory, batch: Batch, out_of_turn) -> KspfbFactors:
    """The factors with a batch entered, if it is their turn, or out of turn."""
    count, factors = memory
    decay = jnp.asarray(checks.fraction("decay", options.decay), batch.logits.dtype)

    def with_moments(of_inputs):
        found = with_inputs(
            factors._replace(**of_inputs), decay, batch.features, batch.weights, layout.has_bias(), options.is_scaled()
        )
        return {name: getattr(found, name) for name in INPUT_FIELDS}

    due = (count % options.update_every == 0) | (factors.factor_input_batches == 0) | out_of_turn
    factors = factors._replace(**_if(due, with_moments, {name: getattr(factors, name) for name in INPUT_FIELDS}))
    if factors.factor_labels is None:
        return factors
    due = (count % options.label_every == 0) | (factors.factor_label_batches == 0) | out_of_turn
    return with_labels(factors, due, decay, lambda: _some_rows(options, batch), options.order)


def _some_rows(options, batch: Batch) -> tuple[Float[Array, "b n"], Float[Array, " b"]]:
    """The logits of some examples, and their weights."""
    rows, weights = len(batch.logits), batch.weights
    if options.label_examples is None or rows <= options.label_examples:
        return batch.logits, jnp.full(rows, 1 / rows, batch.logits.dtype) if weights is None else weights
    # At random places: evenly spaced rows of sequences could all be at the same position.
    some = np.random.default_rng(0).permutation(rows)
    if weights is None:
        some = some[: options.label_examples]
        return batch.logits[some], jnp.full(len(some), 1 / len(some), batch.logits.dtype)
    # Those of weight 0, such as padding, last.
    some = jnp.asarray(some)[jnp.argsort(weights[some] == 0)][: options.label_examples]
    return batch.logits[some], batches.normalised(weights[some])


def _ratio(options, layout, batch: Batch, g, s, l2) -> Float[Array, ""]:
    """The ratio s'Bs / g's, with B the curvature of the bound of this batch, and l2."""
    # In units of the largest entry of s, whose square may be too large a number.
    unit = trees.largest(s)
    unit = jnp.where(unit > 0, unit, 1)
    s = trees.scale(1 / unit, s)
    matrix, slope = layout.to_matrix(s), trees.dot(g, s)
    weights, bias = (matrix[:-1], matrix[-1:]) if layout.has_bias() else (matrix, 0)
    along = times(batch.features.astype(matrix.dtype), weights) + bias
    each = jax.vmap(lambda h, u: log_partition_bound(h, order=options.order).curvature.quadratic(u))(
        batch.logits, along
    )
    mean = jnp.mean(each) if batch.weights is None else batches.weighted_sum(batch.weights, each)
    # Where there is no gradient there is no step, and a slope below 0 is an error of rounding beyond repair.
    divisor: Array = jnp.where(slope == 0, 1, slope)  # pyright: ignore[reportAssignmentType]
    ratio = unit * (mean + l2 * trees.dot(s, s)) / divisor
    return ratio + jnp.asarray(jnp.where(slope < 0, jnp.nan, 0), ratio.dtype)


def _if(due: Array, function: Callable, carry: Any) -> Any:
    """`function(carry)` if due, else `carry`: as a loop of at most one turn, which copies nothing if it has none.

    A conditional would copy what it passes on, here two matrices at every step.
    """
    return jax.lax.while_loop(lambda of: of[0], lambda of: (jnp.zeros_like(due), function(of[1])), (due, carry))[1]
