"""Kronecker-factored curvatures: the factors, and systems with them, against dense ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.curvature.kronecker import InputFactor
from qbound.fitting.factors import block_size, exact_block, input_factor, kronecker_solve, label_factor, unknown_block
from qbound.fitting.objective import Data, LinearObjective
from qbound.models.inputs import DenseInputs
from tests import reference
from tests.fitting.problems import B, problem

N, E = 4, 6
L2, RELATIVE = 0.03, 0.1


def second_moments(x, weights):
    return (weights[:, None] * x).T @ x / weights.sum()


def example(seed=0, b=40, sizes=1.0):
    """Inputs with an intercept, weights of which some are 0, and rows to take."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(b, E - 1)) @ rng.normal(size=(E - 1, E - 1)) * sizes
    weights = rng.uniform(0, 1, b) * (rng.random(b) < 0.8)
    return x, weights, rng.permutation(b)[: b // 2].astype(np.int32)


def factor_of(x, weights, rows, rank=None):
    weights = weights / max(weights.sum(), 1e-30)
    data = Data(DenseInputs(jnp.asarray(x)), jnp.zeros(len(x), jnp.int32), jnp.asarray(weights))
    return jax.jit(input_factor, static_argnums=(2, 3))(data, jnp.asarray(rows), E, rank)


def dense(factor):
    """S B S."""
    if factor.vectors is None:
        return np.diag(np.asarray(factor.values))
    vectors = np.asarray(factor.vectors, np.float64)
    matrix = vectors @ np.diag(np.asarray(factor.values)) @ vectors.T
    tail = factor.tail_eigenvalue
    return matrix if tail is None else matrix + float(tail) * (np.eye(E) - vectors @ vectors.T)


def label_curvature(seed=1):
    rng = np.random.default_rng(seed)
    return sum(reference.hessian(h) for h in 2 * rng.normal(size=(5, N))) / 5


def test_input_factor_holds_the_second_moments_of_the_rows_taken_and_squares_of_all_for_rare_columns():
    x, weights, rows = example()
    x[rows, 1] /= 3
    factor = factor_of(x, weights, rows)
    matrix = dense(factor) / np.outer(factor.scales, factor.scales)
    expected = second_moments(reference.with_ones(x[rows]), weights[rows])
    ratios = np.diag(second_moments(reference.with_ones(x), weights)) / np.diag(expected)
    # The second column is one, and others that have less among the rows taken are not.
    assert ratios[1] > 1.5 and np.any((1 < ratios) & (ratios < 1.5))
    expected[1, 1] *= ratios[1]
    assert np.all(np.delete(ratios, 1) < 1.5)
    np.testing.assert_allclose(matrix, expected, rtol=1e-4, atol=1e-5 * np.max(expected))
    assert factor.values.dtype == factor.vectors.dtype == np.float32


@pytest.mark.parametrize("size", [1.0, 1e25], ids=["of size 1", "very large"])
def test_columns_that_the_rows_taken_do_not_have_are_not_taken_for_zero(size):
    x, weights, _ = example()
    rows = np.arange(20, dtype=np.int32)
    x[:, 2] = np.where(np.arange(40) == 30, size, 0)
    weights[30] = 0.5
    factor = factor_of(x, weights, rows)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(factor))
    found = (dense(factor) / np.outer(factor.scales, factor.scales))[2, 2]
    # Squares that float32 does not hold are cut off.
    assert found == pytest.approx(0.5 * size**2 / weights.sum(), rel=1e-4) or (size > 1 and found > 1e15)


def test_few_eigenvectors_are_the_leading_ones_and_the_rest_shares_what_is_left():
    # Two directions that stand out.
    x, weights, _ = example(sizes=np.array([3.0, 2.0, 0.1, 0.1, 0.1]))
    rows = np.arange(40, dtype=np.int32)
    whole, some = factor_of(x, weights, rows), factor_of(x, weights, rows, 2)
    np.testing.assert_allclose(some.scales, whole.scales, rtol=1e-6)
    np.testing.assert_allclose(some.values, whole.values[-2:], rtol=0.02)
    np.testing.assert_allclose(np.trace(dense(some)), np.trace(dense(whole)), rtol=1e-4)
    np.testing.assert_allclose(some.mean_value(), whole.mean_value(), rtol=1e-4)
    overlap = np.linalg.svd(np.asarray(some.vectors).T @ np.asarray(whole.vectors[:, -2:]), compute_uv=False)
    assert np.all(overlap > 0.95)
    # Few inputs have all of them.
    assert factor_of(x, weights, rows, 3).tail_eigenvalue is None


