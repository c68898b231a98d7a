"""Single steps: the paper's, safe from anywhere, and certified."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qbound
from qbound import mm
from tests import reference
from tests.mm import problems

DTYPES = (jnp.float32, jnp.float64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)

# The variants whose steps are compiled, one for each kind of direction and of length, with CG that is cut short.
VARIANTS = {
    "bound": {"curvature": "bound"},
    "bound, one step of CG": {"curvature": "bound", "max_cg_steps": 1},
    "certificates": {"curvature": "auto", "max_cg_steps": 3},
    "line search": {"curvature": "auto", "search": True, "max_cg_steps": 3},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def certified_trajectory(problem, l2, eta, dtype, variant, steps=5):
    """Iterates and infos, after the checks that every accepted step must pass, by the objective in NumPy."""
    iterates, infos = problems.trajectory(*problem.cast(dtype), l2, eta, steps=steps, **VARIANTS[variant])
    targets = problems.one_hot(problem.labels, problem.params.shape[1])
    inputs = np.asarray(jnp.asarray(problem.inputs, dtype), np.float64)
    values = np.array([problems.objective(params, inputs, targets, l2) for params in iterates])
    decreases = -np.diff(values)
    rounding = 64 * float(jnp.finfo(dtype).eps) * (1 + np.abs(values[:-1]) + np.abs(np.asarray(iterates)).max())
    rounding = rounding * (1 + np.abs(inputs).max())
    certified, actual = (np.asarray(x, float) for x in (infos.certified_decrease, infos.actual_decrease))
    assert np.isfinite(np.asarray(iterates)).all()
    assert (certified >= 0).all()
    assert (decreases >= certified - rounding).all()
    assert (actual >= certified).all()
    np.testing.assert_allclose(actual, decreases, rtol=1e-3, atol=rounding.max())
    accepted = np.asarray(infos.certificate) != mm.Certificate.NONE
    assert (certified[accepted] > 0).all()
    return iterates, infos, accepted


@every_dtype
@every_variant
@given(
    seed=st.integers(0, 10**6),
    start=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    l2=st.sampled_from([1e-6, 1e-3, 1.0]),
)
@settings(max_examples=40)
def test_objective_never_rises(variant, dtype, seed, start, scale, l2):
    """At eta = 1, from anywhere, and every step decreases it by what is certified at least."""
    problem = problems.random(seed=seed, start=start, scale=scale)
    _, _, accepted = certified_trajectory(problem, l2, 1.0, dtype, variant)
    assert accepted[0]


@given(seed=st.integers(0, 10**6), eta=st.floats(0.01, 1.99), start=st.sampled_from([0.0, 3.0]))
@settings(max_examples=40)
def test_objective_falls_for_any_relaxation(seed, eta, start):
    problem = problems.random(seed=seed, start=start)
    for variant in ("bound", "bound, one step of CG"):
        _, infos, accepted = certified_trajectory(problem, 1e-2, eta, jnp.float64, variant)
        assert accepted[0]
        assert infos.actual_decrease[0] > 0


@pytest.mark.parametrize("eta", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("solver", "order"), [("dense", "given"), ("cg", "max_first")])
def test_steps_are_equation_4_of_the_paper(solver, order, eta):
    problem = problems.random(start=0.5)
    features = reference.linear_features(problem.inputs, 3)
    targets = problems.one_hot(problem.labels, 3)
    expected = reference.majorise_minimise(problem.params.ravel(), features, targets, 0.1, 4, eta, order=order)
    iterates, infos = problems.trajectory(
        *problem.cast(jnp.float64), 0.1, eta, 1e-12, steps=4, curvature="bound", solver=solver, order=order
    )
    np.testing.assert_allclose(iterates.reshape(5, -1), expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(infos.step_length, eta, rtol=1e-6)


def test_bohning_steps_are_those_of_its_fixed_matrix():
    problem = problems.random(start=0.5)
    features = reference.linear_features(problem.inputs, 3)
    targets = problems.one_hot(problem.labels, 3)
    expected = reference.majorise_minimise(
        problem.params.ravel(), features, targets, 0.1, 4, curvature=reference.bohning(3)
    )
    iterates, _ = problems.trajectory(*problem.cast(jnp.float64), 0.1, steps=4, curvature="bohning", solver="dense")
    np.testing.assert_allclose(iterates.reshape(5, -1), expected, atol=1e-9)


def test_truncated_solution_certifies_half_its_slope():
    """s'Bs = g's for CG from zero, so that the bound's minimum along s is at length 1 and g's/2 below."""
    problem = problems.random(start=1.0)
    _, infos = problems.trajectory(
        *problem.cast(jnp.float64), 1e-2, 1.0, 0.0, steps=4, curvature="bound", max_cg_steps=2
    )
    np.testing.assert_array_equal(infos.cg_steps, 2)
    np.testing.assert_allclose(infos.step_length, 1, rtol=1e-9)


def test_bound_wins_far_away_and_the_local_certificate_near_by():
    problem = problems.random(start=100.0, seed=3)
    _, infos = problems.trajectory(*problem.cast(jnp.float64), 1e-2, steps=30)
    won = [int(c) for c in infos.certificate if c != mm.Certificate.NONE]
    assert won[0] == mm.Certificate.BOUND
    assert won[-1] == mm.Certificate.LOCAL
    assert infos.gradient_norm[-1] < 1e-9


def test_line_search_is_no_worse_than_the_certified_step():
    problem = problems.random(start=3.0)
    first = {}
    for search in (False, True):
        _, infos = problems.trajectory(*problem.cast(jnp.float64), 1e-3, steps=1, search=search)
        first[search] = float(infos.actual_decrease[0])
        assert infos.actual_decrease[0] >= infos.certified_decrease[0]
    assert first[True] > first[False]


def test_step_from_the_optimum_changes_nothing():
    x, y = jnp.asarray([[1.0], [1.0]]), jnp.array([0, 1])
    state = mm.init(lambda theta, x: x @ theta, jnp.zeros((1, 2)), x, y, l2=1.0)
    assert state.gradient_norm == 0
    after, info = jax.jit(lambda state: mm.step(lambda theta, x: x @ theta, state, x, y, l2=1.0))(state)
    assert info.certificate == mm.Certificate.NONE
    assert info.step_length == 0
    assert after.result == mm.Result.CONVERGED
    np.testing.assert_array_equal(after.params, state.params)


def test_direction_is_of_the_bound_after_a_step_that_it_certified():
    params, inputs, labels = problems.random(start=3.0).cast(jnp.float64)
    state = mm.init(qbound.linear_logits, params, inputs, labels, l2=0.1)

    @functools.partial(jax.jit, static_argnums=1)
    def moved(newton, curvature):
        new, _ = mm.step(
            qbound.linear_logits, state._replace(newton=newton), inputs, labels, l2=0.1, curvature=curvature
        )
        return state.params - new.params

    def direction(newton, curvature):
        s = np.ravel(moved(newton, curvature))
        return s / np.linalg.norm(s)

    bound = direction(True, "bound")
    np.testing.assert_allclose(direction(False, "auto"), bound, atol=1e-6)
    assert bound @ direction(True, "auto") < 0.999
