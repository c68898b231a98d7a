"""Conjugate gradients: the right solution, or the best one so far and an honest account of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qbound
from qbound import trees
from qbound.curvature.model import mean_curvature
from qbound.linalg.cg import conjugate_gradients


def _system(d=12, condition=100.0, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.normal(size=(d, d)))
    matrix = (q * np.geomspace(1, condition, d)) @ q.T
    return matrix.astype(dtype), rng.normal(size=d).astype(dtype)


@functools.partial(jax.jit, static_argnames=("max_steps", "tolerance", "preconditioned"))
def _solve(matrix, g, start=None, *, max_steps=100, tolerance=1e-10, preconditioned=False):
    """On a tree of two leaves, as the transforms use it."""

    def split(v):
        return {"a": v[:5], "b": v[5:].reshape(-1, 1)}

    def join(tree):
        return jnp.concatenate([tree["a"], tree["b"].reshape(-1)])

    solution = conjugate_gradients(
        lambda v: split(matrix @ join(v)),
        split(g),
        max_steps=max_steps,
        tolerance=tolerance,
        precondition=(lambda r: split(join(r) / jnp.diag(matrix))) if preconditioned else None,
        start=None if start is None else split(start),
    )
    return solution._replace(vector=join(solution.vector), product=join(solution.product))


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_cg_equals_the_dense_solve(warm, preconditioned):
    matrix, g = _system()
    start = np.random.default_rng(1).normal(size=g.shape) if warm else None
    solution = _solve(matrix, g, start, preconditioned=preconditioned)
    np.testing.assert_allclose(solution.vector, np.linalg.solve(matrix, g), rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(solution.product, matrix @ solution.vector, rtol=1e-12)
    assert solution.residual < 1e-9
    assert 0 < solution.steps <= 20


def test_preconditioner_saves_steps_on_a_badly_scaled_system():
    matrix, g = _system()
    scale = np.geomspace(1, 1e3, len(g))
    matrix = matrix * scale[:, None] * scale[None, :]
    plain, preconditioned = (_solve(matrix, g, tolerance=1e-6, preconditioned=p) for p in (False, True))
    assert preconditioned.steps < plain.steps
    np.testing.assert_allclose(preconditioned.vector, np.linalg.solve(matrix, g), rtol=1e-3, atol=1e-9)


def test_good_start_saves_steps():
    matrix, g = _system()
    near = np.linalg.solve(matrix, g) * 1.01
    assert _solve(matrix, g, near, tolerance=1e-4).steps < _solve(matrix, g, tolerance=1e-4).steps


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_start_is_never_worse_than_zero(steps):
    """The quadratic at the solution is below the one at zero, however bad the start."""
    matrix, g = _system(condition=1e4)
    for start in (-100 * g, 1e6 * np.ones_like(g), np.zeros_like(g)):
        s = np.asarray(_solve(matrix, g, start, max_steps=steps).vector)
        assert np.isfinite(s).all()
        assert g @ s - s @ matrix @ s / 2 >= 0


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_truncated_solution_minimises_along_itself(steps):
    matrix, g = _system(condition=1e4)
    solution = _solve(matrix, g, max_steps=steps)
    assert solution.steps == steps
    np.testing.assert_allclose(solution.vector @ solution.product, g @ solution.vector, rtol=1e-9)


def test_limit_on_steps_is_seen_in_the_residual():
    matrix, g = _system(condition=1e4)
    solution = _solve(matrix, g, max_steps=2)
    assert solution.residual > 1e-2
    np.testing.assert_allclose(
        solution.residual, np.linalg.norm(g - matrix @ solution.vector) / np.linalg.norm(g), rtol=1e-9
    )


def test_reported_residual_is_the_true_one_where_the_recursion_drifts():
    """In float32 the residual carried along goes on falling; the true one does not."""
    matrix, g = _system(condition=1e6, dtype=np.float32)
    solution = _solve(matrix, g, max_steps=200, tolerance=1e-7)
    assert solution.steps < 200, "the recursion believes that it has converged"
    exact = np.linalg.norm(g - matrix.astype(float) @ np.asarray(solution.vector, float)) / np.linalg.norm(g)
    assert exact > 1e-6
    np.testing.assert_allclose(solution.residual, exact, rtol=0.5)


def test_zero_needs_no_step():
    matrix, g = _system()
    solution = _solve(matrix, 0 * g)
    assert solution.steps == 0
    assert solution.residual == 0
    np.testing.assert_array_equal(solution.vector, 0 * g)


@pytest.mark.parametrize("make", [lambda m: -m, lambda m: 0 * m, lambda m: np.diag([1.0] * 6 + [-1.0] * 6)])
def test_breakdown_leaves_a_finite_solution_and_is_reported(make):
    matrix, g = _system()
    solution = _solve(make(matrix), g)
    assert np.isfinite(solution.vector).all()
    assert solution.residual > 0.1
    assert solution.steps < 100


def test_not_a_number_is_reported_and_not_returned():
    matrix, g = _system()
    solution = _solve(matrix * np.nan, g)
    np.testing.assert_array_equal(solution.vector, 0 * g)
    assert np.isnan(solution.residual)


def test_cg_converges_for_logistic_regression_at_zero():
    """The curvature is singular there but for the damping; a library's CG returned NaN after five steps."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(size=(200, 50)), jnp.float32)
    w = jnp.zeros((50, 10), jnp.float32)
    g = jnp.asarray(rng.normal(size=(50, 10)), jnp.float32)

    @jax.jit
    def solve(w, g):
        bound = functools.partial(qbound.log_partition_bound, order="max_first")
        curvature = mean_curvature(lambda w, x: x @ w, w, x, jnp.ones(200, jnp.float32), bound=bound)
        return conjugate_gradients(
            lambda v: trees.add_scaled(curvature.mv(v), jnp.float32(1e-4), v), g, max_steps=400, tolerance=1e-3
        )

    solution = solve(w, g)
    assert np.isfinite(solution.vector).all()
    assert solution.residual < 2e-3
    assert 5 < solution.steps < 400
