"""Fit a linear softmax model in phases: progress on batches, steps of one pass, certified steps to a tolerance."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from qbound import checks, compiler
from qbound.curvature.kronecker import InputFactor
from qbound.fitting.factors import ExactBlock, block_size, exact_block, input_factor, unknown_block
from qbound.fitting.newton import NewtonSolver, evaluate, newton_on_sample, newton_step
from qbound.fitting.objective import LinearObjective, LinearPoint
from qbound.fitting.quasi_newton import LbfgsMemory, empty_memory, lbfgs_steps
from qbound.fitting.results import Certificate, FitInfo, Phase, Result
from qbound.fitting.step import has_gained
from qbound.fitting.stochastic import LABEL_LIMIT, epoch, first_iterate
from qbound.models.inputs import DenseInputs


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When a fit takes which phase, and for how long. The defaults are good untuned.

    Attributes:
      dense_parameters: up to this many free parameters, (n - 1) e, Newton's system is solved by a factorisation,
      dense_labels: unless there are more labels than this.
      kronecker_inputs: up to this many inputs their second moments are factorised, for a preconditioner,
      kronecker_share: if e^2 is at most this many times the number of logits: else it costs more than passes do.
      moment_rows: the second moments are taken from this many rows,
      moment_rows_per_input: or from this many times the number of inputs.
      batch_size: examples in a batch of the stochastic phase.
      min_batches: there is a stochastic phase only if an epoch has this many batches,
      large_pass: and a pass over the data this many multiplications: a small pass takes less time than its batches.
      batch_labels: nor with more labels than this: a batch lacks most of them, and steps that are safe are short.
      epochs: how many passes over the data the stochastic phase takes.
      first_rate: its first learning rate, which decays to 0.
      quick_rank: its factor of inputs has this many eigenvectors,
      quick_rows: from this many rows: the factor of later steps takes longer than an epoch.
      sample_part: with few parameters the stochastic phase is Newton's method on a sample, one in this many rows,
      sample_most: but no more rows than this,
      sample_least: and no fewer than this,
      sample_rows_per_parameter: and no fewer than this for each free parameter; it must be a quarter of all at most.
      sample_noise: steps on the sample end when the gradient is below this part of 1/sqrt(rows),
      sample_steps: or after this many.
      quasi_newton_steps: the most steps of one pass.
      steps_per_look: how many of them are taken between two looks at the result.
      steps_before_block: the exact block of their preconditioner is made after this many steps, or right after the
        stochastic phase: at the start there is little that it could mend.
      block_age: it is made anew when there were twice as many steps, and this many more.
      stale_cg_steps: and after a certified step that took more iterations of CG than this.
      patience: a fit has stalled after this many certified steps without a gain.
    """

    dense_parameters: int = 64
    dense_labels: int = 64
    kronecker_inputs: int = 2000
    kronecker_share: float = 10
    moment_rows: int = 4000
    moment_rows_per_input: int = 5
    batch_size: int = 1000
    min_batches: int = 20
    large_pass: float = 1e8
    batch_labels: int = LABEL_LIMIT
    epochs: int = 2
    first_rate: float = 2.0
    quick_rank: int = 128
    quick_rows: int = 2000
    sample_part: int = 8
    sample_most: int = 65_536
    sample_least: int = 4096
    sample_rows_per_parameter: int = 256
    sample_noise: float = 0.1
    sample_steps: int = 8
    quasi_newton_steps: int = 80
    steps_per_look: int = 12
    steps_before_block: int = 12
    block_age: int = 20
    stale_cg_steps: int = 15
    patience: int = 3

    def __post_init__(self):
        for name in ("batch_size", "epochs", "quick_rank", "quick_rows", "moment_rows", "sample_part"):
            checks.integer(name, getattr(self, name))
        for name in ("steps_per_look", "block_age", "patience"):
            checks.integer(name, getattr(self, name))

    def solver(self, objective: LinearObjective, labels: int) -> NewtonSolver:
        """How Newton's system is solved."""
        e, b = objective.l2.size, objective.data.labels.size
        if not isinstance(objective.data.design, DenseInputs):
            return "diagonal"
        if (labels - 1) * e <= self.dense_parameters and labels <= self.dense_labels:
            return "dense"
        is_cheap = e**2 <= self.kronecker_share * b * labels
        return "kronecker" if e <= self.kronecker_inputs and is_cheap else "diagonal"

    def first_phase(
        self, solver: NewtonSolver, rows: int, labels: int, inputs: int
    ) -> Literal["sample", "batches"] | None:
        """How the fit starts; None where data are too few to gain from a stochastic phase."""
        if solver == "dense" and 4 * self.sample_size(rows, labels, inputs) <= rows:
            return "sample"
        is_large = rows >= self.min_batches * self.batch_size and rows * labels * inputs >= self.large_pass
        return "batches" if solver == "kronecker" and is_large and labels <= self.batch_labels else None

    def sample_size(self, rows: int, labels: int, inputs: int) -> int:
        """How many rows a sample has."""
        enough = self.sample_rows_per_parameter * (labels - 1) * inputs
        return max(min(rows // self.sample_part, self.sample_most), self.sample_least, enough)

    def moment_sample(self, rows: int, inputs: int) -> np.ndarray:
        """The rows from which the factor of inputs and the exact block are made."""
        return _spread_rows(rows, max(self.moment_rows, self.moment_rows_per_input * inputs))


class Fitted(NamedTuple):
    """What was found: parameters (n, e), the way there, how many steps and epochs it took, and how it ended."""

    params: Array
    history: list[FitInfo]
    steps: int
    result: Result


def minimise(
    objective: LinearObjective,
    params: Array,
    *,
    tolerance: float,
    max_steps: int,
    certified: bool = False,
    schedule: Schedule | None = None,
    rng: np.random.RandomState | None = None,
    callback: Callable[[FitInfo], None] | None = None,
) -> Fitted:
    """Minimise the objective until the norm of its gradient is within a tolerance.

    Args:
      objective: of a linear model; weights sum to 1.
      params: where to start, (n, d), or (n, d + 1) with an intercept, in the dtype of the inputs.
      tolerance: of the gradient norm.
      max_steps: the most steps to take; epochs, and steps on samples, do not count.
      certified: whether every step is to have a certificate. Else there is a stochastic phase where data are large
        enough to gain from it, and certified steps are taken where those of one pass do not lead to the tolerance.
      schedule: of the phases.
      rng: draws the batches, or the sample.
      callback: called with every entry of the history.
    """
    check_fit(objective, params, tolerance, max_steps)
    schedule = Schedule() if schedule is None else schedule
    rng = np.random.RandomState(0) if rng is None else rng
    # As the programs see it.
    tolerance = float(np.dtype(params.dtype).type(tolerance))
    journal = _Journal(callback)
    (n, e), rows = params.shape, objective.data.labels.size
    method = _Method(objective, schedule, schedule.solver(objective, n))
    is_kronecker = method.solver == "kronecker"
    phase = None if certified else schedule.first_phase(method.solver, rows, n, e)
    # Else there are factors to be made first, or a phase to come, and no step is proposed.
    steps_follow = phase is None and not is_kronecker and max_steps > 0
    first = method.start(params, tolerance if steps_follow else math.inf)
    journal.enter(Phase.START, first)
    if not first.is_finite:
        return Fitted(params, journal.history, 0, Result.NOT_FINITE)
    if first.norm <= tolerance or max_steps == 0:
        result = Result.CONVERGED if first.norm <= tolerance else Result.STEP_LIMIT
        return Fitted(first.params, journal.history, 0, result)
    method = method._replace(first_norm=first.norm)
    at, steps, quick = first, 0, None
    if phase is not None:
        run_phase = _on_a_sample if phase == "sample" else _on_batches
        start, journal.steps, quick = run_phase(method, first.params, tolerance, rng)
        at = method.start(start, tolerance)
        if not (at.is_finite and at.objective < first.objective):
            # A phase that has not decreased the objective is forgotten.
            at = first if is_kronecker else method.start(first.params, tolerance)
        journal.enter(Phase.STOCHASTIC, at, passes=1.0 + (schedule.epochs if phase == "batches" else 0))
    if is_kronecker and at.norm > tolerance:
        method = method.with_factor(at, quick)
    if is_kronecker and not certified:
        block_first = phase is not None and method.factor is not quick
        method, at, steps = _steps_of_one_pass(method, at, tolerance, max_steps, journal, block_first=block_first)
    if is_kronecker and at.norm > tolerance and steps < max_steps:
        method = method if certified else method.with_block(at.params)
        at = method.evaluate_and_propose(at.params, tolerance)
    at, result = _certified_steps(method, at, tolerance, max_steps - steps, journal)
    return Fitted(at.params, journal.history, journal.steps, result)


def check_fit(objective: LinearObjective, params, tolerance, max_steps) -> None:
    """Check what shapes and types can tell, without waiting for the device."""
    if not isinstance(objective, LinearObjective):
        raise TypeError(f"objective: expected a LinearObjective; got {type(objective).__name__}")
    data, l2 = objective.data, objective.l2
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
    method: "_Method", at: "_Reached", tolerance: float, max_steps: int, journal: "_Journal", *, block_first: bool
) -> tuple["_Method", "_Reached", int]:
    """Until the tolerance is reached, steps gain nothing, or there were many: the method, where, and how many."""
    schedule = method.schedule
    limit, steps, memory = min(max_steps, schedule.quasi_newton_steps), 0, empty_memory(at.params)
    block_at = 0 if block_first else schedule.steps_before_block
    while at.norm > tolerance and steps < limit:
        if steps >= block_at:
            method, block_at = method.with_block(at.params), max(2 * steps, steps + schedule.block_age)
        count = min(schedule.steps_per_look, limit - steps, block_at - steps)
        at, memory, taken, goes_on = method.lbfgs_steps(at, memory, tolerance, count)
        steps, journal.steps = steps + taken, journal.steps + taken
        if taken:
            journal.enter(Phase.QUASI_NEWTON, at, passes=float(taken))
        if not goes_on:
            break
    return method, at, steps


def _certified_steps(
    method: "_Method", at: "_Reached", tolerance: float, max_steps: int, journal: "_Journal"
) -> tuple["_Reached", Result]:
    """Newton's method: where it has led, and how it ended."""
    eps = float(jnp.finfo(at.params.dtype).eps)
    least, idle = at.norm, 0
    for steps in range(max_steps):
        if at.norm <= tolerance:
            return at, Result.CONVERGED
        # After the last step no other is wanted.
        is_last = steps + 1 == max_steps
        if at.cg_steps > method.schedule.stale_cg_steps and not is_last:
            method = method.with_block(at.next_params)
        new = method.evaluate_and_propose(at.next_params, math.inf if is_last else tolerance)
        falls = new.is_finite and new.objective <= at.objective + math.sqrt(eps) * abs(at.objective)
        if not (falls and at.certified > 0 and at.actual > 0):
            return at, Result.STALLED
        journal.steps += 1
        # A matrix counts as one pass, as it does for `qbound.mm`.
        work = 1 if method.solver == "dense" else at.cg_steps
        journal.enter(Phase.NEWTON, new, by=at, passes=1.5 + work)
        fall = min(at.certified, at.objective - new.objective)
        idle = 0 if has_gained(new.norm, least, fall, new.objective, eps=eps) else idle + 1
        at, least = new, min(least, new.norm)
        if idle >= method.schedule.patience and at.norm > tolerance:
            return at, Result.STALLED
    return at, Result.CONVERGED if at.norm <= tolerance else Result.STEP_LIMIT


class _Reached(NamedTuple):
    """A point, the objective and the norm of its gradient there, and the next step if one is known."""

    point: LinearPoint
    objective: float
    norm: float
    next_params: Array | None = None
    certified: float = 0.0
    actual: float = 0.0
    is_local: bool = False
    length: float = 0.0
    cg_steps: int = 0

    @property
    def params(self) -> Array:
        return self.point.params

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.objective) and math.isfinite(self.norm)


