"""SPFB, Algorithm 2 of [WC20]: gradient steps preconditioned by the curvature of the bound."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from qbound import checks, trees
from qbound.curvature import Curvature, LowRank
from qbound.curvature.model import SOLVERS, Solver, curvature_by_example, mean_curvature, solve_damped
from qbound.families.softmax import Softmax
from qbound.models.base import full_weights
from qbound.models.linear import logits_shape
from qbound.optimizers.base import (
    CurvatureTransform,
    as_number,
    check_some_damping,
    check_update,
    checked_params,
    given,
    is_narrow,
    keep_params_finite,
    parameter_dtype,
    rate_at,
    regularised,
    runs_away,
    widen_floats,
)
from qbound.optimizers.damping import SpfbAdaptation, adapted, first_adaptation, remember
from qbound.optimizers.memory import (
    SketchOptions,
    SpfbLimit,
    SpfbSketch,
    SpfbWindow,
    add_batch,
    batch_of_one,
    check_examples,
    empty_window,
    first_sketch,
    how_full_is_sketch,
    how_full_is_window,
    longest_step,
    no_limit_yet,
    push,
    recent_inputs,
    settled_window,
    updated_limit,
)
from qbound.types import Order, Scalar, working_dtype


class SpfbInfo(NamedTuple):
    """How the last update went; `optax.tree.get(state, "spfb_residual")` finds a field in any chain.

    Attributes:
      spfb_steps: iterations of CG; 0 for direct solvers.
      spfb_residual: |g - B s| / |g|, computed from the solution s of B s = g.
      spfb_converged: whether the residual is within `tolerance`; False where CG hit its limit.
      spfb_predicted_decrease: of the objective, by the quadratic, for a learning rate of 1.
      spfb_step_length: what s was multiplied by, before the learning rate: less than 1 while a window or a
        sketch fills and where steps are limited, 0 if the update was skipped.
      spfb_nonfinite: whether the update was skipped, because a number was not finite: of the gradient, the logits, the
        solution or, in `qbound.spfb` and `qbound.lspfb`, the parameters that it leads to. Or because there was no
        solution: products that overflow leave CG at zero, and direct solvers with one that raises the quadratic.
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
    """State of `scale_by_spfb` and of `scale_by_lspfb`.

    Attributes:
      spfb_info: how the last update went.
      spfb_solution: the last solution, to start CG from; None without `warm_start`.
      spfb_window: recent examples; None without `window`.
      spfb_limit: what limits the step; None without `window` or `decay`, and in `scale_by_spfb` and `scale_by_lspfb`.
      spfb_adaptation: of the damping; None without `adaptive_damping`.
      spfb_sketch: of the curvatures of the batches so far; None without `decay`.
      spfb_preconditioner: what a transform that is the preconditioner of CG remembers; None without one.
    """

    spfb_info: SpfbInfo
    spfb_solution: Any
    spfb_window: SpfbWindow | None
    spfb_limit: SpfbLimit | None
    spfb_adaptation: SpfbAdaptation | None
    spfb_sketch: SpfbSketch | None = None
    spfb_preconditioner: Any = None


