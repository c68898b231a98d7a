r"""One certified step on a full batch: its direction, its length by a certificate or a search, and what came of it.

.. math:: L(\theta) = \sum_j w_j [\log Z_j(\theta) - t_j^\top h_j(\theta)] + \tfrac12 \sum_i \lambda_i \theta_i^2

with logits h_j affine in the parameters, t_j the probabilities of the labels, and weights w_j that sum to 1. The first
functions are rules that every full-batch method shares.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from qbound import checks, compiler, trees
from qbound.curvature import Curvature, ModelCurvature
from qbound.families.base import LogPartition
from qbound.families.softmax import Softmax
from qbound.fitting.line import Line, StepLength, make_line, step_length
from qbound.fitting.results import Certificate, MMInfo, MMState, Result
from qbound.linalg import cg
from qbound.linalg.dense import solve_scaled
from qbound.models.base import BatchMap, full_weights, normalised
from qbound.models.linear import KroneckerMap, linearise, logits_in_rows, logits_shape
from qbound.records import record, static
from qbound.types import Order, Scalar, working_dtype

Curvatures = Literal["auto", "bound", "bohning", "hessian"]
DirectionSolver = Literal["auto", "cg", "dense"]

# Up to this many parameters, to factorise a matrix is cheaper than the CG steps that it saves.
DENSE_LIMIT = 100
# The largest relative residual at which CG may stop.
_LOOSEST = 0.5
# A step gains if the gradient norm falls below this part of its least value,
_PROGRESS = 0.9
# or the objective falls by more than this many units of its rounding.
_NOISE = 4
# A run has stalled after this many steps without a gain. Newton's method makes fast progress or none.
_NEWTON_PATIENCE = 3
# With a global bound any new least gradient norm is a gain, and progress is slow.
_PATIENCE = 10
# The objective may rise by this many units of rounding.
_ROUNDING = 8
# What the rounding of the parameters costs is computed where it could be this part of what is certified.
_NEGLIGIBLE = 0.05
# How far a row of probabilities may be from a sum of 1.
_SUM_TOLERANCE = 1e-3


def forcing_tolerance(norm: Array, first_norm: Array, tolerance: Array, loosest: float) -> Array:
    """The relative residual at which CG may stop, for a gradient of this norm.

    sqrt(|g|/|g_0|), at most `loosest`: early directions may be rough, late ones become exact, and convergence is
    superlinear. But the last step needs to reach `tolerance` and no more.
    """
    return jnp.maximum(jnp.minimum(loosest, jnp.sqrt(norm / first_norm)), tolerance / (2 * norm))


def descent_direction(s: Any, gradient: Any) -> Any:
    """`s`, or the gradient where rounding has left no direction along which the objective falls."""
    usable = trees.all_finite(s) & (trees.dot(gradient, s) > 0)
    return jax.tree.map(lambda s, g: jnp.where(usable, s, g), s, gradient)


def rounding_of(objective: Any, eps: float | None = None) -> Any:
    """The rounding below which a difference of objectives means nothing; `eps` is that of their dtype."""
    return _NOISE * (jnp.finfo(objective.dtype).eps if eps is None else eps) * abs(objective)


def has_gained(
    norm: Any, least: Any, fall: Any, objective: Any, progress: Any = _PROGRESS, eps: float | None = None
) -> Any:
    """Whether a step has gained anything: in its gradient norm, or in what the objective fell by.

    For arrays, and for Python numbers with the `eps` of the dtype they came from.
    """
    return (norm < progress * least) | (fall > rounding_of(objective, eps))


@record
class Problem:
    """Labels, weights and regulariser, and whether they make sense."""

    targets: Float[Array, "b n"]  # t_j
    weights: Float[Array, " b"]  # w_j; they sum to 1
    l2: Any  # a number for each leaf of the parameters
    verdict: Int[Array, ""]  # a `Result`: UNFINISHED if nothing is wrong
    family: LogPartition = static(default=Softmax())

    def mean(self, values: Float[Array, " b"]) -> Float[Array, ""]:
        """The weighted mean over examples."""
        return trees.weighted_sum(self.weights, values)

    def value_and_gradient(
        self, linear_map: BatchMap, params: Any, logits: Float[Array, "b n"]
    ) -> tuple[Float[Array, ""], Any]:
        """The objective L, and its gradient J'(w (p - t)) + l2 params."""
        loss, residual, _ = self.family.loss(logits, self.targets, axis=1)
        gradient = self.pull_back(linear_map, residual)
        if isinstance(linear_map, KroneckerMap):
            # Of large inputs, rounding leaves such a part here too.
            gradient = jax.tree.map(jnp.subtract, gradient, common_part(gradient))
        return self.mean(loss) + self.penalty(params, params) / 2, self.damped(gradient, params)

    def pull_back(self, linear_map: BatchMap, rows: Float[Array, "b n"]) -> Any:
        """The product J'(w rows)."""
        return linear_map.transpose(trees.weighted(self.weights, rows))

    def line(
        self, logits: Float[Array, "b n"], u: Float[Array, "b n"], slope: Float[Array, ""], penalty: Float[Array, ""]
    ) -> Line:
        """The line along parameters whose logits change by -u."""
        return make_line(self.family, self.weights, logits.T, u.T, slope, penalty)

    def damped(self, product: Any, v: Any) -> Any:
        """`product` + l2 v."""
        return jax.tree.map(lambda x, c, v: x + c * v, product, self.l2, v)

    def penalty(self, a: Any, b: Any) -> Float[Array, ""]:
        """The product a' l2 b."""
        return trees.dot(a, jax.tree.map(jnp.multiply, self.l2, b))


