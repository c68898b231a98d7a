"""Fits from start to end: monotone, certified where that is promised, with every solver and in blocks."""

import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from qbound.fitting.newton import advance, descend
from qbound.fitting.objective import Data
from qbound.fitting.results import Result
from qbound.models import inputs as design
from qbound.models.inputs import Sparse
from tests import reference
from tests.fitting.problems import N, problem

# The package's attribute of this name is the function.
module = importlib.import_module("qbound.fitting.fit")
line = importlib.import_module("qbound.fitting.block_line")

TOLERANCE = 1e-9
SOLVERS = ("dense", "kronecker", "diagonal")
PROBLEM = problem()
ROUNDING = 1e-13


@pytest.fixture(scope="module")
def optimum():
    p = PROBLEM
    return reference.linear_optimum(p.inputs, p.labels, p.weights, p.l2, N)


def objective_at(params, p=PROBLEM):
    return reference.linear_model(p.inputs, p.labels, p.weights, p.l2, np.asarray(params, float))[0]


def as_sparse(p, dtype=jnp.float64):
    rows = Sparse.from_csr(scipy.sparse.csr_array(p.x), dtype)
    return Data(rows, jnp.asarray(p.labels), jnp.asarray(p.weights, dtype))


def run(patch, solver="kronecker", p=PROBLEM, dtype=jnp.float64, start=None, **kwargs):
    """A fit with a given solver, from parameters of zero."""
    patch.setattr(module, "_DENSE_LIMIT", 256 if solver == "dense" else 0)
    data = as_sparse(p, dtype) if solver == "diagonal" else p.data(dtype)
    start = np.zeros_like(p.params) if start is None else start
    arguments = {"tolerance": TOLERANCE, "max_steps": 100, **kwargs}
    return module.fit(data, jnp.asarray(p.l2, dtype), jnp.asarray(start, dtype), **arguments)


def with_batches(patch, **constants):
    """A stochastic phase for few examples."""
    for name, value in {"_MIN_BATCHES": 3, "_BATCH": 40, "_LARGE_PASS": 0, **constants}.items():
        patch.setattr(module, name, value)


@pytest.fixture(scope="module", params=SOLVERS)
def solver(request):
    return request.param


@pytest.fixture(scope="module")
def fitted(solver):
    with pytest.MonkeyPatch.context() as patch:
        return run(patch, solver, certified=True)


@pytest.fixture(scope="module")
def walked():
    """With steps of one pass."""
    with pytest.MonkeyPatch.context() as patch:
        return run(patch)


@pytest.fixture(scope="module")
def with_first_phase():
    with pytest.MonkeyPatch.context() as patch:
        with_batches(patch)
        return run(patch, rng=np.random.RandomState(1))


def assert_decreases(fit):
    """Every certified step, by what it was certified to at least."""
    objectives = np.array([entry.objective for entry in fit.history])
    certified = np.array([entry.certified_decrease for entry in fit.history])
    falls = objectives[:-1] - objectives[1:]
    assert np.all(falls >= -ROUNDING)
    assert np.all(certified[1:] <= falls + ROUNDING)
    is_certified = np.array([entry.phase == "mm" for entry in fit.history])
    assert np.all(certified[is_certified] > 0) and np.all(certified[~is_certified] == 0)


def test_fit_finds_the_optimum(fitted, optimum):
    assert fitted.result == Result.CONVERGED
    gradient = reference.linear_model(*PROBLEM[1:5], np.asarray(fitted.params))[1]
    assert np.max(np.abs(gradient)) <= 1.01 * TOLERANCE
    np.testing.assert_allclose(fitted.params, optimum, atol=1e-6)


def test_every_step_falls_by_what_is_certified(fitted):
    assert fitted.steps > 2
    assert_decreases(fitted)
    # Most of the way is certified, not just a little of it.
    fall = fitted.history[0].objective - fitted.history[-1].objective
    assert sum(entry.certified_decrease for entry in fitted.history) > 0.3 * fall


def test_history_tells_where_the_fit_stood(fitted, solver):
    first, last = fitted.history[0], fitted.history[-1]
    assert [entry.phase for entry in fitted.history] == ["start"] + fitted.steps * ["mm"]
    assert first.objective == pytest.approx(np.log(N), rel=1e-12)
    assert last.objective == pytest.approx(objective_at(fitted.params), rel=1e-12)
    assert last.gradient <= TOLERANCE < fitted.history[-2].gradient
    seconds = [entry.seconds for entry in fitted.history]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert all((entry.cg_steps > 0) == (solver != "dense") for entry in fitted.history[1:])


