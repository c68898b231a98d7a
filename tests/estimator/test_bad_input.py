"""What cannot be fitted or predicted: of data scikit-learn's errors, in its own words; of the rest one line of ours.

In the words of the scikit-learn that is installed, which differ from version to version.
"""

import numpy as np
import pytest
import scipy.sparse
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression as Theirs

from qbound.estimator import LogisticRegression
from tests.estimator.problems import ours, theirs

X = np.arange(24.0).reshape(8, 3) % 7
Y = np.arange(8) % 2
WEIGHTS = np.ones(8)


def with_entry(array, value):
    array = array.copy()
    array.flat[0] = value
    return array


INPUTS = {
    "nan": with_entry(X, np.nan),
    "inf": with_entry(X, np.inf),
    "sparse nan": scipy.sparse.csr_array(with_entry(X, np.nan)),
    "a vector": X[:, 0],
    "three axes": X[None],
    "fewer rows than labels": X[:7],
    "no rows": X[:0],
    "no columns": X[:, :0],
    "strings": np.full((8, 3), "a"),
    "complex": X + 1j,
}
LABELS = {
    "none": None,
    "nan": np.where(Y, np.nan, 0.0),
    "continuous": Y + np.linspace(0, 0.9, 8),
    "two columns": np.eye(2)[Y],
    "more than rows": np.append(Y, 0),
    "one class": np.zeros(8, int),
    "one class, a string": np.full(8, "a"),
}
SAMPLE_WEIGHTS = {
    "all zero": (0 * WEIGHTS, "sample_weight, class_weight: expected weights that are not all zero"),
    "zero": (0, "sample_weight, class_weight: expected weights that are not all zero"),
    "nan": (with_entry(WEIGHTS, np.nan), "Input sample_weight contains NaN."),
    "inf": (with_entry(WEIGHTS, np.inf), "Input sample_weight contains infinity or a value too large"),
    "too few": (WEIGHTS[:3], r"sample_weight: expected one number for each of 8 rows; got shape \(3,\)"),
    "two columns": (np.ones((8, 2)), r"sample_weight: .*got shape \(8, 2\)"),
    "three axes": (np.ones((8, 2, 2)), "sample_weight: .*got shape"),
    "negative": (with_entry(WEIGHTS, -1.0), "sample_weight: expected no negative numbers; got -1.0"),
    "a negative number": (-2, "sample_weight: expected no negative numbers; got -2.0"),
}
PARAMETERS = [
    ({"C": -1.0}, "a number above 0; got -1.0"),
    ({"C": 0}, "a number above 0; got 0"),
    ({"C": np.nan}, "a number above 0; got nan"),
    ({"C": "1"}, "a number above 0; got '1'"),
    ({"l2": -1.0}, "a number from 0 on, not inf, or None; got -1.0"),
    ({"l2": np.nan}, "a number from 0 on, not inf, or None; got nan"),
    ({"l2": np.inf}, "a number from 0 on, not inf, or None; got inf"),
    ({"l2": "1"}, "a number from 0 on, not inf, or None; got '1'"),
    ({"C": 10**400}, "a number above 0; got 10+"),
    ({"tol": -1e-3}, "a number from 0 on; got -0.001"),
    ({"max_iter": -1}, "a whole number from 0 on; got -1"),
    ({"max_iter": 1.5}, "a whole number from 0 on; got 1.5"),
    ({"fit_intercept": "yes"}, "True or False; got 'yes'"),
    ({"warm_start": 1}, "True or False; got 1"),
    ({"class_weight": "even"}, "a dict, 'balanced' or None; got 'even'"),
    ({"class_weight": [1.0, 2.0]}, r"a dict, 'balanced' or None; got \[1.0, 2.0\]"),
    ({"random_state": "seed"}, "a whole number from 0 to .*; got 'seed'"),
    ({"random_state": -1}, "a whole number from 0 to .*; got -1"),
    ({"solver": "lbfgs"}, "'auto' or 'mm'; got 'lbfgs'"),
    ({"solver": 3}, "'auto' or 'mm'; got 3"),
    ({"verbose": -1}, "True, False or a whole number from 0 on; got -1"),
    ({"verbose": "much"}, "True, False or a whole number from 0 on; got 'much'"),
]
ACCEPTED = [
    ("C", np.inf), ("C", np.float32(2)), ("C", True), ("l2", 0), ("tol", 1), ("max_iter", np.int64(50)),
    ("fit_intercept", np.bool_(True)), ("verbose", False), ("random_state", np.int32(3)),
    ("random_state", np.random.RandomState(0)), ("class_weight", {0: 1, 1: 2}),
]  # fmt: skip


