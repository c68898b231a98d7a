"""Sums over earlier and later entries, in blocks of every shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.families.ordered import prefix_sums, suffix_sums

SIZES = [1, 2, 31, 32, 33, 128, 129, 1000, 1001, 1024, 5000]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_prefix_and_suffix_sums_equal_numpy(n, dtype):
    x = np.random.default_rng(n).uniform(size=n)
    before, after = np.cumsum(x) - x, np.cumsum(x[::-1])[::-1] - x
    for function, expected in ((prefix_sums, before), (suffix_sums, after)):
        sums = jax.jit(function)(x.astype(dtype))
        assert sums.dtype == dtype
        np.testing.assert_allclose(sums, expected, rtol=16 * jnp.finfo(dtype).eps, atol=1e-12)


def test_sums_are_exclusive_and_exact_on_integers():
    x = np.arange(1.0, 301.0)
    np.testing.assert_array_equal(prefix_sums(jnp.asarray(x)), np.cumsum(x) - x)
    np.testing.assert_array_equal(suffix_sums(jnp.asarray(x)), np.sum(x) - np.cumsum(x))


def test_sums_of_many_terms_keep_float32_digits():
    x = np.full(1_000_000, 0.1, np.float32)
    last = float(prefix_sums(jnp.asarray(x))[-1])
    assert abs(last / (999_999 * float(np.float32(0.1))) - 1) < 1e-6
