"""Weights of any size: what counts is their proportion, and with C their sum, even where that is no float."""

import numpy as np
import pytest

from qbound.estimator import LogisticRegression
from qbound.scikit_learn.arguments import class_weights, equal_weights, sample_weights, weights_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
Y = np.argmax(X + RNG.gumbel(size=(60, 3)), axis=1)
WEIGHTS = RNG.uniform(0.5, 2.0, 60)
OPTIONS = {"tol": 1e-6, "max_iter": 300, "solver": "mm"}


def fitted(dtype, weights, **options):
    model = LogisticRegression(**{**OPTIONS, **options}).fit(X.astype(dtype), Y, weights)
    assert model.converged_
    return np.concatenate([model.coef_, model.intercept_[:, None]], axis=1)


def tolerance(dtype):
    return {"rtol": 1e-3 if dtype == np.float32 else 1e-6, "atol": 1e-5 if dtype == np.float32 else 1e-8}


SCALES = [1e307, 1e300, 3e38, 1e38, 1e30, 1e-30, 1e-45, 1e-300, 5e-322]


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_unit_of_weights_does_not_matter_with_l2(dtype, scale):
    """Also where their sum, or each of them, is no number of float32."""
    weights = 1.0 + (np.arange(60) % 2)  # exact in any unit
    one = fitted(dtype, weights, l2=0.01, tol=1e-4)
    np.testing.assert_allclose(fitted(dtype, weights * scale, l2=0.01, tol=1e-4), one, **tolerance(dtype))
    assert np.max(np.abs(one)) > 0.5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sum_of_weights_beyond_float64_leaves_no_penalty(dtype):
    heavy = fitted(dtype, np.full(60, 1.7e308), C=1.0, tol=1e-4)
    np.testing.assert_allclose(heavy, fitted(dtype, None, C=np.inf, tol=1e-4), **tolerance(dtype))
    assert np.max(np.abs(heavy)) > 0.5