def common_part(tree: Any) -> Any:
    """The mean over labels, the last axis, of parameters of `qbound.linear_logits`: no probability depends on it."""
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=-1, keepdims=True), tree)


def make_problem(
    logits_fn: Callable,
    params: Any,
    inputs: Any,
    labels: Any,
    weights: Any,
    l2: Any,
    family: LogPartition = Softmax(),  # noqa: B008
) -> Problem:
    """Check the shapes of what was given, and look for values out of range."""
    compiler.warn_if_wrong()
    checks.outside_shard_map(params=params, inputs=inputs, labels=labels, example_weights=weights, l2=l2)
    shape = logits_shape(logits_fn, params, inputs)
    dtype = working_dtype(*jax.tree.leaves(params))
    rows = full_weights("example_weights", weights, shape[:-1], dtype).reshape(-1)
    rows = normalised(rows)
    targets, fine = _targets(labels, shape, dtype)
    l2 = l2_of_leaves(l2, params)
    # The first of these is the one reported, so it is set last.
    verdict = jnp.asarray(Result.UNFINISHED, jnp.int32)
    for code, good in (
        (Result.BAD_LABELS, jnp.all(fine | (rows == 0))),
        (Result.BAD_WEIGHTS, jnp.all(jnp.isfinite(rows))),
        (Result.BAD_L2, is_regulariser(l2)),
    ):
        verdict = jnp.where(good, verdict, jnp.int32(code))
    return Problem(targets=targets, weights=rows, l2=l2, verdict=verdict, family=family)


def _targets(labels, shape, dtype) -> tuple[Array, Array]:
    """Rows of probabilities, and which of them are right."""
    labels = checks.array("labels", labels)
    n = shape[-1]
    if jnp.issubdtype(labels.dtype, jnp.integer):
        if labels.shape != shape[:-1]:
            raise ValueError(
                f"labels: expected integers of shape {shape[:-1]} for logits of shape {shape}; got shape {labels.shape}"
            )
        # Labels of eight bits could not be compared with a larger n.
        labels = labels.reshape(-1).astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)
        return jax.nn.one_hot(labels, n, dtype=dtype), (labels >= 0) & (labels < n)
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        raise TypeError(f"labels: expected integers, or rows of probabilities as floats; got dtype {labels.dtype}")
    if labels.shape != shape:
        raise ValueError(
            f"labels: expected probabilities of shape {shape}, that of the logits; got floats of shape {labels.shape}"
        )
    rows = labels.reshape(-1, n).astype(dtype)
    total = jnp.sum(rows, axis=1)
    fine = jnp.all(rows >= 0, axis=1) & (jnp.abs(total - 1) <= _SUM_TOLERANCE)
    return rows / jnp.where(fine, total, 1)[:, None], fine


