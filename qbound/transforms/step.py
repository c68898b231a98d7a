"""One update of SPFB: what it is told, what it remembers, and what it does."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from qbound import batches, checks, trees
from qbound.bounds import log_partition_bound
from qbound.curvature import Curvature
from qbound.models import linear_logits
from qbound.transforms.adaptation import SpfbAdaptation, adapted, first_adaptation, remember
from qbound.transforms.limit import SpfbLimit, longest_step, no_limit_yet, with_batch
from qbound.transforms.solvers import SOLVERS, Solver, solve
from qbound.transforms.window import (
    SpfbWindow,
    batch_of_one,
    check_examples,
    empty_window,
    is_full,
    push,
    restarted,
    trust,
    withdraw_unless,
)
from qbound.types import Order, Scalar, working_dtype

__all__ = ["ScaleBySpfbState", "SpfbInfo", "SpfbOptions", "spfb_direction"]


class SpfbInfo(NamedTuple):
    """How the last update went; `optax.tree.get(state, "spfb_residual")` finds a field in any chain.

    Attributes:
      spfb_steps: iterations of CG; 0 for direct solvers.
      spfb_residual: |g - B s| / |g|, computed from the solution s of B s = g.
      spfb_converged: whether the residual is within `tolerance`; False where CG hit its limit.
      spfb_predicted_decrease: of the objective, by the quadratic, for a learning rate of 1.
      spfb_step_length: what s was multiplied by, before the learning rate: less than 1 while a window fills and where
        steps are limited, 0 if the update was skipped.
      spfb_nonfinite: whether the update was skipped, because gradient, logits or solution were not finite.
      spfb_nonfinite_total: how many updates were.
    """

    spfb_steps: Int[Array, ""]
    spfb_residual: Float[Array, ""]
    spfb_converged: Bool[Array, ""]
    spfb_predicted_decrease: Float[Array, ""]
    spfb_step_length: Float[Array, ""]
    spfb_nonfinite: Bool[Array, ""]
    spfb_nonfinite_total: Int[Array, ""]


class ScaleBySpfbState(NamedTuple):
    """State of `scale_by_spfb`.

    Attributes:
      spfb_info: how the last update went.
      spfb_solution: the last solution, to start CG from; None without `warm_start`.
      spfb_window: recent examples; None without `window`.
      spfb_limit: what limits the step; None without `window` and in `scale_by_spfb`.
      spfb_adaptation: of the damping; None without `adaptive_damping`.
    """

    spfb_info: SpfbInfo
    spfb_solution: Any
    spfb_window: SpfbWindow | None
    spfb_limit: SpfbLimit | None
    spfb_adaptation: SpfbAdaptation | None


@dataclasses.dataclass(frozen=True)
class SpfbOptions:
    """The arguments of `qbound.spfb`: Python values that every update closes over.

    A `learning_rate` of None, as for `qbound.scale_by_spfb`, is 1 and unknown: steps are not limited.
    """

    learning_rate: optax.ScalarOrSchedule | None
    logits_fn: Callable[[Any, Any], Array]
    l2: Scalar
    damping: Scalar
    solver: Solver
    order: Order
    max_steps: int
    tolerance: Scalar
    window: int | None
    inputs_like: Any
    inputs_axes: Any
    precondition: Callable[[Any], Any] | None
    warm_start: bool
    microbatch_size: int | None
    adaptive_damping: Scalar | None

    def __post_init__(self):
        checks.function("logits_fn", self.logits_fn)
        checks.choice("solver", self.solver, SOLVERS)
        checks.choice("order", self.order, ("descending", "max_first", "given"))
        object.__setattr__(self, "max_steps", checks.integer("max_steps", self.max_steps))
        checks.nonnegative("tolerance", self.tolerance)
        if self.window is not None:
            object.__setattr__(self, "window", checks.integer("window", self.window))
        if (self.window is None) != (self.inputs_like is None):
            raise ValueError(
                "inputs_like: expected one example's inputs, or their shapes, together with window and not without it; "
                f"got window={self.window!r} and {'no' if self.inputs_like is None else 'an'} inputs_like"
            )
        if self.precondition is not None:
            checks.function("precondition", self.precondition)
            if self.solver in ("dense", "woodbury"):
                raise ValueError(f'precondition: expected None with solver={self.solver!r}, because only "cg" uses it')
        if self.microbatch_size is not None:
            object.__setattr__(self, "microbatch_size", checks.integer("microbatch_size", self.microbatch_size))
            if self.solver == "woodbury":
                raise ValueError('microbatch_size: expected None with solver="woodbury", which needs the whole batch')
        if self.adaptive_damping is not None:
            checks.positive("adaptive_damping", self.adaptive_damping)

    def curvature(self, params: Any, inputs: Any, weights: Array) -> Curvature:
        """Of the bound at `params`, the mean over a batch."""
        return batches.mean_curvature(
            self.logits_fn,
            params,
            inputs,
            weights,
            bound=functools.partial(log_partition_bound, order=self.order),
            axes=self.inputs_axes,
            microbatch_size=self.microbatch_size,
        )

    def widened(self) -> "SpfbOptions":
        """With a model that is handed its inputs in float32 at least, as it is its parameters."""

        def model(params, inputs):
            return self.logits_fn(params, jax.tree.map(_widen_floats, inputs))

        known = self.logits_fn is linear_logits
        return self if known else dataclasses.replace(self, logits_fn=model)

    def weights(self, name: str, weights: Any, params: Any, inputs: Any) -> Array:
        """One for each row of logits."""
        shape = batches.logits_shape(self.logits_fn, params, inputs)
        return batches.full_weights(name, weights, shape[:-1], _dtype(params))


def spfb_direction(options: SpfbOptions) -> optax.GradientTransformationExtraArgs:
    """The transform from gradients to s, (mean curvature + (l2 + damping) I) s = gradient + l2 params."""

    def init(params) -> Any:
        params = _checked_params(params)
        dtype = _dtype(params)
        adaptive = options.adaptive_damping
        return ScaleBySpfbState(
            spfb_info=SpfbInfo(
                spfb_steps=jnp.zeros((), jnp.int32),
                spfb_residual=jnp.zeros((), dtype),
                spfb_converged=jnp.array(True),
                spfb_predicted_decrease=jnp.zeros((), dtype),
                spfb_step_length=jnp.ones((), dtype),
                spfb_nonfinite=jnp.array(False),
                spfb_nonfinite_total=jnp.zeros((), jnp.int32),
            ),
            spfb_solution=trees.zeros_like(params) if options.warm_start else None,
            spfb_window=None if options.window is None else _empty_window(options, params),
            spfb_limit=no_limit_yet(dtype) if options.window and options.learning_rate is not None else None,
            spfb_adaptation=None if adaptive is None else first_adaptation(params, adaptive, dtype),
        )

    def update(
        updates,
        state,
        params=None,
        *,
        inputs=None,
        example_weights=None,
        curvature_inputs=None,
        curvature_weights=None,
        value=None,
        **ignored,
    ) -> Any:
        del ignored
        if params is None:
            raise ValueError("params: expected the parameters; got None. Call update(grads, state, params, inputs=...)")
        model = options.widened() if _is_narrow(params) else options
        params, updates = _checked_params(params), jax.tree.map(jnp.asarray, updates)
        l2 = _number(checks.nonnegative("l2", options.l2), params)
        # 1. The gradient and the damping of the objective, which has the l2 term.
        g = trees.add_scaled(checks.matching_tree("updates", updates, params), l2, params)
        damping = l2 + _number(checks.nonnegative("damping", options.damping), params)
        damping = jnp.where(damping > 0, damping, jnp.nan)
        adaptation, objective = state.spfb_adaptation, jnp.zeros_like(damping)
        if adaptation is not None:
            loss = _number(_given("value", value, "the loss, because of adaptive_damping"), params)
            objective = loss + l2 / 2 * trees.dot(params, params)
            adaptation = adapted(adaptation, params, objective, options.adaptive_damping)
            damping = damping + adaptation.spfb_adaptive_damping
        # 2. The curvature at the current parameters, and the solution.
        batch = _batch(model, state, params, inputs, example_weights, curvature_inputs, curvature_weights)
        solution = solve(
            options.solver,
            batch.source,
            g,
            damping,
            max_steps=options.max_steps,
            tolerance=options.tolerance,
            precondition=options.precondition,
            start=state.spfb_solution,
        )
        # 3. The step, unless a number went wrong.
        finite = jnp.isfinite(solution.residual) & trees.all_finite(trees.cast_like(solution.vector, updates))
        s = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), solution.vector)
        length, limit = _step_length(options, state, batch, g, s, damping)
        length = jnp.where(finite, length, 0)
        step = trees.scale(length, s)
        slope = trees.dot(g, step)
        curved = jnp.where(finite, length * trees.dot(step, solution.product), 0)
        info = SpfbInfo(
            spfb_steps=solution.steps,
            spfb_residual=solution.residual,
            spfb_converged=solution.residual <= _number(options.tolerance, params),
            spfb_predicted_decrease=jnp.where(finite, slope - curved / 2, 0),
            spfb_step_length=length,
            spfb_nonfinite=~finite,
            spfb_nonfinite_total=state.spfb_info.spfb_nonfinite_total + (~finite).astype(jnp.int32),
        )
        # 4. What the next update needs.
        if adaptation is not None:
            modelled = curved - adaptation.spfb_adaptive_damping * trees.dot(step, step)
            adaptation = remember(adaptation, params, objective, step, slope, modelled)
        warm = None if state.spfb_solution is None else s
        window = _settled(state.spfb_window, batch, g, finite)
        return trees.cast_like(step, updates), ScaleBySpfbState(info, warm, window, limit, adaptation)

    return optax.GradientTransformationExtraArgs(init, update)


class _Batch(NamedTuple):
    """The curvature of one update, and the batch that is entered into a window for it."""

    source: Curvature  # what the step is made with
    own: Callable[[], Curvature]  # that of the batch alone
    window: SpfbWindow | None = None  # with the batch entered
    examples: Any = None
    weights: Any = None


def _batch(options, state, params, inputs, example_weights, curvature_inputs, curvature_weights) -> _Batch:
    """The curvature of the caller's choice, of the current batch, or of the window that it enters."""
    window = state.spfb_window
    if curvature_inputs is not None:
        if window is not None:
            raise ValueError("curvature_inputs: expected None with window=, which keeps its own; got both")
        weights = options.weights("curvature_weights", curvature_weights, params, curvature_inputs)
        curvature = options.curvature(params, curvature_inputs, weights)
        return _Batch(curvature, lambda: curvature)
    if curvature_weights is not None:
        raise ValueError("curvature_weights: expected None without curvature_inputs; got weights")
    inputs = _given("inputs", inputs, "the batch that the gradient is of, as logits_fn takes it")
    examples = [] if window is None else check_examples(inputs, options.inputs_like, options.inputs_axes)
    weights = options.weights("example_weights", example_weights, params, inputs)
    own = functools.cache(lambda: options.curvature(params, inputs, weights))
    if window is None:
        return _Batch(own(), own)
    entered = push(window, examples, weights)
    if weights.shape[0] >= options.window:
        return _Batch(own(), own, entered, examples, weights)
    _, shared = batches.split("inputs", inputs, options.inputs_axes)
    flags = batches.axis_flags("inputs", inputs, options.inputs_axes)
    recent = batches.join(jax.tree.structure(inputs), flags, entered.window_examples, shared)
    return _Batch(options.curvature(params, recent, entered.window_weights), own, entered, examples, weights)


