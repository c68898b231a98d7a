"""scikit-learn's solvers of logistic regression.

Each solver fits once, and what it evaluates on the way is written down: the loss that scikit-learn minimises is wrapped
by one that remembers the coefficients it is asked about, the time, and what the data were read for. That is a copy of a
few thousand numbers for each evaluation, and gives the solver the benefit of every point it has looked at. SAGA is
compiled code that asks nobody, and fits once for every number of epochs on a ladder.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.linear_model._linear_loss import LinearModelLoss

from experiments.benchmarks.suite.problem import Checkpoint, Problem, Ready, penalty_of_coefficients, to_params

__all__ = ["saga", "solver"]

# Passes over the data: X W is half of one. A Hessian that is formed costs far more than a pass, and reads them once.
PASSES = {"loss": 0.5, "loss_gradient": 1.0, "gradient": 1.0, "gradient_hessian": 1.0, "gradient_hessian_product": 1.0}
EPOCHS = (1, 2, 3, 5, 8, 13, 20, 32, 50, 80, 125, 200, 320, 500)


class _Enough(Exception):
    pass


def solver(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """One of lbfgs, newton-cg, newton-cholesky."""
    yield from _warm_up(problem, setting["solver"], seed)
    model = _model(problem, setting["solver"], 100_000, seed)
    with _watched(problem) as found:
        try:
            _fit(model, problem)
        except _Enough:
            pass
    yield Checkpoint(0.0, 0.0, np.zeros((problem.inputs.shape[1], problem.classes)))
    yield from found


def saga(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """A whole fit for every checkpoint."""
    del setting
    yield from _warm_up(problem, "saga", seed)
    for epochs in EPOCHS:
        model = _model(problem, "saga", epochs, seed)
        began = time.perf_counter()
        _fit(model, problem)
        seconds = time.perf_counter() - began
        yield Checkpoint(seconds, float(epochs), to_params(model.coef_), whole=True)


def _warm_up(problem: Problem, name: str, seed: int) -> Iterator[Ready]:
    """One iteration, as the first of a process has threads to start."""
    began = time.perf_counter()
    _fit(_model(problem, name, 1, seed), problem)
    yield Ready(time.perf_counter() - began)


def _model(problem: Problem, name: str, iterations: int, seed: int) -> LogisticRegression:
    strength = 1 / (penalty_of_coefficients(problem) * len(problem.labels))
    return LogisticRegression(
        C=strength, solver=name, tol=1e-12, max_iter=iterations, fit_intercept=False, random_state=seed
    )


def _fit(model: LogisticRegression, problem: Problem) -> None:
    with warnings.catch_warnings():
        # Those that stop at their last iteration say so, and those that have come to the end of float32.
        warnings.simplefilter("ignore")
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(problem.inputs, problem.labels)


def _params(coef: np.ndarray, classes: int) -> np.ndarray:
    """W (d, n) of the vector that a solver has, or of the matrix (n, d); a copy."""
    return to_params(np.array(coef, np.float64).reshape(1 if classes == 2 else classes, -1, order="F"))


@contextlib.contextmanager
def _watched(problem: Problem) -> Iterator[list[Checkpoint]]:
    """Checkpoints of all that is evaluated inside, whose clock stops while they are made."""
    found: list[Checkpoint] = []
    clock = {"began": time.perf_counter(), "passes": 0.0, "due": 0.0}
    originals = {name: getattr(LinearModelLoss, name) for name in PASSES}

    def watch(name: str):
        def call(self, coef, *arguments, **options):
            result = originals[name](self, coef, *arguments, **options)
            now = time.perf_counter()
            seconds = now - clock["began"]
            clock["passes"] += PASSES[name]
            if name == "gradient_hessian_product":
                gradient, product = result
                result = gradient, _counted(product, clock)
            # The value that is minimised is that of scikit-learn's own scale: all of ours over 1.
            value = result[0] if name == "loss_gradient" else result if name == "loss" else math.inf
            arrived = isinstance(value, float | np.floating) and value <= problem.goal
            if seconds >= clock["due"] or arrived:
                clock["due"] = 1.02 * seconds
                found.append(Checkpoint(seconds, clock["passes"], _params(coef, problem.classes)))
            if arrived or seconds > problem.seconds:
                raise _Enough
            clock["began"] += time.perf_counter() - now
            return result

        return call

    for name in PASSES:
        setattr(LinearModelLoss, name, watch(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(LinearModelLoss, name, original)


def _counted(product, clock):
    def call(v):
        clock["passes"] += PASSES["gradient_hessian_product"]
        return product(v)

    return call
