"""Fits from start to end: monotone, certified where that is promised, with every solver and in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from qbound.fitting import phases
from qbound.fitting.newton import newton_on_sample, newton_step
from qbound.fitting.objective import Data, LinearObjective, PassSizes
from qbound.fitting.phases import Schedule
from qbound.fitting.results import Certificate, Phase, Result
from qbound.fitting.stochastic import LABEL_LIMIT
from qbound.models.inputs import SparseInputs
from tests import reference
from tests.fitting.problems import DEFAULTS, N, problem

TOLERANCE = 1e-9
SOLVERS = ("dense", "kronecker", "diagonal")
PROBLEM = problem()
ROUNDING = 1e-13
SCHEDULE = Schedule()
# A stochastic phase for few examples, on batches; and Newton's method on a sample of them.
ON_BATCHES = {"min_batches": 3, "batch_size": 40, "large_pass": 0.0}
ON_A_SAMPLE = {"sample_least": 30, "sample_rows_per_parameter": 0}


@pytest.fixture(scope="module")
def optimum():
    p = PROBLEM
    return reference.linear_optimum(p.inputs, p.labels, p.weights, p.l2, N)


def objective_at(params, p=PROBLEM):
    return reference.linear_model(p.inputs, p.labels, p.weights, p.l2, np.asarray(params, float))[0]


def as_sparse(p, dtype=jnp.float64):
    rows = SparseInputs.from_csr(scipy.sparse.csr_array(p.x), dtype)
    return Data(rows, jnp.asarray(p.labels), jnp.asarray(p.weights, dtype))


def run(solver="kronecker", p=PROBLEM, dtype=jnp.float64, start=None, schedule=None, sizes=DEFAULTS, **kwargs):
    """A fit with a given solver, from parameters of zero; `schedule` has the fields that are not the usual ones."""
    data = as_sparse(p, dtype) if solver == "diagonal" else p.data(dtype, sizes)
    start = np.zeros_like(p.params) if start is None else start
    schedule = Schedule(**{"dense_parameters": 256 if solver == "dense" else 0, **(schedule or {})})
    arguments = {"tolerance": TOLERANCE, "max_steps": 100, "schedule": schedule, **kwargs}
    objective = LinearObjective(data, jnp.asarray(p.l2, dtype))
    return phases.minimise(objective, jnp.asarray(start, dtype), **arguments)


@pytest.fixture(scope="module", params=SOLVERS)
def solver(request):
    return request.param


@pytest.fixture(scope="module")
def fitted(solver):
    return run(solver, certified=True)


@pytest.fixture(scope="module")
def with_one_pass_steps():
    return run()


@pytest.fixture(scope="module")
def with_first_phase():
    return run(schedule=ON_BATCHES, rng=np.random.RandomState(1))


def phases_of(fit):
    return [entry.phase for entry in fit.history]


def assert_decreases(fit):
    """Every certified step, by what it was certified to at least."""
    objectives = np.array([entry.objective for entry in fit.history])
    certified = np.array([entry.certified_decrease for entry in fit.history])
    falls = objectives[:-1] - objectives[1:]
    assert np.all(falls >= -ROUNDING)
    assert np.all(certified[1:] <= falls + ROUNDING)
    is_certified = np.array([entry.phase == Phase.NEWTON for entry in fit.history])
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
    assert [entry.phase for entry in fitted.history] == [Phase.START] + fitted.steps * [Phase.NEWTON]
    assert first.objective == pytest.approx(np.log(N), rel=1e-12)
    assert last.objective == pytest.approx(objective_at(fitted.params), rel=1e-12)
    assert last.gradient_norm <= TOLERANCE < fitted.history[-2].gradient_norm
    seconds = [entry.seconds for entry in fitted.history]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert all((entry.cg_steps > 0) == (solver != "dense") for entry in fitted.history[1:])


def test_callback_gets_every_entry_of_the_history():
    entries = []
    fit = run("dense", callback=entries.append)
    assert entries == fit.history


def test_fit_in_blocks_is_that_in_one(optimum):
    fit = run(sizes=PassSizes(held=0, block_inputs=1))
    assert fit.result == Result.CONVERGED
    assert_decreases(fit)
    np.testing.assert_allclose(fit.params, optimum, atol=1e-6)


def test_first_phase_is_entered_in_the_history(with_first_phase, optimum):
    fit = with_first_phase
    found = phases_of(fit)
    assert found == [Phase.START, Phase.STOCHASTIC] + (len(found) - 2) * [Phase.QUASI_NEWTON]
    assert SCHEDULE.epochs < fit.steps <= SCHEDULE.epochs + SCHEDULE.quasi_newton_steps
    assert fit.result == Result.CONVERGED
    assert_decreases(fit)
    np.testing.assert_allclose(fit.params, optimum, atol=1e-6)


def test_first_phase_goes_a_good_part_of_the_way(with_first_phase, optimum):
    """In 8 steps, short ones because batches are small."""
    start, end = (entry.objective for entry in with_first_phase.history[:2])
    least = objective_at(optimum)
    assert end - least < 0.85 * (start - least)


def test_first_phase_depends_on_its_random_numbers_alone(with_first_phase):
    fits = (run(schedule=ON_BATCHES, rng=np.random.RandomState(seed), max_steps=1) for seed in (1, 2))
    objectives = [fit.history[1].objective for fit in fits]
    assert objectives[0] == with_first_phase.history[1].objective != objectives[1]


@pytest.mark.parametrize("rate", [1e4, np.inf], ids=["too long", "not finite"])
def test_first_phase_is_forgotten_if_the_objective_does_not_fall(rate):
    fit = run(schedule={**ON_BATCHES, "first_rate": rate})
    start, end = fit.history[:2]
    assert end.phase == Phase.STOCHASTIC
    assert (end.objective, end.gradient_norm) == (start.objective, start.gradient_norm)
    assert fit.result == Result.CONVERGED
    assert_decreases(fit)


@pytest.mark.parametrize(
    ("kwargs", "schedule"),
    [
        ({"certified": True}, {}),
        ({"tolerance": 10.0}, {}),
        ({"max_steps": 0}, {}),
        ({}, {"min_batches": 4}),
        ({}, {"batch_labels": N - 1}),
        ({}, {"large_pass": PROBLEM.inputs.size * N + 1.0}),
    ],
    ids=str,
)
def test_there_is_no_first_phase_where_none_is_wanted(kwargs, schedule):
    fit = run(**{"max_steps": 1, **kwargs}, schedule={**ON_BATCHES, **schedule})
    assert Phase.STOCHASTIC not in phases_of(fit)


def test_there_is_a_first_phase_where_data_are_just_large_enough():
    schedule = {"min_batches": 3, "batch_labels": N, "large_pass": float(PROBLEM.inputs.size * N)}
    assert Phase.STOCHASTIC in phases_of(run(max_steps=1, schedule={**ON_BATCHES, **schedule}))


def test_labels_of_a_batch_are_limited_as_its_curvature_is():
    assert SCHEDULE.batch_labels == LABEL_LIMIT


def test_steps_of_one_pass_find_the_optimum(with_one_pass_steps, optimum):
    fit = with_one_pass_steps
    looks = len(fit.history) - 1
    assert fit.result == Result.CONVERGED
    assert fit.history[-1].gradient_norm <= TOLERANCE
    assert phases_of(fit) == [Phase.START] + looks * [Phase.QUASI_NEWTON]
    assert SCHEDULE.steps_per_look * (looks - 1) < fit.steps <= SCHEDULE.steps_per_look * looks
    assert_decreases(fit)
    np.testing.assert_allclose(fit.params, optimum, atol=1e-6)


@pytest.mark.parametrize("steps", [3, 14])
def test_step_limit_ends_steps_of_one_pass(with_one_pass_steps, steps):
    whole, fit = with_one_pass_steps, run(max_steps=steps)
    assert fit.result == Result.STEP_LIMIT
    assert fit.steps == steps
    assert fit.history[-1].phase == Phase.QUASI_NEWTON
    assert fit.history[-1].objective > whole.history[-1].objective
    assert (fit.history[1].objective == whole.history[1].objective) == (steps > SCHEDULE.steps_per_look)


@pytest.mark.parametrize("given_up", ["too many", "no gain"])
def test_certified_steps_go_on_where_those_of_one_pass_end(monkeypatch, optimum, given_up):
    schedule = {"quasi_newton_steps": 3}
    if given_up == "no gain":
        steps = phases.lbfgs_steps
        monkeypatch.setattr(phases, "lbfgs_steps", lambda *args: steps(*args)._replace(goes_on=jnp.array(False)))
        schedule = {"steps_per_look": 3, "steps_before_block": 3}
    fit = run(schedule=schedule)
    found = phases_of(fit)
    assert found[:2] == [Phase.START, Phase.QUASI_NEWTON] and set(found[2:]) == {Phase.NEWTON}
    assert fit.steps == 3 + len(found) - 2
    assert fit.result == Result.CONVERGED
    assert_decreases(fit)
    np.testing.assert_allclose(fit.params, optimum, atol=1e-6)


@pytest.fixture
def blocks_made(monkeypatch):
    """The arguments of every exact block that is made."""
    made, exact_block = [], phases._exact_block
    monkeypatch.setattr(phases, "_exact_block", lambda *args: made.append(args) or exact_block(*args))
    return made


def test_exact_block_is_made_when_steps_of_one_pass_were_many(blocks_made):
    before = SCHEDULE.steps_before_block
    assert run(max_steps=before).steps == before
    assert not blocks_made
    assert run().steps > before and len(blocks_made) == 1
    # On all eigenvectors of inputs, which are few.
    assert blocks_made[0][-1] == len(PROBLEM.l2)
    # Anew, as they grow older.
    blocks_made.clear()
    often = {"steps_per_look": 1, "steps_before_block": 1, "block_age": 2}
    assert run(max_steps=8, schedule=often).steps == 8
    assert len(blocks_made) == 3  # after 1, 3 and 6 steps
    blocks_made.clear()
    run(max_steps=1, schedule={**often, **ON_BATCHES})
    assert len(blocks_made) == 1


@pytest.mark.parametrize(("l2", "is_enough"), [(1.0, True), (1e-6, False)], ids=["large", "small"])
def test_quick_factor_serves_later_steps_where_the_penalty_hides_what_it_lacks(monkeypatch, l2, is_enough):
    """The exact block then waits, as it does where there was no first phase."""
    calls = {"_input_factor": 0, "_exact_block": 0}

    def counted(name):
        function = getattr(phases, name)

        def call(*args):
            calls[name] += 1
            return function(*args)

        monkeypatch.setattr(phases, name, call)

    for name in calls:
        counted(name)
    p = PROBLEM._replace(l2=np.full_like(PROBLEM.l2, l2))
    fit = run(p=p, tolerance=1e-7, schedule={**ON_BATCHES, "quick_rank": 2, "steps_before_block": 50})
    assert fit.result == Result.CONVERGED
    assert calls["_input_factor"] == (1 if is_enough else 2)
    assert (calls["_exact_block"] == 0) == is_enough
    optimum = reference.linear_optimum(p.inputs, p.labels, p.weights, p.l2, N)
    assert objective_at(fit.params, p) == pytest.approx(objective_at(optimum, p), abs=1e-9)


def test_first_phase_of_few_coefficients_takes_a_sample(optimum):
    fit = run("dense", schedule=ON_A_SAMPLE, rng=np.random.RandomState(1))
    found = phases_of(fit)
    assert found == [Phase.START, Phase.STOCHASTIC] + (len(found) - 2) * [Phase.NEWTON]
    # No more steps on the sample than its noise is worth.
    assert 0 < fit.steps - (len(found) - 2) <= 4
    assert fit.result == Result.CONVERGED
    assert_decreases(fit)
    # Of the true objective, not of that of the sample.
    start, end = (entry.objective for entry in fit.history[:2])
    least = objective_at(optimum)
    assert end - least < 0.5 * (start - least)
    np.testing.assert_allclose(fit.params, optimum, atol=1e-6)


def test_sample_is_drawn_from_all_rows():
    ranges = []

    class Draws(np.random.RandomState):
        def randint(self, low, high, size):
            ranges.append((low, high))
            return super().randint(low, high, size)

    run("dense", schedule=ON_A_SAMPLE, rng=Draws(1))
    assert ranges == [(0, len(PROBLEM.labels))]


def test_sample_that_misleads_is_forgotten():
    """One row of nearly all weight has no other label; the others, of which the sample is, have nothing else."""
    p = PROBLEM._replace(labels=np.zeros_like(PROBLEM.labels), x=np.ones_like(PROBLEM.x))
    labels, weights = p.labels.copy(), np.full(len(p.labels), 1e-6)
    taken = np.random.RandomState(1).randint(0, len(labels), 30)
    heavy = np.setdiff1d(np.arange(len(labels)), taken)[0]
    labels[heavy], weights[heavy] = 1, 1
    p = p._replace(labels=labels, weights=weights / weights.sum())
    fit = run("dense", p, schedule=ON_A_SAMPLE, rng=np.random.RandomState(1))
    start, end = fit.history[:2]
    assert end.phase == Phase.STOCHASTIC
    assert (end.objective, end.gradient_norm) == (start.objective, start.gradient_norm)
    assert fit.result == Result.CONVERGED


def test_sample_has_enough_rows_for_the_coefficients_or_there_is_none():
    def size(rows, coefficients):
        return SCHEDULE.sample_size(rows, 2, coefficients)

    assert size(32_561, 15) == 4096
    assert size(200_000, 15) == 25_000
    assert size(10**7, 15) == 65_536
    assert size(32_561, 109) == 256 * 109

    def phase(rows, d):
        p = problem(n=2, b=rows, d=d)
        return SCHEDULE.first_phase(SCHEDULE.solver(p.objective(), 2), rows, 2, len(p.l2))

    assert phase(16_383, 1) is None
    assert phase(16_384, 1) == "sample"
    assert phase(16_384, 20) is None


def test_factor_of_inputs_has_rows_enough_for_its_size():
    """Five for every input, or all there are; at equal distances."""
    for inputs in (10, 1000, 2000):
        rows = SCHEDULE.moment_sample(100_000, inputs)
        assert len(rows) >= max(5 * inputs, 2000)
        assert (rows[0], rows[-1]) == (0, 99_999) and len(np.unique(np.diff(rows))) <= 2
    np.testing.assert_array_equal(SCHEDULE.moment_sample(150, 10), np.arange(150))


def test_steps_on_a_sample_that_overflows_lead_nowhere():
    """In float32, inputs of which the objective is not finite anywhere but at the start."""
    p = problem(intercept=False)
    objective, start = p._replace(x=1e30 * p.x).objective(jnp.float32), jnp.zeros(p.params.shape, jnp.float32)
    rows, numbers = jnp.arange(60, dtype=jnp.int32), (jnp.asarray(1e-3, jnp.float32), jnp.asarray(8, jnp.int32))
    found, _ = newton_on_sample(objective, rows, start, *numbers)
    assert np.all(np.isfinite(found))


@pytest.mark.parametrize("max_steps", [0, 3])
def test_steps_on_a_sample_are_those_of_the_sample_alone(max_steps, optimum):
    """Weights of what was drawn sum to 1, and every step decreases its objective."""
    rows = np.random.default_rng(0).integers(0, len(PROBLEM.labels), 60).astype(np.int32)

    def after(max_steps):
        given = PROBLEM.objective(), jnp.asarray(rows), jnp.asarray(PROBLEM.params)
        return newton_on_sample(*given, jnp.asarray(1e-9), jnp.asarray(max_steps, jnp.int32))

    found, steps = after(max_steps)
    assert int(steps) == max_steps
    weights = PROBLEM.weights[rows] / PROBLEM.weights[rows].sum()
    sample = PROBLEM.inputs[rows], PROBLEM.labels[rows], weights, PROBLEM.l2
    start, expected = PROBLEM.params - PROBLEM.params.mean(0), reference.linear_optimum(*sample, N)
    if max_steps == 0:
        np.testing.assert_allclose(found, start, atol=1e-12)
        return
    values = [reference.linear_model(*sample, np.asarray(at))[0] for at in (start, found, expected)]
    assert values[1] - values[2] < 1e-2 * (values[0] - values[2])
    exact, _ = after(50)
    np.testing.assert_allclose(exact, expected, atol=1e-6)


def test_exact_block_is_made_anew_when_iterations_of_cg_are_many(blocks_made):
    fit = run(certified=True)
    many = sum(entry.cg_steps > SCHEDULE.stale_cg_steps for entry in fit.history)
    assert len(blocks_made) == many
    blocks_made.clear()
    anew = run(certified=True, schedule={"stale_cg_steps": 1})
    many = sum(entry.cg_steps > 1 for entry in anew.history)
    assert len(blocks_made) == many > 1
    assert anew.result == Result.CONVERGED


def test_solver_follows_the_sizes_of_the_problem():
    def solver(b, n, e, data=None):
        objective = PROBLEM.objective()
        data = objective.data if data is None else data
        object.__setattr__(data, "labels", jax.ShapeDtypeStruct((b,), jnp.int32))
        object.__setattr__(objective, "data", data)
        object.__setattr__(objective, "l2", jax.ShapeDtypeStruct((e,), jnp.float64))
        return SCHEDULE.solver(objective, n)

    assert solver(10_000, 3, 32) == "dense"
    assert solver(10_000, 3, 33) == "kronecker"
    assert solver(10_000, 65, 2) == "kronecker"
    assert solver(100_000, 10, 2000) == "kronecker"
    assert solver(100_000, 10, 2001) == "diagonal"
    assert solver(1000, 10, 1000) == "diagonal"
    assert solver(10_000, 3, 2, as_sparse(PROBLEM)) == "diagonal"


def test_start_that_is_not_finite_is_returned(solver):
    start = np.zeros_like(PROBLEM.params)
    start[1, 2] = np.nan
    fit = run(solver, start=start)
    assert fit.result == Result.NOT_FINITE
    assert fit.steps == 0 and len(fit.history) == 1
    np.testing.assert_array_equal(fit.params, start)


def proposal(solver="dense", tolerance=1e-9, params=PROBLEM.params):
    numbers = jnp.asarray(tolerance), jnp.asarray(0.0)
    return newton_step(PROBLEM.objective(), jnp.asarray(params), None, None, *numbers, solver=solver)


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
        start, numbers = jnp.zeros(p.params.shape), (jnp.asarray(1e-9), jnp.asarray(0.0))
        _, step = newton_step(p.objective(), start, None, None, *numbers, solver="diagonal")
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


def test_entries_of_steps_without_certificate_have_none(with_first_phase):
    assert set(phases_of(with_first_phase)) >= {Phase.START, Phase.STOCHASTIC, Phase.QUASI_NEWTON}
    for entry in with_first_phase.history:
        if entry.phase != Phase.NEWTON:
            assert (entry.certificate, entry.certified_decrease, entry.cg_steps) == (Certificate.NONE, 0, 0)


def test_entries_of_certified_steps_have_the_certificate_that_won(fitted):
    for entry in fitted.history[1:]:
        assert entry.certificate in (Certificate.BOUND, Certificate.LOCAL) and entry.step_length > 0
    # Near the optimum the local one.
    assert fitted.history[-1].certificate == Certificate.LOCAL


@pytest.mark.parametrize("numbers", [(np.nan, 1.0), (1.0, np.inf)], ids=["objective", "gradient"])
def test_point_is_finite_if_both_its_objective_and_its_gradient_are(numbers):
    assert phases._Reached(None, 1.0, 1.0).is_finite
    assert not phases._Reached(None, *numbers).is_finite


def test_step_limit_ends_the_fit(solver, fitted):
    fit = run(solver, max_steps=2, certified=True)
    assert fit.result == Result.STEP_LIMIT
    assert fit.steps == 2
    assert [entry.objective for entry in fit.history] == [entry.objective for entry in fitted.history[:3]]
    none = run(solver, max_steps=0)
    assert none.result == Result.STEP_LIMIT and none.steps == 0 and not np.any(none.params)


def test_tolerance_reached_by_the_last_step_is_no_step_limit(solver, fitted):
    fit = run(solver, max_steps=fitted.steps, certified=True)
    assert (fit.result, fit.steps) == (Result.CONVERGED, fitted.steps)


def test_optimum_as_start_takes_no_step(fitted, solver):
    fit = run(solver, start=np.asarray(fitted.params))
    assert fit.result == Result.CONVERGED and fit.steps == 0


def test_what_all_labels_share_in_the_start_is_removed(fitted, solver):
    """No probability depends on it."""
    shift = np.arange(PROBLEM.params.shape[1]) + 1.0
    fit = run(solver, start=np.zeros_like(PROBLEM.params) + shift)
    np.testing.assert_allclose(fit.history[0].objective, fitted.history[0].objective, rtol=1e-12)
    np.testing.assert_allclose(fit.params, fitted.params, atol=1e-8)


def test_rounding_ends_a_fit_that_wants_too_much(optimum):
    fit = run("dense", dtype=jnp.float32, tolerance=0.0)
    assert fit.result == Result.STALLED
    assert fit.params.dtype == jnp.float32
    assert fit.steps < 20
    np.testing.assert_allclose(fit.params, optimum, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"objective": np.zeros(2)}, TypeError, "objective: expected a LinearObjective; got ndarray"),
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
@pytest.mark.usefixtures("without_type_checks")
def test_arguments_that_do_not_fit_together_are_named(changes, error, message):
    objective = PROBLEM.objective()
    for name, of in (("labels", objective.data), ("weights", objective.data), ("l2", objective)):
        if name in changes:
            object.__setattr__(of, name, jnp.asarray(changes[name]))
    given = {"objective": objective, "params": jnp.asarray(PROBLEM.params), "tolerance": 1e-3, "max_steps": 1}
    arrays = {name: jnp.asarray(value) if name == "params" else value for name, value in changes.items()}
    given.update({name: value for name, value in arrays.items() if name in given})
    with pytest.raises(error, match=message):
        phases.minimise(**given)
