"""What is known along a line: the decrease, its slope, and what two upper bounds certify of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qbound
from qbound.families.softmax import Softmax
from qbound.fitting.line import certified_by_bound, certified_locally, make_line
from tests import reference, strategies

DTYPES = (jnp.float32, jnp.float64)


def line_of(logits, u, a, c, weights=None):
    """A line through given logits."""
    weights = jnp.full(len(logits), 1 / len(logits), logits.dtype) if weights is None else weights
    return make_line(Softmax(), weights, logits.T, u.T, a, c)


@jax.jit
def along(logits, u, a, c, etas):
    line = line_of(logits, u, a, c)
    return jax.vmap(line.decrease)(etas), jax.vmap(line.slope)(etas), line.search(etas[0])


@jax.jit
def certificates(logits, u, a, c, eta=1.0):
    line = line_of(logits, u, a, c)
    terms = jax.vmap(lambda h, u: qbound.log_partition_bound(h).curvature.quadratic(u))(logits, u)
    bound = certified_by_bound(line, jnp.mean(terms), jnp.asarray(eta, logits.dtype))
    return bound, certified_locally(line)


def decrease(logits, u, a, c, eta):
    """By definition, in float64: eta a - eta^2 c/2 less the mean of LSE(h - eta u) - LSE(h) + eta p.u."""
    rest = [
        reference.log_sum_exp(h - eta * u) - reference.log_sum_exp(h) + eta * reference.softmax(h) @ u
        for h, u in zip(np.asarray(logits, float), np.asarray(u, float), strict=True)
    ]
    return eta * float(a) - eta**2 * float(c) / 2 - np.mean(rest)


def problem(seed=0, b=6, n=4, logit_std=2.0, u_std=1.0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return (logit_std * rng.normal(size=(b, n))).astype(dtype), (u_std * rng.normal(size=(b, n))).astype(dtype)


def test_decrease_and_slope_are_those_of_the_objective():
    logits, u = problem()
    logits[2, 1] = -np.inf
    etas = np.array([1e-3, 0.1, 1.0, 5.0, 100.0])
    found, (slopes, second), _ = along(logits, u, 0.7, 0.2, etas)
    expected = [decrease(logits, u, 0.7, 0.2, eta) for eta in etas]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)
    step = 1e-5
    numeric = [
        -(decrease(logits, u, 0.7, 0.2, eta + step) - decrease(logits, u, 0.7, 0.2, eta - step)) / (2 * step)
        for eta in etas
    ]
    np.testing.assert_allclose(slopes, numeric, rtol=1e-6, atol=1e-8)
    numbers = (jnp.asarray(x) for x in (logits, u, 0.7, 0.2))
    line = line_of(*numbers)
    derivative = jax.vmap(jax.grad(lambda eta: line.slope(eta)[0]))(jnp.asarray(etas))
    np.testing.assert_allclose(second, derivative, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-6])
def test_small_decrease_keeps_its_digits_in_float32(size):
    """Where two values of the objective would differ by less than their rounding errors."""
    logits, u = problem(b=50, u_std=size, dtype=np.float32)
    v = np.mean([reference.softmax(h) @ u**2 - (reference.softmax(h) @ u) ** 2 for h, u in zip(logits, u, strict=True)])
    a = np.float32(v)
    zero = np.float32(0)
    found, _, _ = along(logits, u, a, zero, np.array([1.0], np.float32))
    assert found[0] == pytest.approx(decrease(logits, u, a, 0, 1.0), rel=1e-4)


def test_line_search_finds_the_least_objective():
    for seed in range(5):
        logits, u = problem(seed, u_std=3.0)
        _, _, eta = along(logits, u, 1.0, 1e-3, np.array([0.3]))
        best = decrease(logits, u, 1.0, 1e-3, float(eta))
        others = [decrease(logits, u, 1.0, 1e-3, float(eta) * factor) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0)]
        assert best >= 0.9999 * max(others)


def test_constant_in_the_displacement_changes_nothing():
    logits, u = problem(dtype=np.float32)
    expected, _, _ = along(logits, u, np.float32(1), np.float32(0), np.array([0.5], np.float32))
    found, _, _ = along(logits, u + np.float32(1e4), np.float32(1), np.float32(0), np.array([0.5], np.float32))
    np.testing.assert_allclose(found, expected, rtol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@given(
    pair=strategies.logits_and_vector(sizes=(2, 3, 50)),
    slope=st.floats(1e-3, 1e3),
    penalty=st.sampled_from([0.0, 1e-4, 1.0]),
)
def test_both_certificates_hold(pair, slope, penalty, dtype):
    """Any logits, any direction, any slope: the objective falls by what is certified, at least."""
    h, u = (np.asarray(x, dtype) for x in pair)
    logits, u = np.stack([h, -h]), np.stack([u, u[::-1]])
    a, c = dtype(slope), dtype(penalty)
    for eta, certified in np.asarray(certificates(logits, u, a, c), float):
        assert np.isfinite(eta) or certified == 0
        if certified > 0:
            rounding = 1e-5 if dtype == jnp.float32 else 1e-12
            scale = float(eta) * slope + 1
            assert decrease(logits, u, a, c, float(eta)) >= certified - rounding * scale


@pytest.mark.parametrize("rarity", [0.0, 3.0, 12.0, 40.0, 80.0, 95.0, 120.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_local_certificate_holds_where_a_rare_label_rises(dtype, rarity):
    """The direction in which the third derivative is largest; in float32 the probability is 0 from 88 on."""
    logits = np.array([[0.0, -rarity], [0.0, 1.0]], dtype)
    for rise in (0.1, 1.0, 10.0, 100.0, 1000.0):
        u = np.array([[0.0, -rise], [0.3, 0.0]], dtype)
        for slope in (1e-6, 1e-2, 1.0, 100.0):
            _, (eta, certified) = np.asarray(certificates(logits, u, dtype(slope), dtype(1e-6)), float)
            assert certified >= 0
            if certified > 0:
                true = decrease(logits, u, dtype(slope), dtype(1e-6), float(eta))
                rounding = 1e-5 if dtype == jnp.float32 else 1e-12
                assert true >= certified - rounding * float(eta) * slope - 1e-14


def spreads(logits, u):
    """Of u in each row: its variance under the softmax, and how far it goes below its mean."""
    p = np.array([reference.softmax(h) for h in logits])
    e = u - np.sum(p * u, axis=1, keepdims=True)
    return np.sum(p * e**2, axis=1), np.max(-e, axis=1)


def test_local_certificate_is_the_best_point_of_its_upper_bound():
    logits, u = problem(b=8, u_std=2.0)
    a, c = 0.8, 0.05
    v, r = spreads(logits, u)
    _, (eta, certified) = certificates(logits, u, a, c)
    upper = functools.partial(reference.local_upper_bound, a=a, c=c, weights=np.full(8, 1 / 8), v=v, r=r)
    best = -min(upper(x) for x in np.linspace(1e-3, 3, 3000))
    assert certified == pytest.approx(-upper(float(eta)), rel=1e-9)
    assert certified == pytest.approx(best, rel=1e-3)
    # One radius for all examples certifies less.
    total, largest = np.mean(v) + c, np.max(r)
    t = largest * a / total
    assert certified > total / largest**2 * ((1 + t) * np.log1p(t) - t)


def test_local_certificate_is_the_best_point_where_radii_differ():
    """One example with a rare label that rises fast, among many that hardly change: between the two limits."""
    logits, u = problem(b=8, logit_std=1.0, u_std=0.3)
    logits[0], u[0] = [0, -6, 0, 0], [0, -12, 0, 0]
    a, c = 0.3, 0.01
    v, r = spreads(logits, u)
    _, (eta, certified) = certificates(logits, u, a, c)
    upper = functools.partial(reference.local_upper_bound, a=a, c=c, weights=np.full(8, 1 / 8), v=v, r=r)
    lengths = np.linspace(1e-3, 5, 5000)
    values = np.array([-upper(x) for x in lengths])
    assert certified == pytest.approx(values.max(), rel=1e-3)
    assert eta == pytest.approx(lengths[np.argmax(values)], rel=0.05)
    # Neither the largest radius alone nor the mean one would do.
    total = np.mean(v) + c
    for radius in (np.max(r), np.mean(v * r) / total):
        assert -upper(np.log1p(radius * a / total) / radius) < 0.98 * certified


def test_direction_that_changes_no_probability_goes_to_the_minimum_of_the_penalty():
    logits, _ = problem()
    _, (eta, certified) = certificates(logits, np.full_like(logits, 3.0), 0.6, 0.2)
    assert eta == pytest.approx(3.0)
    assert certified == pytest.approx(0.9)


def test_local_certificate_tends_to_the_newton_step():
    logits, u = problem(u_std=1e-4)
    p = np.array([reference.softmax(h) for h in logits])
    v = np.mean(np.sum(p * (u - np.sum(p * u, axis=1, keepdims=True)) ** 2, axis=1))
    _, (eta, certified) = certificates(logits, u, v, 0.0)
    assert eta == pytest.approx(1, abs=1e-2)
    assert certified == pytest.approx(v / 2, rel=1e-3)


@pytest.mark.parametrize("eta", [0.1, 1.0, 1.9])
def test_bound_certifies_what_the_paper_says(eta):
    logits, u = problem()
    (step, certified), _ = certificates(logits, u, 0.9, 0.1, eta)
    m = np.mean([u @ reference.logit_bound(h, reference.descending(h))[2] @ u for h, u in zip(logits, u, strict=True)])
    assert step == pytest.approx(eta * 0.9 / (m + 0.1))
    assert certified == pytest.approx(eta * (1 - eta / 2) * 0.9**2 / (m + 0.1))


@pytest.mark.parametrize("rarity", [60, 90, 200])
def test_decrease_counts_labels_too_rare_for_the_dtype_once_they_have_risen(rarity):
    """In float32, among examples that stay near."""
    logits, u = problem(u_std=1e-3, dtype=np.float32)
    logits[0], u[0] = [0, -rarity, -rarity, -rarity], [0, -1, -1, -1]
    eta = np.float32(1.1 * rarity)
    found, *_ = along(jnp.asarray(logits), jnp.asarray(u), jnp.float32(0), jnp.float32(0), jnp.full(1, eta))
    expected = decrease(logits, u, 0, 0, eta)
    assert expected < -0.1 * rarity / 6
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)


def test_examples_of_no_weight_shorten_no_certified_step():
    logits, u = (jnp.asarray(some) for some in problem())
    a, c = jnp.asarray(0.6), jnp.asarray(0.2)
    weights = jnp.full(6, 1 / 5).at[0].set(0)
    expected = certified_locally(line_of(logits[1:], u[1:], a, c))
    found = certified_locally(line_of(logits, u.at[0].multiply(1e3), a, c, weights))
    np.testing.assert_allclose(found, expected, rtol=1e-10)