class _Journal:
    """The history of a fit, told to whoever wants to hear it."""

    def __init__(self, callback: Callable[[FitInfo], None] | None):
        self.callback, self.began, self.steps = callback, time.perf_counter(), 0
        self.history: list[FitInfo] = []

    def enter(self, phase: Phase, at: _Reached, by: _Reached | None = None, passes: float = 1.0):
        """Enter where a phase has led; `by` holds the certified step that was taken."""
        seconds = time.perf_counter() - self.began
        fall = self.history[-1].objective - at.objective if self.history else 0.0
        entry = FitInfo(
            at.objective,
            at.norm,
            actual_decrease=fall,
            passes=passes,
            steps=self.steps,
            phase=phase,
            seconds=seconds,
        )
        if by is not None:
            won = Certificate.LOCAL if by.is_local else Certificate.BOUND
            entry = entry._replace(
                certificate=won,
                certified_decrease=by.certified,
                actual_decrease=by.actual,
                step_length=by.length,
                cg_steps=by.cg_steps,
            )
        self.history.append(entry)
        if self.callback is not None:
            self.callback(entry)


class _Method(NamedTuple):
    """All that steps need, but for where they start."""

    objective: LinearObjective
    schedule: Schedule
    solver: NewtonSolver
    first_norm: float = 0.0
    factor: InputFactor | None = None
    block: ExactBlock | None = None
    block_size: int = 0

    @property
    def moment_rows(self) -> np.ndarray:
        return self.schedule.moment_sample(self.objective.data.labels.size, self.objective.l2.size)

    def with_factor(self, at: _Reached, quick: InputFactor | None) -> "_Method":
        """The method with the factor of inputs, a quick one where that will do, and an exact block not known yet."""
        rows, data, (n, e) = self.moment_rows, self.objective.data, at.params.shape
        if quick is not None and _is_enough(quick, at, self.objective.l2):
            factor = quick
        else:
            factor = _input_factor(data, rows, e)
        size = block_size(data.labels.size, rows.size, n, e, factor.values.size)
        return self._replace(factor=factor, block=unknown_block(n, size), block_size=size)

    def with_block(self, params) -> "_Method":
        """The method with the exact block of its preconditioner at these parameters."""
        if self.block is None:
            return self
        objective = self.objective
        arguments = objective.data, self.moment_rows, self.factor, objective.l2, params
        block = _exact_block(*arguments, self.block_size)
        return self._replace(block=block)

    def start(self, params, tolerance: float) -> _Reached:
        """Evaluate, and propose a step where that needs no factor."""
        if self.solver == "kronecker":
            return _reached(evaluate(self.objective, params))
        return self.evaluate_and_propose(params, tolerance)

    def evaluate_and_propose(self, params, tolerance: float) -> _Reached:
        """Evaluate, and propose a step if the gradient is not within the tolerance."""
        dtype = np.dtype(params.dtype).type
        numbers = dtype(tolerance), dtype(self.first_norm)
        point, step = newton_step(self.objective, params, self.factor, self.block, *numbers, solver=self.solver)
        known = step.certified, step.actual, step.local, step.length, step.cg_steps
        return _reached(point, *known)._replace(next_params=step.params)

    def lbfgs_steps(
        self, at: _Reached, memory: LbfgsMemory, tolerance: float, max_steps: int
    ) -> tuple[_Reached, LbfgsMemory, int, bool]:
        """Steps of one pass: where they lead, their memory, how many there were, and whether there may be more."""
        numbers = np.dtype(at.params.dtype).type(tolerance), np.int32(max_steps)
        led = lbfgs_steps(self.objective, at.point, memory, self.factor, self.block, *numbers)
        return _reached(led.point), led.memory, int(led.steps), bool(led.goes_on)