def test_callback_gets_every_entry_of_the_history(monkeypatch):
    entries = []
    fit = run(monkeypatch, "dense", callback=entries.append)
    assert entries == fit.history


def test_fit_in_blocks_is_that_in_one(monkeypatch, optimum):
    """Compiled anew: programs keep the sizes of blocks."""
    monkeypatch.setattr(design, "_BLOCK_INPUTS", 1)
    monkeypatch.setattr(line, "_HELD", 0)
    try:
        jax.clear_caches()
        fit = run(monkeypatch)
        assert fit.result == Result.CONVERGED
        assert_decreases(fit)
        np.testing.assert_allclose(fit.params, optimum, atol=1e-6)
    finally:
        jax.clear_caches()


def test_first_phase_is_entered_in_the_history(with_first_phase, optimum):
    fit = with_first_phase
    phases = [entry.phase for entry in fit.history]
    assert phases == ["start", "stochastic"] + (len(phases) - 2) * ["quasi_newton"]
    assert module._EPOCHS < fit.steps <= module._EPOCHS + module._WALK
    assert fit.result == Result.CONVERGED
    assert_decreases(fit)
    np.testing.assert_allclose(fit.params, optimum, atol=1e-6)


def test_first_phase_goes_a_good_part_of_the_way(with_first_phase, optimum):
    """In 8 steps, short ones because batches are small."""
    start, end = (entry.objective for entry in with_first_phase.history[:2])
    least = objective_at(optimum)
    assert end - least < 0.85 * (start - least)


def test_first_phase_depends_on_its_random_numbers_alone(monkeypatch, with_first_phase):
    with_batches(monkeypatch)
    objectives = [
        run(monkeypatch, rng=np.random.RandomState(seed), max_steps=1).history[1].objective for seed in (1, 2)
    ]
    assert objectives[0] == with_first_phase.history[1].objective != objectives[1]


@pytest.mark.parametrize("rate", [1e4, np.inf], ids=["too long", "not finite"])
def test_first_phase_is_forgotten_if_the_objective_does_not_fall(monkeypatch, rate):
    with_batches(monkeypatch, _FIRST_RATE=rate)
    fit = run(monkeypatch)
    start, end = fit.history[:2]
    assert end.phase == "stochastic"
    assert (end.objective, end.gradient) == (start.objective, start.gradient)
    assert fit.result == Result.CONVERGED
    assert_decreases(fit)


@pytest.mark.parametrize(
    "constants",
    [{"certified": True}, {"tolerance": 10.0}, {"max_steps": 0}, {"_MIN_BATCHES": 4}, {"LABEL_LIMIT": N - 1}]
    + [{"_LARGE_PASS": PROBLEM.inputs.size * N + 1}],
    ids=str,
)
def test_there_is_no_first_phase_where_none_is_wanted(monkeypatch, constants):
    with_batches(monkeypatch, **{name: value for name, value in constants.items() if hasattr(module, name)})
    kwargs = {name: value for name, value in constants.items() if not hasattr(module, name)}
    fit = run(monkeypatch, **{"max_steps": 1, **kwargs})
    assert "stochastic" not in [entry.phase for entry in fit.history]


def test_steps_of_one_pass_find_the_optimum(walked, optimum):
    assert walked.result == Result.CONVERGED
    assert walked.history[-1].gradient <= TOLERANCE
    assert [entry.phase for entry in walked.history] == ["start"] + (len(walked.history) - 1) * ["quasi_newton"]
    assert module._LOOK * (len(walked.history) - 2) < walked.steps <= module._LOOK * (len(walked.history) - 1)
    assert_decreases(walked)
    np.testing.assert_allclose(walked.params, optimum, atol=1e-6)


@pytest.mark.parametrize("steps", [3, 14])
def test_step_limit_ends_steps_of_one_pass(monkeypatch, walked, steps):
    fit = run(monkeypatch, max_steps=steps)
    assert fit.result == Result.STEP_LIMIT
    assert fit.steps == steps
    assert fit.history[-1].phase == "quasi_newton"
    assert fit.history[-1].objective > walked.history[-1].objective
    assert (fit.history[1].objective == walked.history[1].objective) == (steps > module._LOOK)