def message_of(call):
    """The type of the error and what it says."""
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    return type(caught.value), str(caught.value)


def assert_same_error(call):
    """Of the call with either class; both have one name."""
    assert message_of(lambda: call(LogisticRegression)) == message_of(lambda: call(Theirs))


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_bad_inputs_have_the_errors_of_scikit_learn(inputs):
    assert_same_error(lambda estimator: estimator().fit(inputs, Y))


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_bad_labels_have_the_errors_of_scikit_learn(labels):
    assert_same_error(lambda estimator: estimator().fit(X, labels))


def test_bad_inputs_of_float32_are_called_so():
    """scikit-learn's own estimator may fit float64 instead."""
    with pytest.raises(ValueError, match="Input X contains infinity or a value too large for dtype\\('float32'\\)"):
        LogisticRegression().fit(with_entry(X.astype(np.float32), np.inf), Y)


@pytest.mark.parametrize(("weights", "message"), SAMPLE_WEIGHTS.values(), ids=SAMPLE_WEIGHTS)
def test_bad_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        LogisticRegression().fit(X, Y, weights)
    if "zero" not in message:  # a part of a stream may count nothing
        with pytest.raises(ValueError, match=f"^{message}"):
            LogisticRegression().partial_fit(X, Y, [0, 1], weights)


@pytest.mark.parametrize(("parameters", "message"), PARAMETERS, ids=str)
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_bad_parameter_is_named(parameters, message, method):
    (name,) = parameters
    with pytest.raises(ValueError, match=f"^{name}: expected {message}$"):
        getattr(LogisticRegression(**parameters), method)(X, Y)


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_parameters_may_be_of_any_type_of_number(name, value):
    LogisticRegression(**{"max_iter": 200, "tol": 1e-2, "l2": 0.1, name: value}).fit(X, Y)


def test_class_weight_of_an_unknown_class_has_the_error_of_scikit_learn():
    assert_same_error(lambda estimator: estimator(class_weight={5: 1.0}).fit(X, Y))


def test_subclass_may_have_fewer_parameters():
    class Weak(LogisticRegression):
        def __init__(self, C=0.01):
            super().__init__(C)

    assert Weak().fit(X, Y).converged_
    with pytest.raises(ValueError, match="C: expected a number above 0; got -1"):
        Weak(-1).fit(X, Y)


def test_parameters_are_checked_by_fit_and_not_before():
    assert LogisticRegression(C=-1.0, tol=-1.0, solver="none").get_params()["C"] == -1.0


def test_parameters_but_the_first_go_by_name():
    with pytest.raises(TypeError, match="positional arguments"):
        LogisticRegression(1.0, 0.1)


@pytest.mark.parametrize(
    "class_weight", [{0: 0.0, 1: 0.0}, {0: -1.0, 1: 1.0}, {0: -1.0, 1: 3.0}, {0: np.inf, 1: 1.0}, {0: np.nan}], ids=str
)
def test_classes_whose_weights_cannot_be_are_refused(class_weight):
    with pytest.raises(ValueError, match="weight"):
        LogisticRegression(class_weight=class_weight).fit(X, Y)


METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function")


@pytest.fixture(scope="module")
def models():
    return {LogisticRegression: ours(X, Y), Theirs: theirs(X, Y)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "inputs",
    [X[:, :2], np.tile(X, 2), X[0], X[:0], with_entry(X, np.nan), with_entry(X, np.inf)],
    ids=["fewer columns", "more columns", "a vector", "no rows", "nan", "inf"],
)
def test_bad_inputs_to_predict_have_the_errors_of_scikit_learn(models, method, inputs):
    assert_same_error(lambda estimator: getattr(models[estimator], method)(inputs))


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_predicted_without_a_fit(method):
    assert_same_error(lambda estimator: getattr(estimator(), method)(X))
    with pytest.raises(NotFittedError):
        getattr(LogisticRegression(), method)(X)
