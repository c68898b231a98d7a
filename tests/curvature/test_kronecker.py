"""The solve with a Kronecker product, against the matrix of all parameters by all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.curvature.kronecker import (
    BohningLabels,
    DiagonalLabels,
    InputFactor,
    SpectralLabels,
    factorised_inputs,
    factorised_labels,
    solve_in_factors,
)
from tests import reference

N, E, DAMPING = 4, 6, 0.3
RNG = np.random.default_rng(0)
G, SCALES = RNG.normal(size=(N, E)), RNG.uniform(0.3, 2, size=E)
ROTATION, _ = np.linalg.qr(RNG.normal(size=(N, N)))
VALUES = np.array([0.0, 0.1, 1.0, 2.0])
ROWS = RNG.normal(size=(9, E)) * np.array([5.0, 3.0, 1.0, 0.5, 0.2, 0.1])
MOMENTS = ROWS.T @ ROWS / 9


def labels_of(kind, dtype):
    """A factor of labels, and its matrix."""
    values = jnp.asarray(VALUES, dtype)
    if kind == "spectral":
        return SpectralLabels(values, jnp.asarray(ROTATION, dtype)), (ROTATION * VALUES) @ ROTATION.T
    if kind == "diagonal":
        return DiagonalLabels(values), np.diag(VALUES)
    return BohningLabels(N, jnp.dtype(dtype)), reference.bohning(N)


def inputs_of(kind, dtype):
    """A factor of scaled inputs, and its matrix."""
    values, vectors = np.linalg.eigh(MOMENTS)
    tail = None
    if kind == "diagonal":
        matrix, vectors = np.diag(values), None
    elif kind == "few vectors":  # the leading two, and a column of zeros
        values, vectors, tail = np.append(values[-2:], 0), np.c_[vectors[:, -2:], np.zeros(E)], 0.3
        matrix = (vectors * values) @ vectors.T + tail * (np.eye(E) - vectors @ vectors.T)
    else:
        matrix = MOMENTS
    arrays = (None if a is None else jnp.asarray(a, dtype) for a in (SCALES, values, vectors, tail))
    return InputFactor(*arrays), matrix


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
@pytest.mark.parametrize("inputs", ["all vectors", "few vectors", "diagonal"])
@pytest.mark.parametrize("labels", ["spectral", "diagonal", "bohning"])
def test_solve_equals_the_dense_one(labels, inputs, dtype):
    (a, a_matrix), (b, b_matrix) = labels_of(labels, dtype), inputs_of(inputs, dtype)
    system = np.kron(a_matrix, b_matrix) + DAMPING * np.eye(N * E)
    expected = np.linalg.solve(system, (G * SCALES).ravel()).reshape(N, E) * SCALES
    g, damping = jnp.asarray(G, dtype), jnp.asarray(DAMPING, dtype)
    tolerance = 1e-10 if dtype == jnp.float64 else 1e-5
    for solve in (solve_in_factors, jax.jit(solve_in_factors)):
        np.testing.assert_allclose(solve(a, b, g, damping), expected, atol=tolerance)
    kept = jax.jit(lambda *of: solve_in_factors(*of, lambda solved, given: solved))(a, b, g, damping)
    np.testing.assert_allclose(kept, expected, atol=tolerance)
    np.testing.assert_allclose(a.mean_value(), np.trace(a_matrix) / N, rtol=1e-6)
    if inputs != "few vectors":
        np.testing.assert_allclose(b.mean_value(), np.trace(b_matrix) / E, rtol=1e-6)


@pytest.mark.parametrize("inputs", ["all vectors", "few vectors"])
def test_leading_part_is_what_it_is_replaced_by(inputs):
    """Of what was solved along eigenvectors of inputs, and of what was given there; the rest stays."""
    (a, _), (b, _) = labels_of("spectral", jnp.float64), inputs_of(inputs, jnp.float64)
    g, damping = jnp.asarray(G), jnp.asarray(DAMPING)
    plain = solve_in_factors(a, b, g, damping)
    changed = solve_in_factors(a, b, g, damping, lambda solved, given: solved + 2 * given)
    u = np.asarray(b.vectors)
    np.testing.assert_allclose(changed - plain, 2 * (G * SCALES) @ u @ u.T * SCALES, atol=1e-12)


def test_factors_are_made_of_matrices():
    curvature = jnp.asarray((ROTATION * VALUES) @ ROTATION.T)
    for labels in (factorised_labels(curvature), factorised_labels(jnp.diag(curvature))):
        matrix = np.asarray(curvature if isinstance(labels, SpectralLabels) else jnp.diag(jnp.diag(curvature)))
        np.testing.assert_allclose(labels.apply(jnp.asarray(G), lambda a: a), matrix @ G, atol=1e-12)
    whole = factorised_inputs(jnp.asarray(MOMENTS), jnp.asarray(SCALES), None)
    values, vectors = np.asarray(whole.values), np.asarray(whole.vectors)
    np.testing.assert_allclose((vectors * values) @ vectors.T, MOMENTS, atol=1e-12)
    assert whole.tail_eigenvalue is None
    few = factorised_inputs(jnp.asarray(MOMENTS), jnp.asarray(SCALES), 2)
    assert few.vectors.shape == (E, 2)
    np.testing.assert_allclose(few.mean_value(), np.trace(MOMENTS) / E, rtol=1e-6)
    np.testing.assert_allclose(few.tail_eigenvalue, np.linalg.eigvalsh(MOMENTS)[:4].mean(), rtol=0.2)
