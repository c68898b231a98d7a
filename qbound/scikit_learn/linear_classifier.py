"""What a linear classifier does once it is fitted."""

from typing import Any, cast

import numpy as np
import scipy.sparse
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import check_is_fitted, validate_data

__all__ = ["LinearClassifier"]


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
