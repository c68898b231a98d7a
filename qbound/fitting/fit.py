"""Fit a linear softmax model: fast first progress on batches, steps of one pass, and certified steps to a tolerance."""

import math
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qbound import compiler
from qbound.fitting.factors import Core, InputFactor, input_factor, make_core, no_core
from qbound.fitting.newton import Solver, advance, descend
from qbound.fitting.objective import Data, Point
from qbound.fitting.quasi_newton import Memory, look, no_memory, walk
from qbound.fitting.results import Result
from qbound.fitting.stochastic import LABEL_LIMIT, epoch, first_iterate
from qbound.models.inputs import Dense

__all__ = ["Fit", "Phase", "Progress", "fit"]


Phase = Literal["start", "stochastic", "quasi_newton", "mm"]


# A matrix of all free parameters is factorised up to so many of them, and so many labels.
_DENSE_LIMIT, _DENSE_LABELS = 64, 64


# The second moments of inputs are factorised up to so many of them, if that costs little beside passes over the data,
# and are taken from so many rows, or so many times their number.
_KRONECKER_LIMIT, _KRONECKER_SHARE, _MOMENT_ROWS, _MOMENT_SHARE = 2000, 10, 4000, 5


# There is a stochastic phase if it has so many batches, of so many examples, and a product of all inputs and parameters
# so many multiplications: a small pass takes less time than its batches one by one.
_MIN_BATCHES, _BATCH, _LARGE_PASS = 20, 1000, 10**8


_EPOCHS, _FIRST_RATE = 2, 2.0


# Its factor of inputs has so many eigenvectors, from so many rows: that of later steps takes longer than an epoch.
_QUICK_RANK, _QUICK_ROWS = 128, 2000


# With few coefficients it is Newton's method on a sample instead, of so large a part of the rows but not more than so
# many, at least so many and so many for each coefficient, if that is a quarter of the rows at most; until the gradient
# is below so large a part of 1/sqrt(rows), or for so many steps.
_SAMPLE_PART, _SAMPLE_MOST, _SAMPLE_LEAST, _SAMPLE_EACH = 8, 65_536, 4096, 256


_SAMPLE_NOISE, _SAMPLE_STEPS = 0.1, 8


# Steps of one pass are so many at most, looked at after every so many. The core of their preconditioner is made after
# the stochastic phase, or after so many steps: at the start there is little that it could mend. It is made anew when
# there were twice as many, and so many more.
_WALK, _LOOK, _BEFORE_CORE, _CORE_AGE = 80, 12, 12, 20


# It is made anew after a certified step that took more iterations of CG than so many.
_STALE = 15


# A fit has stalled after so many steps in which the gradient did not fall below so large a part of its least value, nor
# the objective by so many units of its rounding, as certified and as measured.
_PATIENCE, _PROGRESS, _NOISE = 3, 0.9, 4


class Progress(NamedTuple):
    """Where a fit stands.

    Attributes:
      phase: which one has brought it here.
      objective: the mean loss and the regulariser.
      gradient: its largest absolute entry.
      seconds: since the start of the fit.
      certified_decrease: of the objective by this step, at least; 0 where nothing is certified.
      cg_steps: iterations of CG in this step.
    """

    phase: Phase
    objective: float
    gradient: float
    seconds: float
    certified_decrease: float = 0.0
    cg_steps: int = 0


class Fit(NamedTuple):
    """What was found: parameters (n, e), the way there, how many steps and epochs it took, and how it ended."""

    params: Array
    history: list[Progress]
    steps: int
    result: Result


