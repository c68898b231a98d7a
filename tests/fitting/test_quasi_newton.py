"""Steps of one pass: their direction is that of BFGS, they fall, and they end where there is nothing to gain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.fitting import quasi_newton
from qbound.fitting.factors import input_factor, kronecker_solve, label_factor
from qbound.fitting.newton import evaluate
from qbound.fitting.objective import LinearObjective, PassSizes
from qbound.fitting.step import rounding_of
from tests import reference
from tests.fitting.problems import B, D, N, problem

PROBLEM = problem()
OBJECTIVE, PARAMS = PROBLEM.objective(), jnp.asarray(PROBLEM.params)
INPUTS = input_factor(OBJECTIVE.data, jnp.arange(B, dtype=jnp.int32), D + 1)
ZERO = jnp.zeros_like(PARAMS)


def steps_from(params=ZERO, tolerance=1e-9, max_steps=100, memory=None, of=OBJECTIVE):
    memory = quasi_newton.empty_memory(params) if memory is None else memory
    numbers = jnp.asarray(tolerance, params.dtype), jnp.asarray(max_steps, jnp.int32)
    return quasi_newton.lbfgs_steps(of, evaluate(of, params), memory, INPUTS, None, *numbers)


def objective_at(params):
    return reference.linear_model(*PROBLEM[1:5], np.asarray(params))[0]


def memory_of(steps, changes, scale=1.0):
    """With zeros in place of what is not there yet."""
    missing = np.zeros((quasi_newton._MEMORY - len(steps), *PARAMS.shape))
    arrays = (jnp.asarray(np.concatenate([missing, some])) for some in (steps, changes))
    return quasi_newton.LbfgsMemory(*arrays, jnp.asarray(scale))


@pytest.mark.parametrize("count", [0, 1, 4, quasi_newton._MEMORY])
def test_direction_is_that_of_the_inverse_which_bfgs_updates(count):
    rng = np.random.default_rng(count)
    size = PARAMS.size
    root = rng.normal(size=(size, size))
    curvature, metric = root @ root.T / size + np.eye(size), np.diag(rng.uniform(0.5, 2, size))
    steps = rng.normal(size=(count, size))
    changes = steps @ curvature
    inverse = reference.bfgs_inverse(0.7 * metric, steps, changes)
    g = rng.normal(size=PARAMS.shape)
    shaped = (some.reshape(count, *PARAMS.shape) for some in (steps, changes))

    def precondition(r):
        return (jnp.asarray(metric) @ r.reshape(-1)).reshape(r.shape)

    found = quasi_newton.lbfgs_direction(memory_of(*shaped, 0.7), jnp.asarray(g), precondition)
    np.testing.assert_allclose(found.reshape(-1), inverse @ g.reshape(-1), rtol=1e-8, atol=1e-8)
    if count:
        # The secant equation of the last step.
        last = quasi_newton.lbfgs_direction(
            memory_of(steps.reshape(-1, *PARAMS.shape), changes.reshape(-1, *PARAMS.shape)),
            jnp.asarray(changes[-1].reshape(PARAMS.shape)),
            precondition,
        )
        np.testing.assert_allclose(last.reshape(-1), steps[-1], rtol=1e-7, atol=1e-7)


def test_first_step_from_zero_is_that_of_newton():
    """Without memory and damping: at W = 0 the Hessian is a Kronecker product."""
    p = problem(intercept=False)
    of = p.objective()
    inputs = input_factor(of.data, jnp.arange(B, dtype=jnp.int32), D)
    point = of.evaluate(jnp.zeros_like(jnp.asarray(p.params)))
    _, gradient, hessian = reference.linear_model(*p[1:5], np.zeros_like(p.params))
    expected = np.linalg.solve(hessian, gradient.reshape(-1))
    direction = kronecker_solve(label_factor(point.label_curvature), inputs, point.gradient, of.l2[0], 0.0)
    np.testing.assert_allclose(direction.reshape(-1), expected, rtol=1e-3, atol=1e-3 * np.max(np.abs(expected)))


def test_steps_lead_to_the_optimum():
    led = steps_from()
    optimum = reference.linear_optimum(*PROBLEM[1:5], N)
    assert led.goes_on and led.point.gradient_norm <= 1e-9
    np.testing.assert_allclose(led.point.params, optimum, atol=1e-7)
    gradient = reference.linear_model(*PROBLEM[1:5], np.asarray(led.point.params))[1]
    np.testing.assert_allclose(led.point.gradient, gradient, atol=1e-12)


def test_every_step_falls_and_steps_can_be_taken_in_parts():
    params, memory, objectives = PARAMS, None, []
    for _ in range(8):
        led = steps_from(params, max_steps=1, memory=memory)
        assert int(led.steps) == 1
        params, memory = led.point.params, led.memory
        objectives.append(float(led.point.objective))
    assert np.all(np.diff([objective_at(PARAMS), *objectives]) < 0)
    at_once = steps_from(PARAMS, max_steps=8)
    np.testing.assert_allclose(at_once.point.params, params, rtol=1e-9)
    np.testing.assert_allclose(at_once.memory.steps, memory.steps, atol=1e-9)


def test_start_within_the_tolerance_takes_no_step():
    led = steps_from(PARAMS, tolerance=1e3)
    assert (int(led.steps), bool(led.goes_on)) == (0, True)
    np.testing.assert_allclose(led.point.params, PARAMS - jnp.mean(PARAMS, axis=0, keepdims=True))


def search(params, s, monkeypatch):
    """Where a search leads, how many points it has tried, and whether it took the last one."""
    point = evaluate(OBJECTIVE, params)
    tried = []
    whole = LinearObjective.evaluate

    def counted(of, params):
        tried.append(params)
        return whole(of, params)

    with monkeypatch.context() as patch, jax.disable_jit():
        patch.setattr(LinearObjective, "evaluate", counted)
        new, is_taken = quasi_newton._search(OBJECTIVE, point, s)
    return new, len(tried), is_taken


def test_steps_that_are_too_long_are_shortened(monkeypatch):
    point = evaluate(OBJECTIVE, PARAMS)
    new, trials, is_taken = search(PARAMS, 1e3 * point.gradient, monkeypatch)
    # By up to a factor of ten at a time.
    assert is_taken and 1 < trials <= 5
    assert objective_at(new.params) < objective_at(PARAMS)
    # Along the line, and never far uphill at its end.
    slope = np.sum(np.asarray(point.gradient) ** 2)
    assert -np.sum(np.asarray(new.gradient * point.gradient)) <= quasi_newton._STEEPEST * slope


def test_step_to_the_other_side_of_the_valley_is_shortened_though_it_falls(monkeypatch):
    """Near the optimum, where the line is a parabola: at the height of its start it is as steep."""
    near = jnp.asarray(reference.linear_optimum(*PROBLEM[1:5], N) + 1e-3 * PROBLEM.direction)
    point = evaluate(OBJECTIVE, near)
    g = np.asarray(point.gradient)
    longest = 1.0
    while objective_at(point.params - longest * g) < point.objective:
        longest *= 1.01
    s = longest / 1.01 * point.gradient
    assert objective_at(point.params - s) < point.objective
    new, trials, is_taken = search(near, s, monkeypatch)
    assert is_taken and trials == 2
    assert objective_at(new.params) < objective_at(point.params - s)


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1e200, np.nan], ids=["uphill", "none", "too long", "not a number"])
def test_no_step_is_taken_where_none_is_good(factor, monkeypatch):
    point = evaluate(OBJECTIVE, PARAMS)
    _, trials, is_taken = search(PARAMS, factor * point.gradient, monkeypatch)
    assert not is_taken and trials == quasi_newton._TRIALS


def test_steps_that_find_no_way_down_stay():
    """A memory that turns the direction uphill."""
    g = np.asarray(evaluate(OBJECTIVE, PARAMS).gradient)
    led = steps_from(PARAMS, memory=quasi_newton.empty_memory(PARAMS)._replace(scale=jnp.asarray(-1.0)))
    assert not led.goes_on and int(led.steps) == 0
    np.testing.assert_array_equal(led.point.gradient, g)
    np.testing.assert_array_equal(led.point.params, PARAMS - jnp.mean(PARAMS, axis=0, keepdims=True))


def test_memory_drops_the_oldest_and_what_rounding_has_spoilt():
    memory = quasi_newton.empty_memory(PARAMS)
    for i in range(quasi_newton._MEMORY + 2):
        s = jnp.full_like(PARAMS, i + 1.0)
        memory = quasi_newton._remember(memory, s, 2 * s, lambda r: r)
    np.testing.assert_array_equal(memory.steps[:, 0, 0], np.arange(3, quasi_newton._MEMORY + 3))
    np.testing.assert_array_equal(memory.changes, 2 * memory.steps)
    assert memory.scale == 0.5
    for y in (-s, 0 * s, jnp.nan * s):
        same = quasi_newton._remember(memory, s, y, lambda r: r)
        jax.tree.map(np.testing.assert_array_equal, same, memory)


def test_rounding_ends_steps_that_want_too_much():
    of, params = PROBLEM.objective(jnp.float32), PARAMS.astype(jnp.float32)
    led = steps_from(params, tolerance=0.0, max_steps=500, of=of)
    assert not led.goes_on and int(led.steps) < 100
    optimum = objective_at(reference.linear_optimum(*PROBLEM[1:5], N))
    assert objective_at(led.point.params) - optimum < 1e-6 * optimum
    assert led.point.params.dtype == jnp.float32


def test_many_labels_have_a_diagonal_and_the_same_optimum():
    led = steps_from(of=PROBLEM.objective(sizes=PassSizes(few_labels=N - 1)))
    assert led.point.label_curvature.shape == (N,)
    assert led.goes_on and led.point.gradient_norm <= 1e-9
    np.testing.assert_allclose(led.point.params, reference.linear_optimum(*PROBLEM[1:5], N), atol=1e-7)


def test_steps_are_the_same_without_jit():
    with jax.disable_jit():
        eager = steps_from(max_steps=3)
    led = steps_from(max_steps=3)
    np.testing.assert_allclose(eager.point.params, led.point.params, rtol=1e-6, atol=1e-8)


def test_gradient_that_falls_is_progress_where_rounding_hides_that_of_the_objective():
    near = steps_from(tolerance=1e-8).point

    def step(point):
        memory = quasi_newton.empty_memory(PARAMS)
        numbers = jnp.asarray(0.0), jnp.int32(1)
        return quasi_newton.lbfgs_steps(OBJECTIVE, point, memory, INPUTS, None, *numbers, patience=1)

    led = step(near)
    assert led.point.gradient_norm < 0.9 * near.gradient_norm
    assert near.objective - led.point.objective < 4 * np.finfo(float).eps * near.objective
    assert led.steps == 1 and led.goes_on
    # And where neither falls there is none.
    led = step(led.point._replace(gradient_norm=led.point.gradient_norm / 1e6))
    assert led.steps == 1 and not led.goes_on


def test_noise_is_a_few_units_of_rounding_of_the_objective():
    for value in (1e-3, 50.0):
        units = rounding_of(jnp.asarray(value)) / (np.finfo(float).eps * value)
        assert 1 < units < 10
        assert rounding_of(value, np.finfo(float).eps) == rounding_of(jnp.asarray(-value))
