"""The interface: `init`, `step` and `run`."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qbound import checks, compiler
from qbound.fitting.results import Certificate, MMInfo, MMState, Result, raise_unless_converged
from qbound.fitting.step import (
    Curvatures,
    DirectionSolver,
    MMOptions,
    first_state,
    make_problem,
    model_of,
    point_at,
    take_step,
)
from qbound.types import Order, Scalar, working_dtype

Eta = Scalar | Literal["search"]


def init(
    logits_fn: Callable,
    params: Any,
    inputs: Any,
    labels: Any,
    *,
    l2: Any,
    example_weights: Any = None,
) -> MMState:
    """The state before the first step; the arguments are those of `run`.

    Example:
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> state = qbound.mm.init(qbound.linear_logits, jnp.zeros((2, 3)), jnp.eye(2), jnp.array([0, 2]), l2=0.1)
      >>> print(f"{state.objective:.3f}")
      1.099
    """
    params = checked_params(params)
    problem = make_problem(checked_function(logits_fn), params, inputs, labels, example_weights, l2)
    logits, linear_map, _ = model_of(logits_fn, params, inputs)
    return first_state(problem, point_at(problem, linear_map, params, logits))


def step(
    logits_fn: Callable,
    state: MMState,
    inputs: Any,
    labels: Any,
    *,
    l2: Any,
    example_weights: Any = None,
    tolerance: Scalar = 0.0,
    eta: Eta = "search",
    curvature: Curvatures = "auto",
    order: Order = "max_first",
    solver: DirectionSolver = "auto",
    max_cg_steps: int = 200,
    cg_tolerance: Scalar | None = None,
    precondition: Callable[[Any], Any] | None = None,
) -> tuple[MMState, MMInfo]:
    """One step, under `jax.jit`; the arguments are those of `run`.

    A step that would not decrease the objective is not taken: the parameters stay, `result` in the new state says why,
    and every further step leaves the state as it is.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import qbound
      >>> x, y = jnp.eye(2), jnp.array([0, 2])
      >>> state = qbound.mm.init(qbound.linear_logits, jnp.zeros((2, 3)), x, y, l2=0.1)
      >>> @jax.jit
      ... def step(state, x, y):
      ...     return qbound.mm.step(qbound.linear_logits, state, x, y, l2=0.1)
      >>> state, info = step(state, x, y)
      >>> print(f"{state.objective:.3f}, {bool(info.actual_decrease >= info.certified_decrease)}")
      0.502, True
    """
    options, eta = _options(eta, curvature, order, solver, max_cg_steps, precondition)
    targets = _tolerances(tolerance, cg_tolerance)
    problem = make_problem(
        checked_function(logits_fn), state.params, inputs, labels, example_weights, l2, options.family
    )
    state = state._replace(result=_checked_numbers(state, eta, *targets))
    _, linear_map, logits_of = model_of(logits_fn, state.params, inputs)
    return take_step(problem, linear_map, logits_of, state, options, eta, *targets)


def run(
    logits_fn: Callable,
    params: Any,
    inputs: Any,
    labels: Any,
    *,
    l2: Any,
    example_weights: Any = None,
    tolerance: Scalar = 1e-5,
    max_steps: int = 100,
    eta: Eta = "search",
    curvature: Curvatures = "auto",
    order: Order = "max_first",
    solver: DirectionSolver = "auto",
    max_cg_steps: int = 200,
    cg_tolerance: Scalar | None = None,
    precondition: Callable[[Any], Any] | None = None,
    callback: Callable[[MMInfo], None] | None = None,
    throw: bool = True,
) -> tuple[Any, MMInfo]:
    r"""Minimise the regularised mean loss of a softmax model on a full batch, with a certificate for every step.

    .. math:: L(\theta) = \frac{\sum_j w_j [\log Z_j(\theta) - t_j^\top h_j(\theta)]}{\sum_j w_j}
        + \tfrac12 \lambda |\theta|^2

    Equation 4 of [WC20] and what it can become. A direction s solves (C + l2 I) s = g about, by truncated CG. Along it
    two upper bounds of the objective are known without another pass over the data: the global one of
    `qbound.log_partition_bound`, and the local one of `qbound.local_bound`, which is Newton's model with a factor that
    tends to 1. The one that certifies the larger decrease gives the step; and C of the next step is the bound's
    curvature if the global one won, the exact Hessian if the local one did. So steps are safe anywhere, and Newton's
    near the optimum: convergence is superlinear. The objective never rises. The first direction is Newton's.

    The whole run is one compiled program; a second run with the same `logits_fn`, shapes and options compiles nothing.

    Args:
      logits_fn: `logits_fn(params, inputs)` -> logits (b, n) or (..., n), **affine in the parameters**, such as
        `qbound.linear_logits`; labels are removed by logits of -inf. Every step checks the logits against their
        linearisation: a model that is not affine ends the run with NOT_AFFINE.
      params: where to start, a tree of float arrays, taken to the widest dtype among them and float32 at least.
      inputs: the whole data set, any tree of arrays.
      labels: integers (b,), or (...,) for logits (..., n); or probabilities (b, n), rows that sum to 1.
      l2: lambda > 0, a number, or a tree of numbers >= 0 for the leaves of `params` or its first levels, to leave a
        bias out: `{"weights": 1e-3, "bias": 0.0}`.
      example_weights: w, one for each example, or for each row of logits; 1 by default. 0 leaves an example out, and
        its logits may be anything; its inputs must be finite all the same.
      tolerance: of the Euclidean norm of the gradient of L.
      max_steps: the most steps to take.
      eta: "search" for the exact minimum along s, by a line search on logits that costs no pass over the data; or a
        number in (0, 2), 1 for the minimum of the bound, more for over-relaxation: the step by the global bound is then
        this many times that to its minimum and certifies eta (1 - eta/2) g's.
      curvature: "auto", as above; "hessian" for Newton directions always, with the same certificates; "bound" or
        "bohning" for a global bound alone, the method of the paper or Böhning's: linear convergence.
      order: of the labels in the bound, as in `qbound.log_partition_bound`.
      solver: "cg"; "dense" for a Cholesky factorisation; "auto" takes that up to 100 parameters.
      max_cg_steps: the most iterations of CG for one direction.
      cg_tolerance: of its relative residual. By default sqrt(|g|/|g_0|), at most 1/2, g_0 the gradient at the start,
        and no less than the last step needs: early directions are rough, late ones precise.
      precondition: of CG, r -> z about (C + l2 I)^-1 r; linear, symmetric and positive definite.
      callback: called with the `MMInfo` of every step, as NumPy numbers, while the run goes on; not under `jax.vmap`.
      throw: raise `ValueError` for bad values and `NotConverged` for a run that did not reach its tolerance. Otherwise
        `MMInfo.result` says so; needed inside `jax.jit`. Wrong shapes and types always raise.

    Returns:
      The best parameters seen, finite whatever happened if the first ones were, and an `MMInfo`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import qbound
      >>> x = jax.random.normal(jax.random.key(0), (500, 4))
      >>> y = jnp.argmax(x[:, :3] + jax.random.normal(jax.random.key(1), (500, 3)), axis=1)
      >>> weights, info = qbound.mm.run(qbound.linear_logits, jnp.zeros((4, 3)), x, y, l2=1e-3)
      >>> qbound.mm.Result(int(info.result)).name, bool(info.gradient_norm < 1e-5)
      ('CONVERGED', True)
    """
    options, eta = _options(eta, curvature, order, solver, max_cg_steps, precondition)
    max_steps = checks.integer("max_steps", max_steps)
    check_arrays(inputs, labels, l2, example_weights)
    if callback is not None:
        checks.function("callback", callback)
    params = checked_params(params)
    arguments = (params, inputs, labels, l2, example_weights, eta, *_tolerances(tolerance, cg_tolerance))
    params, info = _run(checked_function(logits_fn), options, max_steps, callback, *arguments)
    if isinstance(info.result, Tracer):
        if throw:
            raise ValueError("throw: expected False inside jax.jit, jax.vmap and the like, where nothing can be raised")
        return params, info
    # In NumPy: a slice by JAX would be compiled for every number of steps.
    info = jax.device_get(info)
    info = info._replace(history=jax.tree.map(lambda x: x[: info.steps], info.history))
    if throw:
        raise_unless_converged(params, info, "mm.run")
    return params, info


@functools.partial(compiler.jit, static_argnums=(0, 1, 2, 3))
def _run(logits_fn, options, max_steps, callback, params, inputs, labels, l2, weights, eta, tolerance, cg_tolerance):
    problem = make_problem(logits_fn, params, inputs, labels, weights, l2, options.family)
    logits, linear_map, logits_of = model_of(logits_fn, params, inputs)
    state = first_state(problem, point_at(problem, linear_map, params, logits))
    state = state._replace(result=_checked_numbers(state, eta, tolerance, cg_tolerance))
    tolerance = jnp.asarray(tolerance, state.objective.dtype)

    def unfinished(carry):
        state, _ = carry
        return (state.result == Result.UNFINISHED) & (state.gradient_norm > tolerance) & (state.steps < max_steps)

    def one(carry):
        state, history = carry
        row = state.steps
        state, info = take_step(problem, linear_map, logits_of, state, options, eta, tolerance, cg_tolerance)
        if callback is not None:
            jax.debug.callback(lambda info: callback(jax.tree.map(np.asarray, info)), info, ordered=True)
        return state, jax.tree.map(lambda rows, x: rows.at[row].set(x), history, info)

    history = _empty_history(state.objective.dtype, max_steps)
    state, history = jax.lax.while_loop(unfinished, one, (state, history))
    return state.params, _summary(state, history, tolerance)


def _empty_history(dtype, max_steps) -> MMInfo:
    """A row of zeros for every step there can be."""
    number, count = jnp.zeros(max_steps, dtype), jnp.zeros(max_steps, jnp.int32)
    return MMInfo(number, number, count, number, number, number, count, number, count, count)


def _summary(state: MMState, history: MMInfo, tolerance) -> MMInfo:
    """Of a run."""
    converged = state.gradient_norm <= tolerance
    undecided = (state.result == Result.UNFINISHED) | (state.result == Result.STALLED)
    ended = jax.lax.select(state.result == Result.UNFINISHED, jnp.int32(Result.STEP_LIMIT), state.result)
    last = jnp.maximum(state.steps - 1, 0)
    return MMInfo(
        objective=state.objective,
        gradient_norm=state.gradient_norm,
        certificate=jax.lax.select(state.steps > 0, history.certificate[last], jnp.int32(Certificate.NONE)),
        certified_decrease=jnp.sum(history.certified_decrease),
        actual_decrease=jnp.sum(history.actual_decrease),
        step_length=jnp.where(state.steps > 0, history.step_length[last], 0),
        cg_steps=jnp.sum(history.cg_steps),
        passes=1 + jnp.sum(history.passes),
        steps=state.steps,
        result=jax.lax.select(undecided & converged, jnp.int32(Result.CONVERGED), ended),
        history=history,
    )


def _options(eta, curvature, order, solver, max_cg_steps, precondition) -> tuple[MMOptions, Scalar]:
    """What a trace depends on, and eta as a number."""
    search = isinstance(eta, str)
    options = MMOptions(curvature, order, search, solver, max_cg_steps, precondition)
    if search:
        checks.choice("eta", eta, ("search",))
        return options, 1.0
    eta = checks.positive("eta", _known(eta))
    if checks.is_number(eta) and not eta < 2:
        raise ValueError(f'eta: expected "search" or a number in (0, 2); got {eta!r}')
    return options, eta if checks.is_number(eta) else eta + jnp.where(eta < 2, 0, jnp.nan)


def _known(number):
    """An array without axes as a Python number, unless it is traced."""
    is_known = hasattr(number, "shape") and number.shape == () and not isinstance(number, Tracer)
    return number.item() if is_known else number


def _checked_numbers(state: MMState, eta, tolerance, cg_tolerance):
    """The result of the first state, if all numbers are what they should be; those that are not have become NaN."""
    wrong = jnp.array(False)
    for number in (eta, tolerance) if cg_tolerance is None else (eta, tolerance, cg_tolerance):
        wrong = wrong | jnp.isnan(number)
    return jax.lax.select(wrong, jnp.int32(Result.BAD_OPTION), state.result)


def check_arrays(inputs, labels, l2, weights):
    """By name, before `jax.jit` sees them."""
    for name, tree in {"inputs": inputs, "labels": labels, "l2": l2, "example_weights": weights}.items():
        jax.tree.map(lambda leaf, name=name: leaf if isinstance(leaf, jax.Array) else checks.array(name, leaf), tree)
    if labels is None:
        raise TypeError("labels: expected integers, or rows of probabilities as floats; got None")


def _tolerances(tolerance, cg_tolerance):
    """Of the gradient norm, and of CG unless that is None."""
    tolerance = checks.nonnegative("tolerance", _known(tolerance))
    return tolerance, None if cg_tolerance is None else checks.nonnegative("cg_tolerance", _known(cg_tolerance))


def checked_function(logits_fn):
    """The model, which must be a function that `jax.jit` can take for static."""
    checks.function("logits_fn", logits_fn)
    try:
        hash(logits_fn)
    except TypeError:
        raise TypeError(f"logits_fn: expected a function that can be hashed, for jax.jit; got {logits_fn!r}") from None
    return logits_fn


def checked_params(params):
    """All leaves in the widest dtype among them, float32 at least."""
    params = checks.float_tree("params", params)
    if not jax.tree.leaves(params):
        raise ValueError(f"params: expected at least one array; got {params!r}")
    dtype = working_dtype(*jax.tree.leaves(params))
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