def l2_of_leaves(l2, params):
    """`l2`, a number or a tree of numbers for the first levels of `params`, as a number for each of its leaves."""
    try:
        full = jax.tree.broadcast(l2, params)
    except ValueError as error:
        raise ValueError(f"l2: expected a number, or a tree of numbers as params is one; got {l2!r}: {error}") from None

    def number(c: Scalar, leaf):
        if not checks.is_number(c) and jnp.shape(c) != ():
            raise ValueError(f"l2: expected a number for each leaf of params; got an array of shape {jnp.shape(c)}")
        return checks.real_array("l2", c).astype(leaf.dtype)

    return jax.tree.map(number, full, params)


def is_regulariser(l2: Any) -> Bool[Array, ""]:
    """Whether l2 of every leaf is a number >= 0, and some are above 0."""
    numbers = jnp.stack(jax.tree.leaves(l2))
    return jnp.all(jnp.isfinite(numbers) & (numbers >= 0)) & jnp.any(numbers > 0)


@dataclasses.dataclass(frozen=True)
class MMOptions:
    """The options of `qbound.mm.step` that a trace depends on; its docstring explains them."""

    curvature: Curvatures = "auto"
    order: Order = "max_first"
    search: bool = True
    solver: DirectionSolver = "auto"
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
    def family(self) -> LogPartition:
        """With the global bound to use."""
        return Softmax(self.order, is_bohning=self.curvature == "bohning")

    @property
    def is_local(self) -> bool:
        """Whether the local certificate may win."""
        return self.curvature in ("auto", "hessian")


class MMPoint(NamedTuple):
    """The objective at some parameters."""

    params: Any
    logits: Array
    objective: Array
    gradient: Any
    gradient_norm: Array


def point_at(problem: Problem, linear_map: BatchMap, params: Any, logits: Float[Array, "b n"]) -> MMPoint:
    """The point with given logits: half a pass over the data, and half of one has made the logits."""
    objective, gradient = problem.value_and_gradient(linear_map, params, logits)
    return MMPoint(params, logits, objective, gradient, trees.norm(gradient))


def first_state(problem: Problem, point: MMPoint) -> MMState:
    """Before any step."""
    finite = jnp.isfinite(point.objective) & trees.all_finite(point.gradient)
    unable = (problem.verdict == Result.UNFINISHED) & ~finite
    result = jnp.where(unable, _code(Result.NOT_FINITE), problem.verdict)
    zero = jnp.zeros((), jnp.int32)
    return MMState(*point, jnp.array(True), point.gradient_norm, point.gradient_norm, zero, zero, result)


def take_step(
    problem: Problem,
    linear_map: BatchMap,
    logits_of: Callable[[Any], Float[Array, "b n"]],
    state: MMState,
    options: MMOptions,
    eta: Any,
    tolerance: Any,
    cg_tolerance: Any,
) -> tuple[MMState, MMInfo]:
    """A step, unless the state says that there can be none; the linear map is the same for all parameters."""
    dtype = state.objective.dtype
    eta, tolerance = jnp.asarray(eta, dtype), jnp.asarray(tolerance, dtype)
    # 1. The direction s, from the bound or from the Hessian. Whatever s is, the rest is right.
    s, cg_steps, passes = mm_direction(problem, linear_map, state, options, tolerance, cg_tolerance)
    s = trees.cast_like(s, state.gradient)
    if isinstance(linear_map, KroneckerMap):
        s = _without_rounding_of_the_common_part(problem, s, state.params)
    s = descent_direction(s, state.gradient)
    # 2. Its length, from the displacement u of the logits.
    u, is_local = linear_map.forward(s).astype(dtype), options.is_local
    line = problem.line(state.logits, u, trees.dot(state.gradient, s), problem.penalty(s, s))
    step = step_length(line, is_local=is_local, search=options.search, eta=eta)
    # 3. The objective at the new parameters, which are rounded once, here.
    rounded = jax.lax.optimization_barrier(trees.add_scaled(state.params, -step.length, s))
    point = point_at(problem, linear_map, rounded, logits_of(rounded))
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


