"""The factors of one array: what they stand for, and how they solve."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qbound.optimizers.layer_factors import (
    LeafAxes,
    LeafFactors,
    empty_leaf_factors,
    factorised,
    leaf_layout,
    solved,
    with_probe,
)


def factors_of(samples, layout, kind="estimate", longest=100, damping=0.5, l2=0.0, blocks=1, least=0.0):
    """The factors of samples with equal weights, ready to solve with."""
    factors = empty_leaf_factors(layout, kind, longest, jnp.float64)
    for g in samples:
        factors = with_probe(factors, layout.to_matrices(jnp.asarray(g)), jnp.ones(()))
    numbers = (jnp.asarray(x) for x in (float(len(samples)), damping, l2, least))
    return factorised(factors, *numbers, kind, blocks)


def solve(factors: LeafFactors, layout, g, kind="estimate"):
    return np.asarray(layout.to_leaf(solved(factors, layout.to_matrices(jnp.asarray(g)), kind)))


def symmetric_root(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T


# Layouts.


@pytest.mark.parametrize(
    ("shape", "axes", "sizes"),
    [
        ((), None, (1, 1, 1)),
        ((5,), None, (1, 5, 1)),
        ((5, 3), None, (1, 5, 3)),
        ((3, 3, 2, 7), None, (1, 18, 7)),
        ((4, 5, 3), LeafAxes((1,), (2,)), (4, 5, 3)),
        ((5, 2, 3), LeafAxes((0,), (1, 2)), (1, 5, 6)),
        ((5, 2, 3), LeafAxes((-3,), (-1, 1)), (1, 5, 6)),
        ((4, 5), LeafAxes((1,), ()), (4, 5, 1)),
        ((4, 5), LeafAxes((), (1,)), (4, 5, 1)),
        ((0, 5), None, (1, 0, 5)),
    ],
)
def test_arrays_become_matrices_and_arrays_again(shape, axes, sizes):
    layout = leaf_layout(shape, axes)
    assert layout.sizes == sizes
    leaf = jnp.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape)
    assert layout.to_matrices(leaf).shape == sizes
    np.testing.assert_array_equal(layout.to_leaf(layout.to_matrices(leaf)), leaf)


@pytest.mark.parametrize("axes", [LeafAxes((0,), (0,)), LeafAxes((2,), (0,)), LeafAxes((0, -2), (1,))])
def test_axes_that_do_not_fit_are_named(axes):
    with pytest.raises(ValueError, match=r"axes: expected different axes of an array of shape \(4, 5\); got LeafAxes"):
        leaf_layout((4, 5), axes)


# The estimate.


def test_of_one_example_of_a_linear_layer_the_factors_are_the_exact_kronecker_product():
    """Its gradients are x v' with one x, and v random: the block is xx' (x) E vv'."""
    rng = np.random.default_rng(0)
    x, vs = rng.normal(size=4), rng.normal(size=(50, 3))
    layout = leaf_layout((4, 3), None)
    samples = [np.outer(x, v) for v in vs]
    factors = factors_of(samples, layout)
    rows, columns = (np.asarray(part[0]) / 50 for part in factors[:2])
    block = np.mean([np.outer(g.ravel(), g.ravel()) for g in samples], axis=0)
    np.testing.assert_allclose(np.kron(rows, columns) / np.trace(rows), block, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 3), (1, 4), (4, 1), (1, 1), (6,), (), (2, 2, 3)])
