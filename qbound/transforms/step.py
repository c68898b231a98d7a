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
from qbound.transforms.adaptation import SpfbAdaptation, adapted, first_adaptation, remember
from qbound.transforms.solvers import SOLVERS, Solver, solve
from qbound.transforms.window import SpfbWindow, batch_of_one, empty_window, is_full, push, trust, withdraw_unless
from qbound.types import Order, Scalar, working_dtype

__all__ = ["ScaleBySpfbState", "SpfbInfo", "SpfbOptions", "spfb_direction"]


class SpfbInfo(NamedTuple):
    """How the last update went; `optax.tree.get(state, "spfb_residual")` finds a field in any chain.

    Attributes:
      spfb_steps: iterations of CG; 0 for direct solvers.
      spfb_residual: |g - B s| / |g|, computed from the solution s of B s = g.
      spfb_converged: whether the residual is within `tolerance`; False where CG hit its limit.
      spfb_predicted_decrease: of the objective, by the quadratic, for a learning rate of 1.
      spfb_step_length: what s was multiplied by: less than 1 while a window fills, 0 if the update was skipped.
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
      spfb_adaptation: of the damping; None without `adaptive_damping`.
    """

    spfb_info: SpfbInfo
    spfb_solution: Any
    spfb_window: SpfbWindow | None
    spfb_adaptation: SpfbAdaptation | None


@dataclasses.dataclass(frozen=True)
class SpfbOptions:
    """The arguments of `qbound.scale_by_spfb`, and l2: Python values that every update closes over."""

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
        checks.integer("max_steps", self.max_steps)
        checks.nonnegative("tolerance", self.tolerance)
        if self.window is not None:
            checks.integer("window", self.window)
        if (self.window is None) != (self.inputs_like is None):
            raise ValueError(
                "inputs_like: expected one example's inputs, or their shapes, together with window and not without it; "
                f"got window={self.window!r} and inputs_like={self.inputs_like!r}"
            )
        if self.precondition is not None:
            checks.function("precondition", self.precondition)
            if self.solver in ("dense", "woodbury"):
                raise ValueError(f'precondition: expected None with solver={self.solver!r}, because only "cg" uses it')
        if self.microbatch_size is not None:
            checks.integer("microbatch_size", self.microbatch_size)
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

    def weights(self, name: str, weights: Any, params: Any, inputs: Any) -> Array:
        """One for each row of logits."""
        shape = batches.logits_shape(self.logits_fn, params, inputs)
        return batches.full_weights(name, weights, shape[:-1], _dtype(params))


class _Source(NamedTuple):
    """Where the curvature of one update comes from."""

    curvature: Curvature
    window: SpfbWindow | None = None  # with the batch entered
    entered: int = 0  # how many examples have
    step_length: Callable[[Any, Any, Array], Array] = lambda g, s, damping: jnp.ones_like(damping)


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
        params = _checked_params(params)
        l2 = _number(options.l2, params)
        # 1. The gradient and the damping of the objective, which has the l2 term.
        g = trees.add_scaled(checks.matching_tree("updates", updates, params), l2, params)
        damping = l2 + _number(options.damping, params)
        damping = jnp.where(damping > 0, damping, jnp.nan)
        adaptation, objective = state.spfb_adaptation, jnp.zeros_like(damping)
        if adaptation is not None:
            loss = _number(_given("value", value, "the loss, because of adaptive_damping"), params)
            objective = loss + l2 / 2 * trees.dot(params, params)
            adaptation = adapted(adaptation, params, objective, options.adaptive_damping)
            damping = damping + adaptation.spfb_adaptive_damping
        # 2. The curvature at the current parameters, and the solution.
        if curvature_inputs is None:
            source = _from_batch(options, state.spfb_window, params, inputs, example_weights)
        else:
            source = _from_caller(options, state.spfb_window, params, curvature_inputs, curvature_weights)
        solution = solve(
            options.solver,
            source.curvature,
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
        length = jnp.where(finite, source.step_length(g, s, damping), 0)
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
        window = state.spfb_window
        if window is not None and source.window is not None:
            window = withdraw_unless(finite, source.window, window, source.entered)
        if adaptation is not None:
            modelled = curved - adaptation.spfb_adaptive_damping * trees.dot(step, step)
            adaptation = remember(adaptation, params, objective, step, slope, modelled)
        warm = None if state.spfb_solution is None else s
        return trees.cast_like(step, updates), ScaleBySpfbState(info, warm, window, adaptation)

    return optax.GradientTransformationExtraArgs(init, update)


def _from_batch(options, window, params, inputs, example_weights) -> _Source:
    """The curvature of the current batch, or of the window that it has entered."""
    inputs = _given("inputs", inputs, "the batch that the gradient is of, as logits_fn takes it")
    weights = options.weights("example_weights", example_weights, params, inputs)
    if window is None:
        return _Source(options.curvature(params, inputs, weights))
    examples, shared = batches.split("inputs", inputs, options.inputs_axes)
    entered = push(window, examples, weights)
    count = weights.shape[0]
    if count >= options.window:
        return _Source(options.curvature(params, inputs, weights), entered, count)
    flags = batches.axis_flags("inputs", inputs, options.inputs_axes)
    recent = batches.join(jax.tree.structure(inputs), flags, entered.window_examples, shared)
    curvature = options.curvature(params, recent, entered.window_weights)

    def step_length(g, s, damping):
        """1 once the window is full.

        Until then no further along s than to the minimum of the bound of the current batch alone, because directions
        that no example has shown yet have no curvature but the damping; and of that only the part `trust`, because the
        minimum for a few examples is not one for all.
        """

        def held_back():
            batch = options.curvature(params, inputs, weights)
            curved: Array = batch.quadratic(s) + damping * trees.dot(s, s)
            to_minimum: Array = trees.dot(g, s) / curved
            return trust(entered) * jnp.where(curved > 0, jnp.clip(to_minimum, 0, 1), 1)

        return jax.lax.cond(is_full(entered), lambda: jnp.ones_like(damping), held_back)

    return _Source(curvature, entered, count, step_length)


def _from_caller(options, window, params, inputs, weights) -> _Source:
    """The curvature of another batch, of the caller's choice."""
    if window is not None:
        raise ValueError("curvature_inputs: expected None with window=, which keeps its own; got both")
    return _Source(options.curvature(params, inputs, options.weights("curvature_weights", weights, params, inputs)))


def _empty_window(options, params) -> SpfbWindow:
    like, axes = options.inputs_like, options.inputs_axes
    shape = (1, 1)
    if jax.tree.leaves(params):  # optax.tree.map_params asks for a state without parameters
        shape = batches.logits_shape(options.logits_fn, params, batch_of_one(like, axes))
    return empty_window(options.window, like, axes, shape[1:-1], _dtype(params))


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
    params = jax.tree.map(jnp.asarray, params)
    for leaf in jax.tree.leaves(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"params: expected float arrays; got one of dtype {leaf.dtype}")
    return trees.widen(params)


def _dtype(params):
    return working_dtype(*jax.tree.leaves(params))


def _number(number, params):
    return jnp.asarray(number, _dtype(params))
