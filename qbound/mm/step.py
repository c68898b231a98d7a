"""One step: a direction from a curvature, a length from a certificate or a line search, and what became of it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from qbound import cg, checks, trees
from qbound.bounds import bohning_bound, log_partition_bound, second_order_expansion
from qbound.curvature import ModelCurvature
from qbound.mm.certificates import certified_by_bound, certified_locally, make_line
from qbound.mm.problem import Problem
from qbound.mm.results import Certificate, Result
from qbound.models import BatchMap, linearise
from qbound.solve import solve_dense
from qbound.types import Order

__all__ = ["Curvatures", "MMInfo", "MMOptions", "MMState", "Solver", "evaluate", "first_state", "take_step"]

Curvatures = Literal["auto", "bound", "bohning", "hessian"]
Solver = Literal["auto", "cg", "dense"]

# The most parameters for which "auto" factorises a matrix: then that is cheaper than the CG steps it saves.
DENSE_LIMIT = 100
# CG stops at a relative residual of sqrt(|g|/|g_0|), at most so much: early steps may be rough, late ones become exact.
_LOOSEST = 0.5
# A run has stalled after so many steps in which the gradient norm found no new least value, of at most so large a part
# of the last, and no step was certified to decrease the objective by so many units of its rounding. Newton's method
# makes fast progress or none; a global bound may need many steps for a tenth.
_NEWTON_PATIENCE, _PATIENCE, _PROGRESS, _NOISE = 3, 10, 0.9, 4


class MMState(NamedTuple):
    """What the next step needs.

    Attributes:
      params: the parameters, the best so far.
      logits: theirs, one row for each example.
      objective: the mean loss and the regulariser.
      gradient: of the objective.
      gradient_norm: its Euclidean length.
      newton: whether the next direction is Newton's; with `curvature="auto"`, whether the local certificate won.
      first_norm: the gradient norm at the start.
      least_norm: the least gradient norm so far, give or take a tenth.
      steps_since: steps since then.
      steps: steps taken.
      result: UNFINISHED, or a `Result` that says why there can be no further step.
    """

    params: Any
    logits: Float[Array, "b n"]
    objective: Float[Array, ""]
    gradient: Any
    gradient_norm: Float[Array, ""]
    newton: Bool[Array, ""]
    first_norm: Float[Array, ""]
    least_norm: Float[Array, ""]
    steps_since: Int[Array, ""]
    steps: Int[Array, ""]
    result: Int[Array, ""]


class MMInfo(NamedTuple):
    """How a step went, or a run: then sums and last values, and the steps in `history`.

    Attributes:
      objective: at the new parameters.
      gradient_norm: there.
      certificate: which one won, a `Certificate`; NONE if no step was taken. Of a run: that of its last step.
      certified_decrease: of the objective, at least; of a run: by all steps.
      actual_decrease: of the objective; of a run: by all steps.
      step_length: what the direction was multiplied by; 0 if no step was taken.
      cg_steps: iterations of CG; 0 for a direct solver. Of a run: of all steps.
      passes: over the data, one for a product with it and one with its transpose. A gradient counts as 1, and so does
        an iteration of CG. Of a run: of all steps and of the first gradient.
      steps: taken so far.
      result: a `Result`.
      history: of a run, the infos of its steps, with an axis of steps; None for a step.
    """

    objective: Float[Array, "..."]
    gradient_norm: Float[Array, "..."]
    certificate: Int[Array, "..."]
    certified_decrease: Float[Array, "..."]
    actual_decrease: Float[Array, "..."]
    step_length: Float[Array, "..."]
    cg_steps: Int[Array, "..."]
    passes: Float[Array, "..."]
    steps: Int[Array, "..."]
    result: Int[Array, "..."]
    history: Any = None


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
        checks.integer("max_cg_steps", self.max_cg_steps)
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
    logits, linear_map = linearise(logits_fn, params, inputs)
    gradient = problem.gradient(linear_map, params, logits)
    return Point(params, logits, problem.objective(params, logits), gradient, _norm(gradient))


def first_state(problem: Problem, options: MMOptions, point: Point) -> MMState:
    """Before any step."""
    finite = jnp.isfinite(point.objective) & trees.all_finite(point.gradient)
    unable = (problem.verdict == Result.UNFINISHED) & ~finite
    result = jnp.where(unable, _code(Result.NOT_FINITE), problem.verdict)
    zero = jnp.zeros((), jnp.int32)
    newton = jnp.array(options.curvature == "hessian")
    return MMState(*point, newton, point.gradient_norm, point.gradient_norm, zero, zero, result)


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
    _, linear_map = linearise(logits_fn, state.params, inputs)
    # 1. The direction s, from the bound or from the Hessian.
    bound = _curvature(options.bound, problem, linear_map, state.logits)
    s, cg_steps, passes = _direction(problem, linear_map, bound, state, options, tolerance, cg_tolerance)
    # 2. Its certificates, from the displacement u of the logits.
    u = linear_map.forward(s)
    line = make_line(problem, state.logits, u, trees.dot(state.gradient, s), problem.penalty(s, s))
    quadratic = problem.mean(jax.vmap(lambda m, u: m.quadratic(u))(bound.logits, u))
    length, certified = certified_by_bound(line, quadratic, eta)
    local = jnp.array(False)
    if options.is_local:
        local_length, local_certified = certified_locally(line)
        local = local_certified > certified
        length = jnp.where(local, local_length, length)
        certified = jnp.maximum(certified, local_certified)
    # 3. The length, no worse than the certified one.
    actual = line.decrease(length)
    if options.search:
        found = line.search(length)
        better = line.decrease(found)
        length, actual = jnp.where(better > actual, found, length), jnp.maximum(better, actual)
    # 4. The objective at the new parameters.
    point = evaluate(problem, logits_fn, inputs, trees.add_scaled(state.params, -length, s))
    affine = _agree(point.logits, jnp.where(jnp.isfinite(state.logits), state.logits - length * u, state.logits))
    sound = jnp.isfinite(point.objective) & trees.all_finite(point.gradient) & (certified > 0) & (actual > 0)
    able = state.result == Result.UNFINISHED
    accepted = able & sound & affine
    new = _next_state(state, point, certified, local if options.curvature == "auto" else state.newton)
    new = new._replace(result=jnp.where(affine, new.result, _code(Result.NOT_AFFINE)))
    refused = jnp.where(affine | ~sound, _code(Result.STALLED), _code(Result.NOT_AFFINE))
    old = state._replace(result=jnp.where(able, refused, state.result))
    state = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), new, old)
    won = jnp.where(local, _code(Certificate.LOCAL), _code(Certificate.BOUND))
    info = MMInfo(
        objective=state.objective,
        gradient_norm=state.gradient_norm,
        certificate=jnp.where(accepted, won, _code(Certificate.NONE)),
        certified_decrease=jnp.where(accepted, certified, 0),
        actual_decrease=jnp.where(accepted, actual, 0),
        step_length=jnp.where(accepted, length, 0),
        cg_steps=cg_steps,
        passes=passes + 1.5,
        steps=state.steps,
        result=state.result,
    )
    return state, info


def _direction(problem, linear_map, bound: ModelCurvature, state, options, tolerance, cg_tolerance):
    """An approximate solution of (C + l2) s = g, the steps of CG, and the passes over the data it took."""
    newton = state.newton
    hessian = _curvature(second_order_expansion, problem, linear_map, state.logits) if options.is_local else bound
    g = state.gradient
    if options.solver == "dense" or (options.solver == "auto" and trees.size(g) <= DENSE_LIMIT):
        matrix = jax.lax.cond(newton, hessian.dense, bound.dense)
        s = _solve_scaled(matrix, problem, g)
        return s, jnp.zeros((), jnp.int32), jnp.ones_like(state.objective)

    def of_logits(u):
        def with_terms(terms):
            return lambda u: jax.vmap(lambda m, u: m.mv(u))(terms, u)

        if not options.is_local:
            return with_terms(bound.logits)(u)
        return jax.lax.cond(newton, with_terms(hessian.logits), with_terms(bound.logits), u)

    def product(v):
        u = of_logits(linear_map.forward(v))
        w = problem.weights[:, None]
        return problem.damped(linear_map.transpose(jnp.where(w == 0, 0, w * u)), v)

    if cg_tolerance is None:
        rough = jnp.minimum(_LOOSEST, jnp.sqrt(state.gradient_norm / state.first_norm))
        # The last step needs to reach the tolerance and no more.
        cg_tolerance = jnp.maximum(rough, tolerance / (2 * state.gradient_norm))
    s, steps, _ = cg.iterate(
        product, g, max_steps=options.max_cg_steps, tolerance=cg_tolerance, precondition=options.precondition
    )
    return s, steps, steps.astype(state.objective.dtype)


def _solve_scaled(matrix, problem, g):
    """(C + l2) s = g by Cholesky, with every parameter in a scale of its own, so that none drowns in rounding.

    A damping of some units of rounding keeps the factorisation alive; whatever s is, the certificates are right.
    """
    l2, _ = ravel_pytree(jax.tree.map(lambda c, leaf: jnp.broadcast_to(c, leaf.shape), problem.l2, g))
    g, unravel = ravel_pytree(g)
    matrix = matrix + jnp.diag(l2)
    diagonal = jnp.diag(matrix)
    scale = 1 / jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1))
    damping = 4 * g.size * jnp.finfo(g.dtype).eps
    return unravel(scale * solve_dense(scale[:, None] * matrix * scale[None, :], scale * g, damping))


def _next_state(state: MMState, point: Point, certified, newton) -> MMState:
    least = point.gradient_norm < _PROGRESS * state.least_norm
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


def _curvature(bound, problem: Problem, linear_map: BatchMap, logits) -> ModelCurvature:
    return ModelCurvature(jax.vmap(lambda h: bound(h).curvature)(logits), problem.weights, linear_map)


def _agree(found, expected):
    """Whether logits are equal up to rounding; -inf only where it is expected."""
    size = 1 + jnp.max(jnp.where(jnp.isfinite(expected), jnp.abs(expected), 0))
    close = jnp.abs(found - expected) <= jnp.sqrt(jnp.finfo(found.dtype).eps) * size
    return jnp.all(close | (found == expected))


def _norm(gradient):
    size = trees.largest(gradient)
    size = jnp.where((size > 0) & jnp.isfinite(size), size, 1)
    unit = trees.scale(1 / size, gradient)
    return size * jnp.sqrt(trees.dot(unit, unit))


def _code(value: Result | Certificate) -> Array:
    return jnp.asarray(value, jnp.int32)
