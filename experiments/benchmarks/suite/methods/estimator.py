"""The scikit-learn estimator of qbound: a whole fit for every checkpoint, with tolerances on a ladder."""

import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from experiments.benchmarks.suite.objective import objective
from experiments.benchmarks.suite.problem import Checkpoint, Problem, Ready
from qbound.estimator import LogisticRegression

__all__ = ["estimator"]

TOLERANCES = (1e-1, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 5e-5, 2e-5, 1e-5, 5e-6, 2e-6, 1e-6, 3e-7, 1e-7)


def estimator(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """Times are those of whole calls of `fit`, checks of the input included."""
    del setting
    first, _ = _timed(problem, TOLERANCES[-1], seed)
    second, _ = _timed(problem, TOLERANCES[0], seed)
    yield Ready(max(first - second, 0.0))
    last = None
    for tolerance in TOLERANCES:
        seconds, model = _timed(problem, tolerance, seed)
        params = np.concatenate([-model.coef_, model.coef_]).T / 2 if problem.classes == 2 else model.coef_.T
        yield Checkpoint(seconds, _passes(model), params)
        value = objective(params, problem.inputs, problem.labels, problem.l2)
        # A fit that has not gone further has come to the end of float32.
        if value <= problem.goal or seconds > problem.seconds or (last == value and not model.converged_):
            return
        last = value


def _timed(problem: Problem, tolerance: float, seed: int) -> tuple[float, LogisticRegression]:
    # With two classes there is one vector of weights, half of the difference of two, and the penalty is half as large.
    l2 = problem.l2 / 2 if problem.classes == 2 else problem.l2
    model = LogisticRegression(l2=l2, tol=tolerance, fit_intercept=False, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        began = time.perf_counter()
        model.fit(problem.inputs, problem.labels)
        return time.perf_counter() - began, model


def _passes(model: LogisticRegression) -> float:
    """One for each gradient and iteration of CG, half of one for each line; and the epochs of the first phase."""
    history = model.history_
    steps = np.sum(history["phase"] == "mm")
    epochs = model.n_iter_[0] - steps if "stochastic" in history["phase"] else 0
    return float(len(history["phase"]) + np.sum(history["cg_steps"]) + steps / 2 + epochs)
