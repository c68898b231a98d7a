"""The scikit-learn estimator of qbound, and what it calls: a whole fit for every tolerance of a ladder."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from sklearn.exceptions import ConvergenceWarning

from experiments.benchmarks.suite.problem import Checkpoint, Problem, Ready, penalty_of_coefficients, to_params
from qbound.estimator import LogisticRegression
from qbound.fitting.objective import Data, LinearObjective
from qbound.fitting.phases import minimise
from qbound.fitting.results import Phase, Result
from qbound.models.inputs import DenseInputs

__all__ = ["estimator", "linear_fit"]

# Four to a factor of ten: other methods are looked at after every step.
TOLERANCES = tuple(10 ** (-i / 4) for i in range(4, 29))
MAX_STEPS = 100
# With more logits than this a pass is long, and a first fit, to compile, has few steps; what it does not come to
# is compiled when it is needed, on the clock.
MANY_LOGITS, FEW_STEPS = 10**7, 3


def estimator(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """Times are those of whole calls of `fit`, checks of the input included."""
    del setting
    l2 = penalty_of_coefficients(problem)

    def fit(tolerance: float, max_steps: int = MAX_STEPS) -> _Fitted:
        model = LogisticRegression(l2=l2, tol=tolerance, fit_intercept=False, random_state=seed, max_iter=max_steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            began = time.perf_counter()
            model.fit(problem.inputs, problem.labels)
            seconds = time.perf_counter() - began
        phases, cg_steps = model.history_["phase"], model.history_["cg_steps"]
        looks = int(np.sum(np.isin(phases, ("start", "stochastic"))))
        passes = _passes(looks, model.n_iter_[0], cg_steps, int(np.sum(phases == "mm")))
        return _Fitted(seconds, passes, to_params(model.coef_), model.converged_)

    return _ladder(problem, fit)


def linear_fit(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """The same method without scikit-learn around it: `minimise`, for arrays that are on the device."""
    del setting
    b, d = problem.inputs.shape
    weights, l2 = np.full(b, 1 / b, np.float32), np.full(d, problem.l2, np.float32)
    start = np.zeros((problem.classes, d), np.float32)
    x, labels, weights, l2, start = jax.device_put((problem.inputs, problem.labels, weights, l2, start))
    objective = LinearObjective(Data(DenseInputs(x), labels, weights), l2)

    def fit(tolerance: float, max_steps: int = MAX_STEPS) -> _Fitted:
        rng = np.random.RandomState(seed)
        began = time.perf_counter()
        found = minimise(objective, start, tolerance=tolerance, max_steps=max_steps, rng=rng)
        params = jax.block_until_ready(found.params)
        seconds = time.perf_counter() - began
        phases, cg_steps = (np.array([getattr(at, name) for at in found.history]) for name in ("phase", "cg_steps"))
        looks = int(np.sum(np.isin(phases, (Phase.START, Phase.STOCHASTIC))))
        passes = _passes(looks, found.steps, cg_steps, int(np.sum(phases == Phase.NEWTON)))
        return _Fitted(seconds, passes, np.asarray(params).T, found.result == Result.CONVERGED)

    return _ladder(problem, fit)


class _Fitted(NamedTuple):
    seconds: float
    passes: float
    params: np.ndarray
    is_converged: bool


def _ladder(problem: Problem, fit: Callable[..., _Fitted]) -> Iterator[Ready | Checkpoint]:
    is_large = len(problem.labels) * problem.classes > MANY_LOGITS
    first, second = fit(TOLERANCES[-1], FEW_STEPS if is_large else MAX_STEPS), fit(TOLERANCES[0])
    yield Ready(max(first.seconds - second.seconds, 0.0))
    for tolerance in TOLERANCES:
        found = fit(tolerance)
        yield Checkpoint(found.seconds, found.passes, found.params, whole=True)
        if not found.is_converged:  # at the end of float32
            return


def _passes(looks: int, steps: int, cg_steps: np.ndarray, newton_steps: int) -> float:
    """One for each epoch, quasi-Newton step, gradient and iteration of CG, half of one for a line of a Newton step."""
    return float(looks + steps + np.sum(cg_steps) + newton_steps / 2)
