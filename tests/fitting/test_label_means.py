"""What class means say of labels that a batch lacks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.fitting import label_means


@pytest.mark.parametrize("at_a_time", [1, 2, 3])
def test_labels_some_at_a_time_give_what_all_give(at_a_time):
    n, e = 5, 4
    rng = np.random.default_rng(0)
    of = label_means.LabelMeans(jnp.asarray(rng.dirichlet(np.ones(n))), jnp.asarray(rng.normal(size=(n, e))))
    params, direction = (jnp.asarray(rng.normal(size=(n, e))) for _ in range(2))
    known = jnp.asarray([True, True, False, True, True])

    def both(**most):
        return (
            label_means.gradient(of, params, known, **most),
            label_means.curvature_along(of, params, known, direction, **most),
        )

    expected = both()
    logits = np.where(known[:, None], np.asarray(params @ of.means.T), -np.inf)
    p = np.exp(logits - logits.max(axis=0)) / np.exp(logits - logits.max(axis=0)).sum(axis=0)
    np.testing.assert_allclose(
        expected[0], (p - np.eye(n)) * np.asarray(of.frequencies) @ np.asarray(of.means), rtol=1e-9
    )
    some = functools.partial(both, most_logits=at_a_time * n)
    for found in (some(), jax.jit(some)()):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)


@pytest.mark.parametrize("n", [500, 501])
def test_beyond_500_labels_the_bound_is_bohnings(n):
    rng = np.random.default_rng(0)
    h, u = rng.normal(size=(2, n, 2))
    found = label_means.bound_quadratics(jnp.asarray(h), jnp.asarray(u))
    bohning = np.sum((u - u.mean(0)) ** 2, axis=0) / 2
    if n > 500:
        np.testing.assert_allclose(found, bohning, rtol=1e-12)
    else:
        assert np.all(found < 0.9 * bohning)
