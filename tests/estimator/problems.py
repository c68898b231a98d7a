"""Data sets of scikit-learn, and its estimator at a tolerance at which its solution counts as exact."""

import functools
import warnings

import numpy as np
from sklearn import datasets
from sklearn.linear_model import LogisticRegression as Theirs

from qbound.estimator import LogisticRegression
from tests import reference

TOLERANCE = 1e-9


@functools.cache
def data_set(name):
    """Inputs and labels; raw, or standardised."""
    name, _, kind = name.partition(" ")
    inputs, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    if kind != "raw":
        spread = inputs.std(0)
        inputs = (inputs - inputs.mean(0)) / np.where(spread > 0, spread, 1)
    inputs.setflags(write=False)
    return inputs, labels


def ours(inputs, labels, sample_weight=None, **kwargs):
    return LogisticRegression(**{"tol": TOLERANCE, **kwargs}).fit(inputs, labels, sample_weight)


def theirs(inputs, labels, sample_weight=None, **kwargs):
    kwargs = {"solver": "newton-cholesky", "tol": 1e-11, "max_iter": 1000, **kwargs}
    with warnings.catch_warnings():
        # An old scikit-learn has options for SciPy's L-BFGS that a new SciPy deprecates.
        warnings.filterwarnings("ignore", "scipy.optimize: The `disp` and `iprint`", DeprecationWarning)
        return Theirs(**kwargs).fit(inputs, labels, sample_weight)


def both(inputs, labels, sample_weight=None, **kwargs):
    """Fits of the same data by both."""
    return ours(inputs, labels, sample_weight, **kwargs), theirs(inputs, labels, sample_weight, **kwargs)


def assert_same(found, expected, inputs, atol=1e-5):
    """Coefficients and probabilities."""
    assert found.coef_.shape == expected.coef_.shape
    assert found.intercept_.shape == expected.intercept_.shape
    np.testing.assert_allclose(found.coef_, expected.coef_, atol=atol)
    np.testing.assert_allclose(found.intercept_, expected.intercept_, atol=atol)
    np.testing.assert_allclose(found.predict_proba(inputs), expected.predict_proba(inputs), atol=atol)
    np.testing.assert_array_equal(found.predict(inputs), expected.predict(inputs))


def as_linear_model(model, inputs, labels, l2, weights=None):
    """The arguments of `reference.linear_model`, for a fit with an intercept, and its parameters."""
    weights = np.ones(len(labels)) if weights is None else weights
    params = np.concatenate([model.coef_, model.intercept_[:, None]], axis=1)
    # Two labels have one vector w between them, here as -w/2 and w/2: half as large a square, twice.
    params, l2 = (np.concatenate([-params, params]) / 2, 2 * l2) if len(params) == 1 else (params, l2)
    penalty = np.append(np.full(inputs.shape[1], l2), 0.0)
    places = np.searchsorted(model.classes_, labels)
    return (reference.with_ones(inputs), places, weights / np.sum(weights), penalty), params
