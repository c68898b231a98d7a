"""An epoch of steps on batches, against the same steps with dense matrices."""

import jax.numpy as jnp
import numpy as np
import pytest

from qbound.linear.factors import input_factor
from qbound.linear.stochastic import epoch, first_iterate, no_memory
from tests import reference
from tests.linear.problems import B, N, problem

MOMENTUM, RELATIVE_DAMPING, TYPICAL_BATCH = 0.8, 2.0, 1000
RATES = np.array([2.0, 1.5, 0.5], np.float32)


def dense_steps(p, factor, batches, epochs):
    """Momentum on the solutions of (A (x) B + damping) s = g, in epochs (order, rates, label curvature or None).

    Without a curvature, A is the mean of the bound's on the first batch, and gradients are plain; with one, SAGA's.
    """
    scales, values, vectors = (np.asarray(x, float) for x in (factor.scales, factor.values, factor.vectors))
    b = vectors @ np.diag(values) @ vectors.T
    params, e, count = p.params - p.params.mean(0), len(scales), len(batches)
    relative = RELATIVE_DAMPING * TYPICAL_BATCH / batches.shape[1]
    mean, weight, memory = np.zeros_like(params), 0.0, {}

    def mean_over(rows, function):
        return sum(p.weights[j] * function(p.inputs[j] @ params.T, j) for j in rows if j >= 0)

    for order, rates, curvature in epochs:
        a = curvature
        if curvature is None:
            first = [j for j in batches[order[0]] if j >= 0]
            a = mean_over(first, lambda h, _: reference.logit_bound(h, reference.max_first(h))[2])
            a = a / p.weights[first].sum()
        damping = p.l2.max() + relative * np.trace(a) / N * np.trace(b) / e
        matrix = np.kron(a, b) + damping * np.eye(N * e)
        for i, rate in zip(order, rates, strict=True):
            rows = batches[i]
            g = count * mean_over(
                rows, lambda h, j: np.outer(reference.softmax(h) - np.eye(N)[p.labels[j]], p.inputs[j])
            )
            reduced = g if curvature is None else g - memory[i] + sum(memory.values()) / count
            memory[i] = g
            reduced = reduced - reduced.mean(0) + p.l2 * params
            s = np.linalg.solve(matrix, (reduced * scales).ravel()).reshape(N, e) * scales
            mean = MOMENTUM * mean + s - s.mean(0)
            weight = MOMENTUM * weight + 1
            params = params - rate / weight * mean
    return params


@pytest.mark.parametrize("intercept", [True, False], ids=["intercept", "none"])
def test_epochs_take_the_steps_of_dense_matrices(intercept):
    """A plain one, and one with reduced variance; the last batch has fewer examples."""
    p = problem(intercept)
    data, l2, params = p.arrays()
    factor = input_factor(data.design, data.weights, jnp.arange(B, dtype=jnp.int32), len(p.l2))
    batches = np.random.default_rng(0).permutation(B).reshape(len(RATES), -1)
    batches[-1, -7:] = -1
    start = first_iterate(params - params.mean(0, keepdims=True))
    curvature = (np.eye(N) - 1 / N) / 7
    places = jnp.asarray(batches, jnp.int32)

    def run(iterate, memory, order, reduced):
        numbers = jnp.asarray(order, jnp.int32), jnp.asarray(RATES), jnp.asarray(reduced, jnp.float32)
        return epoch(data, l2, factor, iterate, memory, places, *numbers, jnp.asarray(curvature, jnp.float32))

    plain, memory = run(start, no_memory(start.params, places), [2, 0, 1], 0.0)
    forgetful, nothing = run(start, None, [2, 0, 1], 0.0)
    end, _ = run(plain, memory, [1, 2, 0], 1.0)
    epochs = [([2, 0, 1], RATES, None), ([1, 2, 0], RATES, curvature)]
    for iterate, count in ((plain, 1), (forgetful, 1), (end, 2)):
        expected = dense_steps(p, factor, batches, epochs[:count])
        size = np.max(np.abs(expected - np.asarray(start.params)))
        np.testing.assert_allclose(iterate.params, expected, atol=2e-3 * size)
    assert nothing is None
    assert end.params.dtype == jnp.float32
    assert float(plain.mean_weight) == pytest.approx(1 + 0.8 + 0.64)
