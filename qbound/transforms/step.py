"""One update of SPFB: what it is told, what it remembers, and what it does."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from qbound import checks, compiler, trees
from qbound.transforms.adaptation import SpfbAdaptation, adapted, first_adaptation, remember
from qbound.transforms.finite import runs_away
from qbound.transforms.limit import SpfbLimit, longest_step, no_limit_yet, with_batch
from qbound.transforms.memory import batch_curvature, first_window, progress, settled_window
from qbound.transforms.options import SpfbOptions, as_number, checked_params, given, is_narrow, parameter_dtype
from qbound.transforms.preconditioner import CurvatureTransform
from qbound.transforms.sketch import SpfbSketch, first_sketch
from qbound.transforms.solvers import solve
from qbound.transforms.window import SpfbWindow

__all__ = ["ScaleBySpfbState", "SpfbInfo", "spfb_direction"]


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
            spfb_window=None if options.window is None else first_window(options, params),
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
        if params is None:
            raise ValueError("params: expected the parameters; got None. Call update(grads, state, params, inputs=...)")
        compiler.warn_if_wrong()
        checks.outside_shard_map(
            params=params,
            updates=updates,
            inputs=inputs,
            example_weights=example_weights,
            curvature_inputs=curvature_inputs,
            curvature_weights=curvature_weights,
            value=value,
        )
        model = options.widened() if is_narrow(params) else options
        params, updates = checked_params(params), jax.tree.map(jnp.asarray, updates)
        l2 = as_number(checks.nonnegative("l2", options.l2), params)
        # 1. The gradient and the damping of the objective, which has the l2 term.
        g = trees.add_scaled(checks.matching_tree("updates", updates, params), l2, params)
        damping = l2 + as_number(checks.nonnegative("damping", options.damping), params)
        damping = jnp.where(damping > 0, damping, jnp.nan)
        adaptation, objective = state.spfb_adaptation, jnp.zeros_like(damping)
        if adaptation is not None:
            loss = as_number(given("value", value, "the loss, because of adaptive_damping"), params)
            objective = loss + l2 / 2 * trees.dot(params, params)
            adaptation = adapted(adaptation, params, objective, options.adaptive_damping)
            damping = damping + adaptation.spfb_adaptive_damping
        # 2. The curvature at the current parameters, and the solution.
        batch = batch_curvature(model, state, params, inputs, example_weights, curvature_inputs, curvature_weights)
        precondition, preconditioner = options.precondition, state.spfb_preconditioner
        if isinstance(precondition, CurvatureTransform):
            preconditioner, precondition = precondition.prepare(
                preconditioner, params, damping, inputs=inputs, example_weights=example_weights
            )
        solution = solve(
            options.solver,
            batch.source,
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
        length, limit = _step_length(options, state, batch, g, s, damping)
        length = jnp.where(sound, length, 0)
        step = trees.scale(length, s)
        slope, curved = (jnp.where(sound, x, 0) for x in (length * slope, length**2 * curved))
        info = SpfbInfo(
            spfb_steps=solution.steps,
            spfb_residual=solution.residual,
            spfb_converged=solution.residual <= as_number(options.tolerance, params),
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
        window = settled_window(state.spfb_window, batch, g, damping, sound)
        sketch, preconditioner = (
            jax.tree.map(lambda new, old: jnp.where(sound, new, old), new, old)
            for new, old in ((batch.sketch, state.spfb_sketch), (preconditioner, state.spfb_preconditioner))
        )
        state = ScaleBySpfbState(info, warm, window, limit, adaptation, sketch, preconditioner)
        return trees.cast_like(step, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _step_length(options, state, batch, g, s, damping) -> tuple[Array, SpfbLimit | None]:
    """What to multiply s by, and what limits the steps to come.

    While a window or a sketch fills, no further along s than to the minimum of the bound of the current batch alone,
    because directions that no example has shown yet have no curvature but the damping; and of that only the part
    `trust`, because the minimum for a few examples is not one for all. Once full, as far as earlier batches allow.
    """
    one = jnp.ones_like(damping)
    memory = progress(options, batch)
    if memory is None:
        return one, state.spfb_limit
    slope, curved = trees.dot(g, s), batch.own().quadratic(s) + damping * trees.dot(s, s)
    positive: Array = jnp.where(curved > 0, curved, 1)  # pyright: ignore[reportAssignmentType]
    to_minimum = jnp.where(curved > 0, jnp.clip(slope / positive, 0, 1), 1)
    held_back = memory.trust * to_minimum
    limit = state.spfb_limit
    if limit is None:
        return jnp.where(memory.full, one, held_back), None
    rate = options.learning_rate
    rate = jnp.asarray(rate(limit.limit_updates) if callable(rate) else rate, one.dtype)
    allowed = jnp.where(memory.full, longest_step(limit), held_back)
    length = jnp.where(rate > allowed, allowed / rate, 1)
    return length, with_batch(limit, slope, curved, memory.weight)