def fit(
    data: Data,
    l2: Float[Array, " e"],
    params: Float[Array, "n e"],
    *,
    tolerance: float,
    max_steps: int,
    certified: bool = False,
    rng: np.random.RandomState | None = None,
    callback: Callable[[Progress], None] | None = None,
) -> Fit:
    """Minimise the regularised mean loss until the largest absolute entry of its gradient is within a tolerance.

    Args:
      data: the examples; weights sum to 1.
      l2: lambda, for each input.
      params: where to start, (n, d), or (n, d + 1) with an intercept, in the dtype of the inputs.
      tolerance: of the gradient.
      max_steps: the most steps to take, epochs and steps on samples apart.
      certified: whether every step is to have a certificate. Else there is a stochastic phase where data are large
        enough to gain from it, and certified steps are taken where those of one pass do not lead to the tolerance.
      rng: draws the batches, or the sample.
      callback: called with every entry of the history.
    """
    _check(data, l2, params, tolerance, max_steps)
    rng = np.random.RandomState(0) if rng is None else rng
    # As the programs see it.
    tolerance = float(np.dtype(params.dtype).type(tolerance))
    journal = _Journal(callback)
    method = _Method(data, l2, _solver(data, params))
    is_kronecker = method.solver == "kronecker"
    phase = None if certified else _first_phase(method, params)
    # Else there are factors to be made first, or a phase to come, and no step is proposed.
    steps_follow = phase is None and not is_kronecker and max_steps > 0
    first = method.look(params) if is_kronecker else method.reach(params, tolerance if steps_follow else math.inf)
    journal.enter("start", first)
    if not first.is_finite:
        return Fit(params, journal.history, 0, Result.NOT_FINITE)
    if first.size <= tolerance or max_steps == 0:
        result = Result.CONVERGED if first.size <= tolerance else Result.STEP_LIMIT
        return Fit(first.params, journal.history, 0, result)
    method = method._replace(first_size=first.size)
    at, epochs, steps, quick = first, 0, 0, None
    if phase is not None:
        start, epochs, quick = phase(method, first.params, tolerance, rng)
        at = method.look(start) if is_kronecker else method.reach(start, tolerance)
        if not (at.is_finite and at.objective < first.objective):
            # A phase that has not decreased the objective is forgotten.
            at = first if is_kronecker else method.reach(first.params, tolerance)
        journal.enter("stochastic", at)
    if is_kronecker and at.size > tolerance:
        method = method.with_factor(at, quick)
    if is_kronecker and not certified:
        core_first = phase is not None and method.factor is not quick
        method, at, steps = _steps_of_one_pass(method, at, tolerance, max_steps, journal, core_first=core_first)
    if is_kronecker and at.size > tolerance and steps < max_steps:
        method = method if certified else method.with_core(at.params)
        at = method.reach(at.params, tolerance)
    at, more, result = _certified_steps(method, at, tolerance, max_steps - steps, journal)
    return Fit(at.params, journal.history, epochs + steps + more, result)


def _check(data, l2, params, tolerance, max_steps):
    """What shapes and types can tell, without waiting for the device."""
    if not isinstance(data, Data):
        raise TypeError(f"data: expected qbound.fitting.objective.Data; got {type(data).__name__}")
    b, d = data.design.shape()
    for name, value in (("labels", data.labels), ("weights", data.weights)):
        if value.shape != (b,):
            raise ValueError(f"data: expected {name} of shape ({b},), one for each example; got {value.shape}")
    if not jnp.issubdtype(data.labels.dtype, jnp.integer):
        raise TypeError(f"data: expected labels that are integers; got {data.labels.dtype}")
    if params.ndim != 2 or len(params) < 2 or params.shape[1] not in (d, d + 1):
        raise ValueError(
            f"params: expected shape (n, {d}), or (n, {d + 1}) with an intercept, for n >= 2 labels; got {params.shape}"
        )
    if data.weights.dtype != params.dtype or l2.dtype != params.dtype:
        types = f"weights of {data.weights.dtype} and l2 of {l2.dtype}"
        raise TypeError(f"params: expected the dtype of weights and l2; got {params.dtype}, with {types}")
    if l2.shape != params.shape[1:]:
        raise ValueError(f"l2: expected one number for each input, shape {params.shape[1:]}; got {l2.shape}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance: expected a number >= 0; got {tolerance!r}")
    if isinstance(max_steps, bool) or not isinstance(max_steps, (int, np.integer)) or max_steps < 0:
        raise ValueError(f"max_steps: expected an integer >= 0; got {max_steps!r}")


def _steps_of_one_pass(
    method: "_Method", at: "_Reached", tolerance: float, max_steps: int, journal: "_Journal", *, core_first: bool
) -> tuple["_Method", "_Reached", int]:
    """Until the tolerance is reached, steps gain nothing, or there were many: the method, where, and how many."""
    limit, steps, memory = min(max_steps, _WALK), 0, no_memory(at.params)
    core_at = 0 if core_first else _BEFORE_CORE
    while at.size > tolerance and steps < limit:
        if steps >= core_at:
            method, core_at = method.with_core(at.params), max(2 * steps, steps + _CORE_AGE)
        count = min(_LOOK, limit - steps, core_at - steps)
        at, memory, taken, goes_on = method.walk(at, memory, tolerance, count)
        steps += taken
        if taken:
            journal.enter("quasi_newton", at)
        if not goes_on:
            break
    return method, at, steps