def test_estimate_solves_with_its_damped_factors(shape):
    rng = np.random.default_rng(1)
    layout = leaf_layout(shape, None)
    samples, g = rng.normal(size=(20, *shape)), rng.normal(size=shape)
    _, p, q = layout.sizes
    matrices = samples.reshape(20, p, q)
    rows = np.mean([m @ m.T for m in matrices], axis=0)
    columns = np.mean([m.T @ m for m in matrices], axis=0)
    if len(shape) < 2:
        rows = np.diag(np.diag(rows))
    mean, damping = np.trace(columns) / (p * q), 0.5
    # In units of mean eigenvalues; a side of one entry has no directions of its own to damp.
    left, right = (damping, 0.0) if q == 1 else (0.0, damping) if p == 1 else (np.sqrt(damping), np.sqrt(damping))
    a = rows / np.trace(rows) * p + left * np.eye(p)
    b = columns / np.trace(columns) * q + right * np.eye(q)
    expected = np.linalg.solve(mean * np.kron(a, b), g.ravel()).reshape(shape)
    found = solve(factors_of(samples, layout, damping=damping), layout, g)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_long_axes_have_the_diagonals():
    rng = np.random.default_rng(2)
    layout = leaf_layout((6, 3), None)
    samples = rng.normal(size=(9, 6, 3))
    factors = factors_of(samples, layout, longest=4)
    assert [part.shape for part in factors[:2]] == [(1, 6), (1, 3, 3)]
    full = factors_of(samples, layout)
    np.testing.assert_allclose(factors.factor_rows[0], np.diag(full.factor_rows[0]), rtol=1e-12)
    rows = np.diag(np.asarray(factors.factor_rows[0]) / np.sum(factors.factor_rows) * 6) + np.sqrt(0.5) * np.eye(6)
    columns = np.asarray(full.factor_columns[0] / np.trace(full.factor_columns[0]) * 3) + np.sqrt(0.5) * np.eye(3)
    mean, g = np.trace(full.factor_columns[0]) / 9 / 18, rng.normal(size=(6, 3))
    expected = np.linalg.solve(mean * np.kron(rows, columns), g.ravel()).reshape(6, 3)
    np.testing.assert_allclose(solve(factors, layout, g), expected, rtol=1e-10)


@pytest.mark.parametrize("kind", ["estimate", "bound"])
def test_stacked_matrices_are_as_if_each_were_alone(kind):
    rng = np.random.default_rng(3)
    samples, g = rng.normal(size=(9, 4, 5, 3)), rng.normal(size=(4, 5, 3))
    stacked, alone = leaf_layout((4, 5, 3), LeafAxes((1,), (2,))), leaf_layout((5, 3), None)
    found = solve(factors_of(samples, stacked, kind, blocks=4), stacked, g, kind)
    for i in range(4):
        expected = solve(factors_of(samples[:, i], alone, kind, blocks=4), alone, g[i], kind)
        np.testing.assert_allclose(found[i], expected, rtol=1e-9)


@pytest.mark.parametrize("kind", ["estimate", "bound"])
@pytest.mark.parametrize("shape", [(4, 3), (5,), (1, 1), (1, 4)])
def test_without_curvature_there_is_l2_alone_or_no_step(shape, kind):
    layout, g = leaf_layout(shape, None), np.ones(shape)
    nothing = [np.zeros(shape)]
    np.testing.assert_array_equal(solve(factors_of(nothing, layout, kind), layout, g, kind), np.zeros(shape))
    np.testing.assert_allclose(solve(factors_of(nothing, layout, kind, l2=0.1), layout, g, kind), 10 * g, rtol=1e-6)
    forgotten = [np.full(shape, 1e-9)]
    assert np.all(solve(factors_of(forgotten, layout, kind, least=1e-10), layout, g, kind) == 0)


def test_l2_is_part_of_the_curvature():
    layout, rng = leaf_layout((6,), None), np.random.default_rng(4)
    samples, g = rng.normal(size=(9, 6)), rng.normal(size=6)
    diagonal = np.mean(samples**2, axis=0)
    expected = g / (diagonal + 0.5 * diagonal.mean() + 0.3)
    np.testing.assert_allclose(solve(factors_of(samples, layout, l2=0.3), layout, g), expected, rtol=1e-10)


# The bound.


def rank_one_block(rng, p, q, examples, rank):
    """Gradients a_j b_j' with entries of very different sizes, and the sum of their outer products."""
    a = rng.normal(size=(examples, p)) * 10.0 ** rng.uniform(-2, 2, size=(examples, 1))
    b = rng.normal(size=(examples, q)) @ np.diag(10.0 ** rng.uniform(-2, 2, size=q))
    gradients = [np.outer(x, y) for x, y in zip(a, b, strict=True)]
    return gradients, sum(np.outer(g.ravel(), g.ravel()) for g in gradients)


