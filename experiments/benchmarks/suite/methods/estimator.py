"""The scikit-learn estimator of qbound: a whole fit for every checkpoint, with tolerances on a ladder."""

import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from experiments.benchmarks.suite.problem import Checkpoint, Problem, Ready, penalty_of_coefficients, to_params
from qbound.estimator import LogisticRegression

__all__ = ["estimator"]

TOLERANCES = (1e-1, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 5e-5, 2e-5, 1e-5, 5e-6, 2e-6, 1e-6, 3e-7, 1e-7)


def estimator(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """Times are those of whole calls of `fit`, checks of the input included."""
    del setting
    first, _ = _timed(problem, TOLERANCES[-1], seed)
    second, _ = _timed(problem, TOLERANCES[0], seed)
    yield Ready(max(first - second, 0.0))
    for tolerance in TOLERANCES:
        seconds, model = _timed(problem, tolerance, seed)
        yield Checkpoint(seconds, _passes(model), to_params(model.coef_), whole=True)
        if not model.converged_:  # at the end of float32
            return


def _timed(problem: Problem, tolerance: float, seed: int) -> tuple[float, LogisticRegression]:
    l2 = penalty_of_coefficients(problem)
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
