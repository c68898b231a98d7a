"""One update of KSPFB: what it is told, what it remembers, and what it does."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qbound import batches, checks, trees
from qbound.curvature.kronecker import MatrixLayout
from qbound.models import checked_logits
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
      kspfb_nonfinite: whether the update was skipped, because gradient or factors were not finite.
      kspfb_nonfinite_total: how many updates were.
    """

    kspfb_damping: Float[Array, ""]
    kspfb_predicted_decrease: Float[Array, ""]
    kspfb_nonfinite: Bool[Array, ""]
    kspfb_nonfinite_total: Int[Array, ""]


class ScaleByKspfbState(NamedTuple):
    """State of `scale_by_kspfb`.

    Attributes:
      kspfb_info: how the last update went.
      kspfb_updates: how many there were.
      kspfb_factors: the two factors, and their eigenvectors.
    """

    kspfb_info: KspfbInfo
    kspfb_updates: Int[Array, ""]
    kspfb_factors: KspfbFactors


@dataclasses.dataclass(frozen=True)
class KspfbOptions:
    """The arguments of `kspfb` but for learning rate and momentum."""

    logits_fn: Callable
    l2: Scalar
    damping: Scalar
    relative_damping: Scalar
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
        info = KspfbInfo(jnp.zeros((), dtype), jnp.zeros((), dtype), jnp.array(False), jnp.zeros((), jnp.int32))
        return ScaleByKspfbState(info, *remember(params))

    def entered(memory, params, damping, inputs, example_weights):
        """What is remembered with a batch entered, the solve, and its damping."""
        inputs = given("inputs", inputs, "the batch that the gradient is of, as logits_fn takes it")
        layout = options.layout(params)
        factors, rows = _entered(options, layout, memory, params, inputs, example_weights)
        total = damping + as_number(checks.nonnegative("damping", options.damping), params)
        curvature = curvature_of(factors, layout)
        if options.is_scaled():
            share = as_number(checks.nonnegative("relative_damping", options.relative_damping), params)
            mean = mean_input_value(factors) * curvature.labels.mean_value()
            total = total + share * max(1.0, TYPICAL_BATCH / rows) * mean
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

        return (memory[0] + 1, factors), solve, total

    def prepare(memory, params, damping, *, inputs=None, example_weights=None):
        return entered(memory, params, damping, inputs, example_weights)[:2]

    def update(updates, state, params=None, *, inputs=None, example_weights=None, **ignored) -> Any:
        del ignored
        if params is None:
            raise ValueError("params: expected the parameters; got None. Call update(grads, state, params, inputs=...)")
        params = trees.widen(checks.float_tree("params", params))
        updates = jax.tree.map(jnp.asarray, updates)
        l2 = as_number(checks.nonnegative("l2", options.l2), params)
        g = trees.add_scaled(checks.matching_tree("updates", updates, params), l2, params)
        memory, solve, damping = entered(state[1:], params, l2, inputs, example_weights)
        s = solve(g)
        finite = trees.all_finite(trees.cast_like(s, updates))
        s = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), s)
        info = KspfbInfo(
            kspfb_damping=damping,
            kspfb_predicted_decrease=jnp.where(finite, trees.dot(g, s) / 2, 0),
            kspfb_nonfinite=~finite,
            kspfb_nonfinite_total=state.kspfb_info.kspfb_nonfinite_total + (~finite).astype(jnp.int32),
        )
        return trees.cast_like(s, updates), ScaleByKspfbState(info, *memory)

    return curvature_transform(init, update, remember, prepare)


def _entered(options, layout, memory, params, inputs, example_weights) -> tuple[KspfbFactors, int]:
    """The factors with a batch entered, and how many rows it has."""
    count, factors = memory
    dtype = factors.factor_inputs.dtype
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
    weights = batches.full_weights("example_weights", example_weights, logits.shape[:-1], dtype)
    weights = batches.normalised(weights).reshape(-1)
    x, logits = (jnp.asarray(leaf).reshape(weights.size, -1).astype(dtype) for leaf in (features, logits))
    decay = jnp.asarray(checks.fraction("decay", options.decay), dtype)

    def with_moments(of_inputs):
        ones = [jnp.ones((weights.size, 1), dtype)] if layout.has_bias() else []
        rows = jnp.concatenate([x, *ones], axis=1)
        found = with_inputs(factors._replace(**of_inputs), decay, rows, weights, options.is_scaled())
        return {name: getattr(found, name) for name in INPUT_FIELDS}

    due = (count % options.update_every == 0) | (factors.factor_input_batches == 0)
    factors = factors._replace(**_if(due, with_moments, {name: getattr(factors, name) for name in INPUT_FIELDS}))
    rows = weights.size
    if factors.factor_labels is None:
        return factors, rows

    def some_rows():
        if options.label_examples is None or rows <= options.label_examples:
            return logits, weights
        # At random places: evenly spaced rows of sequences could all be at the same position.
        some = np.random.default_rng(0).permutation(rows)
        if example_weights is not None:  # those of weight 0, such as padding, last
            some = jnp.asarray(some)[jnp.argsort(weights[some] == 0)]
        some = some[: options.label_examples]
        return logits[some], batches.normalised(weights[some])

    due = (count % options.label_every == 0) | (factors.factor_label_batches == 0)
    return with_labels(factors, due, decay, some_rows, options.order), rows


def _if(due: Array, function: Callable, carry: Any) -> Any:
    """`function(carry)` if due, else `carry`: as a loop of at most one turn, which copies nothing if it has none.

    A conditional would copy what it passes on, here two matrices at every step.
    """
    return jax.lax.while_loop(lambda of: of[0], lambda of: (jnp.zeros_like(due), function(of[1])), (due, carry))[1]
