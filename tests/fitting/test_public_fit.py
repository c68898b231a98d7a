"""`qbound.fit`: the optimum of `qbound.mm.run`, by phases where the model allows them, and one contract for both."""

import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import qbound
from qbound.fitting.results import Phase
from qbound.mm import Certificate, NotConverged, Result

B, D, N = 90, 4, 3
L2, TOLERANCE = 0.05, 1e-9
linear = qbound.linear_logits

RNG = np.random.default_rng(0)
# Few of the entries are not 0, for sparse inputs.
X = RNG.normal(size=(B, D)) * (RNG.random((B, D)) < 0.7)
Y = np.argmax(X @ RNG.normal(size=(D, N)) + RNG.gumbel(size=(B, N)), axis=1)
W = RNG.uniform(0.2, 2, B)
SOFT = RNG.dirichlet(np.ones(N), B)
SPARSE = scipy.sparse.csr_array(X)

PLAIN = jnp.zeros((D, N))
# With a bias, which has a penalty of its own or none, and need not be the last leaf.
TREES = {
    "weights": (PLAIN, L2),
    "free bias": ({"bias": jnp.zeros(N), "weights": PLAIN}, {"bias": 0.0, "weights": L2}),
    "penalised bias": ((PLAIN, jnp.zeros(N)), (L2, 0.3)),
}
# So few parameters would take Newton steps with a matrix, and so few examples no stochastic phase.
BY_STEPS = qbound.FitSchedule(dense_parameters=0, steps_per_look=4)
BY_BATCHES = qbound.FitSchedule(dense_parameters=0, min_batches=3, batch_size=25, large_pass=0.0)
BY_SAMPLE = qbound.FitSchedule(sample_least=20, sample_rows_per_parameter=0)
BY_CG = qbound.FitSchedule(dense_parameters=0, quasi_newton_steps=0)
SCHEDULES = {"dense": None, "quasi-Newton": BY_STEPS, "batches": BY_BATCHES, "sample": BY_SAMPLE, "CG": BY_CG}


def fit(params=PLAIN, inputs=X, labels=Y, logits_fn=linear, **kwargs):
    return qbound.fit(logits_fn, params, inputs, labels, **{"l2": L2, "tolerance": TOLERANCE, **kwargs})


def run(params=PLAIN, inputs=X, labels=Y, logits_fn=linear, **kwargs):
    arrays = jax.tree.map(jnp.asarray, inputs)
    return qbound.mm.run(logits_fn, params, arrays, labels, **{"l2": L2, "tolerance": TOLERANCE, **kwargs})


def phases_of(info):
    return [Phase(int(phase)) for phase in info.history.phase]


def assert_same_optimum(found, expected, rtol=1e-12, atol=1e-7):
    (params, info), (expected_params, expected_info) = found, expected
    assert info.result == expected_info.result == Result.CONVERGED
    assert float(info.objective) == pytest.approx(float(expected_info.objective), rel=rtol)
    assert jax.tree.structure(params) == jax.tree.structure(expected_params)
    for leaf, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected_params), strict=True):
        assert leaf.dtype == other.dtype and leaf.shape == other.shape
        np.testing.assert_allclose(leaf, other, atol=atol)


@pytest.fixture(scope="module")
def by_mm():
    """The optimum of `qbound.mm.run` for each tree of parameters."""
    return functools.cache(lambda tree: run(TREES[tree][0], l2=TREES[tree][1]))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("tree", TREES)
def test_fit_finds_the_optimum_of_mm(tree, schedule, by_mm):
    params, l2 = TREES[tree]
    found = fit(params, l2=l2, schedule=schedule)
    assert found[1].gradient_norm <= TOLERANCE
    assert_same_optimum(found, by_mm(tree))


@pytest.mark.parametrize("schedule", [None, BY_STEPS], ids=["dense", "quasi-Newton"])
def test_fit_in_float32_finds_the_optimum_of_mm(schedule):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), TREES["free bias"][0])
    kwargs = {"l2": TREES["free bias"][1], "tolerance": 1e-5}
    inputs = X.astype(np.float32)
    found = fit(params, inputs, schedule=schedule, **kwargs)
    assert found[1].gradient_norm <= 1e-5
    assert_same_optimum(found, run(params, inputs, **kwargs), rtol=1e-6, atol=5e-4)