@pytest.mark.parametrize("labels_are_diagonal", [False, True], ids=["label matrix", "label diagonal"])
@pytest.mark.parametrize("inputs", ["matrix", "diagonal", "few eigenvectors"])
def test_solution_is_that_of_the_dense_system(labels_are_diagonal, inputs):
    x, weights, rows = example()
    a = label_curvature()
    a = np.diag(np.diag(a)) if labels_are_diagonal else a
    factor = factor_of(x, weights, rows, 2 if inputs == "few eigenvectors" else None)
    if inputs == "diagonal":
        factor = InputFactor(factor.scales, jnp.linspace(0.1, 2, E, dtype=jnp.float32), None)
    b = dense(factor)
    labels = label_factor(jnp.asarray(np.diag(a) if labels_are_diagonal else a))
    g = np.random.default_rng(3).normal(size=(N, E))
    found = kronecker_solve(labels, factor, jnp.asarray(g), jnp.asarray(L2), RELATIVE)
    damping = L2 + RELATIVE * np.trace(a) / N * np.trace(b) / E
    scales = np.asarray(factor.scales)
    s = np.linalg.solve(np.kron(a, b) + damping * np.eye(N * E), (g * scales).ravel()).reshape(N, E) * scales
    expected = s - s.mean(0)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.max(np.abs(expected)))
    assert found.dtype == g.dtype


@pytest.mark.parametrize("size", [1e-60, 1e60])
def test_solution_is_linear_beyond_the_range_of_float32(size):
    """The system is in float32, and a gradient in float64 may be as small or as large as it likes."""
    x, weights, rows = example()
    factor, labels = factor_of(x, weights, rows), label_factor(jnp.asarray(label_curvature()))
    g = jnp.asarray(np.random.default_rng(3).normal(size=(N, E)))
    expected = kronecker_solve(labels, factor, g, jnp.asarray(L2), RELATIVE)
    found = kronecker_solve(labels, factor, size * g, jnp.asarray(L2), RELATIVE)
    np.testing.assert_allclose(found / size, expected, rtol=1e-4, atol=1e-6)


def test_factor_of_some_rows_needs_no_intercept():
    """The squares of all rows are then of the columns alone."""
    x, weights, rows = example()
    data = Data(DenseInputs(jnp.asarray(x)), jnp.zeros(len(x), jnp.int32), jnp.asarray(weights / weights.sum()))
    factor = input_factor(data, jnp.asarray(rows), E - 1)
    some = weights[rows] / weights[rows].sum()
    scaled = x[rows] * np.asarray(factor.scales)
    np.testing.assert_allclose(dense(factor), scaled.T @ (some[:, None] * scaled), rtol=1e-3, atol=1e-3)


def test_solution_has_its_digits_for_a_small_gradient_of_one_sign():
    """Below the range of float32, in which it is found."""
    x, weights, rows = example()
    factor, labels = factor_of(x, weights, rows), label_factor(jnp.asarray(label_curvature()))
    g = -np.abs(np.random.default_rng(4).normal(size=(N, E)))
    g[0, 0] = 0
    expected, found = (
        kronecker_solve(labels, factor, jnp.asarray(size * g), jnp.asarray(L2), RELATIVE) for size in (1.0, 1e-60)
    )
    np.testing.assert_allclose(1e60 * found, expected, rtol=1e-4, atol=1e-6)


