"""What cannot be fitted or predicted: scikit-learn's errors, in its own words."""

import numpy as np
import pytest
import scipy.sparse
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression as Theirs
from sklearn.utils._param_validation import InvalidParameterError

from qbound.estimator import LogisticRegression

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
    "too large for float32": with_entry(X.astype(np.float32), np.inf),
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
    {"C": -1.0},
    {"C": 0},
    {"C": np.nan},
    {"C": "1"},
    {"tol": -1e-3},
    {"max_iter": -1},
    {"max_iter": 1.5},
    {"fit_intercept": "yes"},
    {"warm_start": "yes"},
    {"class_weight": "even"},
    {"class_weight": {5: 1.0}},
    {"random_state": "seed"},
    {"verbose": -1},
]


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


@pytest.mark.parametrize(("weights", "message"), SAMPLE_WEIGHTS.values(), ids=SAMPLE_WEIGHTS)
def test_bad_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        LogisticRegression().fit(X, Y, weights)
    if "zero" not in message:  # a part of a stream may count nothing
        with pytest.raises(ValueError, match=f"^{message}"):
            LogisticRegression().partial_fit(X, Y, [0, 1], weights)


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_bad_parameters_have_the_errors_of_scikit_learn(parameters):
    assert_same_error(lambda estimator: estimator(**parameters).fit(X, Y))


def test_parameters_are_checked_by_fit_and_not_before():
    assert LogisticRegression(C=-1.0, tol=-1.0, solver="none").get_params()["C"] == -1.0


def test_parameters_but_the_first_go_by_name():
    with pytest.raises(TypeError, match="positional arguments"):
        LogisticRegression(1.0, 0.1)


@pytest.mark.parametrize("solver", ["lbfgs", "none", 3])
def test_unknown_solver_is_told_those_there_are(solver):
    with pytest.raises(InvalidParameterError) as caught:
        LogisticRegression(solver=solver).fit(X, Y)
    message = str(caught.value)
    assert message.startswith("The 'solver' parameter of LogisticRegression must be a str among {")
    assert "'auto'" in message and "'mm'" in message and message.endswith(f"Got {solver!r} instead.")


@pytest.mark.parametrize("l2", [-1.0, np.nan, "1"])
def test_l2_is_a_number_from_zero_on(l2):
    message = r"The 'l2' parameter of LogisticRegression must be a float in the range \[0.0, inf\) or None"
    with pytest.raises(InvalidParameterError, match=message):
        LogisticRegression(l2=l2).fit(X, Y)


@pytest.mark.parametrize(
    "class_weight", [{0: 0.0, 1: 0.0}, {0: -1.0, 1: 1.0}, {0: -1.0, 1: 3.0}, {0: np.inf, 1: 1.0}, {0: np.nan}], ids=str
)
def test_classes_whose_weights_cannot_be_are_refused(class_weight):
    with pytest.raises(ValueError, match="weight"):
        LogisticRegression(class_weight=class_weight).fit(X, Y)


METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function")


@pytest.fixture(scope="module")
def models():
    return {estimator: estimator().fit(X, Y) for estimator in (LogisticRegression, Theirs)}


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