@pytest.mark.parametrize("given_up", ["too many", "no gain"])
def test_certified_steps_go_on_where_those_of_one_pass_end(monkeypatch, optimum, given_up):
    if given_up == "too many":
        monkeypatch.setattr(module, "_WALK", 3)
    else:
        walk = module.walk
        monkeypatch.setattr(module, "walk", lambda *args: walk(*args)._replace(goes_on=jnp.array(False)))
        monkeypatch.setattr(module, "_LOOK", 3)
        monkeypatch.setattr(module, "_BEFORE_CORE", 3)
    fit = run(monkeypatch)
    phases = [entry.phase for entry in fit.history]
    assert phases[:2] == ["start", "quasi_newton"] and set(phases[2:]) == {"mm"}
    assert fit.steps == 3 + len(phases) - 2
    assert fit.result == Result.CONVERGED
    assert_decreases(fit)
    np.testing.assert_allclose(fit.params, optimum, atol=1e-6)


def test_core_is_made_when_steps_of_one_pass_were_many(monkeypatch):
    made = []
    make_core = module._make_core
    monkeypatch.setattr(module, "_make_core", lambda *args: made.append(args) or make_core(*args))
    assert run(monkeypatch, max_steps=module._BEFORE_CORE).steps == module._BEFORE_CORE
    assert not made
    fit = run(monkeypatch)
    assert fit.steps > module._BEFORE_CORE and len(made) == 1
    # Anew, as they grow older.
    made.clear()
    monkeypatch.setattr(module, "_LOOK", 1)
    monkeypatch.setattr(module, "_BEFORE_CORE", 1)
    monkeypatch.setattr(module, "_CORE_AGE", 2)
    assert run(monkeypatch, max_steps=8).steps == 8
    assert len(made) == 3  # after 1, 3 and 6 steps
    with_batches(monkeypatch)
    made.clear()
    run(monkeypatch, max_steps=1)
    assert len(made) == 1


@pytest.mark.parametrize(("l2", "is_enough"), [(1.0, True), (1e-6, False)], ids=["large", "small"])
def test_quick_factor_serves_later_steps_where_the_penalty_hides_what_it_lacks(monkeypatch, l2, is_enough):
    """The core then waits, as it does where there was no first phase."""
    calls = {"_input_factor": 0, "_make_core": 0}

    def counted(name):
        function = getattr(module, name)

        def call(*args):
            calls[name] += 1
            return function(*args)

        monkeypatch.setattr(module, name, call)

    for name in calls:
        counted(name)
    with_batches(monkeypatch, _QUICK_RANK=2, _BEFORE_CORE=50)
    p = PROBLEM._replace(l2=np.full_like(PROBLEM.l2, l2))
    fit = run(monkeypatch, p=p, tolerance=1e-7)
    assert fit.result == Result.CONVERGED
    assert calls["_input_factor"] == (1 if is_enough else 2)
    assert (calls["_make_core"] == 0) == is_enough
    optimum = reference.linear_optimum(p.inputs, p.labels, p.weights, p.l2, N)
    assert objective_at(fit.params, p) == pytest.approx(objective_at(optimum, p), abs=1e-9)


def with_a_sample(patch):
    """Newton's method on a sample, for few examples."""
    patch.setattr(module, "_SAMPLE_LEAST", 30)
    patch.setattr(module, "_SAMPLE_EACH", 0)


def test_first_phase_of_few_coefficients_takes_a_sample(monkeypatch, optimum):
    with_a_sample(monkeypatch)
    fit = run(monkeypatch, "dense", rng=np.random.RandomState(1))
    phases = [entry.phase for entry in fit.history]
    assert phases == ["start", "stochastic"] + (len(phases) - 2) * ["mm"]
    # No more steps on the sample than its noise is worth.
    assert 0 < fit.steps - (len(phases) - 2) <= 4
    assert fit.result == Result.CONVERGED
    assert_decreases(fit)
    # Of the true objective, not of that of the sample.
    start, end = (entry.objective for entry in fit.history[:2])
    least = objective_at(optimum)
    assert end - least < 0.5 * (start - least)
    np.testing.assert_allclose(fit.params, optimum, atol=1e-6)


def test_sample_is_drawn_from_all_rows(monkeypatch):
    with_a_sample(monkeypatch)
    ranges = []

    class Draws(np.random.RandomState):
        def randint(self, low, high, size):
            ranges.append((low, high))
            return super().randint(low, high, size)

    run(monkeypatch, "dense", rng=Draws(1))
    assert ranges == [(0, len(PROBLEM.labels))]


