"""Second moments of the inputs of a stream: their sketch, and the factors made of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.fitting import moments
from qbound.fitting.moments import Sketch, no_sketch

matrix_factor, sketch_factor = jax.jit(moments.matrix_factor), jax.jit(moments.sketch_factor)
turned, with_rows = jax.jit(moments.turned), jax.jit(moments.with_rows)


def test_sketch_of_some_rows_stands_for_all():
    """The first rows have all the weight, or none."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(300, 40)), jnp.float32)
    for weights in (np.arange(300) < 256, np.arange(300) % 2 == 0, np.arange(300) >= 256):
        w = weights.astype(np.float32)
        sketch = with_rows(no_sketch(40), x, jnp.asarray(w))
        first = w[:256]
        factor = w.sum() / first.sum() if first.sum() else 0.0
        some = np.asarray(x[:256], float)
        expected = factor * some.T @ (first[:, None] * (some @ np.asarray(sketch.basis, float)))
        np.testing.assert_allclose(sketch.image, expected, rtol=1e-3, atol=1e-3)
        assert np.all(np.isfinite(sketch_factor(turned(sketch), jnp.float32(w.sum())).vectors))


@pytest.mark.parametrize(
    ("squares", "typical"),
    [
        ([1, 4, 9], 4.0),  # the median
        ([0, 0, 100, 0, 0], 1.0),  # a hundredth of the mean in which columns count as much as they have
        ([0.5, 1, 1], 0.9),  # no more than that mean
        ([2e-38, 4e-38, 6e-38], 4e-38),
    ],
)
def test_columns_are_measured_against_a_typical_one(squares, typical):
    squares = jnp.asarray(squares, jnp.float32)
    zeros = jnp.zeros((len(squares), 2), jnp.float32)
    factor = sketch_factor(Sketch(2 * squares, zeros, zeros), jnp.float32(2))
    np.testing.assert_allclose(factor.scales, 1 / np.sqrt(np.asarray(squares, float) + typical), rtol=1e-5)
    np.testing.assert_array_equal(factor.vectors, 0)
    np.testing.assert_allclose(factor.mean_value(), 1)
    np.testing.assert_array_equal(sketch_factor(Sketch(0 * squares, zeros, zeros), jnp.float32(2)).scales, 1)


def test_a_thousandth_of_the_squares_is_left_beside_a_sketch_that_is_above_them():
    squares, basis = jnp.full(4, 2.0, jnp.float32), jnp.eye(4, dtype=jnp.float32)
    factor = sketch_factor(Sketch(squares, basis, 9 * basis), jnp.float32(2))
    np.testing.assert_allclose(factor.scales, 1 / np.sqrt(2e-3), rtol=1e-5)
    np.testing.assert_allclose(factor.values, 1 + 4.5 / 2e-3, rtol=1e-5)


def test_factor_of_a_matrix_has_no_eigenvalue_below_zero():
    x = np.random.default_rng(0).normal(size=(3, 60)).astype(np.float32)
    factor = matrix_factor(jnp.asarray(x.T @ x / 3))
    assert np.sum(np.asarray(factor.values) > 1e-3) == 3 and np.all(np.asarray(factor.values) >= 0)