def test_columns_of_all_sizes_have_a_finite_factor():
    sizes = np.array([1e-6, 1e-3, 1.0, 1e3, 1e6])
    x, weights, rows = example(sizes=sizes)
    factor = factor_of(x, weights, rows)
    for leaf in jax.tree.leaves(factor):
        assert np.all(np.isfinite(leaf))
    # Only columns that are large beside others are made smaller, and the larger the more.
    scales = np.asarray(factor.scales)
    assert np.all(scales[:3] > 0.9) and scales[3] < 0.1 and scales[4] < 0.1 * scales[3]
    assert np.all(scales > 0)
    labels = label_factor(jnp.asarray(label_curvature()))
    g = np.random.default_rng(3).normal(size=(N, E)) * np.append(sizes, 1.0)
    g = jnp.asarray(g - g.mean(0))
    s = kronecker_solve(labels, factor, g, jnp.asarray(1e-6), 0.01)
    assert np.all(np.isfinite(s)) and np.sum(g * s) > 0


def test_columns_of_large_numbers_have_a_finite_factor_whatever_their_sign():
    x, weights, _ = example()
    x[:, 0], x[:, 1] = 1e25, -1e25
    factor = factor_of(x, weights, np.arange(40, dtype=np.int32))
    for leaf in jax.tree.leaves(factor):
        assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize("weights", [np.zeros(40), np.ones(40)], ids=["no weight", "no inputs"])
def test_factor_of_nothing_is_finite(weights):
    x, _, rows = example()
    x = 0 * x if weights[0] else x
    factor = factor_of(x, weights, rows)
    for leaf in jax.tree.leaves(factor):
        assert np.all(np.isfinite(leaf))
    g = jnp.asarray(np.random.default_rng(3).normal(size=(N, E)))
    assert np.all(
        np.isfinite(kronecker_solve(label_factor(jnp.asarray(label_curvature())), factor, g, jnp.asarray(L2), 0.1))
    )


def factor_and_block(p, rows, size=E, rank=None):
    """The factor of inputs and the exact block of a problem, from some of its rows, on `size` eigenvectors."""
    data, l2, params = p.arrays()
    factor = jax.jit(input_factor, static_argnums=(2, 3))(data, jnp.asarray(rows), len(p.l2), rank)
    return factor, jax.jit(exact_block, static_argnums=5)(data, jnp.asarray(rows), factor, l2, params, size)


