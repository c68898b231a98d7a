"""Sums of many numbers are as good as those of few."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.sums import sum_of_many


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 1000, 100_001])
def test_sum_of_equal_numbers_is_right_to_a_few_units(count):
    numbers = np.array([0.1, 0.7310586, 1.0], np.float32)
    found = jax.jit(sum_of_many)(jnp.asarray(np.tile(numbers, (count, 1))))
    np.testing.assert_allclose(found, count * numbers.astype(np.float64), rtol=6 * np.finfo(np.float32).eps)


def test_sum_keeps_the_other_axes_and_its_derivative_is_one():
    x = np.random.default_rng(0).normal(size=(77, 2, 3))
    np.testing.assert_allclose(sum_of_many(jnp.asarray(x)), x.sum(axis=0), atol=1e-13)
    np.testing.assert_array_equal(jax.grad(lambda x: sum_of_many(x).sum())(jnp.asarray(x)), np.ones_like(x))