def scale_by_spfb(
    logits_fn: Callable[[Any, Any], Array],
    *,
    damping: Scalar,
    solver: Solver = "auto",
    order: Order = "max_first",
    max_steps: int = 10,
    tolerance: Scalar = 1e-3,
    window: int | None = None,
    inputs_like: Any = None,
    inputs_axes: Any = 0,
    precondition: CurvatureTransform | Callable[[Any], Any] | None = None,
    warm_start: bool = False,
    microbatch_size: int | None = None,
    adaptive_damping: Scalar | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Solve with the curvature of the bound on the log-partition function: the direction of SPFB.

    .. math:: s = \Big(\tfrac1b \sum_j J_j^\top M_j J_j + \text{damping}\; I\Big)^{-1} g

    M_j is the curvature of `qbound.log_partition_bound` at the logits of example j, and J_j their Jacobian, used by
    `jvp` and `vjp` of one linearisation a step. Where `logits_fn` is linear in the parameters, the quadratic bounds the
    loss of the batch from above; for a network it bounds the loss of the linearised network and is a local model.

    The transform's `update` takes, by keyword:

    - `inputs`: the batch that the gradient is of, as `logits_fn` takes it: any tree of arrays, with examples along
      their first axis;
    - `example_weights`: of the batch, (b,) or for as many of the leading axes of the logits as it has; 0 removes an
      example, whose inputs must be finite all the same. The gradient must be of the loss with the same weights;
    - `curvature_inputs`, `curvature_weights`: another batch to take the curvature from, such as the caller's buffer;
    - `value`: the loss that the gradient is of, for `adaptive_damping` only.

    Anything else is ignored. Gradients, or logits, that are not finite give an update of zero and are reported in the
    state (`SpfbInfo`).

    Args:
      logits_fn: from parameters and inputs to logits (b, n) or (..., n); -inf removes a label. Any function, a network
        among them; `qbound.linear_logits` has its structure known to the solvers. What it closes over is a constant.
      damping: added to the curvature, above 0: without it the curvature is singular.
      solver: "dense" (Cholesky in parameter space), "woodbury" (in the space of examples and labels, with a closed form
        for one example of `qbound.linear_logits`), "cg" (matrix-free, in the memory of a few gradients), or "auto",
        chosen by the cost model of `qbound.curvature.model`.
      order: of the labels in the bound; see `qbound.log_partition_bound`.
      max_steps: the most iterations of CG. Each costs about one gradient.
      tolerance: relative residual at which CG stops.
      window: keep the inputs of this many recent examples in the state and take the curvature from them, the current
        batch included; None takes it from the current batch, as the paper does. With batches of less than a few hundred
        that biases every step, and the window does not: see docs/theory.md. While it fills, steps are shortened;
        `qbound.spfb` also limits them from then on.
      inputs_like: with `window`, one example's inputs, or the `jax.ShapeDtypeStruct`s of them: `inputs` without its
        first axis.
      inputs_axes: which arrays of `inputs` have an axis of examples (0) and which are shared by all of them (None), as
        `in_axes` of `jax.vmap`. Needed only for shared arrays together with `window` or `microbatch_size`.
      precondition: for CG: a function g -> s, about the solution, linear, symmetric and positive definite; or a
        transform, `qbound.scale_by_kspfb(...)` or `qbound.scale_by_lspfb(...)`, whose solve it is, with the damping of
        both added, and whose state is kept in that of this one.
      warm_start: start CG from the last solution. It pays where successive gradients are alike: large batches, windows.
      microbatch_size: take products in pieces of this many examples, one by one: the same curvature in the memory of
        one piece, for one more evaluation of the logits a product. Not with "woodbury".
      adaptive_damping: first value of a further damping that grows where the loss falls by less than a quarter of what
        the quadratic predicts, and shrinks where it falls by more than three quarters. Needs `value`. Losses are
        compared from one update to the next, so it is meant for batches large enough to compare.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ScaleBySpfbState`. Curvature and solution are in float32 at
      least, whatever the dtype of the parameters; updates have the dtype of the gradients.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import qbound
      >>> transform = qbound.scale_by_spfb(lambda theta, f: f @ theta, damping=0.1)  # explicit features f (b, n, d)
      >>> features = jax.random.normal(jax.random.key(0), (20, 3, 4))
      >>> theta, grads = jnp.zeros(4), jnp.ones(4)
      >>> state = transform.init(theta)
      >>> updates, state = transform.update(grads, state, theta, inputs=features)
      >>> updates.shape, bool(optax.tree.get(state, "spfb_converged"))
      ((4,), True)
    """
    options = dict(locals())
    checks.positive("damping", damping)
    return spfb_direction(SpfbOptions(**options))


def spfb(
    learning_rate: optax.ScalarOrSchedule,
    logits_fn: Callable[[Any, Any], Array],
    *,
    l2: Scalar = 0.0,
    damping: Scalar = 0.0,
    solver: Solver = "auto",
    order: Order = "max_first",
    max_steps: int = 10,
    tolerance: Scalar = 1e-3,
    window: int | None = None,
    inputs_like: Any = None,
    inputs_axes: Any = 0,
    limit_steps: bool = True,
    precondition: CurvatureTransform | Callable[[Any], Any] | None = None,
    warm_start: bool = False,
    microbatch_size: int | None = None,
    adaptive_damping: Scalar | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SPFB, the stochastic partition function bound method: Algorithm 2 of [WC20].

    .. math:: \theta \leftarrow \theta - \eta_t\,
        \Big(\tfrac1b \sum_j \Sigma_j + (l_2 + \text{damping}) I\Big)^{-1} (\nabla L + l_2 \theta)

    A second-order method for the mean loss of a softmax model, safe at a learning rate of 1: the step then leads to the
    minimum of an upper bound of the batch's objective. The paper has eta_t = eta_0/t, here
    `lambda step: eta_0 / (step + 1)`. With batches of less than a few hundred, use `window`.

    Gradients are those of the **mean** loss of the batch, without the l2 term, which is added here as `optax.adamw`
    adds its decay: `grads = jax.grad(lambda p: cross_entropy(logits_fn(p, x), y).mean())(params)`.

    In an optax loop it is a change of one line, and one more argument to `update`:
    `tx.update(grads, state, params, inputs=x)`. With `optax.inject_hyperparams`, name what is not a number to change:

    `optax.inject_hyperparams(qbound.spfb, static_args=("logits_fn", "max_steps", "window", "inputs_like",
    "inputs_axes", "precondition", "microbatch_size"))(learning_rate=1.0, logits_fn=logits_fn, l2=1e-4)`

    Inside `optax.MultiSteps` the gradient is the mean over the mini-batches and the curvature that of the last of them,
    or of a window into which every last one enters. The solve is made, and dropped, in every mini-step.

    Args:
      learning_rate: eta, a number or an optax schedule.
      logits_fn: the model; see `scale_by_spfb`, as for every option below.
      l2: weight of the regulariser l2/2 |theta|^2 of the objective: added to the curvature and, times theta, to the
        gradient.
      damping: added to the curvature alone. One of `l2` and `damping` must be above 0.
      solver: "auto", "dense", "woodbury" or "cg".
      order: of the labels.
      max_steps: the most iterations of CG.
      tolerance: relative residual at which CG stops.
      window: take the curvature from this many recent examples. Recommended for batches below a few hundred.
      inputs_like: with `window`, one example's inputs, or their shapes.
      inputs_axes: which arrays of `inputs` have an axis of examples.
      limit_steps: with `window`, keep the learning rate below the length at which steps would, on average over the
        batches before, make the bound of a batch's own objective rise: small batches are then safe at a learning rate
        of 1. It takes effect where batches are small beside the number of parameters, and biases nothing.
      precondition: for CG.
      warm_start: start CG from the last solution.
      microbatch_size: take products in pieces of this many examples.
      adaptive_damping: first value of an adaptive damping.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import qbound
      >>> x = jax.random.normal(jax.random.key(0), (500, 4))
      >>> y = jnp.argmax(x[:, :3], axis=1)
      >>> def loss(params):
      ...     logits = qbound.linear_logits(params, x)
      ...     return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
      >>> tx = qbound.spfb(1.0, qbound.linear_logits, l2=1e-3)
      >>> params = {"weights": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}
      >>> state = tx.init(params)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params, inputs=x)
      ...     params = optax.apply_updates(params, updates)
      >>> print(f"{loss(params):.2f}")
      0.29
    """
    options = dict(locals())
    check_some_damping(l2, damping)
    rate = learning_rate if options.pop("limit_steps") else None
    direction = spfb_direction(SpfbOptions(**{**options, "learning_rate": rate}))
    return keep_params_finite(optax.chain(direction, optax.scale_by_learning_rate(learning_rate)), "spfb")


# What an update is told.


@dataclasses.dataclass(frozen=True)
class SpfbOptions:
    """The arguments of `qbound.spfb` and, with `sketch`, of `qbound.lspfb`: Python values an update closes over.

    A `learning_rate` of None, as for `qbound.scale_by_spfb`, is 1 and unknown: steps are not limited.
    """

    logits_fn: Callable[[Any, Any], Array]
    damping: Scalar
    order: Order
    inputs_axes: Any
    adaptive_damping: Scalar | None
    solver: Solver = "auto"
    max_steps: int = 1
    tolerance: Scalar = 1e-3
    window: int | None = None
    inputs_like: Any = None
    precondition: CurvatureTransform | Callable[[Any], Any] | None = None
    warm_start: bool = False
    microbatch_size: int | None = None
    learning_rate: optax.ScalarOrSchedule | None = None
    l2: Scalar = 0.0
    sketch: SketchOptions | None = None

    def __post_init__(self):
        checks.function("logits_fn", self.logits_fn)
        checks.choice("solver", self.solver, SOLVERS)
        checks.choice("order", self.order, ("descending", "max_first", "given"))
        for name in ("max_steps", "window", "microbatch_size"):
            number = getattr(self, name)
            if number is not None or name == "max_steps":
                object.__setattr__(self, name, checks.integer(name, number))
        checks.nonnegative("tolerance", self.tolerance)
        if (self.window is None) != (self.inputs_like is None):
            raise ValueError(
                "inputs_like: expected one example's inputs, or their shapes, together with window and not without it; "
                f"got window={self.window!r} and {'no' if self.inputs_like is None else 'an'} inputs_like"
            )
        if self.precondition is not None:
            if not isinstance(self.precondition, CurvatureTransform) and not callable(self.precondition):
                raise TypeError(
                    "precondition: expected a function, or a transform made by scale_by_kspfb or scale_by_lspfb; got "
                    f"{self.precondition!r}"
                )
            if self.solver in ("dense", "woodbury"):
                raise ValueError(f'precondition: expected None with solver={self.solver!r}, because only "cg" uses it')
        if self.microbatch_size is not None and self.solver == "woodbury":
            raise ValueError('microbatch_size: expected None with solver="woodbury", which needs the whole batch')
        if self.adaptive_damping is not None:
            checks.positive("adaptive_damping", self.adaptive_damping)

    @property
    def family(self) -> Softmax:
        """Whose bound the curvature is of."""
        return Softmax(self.order)


# One update.


def spfb_direction(options: SpfbOptions) -> optax.GradientTransformationExtraArgs:
    """The transform from gradients to s, (mean curvature + (l2 + damping) I) s = gradient + l2 params."""

    def init(params) -> Any:
        params = checked_params(params)
        dtype = parameter_dtype(params)
        adaptive, remembers = options.adaptive_damping, options.window is not None
        sketch = preconditioner = None
        if options.sketch is not None:
            sketch = first_sketch(options.sketch, params)
            remembers = sketch is not None
        if isinstance(options.precondition, CurvatureTransform):
            preconditioner = options.precondition.remember(params)
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
            spfb_window=None if options.window is None else _first_window(options, params),
            spfb_limit=no_limit_yet(dtype) if remembers and options.learning_rate is not None else None,
            spfb_adaptation=None if adaptive is None else first_adaptation(params, adaptive, dtype),
            spfb_sketch=sketch,
            spfb_preconditioner=preconditioner,
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
        check_update(
            params,
            updates=updates,
            inputs=inputs,
            example_weights=example_weights,
            curvature_inputs=curvature_inputs,
            curvature_weights=curvature_weights,
            value=value,
        )
        model = widened(options.logits_fn) if is_narrow(params) else options.logits_fn
        params, updates = checked_params(params), jax.tree.map(jnp.asarray, updates)
        # 1. The gradient and the damping of the objective, which has the l2 term.
        g, l2 = regularised(updates, params, options.l2)
        damping = l2 + as_number(checks.nonnegative("damping", options.damping), params)
        damping = jnp.where(damping > 0, damping, jnp.nan)
        adaptation, objective = state.spfb_adaptation, jnp.zeros_like(damping)
        if adaptation is not None:
            loss = as_number(given("value", value, "the loss, because of adaptive_damping"), params)
            objective = loss + l2 / 2 * trees.dot(params, params)
            adaptation = adapted(adaptation, params, objective, options.adaptive_damping)
            damping = damping + adaptation.spfb_adaptive_damping
        # 2. The curvature at the current parameters, and the solution.
        if curvature_inputs is None:
            if curvature_weights is not None:
                raise ValueError("curvature_weights: expected None without curvature_inputs; got weights")
            inputs = given("inputs", inputs, "the batch that the gradient is of, as logits_fn takes it")
            batch = _curvatures(options, model, state, params, inputs, "example_weights", example_weights)
        else:
            if state.spfb_window is not None or state.spfb_sketch is not None:
                kept = "window" if state.spfb_window is not None else "decay"
                raise ValueError(f"curvature_inputs: expected None with {kept}=, which keeps its own; got both")
            batch = _curvatures(options, model, state, params, curvature_inputs, "curvature_weights", curvature_weights)
        precondition, preconditioner = options.precondition, state.spfb_preconditioner
        if isinstance(precondition, CurvatureTransform):
            preconditioner, precondition = precondition.prepare(
                preconditioner, params, damping, inputs=inputs, example_weights=example_weights
            )
        solution = solve_damped(
            options.solver,
            batch.of_step,
            g,
            damping,
            max_steps=options.max_steps,
            tolerance=options.tolerance,
            precondition=precondition,
            start=state.spfb_solution,
        )
        # 3. The step, unless a number went wrong.
        s = solution.vector
        slope, curved = trees.dot(g, s), trees.dot(s, solution.product)
        finite = jnp.isfinite(solution.residual) & trees.all_finite(trees.cast_like(s, updates))
        if options.learning_rate is None:
            finite = finite & ~runs_away(params, s)
        # CG that broke down at its first step returns zero. A direct solver may return what its own quadratic warns of.
        nowhere = (solution.residual >= 1) & (slope == 0)
        sound = finite & ~nowhere & ~(slope < curved / 2)
        s = jax.tree.map(lambda leaf: jnp.where(sound, leaf, 0), s)
        length, limit = _step_length(options, state, batch, g, s, damping, params)
        length = jnp.where(sound, length, 0)
        step = trees.scale(length, s)
        slope, curved = (jnp.where(sound, x, 0) for x in (length * slope, length**2 * curved))
        info = SpfbInfo(
            spfb_steps=solution.steps,
            spfb_residual=solution.residual,
            spfb_converged=solution.residual <= jnp.asarray(options.tolerance, damping.dtype),
            spfb_predicted_decrease=slope - curved / 2,
            spfb_step_length=length,
            spfb_nonfinite=~sound,
            spfb_nonfinite_total=state.spfb_info.spfb_nonfinite_total + (~sound).astype(jnp.int32),
        )
        # 4. What the next update needs.
        if adaptation is not None:
            modelled = curved - adaptation.spfb_adaptive_damping * trees.dot(step, step)
            adaptation = remember(adaptation, params, objective, step, slope, modelled)
        warm = None if state.spfb_solution is None else s
        window = state.spfb_window
        if window is not None:
            window = settled_window(window, batch, g, damping, sound)
        sketch, preconditioner = (
            jax.tree.map(lambda new, old: jnp.where(sound, new, old), new, old)
            for new, old in ((batch.sketch, state.spfb_sketch), (preconditioner, state.spfb_preconditioner))
        )
        state = ScaleBySpfbState(info, warm, window, limit, adaptation, sketch, preconditioner)
        return trees.cast_like(step, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def widened(logits_fn: Callable) -> Callable:
    """A model that is handed its inputs in float32 at least, as it is its parameters."""
    return lambda params, inputs: logits_fn(params, jax.tree.map(widen_floats, inputs))


def _first_window(options: SpfbOptions, params) -> SpfbWindow:
    """With nothing in it."""
    assert options.window is not None
    like, axes, shape = options.inputs_like, options.inputs_axes, (1, 1)
    if jax.tree.leaves(params):  # optax.tree.map_params asks for a state without parameters
        shape = logits_shape(options.logits_fn, params, batch_of_one(like, axes))
    return empty_window(options.window, like, axes, shape[1:-1], parameter_dtype(params))


class Curvatures(NamedTuple):
    """The curvatures of one update, and the batch as it enters a window or a sketch for them."""

    of_step: Curvature  # what the step is made with
    of_batch: Callable[[], Curvature]  # that of the batch alone
    examples: list[Array]
    weights: Array
    window: SpfbWindow | None = None  # with the batch
    sketch: SpfbSketch | None = None  # with the batch


def _curvatures(options: SpfbOptions, model, state: ScaleBySpfbState, params, inputs, name, weights) -> Curvatures:
    """Of a batch alone, of the window that it enters, or the low-rank one of the sketch that it enters."""
    axes, window = options.inputs_axes, state.spfb_window
    examples = [] if window is None else check_examples(inputs, options.inputs_like, axes)
    weights = full_weights(
        name, weights, logits_shape(model, params, inputs)[:-1], working_dtype(*jax.tree.leaves(params))
    )

    def mean(inputs, weights):
        return mean_curvature(
            model,
            params,
            inputs,
            weights,
            bound=options.family.bound,
            axes=axes,
            microbatch_size=options.microbatch_size,
        )

    of_batch = functools.cache(lambda: mean(inputs, weights))
    if options.sketch is not None:
        curvature, sketch = low_rank_curvature(options, model, state.spfb_sketch, params, inputs, weights)
        return Curvatures(curvature, of_batch, examples, weights, sketch=sketch)
    if window is None:
        return Curvatures(of_batch(), of_batch, examples, weights)
    window = push(window, examples, weights)
    # A batch that fills the window is all of it, wherever it lies there.
    is_all = len(weights) >= len(window.window_weights)
    of_step = of_batch() if is_all else mean(recent_inputs(window, inputs, axes), window.window_weights)
    return Curvatures(of_step, of_batch, examples, weights, window)


def low_rank_curvature(
    options: SpfbOptions, model, sketch: SpfbSketch | None, params, inputs, weights
) -> tuple[LowRank, SpfbSketch | None]:
    """That of a batch, or of the sketch that it enters, and the sketch."""
    assert options.sketch is not None
    rows = curvature_by_example(model, params, inputs, weights, bound=options.family.bound, axes=options.inputs_axes)
    return add_batch(options.sketch, sketch, rows)


def _step_length(options, state, batch: Curvatures, g, s, damping, params) -> tuple[Array, SpfbLimit | None]:
    """What to multiply s by, and what limits the steps to come.

    While a window or a sketch fills, no further along s than to the minimum of the bound of the current batch alone,
    because directions that no example has shown yet have no curvature but the damping; and of that only the part
    `trust`, because the minimum for a few examples is not one for all. Once full, as far as earlier batches allow.
    """
    one = jnp.ones_like(damping)
    if batch.window is not None:
        memory = how_full_is_window(batch.window, len(batch.weights))
    elif batch.sketch is not None:
        memory = how_full_is_sketch(batch.sketch, len(batch.weights), options.sketch.decay)
    else:
        return one, state.spfb_limit
    slope, curved = trees.dot(g, s), batch.of_batch().quadratic(s) + damping * trees.dot(s, s)
    positive: Array = jnp.where(curved > 0, curved, 1)  # pyright: ignore[reportAssignmentType]
    to_minimum = jnp.where(curved > 0, jnp.clip(slope / positive, 0, 1), 1)
    held_back = memory.trust * to_minimum
    limit = state.spfb_limit
    if limit is None:
        return jnp.where(memory.full, one, held_back), None
    rate = rate_at(options.learning_rate, limit.limit_updates, params)
    allowed = jnp.where(memory.full, longest_step(limit), held_back)
    length = jnp.where(rate > allowed, allowed / rate, 1)
    return length, updated_limit(limit, slope, curved, memory.weight)
