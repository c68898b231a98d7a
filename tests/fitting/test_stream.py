"""Steps of a stream: never longer than the bound of their batch allows, with moments and labels of all seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.fitting import moments
from qbound.fitting.label_means import LabelMeans, Sums, curvature_along, gradient, label_means, unlikeness
from qbound.fitting.objective import Data
from qbound.fitting.stream import consume, first_stream, rescaled
from qbound.models.inputs import DenseInputs
from tests import reference

D, N, ROWS = 40, 3, 64
L2 = np.append(np.full(D, 1e-3), 0).astype(np.float32)
sketch_factor, turned, with_rows = jax.jit(moments.sketch_factor), jax.jit(moments.turned), jax.jit(moments.with_rows)


def batch(x, labels, weight=1.0):
    weights = jnp.full(len(x), weight, jnp.float32)
    return Data(DenseInputs(jnp.asarray(x, jnp.float32)), jnp.asarray(labels, jnp.int32), weights)


def batch_objective(params, x, labels):
    params, x = np.asarray(params, float), np.append(x, np.ones((len(x), 1)), axis=1)
    h = x @ params.T
    loss = np.mean(np.log(np.sum(np.exp(h - h.max(1, keepdims=True)), 1)) + h.max(1) - h[np.arange(len(h)), labels])
    return loss + np.sum(L2 * params**2) / 2


@pytest.mark.parametrize("limit", [2000, 10], ids=["matrix", "sketch"])
def test_no_step_makes_the_objective_of_its_batch_rise(limit):
    """Inputs grow a thousandfold between factorisations, and columns come that were all 0."""
    rng = np.random.default_rng(0)
    stream = first_stream(np.zeros((N, D + 1)), limit)
    for t in range(12):
        x = rng.normal(size=(ROWS, D)) * 10.0 ** (t % 4 - 1)
        x[:, t + 20 :] = 0
        labels = rng.permutation(np.arange(ROWS) % N)
        before = batch_objective(stream.iterate.params, x, labels)
        stream = consume(stream, batch(x, labels), jnp.asarray(L2))
        after = batch_objective(stream.iterate.params, x, labels)
        assert after <= before * (1 + 1e-5)
    assert int(stream.steps) == 12 and np.any(stream.iterate.params != 0)


@pytest.mark.parametrize("limit", [2000, 10], ids=["matrix", "sketch"])
def test_weights_may_change_their_unit_in_a_stream(limit):
    rng = np.random.default_rng(0)
    stream = other = first_stream(np.zeros((N, D + 1)), limit)
    unit = 1.0
    for change in (1.0, 2.0**-6, 1.0, 2.0**9, 2.0**-20):
        unit *= change
        x = rng.normal(size=(ROWS, D)) + 1
        labels = np.argmax(x[:, :N], axis=1)
        stream = consume(stream, batch(x, labels), jnp.asarray(L2))
        other = consume(rescaled(other, change), batch(x, labels, unit), jnp.asarray(L2))
        assert float(other.weight) == unit * float(stream.weight)
        np.testing.assert_allclose(other.iterate.params, stream.iterate.params, rtol=1e-4, atol=1e-5)
    assert np.max(np.abs(stream.iterate.params)) > 0.1


def dense_factor(factor):
    s, u, v = (np.asarray(a, float) for a in (factor.scales, factor.vectors, factor.values))
    inner = u @ np.diag(v - float(factor.tail_eigenvalue)) @ u.T + float(factor.tail_eigenvalue) * np.eye(len(s))
    return inner / s[:, None] / s[None, :]


def test_sketch_knows_the_leading_moments_through_turns():
    rng = np.random.default_rng(0)
    directions, seen, sketch = np.sign(rng.normal(size=(2, 50))), [], moments.no_sketch(50)
    for t in range(4):
        x = rng.normal(size=(100, 50)) + 5 + 10 * rng.normal(size=(100, 2)) @ directions
        seen.append(x)
        sketch = with_rows(sketch, jnp.asarray(x, jnp.float32), jnp.ones(100, jnp.float32))
        sketch = turned(sketch) if t % 2 else sketch
    x = np.concatenate(seen)
    expected = x.T @ x / len(x)
    factor = sketch_factor(sketch, jnp.float32(len(x)))
    # What is added to the moments is the typical rest of a column, about 1 here.
    assert np.linalg.norm(dense_factor(factor) - expected, 2) < 0.01 * np.linalg.norm(expected, 2)
    np.testing.assert_allclose(sketch.squares, np.sum(x**2, axis=0), rtol=1e-5)


def test_column_that_comes_late_has_its_curvature_at_once():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 50))
    x[:, 7] = 0
    sketch = with_rows(moments.no_sketch(50), jnp.asarray(x, jnp.float32), jnp.ones(100, jnp.float32))
    x[:, 7] = 30
    sketch = with_rows(sketch, jnp.asarray(x, jnp.float32), jnp.ones(100, jnp.float32))
    factor = sketch_factor(sketch, jnp.float32(200))
    assert dense_factor(factor)[7, 7] > 0.9 * 450


def test_means_have_the_gradient_and_the_bound_of_examples():
    rng = np.random.default_rng(0)
    sums = Sums(jnp.asarray([2, 0, 6], jnp.float32), jnp.asarray(rng.normal(size=(3, 4)), jnp.float32).at[1].set(0))
    means = label_means(sums)
    np.testing.assert_allclose(means.frequencies, [0.25, 0, 0.75])
    np.testing.assert_allclose(means.means[2], sums.inputs[2] / 6, rtol=1e-6)
    params, direction = (jnp.asarray(rng.normal(size=(3, 4)), jnp.float32) for _ in range(2))
    known = jnp.ones(3, bool)

    def loss(params):
        logits = means.means @ params.T
        return jnp.sum(means.frequencies * (jax.nn.logsumexp(logits, axis=1) - jnp.diag(logits)))

    np.testing.assert_allclose(gradient(means, params, known), jax.jit(jax.grad(loss))(params), atol=1e-6)
    expected = 0.0
    for f, x in zip(np.asarray(means.frequencies, float), np.asarray(means.means, float), strict=True):
        h, u = np.asarray(params, float) @ x, np.asarray(direction, float) @ x
        expected += f * u @ reference.logit_bound(h, reference.max_first(h))[2] @ u
    found = jax.jit(curvature_along)(means, params, known, direction)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_unlikeness_is_beyond_chance():
    rng = np.random.default_rng(0)
    examples = jnp.float32(500)

    def of(before, now):
        return float(unlikeness(jnp.asarray(before, jnp.float32), jnp.asarray(now, jnp.float32), examples))

    for n in (2, 10, 400):
        before, now = (rng.multinomial(rows, np.full(n, 1 / n)) for rows in (2000, 500))
        assert of(before, now) == 0
    assert of([2000, 0], [0, 500]) > 0.9
    assert 0.4 < of([1000, 1000], [0, 500]) < 0.5
    assert of([0, 0], [0, 500]) == 0


def test_batches_of_one_label_do_not_forget_the_others():
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(3 * ROWS, D)) + 1, np.repeat(np.arange(N), ROWS)
    x[np.arange(len(x)), labels] += 2
    stream, places = first_stream(np.zeros((N, D + 1))), rng.permutation(len(x))
    for some in np.split(np.tile(places, 3), 9):
        stream = consume(stream, batch(x[some], labels[some]), jnp.asarray(L2))
    before = batch_objective(stream.iterate.params, x, labels)
    for _ in range(5):
        stream = consume(stream, batch(x[:ROWS], labels[:ROWS]), jnp.asarray(L2))
    after = batch_objective(stream.iterate.params, x, labels)
    assert before < 0.8 * np.log(N) and after < 1.4 * before


def test_means_of_labels_are_those_of_all_that_was_seen():
    rng = np.random.default_rng(0)
    stream, seen, of = first_stream(np.zeros((N, D + 1))), [], []
    for _ in range(3):
        x, labels = rng.normal(size=(ROWS, D)), rng.integers(N, size=ROWS)
        stream = consume(stream, batch(x, labels), jnp.asarray(L2))
        seen.append(x)
        of.append(labels)
    x, labels = np.concatenate(seen), np.concatenate(of)
    means = label_means(stream.labels)
    assert isinstance(means, LabelMeans)
    for k in range(N):
        np.testing.assert_allclose(means.means[k], np.append(x[labels == k].mean(0), 1), atol=1e-5)
    np.testing.assert_allclose(means.frequencies, np.bincount(labels) / len(labels), rtol=1e-6)
