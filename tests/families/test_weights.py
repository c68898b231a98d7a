"""Scalar functions, exact on both sides of where their formula stops and their series starts."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.families.base import curvature_weight, exponential_remainder, local_factor

DTYPES = [jnp.float32, jnp.float64]


def test_curvature_weight_tends_to_one_quarter():
    assert curvature_weight(jnp.zeros(())) == 0.25
    np.testing.assert_allclose(curvature_weight(jnp.array([1e-8, -1e-8, 1e-300])), 0.25, rtol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_curvature_weight_equals_its_formula(dtype):
    rho = np.concatenate([np.geomspace(1e-3, 1e4, 400), [0.1249999, 0.125, 0.1250001]])
    rho = np.concatenate([rho, -rho])
    expected = [math.tanh(r / 2) / (2 * r) for r in rho]
    np.testing.assert_allclose(curvature_weight(jnp.asarray(rho, dtype)), expected, rtol=6 * jnp.finfo(dtype).eps)


def test_curvature_weight_of_infinity_is_zero():
    weight, slope = jax.vmap(jax.value_and_grad(curvature_weight))(jnp.array([jnp.inf, -jnp.inf]))
    assert not np.any(weight)
    assert not np.any(slope)


@pytest.mark.parametrize("dtype", DTYPES)
def test_curvature_weight_has_a_smooth_derivative(dtype):
    rho = np.concatenate([np.geomspace(1e-6, 50, 300), -np.geomspace(1e-6, 50, 300), [0.0]])

    def exact(r):
        """By the series below 0.1, whose next term is below 1e-15."""
        if abs(r) < 0.1:
            return -r / 24 + r**3 / 120 - 17 * r**5 / 13440 + 31 * r**7 / 181440 - 691 * r**9 / 31933440
        return (1 - math.tanh(r / 2) ** 2) / (4 * r) - math.tanh(r / 2) / (2 * r**2)

    slope = jax.vmap(jax.grad(curvature_weight))(jnp.asarray(rho, dtype))
    np.testing.assert_allclose(slope, [exact(r) for r in rho], rtol=0, atol=8 * jnp.finfo(dtype).eps)


def test_local_factor_is_one_at_zero():
    assert local_factor(jnp.zeros(())) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_local_factor_equals_its_formula(dtype):
    for radius in [1e-6, 1e-3, 0.1, 0.4999999, 0.5, 0.51, 2.0, 10.0, 80.0]:
        r = Fraction(float(dtype(radius)))
        exact = sum(2 * r**k / math.factorial(k + 2) for k in range(300))
        np.testing.assert_allclose(
            float(local_factor(dtype(radius))), float(exact), rtol=(20 + radius) * float(jnp.finfo(dtype).eps)
        )


@pytest.mark.parametrize(("dtype", "largest"), [(jnp.float32, 88), (jnp.float64, 709)])
def test_local_factor_overflows_where_documented(dtype, largest):
    assert np.isfinite(local_factor(dtype(largest)))
    assert np.isinf(local_factor(dtype(largest + 1)))


def test_local_factor_of_nan_is_nan():
    assert np.isnan(local_factor(jnp.asarray(jnp.nan)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponential_remainder_keeps_its_digits(dtype):
    sizes = [1e-12, 1e-6, 1e-3, 0.1, 0.4999999, 0.5, 0.51, 2.0, 10.0, 30.0]
    x = np.asarray([sign * size for size in sizes for sign in (-1, 1)] + [0.0], dtype)
    exact = [float(sum(Fraction(float(v)) ** k / math.factorial(k) for k in range(2, 200))) for v in x]
    rounding = 20 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(exponential_remainder(jnp.asarray(x)), exact, rtol=rounding)
    assert exponential_remainder(dtype(-1e30)) == dtype(1e30)