def test_sample_that_misleads_is_forgotten(monkeypatch):
    """One row of nearly all weight has no other label; the others, of which the sample is, have nothing else."""
    with_a_sample(monkeypatch)
    p = PROBLEM._replace(labels=np.zeros_like(PROBLEM.labels), x=np.ones_like(PROBLEM.x))
    labels, weights = p.labels.copy(), np.full(len(p.labels), 1e-6)
    taken = np.random.RandomState(1).randint(0, len(labels), 30)
    heavy = np.setdiff1d(np.arange(len(labels)), taken)[0]
    labels[heavy], weights[heavy] = 1, 1
    p = p._replace(labels=labels, weights=weights / weights.sum())
    fit = run(monkeypatch, "dense", p, rng=np.random.RandomState(1))
    start, end = fit.history[:2]
    assert end.phase == "stochastic"
    assert (end.objective, end.gradient) == (start.objective, start.gradient)
    assert fit.result == Result.CONVERGED


def test_sample_has_enough_rows_for_the_coefficients_or_there_is_none():
    def size(rows, coefficients):
        return module._sample_size(rows, np.zeros((2, coefficients)))

    assert size(32_561, 15) == 4096
    assert size(200_000, 15) == 25_000
    assert size(10**7, 15) == 65_536
    assert size(32_561, 109) == 256 * 109

    def phase(rows, d):
        p = problem(n=2, b=rows, d=d)
        data, l2, params = p.arrays()
        return module._first_phase(module._Method(data, l2, module._solver(data, params)), params)

    assert phase(16_383, 1) is None
    assert phase(16_384, 1) is module._on_a_sample
    assert phase(16_384, 20) is None


def test_factor_of_inputs_has_rows_enough_for_its_size():
    """Five for every input, or all there are; at equal distances."""
    data = Data(design.Dense(jnp.zeros((100_000, 1))), jnp.zeros(100_000, jnp.int32), jnp.full(100_000, 1e-5))
    for inputs in (10, 1000, 2000):
        rows = module._rows(data, inputs)
        assert len(rows) >= max(5 * inputs, 2000)
        assert (rows[0], rows[-1]) == (0, 99_999) and len(np.unique(np.diff(rows))) <= 2
    few = PROBLEM.data()
    np.testing.assert_array_equal(module._rows(few, 10), np.arange(len(PROBLEM.labels)))


def test_steps_on_a_sample_that_overflows_lead_nowhere():
    """In float32, inputs of which the objective is not finite anywhere but at the start."""
    p = problem(intercept=False)
    data, l2, params = p._replace(x=1e30 * p.x).arrays(jnp.float32)
    rows = jnp.arange(60, dtype=jnp.int32)
    found, _ = descend(data, rows, l2, 0 * params, jnp.asarray(1e-3, jnp.float32), jnp.asarray(8, jnp.int32))
    assert np.all(np.isfinite(found))


@pytest.mark.parametrize("max_steps", [0, 3])
def test_steps_on_a_sample_are_those_of_the_sample_alone(max_steps, optimum):
    """Weights of what was drawn sum to 1, and every step decreases its objective."""
    data, l2, params = PROBLEM.arrays()
    rows = np.random.default_rng(0).integers(0, len(PROBLEM.labels), 60).astype(np.int32)
    found, steps = descend(data, jnp.asarray(rows), l2, params, jnp.asarray(1e-9), jnp.asarray(max_steps, jnp.int32))
    assert int(steps) == max_steps
    weights = PROBLEM.weights[rows] / PROBLEM.weights[rows].sum()
    sample = PROBLEM.inputs[rows], PROBLEM.labels[rows], weights, PROBLEM.l2
    start, expected = PROBLEM.params - PROBLEM.params.mean(0), reference.linear_optimum(*sample, N)
    if max_steps == 0:
        np.testing.assert_allclose(found, start, atol=1e-12)
        return
    values = [reference.linear_model(*sample, np.asarray(at))[0] for at in (start, found, expected)]
    assert values[1] - values[2] < 1e-2 * (values[0] - values[2])
    exact, _ = descend(data, jnp.asarray(rows), l2, params, jnp.asarray(1e-9), jnp.asarray(50, jnp.int32))
    np.testing.assert_allclose(exact, expected, atol=1e-6)


