"""Leading eigenvectors from few products, against all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.linalg.nystrom import leading_eigenvectors


def decaying(e, dtype, decay=4.0):
    rng = np.random.default_rng(0)
    q, _ = np.linalg.qr(rng.normal(size=(e, e)))
    values = np.exp(-np.arange(e) / decay)
    return jnp.asarray((q * values) @ q.T, dtype), values


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
def test_leading_eigenvectors_are_those_of_the_matrix(dtype, compiled):
    matrix, values = decaying(60, dtype)
    function = jax.jit(leading_eigenvectors, static_argnums=1) if compiled else leading_eigenvectors
    found, vectors = (np.asarray(x) for x in function(matrix, 16))
    assert vectors.shape == (60, 16) and vectors.dtype == dtype
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(16), atol=1e-5 if dtype == jnp.float32 else 1e-12)
    np.testing.assert_allclose(np.sort(found)[::-1][:8], values[:8], rtol=1e-2)
    # An approximation from below, up to rounding.
    below = (vectors * found) @ vectors.T
    assert np.linalg.eigvalsh(np.asarray(matrix, np.float64) - below)[0] > -1e-5
    # What is left of it is about as small as the best approximation leaves.
    assert np.trace(np.asarray(matrix) - below) < 1.5 * values[16:].sum()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_matrix_of_lower_rank_is_found_whole(dtype):
    factor = jnp.asarray(np.random.default_rng(1).normal(size=(5, 40)), dtype)
    values, vectors = (np.asarray(x) for x in leading_eigenvectors(factor.T @ factor, 12))
    assert np.isfinite(vectors).all()
    exact = np.linalg.eigvalsh(np.asarray(factor @ factor.T))
    np.testing.assert_allclose(np.sort(values)[-5:], exact, rtol=1e-4)
    assert np.sort(values)[:-5].max() < 1e-4 * exact[0]
    np.testing.assert_allclose((vectors * values) @ vectors.T, factor.T @ factor, atol=1e-3 * exact[-1])


def test_zero_matrix_has_no_eigenvalues_above_zero():
    values, vectors = leading_eigenvectors(jnp.zeros((20, 20)), 4)
    np.testing.assert_array_equal(values, 0)
    assert np.isfinite(np.asarray(vectors)).all()