def test_gradient_norm_is_its_euclidean_length(by_mm):
    params, info = fit(max_steps=1, throw=False)
    state = qbound.mm.init(linear, params, jnp.asarray(X), Y, l2=L2)
    assert info.gradient_norm == pytest.approx(float(state.gradient_norm), rel=1e-9)
    assert info.objective == pytest.approx(float(state.objective), rel=1e-12)


def with_rows_to_leave_out(huge):
    """Examples of weight 0, with such inputs and labels out of range."""
    x, y, w = X.copy(), Y.copy(), W.copy()
    w[[0, 40]] = 0
    x[[0, 40]], y[0], y[40] = huge, N + 5, -1
    return x, y, w


@pytest.mark.parametrize("container", [np.asarray, scipy.sparse.csr_array, scipy.sparse.coo_matrix])
@pytest.mark.parametrize("huge", [1e200, np.nan], ids=["huge", "no number"])
def test_example_weights_are_those_of_mm_and_zero_leaves_an_example_out(container, huge):
    x, y, w = with_rows_to_leave_out(huge)
    counts = w > 0
    expected = run(inputs=X[counts], labels=Y[counts], example_weights=W[counts])
    given = container(x)
    found = fit(inputs=given, labels=y, example_weights=w)
    assert_same_optimum(found, expected)
    # What was given is as it was.
    np.testing.assert_array_equal(given.toarray() if scipy.sparse.issparse(given) else given, x)
    # Without weights there is another optimum.
    unweighted, _ = fit()
    assert np.max(np.abs(unweighted - found[0])) > 1e-3


def test_many_labels_may_be_out_of_range_where_an_example_does_not_count():
    """Which have a kernel of their own."""
    n = 70
    x, _, w = with_rows_to_leave_out(1e200)
    y = np.random.default_rng(1).integers(0, n, B)
    counts = w > 0
    expected = fit(jnp.zeros((D, n)), x[counts], y[counts], example_weights=w[counts])
    y[0], y[40] = n + 5, -1
    assert_same_optimum(fit(jnp.zeros((D, n)), x, y, example_weights=w), expected)


@pytest.mark.parametrize("unit", [1e-300, 1e308])
def test_only_ratios_of_example_weights_count(unit):
    """Also where their sum overflows."""
    weights = W / W.max()
    assert_same_optimum(fit(example_weights=unit * weights), fit(example_weights=weights))


@pytest.mark.parametrize("weights", [None, W[:18], W.reshape(18, 5)], ids=["none", "of sequences", "of positions"])
def test_sequences_have_a_label_at_every_position(weights):
    inputs, labels = X.reshape(18, 5, D), Y.reshape(18, 5)
    found = fit(inputs=inputs, labels=labels, example_weights=weights)
    assert_same_optimum(found, run(inputs=inputs, labels=labels, example_weights=weights))


@pytest.mark.parametrize("container", [scipy.sparse.csr_matrix, scipy.sparse.csc_array, scipy.sparse.coo_array])
def test_sparse_inputs_have_the_optimum_of_dense_ones(container, by_mm):
    params, l2 = TREES["free bias"]
    found = fit(params, container(X), l2=l2)
    assert_same_optimum(found, by_mm("free bias"))
    assert set(phases_of(found[1])) == {Phase.NEWTON} and found[1].cg_steps > 0


def test_sparse_inputs_go_with_linear_logits_in_any_wrapping():
    found, plain = (fit(inputs=SPARSE, logits_fn=model)[0] for model in (jax.jit(linear), linear))
    np.testing.assert_array_equal(found, plain)


def tanh_features(weights, x):
    return jnp.tanh(x) @ weights


OTHERS = {"soft labels": (linear, SOFT, {}), "features": (tanh_features, Y, {"certified": True, "schedule": BY_STEPS})}