def model_of(
    logits_fn: Callable, params: Any, inputs: Any
) -> tuple[Float[Array, "b n"], BatchMap, Callable[[Any], Float[Array, "b n"]]]:
    """The logits at some parameters, their linear map, and the function to logits at any others.

    Products are in full precision, unless the model or JAX was told which one to take.

    By default TPUs round the factors of a product to bfloat16, and GPUs to TF32. Of logits that leaves three digits:
    a step near the optimum changes less than that, and a run would stall there.
    """
    precision = jax.config.jax_default_matmul_precision or "highest"  # pyright: ignore[reportAttributeAccessIssue]

    def logits_of(params):
        with jax.default_matmul_precision(precision):
            return logits_in_rows(logits_fn, params, inputs)

    with jax.default_matmul_precision(precision):
        return *linearise(logits_fn, params, inputs), logits_of


def mm_direction(problem, linear_map, state, options, tolerance, cg_tolerance):
    """An approximate solution of (C + l2) s = g, the steps of CG, and the passes over the data it took."""
    g = state.gradient
    bound = functools.partial(_terms, problem.family.bound, state.logits)
    hessian = functools.partial(_terms, problem.family.expansion, state.logits)
    if options.solver == "dense" or (options.solver == "auto" and trees.size(g) <= DENSE_LIMIT):

        def dense(terms):
            return lambda: ModelCurvature(terms(), problem.weights, linear_map)._dense()

        if options.curvature == "auto":
            matrix = jax.lax.cond(state.newton, dense(hessian), dense(bound))
        else:
            matrix = dense(hessian if options.curvature == "hessian" else bound)()
        return _solve(matrix, problem, g), jnp.zeros((), jnp.int32), jnp.ones_like(state.objective)

    if cg_tolerance is None:
        cg_tolerance = forcing_tolerance(state.gradient_norm, state.first_norm, tolerance, _LOOSEST)

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
    """The direction, whose part that is the same for all labels must be a multiple of that of the parameters.

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
    problem, linear_map, state: MMState, s, u, step: StepLength, point: MMPoint, moved
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
        line = problem.line(state.logits, displacement, slope, problem.penalty(moved, moved))
        actual = line.decrease(jnp.ones_like(slope))
        certified = step.certified - jnp.maximum(step.actual - actual, 0)
        return StepLength(step.length, certified, actual, step.local), jnp.full_like(slope, 0.5)

    def nearly():
        return step._replace(certified=step.certified - loss), jnp.zeros_like(step.length)

    return jax.lax.cond(loss > _NEGLIGIBLE * step.certified, taken, nearly)


def _solve(matrix, problem, g):
    """The solution s of (C + l2) s = g."""
    l2, _ = ravel_pytree(jax.tree.map(lambda c, leaf: jnp.broadcast_to(c, leaf.shape), problem.l2, g))
    g, unravel = ravel_pytree(g)
    return unravel(solve_scaled(matrix + jnp.diag(l2), g))


def _next_state(state: MMState, point: MMPoint, certified, newton) -> MMState:
    """The state after an accepted step."""
    progress = jnp.where(newton, _PROGRESS, 1)
    gained = has_gained(point.gradient_norm, state.least_norm, certified, point.objective, progress)
    least = point.gradient_norm < progress * state.least_norm
    since = jnp.where(gained, 0, state.steps_since + 1)
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


def _code(value: Result | Certificate) -> Array:
    return jnp.asarray(value, jnp.int32)
