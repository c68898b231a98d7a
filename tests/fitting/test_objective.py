"""The objective and its derivatives, in one block and in several, against their definitions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from qbound.fitting.objective import Data, LinearObjective, PassSizes, contrasts, extended, fold, sample
from qbound.models.inputs import DenseInputs, SparseInputs
from tests import reference
from tests.fitting.problems import B, N, problem

# The last of several blocks has few rows of its own.
IN_BLOCKS = {
    "one block": PassSizes(),
    "blocks": PassSizes(block_inputs=1, least_rows=64),
    "blocks, nothing held": PassSizes(block_inputs=1, least_rows=64, held=0),
}
in_blocks = pytest.mark.parametrize("sizes", IN_BLOCKS.values(), ids=IN_BLOCKS)
# All is computed as where labels are few, or many.
few_or_many = pytest.mark.parametrize("few_labels", [64, 1], ids=["few labels", "many labels"])
evaluate = jax.jit(LinearObjective.evaluate)


def evaluated(data, l2, params):
    return evaluate(LinearObjective(data, l2), params)


def pieces(data, l2, params, v):
    of = LinearObjective(data, l2)
    point = of.evaluate(params, hold=True)
    return point, of.hessian_product(point, v), of.hessian_diagonal(params)


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("intercept", [True, False], ids=["intercept", "none"])
@in_blocks
@few_or_many
def test_derivatives_are_those_of_the_objective(intercept, compiled, sizes, few_labels):
    p = problem(intercept)
    function = jax.jit(pieces) if compiled else pieces
    sizes = dataclasses.replace(sizes, few_labels=few_labels)
    point, hv, diag = function(*p.arrays(sizes=sizes), jnp.asarray(p.direction))
    value, gradient, matrix = reference.linear_model(p.inputs, p.labels, p.weights, p.l2, p.params)
    assert float(point.objective) == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(point.gradient, gradient, rtol=1e-10, atol=1e-13)
    assert float(point.gradient_norm) == pytest.approx(np.max(np.abs(gradient)), rel=1e-10)
    np.testing.assert_array_equal(point.params, p.params)
    np.testing.assert_allclose(hv.ravel(), matrix @ p.direction.ravel(), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(diag.ravel(), np.diag(matrix), rtol=1e-10)
    labels = sum(w * reference.hessian(h) for w, h in zip(p.weights, p.logits()[0], strict=True))
    np.testing.assert_allclose(
        point.label_curvature, labels if few_labels > 1 else np.diag(labels), rtol=1e-10, atol=1e-13
    )
    if point.probabilities is not None:
        np.testing.assert_allclose(point.probabilities.sum(0), 1, rtol=1e-12)
    assert (point.probabilities is None) == (sizes.held == 0)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "weights of 0"])
@pytest.mark.parametrize("n", [4, 7], ids=["matrix", "diagonal"])
def test_label_curvature_of_many_examples_is_that_of_some(n, weighted):
    """Every third, with their weights made to sum to that of all."""
    p = problem(n=n)
    weights = p.weights if weighted else np.where(np.arange(len(p.weights)) % 3 == 0, 0, p.weights)
    point = evaluated(*p._replace(weights=weights).arrays(sizes=PassSizes(curvature_rows=50, few_labels=5)))
    some = weights[::3] if weighted else np.ones(50)
    some = some * weights.sum() / some.sum()
    expected = sum(w * reference.hessian(h) for w, h in zip(some, p.logits()[0][::3], strict=True))
    np.testing.assert_allclose(point.label_curvature, expected if n == 4 else np.diag(expected), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("intercept", [True, False], ids=["intercept", "none"])
@in_blocks
def test_hessian_is_that_in_contrasts_of_labels(intercept, sizes):
    p = problem(intercept)
    found = jax.jit(LinearObjective.hessian)(p.objective(sizes=sizes), jnp.asarray(p.params))
    matrix = reference.linear_model(p.inputs, p.labels, p.weights, p.l2, p.params)[2]
    q = np.kron(reference.contrasts(N), np.eye(len(p.l2)))
    np.testing.assert_allclose(found, q.T @ matrix @ q, rtol=1e-10, atol=1e-13)


def test_contrasts_are_orthonormal_and_sum_to_zero():
    for n in (2, 3, 7):
        q = np.asarray(contrasts(n, jnp.float64))
        np.testing.assert_allclose(q, reference.contrasts(n), rtol=1e-15)
        np.testing.assert_allclose(q.T @ q, np.eye(n - 1), atol=1e-14)
        np.testing.assert_allclose(q.sum(0), 0, atol=1e-14)


@in_blocks
def test_label_curvature_of_many_labels_is_a_diagonal(sizes):
    p = problem()
    many = dataclasses.replace(sizes, few_labels=N - 1)
    matrix, found = (evaluated(*p.arrays(sizes=of)).label_curvature for of in (sizes, many))
    expected = np.diag(matrix)
    assert found.shape == (N,)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@in_blocks
def test_every_row_counts_once_in_blocks(sizes):
    """Rows that the last block has in common with the one before have no weight there."""
    data = problem().data(sizes=sizes)
    blocks = 1 if sizes == PassSizes() else 3
    zero = jnp.zeros((), jnp.int32)

    def add(carry, block, start):
        counts, seen, rows, calls = carry
        # With the rows as they lie in the data, each weight goes to its place.
        places = start + jnp.arange(len(block.weights), dtype=jnp.int32)
        same = jnp.all(block.labels == data.labels[places]) & jnp.all(block.design.x == data.design.x[places])
        return counts.at[places].add(block.weights), seen & same, rows + len(places), calls + 1

    first = jnp.zeros(B), jnp.array(True), zero, zero
    counts, seen, rows, calls = fold(data, N, add, first)
    np.testing.assert_array_equal(counts, data.weights)
    assert seen
    assert int(calls) == blocks
    assert int(rows) == (B if blocks == 1 else 3 * 64)


@pytest.mark.parametrize(("labels", "inputs", "rows"), [(10, 20, 500), (5000, 20, 1000), (10, 10_000, 200)])
def test_block_holds_few_inputs_and_few_logits(labels, inputs, rows):
    x = jax.eval_shape(lambda: jnp.zeros((100_000, inputs)))
    whole = DenseInputs.__new__(DenseInputs)
    object.__setattr__(whole, "x", x)
    size = PassSizes(block_inputs=2_000_000, block_logits=5_000_000).block_size(whole, labels, cached=False)
    assert size * inputs <= 2_000_000 and size * labels <= 5_000_000
    assert size >= rows / 2.5


@few_or_many
def test_loss_and_gradient_keep_their_digits_where_labels_are_nearly_certain(few_labels):
    """Logits of thousands, of which float32 keeps few decimals, and a loss of 1e-5."""
    data = problem(intercept=False, b=64).data(jnp.float32)
    h = np.full((64, N), 3000.0)
    h[np.arange(64), np.asarray(data.labels)] += 12
    params = jnp.zeros((N, 64), jnp.float32).at[:, :].set(h.T.astype(np.float32))
    weights = jnp.full(64, 1 / 64, jnp.float32)
    data = Data(DenseInputs(jnp.eye(64, dtype=jnp.float32)), data.labels, weights, PassSizes(few_labels=few_labels))
    point = evaluated(data, jnp.zeros(64, jnp.float32), params)
    assert float(point.objective) == pytest.approx(np.log1p(3 * np.exp(-12)), rel=1e-2)
    # One input for each example: what it gives to its label is minus what it gives to the three others.
    observed = np.asarray(point.gradient)[np.asarray(data.labels), np.arange(64)]
    np.testing.assert_allclose(64 * observed, -3 * np.exp(-12) / (1 + 3 * np.exp(-12)), rtol=1e-2)


@few_or_many
def test_examples_of_weight_zero_have_no_part_in_the_gradient(few_labels):
    p, sizes = problem(), PassSizes(few_labels=few_labels)
    counts = np.arange(B) % 3 != 0
    p = p._replace(weights=np.where(counts, p.weights, 0) / p.weights[counts].sum())
    some = p._replace(x=p.x[counts], labels=p.labels[counts], weights=p.weights[counts])
    found, expected = (evaluated(*of.arrays(sizes=sizes)) for of in (p, some))
    assert float(found.objective) == pytest.approx(float(expected.objective), rel=1e-12)
    np.testing.assert_allclose(found.gradient, expected.gradient, rtol=1e-10, atol=1e-13)


def test_examples_of_weight_zero_may_have_inputs_of_any_size():
    """Where labels are few: their logits overflow, and their probabilities are not numbers."""
    p = problem(intercept=False)
    _, l2, params = p.arrays(jnp.float32)
    params, v = 10 * params, jnp.asarray(p.direction, jnp.float32)

    @jax.jit
    def all_of_it(data):
        of = LinearObjective(data, l2)
        point = of.evaluate(params, hold=True)
        numbers = point.objective, point.gradient, point.label_curvature
        return *numbers, of.hessian_product(point, v), of.hessian(params)

    x = np.where(p.weights[:, None] > 0, p.x, 3e38)
    assert not np.all(np.isfinite(p._replace(x=x).data(jnp.float32).logits(params)))
    zeros = np.where(p.weights[:, None] > 0, p.x, 0)
    both = (all_of_it(p._replace(x=inputs).data(jnp.float32)) for inputs in (x, zeros))
    for found, expected in zip(*both, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("labels", "cached_rows", "blocks"), [(64, 50, 1), (65, 50, 3), (65, 74, 3), (65, 75, 1)])
def test_blocks_fit_the_cache_where_labels_and_logits_are_many(labels, cached_rows, blocks):
    data = problem().data(sizes=PassSizes(least_rows=1, cached_logits=65 * cached_rows))
    assert int(fold(data, labels, lambda calls, block, _: calls + 1, jnp.zeros((), jnp.int32))) == blocks


def test_what_is_made_of_data_keeps_the_sizes_of_passes():
    sizes = PassSizes(block_inputs=1, least_rows=64)
    data = problem().data(sizes=sizes)
    assert sample(data, jnp.arange(3, dtype=jnp.int32), jnp.float32).sizes is sizes
    fold(data, N, lambda carry, block, _: carry if block.sizes is sizes else None, jnp.zeros(()))


def test_gradient_sums_to_zero_over_labels_in_float32():
    p = problem()
    point = p.objective(jnp.float32).evaluate(jnp.asarray(p.params, jnp.float32))
    gradient = point.gradient - p.l2.astype(np.float32) * p.params.astype(np.float32)
    assert np.max(np.abs(np.sum(gradient, axis=0))) < 1e-7


def test_products_with_the_hessian_sum_to_zero_over_labels_in_float32():
    """A large part of a direction that is the same for all labels leaves its rounding, held back by l2 alone."""
    p = problem(intercept=False)
    data, _, params = p.arrays(jnp.float32)
    of = LinearObjective(data, jnp.zeros(len(p.l2), jnp.float32))
    v = jnp.asarray(p.direction + 1e4, jnp.float32)
    found = np.asarray(of.hessian_product(of.evaluate(params, hold=True), v))
    assert np.max(np.abs(np.sum(found, axis=0))) < 1e-6 * np.max(np.abs(found))


def test_sparse_inputs_are_not_made_dense():
    sparse = SparseInputs.from_csr(scipy.sparse.csr_array(np.eye(3)), np.float64)
    with pytest.raises(TypeError, match="expected DenseInputs; got SparseInputs"):
        extended(sparse, 3)