def _certified_steps(
    method: "_Method", at: "_Reached", tolerance: float, max_steps: int, journal: "_Journal"
) -> tuple["_Reached", int, Result]:
    """Newton's method: where it has led, how many steps it took, and how it ended."""
    eps = float(jnp.finfo(at.params.dtype).eps)
    least, idle = at.size, 0
    for steps in range(max_steps):
        if at.size <= tolerance:
            return at, steps, Result.CONVERGED
        # After the last step no other is wanted.
        is_last = steps + 1 == max_steps
        if at.cg_steps > _STALE and not is_last:
            method = method.with_core(at.next_params)
        new = method.reach(at.next_params, math.inf if is_last else tolerance)
        falls = new.is_finite and new.objective <= at.objective + math.sqrt(eps) * abs(at.objective)
        if not (falls and at.certified > 0 and at.actual > 0):
            return at, steps, Result.STALLED
        journal.enter("mm", new, at.certified, at.cg_steps)
        fall = min(at.certified, at.objective - new.objective)
        gains = new.size < _PROGRESS * least or fall > _NOISE * eps * abs(new.objective)
        idle = 0 if gains else idle + 1
        at, least = new, min(least, new.size)
        if idle >= _PATIENCE and at.size > tolerance:
            return at, steps + 1, Result.STALLED
    return at, max_steps, Result.CONVERGED if at.size <= tolerance else Result.STEP_LIMIT


class _Journal:
    """The history of a fit, told to whoever wants to hear it."""

    def __init__(self, callback: Callable[[Progress], None] | None):
        self.callback, self.began = callback, time.perf_counter()
        self.history: list[Progress] = []

    def enter(self, phase: Phase, at: "_Reached", certified: float = 0.0, cg_steps: int = 0):
        seconds = time.perf_counter() - self.began
        self.history.append(Progress(phase, at.objective, at.size, seconds, certified, cg_steps))
        if self.callback is not None:
            self.callback(self.history[-1])


class _Reached(NamedTuple):
    """A point, the objective and the largest entry of its gradient there, and the next step if one is known."""

    point: Point
    objective: float
    size: float
    next_params: Array | None = None
    certified: float = 0.0
    actual: float = 0.0
    cg_steps: int = 0

    @property
    def params(self) -> Array:
        return self.point.params

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.objective) and math.isfinite(self.size)


class _Method(NamedTuple):
    """All that steps of Newton's method need, but for where they start."""

    data: Data
    l2: Array
    solver: Solver
    first_size: float = 0.0
    factor: InputFactor | None = None
    core: Core | None = None

    def with_factor(self, at: _Reached, quick: InputFactor | None) -> "_Method":
        """With the factor of inputs, a quick one where that will do, and a core that is not known yet."""
        rows = _rows(self.data, self.l2.size)
        if quick is not None and _is_enough(quick, at, self.l2):
            factor = quick
        else:
            factor = _input_factor(self.data, rows, self.l2.size)
        return self._replace(factor=factor, core=no_core(self.data.labels.size, rows.size, len(at.params), factor))

    def with_core(self, params) -> "_Method":
        """With a preconditioner for these parameters."""
        if self.core is None:
            return self
        rows = _rows(self.data, self.l2.size)
        return self._replace(core=_make_core(self.data, rows, self.factor, self.l2, params))

    def reach(self, params, tolerance: float) -> _Reached:
        """Be there, and propose a step if the gradient is not within the tolerance."""
        dtype = np.dtype(params.dtype).type
        numbers = dtype(tolerance), dtype(self.first_size)
        point, step = advance(self.data, self.l2, params, self.factor, self.core, *numbers, solver=self.solver)
        known = point.objective, point.size, step.certified, step.actual, step.cg_steps
        objective, size, certified, actual, cg_steps = (number.item() for number in jax.device_get(known))
        return _Reached(point, objective, size, step.params, certified, actual, cg_steps)

    def look(self, params) -> _Reached:
        """Be there."""
        return _reached(look(self.data, self.l2, params))

    def walk(self, at: _Reached, memory, tolerance: float, max_steps: int) -> tuple[_Reached, Memory, int, bool]:
        """Steps of one pass: where they lead, their memory, how many there were, and whether there are more."""
        numbers = np.dtype(at.params.dtype).type(tolerance), np.int32(max_steps)
        led = walk(self.data, self.l2, at.point, memory, self.factor, self.core, *numbers)
        return _reached(led.point), led.memory, int(led.steps), bool(led.goes_on)


