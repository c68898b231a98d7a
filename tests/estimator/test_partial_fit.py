"""Streams: one part of the data after the other, none of them kept."""

import functools
import pickle

import numpy as np
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.datasets import load_digits

from qbound import estimator
from qbound.estimator import LogisticRegression
from qbound.fitting.moments import Sketch
from qbound.fitting.stream import first_stream

PARTS, SIZE = 5, 320
L2 = 1e-3


@pytest.fixture(scope="module")
def digits():
    inputs, labels = load_digits(return_X_y=True)
    return inputs[: PARTS * SIZE] / 16, labels[: PARTS * SIZE]


def streamed(model, inputs, labels, passes, **arguments):
    for _ in range(passes):
        for start in range(0, len(labels), SIZE):
            part = slice(start, start + SIZE)
            model.partial_fit(inputs[part], labels[part], classes=np.arange(10), **arguments)
    return model


@pytest.fixture
def use_matrix_up_to(monkeypatch):
    """Makes streams keep second moments as a matrix up to a number of columns, and as a sketch beyond."""

    def use(limit):
        monkeypatch.setattr(estimator, "first_stream", functools.partial(first_stream, matrix_limit=limit))

    return use


def objective(model, inputs, labels):
    loss = -np.mean(model.predict_log_proba(inputs)[np.arange(len(labels)), labels])
    return loss + L2 / 2 * np.sum(model.coef_**2)


@pytest.fixture(scope="module")
def model(digits):
    return streamed(LogisticRegression(l2=L2, random_state=0), *digits, passes=20)


def test_stream_comes_near_the_optimum(digits, model):
    exact = LogisticRegression(l2=L2, tol=1e-6).fit(*digits)
    gap = objective(model, *digits) / objective(exact, *digits) - 1
    assert 0 < gap < 0.1
    early = streamed(LogisticRegression(l2=L2, random_state=0), *digits, passes=1)
    assert objective(early, *digits) / objective(exact, *digits) - 1 > 2 * gap
    assert model.n_iter_ == [20 * PARTS]
    assert model.score(*digits) > 0.96


def test_stream_goes_on_after_pickling_and_from_sparse_parts(digits, model):
    inputs, labels = digits
    kept, copy = pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(model))
    kept.partial_fit(inputs[:SIZE], labels[:SIZE])
    copy.partial_fit(scipy.sparse.csr_matrix(inputs[:SIZE]), labels[:SIZE])
    np.testing.assert_allclose(kept.coef_, copy.coef_, atol=1e-6)
    assert kept.n_iter_ == model.n_iter_ + 1
    assert not np.array_equal(kept.coef_, model.coef_)
    assert not hasattr(clone(kept), "coef_")


def test_stream_starts_from_a_fit(digits):
    inputs, labels = digits
    fitted = LogisticRegression(l2=L2, tol=1e-6, random_state=0).fit(inputs, labels)
    before = objective(fitted, inputs, labels)
    fitted.partial_fit(inputs[:SIZE], labels[:SIZE])
    assert objective(fitted, inputs, labels) < 1.2 * before