def test_core_is_made_anew_when_iterations_of_cg_are_many(monkeypatch):
    made = []
    make_core = module._make_core
    monkeypatch.setattr(module, "_make_core", lambda *args: made.append(args) or make_core(*args))
    fit = run(monkeypatch, certified=True)
    many = sum(entry.cg_steps > module._STALE for entry in fit.history)
    assert len(made) == many
    made.clear()
    monkeypatch.setattr(module, "_STALE", 1)
    anew = run(monkeypatch, certified=True)
    many = sum(entry.cg_steps > 1 for entry in anew.history)
    assert len(made) == many > 1
    assert anew.result == Result.CONVERGED


def test_solver_follows_the_sizes_of_the_problem():
    def solver(b, n, e, data=None):
        labels = jax.ShapeDtypeStruct((b,), jnp.int32)
        data = PROBLEM.data() if data is None else data
        object.__setattr__(data, "labels", labels)
        return module._solver(data, jax.ShapeDtypeStruct((n, e), jnp.float64))

    assert solver(10_000, 3, 32) == "dense"
    assert solver(10_000, 3, 33) == "kronecker"
    assert solver(10_000, 65, 2) == "kronecker"
    assert solver(100_000, 10, 2000) == "kronecker"
    assert solver(100_000, 10, 2001) == "diagonal"
    assert solver(1000, 10, 1000) == "diagonal"
    assert solver(10_000, 3, 2, as_sparse(PROBLEM)) == "diagonal"


def test_start_that_is_not_finite_is_returned(monkeypatch, solver):
    start = np.zeros_like(PROBLEM.params)
    start[1, 2] = np.nan
    fit = run(monkeypatch, solver, start=start)
    assert fit.result == Result.NOT_FINITE
    assert fit.steps == 0 and len(fit.history) == 1
    np.testing.assert_array_equal(fit.params, start)


def proposal(solver="dense", tolerance=1e-9, params=PROBLEM.params):
    data, l2, _ = PROBLEM.arrays()
    numbers = jnp.asarray(tolerance), jnp.asarray(0.0)
    return advance(data, l2, jnp.asarray(params), None, None, *numbers, solver=solver)


def test_nearly_all_of_a_step_near_the_optimum_is_certified(optimum):
    _, step = proposal(params=optimum + 1e-3 * PROBLEM.direction)
    assert step.actual >= step.certified > 0.95 * step.actual


def test_first_direction_of_cg_solves_newtons_system_to_a_tenth():
    point, step = proposal("diagonal")
    _, gradient, hessian = reference.linear_model(*PROBLEM[1:5], np.asarray(point.params))
    g, s = gradient.ravel(), np.ravel(point.params - step.params)
    product = hessian @ s
    # Of the best multiple of the step, whose length a search has found.
    residual = g - product * (product @ g) / (product @ product)
    assert step.cg_steps > 0
    assert np.linalg.norm(residual) < 0.15 * np.linalg.norm(g)


def test_columns_of_different_sizes_take_no_more_iterations_of_cg():
    """Their curvatures differ by far, and are taken out of the system."""
    sizes = np.logspace(-2, 2, PROBLEM.x.shape[1])
    counts = []
    for scale in (np.ones_like(sizes), sizes):
        p = PROBLEM._replace(x=PROBLEM.x * scale, l2=0 * PROBLEM.l2)
        data, l2, _ = p.arrays()
        start = jnp.zeros_like(jnp.asarray(p.params))
        _, step = advance(data, l2, start, None, None, jnp.asarray(1e-9), jnp.asarray(0.0), solver="diagonal")
        counts.append(int(step.cg_steps))
    assert counts[0] == counts[1] > 0


def test_certified_step_goes_to_the_least_objective_along_it():
    point, step = proposal()
    s = np.asarray(point.params - step.params)
    assert step.actual > 1.05 * step.certified > 0  # more than the certificate alone would reach
    slopes = [
        np.sum(s * reference.linear_model(*PROBLEM[1:5], np.asarray(at))[1]) for at in (point.params, step.params)
    ]
    assert abs(slopes[1]) < 0.02 * slopes[0]


def test_no_step_is_proposed_within_the_tolerance():
    point, step = proposal(tolerance=1e3)
    np.testing.assert_array_equal(step.params, point.params)
    assert (step.certified, step.actual, step.cg_steps) == (0, 0, 0)


def test_entries_of_steps_without_certificate_have_none(monkeypatch):
    with_batches(monkeypatch)
    fit = run(monkeypatch, "kronecker", rng=np.random.RandomState(1))
    assert {entry.phase for entry in fit.history} >= {"start", "stochastic", "quasi_newton"}
    for entry in fit.history:
        if entry.phase != "mm":
            assert (entry.certified_decrease, entry.cg_steps) == (0, 0)


