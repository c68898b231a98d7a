"""Fits equal to scikit-learn's, and what else the estimator promises."""

import functools
import pickle
import warnings

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from qbound import estimator
from qbound.estimator import LogisticRegression
from qbound.fitting.phases import Schedule, minimise
from tests import reference
from tests.estimator.problems import TOLERANCE, as_linear_model, assert_same, both, data_set, ours, theirs

DATA_SETS = ("iris", "iris raw", "wine", "wine raw", "digits", "breast_cancer")


@pytest.fixture(scope="module")
def iris():
    return data_set("iris")


@pytest.fixture(scope="module")
def fitted(iris):
    return ours(*iris)


@pytest.fixture
def compiled():
    """What is compiled from here on: a list that grows."""
    programs = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(kwargs.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield programs
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("name", DATA_SETS)
def test_fit_is_that_of_scikit_learn(name):
    inputs, labels = data_set(name)
    found, expected = both(inputs, labels)
    assert found.converged_
    assert_same(found, expected, inputs)


@pytest.mark.parametrize("intercept", [True, False], ids=["intercept", "none"])
@pytest.mark.parametrize("name", ["iris", "breast_cancer"])
@pytest.mark.parametrize("c", [1e-3, 0.1, 50.0])
def test_fit_is_that_of_scikit_learn_with_any_penalty(name, c, intercept):
    inputs, labels = data_set(name)
    found, expected = both(inputs, labels, C=c, fit_intercept=intercept)
    assert_same(found, expected, inputs)
    assert np.any(found.intercept_) == intercept


def weights_of(labels, seed=0):
    """Of which some are 0."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0.1, 5, len(labels)) * (rng.random(len(labels)) < 0.9)


@pytest.mark.parametrize("class_weight", [None, "balanced", {0: 0.2, 1: 3.0}], ids=str)
@pytest.mark.parametrize("name", ["iris", "breast_cancer"])
def test_weights_count_as_in_scikit_learn(name, class_weight):
    inputs, labels = data_set(name)
    weights = weights_of(labels)
    found, expected = both(inputs, labels, weights, class_weight=class_weight)
    assert_same(found, expected, inputs)
    # And count at all.
    assert np.max(np.abs(found.coef_ - ours(inputs, labels).coef_)) > 1e-2


@pytest.mark.parametrize("container", [np.asarray, scipy.sparse.csr_array], ids=["dense", "sparse"])
@pytest.mark.parametrize("classes", [3, 70])
def test_rows_of_no_weight_may_have_inputs_of_any_size(container, classes):
    """Their logits overflow, and their squares."""
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(300, 4)).astype(np.float32), np.arange(300) % classes
    inputs += rng.normal(size=(classes, 4))[labels].astype(np.float32)
    weights = np.where(np.arange(300) % 7 == 0, 0, 1)
    fits = []
    for size in (0, 3e38):
        x = np.where(weights[:, None] == 0, np.float32(size), inputs)
        before = x.copy()
        fits.append(LogisticRegression(random_state=0).fit(container(x), labels, weights))
        np.testing.assert_array_equal(x, before)
    assert fits[1].converged_
    np.testing.assert_allclose(fits[1].coef_, fits[0].coef_, atol=1e-5)


@pytest.mark.parametrize("c", [0.1, 10.0])
def test_l2_stands_for_an_inverse_penalty_of_the_sum(iris, c):
    inputs, labels = iris
    weights = weights_of(labels)
    expected = ours(inputs, labels, weights, C=c)
    found = ours(inputs, labels, weights, l2=1 / (c * weights.sum()), C=123.0)
    np.testing.assert_allclose(found.coef_, expected.coef_, atol=1e-7)


@pytest.mark.parametrize("container", [scipy.sparse.csr_matrix, scipy.sparse.csc_array, scipy.sparse.coo_array])
@pytest.mark.parametrize("name", ["iris raw", "breast_cancer"])
def test_sparse_inputs_give_the_fit_of_dense_ones(name, container):
    inputs, labels = data_set(name)
    inputs = np.where(np.abs(inputs) > 0.5, inputs, 0)
    found, expected = ours(container(inputs), labels), theirs(inputs, labels)
    assert_same(found, expected, inputs)
    np.testing.assert_allclose(found.predict_proba(container(inputs)), expected.predict_proba(inputs), atol=1e-5)


def test_sparse_inputs_may_have_wide_indices(iris):
    """As they have when made from places that NumPy computed."""
    inputs, labels = iris
    rows, columns = np.nonzero(inputs)
    wide = scipy.sparse.csr_array((inputs[rows, columns], (rows.astype(np.int64), columns.astype(np.int64))))
    wide.indices, wide.indptr = wide.indices.astype(np.int64), wide.indptr.astype(np.int64)
    found, expected = ours(wide, labels), theirs(wide, labels, solver="lbfgs", tol=1e-9)
    np.testing.assert_allclose(found.coef_, expected.coef_, atol=1e-5)


def test_coefficients_can_be_made_sparse(iris, fitted):
    inputs, _ = iris
    model = pickle.loads(pickle.dumps(fitted)).sparsify()
    assert scipy.sparse.issparse(model.coef_)
    np.testing.assert_allclose(model.predict_proba(inputs), fitted.predict_proba(inputs), rtol=1e-12)


@pytest.mark.parametrize("name", ["iris", "breast_cancer"])
def test_float32_inputs_give_float32_coefficients(name):
    inputs, labels = data_set(name)
    found, expected = ours(inputs.astype(np.float32), labels, tol=1e-5), ours(inputs, labels)
    assert found.coef_.dtype == found.intercept_.dtype == found.predict_proba(inputs.astype(np.float32)).dtype
    assert found.coef_.dtype == np.float32 and expected.coef_.dtype == np.float64
    np.testing.assert_allclose(found.coef_, expected.coef_, atol=2e-2)
    np.testing.assert_allclose(found.predict_proba(inputs), expected.predict_proba(inputs), atol=2e-3)


@pytest.mark.parametrize("enabled", [True, False])
def test_fit_leaves_the_precision_of_the_program_as_it_was(iris, fitted, enabled):
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", enabled)
    try:
        model = ours(*iris)
        assert jax.config.read("jax_enable_x64") == enabled
        assert jnp.zeros(1).dtype == (np.float64 if enabled else np.float32)
    finally:
        jax.config.update("jax_enable_x64", before)
    assert model.coef_.dtype == np.float64
    np.testing.assert_allclose(model.coef_, fitted.coef_, atol=1e-7)


@pytest.mark.parametrize("dtype", [str, object])
@pytest.mark.parametrize("names", [["a", "b", "c"], ["z", "a", "m"]], ids=["in order", "not in order"])
def test_labels_may_be_strings(iris, fitted, names, dtype):
    inputs, labels = iris
    model = ours(inputs, np.array(names, dtype)[labels])
    order = np.argsort(names)
    np.testing.assert_array_equal(model.classes_, sorted(names))
    np.testing.assert_array_equal(model.predict(inputs), np.array(names)[fitted.predict(inputs)])
    np.testing.assert_allclose(model.coef_, fitted.coef_[order], atol=1e-7)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_have_names_of_columns(iris, fitted, library):
    frames = pytest.importorskip(library)
    inputs, labels = iris
    names = ["sepal length", "sepal width", "petal length", "petal width"]
    frame = frames.DataFrame({name: column for name, column in zip(names, inputs.T, strict=True)})
    if not hasattr(StandardScaler().fit(frame), "feature_names_in_"):
        pytest.skip(f"this scikit-learn finds no names in frames of this {library}")
    model = ours(frame, frames.Series(labels))
    np.testing.assert_array_equal(model.feature_names_in_, names)
    np.testing.assert_allclose(model.coef_, fitted.coef_, atol=1e-7)
    np.testing.assert_allclose(model.predict_proba(frame), fitted.predict_proba(inputs), atol=1e-7)
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[names[::-1]])
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        model.predict(inputs)


def test_order_of_rows_does_not_matter(iris, fitted):
    inputs, labels = iris
    places = np.random.default_rng(0).permutation(len(labels))
    model = ours(inputs[places], labels[places])
    np.testing.assert_allclose(model.coef_, fitted.coef_, atol=1e-7)


def test_two_rows_of_half_the_weight_are_one(iris):
    inputs, labels = iris
    weights = weights_of(labels)
    expected = ours(inputs, labels, weights)
    twice = [np.concatenate([array, array]) for array in (inputs, labels, weights / 2)]
    found = ours(*twice)
    np.testing.assert_allclose(found.coef_, expected.coef_, atol=1e-7)


def separable(rows=150, columns=4):
    rng = np.random.default_rng(0)
    labels = np.arange(rows) % 3
    inputs = rng.normal(size=(rows, columns))
    inputs[:, :3] += 20 * np.eye(3)[labels]
    return inputs, labels


def test_separable_data_have_a_fit():
    inputs, labels = separable()
    found, expected = both(inputs, labels)
    assert found.converged_ and found.score(inputs, labels) == 1
    assert_same(found, expected, inputs)


def test_separable_data_without_a_penalty_give_finite_coefficients():
    """The objective has no minimum, and yet a gradient below any tolerance."""
    inputs, labels = separable()
    model = ours(inputs, labels, C=np.inf, tol=1e-6)
    assert model.converged_ and model.score(inputs, labels) == 1
    assert np.all(np.isfinite(model.coef_))
    assert np.all(np.diff(model.history_["objective"]) < 0)


def test_constant_columns_have_no_coefficient(iris):
    """The intercept does the same without a penalty."""
    inputs, labels = iris
    inputs = np.stack([np.ones(150), inputs[:, 2], np.zeros(150), np.full(150, 1e3)], axis=1)
    found, expected = both(inputs, labels)
    assert_same(found, expected, inputs)
    np.testing.assert_allclose(found.coef_[:, [0, 2, 3]], 0, atol=1e-6)
    assert found.score(inputs, labels) > 0.9


def test_hundred_labels_are_fitted():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(1000, 8))
    labels = np.argmax(inputs @ rng.normal(size=(8, 100)) + rng.gumbel(size=(1000, 100)), axis=1)
    labels[:100] = np.arange(100)
    found, expected = ours(inputs, labels), theirs(inputs, labels, solver="lbfgs", tol=1e-8)
    assert found.coef_.shape == (100, 8)
    np.testing.assert_allclose(found.predict_proba(inputs), expected.predict_proba(inputs), atol=1e-5)

    def objective(model):
        data, params = as_linear_model(model, inputs, labels, 1e-3)
        return reference.linear_model(*data, params)[0]

    assert objective(found) <= objective(expected) + 1e-12


@pytest.mark.parametrize("labels_count", [2, 3])
def test_columns_of_all_sizes_are_fitted(iris, labels_count):
    inputs, labels = iris
    inputs, labels = inputs * np.array([1e-6, 1e6, 1e-3, 1e3]), np.minimum(labels, labels_count - 1)
    found = ours(inputs, labels, tol=1e-6)
    assert found.converged_
    l2 = 1 / len(labels)
    data, params = as_linear_model(found, inputs, labels, l2)
    best = reference.linear_optimum(*data, labels_count)
    objective, gradient, _ = reference.linear_model(*data, params)
    assert np.max(np.abs(gradient)) <= 1.01e-6
    assert objective <= reference.linear_model(*data, best)[0] + 1e-8


@pytest.mark.parametrize("labels_count", [2, 3])
def test_fit_without_a_penalty_is_that_of_scikit_learn(labels_count):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(150, 4))
    labels = np.argmax(inputs[:, :labels_count] + rng.gumbel(size=(150, labels_count)), axis=1)
    found, expected = both(inputs, labels, C=np.inf)
    assert_same(found, expected, inputs)
    zero = ours(inputs, labels, l2=0.0)
    np.testing.assert_array_equal(zero.coef_, found.coef_)


@pytest.mark.parametrize("name", ["iris", "breast_cancer"])
def test_warm_start_takes_fewer_steps_to_the_same_optimum(name):
    inputs, labels = data_set(name)
    model = LogisticRegression(warm_start=True, tol=TOLERANCE).fit(inputs, labels)
    cold = model.n_iter_[0]
    expected = ours(inputs, labels, C=1.1)
    first = model.coef_
    model.set_params(C=1.1).fit(inputs, labels)
    assert 0 < model.n_iter_[0] < expected.n_iter_[0] and cold > 0
    assert np.max(np.abs(first - model.coef_)) > 1e-4
    np.testing.assert_allclose(model.coef_, expected.coef_, atol=1e-6)
    model.fit(inputs, labels)
    assert model.n_iter_[0] == 0 and model.converged_


def test_warm_start_with_other_columns_starts_anew(iris):
    inputs, labels = iris
    model = LogisticRegression(warm_start=True, tol=TOLERANCE).fit(inputs[:, :3], labels)
    model.fit(inputs, labels)
    np.testing.assert_array_equal(model.coef_, ours(inputs, labels).coef_)


def test_cold_start_forgets_the_last_fit(iris, fitted):
    model = ours(*iris)
    steps = model.n_iter_[0]
    model.fit(*iris)
    assert model.n_iter_[0] == steps
    np.testing.assert_array_equal(model.coef_, fitted.coef_)


def test_warning_says_how_far_a_fit_got(iris):
    inputs, labels = iris
    with pytest.warns(ConvergenceWarning) as caught:
        model = ours(inputs, labels, max_iter=2)
    assert not model.converged_ and model.n_iter_[0] == 2
    (message,) = (str(warning.message) for warning in caught)
    gradient, objective = model.history_["gradient"][-1], model.history_["objective"][-1]
    assert f"gradient is {gradient:.3g} after 2 iterations" in message
    assert f"tol={TOLERANCE:g}" in message and f"objective of {objective:.6g}" in message
    assert "Increase max_iter=2" in message


def test_warning_advises_float64_where_float32_has_no_more_digits(iris):
    inputs, labels = iris
    with pytest.warns(ConvergenceWarning, match="rounding errors of float32 .* fit float64"):
        ours(inputs.astype(np.float32), labels, tol=0.0)
    with pytest.warns(ConvergenceWarning, match="rounding errors of float64 leave no more: increase tol, or"):
        ours(inputs, labels, tol=0.0)


def test_no_step_leaves_the_start(iris):
    with pytest.warns(ConvergenceWarning, match="after 0 iterations"):
        model = ours(*iris, max_iter=0)
    assert not np.any(model.coef_)
    np.testing.assert_allclose(model.predict_proba(iris[0]), 1 / 3)


def test_clone_has_the_parameters_and_not_the_fit(fitted):
    copy = clone(fitted)
    assert copy.get_params() == fitted.get_params()
    assert not hasattr(copy, "coef_")
    with pytest.raises(NotFittedError):
        copy.predict(np.zeros((1, 4)))


def test_pickle_keeps_the_fit(iris, fitted):
    copy = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copy.predict_proba(iris[0]), fitted.predict_proba(iris[0]))
    np.testing.assert_array_equal(copy.history_["objective"], fitted.history_["objective"])
    # No array of a device, which another process may not have.
    assert not any(isinstance(value, jax.Array) for value in vars(fitted).values())


def test_pipeline_grid_search_and_cross_validation_take_it(compiled):
    inputs, labels = data_set("iris raw")
    model = make_pipeline(StandardScaler(), LogisticRegression(tol=1e-6))
    search = GridSearchCV(model, {"logisticregression__C": [1e-4, 1.0]}, cv=3).fit(inputs, labels)
    assert search.best_params_ == {"logisticregression__C": 1.0}
    assert search.best_score_ > 0.9
    before = len(compiled)
    scores = cross_val_score(model, inputs, labels, cv=3)
    assert np.mean(scores) > 0.9
    # The folds have one padded size between them.
    assert len(compiled) == before


def test_history_tells_of_every_step(iris, fitted):
    history = fitted.history_
    keys = {"phase", "objective", "gradient", "seconds", "certified_decrease", "cg_steps"}
    assert set(history) == keys
    (steps,) = fitted.n_iter_
    assert all(column.shape == (steps + 1,) for column in history.values())
    assert list(history["phase"]) == ["start"] + steps * ["mm"]
    assert history["objective"][0] == pytest.approx(np.log(3))
    falls = -np.diff(history["objective"])
    assert np.all(falls >= history["certified_decrease"][1:] - 1e-14) and np.all(falls >= 0)
    assert history["gradient"][-1] <= TOLERANCE < history["gradient"][-2]
    data, params = as_linear_model(fitted, *iris, 1 / 150)
    objective, gradient, _ = reference.linear_model(*data, params)
    assert history["objective"][-1] == pytest.approx(objective, rel=1e-12)
    assert np.max(np.abs(gradient)) <= 1.01 * TOLERANCE


@pytest.fixture
def small_batches(monkeypatch):
    """A first phase for few examples."""
    schedule = Schedule(dense_parameters=0, min_batches=5, batch_size=30, large_pass=0.0)
    monkeypatch.setattr(estimator, "minimise", functools.partial(minimise, schedule=schedule))
    return schedule.epochs


def test_large_data_have_a_first_phase(iris, fitted, small_batches):
    inputs, labels = iris
    model = ours(inputs, labels, random_state=0)
    phases = list(model.history_["phase"])
    more = phases.count("quasi_newton")
    assert phases == ["start", "stochastic"] + more * ["quasi_newton"]
    assert more > 0
    assert model.n_iter_[0] >= small_batches + more
    assert np.all(np.diff(model.history_["objective"]) < 0)
    np.testing.assert_allclose(model.coef_, fitted.coef_, atol=1e-6)


def test_random_state_repeats_a_fit_and_mm_needs_none(iris, small_batches):
    inputs, labels = iris

    def objectives(**kwargs):
        return list(ours(inputs, labels, **kwargs).history_["objective"])

    assert objectives(random_state=0) == objectives(random_state=0) != objectives(random_state=1)
    certified = ours(inputs, labels, solver="mm", random_state=0)
    assert "stochastic" not in certified.history_["phase"]
    assert objectives(solver="mm", random_state=1) == list(certified.history_["objective"])


def test_progress_is_shown_when_wanted(iris, capsys):
    ours(*iris)
    silent = capsys.readouterr()
    assert silent.out == silent.err == ""
    model = ours(*iris, verbose=1)
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.strip().split("\r")
    assert len(lines) == len(model.history_["phase"])
    assert "start" in lines[0] and "mm" in lines[-1]
    assert f"objective {model.history_['objective'][-1]:.6f}" in lines[-1]
    assert lines[0].count("#") == 0 and lines[-1].count(".", 0, lines[-1].index("]")) == 0
    assert shown.err.endswith("\n")


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_second_fit_compiles_nothing(iris, compiled, kind):
    inputs, labels = iris
    inputs = inputs if kind == "dense" else scipy.sparse.csr_array(inputs)
    LogisticRegression(tol=1e-6).fit(inputs, labels)
    before = len(compiled)
    LogisticRegression(tol=1e-7, C=3.0).fit(inputs, labels[::-1], weights_of(labels))
    assert compiled[before:] == []


def test_another_number_of_rows_compiles_nothing(iris, compiled):
    inputs, labels = iris
    LogisticRegression(tol=1e-6).fit(inputs, labels)
    before = len(compiled)
    for rows in (130, 144, 149):
        model = LogisticRegression(tol=TOLERANCE).fit(inputs[:rows], labels[:rows])
        np.testing.assert_allclose(model.coef_, theirs(inputs[:rows], labels[:rows]).coef_, atol=1e-5)
    assert compiled[before:] == []
    # That nothing is counted is not for want of listening.
    jax.jit(lambda x: x + 1)(jnp.zeros(3))
    assert len(compiled) > before


@pytest.mark.parametrize("labels_count", [2, 3])
def test_logarithms_of_probabilities_are_finite_where_those_underflow(iris, labels_count):
    inputs, labels = iris
    labels = np.minimum(labels, labels_count - 1)
    model = ours(inputs, labels)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(inputs)), model.predict_proba(inputs), rtol=1e-9)
    far = 1e5 * inputs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p, log_p = model.predict_proba(far), model.predict_log_proba(far)
    assert np.any(p == 0) and np.all(np.isfinite(log_p))
    np.testing.assert_allclose(p.sum(1), 1)
    scores = model.decision_function(far)
    scores = np.stack([0 * scores, scores], axis=1) if labels_count == 2 else scores
    np.testing.assert_allclose(log_p, [h - reference.log_sum_exp(h) for h in scores], rtol=1e-9, atol=1e-300)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    labels_count=st.sampled_from([2, 3]),
    log_c=st.floats(-3, 3),
    spread=st.floats(0, 3),
    noise=st.sampled_from([0.0, 0.3, 3.0]),
)
def test_objective_is_as_low_as_the_tolerance_allows(seed, labels_count, log_c, spread, noise):
    """A gradient g leaves about g'H^-1 g/2 to the optimum; twice that is allowed."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(40, 4)) * 10 ** rng.uniform(-spread, spread, 4)
    truth = rng.normal(size=(4, labels_count)) / inputs.std(0)[:, None]
    labels = np.argmax(inputs @ truth + noise * rng.gumbel(size=(40, labels_count)), axis=1)
    labels[:labels_count] = np.arange(labels_count)
    weights = rng.uniform(0.1, 3, 40)
    model = LogisticRegression(C=10**log_c, tol=1e-5).fit(inputs, labels, weights)
    data, params = as_linear_model(model, inputs, labels, 1 / (10**log_c * weights.sum()), weights)
    best = reference.linear_model(*data, reference.linear_optimum(*data, labels_count))[0]
    objective, gradient, matrix = reference.linear_model(*data, params)
    assert np.max(np.abs(gradient)) <= 1.001e-5
    left = gradient.ravel() @ np.linalg.pinv(matrix, rcond=1e-14) @ gradient.ravel() / 2
    assert best - 1e-12 <= objective <= best + 2 * left + 1e-12
