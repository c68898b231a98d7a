"""Cyanure (Mairal 2019): variance reduction, Catalyst and QNing in C++, https://github.com/inria-thoth/cyanure."""

import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from cyanure.estimators import Classifier

from experiments.benchmarks.suite.problem import Checkpoint, Problem, Ready, penalty_of_coefficients, to_params

__all__ = ["cyanure"]


def cyanure(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """Whole fits from zero of more and more epochs, because a fit cannot be looked at from outside.

    The seconds of a checkpoint are those of its fit alone, not a sum. `passes` is the library's own count of epochs.

    Settings: `solver`, and `memory` of the QNing solvers.
    """
    started = time.perf_counter()
    _fit(problem, setting, seed, epochs=1)  # Starts the threads; one epoch of this library leaves W at zero.
    yield Ready(time.perf_counter() - started)
    yield Checkpoint(0.0, 0.0, np.zeros((problem.inputs.shape[1], problem.classes), np.float32))
    for epochs in _ladder():
        seconds, params = _fit(problem, setting, seed, epochs)
        yield Checkpoint(seconds, float(epochs), params, whole=True)


def _ladder() -> Iterator[int]:
    """2, 3, 5, 8, 13, 20, 32, 50, 80, 125, 200, ...: five to a factor of ten, and closer at the start."""
    yield from (2, 3, 5, 8, 13)
    power = 1
    while True:
        yield from (mantissa * power for mantissa in (20, 32, 50, 80, 125))
        power *= 10


def _fit(problem: Problem, setting: Mapping[str, Any], seed: int, epochs: int) -> tuple[float, np.ndarray]:
    """Seconds and W (d, n) of one fit with this many epochs."""
    # The library turns two classes into a model with one vector w, which is W = [-w/2, w/2]; then
    # l2/2 |W|^2 = l2/4 |w|^2, and its penalty is lambda_1/2 |w|^2. Its losses are means.
    binary = problem.classes == 2
    model = Classifier(
        loss="logistic" if binary else "multiclass-logistic",
        penalty="l2",
        lambda_1=penalty_of_coefficients(problem),
        fit_intercept=False,
        solver=setting.get("solver", "qning-miso"),
        limited_memory_qning=setting.get("memory", 20),
        max_iter=epochs,
        # In float32 the duality gap may come out below zero, which ends a fit at any tolerance: it is never computed.
        tol=1e-30,
        duality_gap_interval=epochs + 1,
        n_threads=-1,
        random_state=seed,
        safe=False,  # No checks of the input, which would count as time.
        verbose=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The max_iter was reached")  # As it should be.
        started = time.perf_counter()
        model.fit(problem.inputs, problem.labels)
        seconds = time.perf_counter() - started
    weights = np.asarray(model.coef_)  # (d, n), or (d,) for two classes
    return seconds, to_params(weights.reshape(1, -1)) if binary else weights
