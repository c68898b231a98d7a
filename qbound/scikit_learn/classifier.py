"""What a linear classifier does once it is fitted, and what a fit shows and leaves behind."""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import scipy.sparse
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import check_is_fitted, validate_data

from qbound.fitting.results import FitInfo, Phase

# The names of phases for users, in `history_` and on the screen.
PHASES = {Phase.START: "start", Phase.STOCHASTIC: "stochastic", Phase.QUASI_NEWTON: "quasi_newton", Phase.NEWTON: "mm"}
# How many characters the bar has.
_WIDTH = 24


class LinearClassifier(ClassifierMixin):
    """Predicts by `coef_`, `intercept_` and `classes_`; for two classes, those have one row."""

    coef_: Any
    intercept_: np.ndarray
    classes_: np.ndarray

    def decision_function(self, X):
        """The logits (b, n) of the classes; for two classes (b,), that of the second less that of the first."""
        check_is_fitted(self)
        X = cast(Any, validate_data)(self, X, accept_sparse="csr", reset=False)
        scores = safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X):
        """The likeliest class (b,) of each example."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else np.argmax(scores, axis=1)]

    def predict_proba(self, X):
        """The probabilities (b, n) of the classes, in the order of `classes_`."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([expit(-scores), expit(scores)], axis=1)
        return softmax(scores, axis=1)

    def predict_log_proba(self, X):
        """The logarithms (b, n) of `predict_proba`, also of those too small for it."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([log_expit(-scores), log_expit(scores)], axis=1)
        return log_softmax(scores, axis=1)

    def sparsify(self):
        """Make `coef_` a sparse matrix: smaller, where most of it is zero."""
        check_is_fitted(self)
        self.coef_ = scipy.sparse.csr_matrix(self.coef_)
        return self

    def densify(self):
        """Make `coef_` an array again."""
        check_is_fitted(self)
        if scipy.sparse.issparse(self.coef_):
            self.coef_ = self.coef_.toarray()
        return self


Estimator = TypeVar("Estimator")
Arguments = ParamSpec("Arguments")


def all_or_nothing(
    method: Callable[Concatenate[Estimator, Arguments], Estimator],
) -> Callable[Concatenate[Estimator, Arguments], Estimator]:
    """Let a method that returns its estimator work on a copy, whose attributes are taken over when it is done.

    An error, or Ctrl-C, leaves the estimator as it was: with the model of its last fit, whole, or without one. While
    the method runs, other threads predict with that model, too.
    """

    @functools.wraps(method)
    def whole(self: Estimator, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Estimator:
        copy = object.__new__(type(self))
        copy.__dict__ = self.__dict__.copy()
        method(copy, *args, **kwargs)
        # One statement, which no signal divides.
        self.__dict__ = copy.__dict__
        return self

    return whole


class ProgressBar:
    """One line on stderr: how far the gradient has come, in orders of magnitude."""

    def __init__(self, tolerance: float, shown: bool):
        self.tolerance, self.shown, self.first = tolerance, shown, 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.shown and self.first:
            print(file=sys.stderr)

    def show(self, progress: FitInfo):
        """Overwrite it."""
        if not self.shown:
            return
        self.first = self.first or progress.gradient_norm
        way = math.log(self.first / self.tolerance) if 0 < self.tolerance < self.first else 0.0
        gone = math.log(self.first / progress.gradient_norm) if progress.gradient_norm > 0 else way
        gone = gone if math.isfinite(gone) else 0.0
        full = round(_WIDTH * min(max(gone / way, 0.0), 1.0)) if way > 0 else _WIDTH
        line = (
            f"\r[{'#' * full}{'.' * (_WIDTH - full)}] {PHASES[progress.phase]:12} {progress.seconds:6.1f} s  "
            f"objective {progress.objective:.6f}  gradient {progress.gradient_norm:.1e}, tol {self.tolerance:.0e}"
        )
        print(line, end="", file=sys.stderr, flush=True)
