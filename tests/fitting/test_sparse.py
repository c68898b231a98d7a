"""Sparse inputs: products equal to those of the dense array, without ever making one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import ClosedJaxpr, Jaxpr

from qbound.fitting.objective import Data, LinearObjective, PassSizes
from qbound.models.inputs import SparseInputs
from tests import reference
from tests.fitting.problems import problem

LABELS = 3


def random_matrix(density, shape=(9, 12), seed=0):
    rng = np.random.default_rng(seed)
    return np.where(rng.random(shape) < density, rng.normal(size=shape), 0)


def with_long_rows():
    """A row of 600 entries, more than two levels of chunks hold, one of exactly 256, one of 17, and empty ones."""
    matrix = np.zeros((6, 600))
    rng = np.random.default_rng(1)
    for row, count in enumerate((600, 0, 256, 17, 1, 16)):
        matrix[row, rng.permutation(600)[:count]] = rng.normal(size=count)
    return matrix


def with_empty_rows_and_columns():
    matrix = random_matrix(0.5)
    matrix[[0, 4, 8]] = 0
    matrix[:, [0, 5, 11]] = 0
    return matrix


CASES = {
    "dense": random_matrix(1.0),
    "half full": random_matrix(0.5),
    "empty rows and columns": with_empty_rows_and_columns(),
    "no entries": np.zeros((9, 12)),
    "one entry": np.eye(9, 12) * (np.arange(9) == 3)[:, None],
    "long rows": with_long_rows(),
    "long columns": with_long_rows().T,
}


@jax.jit
def both_products(x, v, r):
    return x.forward(v), x.transpose(r)


def assert_equals_dense(csr, dense):
    b, d = dense.shape
    rng = np.random.default_rng(2)
    v, r = rng.normal(size=(LABELS, d)), rng.normal(size=(LABELS, b))
    sparse = SparseInputs.from_csr(csr, np.float64)
    assert sparse.shape() == (b, d)
    for x, expected in ((sparse, dense), (sparse.squared(), dense**2)):
        forward, transpose = both_products(x, v, r)
        np.testing.assert_allclose(forward, v @ expected.T, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(transpose, r @ expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("container", [scipy.sparse.csr_matrix, scipy.sparse.csr_array], ids=["matrix", "array"])
@pytest.mark.parametrize("dense", CASES.values(), ids=CASES)
def test_products_are_those_of_the_dense_array(dense, container):
    assert_equals_dense(container(dense), dense)


def test_entries_may_be_in_any_order_and_in_several_parts():
    dense = random_matrix(0.6)
    csr = scipy.sparse.csr_array(dense)
    rng = np.random.default_rng(3)
    indices, data = csr.indices.copy(), csr.data.copy()
    for start, end in zip(csr.indptr[:-1], csr.indptr[1:], strict=True):
        places = start + rng.permutation(end - start)
        indices[start:end], data[start:end] = csr.indices[places], csr.data[places]
    unsorted = scipy.sparse.csr_array((data, indices, csr.indptr), dense.shape)
    assert not unsorted.has_sorted_indices
    assert_equals_dense(unsorted, dense)
    twice = (np.repeat(data, 2) / 2, np.repeat(indices, 2), 2 * csr.indptr)
    parts = SparseInputs.from_csr(scipy.sparse.csr_array(twice, dense.shape), np.float64)
    np.testing.assert_allclose(parts.forward(jnp.eye(12)), dense.T, rtol=1e-12)
    np.testing.assert_allclose(parts.transpose(jnp.eye(9)), dense, rtol=1e-12)
    explicit_zeros = scipy.sparse.csr_array((0 * data, indices, csr.indptr), dense.shape)
    assert_equals_dense(explicit_zeros, 0 * dense)


@settings(max_examples=15)
@given(density=st.floats(0, 1), seed=st.integers(0, 1000))
def test_products_of_any_pattern_are_those_of_the_dense_array(density, seed):
    dense = random_matrix(density, seed=seed)
    assert_equals_dense(scipy.sparse.csr_array(dense), dense)


@pytest.mark.parametrize("few_labels", [64, 1], ids=["few labels", "many labels"])
def test_derivatives_are_those_of_dense_inputs(few_labels):
    """With an intercept, which has no entries in the matrix."""
    p = problem()
    x = np.where(np.abs(p.x) > 1, p.x, 0)
    design = SparseInputs.from_csr(scipy.sparse.csr_array(x), np.float64)
    data = Data(design, jnp.asarray(p.labels), jnp.asarray(p.weights), PassSizes(few_labels=few_labels))
    _, l2, params = p.arrays()

    @jax.jit
    def pieces(of, params, v):
        point = of.evaluate(params)
        return point, of.hessian_product(point, v), of.hessian_diagonal(params)

    point, hv, diag = pieces(LinearObjective(data, l2), params, jnp.asarray(p.direction))
    inputs = reference.with_ones(x)
    value, gradient, matrix = reference.linear_model(inputs, p.labels, p.weights, p.l2, p.params)
    assert float(point.objective) == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(point.gradient, gradient, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(np.ravel(hv), matrix @ p.direction.ravel(), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(np.ravel(diag), np.diag(matrix), rtol=1e-10)


def is_program(value):
    return isinstance(value, (ClosedJaxpr, Jaxpr))


def sizes(jaxpr):
    """Of all that a program computes."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        for inner in jax.tree.leaves(equation.params, is_leaf=is_program):
            if is_program(inner):
                yield from sizes(getattr(inner, "jaxpr", inner))


def test_no_array_has_a_place_for_every_entry():
    b, d, count = 3000, 2000, 5000
    rng = np.random.default_rng(4)
    entries = rng.normal(size=count), (rng.integers(0, b, count), rng.integers(0, d, count))
    sparse = SparseInputs.from_csr(scipy.sparse.csr_array(entries, shape=(b, d)), np.float32)
    stored = sum(leaf.size for leaf in jax.tree.leaves(sparse))
    assert stored < b * d / 20
    v, r = jnp.zeros((LABELS, d), jnp.float32), jnp.zeros((LABELS, b), jnp.float32)
    for function, argument in ((SparseInputs.forward, v), (SparseInputs.transpose, r)):
        jaxpr = jax.make_jaxpr(function)(sparse, argument)
        largest = max(sizes(jaxpr.jaxpr))
        # Nor one for every stored entry times every label.
        assert largest < count * LABELS, function