@pytest.mark.parametrize(("logits_fn", "labels", "kwargs"), OTHERS.values(), ids=OTHERS)
def test_other_models_take_the_steps_of_mm(logits_fn, labels, kwargs):
    reports = []
    given = {"inputs": jnp.asarray(X), "labels": labels, "logits_fn": logits_fn}
    found, report = fit(**given, **kwargs, callback=reports.append)
    params, info = run(**given)
    np.testing.assert_array_equal(found, params)
    for name in set(qbound.mm.MMInfo._fields) - {"history"}:
        np.testing.assert_array_equal(getattr(report, name), getattr(info, name))
        np.testing.assert_array_equal(getattr(report.history, name), getattr(info.history, name))
        np.testing.assert_array_equal([getattr(of, name) for of in reports], getattr(info.history, name))
    assert report.phase == Phase.NEWTON and set(phases_of(report)) == {Phase.NEWTON}
    assert all(isinstance(of, qbound.FitInfo) and of.phase == Phase.NEWTON for of in reports)
    # One compiled program has no clock, but the whole of it takes time.
    assert np.all(np.isnan(report.history.seconds)) and report.seconds > 0


def ignored(info):
    """A callback that is the same for every fit."""


@pytest.mark.parametrize("name", ["features", *SCHEDULES])
def test_second_fit_compiles_nothing(name):
    logits_fn = tanh_features if name == "features" else linear
    given = {"logits_fn": logits_fn, "schedule": SCHEDULES.get(name), "callback": ignored}
    fit(inputs=jnp.asarray(X), **given)
    programs = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(kwargs.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        fit(inputs=jnp.asarray(2 * X), l2=2 * L2, seed=1, **given)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not programs


WRAPPED = {
    "jit": jax.jit(linear),
    "lambda": lambda params, x: linear(params, x),
    "partial": functools.partial(linear),
}


@pytest.mark.parametrize("schedule", [BY_STEPS, BY_BATCHES], ids=["quasi-Newton", "batches"])
@pytest.mark.parametrize("logits_fn", WRAPPED.values(), ids=WRAPPED)
def test_wrapped_linear_model_takes_the_phases(logits_fn, schedule):
    params, info = fit(logits_fn=logits_fn, schedule=schedule)
    expected, known = fit(schedule=schedule)
    first = Phase.STOCHASTIC if schedule is BY_BATCHES else Phase.QUASI_NEWTON
    assert phases_of(info) == phases_of(known) and phases_of(info)[0] == first
    np.testing.assert_array_equal(params, expected)


def test_certified_fit_has_a_certificate_for_every_step():
    _, info = fit(certified=True, schedule=BY_BATCHES)
    history = info.history
    assert set(phases_of(info)) == {Phase.NEWTON}
    assert np.all(history.certificate != Certificate.NONE)
    assert np.all((0 < history.certified_decrease) & (history.certified_decrease <= history.actual_decrease))
    _, other = fit(schedule=BY_BATCHES)
    assert Phase.QUASI_NEWTON in phases_of(other)
    assert not np.any(other.history.certified_decrease)


SUMS = ("certified_decrease", "actual_decrease", "cg_steps", "passes")
LAST = ("objective", "gradient_norm", "certificate", "step_length", "steps", "phase")


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_totals_are_those_of_the_history(schedule):
    _, info = fit(schedule=schedule)
    history, start = info.history, qbound.mm.init(linear, PLAIN, jnp.asarray(X), Y, l2=L2)
    assert len(history.objective) == len(phases_of(info)) > 1
    for name in LAST:
        assert getattr(info, name) == getattr(history, name)[-1], name
    for name in set(SUMS) - {"passes"}:
        assert getattr(info, name) == pytest.approx(getattr(history, name).sum(), rel=1e-12), name
    # And the first gradient.
    assert info.passes == 1 + history.passes.sum()
    falls = -np.diff(np.append(start.objective, history.objective))
    np.testing.assert_allclose(history.actual_decrease, falls, atol=1e-14)
    assert info.actual_decrease == pytest.approx(float(start.objective) - info.objective, rel=1e-9)
    assert np.all(np.diff(history.steps) > 0) and history.steps[0] > 0
    assert np.all(np.diff(history.seconds) >= 0) and history.seconds[-1] <= info.seconds
    assert np.all(history.result == Result.UNFINISHED) and history.history is None


def test_passes_are_counted_as_by_mm():
    """Of the same steps: those with a matrix."""
    _, info = fit(certified=True)
    _, expected = run()
    assert info.steps == expected.steps
    # Half a pass more where rounding of the parameters matters.
    assert 0 <= expected.passes - info.passes <= info.steps / 2


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_callback_is_called_once_for_every_entry_of_the_history(schedule):
    reports = []
    _, info = fit(schedule=schedule, callback=reports.append)
    steps = [int(report.steps) for report in reports]
    assert steps == sorted(set(steps)) and steps[0] > 0
    for report in reports:
        assert isinstance(report, qbound.FitInfo) and report.history is None
    for name in set(qbound.FitInfo._fields) - {"history"}:
        np.testing.assert_array_equal([getattr(report, name) for report in reports], getattr(info.history, name))


def test_optimum_as_start_leaves_an_empty_history(by_mm):
    params, _ = by_mm("weights")
    reports = []
    found, info = fit(params, tolerance=1e-8, callback=reports.append)
    assert (info.result, info.steps, info.phase, info.certificate) == (Result.CONVERGED, 0, Phase.START, 0)
    assert info.history.objective.shape == (0,) and not reports
    assert info.passes == 1 and info.actual_decrease == 0
    np.testing.assert_allclose(found, params, atol=1e-12)
    _, info = fit(params, logits_fn=tanh_features, inputs=jnp.arctanh(jnp.clip(X / 4, -0.9, 0.9)), tolerance=1e3)
    assert (info.steps, info.phase) == (0, Phase.START) and info.history.objective.shape == (0,)


def test_what_all_labels_share_in_the_start_leaves_the_fit_as_it_is(by_mm):
    """No probability depends on it, and the penalty takes it away."""
    shifted = PLAIN + jnp.arange(1.0, D + 1)[:, None]
    assert_same_optimum(fit(shifted), by_mm("weights"))


NARROW = {"float16 parameters": jnp.float16, "float32 parameters": jnp.float32}


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_parameters_are_taken_to_float32_at_least_and_inputs_follow_them(dtype):
    params, info = fit(PLAIN.astype(dtype), tolerance=1e-4)
    assert params.dtype == jnp.float32 and info.result == Result.CONVERGED


def test_fit_that_does_not_converge_raises_with_what_it_found():
    reports = []
    with pytest.raises(NotConverged, match=r"^fit: .*max_steps") as raised:
        fit(max_steps=1, callback=reports.append)
    error = raised.value
    params, info = fit(max_steps=1, throw=False)
    assert error.result == info.result == Result.STEP_LIMIT
    np.testing.assert_array_equal(error.params, params)
    assert np.any(params)
    assert isinstance(error.info, qbound.FitInfo) and error.info.steps == len(reports) == 1
    with pytest.raises(NotConverged, match=r"^fit: "):
        fit(logits_fn=tanh_features, inputs=jnp.asarray(X), max_steps=1)


def test_rounding_that_ends_a_fit_has_a_code():
    """Of float32, with which no tolerance of 0 is reached."""
    _, info = fit(PLAIN.astype(jnp.float32), X.astype(np.float32), tolerance=0.0, throw=False)
    assert info.result == Result.STALLED and info.gradient_norm < 1e-5


def with_one(array, value):
    changed = np.array(array)
    changed.flat[7] = value
    return changed


BAD_VALUES = {
    "label too large": ({"labels": with_one(Y, N)}, Result.BAD_LABELS, "labels"),
    "label below zero": ({"labels": with_one(Y, -1)}, Result.BAD_LABELS, "labels"),
    "negative weight": ({"example_weights": with_one(W, -1.0)}, Result.BAD_WEIGHTS, "example_weights"),
    "infinite weight": ({"example_weights": with_one(W, np.inf)}, Result.BAD_WEIGHTS, "example_weights"),
    "weight that is no number": ({"example_weights": with_one(W, np.nan)}, Result.BAD_WEIGHTS, "example_weights"),
    "no weight": ({"example_weights": 0 * W}, Result.BAD_WEIGHTS, "example_weights"),
    "no regulariser": ({"l2": 0.0}, Result.BAD_L2, "l2"),
    "negative l2": ({"l2": -1.0}, Result.BAD_L2, "l2"),
    "l2 that is no number": ({"l2": np.nan}, Result.BAD_L2, "l2"),
    "NaN in the inputs": ({"inputs": with_one(X, np.nan)}, Result.NOT_FINITE, "inputs"),
    "infinity in the inputs": ({"inputs": with_one(X, np.inf)}, Result.NOT_FINITE, "inputs"),
    "NaN in sparse inputs": ({"inputs": scipy.sparse.csr_array(with_one(X, np.nan))}, Result.NOT_FINITE, "inputs"),
    "NaN in the start": ({"params": jnp.asarray(with_one(PLAIN, np.nan))}, Result.NOT_FINITE, "params"),
    "wrong soft label": ({"labels": with_one(SOFT, 2.0)}, Result.BAD_LABELS, "labels"),
}


@pytest.mark.parametrize(("changes", "result", "name"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values_raise_or_have_a_code(changes, result, name):
    given = {"params": PLAIN, "inputs": X, "labels": Y, **changes}
    if given["labels"].dtype == SOFT.dtype:
        given["inputs"] = jnp.asarray(given["inputs"])
    with pytest.raises(ValueError, match=rf"{name}\b.*: expected"):
        fit(**given)
    params, info = fit(**given, throw=False)
    assert info.result == result and info.steps == 0
    assert info.history.objective.shape == (0,)
    np.testing.assert_array_equal(params, given["params"])


WRONG = {
    "labels of another length": ({"labels": Y[:-1]}, ValueError, r"labels: .*\(90,\).*got shape \(89,\)"),
    "labels of another shape": ({"labels": Y[:, None]}, ValueError, r"labels: .*got shape \(90, 1\)"),
    "sparse labels of another length": ({"inputs": SPARSE, "labels": Y[:-1]}, ValueError, r"labels: .*\(89,\)"),
    "labels of text": ({"labels": Y.astype(str)}, TypeError, "labels: expected an array of numbers"),
    "no labels": ({"labels": None}, TypeError, "labels: .*got None"),
    "soft labels of sparse inputs": ({"inputs": SPARSE, "labels": SOFT}, TypeError, "labels: expected integers"),
    "columns too many": ({"inputs": X[:, :3]}, ValueError, r"inputs: expected shape \(\.\.\., 4\)"),
    "sparse columns too many": ({"inputs": SPARSE[:, :3]}, ValueError, r"inputs: expected shape \(\.\.\., 4\)"),
    "one example without an axis": ({"inputs": X[0], "labels": Y[0]}, ValueError, "inputs: expected shape"),
    "no example": ({"inputs": X[:0], "labels": Y[:0]}, ValueError, "at least one example"),
    "complex inputs": ({"inputs": X + 0j}, TypeError, "inputs: expected real numbers; got dtype complex128"),
    "complex sparse inputs": ({"inputs": SPARSE + 0j * SPARSE}, TypeError, "inputs: expected real numbers"),
    "inputs of text": ({"inputs": X.astype(str)}, TypeError, "inputs: expected an array of numbers"),
    "sparse inputs of features": ({"inputs": SPARSE, "logits_fn": tanh_features}, TypeError, "inputs: .*sparse"),
    "weights of another length": ({"example_weights": W[:-1]}, ValueError, r"example_weights: .*\(89,\)"),
    "a weight": ({"example_weights": 1.0}, ValueError, "example_weights: expected shape"),
    "one label": ({"params": PLAIN[:, :1], "labels": 0 * Y}, ValueError, "at least two labels"),
    "parameters of three axes": ({"params": PLAIN[None]}, ValueError, "params: expected weights of shape"),
    "weights twice": ({"params": [PLAIN, PLAIN]}, ValueError, "params: expected weights of shape"),
    "bias of another length": ({"params": [PLAIN, PLAIN[0, :2]]}, ValueError, "params: expected a bias of shape"),
    "integer parameters": ({"params": PLAIN.astype(int)}, TypeError, "params: expected float arrays"),
    "no parameters": ({"params": []}, ValueError, "params: expected at least one array"),
    "l2 of another tree": ({"l2": {"bias": 1.0}}, ValueError, "l2: expected a number, or a tree"),
    "l2 of a shape": ({"l2": np.ones(D)}, ValueError, "l2: expected a number for each leaf"),
    "negative tolerance": ({"tolerance": -1.0}, ValueError, "tolerance: expected a finite number >= 0"),
    "tolerance that is no number": ({"tolerance": np.nan}, ValueError, "tolerance: expected a finite number >= 0"),
    "no steps": ({"max_steps": 0}, ValueError, "max_steps: expected an integer > 0"),
    "half a step": ({"max_steps": 0.5}, TypeError, "max_steps: expected an integer > 0"),
    "schedule of another type": ({"schedule": {}}, TypeError, "schedule: expected a qbound.FitSchedule"),
    "callback that is no function": ({"callback": 1}, TypeError, "callback: expected a function"),
    "model that is no function": ({"logits_fn": 1}, TypeError, "logits_fn: expected a function"),
    "seed below zero": ({"seed": -1}, ValueError, "seed: expected an integer"),
    "seed of text": ({"seed": "a"}, ValueError, "seed: expected an integer"),
}


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(("changes", "error", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("throw", [True, False], ids=["throw", "no throw"])
def test_wrong_shapes_and_types_always_raise_and_name_the_argument(changes, error, message, throw):
    with pytest.raises(error, match=message):
        fit(**changes, throw=throw)


TRACED = {
    "params": lambda v: fit(v * PLAIN),
    "inputs": lambda v: fit(inputs=v * X),
    "labels": lambda v: fit(labels=v.astype(int) * Y),
    "l2": lambda v: fit(l2=v),
    "example_weights": lambda v: fit(example_weights=v * W),
    "another model": lambda v: fit(inputs=v * X, logits_fn=tanh_features),
    "nothing that was given": lambda v: (v, fit()),
}


@pytest.mark.parametrize("function", TRACED.values(), ids=TRACED)
def test_traced_arrays_raise_with_advice(function):
    with pytest.raises(ValueError, match=r"fit: .*jax\.jit.*qbound\.mm\.run"):
        jax.jit(function)(jnp.ones(()))


def test_schedule_decides_about_the_phases():
    def phases(schedule):
        return phases_of(fit(schedule=schedule)[1])

    assert set(phases(None)) == {Phase.NEWTON} == set(phases(BY_CG))
    assert set(phases(BY_STEPS)) == {Phase.QUASI_NEWTON}
    for schedule, then in ((BY_BATCHES, Phase.QUASI_NEWTON), (BY_SAMPLE, Phase.NEWTON)):
        first, *others = phases(schedule)
        assert first == Phase.STOCHASTIC and set(others) == {then}
    _, with_matrix = fit()
    _, with_cg = fit(schedule=BY_CG)
    assert with_matrix.cg_steps == 0 < with_cg.cg_steps


@pytest.mark.parametrize("schedule", [BY_BATCHES, BY_SAMPLE], ids=["batches", "sample"])
def test_seed_decides_about_the_stochastic_phase(schedule):
    values = [fit(schedule=schedule, seed=seed)[1].history.objective[0] for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize("name", ["batch_size", "steps_per_look", "block_age", "sample_part", "patience"])
def test_schedule_of_which_a_fit_would_not_end_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}: expected an integer > 0; got 0"):
        qbound.FitSchedule(**{name: 0})


def test_schedule_cannot_be_changed_and_compares_by_its_fields():
    assert qbound.FitSchedule() == qbound.FitSchedule() != BY_STEPS
    with pytest.raises(AttributeError):
        BY_STEPS.epochs = 3  # pyright: ignore[reportAttributeAccessIssue]
