"""Sums of many numbers are as good as those of few."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.linalg.dense import gram_of_many, sum_of_many


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 1000, 100_001])
def test_sum_of_equal_numbers_is_right_to_a_few_units(count):
    numbers = np.array([0.1, 0.7310586, 1.0], np.float32)
    found = jax.jit(sum_of_many)(jnp.asarray(np.tile(numbers, (count, 1))))
    np.testing.assert_allclose(found, count * numbers.astype(np.float64), rtol=6 * np.finfo(np.float32).eps)


def test_sum_keeps_the_other_axes_and_its_derivative_is_one():
    x = np.random.default_rng(0).normal(size=(77, 2, 3))
    np.testing.assert_allclose(sum_of_many(jnp.asarray(x)), x.sum(axis=0), atol=1e-13)
    np.testing.assert_array_equal(jax.grad(lambda x: sum_of_many(x).sum())(jnp.asarray(x)), np.ones_like(x))


@pytest.mark.parametrize(("count", "d"), [(1, 3), (40, 3), (64, 3), (30_001, 3), (1000, 70)])
def test_gram_matrix_of_equal_rows_is_right_to_a_few_units(count, d):
    row = np.linspace(0.1, 0.9, d).astype(np.float32)
    found = jax.jit(gram_of_many)(jnp.asarray(np.tile(row, (count, 1))))
    expected = count * np.outer(row.astype(np.float64), row)
    np.testing.assert_allclose(found, expected, rtol=12 * np.finfo(np.float32).eps)


def test_gram_matrix_has_all_rows():
    x = np.random.default_rng(0).normal(size=(77, 3))
    np.testing.assert_allclose(gram_of_many(jnp.asarray(x)), x.T @ x, atol=1e-13)