def _reached(point: LinearPoint, *known: Array) -> _Reached:
    """All numbers in one transfer from the device."""
    objective, norm, *step = (x.item() for x in jax.device_get((point.objective, point.gradient_norm, *known)))
    return _Reached(point, objective, norm, None, *step)


def _is_enough(factor: InputFactor, at: _Reached, l2) -> bool:
    """Whether all other eigenvectors belong to curvature that is lost beside the penalty."""
    if factor.tail_eigenvalue is None:
        return False
    labels = at.point.label_curvature
    curvature, tail, l2 = jax.device_get((jnp.diag(labels) if labels.ndim == 2 else labels, factor.tail_eigenvalue, l2))
    return bool(np.mean(curvature) * tail <= np.max(l2))


_input_factor = compiler.jit(input_factor, static_argnums=(2, 3))
_exact_block = compiler.jit(exact_block, static_argnums=5)


def _spread_rows(rows: int, count: int) -> np.ndarray:
    """Places at equal distances: with no random numbers, and fair to data in the order of their labels."""
    return np.linspace(0, rows - 1, min(rows, count)).astype(np.int32)


def _on_batches(method: _Method, params, tolerance: float, rng) -> tuple[Array, int, InputFactor]:
    """The stochastic phase of many parameters: where it leads, its epochs, and its factor of inputs."""
    schedule, data, l2 = method.schedule, method.objective.data, method.objective.l2
    b, epochs = data.labels.size, schedule.epochs
    count = -(-b // schedule.batch_size)
    rates = schedule.first_rate / 2 * (1 + np.cos(np.pi * np.arange(epochs * count) / (epochs * count)))
    iterate = first_iterate(params)
    factor = _input_factor(data, _spread_rows(b, schedule.quick_rows), l2.size, schedule.quick_rank)
    for of_epoch in rates.astype(np.float32).reshape(epochs, count):
        places = np.full(count * -(-b // count), -1, np.int32)
        places[:b] = rng.permutation(b)
        # Rows without an example are spread over the batches.
        batches = np.ascontiguousarray(places.reshape(-1, count).T)
        iterate = epoch(data, l2, factor, iterate, batches, of_epoch)
    return iterate.params.astype(params.dtype), epochs, factor


def _on_a_sample(method: _Method, params, tolerance: float, rng) -> tuple[Array, int, None]:
    """The stochastic phase of few parameters: where it leads, and its steps."""
    schedule, b = method.schedule, method.objective.data.labels.size
    rows = rng.randint(0, b, schedule.sample_size(b, *params.shape)).astype(np.int32)
    enough = np.dtype(params.dtype).type(max(tolerance, schedule.sample_noise / math.sqrt(rows.size)))
    params, steps = newton_on_sample(method.objective, rows, params, enough, np.int32(schedule.sample_steps))
    return params, int(steps), None