@given(seed=st.integers(0, 10_000), p=st.integers(1, 5), q=st.integers(1, 4), examples=st.integers(1, 6))
def test_roots_of_the_factors_are_above_the_block_where_gradients_are_of_rank_one(seed, p, q, examples):
    gradients, block = rank_one_block(np.random.default_rng(seed), p, q, examples, 1)
    rows, columns = sum(g @ g.T for g in gradients), sum(g.T @ g for g in gradients)
    above = np.kron(symmetric_root(rows), symmetric_root(columns)) - block
    assert np.linalg.eigvalsh(above).min() > -1e-9 * np.trace(block)


def test_estimate_is_not_above_the_block():
    """Two examples with nothing in common: the estimate halves what it should bound."""
    gradients = [np.outer([1, 0], [1, 0]), np.outer([0, 1], [0, 1])]
    block = sum(np.outer(g.ravel(), g.ravel()) for g in gradients)
    rows, columns = sum(g @ g.T for g in gradients), sum(g.T @ g for g in gradients)
    assert np.linalg.eigvalsh(np.kron(rows, columns) / np.trace(rows) - block).min() == -0.5
    assert np.linalg.eigvalsh(np.kron(symmetric_root(rows), symmetric_root(columns)) - block).min() >= 0


@pytest.mark.parametrize("shape", [(5, 3), (1, 4), (4, 1), (1, 1), (6,), ()])
def test_bound_solves_with_the_roots_of_its_factors(shape):
    rng = np.random.default_rng(5)
    layout = leaf_layout(shape, None)
    samples, g = rng.normal(size=(20, *shape)), rng.normal(size=shape)
    _, p, q = layout.sizes
    matrices = samples.reshape(20, p, q)
    rows = np.mean([m @ m.T for m in matrices], axis=0)
    columns = np.mean([m.T @ m for m in matrices], axis=0)
    mean = np.trace(columns) / (p * q)
    matrix = 3 * np.kron(symmetric_root(rows), symmetric_root(columns)) + (0.5 * mean + 0.1) * np.eye(p * q)
    expected = np.linalg.solve(matrix, g.ravel()).reshape(shape)
    found = solve(factors_of(samples, layout, "bound", l2=0.1, blocks=3), layout, g, "bound")
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_bound_of_a_network_is_above_the_curvature_of_the_linearised_network():
    """Of all three arrays of a perceptron, K = 3 blocks, with the exact factors of each: over random networks."""
    rng = np.random.default_rng(6)
    for _ in range(20):
        shapes = ((4, 5), (5, 3), (3,))
        params = [jnp.asarray(rng.normal(size=shape)) for shape in shapes]
        x = jnp.asarray(rng.normal(size=(7, 4)))

        def logits(params, x=x):
            first, last, bias = params
            return jnp.tanh(x @ first) @ last + bias[None, :]

        jacobian = jax.jit(jax.jacobian(logits))(params)
        # Any factors F_j of label curvatures: here random ones, wider than the labels.
        factors = rng.normal(size=(7, 4, 3))
        rows = [np.einsum("jrn,jn...->jr...", factors, np.asarray(leaf)) for leaf in jacobian]
        flat = np.concatenate([leaf.reshape(28, -1) for leaf in rows], axis=1)
        whole, blocks = flat.T @ flat, []
        for leaf, shape in zip(rows, shapes, strict=True):
            matrices = leaf.reshape(28, *(shape if len(shape) == 2 else (*shape, 1)))
            left = np.einsum("ipq,irq->pr", matrices, matrices)
            right = np.einsum("ipq,ipr->qr", matrices, matrices)
            blocks.append(3 * np.kron(symmetric_root(left), symmetric_root(right)))
        start = 0
        for block in blocks:
            whole[start : start + len(block), start : start + len(block)] -= block
            start += len(block)
        assert np.linalg.eigvalsh(whole).max() < 1e-9