def _step_length(options, state, batch, g, s, damping) -> tuple[Array, SpfbLimit | None]:
    """What to multiply s by, and what limits the steps to come.

    While a window fills, no further along s than to the minimum of the bound of the current batch alone, because
    directions that no example has shown yet have no curvature but the damping; and of that only the part `trust`,
    because the minimum for a few examples is not one for all. Once it is full, as far as earlier batches allow.
    """
    one = jnp.ones_like(damping)
    if batch.window is None:
        return one, state.spfb_limit
    slope, curved = trees.dot(g, s), batch.own().quadratic(s) + damping * trees.dot(s, s)
    positive: Array = jnp.where(curved > 0, curved, 1)  # pyright: ignore[reportAssignmentType]
    to_minimum = jnp.where(curved > 0, jnp.clip(slope / positive, 0, 1), 1)
    held_back = trust(batch.window) * to_minimum
    limit = state.spfb_limit
    if limit is None:
        return jnp.where(is_full(batch.window), one, held_back), None
    rate = options.learning_rate
    rate = jnp.asarray(rate(limit.limit_updates) if callable(rate) else rate, one.dtype)
    allowed = jnp.where(is_full(batch.window), longest_step(limit), held_back)
    length = jnp.where(rate > allowed, allowed / rate, 1)
    return length, with_batch(limit, slope, curved, min(1.0, batch.weights.shape[0] / options.window))