@pytest.mark.parametrize("numbers", [(np.nan, 1.0), (1.0, np.inf)], ids=["objective", "gradient"])
def test_point_is_finite_if_both_its_objective_and_its_gradient_are(numbers):
    assert module._Reached(None, 1.0, 1.0).is_finite
    assert not module._Reached(None, *numbers).is_finite


def test_step_limit_ends_the_fit(monkeypatch, solver, fitted):
    fit = run(monkeypatch, solver, max_steps=2, certified=True)
    assert fit.result == Result.STEP_LIMIT
    assert fit.steps == 2
    assert [entry.objective for entry in fit.history] == [entry.objective for entry in fitted.history[:3]]
    none = run(monkeypatch, solver, max_steps=0)
    assert none.result == Result.STEP_LIMIT and none.steps == 0 and not np.any(none.params)


def test_tolerance_reached_by_the_last_step_is_no_step_limit(monkeypatch, solver, fitted):
    fit = run(monkeypatch, solver, max_steps=fitted.steps, certified=True)
    assert (fit.result, fit.steps) == (Result.CONVERGED, fitted.steps)


def test_optimum_as_start_takes_no_step(monkeypatch, fitted, solver):
    fit = run(monkeypatch, solver, start=np.asarray(fitted.params))
    assert fit.result == Result.CONVERGED and fit.steps == 0


def test_what_all_labels_share_in_the_start_is_removed(monkeypatch, fitted, solver):
    """No probability depends on it."""
    shift = np.arange(PROBLEM.params.shape[1]) + 1.0
    fit = run(monkeypatch, solver, start=np.zeros_like(PROBLEM.params) + shift)
    np.testing.assert_allclose(fit.history[0].objective, fitted.history[0].objective, rtol=1e-12)
    np.testing.assert_allclose(fit.params, fitted.params, atol=1e-8)


def test_rounding_ends_a_fit_that_wants_too_much(monkeypatch, optimum):
    fit = run(monkeypatch, "dense", dtype=jnp.float32, tolerance=0.0)
    assert fit.result == Result.STALLED
    assert fit.params.dtype == jnp.float32
    assert fit.steps < 20
    np.testing.assert_allclose(fit.params, optimum, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": PROBLEM.x}, TypeError, "data: expected qbound.fitting.objective.Data; got ndarray"),
        ({"labels": np.zeros(3, np.int32)}, ValueError, r"data: expected labels of shape \(150,\).*; got \(3,\)"),
        ({"weights": np.ones(3)}, ValueError, r"data: expected weights of shape \(150,\).*; got \(3,\)"),
        ({"labels": np.zeros(150)}, TypeError, "data: expected labels that are integers; got float64"),
        ({"params": np.zeros((4, 8))}, ValueError, r"params: expected shape \(n, 5\), or \(n, 6\).*; got \(4, 8\)"),
        ({"params": np.zeros((1, 5))}, ValueError, "params: .* n >= 2 labels"),
        ({"params": np.zeros((4, 6), np.float32)}, TypeError, "params: expected the dtype of .*; got float32"),
        ({"l2": np.zeros(5)}, ValueError, r"l2: expected one number for each input, shape \(6,\); got \(5,\)"),
        ({"tolerance": -1.0}, ValueError, "tolerance: expected a number >= 0; got -1.0"),
        ({"tolerance": np.nan}, ValueError, "tolerance: expected a number >= 0; got nan"),
        ({"max_steps": -1}, ValueError, "max_steps: expected an integer >= 0; got -1"),
        ({"max_steps": 2.0}, ValueError, "max_steps: expected an integer >= 0; got 2.0"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_together_are_named(changes, error, message):
    data, l2, params = PROBLEM.arrays()
    for name in ("labels", "weights"):
        if name in changes:
            object.__setattr__(data, name, jnp.asarray(changes[name]))
    given = {"data": data, "l2": l2, "params": params, "tolerance": 1e-3, "max_steps": 1}
    arrays = {name: jnp.asarray(value) if name in ("params", "l2") else value for name, value in changes.items()}
    given.update({name: value for name, value in arrays.items() if name in given})
    with pytest.raises(error, match=message):
        # Past the type checks of the tests, which users do not have.
        inspect.unwrap(module.fit)(**given)
