"""One step: a direction from a curvature, a length from a certificate or a line search, and what became of it."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from qbound import checks, trees
from qbound.curvature import Curvature, ModelCurvature
from qbound.families.classical import bohning_bound, second_order_expansion
from qbound.families.softmax import log_partition_bound
from qbound.fitting.line import StepLength, make_line, step_length
from qbound.fitting.problem import Problem, common_part
from qbound.fitting.results import Certificate, MMInfo, MMState, Result
from qbound.linalg import cg
from qbound.linalg.dense import solve_scaled
from qbound.models.base import BatchMap
from qbound.models.linear import KroneckerMap, linearise
from qbound.types import Order

__all__ = ["Curvatures", "MMOptions", "Solver", "evaluate", "first_state", "take_step"]


Curvatures = Literal["auto", "bound", "bohning", "hessian"]


Solver = Literal["auto", "cg", "dense"]


# The most parameters for which "auto" factorises a matrix: then that is cheaper than the CG steps it saves.
DENSE_LIMIT = 100


# CG stops at a relative residual of sqrt(|g|/|g_0|), at most so much: early steps may be rough, late ones become exact.
_LOOSEST = 0.5


# A run has stalled after so many steps in which the gradient norm found no new least value and no step was certified to
# decrease the objective by so many units of its rounding. Newton's method makes fast progress or none: only a part of
# the last least value counts; with a global bound, any new one does.
_NEWTON_PATIENCE, _PATIENCE, _PROGRESS, _NOISE = 3, 10, 0.9, 4


# The objective may rise by so many units of rounding.
_ROUNDING = 8


# What the rounding of the parameters costs is computed where it could be so large a part of what is certified.
_NEGLIGIBLE = 0.05


@dataclasses.dataclass(frozen=True)
class MMOptions:
    """The options of `qbound.mm.step` that a trace depends on; its docstring explains them."""

    curvature: Curvatures = "auto"
    order: Order = "max_first"
    search: bool = True
    solver: Solver = "auto"
    max_cg_steps: int = 200
    precondition: Callable[[Any], Any] | None = None

    def __post_init__(self):
        checks.choice("curvature", self.curvature, ("auto", "bound", "bohning", "hessian"))
        checks.choice("order", self.order, ("descending", "max_first", "given"))
        checks.choice("solver", self.solver, ("auto", "cg", "dense"))
        object.__setattr__(self, "max_cg_steps", checks.integer("max_cg_steps", self.max_cg_steps))
        if self.precondition is not None:
            checks.function("precondition", self.precondition)

    @property
    def bound(self) -> Callable:
        """The global one, from one vector of logits to a quadratic."""
        if self.curvature == "bohning":
            return bohning_bound
        return functools.partial(log_partition_bound, order=self.order)

    @property
    def is_local(self) -> bool:
        """Whether the local certificate may win."""
        return self.curvature in ("auto", "hessian")


class Point(NamedTuple):
    """The objective at some parameters."""

    params: Any
    logits: Array
    objective: Array
    gradient: Any
    gradient_norm: Array


def evaluate(problem: Problem, logits_fn: Callable, inputs: Any, params: Any) -> Point:
    """One pass over the data."""
    logits, linear_map = _linearised(logits_fn, params, inputs)
    objective, gradient = problem.value_and_gradient(linear_map, params, logits)
    return Point(params, logits, objective, gradient, _norm(gradient))


def first_state(problem: Problem, point: Point) -> MMState:
    """Before any step."""
    finite = jnp.isfinite(point.objective) & trees.all_finite(point.gradient)
    unable = (problem.verdict == Result.UNFINISHED) & ~finite
    result = jnp.where(unable, _code(Result.NOT_FINITE), problem.verdict)
    zero = jnp.zeros((), jnp.int32)
    return MMState(*point, jnp.array(True), point.gradient_norm, point.gradient_norm, zero, zero, result)


def take_step(
    problem: Problem,
    logits_fn: Callable,
    inputs: Any,
    state: MMState,
    options: MMOptions,
    eta: Any,
    tolerance: Any,
    cg_tolerance: Any,
) -> tuple[MMState, MMInfo]:
    """A step, unless the state says that there can be none."""
    dtype = state.objective.dtype
    eta, tolerance = jnp.asarray(eta, dtype), jnp.asarray(tolerance, dtype)
    _, linear_map = _linearised(logits_fn, state.params, inputs)
    # 1. The direction s, from the bound or from the Hessian. Whatever s is, the rest is right.
    s, cg_steps, passes = _direction(problem, linear_map, state, options, tolerance, cg_tolerance)
    s = trees.cast_like(s, state.gradient)
    if isinstance(linear_map, KroneckerMap):
        s = _without_rounding_of_the_common_part(problem, s, state.params)
    usable = trees.all_finite(s) & (trees.dot(state.gradient, s) > 0)
    s = jax.tree.map(lambda s, g: jnp.where(usable, s, g), s, state.gradient)
    # 2. Its length, from the displacement u of the logits.
    u = linear_map.forward(s).astype(dtype)
    line = make_line(problem.weights, state.logits.T, u.T, trees.dot(state.gradient, s), problem.penalty(s, s))

    def quadratic():
        return problem.mean(jax.vmap(lambda m, u: m.quadratic(u))(_terms(options.bound, state.logits), u))

    step = step_length(line, quadratic, is_local=options.is_local, search=options.search, eta=eta)
    # 3. The objective at the new parameters, which are rounded once, here.
    rounded = jax.lax.optimization_barrier(trees.add_scaled(state.params, -step.length, s))
    point = evaluate(problem, logits_fn, inputs, rounded)
    moved = jax.tree.map(jnp.subtract, state.params, rounded)
    (length, certified, actual, local), more = _rounded_step(problem, linear_map, state, s, u, step, point, moved)
    # 4. The new state, or the old one with the reason.
    affine = _is_affine(problem, linear_map, state.logits, length * u, point.logits)
    falls = jax.lax.cond(
        point.objective <= state.objective,
        lambda: jnp.array(True),
        lambda: point.objective <= state.objective + _noise(problem, state),
    )
    finite = jnp.isfinite(point.objective) & trees.all_finite(point.gradient)
    sound = finite & falls & (certified > 0) & (actual > 0) & (trees.largest(moved) > 0)
    open_to_change = state.result == Result.UNFINISHED
    unconverged = state.gradient_norm > tolerance
    accepted = open_to_change & unconverged & sound & affine
    new = _next_state(state, point, certified, local)
    refused = jax.lax.select(affine | ~finite, _code(Result.STALLED), _code(Result.NOT_AFFINE))
    refused = jax.lax.select(unconverged, refused, _code(Result.CONVERGED))
    old = state._replace(result=jax.lax.select(open_to_change, refused, state.result))
    state = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), new, old)
    won = jax.lax.select(local, _code(Certificate.LOCAL), _code(Certificate.BOUND))
    info = MMInfo(
        objective=state.objective,
        gradient_norm=state.gradient_norm,
        certificate=jax.lax.select(accepted, won, _code(Certificate.NONE)),
        certified_decrease=jnp.where(accepted, certified, 0),
        actual_decrease=jnp.where(accepted, actual, 0),
        step_length=jnp.where(accepted, length, 0),
        cg_steps=cg_steps,
        passes=passes + 1.5 + more,
        steps=state.steps,
        result=state.result,
    )
    return state, info


def _linearised(logits_fn: Callable, params: Any, inputs: Any) -> tuple[Array, BatchMap]:
    """As `linearise`, with products in full precision, unless the model or JAX was told which one to take.

    By default TPUs round the factors of a product to bfloat16, and GPUs to TF32. Of logits that leaves three digits:
    a step near the optimum changes less than that, and a run would stall there.
    """
    told = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    with jax.default_matmul_precision(told or "highest"):
        return linearise(logits_fn, params, inputs)


def _direction(problem, linear_map, state, options, tolerance, cg_tolerance):
    """An approximate solution of (C + l2) s = g, the steps of CG, and the passes over the data it took."""
    g = state.gradient
    bound = functools.partial(_terms, options.bound, state.logits)
    hessian = functools.partial(_terms, second_order_expansion, state.logits)
    if options.solver == "dense" or (options.solver == "auto" and trees.size(g) <= DENSE_LIMIT):

        def dense(terms):
            return lambda: ModelCurvature(terms(), problem.weights, linear_map).dense()

        if options.curvature == "auto":
            matrix = jax.lax.cond(state.newton, dense(hessian), dense(bound))
        else:
            matrix = dense(hessian if options.curvature == "hessian" else bound)()
        return _solve(matrix, problem, g), jnp.zeros((), jnp.int32), jnp.ones_like(state.objective)

    if cg_tolerance is None:
        rough = jnp.minimum(_LOOSEST, jnp.sqrt(state.gradient_norm / state.first_norm))
        # The last step needs to reach the tolerance and no more.
        cg_tolerance = jnp.maximum(rough, tolerance / (2 * state.gradient_norm))

    def iterate(terms):
        terms = terms()

        def product(v):
            return problem.damped(problem.pull_back(linear_map, _mv(terms, linear_map.forward(v))), v)

        limits = {"max_steps": options.max_cg_steps, "tolerance": cg_tolerance}
        return cg.iterate(product, g, **limits, precondition=options.precondition)

    if options.curvature == "auto":
        # Two loops, and not one with a choice in every product, which would copy its operands.
        s, steps = jax.lax.cond(state.newton, lambda: iterate(hessian), lambda: iterate(bound))
    else:
        s, steps = iterate(hessian if options.curvature == "hessian" else bound)
    return s, steps, steps.astype(state.objective.dtype)


def _without_rounding_of_the_common_part(problem, s, params):
    """S, where the part that is the same for all labels is a multiple of that of the parameters, as it must be.

    No curvature but l2 holds that part back: rounding errors in the gradient come out 1/l2 times as large. The gradient
    of the penalty is all that it sees; l2 is the least eigenvalue, so that CG solves from 0 to all of its equation.
    """

    def leaf(c, s, mean, params_mean):
        square = jnp.sum(params_mean**2)
        share = jnp.sum(mean * params_mean) / jnp.where(square > 0, square, 1)
        share = jnp.where((square > 0) & (c > 0), jnp.clip(share, 0, 1), 0)
        return s - mean + share * params_mean

    return jax.tree.map(leaf, problem.l2, s, common_part(s), common_part(params))


def _rounded_step(
    problem, linear_map, state: MMState, s, u, step: StepLength, point: Point, moved
) -> tuple[StepLength, Array]:
    """The step to the parameters as they were rounded, `moved` from the old ones; and the passes that knowing it took.

    With large inputs, a unit of rounding of the parameters can change the logits by more than the step was to change
    them. From the point aimed at to the one reached, the objective rises by the difference of their decreases, and that
    is taken off what is certified.
    """
    known = jnp.isfinite(point.logits) & jnp.isfinite(state.logits)
    deviation = jnp.where(known, jnp.abs(state.logits - step.length * u - point.logits), 0)
    # Log Z and the observed logit change by the largest deviation of their row, at most.
    loss = 2 * problem.mean(jnp.max(deviation, axis=1))
    loss += jnp.abs(problem.penalty(state.params, moved) - step.length * problem.penalty(state.params, s))

    def taken():
        displacement = linear_map.forward(moved).astype(u.dtype)
        slope = trees.dot(state.gradient, moved)
        line = make_line(problem.weights, state.logits.T, displacement.T, slope, problem.penalty(moved, moved))
        actual = line.decrease(jnp.ones_like(slope))
        certified = step.certified - jnp.maximum(step.actual - actual, 0)
        return StepLength(step.length, certified, actual, step.local), jnp.full_like(slope, 0.5)

    def nearly():
        return step._replace(certified=step.certified - loss), jnp.zeros_like(step.length)

    return jax.lax.cond(loss > _NEGLIGIBLE * step.certified, taken, nearly)


def _solve(matrix, problem, g):
    """(C + l2) s = g."""
    l2, _ = ravel_pytree(jax.tree.map(lambda c, leaf: jnp.broadcast_to(c, leaf.shape), problem.l2, g))
    g, unravel = ravel_pytree(g)
    return unravel(solve_scaled(matrix + jnp.diag(l2), g))


def _next_state(state: MMState, point: Point, certified, newton) -> MMState:
    """After an accepted step."""
    least = point.gradient_norm < jnp.where(newton, _PROGRESS, 1) * state.least_norm
    visible = certified > _NOISE * jnp.finfo(certified.dtype).eps * jnp.abs(point.objective)
    since = jnp.where(least | visible, 0, state.steps_since + 1)
    patience = jnp.where(newton, _NEWTON_PATIENCE, _PATIENCE)
    return MMState(
        *point,
        newton=newton,
        first_norm=state.first_norm,
        least_norm=jnp.where(least, point.gradient_norm, state.least_norm),
        steps_since=since,
        steps=state.steps + 1,
        result=jnp.where(since >= patience, _code(Result.STALLED), state.result),
    )


def _terms(bound, logits) -> Curvature:
    """The curvature of every row of logits."""
    return jax.vmap(lambda h: bound(h).curvature)(logits)


def _mv(terms: Curvature, u):
    return jax.vmap(lambda m, u: m.mv(u))(terms, u)


def _is_affine(problem, linear_map: BatchMap, old, change, new):
    """Whether the new logits are the old ones less `change`, up to rounding, where they count; -inf stays -inf."""
    if isinstance(linear_map, KroneckerMap):
        return jnp.array(True)  # known to be
    expected = jnp.where(jnp.isfinite(old), old - change, old)
    size = 1 + jnp.where(jnp.isfinite(old), jnp.abs(old), 0) + jnp.abs(change)
    # The model may compute in less precision than its parameters have.
    eps = max(float(jnp.finfo(dtype).eps) for dtype in (linear_map.map.image.dtype, new.dtype))
    close = jnp.abs(new - expected) <= math.sqrt(eps) * size
    return jnp.all(close | (new == expected) | (problem.weights == 0)[:, None])


def _noise(problem, state: MMState):
    """By how much rounding alone may change the objective."""
    finite = jnp.isfinite(state.logits) & (problem.weights > 0)[:, None]
    largest = jnp.max(jnp.where(finite, jnp.abs(state.logits), 0))
    return _ROUNDING * jnp.finfo(state.objective.dtype).eps * (jnp.abs(state.objective) + largest)


def _norm(gradient):
    size = trees.largest(gradient)
    size = jnp.where((size > 0) & jnp.isfinite(size), size, 1)
    unit = trees.scale(1 / size, gradient)
    return size * jnp.sqrt(trees.dot(unit, unit))


def _code(value: Result | Certificate) -> Array:
    return jnp.asarray(value, jnp.int32)