def _reached(point: Point) -> _Reached:
    objective, size = (number.item() for number in jax.device_get((point.objective, point.size)))
    return _Reached(point, objective, size)


def _is_enough(factor: InputFactor, at: _Reached, l2) -> bool:
    """Whether all other eigenvectors belong to curvature that is lost beside the penalty."""
    if factor.rest is None:
        return False
    labels = at.point.label_curvature
    curvature, rest, l2 = jax.device_get((jnp.diag(labels) if labels.ndim == 2 else labels, factor.rest, l2))
    return bool(np.mean(curvature) * rest <= np.max(l2))


_input_factor = compiler.jit(input_factor, static_argnums=(2, 3))


_make_core = compiler.jit(make_core)


def _solver(data: Data, params) -> Solver:
    n, e = params.shape
    if not isinstance(data.design, Dense):
        return "diagonal"
    if (n - 1) * e <= _DENSE_LIMIT and n <= _DENSE_LABELS:
        return "dense"
    cheap = e**2 <= _KRONECKER_SHARE * data.labels.size * n
    return "kronecker" if e <= _KRONECKER_LIMIT and cheap else "diagonal"


def _rows(data: Data, inputs: int) -> np.ndarray:
    """From which the factor of inputs and the core are made."""
    return _some_rows(data, max(_MOMENT_ROWS, _MOMENT_SHARE * inputs))


def _some_rows(data: Data, count: int) -> np.ndarray:
    """At equal distances: with no random numbers, and fair to data in the order of their labels."""
    b = data.labels.size
    return np.linspace(0, b - 1, min(b, count)).astype(np.int32)


def _first_phase(method: _Method, params) -> Callable | None:
    """The stochastic phase; None where data are too few to gain from one."""
    rows = method.data.labels.size
    if method.solver == "dense" and 4 * _sample_size(rows, params) <= rows:
        return _on_a_sample
    # With many labels a batch has none of most of them, and steps that are safe for it are short.
    is_large = rows >= _MIN_BATCHES * _BATCH and rows * params.size >= _LARGE_PASS
    if method.solver == "kronecker" and is_large and len(params) <= LABEL_LIMIT:
        return _on_batches
    return None


def _on_batches(method: _Method, params, tolerance: float, rng) -> tuple[Array, int, InputFactor]:
    """The stochastic phase of many coefficients: where it leads, its epochs, and its factor of inputs."""
    b = method.data.labels.size
    count = -(-b // _BATCH)
    rates = _FIRST_RATE / 2 * (1 + np.cos(np.pi * np.arange(_EPOCHS * count) / (_EPOCHS * count)))
    iterate = first_iterate(params)
    factor = _input_factor(method.data, _some_rows(method.data, _QUICK_ROWS), method.l2.size, _QUICK_RANK)
    for of_epoch in rates.astype(np.float32).reshape(_EPOCHS, count):
        places = np.full(count * -(-b // count), -1, np.int32)
        places[:b] = rng.permutation(b)
        # Rows without an example are spread over the batches.
        batches = np.ascontiguousarray(places.reshape(-1, count).T)
        iterate = epoch(method.data, method.l2, factor, iterate, batches, of_epoch)
    return iterate.params.astype(params.dtype), _EPOCHS, factor


def _on_a_sample(method: _Method, params, tolerance: float, rng) -> tuple[Array, int, None]:
    """The stochastic phase of few coefficients: where it leads, and its steps."""
    b = method.data.labels.size
    rows = rng.randint(0, b, _sample_size(b, params)).astype(np.int32)
    enough = np.dtype(params.dtype).type(max(tolerance, _SAMPLE_NOISE / math.sqrt(rows.size)))
    params, steps = descend(method.data, rows, method.l2, params, enough, np.int32(_SAMPLE_STEPS))
    return params, int(steps), None


def _sample_size(rows: int, params) -> int:
    n, e = params.shape
    return max(min(rows // _SAMPLE_PART, _SAMPLE_MOST), _SAMPLE_LEAST, _SAMPLE_EACH * (n - 1) * e)