def test_penalty_is_that_of_c_and_weights_where_their_product_alone_is_a_number():
    """C = 2^-1020 is as strong on weights of 2^1020 as 1 on 1, and so the other way round."""
    one = fitted(np.float64, WEIGHTS, C=0.5)
    for exponent in (1020, -1020):
        found = fitted(np.float64, WEIGHTS * 2.0**exponent, C=0.5 * 2.0**-exponent)
        np.testing.assert_allclose(found, one, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_product_of_weights_of_classes_and_examples_may_be_no_number(dtype):
    of_class = np.array([1.0, 4.0, 2.0])
    one = fitted(dtype, of_class[Y] * WEIGHTS, l2=0.01, tol=1e-4)
    for a, b in ((2.0**1000, 2.0**1000), (2.0**-1000, 2.0**-1000), (2.0**1000, 2.0**-1000), (2.0**120, 2.0**120)):
        weight = {k: a * of_class[k] for k in range(3)}
        found = fitted(dtype, b * WEIGHTS, class_weight=weight, l2=0.01, tol=1e-4)
        np.testing.assert_allclose(found, one, **tolerance(dtype))


@pytest.mark.parametrize("scale", [1e307, 1e-300], ids=str)
def test_balance_does_not_depend_on_the_unit_of_weights(scale):
    one = fitted(np.float64, WEIGHTS, class_weight="balanced", l2=0.01)
    np.testing.assert_allclose(fitted(np.float64, WEIGHTS * scale, class_weight="balanced", l2=0.01), one, rtol=1e-5)


def test_products_of_weights_are_exact():
    w, c = np.array([1e300, 1e-300, 3.0, 0.0]), np.array([1e-300, 1e300])
    parts, exponent = weights_of(w, c, np.array([0, 1, 0, 1]))
    assert 0.25 <= parts.max() <= 1
    np.testing.assert_allclose(np.ldexp(parts, exponent), [1.0, 1.0, 3e-300, 0.0], rtol=1e-15)
    parts, exponent = weights_of(np.zeros(2), None, np.zeros(2, int))
    assert not parts.any() and exponent == 0


def test_equal_weights_are_those_of_none():
    found, expected = equal_weights(5), weights_of(sample_weights(None, 5), None, np.zeros(5, int))
    np.testing.assert_array_equal(found.parts, expected.parts)
    assert found.exponent == expected.exponent


def test_weights_are_one_for_none_and_a_number_for_all():
    np.testing.assert_array_equal(sample_weights(None, 3), np.ones(3))
    np.testing.assert_array_equal(sample_weights(2, 3), np.full(3, 2.0))
    assert sample_weights([1, 2, 3], 3).dtype == np.float64
    np.testing.assert_array_equal(class_weights(None, np.arange(2), np.arange(2), None), np.ones(2))


@pytest.mark.parametrize(
    ("dtype", "options", "weights", "message"),
    [
        (np.float32, {"C": 1.0}, np.full(60, 1e-45), "C, sample_weight: expected a penalty .* in float32; got 1"),
        (np.float64, {"C": 1.0}, np.full(60, 5e-324), "C, sample_weight: expected a penalty .* in float64; got inf"),
        (np.float32, {"C": 1e-45}, None, "C, sample_weight: expected a penalty"),
        (np.float32, {"l2": 1e39}, None, "l2: expected a penalty .* fits in float32; got 1e"),
    ],
    ids=["weights", "weights of float64", "C", "l2"],
)  # fmt: skip
def test_penalty_too_large_for_its_type_is_refused(dtype, options, weights, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        LogisticRegression(**options).fit(X.astype(dtype), Y, weights)


@pytest.mark.parametrize("scale", [2.0**1000, 2.0**127, 2.0**-149, 2.0**-1000], ids=str)
def test_unit_of_weights_does_not_matter_to_a_stream(scale):
    def streamed(weights):
        model = LogisticRegression(l2=0.01, random_state=0)
        for _ in range(3):
            model.partial_fit(X, Y, classes=[0, 1, 2], sample_weight=weights)
        return model.coef_

    one = streamed(WEIGHTS)
    assert np.max(np.abs(one)) > 0.1
    np.testing.assert_array_equal(streamed(WEIGHTS * scale), one)


def test_stream_sees_the_penalty_of_its_weights():
    """With C, that is of their sum, in whatever unit the stream has them."""

    def streamed(weights, C):
        model = LogisticRegression(C=C, random_state=0).partial_fit(X, Y, classes=[0, 1, 2], sample_weight=weights)
        return model.partial_fit(X, Y, sample_weight=weights).coef_

    one = streamed(np.ones(60), 0.01)
    np.testing.assert_array_equal(streamed(np.full(60, 2.0**200), 0.01 * 2.0**-200), one)
    assert np.max(np.abs(one - streamed(np.ones(60), 1.0))) > 0.01
    with pytest.raises(ValueError, match="C, sample_weight: expected a penalty .* fits in float32"):
        streamed(np.full(60, 2.0**-200), 1.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 3e3), (3e3, 1), (1, 2.0**200), (2.0**200, 1), (2.0**-500, 2.0**500), (2.0**-500, 2.0**-500)],
)
def test_weights_of_parts_of_a_stream_may_be_of_any_ratio(first, second):
    """What is kept are sums over all parts, in some unit."""
    model = LogisticRegression(l2=0.01, random_state=0).partial_fit(X, Y, [0, 1, 2], np.zeros(60))
    parts = [(X[:30], Y[:30], first * WEIGHTS[:30]), (X[30:], Y[30:], second * WEIGHTS[30:])]
    for x, y, weights in parts:
        model.partial_fit(x, y, sample_weight=weights)
    stream, x = model._stream, np.append(X, np.ones((60, 1)), axis=1)
    weights = np.concatenate([weights for _, _, weights in parts])
    sums = [weights.sum(), np.bincount(Y, weights), (weights[:, None] * x).T @ x]
    for found, expected in zip([stream.weight, stream.labels.weights, stream.moments], sums, strict=True):
        found = np.ldexp(np.asarray(found, float), model._stream_exponent)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6 * np.max(expected))
    assert np.all(np.isfinite(model.coef_)) and np.any(model.coef_ != 0)