@pytest.mark.parametrize("size", [3, 6], ids=["leading inputs", "all inputs"])
def test_exact_block_is_the_inverse_of_the_hessian_on_leading_inputs(size):
    p = problem()
    rows = np.arange(0, B, 2, dtype=np.int32)
    factor, block = factor_and_block(p, rows, size)
    weights = p.weights[rows] / p.weights[rows].sum()
    hessian = reference.linear_model(p.inputs[rows], p.labels[rows], weights, p.l2, p.params)[2]
    leading = np.asarray(factor.scales)[:, None] * np.asarray(factor.vectors)[:, -size:]
    space = np.kron(reference.contrasts(N), leading)
    assert block.known
    inverse = np.asarray(block.factor).T @ np.asarray(block.factor)
    np.testing.assert_allclose(inverse, np.linalg.inv(space.T @ hessian @ space), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("rank", [None, 2], ids=["all eigenvectors", "few eigenvectors"])
def test_solution_with_a_block_has_it_on_leading_inputs_and_the_product_on_the_others(rank):
    factor, block = factor_and_block(problem(), np.arange(B, dtype=np.int32), 2, rank)
    assert len(block.factor) == 2 * (N - 1) and (factor.tail_eigenvalue is None) == (rank is None)
    labels = label_factor(jnp.asarray(label_curvature()))
    g = np.random.default_rng(3).normal(size=(N, E))
    found = kronecker_solve(labels, factor, jnp.asarray(g), jnp.asarray(L2), RELATIVE, block)
    scales, leading = np.asarray(factor.scales), np.asarray(factor.vectors)[:, -2:]
    without = np.asarray(kronecker_solve(labels, factor, jnp.asarray(g), jnp.asarray(L2), RELATIVE))
    q = reference.contrasts(N)
    solved = np.asarray(block.factor.T @ block.factor) @ (q.T @ (g * scales) @ leading).ravel()
    # Along the leading eigenvectors of inputs that, and nothing else is changed.
    others = without / scales - without / scales @ leading @ leading.T
    expected = (others + q @ solved.reshape(N - 1, 2) @ leading.T) * scales
    np.testing.assert_allclose(found, expected - expected.mean(0), rtol=1e-3, atol=1e-4 * np.max(np.abs(expected)))
    unknown = unknown_block(N, 2)
    assert unknown.factor.shape == block.factor.shape
    found = kronecker_solve(labels, factor, jnp.asarray(g), jnp.asarray(L2), RELATIVE, unknown)
    np.testing.assert_allclose(found, without, rtol=1e-5, atol=1e-6)


def test_exact_block_is_as_large_as_it_pays():
    assert block_size(60_000, 10_000, 10, 785, 785) == 1024 // 9
    assert block_size(600_000, 10_000, 2, 785, 785) == 785
    assert block_size(60_000, 10_000, 65, 785, 785) == 0
    assert block_size(60_000, 10_000, 10, 785, 50) == 50
    # Of few examples a small one, that costs as much as ten products with the Hessian.
    small = block_size(1800, 1800, 10, 65, 65)
    assert 0 < small < 65
    c = 9 * small
    assert 1800 * c**2 + 4 * c**3 <= 10 * 6 * 1800 * 10 * 65


def test_rows_without_weight_spoil_nothing_by_their_size():
    p = problem()
    rows = np.arange(B, dtype=np.int32)
    large = p._replace(x=np.where(p.weights[:, None] > 0, p.x, 1e300))
    for found, expected in zip(
        jax.tree.leaves(factor_and_block(large, rows)), jax.tree.leaves(factor_and_block(p, rows)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_exact_block_of_nothing_is_finite():
    p = problem()
    for nothing in (p._replace(x=0 * p.x), p._replace(weights=0 * p.weights)):
        _, block = factor_and_block(nothing._replace(l2=0 * p.l2), np.arange(B, dtype=np.int32))
        assert np.all(np.isfinite(block.factor))


def test_exact_block_that_is_not_finite_is_not_known():
    p = problem()
    _, block = factor_and_block(p._replace(params=np.nan * p.params), np.arange(B, dtype=np.int32))
    assert not block.known and not np.any(block.factor)


def test_there_is_no_exact_block_where_labels_are_many():
    factor, block = factor_and_block(problem(), np.arange(B, dtype=np.int32), 0)
    assert block_size(B, B, 65, E, E) == 0
    assert unknown_block(65, 0) is block is None


def test_exact_block_mends_the_product_where_labels_are_certain_for_large_inputs():
    """The condition number of the preconditioned Hessian, at the optimum."""
    n, d = 3, 10
    rng = np.random.default_rng(0)
    sizes = np.where(np.arange(d) < 3, 10.0, 1.0)
    x = rng.normal(size=(400, d)) * sizes
    labels = np.argmax(x @ rng.normal(size=(n, d)).T + rng.gumbel(size=(400, n)), axis=1).astype(np.int32)
    weights, l2 = np.full(400, 1 / 400), np.full(d, 1e-3)
    params = reference.linear_optimum(x, labels, weights, l2, n)
    hessian = reference.linear_model(x, labels, weights, l2, params)[2]
    data = Data(DenseInputs(jnp.asarray(x)), jnp.asarray(labels), jnp.asarray(weights))
    rows = jnp.arange(400, dtype=jnp.int32)
    factor = jax.jit(input_factor, static_argnums=2)(data, rows, d)
    block = jax.jit(exact_block, static_argnums=5)(data, rows, factor, jnp.asarray(l2), jnp.asarray(params), 4)
    point = jax.jit(LinearObjective.evaluate)(LinearObjective(data, jnp.asarray(l2)), jnp.asarray(params))
    curvature = label_factor(point.label_curvature)
    contrasts = np.kron(reference.contrasts(n), np.eye(d))

    def condition(block):
        def column(v):
            return kronecker_solve(curvature, factor, v.reshape(n, d), jnp.asarray(1e-3), 0.01, block).ravel()

        inverse = np.asarray(jax.jit(jax.vmap(column))(jnp.eye(n * d)))
        values = np.linalg.eigvals((contrasts.T @ inverse @ contrasts) @ (contrasts.T @ hessian @ contrasts)).real
        return values.max() / values.min()

    assert condition(block) < condition(None) / 10
