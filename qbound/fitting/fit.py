"""`qbound.fit`: a softmax model on all its data, by the fastest phases that its structure allows."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qbound import checks, compiler
from qbound.fitting.objective import Data, LinearObjective
from qbound.fitting.phases import Schedule, minimise
from qbound.fitting.results import FitInfo, MMInfo, Phase, Result, raise_unless_converged
from qbound.fitting.run import check_arrays, checked_function, checked_params, run
from qbound.fitting.step import is_regulariser, l2_of_leaves
from qbound.models.base import full_weights
from qbound.models.inputs import DenseInputs, Design, SparseInputs, csr_without
from qbound.models.linear import is_linear_logits, layout_of_linear, linear_logits, logits_shape
from qbound.types import Scalar, working_dtype


def fit(
    logits_fn: Callable,
    params: Any,
    inputs: Any,
    labels: Any,
    *,
    l2: Any,
    example_weights: Any = None,
    tolerance: Scalar = 1e-5,
    max_steps: int = 100,
    certified: bool = False,
    schedule: Schedule | None = None,
    seed: int = 0,
    callback: Callable[[FitInfo], None] | None = None,
    throw: bool = True,
) -> tuple[Any, FitInfo]:
    r"""Fit a softmax model to a full batch, with nothing to tune.

    .. math:: L(\theta) = \frac{\sum_j w_j [\log Z_j(\theta) - t_j^\top h_j(\theta)]}{\sum_j w_j}
        + \tfrac12 \lambda |\theta|^2

    Arguments, tolerance, weights and results are those of `qbound.mm.run`. For `qbound.linear_logits` with integer
    labels the fit goes in phases: first progress on batches or on a sample, with the Kronecker-factored curvature of
    the bound; quasi-Newton steps of one pass each, with the same curvature as their metric; and certified Newton steps
    where those do not reach the tolerance. Any other model that is affine in its parameters, soft labels, and data on
    several devices take the certified steps of `qbound.mm.run`.

    It is a loop in Python around compiled programs. Inside `jax.jit` or `jax.vmap`, use `qbound.mm.run`.

    Args:
      logits_fn: `logits_fn(params, inputs)` -> logits (b, n) or (..., n), affine in the parameters.
      params: where to start, a tree of float arrays, taken to the widest dtype among them and float32 at least.
      inputs: the whole data set. For `qbound.linear_logits`, an array (b, d) or (..., d), or a SciPy sparse matrix
        (b, d), which stays sparse.
      labels: integers (b,), or (...,) for logits (..., n); or probabilities (b, n), rows that sum to 1.
      l2: lambda > 0, a number, or a tree of numbers >= 0 for the leaves of `params` or its first levels.
      example_weights: w, one for each example, or for each row of logits; 1 by default. 0 leaves an example out.
      tolerance: of the Euclidean norm of the gradient of L.
      max_steps: the most steps to take on all data; epochs, and steps on a sample, do not count.
      certified: whether every step is to have a certificate that the objective falls.
      schedule: when to take which phase; its defaults are good untuned.
      seed: of the batches, or of the sample.
      callback: called with a `FitInfo` for every entry of the history, while the fit goes on.
      throw: raise `ValueError` for bad values and `qbound.mm.NotConverged` for a fit that did not reach its tolerance.
        Otherwise `FitInfo.result` says so. Wrong shapes and types always raise.

    Returns:
      The parameters found, and a `FitInfo`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import qbound
      >>> x = jax.random.normal(jax.random.key(0), (500, 4))
      >>> y = jnp.argmax(x[:, :3] + jax.random.normal(jax.random.key(1), (500, 3)), axis=1)
      >>> weights, info = qbound.fit(qbound.linear_logits, jnp.zeros((4, 3)), x, y, l2=1e-3)
      >>> qbound.mm.Result(int(info.result)).name, bool(info.gradient_norm < 1e-5)
      ('CONVERGED', True)
    """
    max_steps = checks.integer("max_steps", max_steps)
    tolerance = float(checks.nonnegative("tolerance", tolerance))
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(f"schedule: expected a qbound.FitSchedule; got {schedule!r}")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**32:
        raise ValueError(f"seed: expected an integer from 0 to 2**32 - 1; got {seed!r}")
    if callback is not None:
        checks.function("callback", callback)
    is_sparse = hasattr(inputs, "tocsr")
    check_arrays(None if is_sparse else inputs, labels, l2, example_weights)
    # Under `jax.jit` a new array is traced, whatever was given.
    arrays = (jnp.zeros(()), params, None if is_sparse else inputs, labels, l2, example_weights)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
        raise ValueError("fit: expected arrays; got a traced one. Inside jax.jit and the like, use qbound.mm.run")
    logits_fn, params = checked_function(logits_fn), checked_params(params)
    compiler.warn_if_wrong()
    labels = checks.array("labels", labels)
    if not _is_linear(logits_fn, params, inputs, labels, is_sparse):
        return _compiled(logits_fn, params, inputs, labels, l2, example_weights, tolerance, max_steps, callback, throw)
    began = time.perf_counter()
    matrix, objective, verdict = _linear_problem(params, inputs, labels, l2, example_weights)
    if verdict != Result.UNFINISHED:
        info = _summary([FitInfo(np.nan, np.nan)], verdict, 0.0)
    else:

        def report(entry: FitInfo):
            # The start is no entry of the history.
            if callback is not None and entry.phase != Phase.START:
                callback(jax.tree.map(np.asarray, entry))

        found = minimise(
            objective,
            matrix,
            tolerance=tolerance,
            max_steps=max_steps,
            certified=certified,
            schedule=schedule,
            rng=np.random.RandomState(seed),
            callback=report,
        )
        params = layout_of_linear(params).to_tree(found.params)
        info = _summary(found.history, found.result, time.perf_counter() - began)
    if throw:
        raise_unless_converged(params, info, "fit")
    return params, info


def _is_linear(logits_fn, params, inputs, labels, is_sparse: bool) -> bool:
    """Whether the fit can go in phases."""
    if is_sparse:
        rows = jax.ShapeDtypeStruct(inputs.shape, working_dtype(*jax.tree.leaves(params)))
        if not is_linear_logits(logits_fn, params, rows):
            raise TypeError("inputs: expected arrays, unless logits_fn is qbound.linear_logits; got a sparse matrix")
        if not jnp.issubdtype(labels.dtype, jnp.integer):
            raise TypeError(f"labels: expected integers with sparse inputs; got dtype {labels.dtype}")
        return True
    on_devices = len(inputs.sharding.device_set) if isinstance(inputs, jax.Array) else 1
    is_integer = jnp.issubdtype(labels.dtype, jnp.integer)
    return is_integer and on_devices == 1 and is_linear_logits(logits_fn, params, inputs)


def _linear_problem(params, inputs, labels, l2, weights) -> tuple[jax.Array, LinearObjective, Result]:
    """The parameters as a matrix (n, e), the objective, and what is wrong with the data, UNFINISHED if nothing is.

    In NumPy, as far as the size of the data goes: nothing is compiled for it.
    """
    *shape, n = _logits_shape(params, inputs)
    shape = tuple(shape)
    if labels.shape != shape:
        raise ValueError(f"labels: expected integers of shape {shape}, one for each example; got shape {labels.shape}")
    matrix = layout_of_linear(params).to_matrix(params)
    dtype = np.dtype(matrix.dtype)
    labels = np.asarray(labels).reshape(-1)
    w = np.asarray(full_weights("example_weights", weights, shape, dtype)).reshape(-1).astype(np.float64)
    l2 = l2_of_leaves(l2, params)
    verdict = Result.UNFINISHED
    if not np.all((w == 0) | ((labels >= 0) & (labels < n))):
        verdict = Result.BAD_LABELS
    if not (np.all(w >= 0) and 0 < np.max(w) < np.inf):
        verdict, w = Result.BAD_WEIGHTS, np.ones_like(w)
    if not is_regulariser(l2):
        verdict = Result.BAD_L2
    # In two steps, so that the sum cannot overflow.
    w = w / np.max(w)
    w = (w / np.sum(w)).astype(dtype)
    # Logits and squares of examples that do not count could overflow, and 0 times infinity is not a number.
    design = _design(inputs, dtype, w > 0)
    d = design.shape()[1]
    # The penalty of the weights comes before that of the bias, as in the matrix.
    numbers = sorted(zip(jax.tree.leaves(params), jax.tree.leaves(l2), strict=True), key=lambda of: -of[0].ndim)
    penalty = np.concatenate([np.full(d if leaf.ndim == 2 else 1, c, dtype) for leaf, c in numbers])
    labels, w, penalty = jax.device_put((labels.astype(np.int32), w, penalty))
    return matrix, LinearObjective(Data(design, labels, w), penalty, "euclidean"), verdict


def _logits_shape(params, inputs) -> tuple[int, ...]:
    """The shape (..., n) of the logits, after the checks of `linear_logits`."""
    if hasattr(inputs, "tocsr"):
        if inputs.dtype.kind not in "biuf":
            raise TypeError(f"inputs: expected real numbers; got dtype {inputs.dtype}")
        inputs = jax.ShapeDtypeStruct(inputs.shape, jnp.float32)
    return logits_shape(linear_logits, params, inputs)


def _design(inputs, dtype, counts: np.ndarray) -> Design:
    """Inputs as a design, where examples that do not count are 0."""
    if hasattr(inputs, "tocsr"):
        return SparseInputs.from_csr(csr_without(inputs.tocsr(), ~counts), dtype)
    x = jnp.asarray(inputs)
    x = x.reshape(-1, x.shape[-1]).astype(dtype)
    return DenseInputs(x if np.all(counts) else jnp.where(jnp.asarray(counts)[:, None], x, 0))


def _summary(entries: list[FitInfo], result: Result, seconds: float) -> FitInfo:
    """The report of a fit from its entries, of which the first is the start."""
    start, *steps = (jax.tree.map(np.asarray, entry) for entry in entries)
    history = jax.tree.map(lambda first, *rest: np.array(rest, first.dtype), start, *steps)
    sums = {
        name: getattr(start, name) + getattr(history, name).sum()
        for name in ("certified_decrease", "actual_decrease", "cg_steps", "passes")
    }
    last = [start, *steps][-1]
    return last._replace(**sums, seconds=np.asarray(seconds), result=np.asarray(result), history=history)


@dataclasses.dataclass(frozen=True)
class _Report:
    """Tells a callback about a step, as the report of a fit.

    It compares as the callback does: a run is compiled anew for every other one.
    """

    callback: Callable[[FitInfo], None]

    def __call__(self, info: MMInfo):
        self.callback(_as_fit(info))


def _as_fit(info: MMInfo) -> FitInfo:
    """A step of a compiled run, or the whole of it, as a report of a fit."""
    seconds = np.full_like(info.objective, np.nan, dtype=float)
    phase = np.where(np.asarray(info.steps) > 0, Phase.NEWTON, Phase.START)
    return FitInfo(**info._asdict(), phase=phase, seconds=seconds)


def _compiled(
    logits_fn, params, inputs, labels, l2, weights, tolerance, max_steps, callback, throw
) -> tuple[Any, FitInfo]:
    """The certified steps of `qbound.mm.run`, reported as a fit."""
    began = time.perf_counter()
    report = None if callback is None else _Report(callback)
    options = {"tolerance": tolerance, "max_steps": max_steps, "callback": report, "throw": False}
    params, found = run(logits_fn, params, inputs, labels, l2=l2, example_weights=weights, **options)
    info = _as_fit(found)._replace(history=_as_fit(found.history), seconds=np.asarray(time.perf_counter() - began))
    if throw:
        raise_unless_converged(params, info, "fit")
    return params, info
