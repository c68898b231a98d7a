"""The length of an update: the bound along it, and the mean over batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.families.softmax import Softmax
from qbound.optimizers.lengths import FIRST, LARGEST_RATE, curvature_along, length_of_update, no_length_yet
from tests import reference
from tests.optimizers import problems

ONE = jnp.ones(())


def quadratic(q):
    return lambda eta: q + 0 * eta


def run(pairs, rate=1.0):
    """Lengths for pairs of a = g'u and q, and the mean at the end."""
    length, etas = no_length_yet(jnp.float64), []
    for a, q in pairs:
        eta, _, length = length_of_update(length, jnp.asarray(float(a)), quadratic(jnp.asarray(float(q))), rate * ONE)
        etas.append(float(eta))
    return etas, length


def test_curvature_along_an_update_equals_the_dense_computation():
    p = problems.linear(b=7)
    params, rng = problems.network_params(), np.random.default_rng(0)
    u = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), params)
    weights = jnp.asarray([0.1, 0.2, 0.0, 0.3, 0.1, 0.2, 0.1])
    curved = curvature_along(Softmax(), problems.network, params, p.inputs, weights, u, jnp.asarray(0.3))
    logits, along = jax.jvp(lambda params: problems.network(params, p.inputs), (params,), (u,))
    plain = 0.3 * sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(u))
    for eta in (0.0, 0.01, 0.5, 50.0):
        expected = plain
        for w, h, v in zip(weights, np.asarray(logits), np.asarray(along), strict=True):
            m, pi = reference.logit_bound(h, reference.max_first(h))[2], reference.softmax(h)
            e = v - pi @ v
            r = eta * max(-e)
            factor = 1.0 if r < 1e-6 else 2 * (np.exp(r) - r - 1) / r**2
            expected += w * min(v @ m @ v, factor * pi @ e**2)
        np.testing.assert_allclose(curved(jnp.asarray(eta)), expected, rtol=1e-7)


def test_quadratic_is_above_the_loss_of_a_linear_model_as_far_as_it_was_made_for():
    p = problems.linear(b=9, scale=3.0)
    rng = np.random.default_rng(1)
    weights = jnp.full(9, 1 / 9)
    for seed in range(20):
        u = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), p.params)  # noqa: B023
        curved = curvature_along(Softmax(), problems.affine, p.params, p.inputs, weights, u, jnp.zeros(()))
        value, slope = jax.jvp(
            lambda params: problems.loss(problems.affine, params, p.inputs, p.labels), (p.params,), (u,)
        )
        reach = 10.0 ** (seed % 5 - 3)
        q = float(curved(jnp.asarray(reach)))
        for eta in np.linspace(0, reach, 7):
            moved = jax.tree.map(lambda leaf, v: leaf - eta * v, p.params, u)  # noqa: B023
            loss = float(problems.loss(problems.affine, moved, p.inputs, p.labels))
            assert loss <= float(value) - eta * float(slope) + eta**2 * q / 2 + 1e-12


def test_curvature_does_not_overflow_where_squares_of_the_update_do():
    p = problems.linear(b=5, dtype=jnp.float32)
    u = jax.tree.map(lambda leaf: jnp.full_like(leaf, 1e15), p.params)
    u["weights"] = u["weights"].at[0, 0].set(-1e15)
    curved = curvature_along(
        Softmax(), problems.affine, p.params, p.inputs, jnp.full(5, 0.2, jnp.float32), u, jnp.float32(0)
    )
    assert np.isfinite(float(curved(jnp.float32(1e-15))))


def test_with_batches_that_agree_the_length_leads_to_the_minimum_of_the_bound():
    etas, _ = run([(3.0, 6.0)] * 20)
    np.testing.assert_allclose(etas[FIRST:], 0.5, rtol=1e-12)
    # The first updates are shortened.
    np.testing.assert_allclose(etas[:FIRST], 0.5 * np.arange(1, FIRST + 1) / FIRST, rtol=1e-12)


def test_length_does_not_depend_on_the_scale_of_updates():
    """Where an update is c times as long, a is c times and q is c^2 times as large."""
    rng = np.random.default_rng(0)
    pairs = [(a, q) for a, q in rng.uniform(0.5, 2, size=(30, 2))]
    scales = 10.0 ** rng.uniform(-6, 6, size=30)
    plain, _ = run(pairs)
    scaled, _ = run([(c * a, c * c * q) for c, (a, q) in zip(scales, pairs, strict=True)])
    np.testing.assert_allclose(np.multiply(scaled, scales), plain, rtol=1e-10)


def test_a_batch_that_disagrees_changes_the_mean_by_its_share():
    etas, length = run([(1.0, 1.0)] * 20 + [(-1.0, 1.0)])
    np.testing.assert_allclose(etas[-1], 0.7 - 0.3, rtol=1e-12)
    assert float(length.length_looks) == 21


@pytest.mark.parametrize("rate", [1e-3, 1.0, 2.0, 10.0, 1e5])
def test_no_rate_makes_an_update_longer_than_twice_the_minimum(rate):
    etas, _ = run([(3.0, 6.0)] * 20, rate)
    np.testing.assert_allclose(rate * etas[-1], min(rate, LARGEST_RATE) * 0.5, rtol=1e-12)


@pytest.mark.parametrize(("a", "q"), [(0.0, 0.0), (1.0, 0.0), (-5.0, 1.0), (0.0, 1.0)])
def test_no_descent_or_no_curvature_no_step(a, q):
    etas, length = run([(a, q)] * 3)
    assert etas == [0, 0, 0]
    assert np.isfinite(float(length.length_mean))


@pytest.mark.parametrize(("a", "q"), [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (1.0, np.inf)])
def test_what_is_not_finite_is_reported_and_not_remembered(a, q):
    _, before = run([(1.0, 1.0)] * 3)
    eta, _, after = length_of_update(before, jnp.asarray(a), quadratic(jnp.asarray(q)), ONE)
    assert np.isnan(float(eta))
    assert before == after
