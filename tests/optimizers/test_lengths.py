"""The length of an update: the bound along it, and the mean over batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.families.softmax import Softmax
from qbound.optimizers.lengths import (
    FIRST,
    LARGEST_GROWTH,
    LARGEST_RATE,
    LARGEST_SHARE,
    LEAST_SHARE,
    length_of_update,
    no_length_yet,
    nonlinearity,
    ray_along,
    trusted_share,
)
from tests import reference
from tests.optimizers import problems

ONE = jnp.ones(())
EPS = float(np.finfo(np.float64).eps)


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
    curved = ray_along(Softmax(), problems.network, params, p.inputs, weights, u, jnp.asarray(0.3)).curved
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
        curved = ray_along(Softmax(), problems.affine, p.params, p.inputs, weights, u, jnp.zeros(())).curved
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
    u["bias"] = u["bias"] * 0
    # One that does not move, too.
    inputs = p.inputs.at[2].set(0)
    weights = jnp.full(5, 0.2, jnp.float32)
    along = ray_along(Softmax(), problems.affine, p.params, inputs, weights, u, jnp.float32(0))
    assert np.isfinite([float(along.curved(jnp.float32(eta))) for eta in (1e-15, 1e30)]).all()


def test_with_batches_that_agree_the_length_leads_to_the_minimum_of_the_bound():
    etas, _ = run([(3.0, 6.0)] * 20)
    np.testing.assert_allclose(etas[FIRST:], 0.5, rtol=1e-12)
    # The first updates are shortened.
    np.testing.assert_allclose(etas[:FIRST], 0.5 * np.arange(1, FIRST + 1) / FIRST, rtol=1e-12)


def test_length_does_not_depend_on_the_scale_of_updates():
    """Where updates are c times as long, a is c times and q is c^2 times as large."""
    pairs = np.random.default_rng(0).uniform(0.5, 2, size=(30, 2))
    plain, _ = run(pairs)
    for c in (1e-6, 1e3):
        scaled, _ = run([(c * a, c * c * q) for a, q in pairs])
        np.testing.assert_allclose(np.multiply(scaled, c), plain, rtol=1e-10)


def test_a_batch_changes_the_mean_by_its_share():
    etas, length = run([(1.0, 1.0)] * 20 + [(1.4, 1.0)])
    np.testing.assert_allclose([etas[-1], length.length_mean], 0.7 + 0.3 * 1.4, rtol=1e-12)
    assert float(length.length_looks) == 21


def test_a_batch_that_misses_the_curvature_counts_little_more_than_the_last():
    """Examples that are fitted have none: it would certify a length of 1e8."""
    etas, length = run([(1.0, 1.0)] * 20 + [(1.0, 1e-8)])
    np.testing.assert_allclose(etas[-1], LARGEST_SHARE * LARGEST_GROWTH, rtol=1e-12)
    np.testing.assert_allclose(length.length_mean, 0.7 + 0.3 * LARGEST_GROWTH * 1e-4, rtol=1e-12)
    assert length.length_own == LARGEST_GROWTH
    etas, _ = run([(1.0, 1.0)] * 20 + [(1.0, 1e-4)] * 40)
    assert etas[-1] > 1e3


def test_no_batch_is_taken_much_further_than_it_certifies():
    """One that has next to nothing to lose, after others that had much."""
    etas, _ = run([(1.0, 1.0)] * 20 + [(1e-6, 1e-2)])
    np.testing.assert_allclose(etas[-1], LARGEST_SHARE * 1e-6 / 1e-2, rtol=1e-12)


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


# The network itself


def along_of(model, params, u, inputs, weights):
    return ray_along(Softmax(), model, params, inputs, weights, u, jnp.zeros((), weights.dtype))


def test_nonlinearity_equals_the_dense_computation():
    p = problems.linear(b=7)
    params, rng = problems.network_params(), np.random.default_rng(0)
    u = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), params)
    weights = jnp.asarray([0.1, 0.2, 0.0, 0.3, 0.1, 0.2, 0.1])
    along = along_of(problems.network, params, u, p.inputs, weights)
    slopes = jax.jvp(lambda params: problems.network(params, p.inputs), (params,), (u,))[1]
    for eta in (1e-3, 0.3, 5.0):
        moved = problems.network(jax.tree.map(lambda leaf, v: leaf - eta * v, params, u), p.inputs)  # noqa: B023
        wrong = centred = 0.0
        for w, h, m, v in zip(weights, along.logits, np.asarray(moved), np.asarray(slopes), strict=True):
            d = -eta * v
            wrong += w * np.var(np.asarray(m - h) - d)
            centred += w * np.var(d)
        found = nonlinearity(along, moved, jnp.asarray(eta), EPS)
        np.testing.assert_allclose(found, np.sqrt(wrong / centred), rtol=1e-6, atol=1e-9)
    assert found > 0.5


def test_nonlinearity_is_none_for_affine_models_constants_and_no_step():
    p = problems.linear(b=9, scale=3.0, dtype=jnp.float32)
    rng, weights = np.random.default_rng(1), jnp.full(9, 1 / 9, jnp.float32)
    u = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), p.params)
    along = along_of(problems.affine, p.params, u, p.inputs, weights)
    for eta in (0.0, 1e-6, 1e-3, 1.0, 1e6):
        moved = problems.affine(jax.tree.map(lambda leaf, v: leaf - eta * v, p.params, u), p.inputs)  # noqa: B023
        # In float32 the parameters are rounded, too, beside steps that are small.
        assert nonlinearity(along, moved + 5, jnp.float32(eta), float(jnp.finfo(jnp.float32).eps)) < 1e-4, eta


def test_nonlinearity_passes_over_removed_labels_and_rows_without_weight():
    p = problems.linear(b=5)
    params, weights = problems.network_params(), jnp.asarray([0.5, 0.0, 0.5, 0.0, 0.0])
    u = jax.tree.map(jnp.ones_like, params)

    def masked(params, inputs):
        return problems.network(params, inputs).at[0, 1].set(-jnp.inf)

    along, plain = (along_of(model, params, u, p.inputs, weights) for model in (masked, problems.network))
    after = jax.tree.map(lambda leaf: leaf - 0.3, params)
    moved = masked(after, p.inputs).at[1].set(jnp.nan)
    found = nonlinearity(along, moved, jnp.asarray(0.3), EPS)
    assert np.isfinite(found) and found > 0
    assert found != nonlinearity(plain, problems.network(after, p.inputs), jnp.asarray(0.3), EPS)
    assert np.isinf(nonlinearity(along, moved.at[0, 0].set(jnp.nan), jnp.asarray(0.3), EPS))


def test_share_of_a_step_is_all_of_it_until_half_is_wrong_and_never_nothing():
    shares = [float(trusted_share(jnp.asarray(epsilon))) for epsilon in (0.0, 0.5, 1.0, 5.0, 1e9, np.inf)]
    np.testing.assert_allclose(shares, [1, 1, 0.5, 0.1, LEAST_SHARE, LEAST_SHARE])


def test_nonlinearity_does_not_see_labels_that_are_removed_by_large_numbers():
    """Next to their rounding no difference of other labels would count."""
    p = problems.linear(b=5)
    params, weights = problems.network_params(), jnp.full(5, 0.2)
    u, after = jax.tree.map(jnp.ones_like, params), jax.tree.map(lambda leaf: leaf - 0.3, params)
    found = []
    for removed in (-jnp.inf, -1e9, float(np.finfo(np.float64).min)):

        def masked(params, inputs, removed=removed):
            return problems.network(params, inputs).at[:, 1].set(removed)

        along = along_of(masked, params, u, p.inputs, weights)
        found.append(nonlinearity(along, masked(after, p.inputs), jnp.asarray(0.3), EPS))
    assert found[0] > 0.01
    np.testing.assert_allclose(found, found[0], rtol=1e-9)
