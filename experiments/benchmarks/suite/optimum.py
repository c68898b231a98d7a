"""The least objective of a problem, found in float64 and certified."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from experiments.benchmarks.suite.objective import certified_gap, objective_and_gradient_norm
from experiments.runs import read_json, write_json
from qbound.estimator import LogisticRegression

__all__ = ["find", "optimum"]

# The largest entry of the gradient, in turn until the certificate is good enough: a hundredth of the last target.
TOLERANCES, ENOUGH = (1e-8, 1e-9, 1e-10), 1e-8


def find(inputs: np.ndarray, labels: np.ndarray, l2: float) -> dict[str, float]:
    """The objective, the Euclidean norm of its gradient, and how far it is at most above the least, relative to it.

    The method is ours, in float64; that it has found the optimum is for the gradient to say, which NumPy computes.
    """
    inputs = inputs.astype(np.float64)
    model = LogisticRegression(fit_intercept=False, warm_start=True, max_iter=1000)
    found = {}
    for tolerance in TOLERANCES:
        model.set_params(l2=l2 / 2 if labels.max() == 1 else l2, tol=tolerance)
        with warnings.catch_warnings():
            # Where float64 has no more digits, the certificate says what was reached.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(inputs, labels)
        params = np.concatenate([-model.coef_, model.coef_]).T / 2 if len(model.coef_) == 1 else model.coef_.T
        value, norm = objective_and_gradient_norm(params, inputs, labels, l2)
        found = {"objective": value, "gradient_norm": norm, "certified_gap": certified_gap(norm, l2) / value}
        if found["certified_gap"] <= ENOUGH:
            break
    return found


def optimum(folder: Path, l2: float, path: Path) -> dict[str, Any]:
    """Of the data set in a folder; kept in a file."""
    if not path.exists():
        write_json(path, find(np.load(folder / "inputs.npy"), np.load(folder / "labels.npy"), l2))
    return read_json(path)