def test_weights_of_zero_leave_examples_out(digits):
    inputs, labels = digits
    weights = np.ones(SIZE)
    weights[: SIZE // 2] = 0
    wrong = np.where(weights == 0, 0, labels[:SIZE])
    left_out, none = LogisticRegression(l2=L2, random_state=0), LogisticRegression(l2=L2, random_state=0)
    left_out.partial_fit(inputs[:SIZE], wrong, classes=np.arange(10), sample_weight=weights)
    none.partial_fit(inputs[:SIZE], labels[:SIZE], classes=np.arange(10), sample_weight=weights)
    np.testing.assert_array_equal(left_out.coef_, none.coef_)
    none.partial_fit(inputs[:SIZE], labels[:SIZE], sample_weight=np.full(SIZE, 1e-30))
    assert np.all(np.isfinite(none.coef_))


@pytest.mark.parametrize("limit", [10, 1000], ids=["sketch", "matrix"])
def test_rows_of_no_weight_may_have_inputs_of_any_size(digits, limit, use_matrix_up_to):
    """They are beyond the range of float32, or their squares are."""
    use_matrix_up_to(limit)
    inputs, labels = digits[0][:SIZE], digits[1][:SIZE]
    weights = np.where(np.arange(SIZE) % 3 == 0, 0, 1)
    expected = None
    for size in (0, 1e30, 1e200):
        model = LogisticRegression(l2=L2, random_state=0)
        x = np.where(weights[:, None] == 0, size, inputs)
        model.partial_fit(x, labels, classes=np.arange(10), sample_weight=weights)
        expected = model.coef_ if expected is None else expected
        np.testing.assert_array_equal(model.coef_, expected)


def test_many_columns_have_a_sketch(digits, use_matrix_up_to):
    use_matrix_up_to(10)
    model = streamed(LogisticRegression(l2=L2, random_state=0), *digits, passes=10)
    moments = model._stream.moments
    assert isinstance(moments, Sketch) and moments.basis.shape == (65, 32)
    assert model.score(*digits) > 0.95


def test_two_classes_and_class_weights(digits):
    inputs, labels = digits
    inputs, labels = inputs[labels < 2], np.array(["zero", "one"])[labels[labels < 2]]
    model = LogisticRegression(class_weight={"zero": 2.0, "one": 1.0}, random_state=0)
    for _ in range(5):
        model.partial_fit(inputs, labels, classes=["one", "zero"])
    assert model.coef_.shape == (1, 64) and model.intercept_.shape == (1,)
    assert model.score(inputs, labels) == 1.0


def test_bad_streams():
    inputs, labels = np.eye(4), np.array([0, 1, 0, 1])
    with pytest.raises(ValueError, match="classes: expected all labels there will be, at the first call"):
        LogisticRegression().partial_fit(inputs, labels)
    model = LogisticRegression().partial_fit(inputs, labels, classes=[0, 1])
    with pytest.raises(ValueError, match="y: expected labels in classes"):
        model.partial_fit(inputs, np.array([0, 1, 2, 1]))
    with pytest.raises(ValueError, match="X has 3 features, but LogisticRegression is expecting 4"):
        model.partial_fit(inputs[:, :3], labels)
    with pytest.raises(ValueError, match="classes: expected those of the first call of partial_fit"):
        model.partial_fit(inputs, labels, classes=[0, 1, 2])
    with pytest.raises(ValueError, match="'balanced' is not supported for partial_fit"):
        LogisticRegression(class_weight="balanced").partial_fit(inputs, labels, classes=[0, 1])
    with pytest.raises(ValueError, match="only one class"):
        LogisticRegression().partial_fit(inputs, np.zeros(4, int), classes=[0])


def hostile(kind, order):
    """Rows of 300 columns and 3 labels: all of mean 2, or counts of which most columns are almost empty."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(800, 300))
    x = z + 2 if kind == "dense" else (z < np.log(3 / np.arange(1, 301))) * rng.geometric(0.2, size=z.shape)
    teacher = rng.normal(size=(300, 3)) / np.sqrt(np.sum(np.var(x, axis=0)))
    labels = np.argmax(3 * (x - x.mean(0)) @ teacher + rng.gumbel(size=(800, 3)), axis=1)
    places = {"label": np.argsort(labels), "size": np.argsort(np.sum(x**2, axis=1)), "random": np.arange(800)}[order]
    return x[places].astype(np.float32), labels[places]


def losses(model, x, labels, passes):
    """The log loss after each pass."""
    after = []
    for _ in range(passes):
        for start in range(0, len(labels), 200):
            part = slice(start, start + 200)
            model.partial_fit(x[part], labels[part], classes=np.arange(3))
        after.append(-np.mean(model.predict_log_proba(x)[np.arange(len(labels)), labels]))
    return np.array(after)


@pytest.mark.parametrize("order", ["random", "label", "size"])
@pytest.mark.parametrize("kind", ["dense", "counts"])
@pytest.mark.parametrize("limit", [10, 2000], ids=["sketch", "matrix"])
def test_stream_stays_below_the_zero_model(kind, order, limit, use_matrix_up_to):
    use_matrix_up_to(limit)
    x, labels = hostile(kind, order)
    x = scipy.sparse.csr_matrix(x) if kind == "counts" else x
    after = losses(LogisticRegression(l2=1e-2, random_state=0), x, labels, passes=5)
    assert np.all(after < np.log(3))
    assert after[-1] < 0.6 * np.log(3)


def test_wide_stream_comes_near_the_fit(use_matrix_up_to):
    use_matrix_up_to(10)
    x, labels = hostile("counts", "random")
    streamed, fitted = LogisticRegression(l2=5e-2, random_state=0), LogisticRegression(l2=5e-2).fit(x, labels)
    losses(streamed, x, labels, passes=8)

    def objective(model):
        loss = -np.mean(model.predict_log_proba(x)[np.arange(len(labels)), labels])
        return loss + 5e-2 / 2 * np.sum(model.coef_**2)

    assert objective(streamed) / objective(fitted) - 1 < 0.03


def test_label_that_never_comes_is_unlikely():
    """In parts that are alike; where parts are sorted it may come yet, and stays as likely as a guess."""
    x, labels = hostile("dense", "random")
    labels = np.minimum(labels, 1)
    mixed, one = (LogisticRegression(l2=1e-2, random_state=0) for _ in range(2))
    losses(mixed, x, labels, passes=5)
    assert np.mean(mixed.predict_proba(x)[:, 2]) < 0.05
    one.partial_fit(x[labels == 0], labels[labels == 0], classes=np.arange(3))
    np.testing.assert_allclose(one.predict_proba(x), 1 / 3, atol=1e-6)
