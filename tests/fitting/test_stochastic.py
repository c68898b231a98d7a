"""An epoch of steps on batches, against the same steps with dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.fitting.factors import input_factor
from qbound.fitting.stochastic import epoch, first_iterate
from qbound.optimizers import kspfb
from tests import reference
from tests.fitting.problems import B, N, problem

MOMENTUM, RELATIVE_DAMPING, TYPICAL_BATCH = 0.8, 2.0, 1000
RATES = np.array([2.0, 1.5, 0.5], np.float32)


def dense_steps(p, factor, batches):
    """Momentum on the solutions of (A (x) B + damping) s = g, A the mean curvature of the bound on the first batch."""
    scales, values, vectors = (np.asarray(x, float) for x in (factor.scales, factor.values, factor.vectors))
    b = vectors @ np.diag(values) @ vectors.T
    params, e, count = p.params - p.params.mean(0), len(scales), len(batches)
    relative = RELATIVE_DAMPING * TYPICAL_BATCH / batches.shape[1]
    mean, weight = np.zeros_like(params), 0.0

    def mean_over(rows, function):
        return sum(p.weights[j] * function(p.inputs[j] @ params.T, j) for j in rows if j >= 0)

    first = [j for j in batches[0] if j >= 0]
    a = mean_over(first, lambda h, _: reference.logit_bound(h, reference.max_first(h))[2]) / p.weights[first].sum()
    damping = p.l2.max() + relative * np.trace(a) / N * np.trace(b) / e
    matrix = np.kron(a, b) + damping * np.eye(N * e)
    for rows, rate in zip(batches, RATES, strict=True):
        g = count * mean_over(rows, lambda h, j: np.outer(reference.softmax(h) - np.eye(N)[p.labels[j]], p.inputs[j]))
        g = g - g.mean(0) + p.l2 * params
        s = np.linalg.solve(matrix, (g * scales).ravel()).reshape(N, e) * scales
        mean = MOMENTUM * mean + s - s.mean(0)
        weight = MOMENTUM * weight + 1
        params = params - rate / weight * mean
    return params


@pytest.mark.parametrize("intercept", [True, False], ids=["intercept", "none"])
def test_epoch_takes_the_steps_of_dense_matrices(intercept):
    """The last batch has fewer examples: their places are -1, which is not the last example."""
    p = problem(intercept)
    p.weights[-1] = 2 / B
    p = p._replace(weights=p.weights / p.weights.sum())
    data, l2, params = p.arrays()
    factor = jax.jit(input_factor, static_argnums=2)(data, jnp.arange(B, dtype=jnp.int32), len(p.l2))
    batches = np.random.default_rng(0).permutation(B).reshape(len(RATES), -1)
    batches[-1, -7:] = -1
    start = first_iterate(params - params.mean(0, keepdims=True))
    end = epoch(data, l2, factor, start, jnp.asarray(batches, jnp.int32), jnp.asarray(RATES))
    expected = dense_steps(p, factor, batches)
    size = np.max(np.abs(expected - np.asarray(start.params)))
    np.testing.assert_allclose(end.params, expected, atol=2e-3 * size)
    assert end.params.dtype == jnp.float32
    assert float(end.directions.mean_direction_weight) == pytest.approx(1 + 0.8 + 0.64)


def test_small_batches_are_damped_more_and_large_ones_no_less_than_the_typical():
    assert kspfb.RELATIVE_DAMPING == RELATIVE_DAMPING
    small, typical, large = (
        kspfb.batch_damping(RELATIVE_DAMPING, examples)
        for examples in (TYPICAL_BATCH // 4, TYPICAL_BATCH, 100 * TYPICAL_BATCH)
    )
    assert small == 4 * RELATIVE_DAMPING and typical == large == RELATIVE_DAMPING
