"""Single steps of a stream, against their formulas, and what is kept after them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qbound.fitting.stream as stream_module
from qbound.fitting.factors import kronecker_solve, label_factor
from qbound.fitting.moments import Sketch
from qbound.fitting.objective import Data
from qbound.fitting.stream import consume, first_stream
from qbound.models.inputs import DenseInputs
from tests import reference

D, N, ROWS = 40, 3, 64
L2 = np.append(np.full(D, 1e-3), 0).astype(np.float32)


def batch(x, labels):
    return Data(DenseInputs(jnp.asarray(x, jnp.float32)), jnp.asarray(labels, jnp.int32), jnp.ones(len(x), jnp.float32))


@pytest.mark.parametrize("limit", [2000, 10], ids=["matrix", "sketch"])
def test_steps_are_those_of_the_formulas(limit):
    """On batches alike in labels, with the factor of inputs as it is.

    Inputs of the third are large, and labels of the sixth are others than before.
    """
    longest, part, rows = (2.0, 1.0, 64) if limit == 2000 else (1.0, 0.25, 512)
    rng = np.random.default_rng(0)
    stream, kinds = first_stream(rng.normal(size=(N, D + 1)) + 3, limit), set()
    np.testing.assert_allclose(np.sum(stream.average, axis=0), 0, atol=1e-5)
    for t in range(1, 9):
        labels = rng.permutation(np.arange(rows) % N)
        x = rng.normal(size=(rows, D)) + 2 * np.eye(N, D)[(labels + (t == 6)) % N]
        x = (20 if t == 3 else 1) * x.astype(np.float32)
        before, stream = stream, consume(stream, batch(x, labels), jnp.asarray(L2))
        params, inputs = np.asarray(before.iterate.params, float), np.append(x, np.ones((rows, 1)), axis=1)
        h = inputs @ params.T
        matrices = np.array([reference.logit_bound(hj, reference.max_first(hj))[2] for hj in h])
        curvature = matrices[:256].mean(0)
        curvature = curvature if t == 1 else 0.9 * np.asarray(before.label_curvature) + 0.1 * curvature
        np.testing.assert_allclose(stream.label_curvature, curvature, rtol=1e-4, atol=1e-6)
        p = np.exp(h - h.max(1, keepdims=True))
        g = (p / p.sum(1, keepdims=True) - np.eye(N)[labels]).T @ inputs / rows + L2 * params
        rate = 2 / (1 + t / 50) ** 0.75
        relative = jnp.float32(part * rate / 2 * 2000 / rows)
        labels_now = label_factor(stream.label_curvature)
        s = np.asarray(
            kronecker_solve(labels_now, stream.factor, jnp.asarray(g, jnp.float32), jnp.float32(1e-3), relative)
        )
        s = s - s.mean(0)
        mean, weight = (np.asarray(a, float) for a in before.iterate.directions)
        mean, weight = 0.8 * mean + s, 0.8 * weight + 1
        falls = np.sum(g * mean) > 0
        d = mean / weight if falls else s
        u = inputs @ d.T
        most = longest * np.sum(g * d) / (np.mean(np.einsum("bk,bkl,bl->b", u, matrices, u)) + np.sum(L2 * d**2))
        step = min(rate, most) * d
        np.testing.assert_allclose(stream.iterate.params, params - step, atol=1e-3 * np.max(np.abs(step)))
        share = 9 / (t + 8)
        expected = (1 - share) * np.asarray(before.average) + share * np.asarray(stream.iterate.params)
        np.testing.assert_allclose(stream.average, expected, atol=1e-6)
        kinds.add((bool(falls), bool(most < rate)))
    # Steps along the mean of directions and not, as long as the rate says and shorter.
    assert {falls for falls, _ in kinds} == {shorter for _, shorter in kinds} == {True, False}


def test_labels_that_are_left_out_have_no_part_in_a_direction():
    v, known = np.random.default_rng(0).normal(size=(4, 3)), np.array([True, False, True, True])
    expected = np.where(known[:, None], v - v[known].mean(0), 0)
    np.testing.assert_allclose(stream_module._of_known(jnp.asarray(v), jnp.asarray(known)), expected, atol=1e-12)
    np.testing.assert_array_equal(stream_module._of_known(jnp.asarray(v), jnp.zeros(4, bool)), 0)


def test_moments_are_factorised_whenever_their_weight_has_doubled():
    rng = np.random.default_rng(0)
    stream, seen, weights = first_stream(np.zeros((N, D + 1))), [], []
    factor = stream.factor
    for t in range(1, 10):
        x = rng.normal(size=(ROWS, D)) * np.linspace(0.1, 10, D)
        seen.append(np.append(x, np.ones((ROWS, 1)), axis=1))
        stream = consume(stream, batch(x, rng.permutation(np.arange(ROWS) % N)), jnp.asarray(L2))
        if t in (1, 2, 4, 8):
            moments = np.concatenate(seen).T @ np.concatenate(seen) / (t * ROWS)
            factor = stream.factor
            scales, values, u = (np.asarray(a, float) for a in (factor.scales, factor.values, factor.vectors))
            scaled = scales[:, None] * moments * scales[None, :]
            np.testing.assert_allclose(u @ np.diag(values) @ u.T, scaled, atol=1e-5)
        np.testing.assert_array_equal(stream.factor.values, factor.values)
        weights.append(float(stream.factor_weight) / ROWS)
    assert weights == [1, 2, 2, 4, 4, 4, 4, 8, 8]


def test_sketch_is_turned_whenever_its_weight_has_doubled():
    rng = np.random.default_rng(0)
    stream, turns = first_stream(np.zeros((N, D + 1)), 10), []
    for t in range(1, 10):
        labels = rng.permutation(np.arange(ROWS) % N)
        before, stream = stream, consume(stream, batch(rng.normal(size=(ROWS, D)), labels), jnp.asarray(L2))
        assert isinstance(before.moments, Sketch) and isinstance(stream.moments, Sketch)
        turns += [t] if np.any(stream.moments.basis != before.moments.basis) else []
    assert turns == [1, 2, 4, 8]


@pytest.mark.parametrize("limit", [2000, 10], ids=["matrix", "sketch"])
def test_batch_beyond_the_range_of_float32_leaves_the_stream_as_it_was(limit):
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(ROWS, D)), np.arange(ROWS) % N
    stream = first_stream(np.zeros((N, D + 1)), limit)
    for _ in range(2):
        stream = consume(stream, batch(x, labels), jnp.asarray(L2))
    # Its square overflows in the moments, which are not factorised now: the step is finite.
    x[3, 5] = 1e30
    after = consume(stream, batch(x, labels), jnp.asarray(L2))
    jax.tree.map(np.testing.assert_array_equal, after, stream)
