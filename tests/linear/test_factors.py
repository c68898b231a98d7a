"""Kronecker-factored curvatures: the factors, and systems with them, against dense ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.linear import Dense
from qbound.linear.factors import InputFactor, input_factor, label_factor, solve
from tests import reference

N, E = 4, 6
L2, RELATIVE = 0.03, 0.1


def second_moments(x, weights):
    return (weights[:, None] * x).T @ x / weights.sum()


def example(seed=0, b=40, sizes=1.0):
    """Inputs with an intercept, weights of which some are 0, and rows to take."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(b, E - 1)) @ rng.normal(size=(E - 1, E - 1)) * sizes
    weights = rng.uniform(0, 1, b) * (rng.random(b) < 0.8)
    return x, weights, rng.permutation(b)[: b // 2].astype(np.int32)


def factor_of(x, weights, rows):
    return jax.jit(input_factor, static_argnums=3)(Dense(jnp.asarray(x)), jnp.asarray(weights), jnp.asarray(rows), E)


def label_curvature(seed=1):
    rng = np.random.default_rng(seed)
    return sum(reference.hessian(h) for h in 2 * rng.normal(size=(5, N))) / 5


def test_input_factor_holds_the_second_moments_of_the_rows_taken():
    x, weights, rows = example()
    factor = factor_of(x, weights, rows)
    vectors, values = np.asarray(factor.vectors), np.asarray(factor.values)
    matrix = vectors @ np.diag(values) @ vectors.T / np.outer(factor.scales, factor.scales)
    expected = second_moments(reference.with_ones(x[rows]), weights[rows])
    np.testing.assert_allclose(matrix, expected, rtol=1e-4, atol=1e-5 * np.max(expected))
    assert factor.values.dtype == factor.vectors.dtype == np.float32


@pytest.mark.parametrize("labels_are_diagonal", [False, True], ids=["label matrix", "label diagonal"])
@pytest.mark.parametrize("inputs_are_diagonal", [False, True], ids=["input matrix", "input diagonal"])
def test_solution_is_that_of_the_dense_system(labels_are_diagonal, inputs_are_diagonal):
    x, weights, rows = example()
    a = label_curvature()
    a = np.diag(np.diag(a)) if labels_are_diagonal else a
    factor = factor_of(x, weights, rows)
    if inputs_are_diagonal:
        factor = InputFactor(factor.scales, jnp.linspace(0.1, 2, E, dtype=jnp.float32), None)
    vectors = np.eye(E) if inputs_are_diagonal else np.asarray(factor.vectors)
    b = vectors @ np.diag(np.asarray(factor.values)) @ vectors.T
    labels = label_factor(jnp.asarray(np.diag(a) if labels_are_diagonal else a))
    g = np.random.default_rng(3).normal(size=(N, E))
    found = solve(labels, factor, jnp.asarray(g), jnp.asarray(L2), RELATIVE)
    damping = L2 + RELATIVE * np.trace(a) / N * np.trace(b) / E
    scales = np.asarray(factor.scales)
    s = np.linalg.solve(np.kron(a, b) + damping * np.eye(N * E), (g * scales).ravel()).reshape(N, E) * scales
    expected = s - s.mean(0)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.max(np.abs(expected)))
    assert found.dtype == g.dtype


@pytest.mark.parametrize("size", [1e-60, 1e60])
def test_solution_is_linear_beyond_the_range_of_float32(size):
    """The system is in float32, and a gradient in float64 may be as small or as large as it likes."""
    x, weights, rows = example()
    factor, labels = factor_of(x, weights, rows), label_factor(jnp.asarray(label_curvature()))
    g = jnp.asarray(np.random.default_rng(3).normal(size=(N, E)))
    expected = solve(labels, factor, g, jnp.asarray(L2), RELATIVE)
    found = solve(labels, factor, size * g, jnp.asarray(L2), RELATIVE)
    np.testing.assert_allclose(found / size, expected, rtol=1e-4, atol=1e-6)


def test_columns_of_all_sizes_have_a_finite_factor():
    sizes = np.array([1e-6, 1e-3, 1.0, 1e3, 1e6])
    x, weights, rows = example(sizes=sizes)
    factor = factor_of(x, weights, rows)
    for leaf in jax.tree.leaves(factor):
        assert np.all(np.isfinite(leaf))
    # Only columns that are large beside others are made smaller, and the larger the more.
    scales = np.asarray(factor.scales)
    assert np.all(scales[:3] > 0.9) and scales[3] < 0.1 and scales[4] < 0.1 * scales[3]
    assert np.all(scales > 0)
    labels = label_factor(jnp.asarray(label_curvature()))
    g = np.random.default_rng(3).normal(size=(N, E)) * np.append(sizes, 1.0)
    g = jnp.asarray(g - g.mean(0))
    s = solve(labels, factor, g, jnp.asarray(1e-6), 0.01)
    assert np.all(np.isfinite(s)) and np.sum(g * s) > 0


@pytest.mark.parametrize("weights", [np.zeros(40), np.ones(40)], ids=["no weight", "no inputs"])
def test_factor_of_nothing_is_finite(weights):
    x, _, rows = example()
    x = 0 * x if weights[0] else x
    factor = factor_of(x, weights, rows)
    for leaf in jax.tree.leaves(factor):
        assert np.all(np.isfinite(leaf))
    g = jnp.asarray(np.random.default_rng(3).normal(size=(N, E)))
    assert np.all(np.isfinite(solve(label_factor(jnp.asarray(label_curvature())), factor, g, jnp.asarray(L2), 0.1)))
