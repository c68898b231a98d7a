"""Fit a linear softmax model: a stochastic phase for fast first progress, then certified steps to a tolerance."""

import math
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qbound.linear.design import Dense
from qbound.linear.factors import InputFactor, input_factor
from qbound.linear.newton import Solver, propose
from qbound.linear.objective import Data, Point, centred, evaluate
from qbound.linear.stochastic import epoch, first_iterate, no_memory
from qbound.mm.results import Result

__all__ = ["Fit", "Phase", "Progress", "fit"]

Phase = Literal["start", "stochastic", "mm"]

# A matrix of all free parameters is factorised up to so many of them.
_DENSE_LIMIT = 256
# The second moments of inputs are factorised up to so many of them, if that costs little beside passes over the data,
# and are taken from so many rows, or so many times their number.
_KRONECKER_LIMIT, _KRONECKER_SHARE, _MOMENT_ROWS, _MOMENT_SHARE = 2000, 10, 10_000, 10
# There is a stochastic phase if it has so many batches, of so many examples and so many logits at most.
_MIN_BATCHES, _BATCH, _BATCH_LOGITS = 20, 1000, 1 << 22
_EPOCHS, _FIRST_RATE = 5, 2.0
# Then epochs with reduced variance, if there are no more logits than so many, at a constant rate, in rounds of so many,
# until the objective falls in one by more than so large a part of what it fell by in the one before.
_REMEMBERED, _REDUCED_RATE, _ROUND, _SLOW = 1 << 23, 0.25, 4, 0.5
# With few coefficients it is Newton's method on samples of rows instead, of which each is so large a part of the data
# at most, until the gradient is below so large a part of 1/sqrt(rows), or for so many steps.
_SAMPLES, _SAMPLE_SHARE, _SAMPLE_NOISE, _SAMPLE_STEPS = (4096, 16_384), 2, 0.1, 6
# CG stops at a relative residual of sqrt(|g|/|g_0|), at most so much: late directions become exact.
_LOOSEST = 0.1
# A fit has stalled after so many steps in which the gradient did not fall below so large a part of its least value and
# no step was certified to decrease the objective by so many units of its rounding.
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
    stochastic: bool = True,
    rng: np.random.RandomState | None = None,
    callback: Callable[[Progress], None] | None = None,
) -> Fit:
    """Minimise the regularised mean loss until the largest absolute entry of its gradient is within a tolerance.

    Args:
      data: the examples.
      l2: lambda, for each input.
      params: where to start.
      tolerance: of the gradient.
      max_steps: the most certified steps to take.
      stochastic: whether there may be a stochastic phase; there is one where data are large enough to gain from it.
      rng: draws the batches.
      callback: called with every entry of the history.
    """
    rng = np.random.RandomState(0) if rng is None else rng
    if stochastic and _solver(data, params) == "dense" and data.labels.size >= _SAMPLES[0] * _SAMPLE_SHARE:
        data = _shuffled(data, jnp.asarray(rng.permutation(data.labels.size), jnp.int32))
    began = time.perf_counter()
    history: list[Progress] = []

    def enter(phase: Phase, point: Point, certified=0.0, cg_steps=0):
        numbers = float(point.objective), float(point.size)
        history.append(Progress(phase, *numbers, time.perf_counter() - began, float(certified), int(cg_steps)))
        if callback is not None:
            callback(history[-1])

    point = _evaluate(data, l2, params)
    enter("start", point)
    if not _is_finite(point):
        return Fit(params, history, 0, Result.NOT_FINITE)
    solver = _solver(data, params)
    first_size = float(point.size)
    factor, before = None, 0
    if first_size > tolerance and solver == "kronecker" and max_steps > 0:
        factor = _input_factor(data, params)
        if stochastic and _batch_size(data, params) is not None:
            point, before = _on_batches(data, l2, point, factor, rng, tolerance, enter)
    elif first_size > tolerance and solver == "dense" and max_steps > 0 and stochastic and data.used is not None:
        point, before = _on_samples(data, l2, point, tolerance)
        enter("stochastic", point)
    steps, stalled = 0, False
    least, since = float(point.size), 0
    eps = float(jnp.finfo(params.dtype).eps)
    while (size := float(point.size)) > tolerance and not stalled and steps < max_steps:
        # The last step needs to reach the tolerance and no more.
        cg_tolerance = max(min(_LOOSEST, math.sqrt(size / first_size)), tolerance / (2 * size))
        step = propose(data, l2, point, factor, jnp.asarray(cg_tolerance, params.dtype), solver=solver)
        new = _evaluate(data, l2, step.params)
        rounding = math.sqrt(eps) * abs(float(point.objective))
        falls = _is_finite(new) and float(new.objective) <= float(point.objective) + rounding
        if not (falls and float(step.certified) > 0 and float(step.actual) > 0):
            stalled = True
            break
        point, steps = new, steps + 1
        enter("mm", point, step.certified, step.cg_steps)
        is_progress = float(point.size) < _PROGRESS * least
        is_progress |= float(step.certified) > _NOISE * eps * abs(float(point.objective))
        since = 0 if is_progress else since + 1
        least = min(least, float(point.size))
        stalled = since >= _PATIENCE
    if float(point.size) <= tolerance:
        result = Result.CONVERGED
    else:
        result = Result.STALLED if stalled else Result.STEP_LIMIT
    return Fit(point.params, history, before + steps, result)