def _settled(window, batch, g, finite) -> SpfbWindow | None:
    """The window after an update: with the batch if all went well.

    If not, and the batch is to blame, without it. If the batch alone is fine, some older example is to blame, which the
    parameters have moved away from: then with nothing but the batch.
    """
    if batch.window is None:
        return window
    kept = withdraw_unless(finite, batch.window, window, batch.weights.shape[0])

    def older_to_blame():
        return trees.all_finite(g) & trees.all_finite(batch.own().mv(g))

    restart = jax.lax.cond(finite, lambda: jnp.array(False), older_to_blame)
    return jax.lax.cond(restart, lambda: restarted(window, batch.examples, batch.weights), lambda: kept)


def _empty_window(options, params) -> SpfbWindow:
    like, axes = options.inputs_like, options.inputs_axes
    shape = (1, 1)
    if jax.tree.leaves(params):  # optax.tree.map_params asks for a state without parameters
        shape = batches.logits_shape(options.logits_fn, params, batch_of_one(like, axes))
    return empty_window(options.window, like, axes, shape[1:-1], _dtype(params))


def _is_narrow(params):
    return any(jnp.asarray(leaf).dtype.itemsize < 4 for leaf in jax.tree.leaves(params))


def _widen_floats(leaf):
    narrow = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(working_dtype(leaf)) if narrow else leaf


def _given(name, value, expected):
    if value is None:
        raise ValueError(f"{name}: expected {expected}; got None. Call update(grads, state, params, {name}=...)")
    return value


def _checked_params(params):
    """In float32 at least."""

    def is_masked(leaf):
        return isinstance(leaf, optax.MaskedNode)

    leaves = jax.tree.leaves(params, is_leaf=is_masked)
    if any(map(is_masked, leaves)):
        raise ValueError(
            "params: expected every array that logits_fn needs; got parameters that optax.masked or optax.partition "
            "has hidden. To train a part of them, hand over that part only: logits_fn(trainable, inputs), with the "
            "frozen part inside inputs (inputs_axes marks it as shared)"
        )
    return trees.widen(checks.float_tree("params", params))


def _dtype(params):
    return working_dtype(*jax.tree.leaves(params))


def _number(number, params):
    return jnp.asarray(number, _dtype(params))
