"""A fit that is interrupted, or fails, leaves the estimator as it was: with its last model, whole, or without one."""

import contextlib
import inspect
import pickle
import signal
import threading

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import has_fit_parameter

import qbound.estimator as estimator_module
from qbound.estimator import LogisticRegression

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
Y = np.array(["a", "b", "c"])[np.arange(40) % 3]
OTHER_X, OTHER_Y = RNG.normal(size=(50, 5)), np.arange(50) % 4
METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function")


class Interrupted(LogisticRegression):
    """By Ctrl-C, just before the n-th attribute is set or method of its own is called."""

    countdown = [None]

    def __getattribute__(self, name):
        Interrupted.tick(name.startswith("_") and not name.startswith("__"))
        return super().__getattribute__(name)

    def __setattr__(self, name, value):
        Interrupted.tick(True)
        super().__setattr__(name, value)

    @classmethod
    def tick(cls, counts):
        if counts and cls.countdown[0] is not None:
            cls.countdown[0] -= 1
            if cls.countdown[0] < 0:
                cls.countdown[0] = None
                raise KeyboardInterrupt

    @classmethod
    @contextlib.contextmanager
    def after(cls, count):
        cls.countdown[0] = count
        try:
            yield
        finally:
            cls.countdown[0] = None


def refit(model):
    return model.fit(OTHER_X, OTHER_Y)


def continued(model):
    return model.partial_fit(X[:20], Y[:20])


def first_part(model):
    return model.partial_fit(X, Y, classes=["a", "b", "c"])


CHANGES = {
    "a refit": (lambda model: model.fit(X, Y), refit),
    "a refit of a stream": (first_part, refit),
    "a stream": (first_part, continued),
    "a stream after a fit": (lambda model: model.fit(X, Y), continued),
    "a first fit": (lambda model: model, refit),
    "a first part": (lambda model: model, first_part),
}


def state(model):
    return pickle.dumps(model.__dict__)


@pytest.mark.parametrize("name", CHANGES)
def test_interruption_anywhere_leaves_the_model_as_it_was(name):
    start, change = CHANGES[name]
    model = start(Interrupted(max_iter=3, tol=0.5, random_state=0))
    before, interruptions = state(model), 0
    while interruptions < 200:
        try:
            with Interrupted.after(interruptions):
                change(model)
        except KeyboardInterrupt:
            interruptions += 1
            assert state(model) == before, f"interruption {interruptions}"
            if not hasattr(model, "coef_"):
                for method in METHODS:
                    with pytest.raises(NotFittedError):
                        getattr(model, method)(X)
        else:
            break
    assert 5 < interruptions < 200
    assert state(model) != before
    assert model.predict(OTHER_X if change is refit else X).shape


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.fit(OTHER_X, np.zeros(50)),
        lambda model: model.fit(OTHER_X, OTHER_Y, np.zeros(50)),
        lambda model: model.set_params(l2=1e300).fit(OTHER_X.astype(np.float32), OTHER_Y),
        lambda model: model.partial_fit(X, Y, sample_weight=-np.ones(40)),
        lambda model: model.partial_fit(X, np.where(Y == "a", "d", Y)),
    ],
    ids=["one class", "no weight", "penalty", "negative weight", "unknown class"],
)
def test_error_leaves_the_model_as_it_was(change):
    model = LogisticRegression(l2=0.1).fit(X, Y)
    before = model.predict_proba(X)
    fields = set(model.__dict__)
    with pytest.raises(ValueError):
        change(model)
    assert set(model.__dict__) == fields and model.n_features_in_ == 3
    np.testing.assert_array_equal(model.predict_proba(X), before)


def test_error_of_a_first_part_leaves_no_classes_behind():
    model = LogisticRegression()
    with pytest.raises(ValueError, match="y: expected labels in classes"):
        model.partial_fit(X, Y, classes=["a", "b"])
    assert model.partial_fit(X, Y, classes=["a", "b", "c"]).classes_.tolist() == ["a", "b", "c"]


def test_signal_in_the_middle_of_a_refit_leaves_the_old_model(monkeypatch):
    """The real thing, while the solver runs."""
    model = LogisticRegression(l2=0.1).fit(X, Y)
    before = model.predict_proba(X)
    real = estimator_module.minimise

    def interrupted(*arguments, **options):
        result = real(*arguments, **options)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(estimator_module, "minimise", interrupted)
    # A shell lets what it runs in the background ignore Ctrl-C.
    before_test = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            refit(model)
    finally:
        signal.signal(signal.SIGINT, before_test)
    np.testing.assert_array_equal(model.predict_proba(X), before)
    assert model.classes_.tolist() == ["a", "b", "c"]


def test_other_threads_predict_with_the_last_model_while_a_fit_runs(monkeypatch):
    model = LogisticRegression(l2=0.1).fit(X, Y)
    before, seen = model.predict_proba(X), []
    real = estimator_module.minimise

    def watched(*arguments, **options):
        thread = threading.Thread(target=lambda: seen.append(model.predict_proba(X)))
        thread.start()
        thread.join()
        return real(*arguments, **options)

    monkeypatch.setattr(estimator_module, "minimise", watched)
    assert refit(model) is model
    np.testing.assert_array_equal(seen[0], before)
    assert model.predict_proba(OTHER_X).shape == (50, 4)


def test_methods_keep_their_signatures():
    assert has_fit_parameter(LogisticRegression(), "sample_weight")
    assert list(inspect.signature(LogisticRegression.fit).parameters) == ["self", "X", "y", "sample_weight"]
    assert "classes" in inspect.signature(LogisticRegression().partial_fit).parameters
    assert "Fit the model." in (LogisticRegression.fit.__doc__ or "")