@jax.jit
def _evaluate(data: Data, l2, params) -> Point:
    return evaluate(data, l2, centred(params))


def _is_finite(point: Point) -> bool:
    return math.isfinite(float(point.objective)) and math.isfinite(float(point.size))


def _solver(data: Data, params) -> Solver:
    n, e = params.shape
    if not isinstance(data.design, Dense):
        return "diagonal"
    if (n - 1) * e <= _DENSE_LIMIT:
        return "dense"
    cheap = e**2 <= _KRONECKER_SHARE * data.labels.size * n
    return "kronecker" if e <= _KRONECKER_LIMIT and cheap else "diagonal"


def _input_factor(data: Data, params) -> InputFactor:
    b, e = data.labels.size, params.shape[1]
    # At equal distances: with no random numbers, and fair to data in the order of their labels.
    places = np.linspace(0, b - 1, min(b, max(_MOMENT_ROWS, _MOMENT_SHARE * e))).astype(np.int32)
    return jax.block_until_ready(_jitted_input_factor(data.design, data.weights, jnp.asarray(places), e))


_jitted_input_factor = jax.jit(input_factor, static_argnums=3)


def _batch_size(data: Data, params) -> int | None:
    """Of the stochastic phase; None if there is none."""
    size = min(_BATCH, _BATCH_LOGITS // len(params))
    return size if data.labels.size >= _MIN_BATCHES * _BATCH else None


def _on_batches(data: Data, l2, first: Point, factor, rng, tolerance: float, enter) -> tuple[Point, int]:
    """The stochastic phase of many coefficients, forgotten if it has not decreased the objective; and its epochs."""
    params = first.params
    b, size = data.labels.size, _batch_size(data, params) or 1
    count = -(-b // size)
    places = np.full(count * -(-b // count), -1, np.int32)
    places[:b] = rng.permutation(b)
    # Rows without an example are spread over the batches.
    batches = jnp.asarray(places.reshape(-1, count).T)
    rates = _FIRST_RATE / 2 * (1 + np.cos(np.pi * np.arange(_EPOCHS * count) / (_EPOCHS * count)))
    iterate = first_iterate(params)
    plain, reduced = jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32)
    empty = memory = no_memory(params, batches) if b * len(params) <= _REMEMBERED else None

    def run(memory, rates, reduced, curvature):
        order = jnp.asarray(rng.permutation(count), jnp.int32)
        return epoch(data, l2, factor, iterate, memory, batches, order, jnp.asarray(rates), reduced, curvature)

    for of_epoch in rates.astype(np.float32).reshape(_EPOCHS, count):
        iterate, memory = run(empty, of_epoch, plain, first.label_curvature)
    epochs = _EPOCHS
    point = _evaluate(data, l2, iterate.params.astype(params.dtype))
    if not (_is_finite(point) and float(point.objective) < float(first.objective)):
        enter("stochastic", first)
        return first, epochs
    enter("stochastic", point)
    constant = np.full(count, _REDUCED_RATE, np.float32)
    last_fall = float(first.objective) - float(point.objective)
    while float(point.size) > tolerance and memory is not None:
        for _ in range(_ROUND):
            iterate, memory = run(memory, constant, reduced, point.label_curvature)
        epochs += _ROUND
        new = _evaluate(data, l2, iterate.params.astype(params.dtype))
        if not (_is_finite(new) and float(new.objective) < float(point.objective)):
            break
        fall = float(point.objective) - float(new.objective)
        point = new
        enter("stochastic", point)
        if fall > _SLOW * last_fall:
            break
        last_fall = fall
    return point, epochs


@jax.jit
def _shuffled(data: Data, order) -> Data:
    """In another order, of which the first rows may be used alone."""
    assert isinstance(data.design, Dense)
    used = jnp.asarray(data.labels.size, jnp.int32)
    return Data(Dense(data.design.x[order]), data.labels[order], data.weights[order], used)


@jax.jit
def _sample(data: Data, rows) -> Data:
    """The first rows."""
    weights = jnp.where(jnp.arange(data.labels.size, dtype=jnp.int32) < rows, data.weights, 0)
    total = jnp.sum(weights)
    return Data(data.design, data.labels, weights / jnp.where(total > 0, total, 1), rows)


def _on_samples(data: Data, l2, first: Point, tolerance: float) -> tuple[Point, int]:
    """The stochastic phase of few coefficients, forgotten if it has not decreased the objective; and its steps."""
    params, steps = first.params, 0
    exact = jnp.zeros((), params.dtype)
    for rows in _SAMPLES:
        if rows * _SAMPLE_SHARE > data.labels.size:
            break
        sample = _sample(data, jnp.asarray(rows, jnp.int32))
        point = _evaluate(sample, l2, params)
        enough = max(tolerance, _SAMPLE_NOISE / math.sqrt(rows))
        for _ in range(_SAMPLE_STEPS):
            if not float(point.size) > enough:
                break
            new = _evaluate(sample, l2, propose(sample, l2, point, None, exact, solver="dense").params)
            if not (_is_finite(new) and float(new.objective) < float(point.objective)):
                break
            point, steps = new, steps + 1
        params = point.params
    new = _evaluate(data, l2, params)
    return (new if _is_finite(new) and float(new.objective) < float(first.objective) else first), steps
