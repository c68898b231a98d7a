"""Whole runs: to the optimum, fast, and with a word for whatever went wrong."""

import functools
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.linear_model import LogisticRegression

import qbound
from qbound import mm
from tests.mm import problems

# The package's attribute of this name is the function.
run_module = importlib.import_module("qbound.fitting.run")

LOADERS = {"iris": load_iris, "wine": load_wine, "digits": load_digits}


def linear(params, inputs):
    """The same model as `qbound.linear_logits`, but nothing is known about it."""
    return inputs @ params


def run(problem, l2=1e-2, **options):
    return mm.run(qbound.linear_logits, *problem.cast(jnp.float64), l2=l2, **options)


@functools.cache
def data(name):
    inputs, labels = LOADERS[name](return_X_y=True)
    return (inputs - inputs.mean(axis=0)) / np.maximum(inputs.std(axis=0), 0.1), labels


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "raw"])
@pytest.mark.parametrize("name", LOADERS)
def test_optimum_is_that_of_scikit_learn(name, scaled):
    """Weights with the regulariser, intercept without."""
    inputs, labels = data(name) if scaled else LOADERS[name](return_X_y=True)
    n, l2 = labels.max() + 1, 1e-3
    peer = LogisticRegression(C=1 / (l2 * len(inputs)), solver="newton-cholesky", tol=1e-10, max_iter=1000)
    peer.fit(inputs, labels)
    params = {"weights": jnp.zeros((inputs.shape[1], n)), "bias": jnp.zeros(n)}
    found, info = mm.run(
        qbound.linear_logits,
        params,
        inputs,
        labels,
        l2={"weights": l2, "bias": 0.0},
        tolerance=1e-9,
        max_cg_steps=1000,
    )
    assert info.gradient_norm <= 1e-9
    np.testing.assert_allclose(found["weights"], peer.coef_.T, atol=1e-6 * max(1, np.abs(peer.coef_).max()))
    shift = np.mean(peer.intercept_) - np.mean(found["bias"])  # the loss does not change with it
    np.testing.assert_allclose(found["bias"] + shift, peer.intercept_, atol=1e-4)
    log_probabilities = jax.nn.log_softmax(qbound.linear_logits(found, inputs))
    np.testing.assert_allclose(np.exp(log_probabilities), peer.predict_proba(inputs), atol=1e-6)


@pytest.mark.parametrize(
    ("curvature", "solver"), [("auto", "cg"), ("hessian", "cg"), ("bound", "cg"), ("bohning", "dense")]
)
def test_every_curvature_finds_the_same_optimum(curvature, solver):
    problem = problems.random(start=0.0)
    expected, _ = run(problem, l2=0.1, tolerance=1e-11)
    found, info = run(problem, l2=0.1, curvature=curvature, solver=solver, tolerance=1e-8, max_steps=1000)
    np.testing.assert_allclose(found, expected, atol=1e-7)
    assert info.result == mm.Result.CONVERGED


def test_float32_finds_the_optimum_too():
    inputs, labels = data("digits")
    expected, _ = mm.run(qbound.linear_logits, jnp.zeros((64, 10)), inputs, labels, l2=1e-3, tolerance=1e-9)
    found, info = mm.run(
        qbound.linear_logits, jnp.zeros((64, 10), jnp.float32), np.float32(inputs), labels, l2=1e-3, tolerance=1e-5
    )
    assert found.dtype == jnp.float32
    assert info.objective.dtype == jnp.float32
    np.testing.assert_allclose(found, np.float32(expected), atol=5e-3)


def test_convergence_is_superlinear_with_the_local_certificate_and_linear_without():
    inputs, labels = data("digits")
    start = jnp.zeros((64, 10))
    _, newton = mm.run(qbound.linear_logits, start, inputs, labels, l2=1e-2, tolerance=1e-12, eta=1.0)
    norms = np.asarray(newton.history.gradient_norm)
    last = norms[norms < 1e-2]
    assert len(last) <= 6
    assert (last[1:] < 30 * last[:-1] ** 1.4).all()
    assert (np.asarray(newton.history.certificate)[-3:] == mm.Certificate.LOCAL).all()
    _, linear = mm.run(
        qbound.linear_logits, start, inputs, labels, l2=1e-2, curvature="bound", eta=1.0, max_steps=60, throw=False
    )
    norms = np.asarray(linear.history.gradient_norm)
    assert linear.result == mm.Result.STEP_LIMIT
    assert norms[-1] > 0.5 * norms[-10]


def test_info_of_a_run_sums_up_its_steps():
    problem = problems.random(start=2.0)
    params, info = run(problem, solver="cg")
    history = info.history
    targets = problems.one_hot(problem.labels, 3)
    assert history.objective.shape == (int(info.steps),)
    assert info.steps == history.steps[-1] > 2
    before = problems.objective(problem.params, problem.inputs, targets, 1e-2)
    after = problems.objective(params, problem.inputs, targets, 1e-2)
    assert info.objective == pytest.approx(after)
    assert info.actual_decrease == pytest.approx(before - after)
    assert info.actual_decrease == pytest.approx(float(np.sum(history.actual_decrease)))
    assert info.cg_steps == np.sum(history.cg_steps)
    assert info.passes == 1 + int(info.cg_steps) + 1.5 * int(info.steps)
    assert (np.diff(history.objective) < 0).all()


def test_soft_labels_equal_repeated_weighted_hard_labels():
    problem = problems.random(b=10, start=0.0)
    rng = np.random.default_rng(1)
    probabilities = rng.dirichlet(np.ones(3), size=10)
    probabilities[0] = [0.0, 1.0, 0.0]
    weights = rng.uniform(0.5, 2.0, size=10)
    options = {"l2": 0.05, "tolerance": 1e-10}
    soft, _ = mm.run(
        qbound.linear_logits, problem.params, problem.inputs, probabilities, example_weights=weights, **options
    )
    hard, _ = mm.run(
        qbound.linear_logits,
        problem.params,
        np.repeat(problem.inputs, 3, axis=0),
        np.tile(np.arange(3), 10),
        example_weights=(weights[:, None] * probabilities).ravel(),
        **options,
    )
    np.testing.assert_allclose(soft, hard, atol=1e-9)


def test_weights_are_numbers_of_copies():
    problem = problems.random(start=0.0)
    copies = np.tile([0, 1, 2, 1, 1], 6)  # as many in all as there are examples, for one compilation less
    weighted, _ = run(problem, tolerance=1e-10, example_weights=copies.astype(float))
    rows = np.repeat(np.arange(30), copies)
    repeated, _ = run(problem._replace(inputs=problem.inputs[rows], labels=problem.labels[rows]), tolerance=1e-10)
    np.testing.assert_allclose(weighted, repeated, atol=1e-9)


def test_labels_removed_by_minus_infinity_take_no_part():
    problem = problems.random(start=0.0)
    params, inputs, labels = problem.cast(jnp.float64)

    def masked(params, inputs):
        return (inputs @ params) + jnp.array([[0.0, -jnp.inf, 0.0, 0.0]])

    four = jnp.insert(params, 1, 0.0, axis=1)
    found, info = mm.run(masked, four, inputs, jnp.where(labels >= 1, labels + 1, labels), l2=1e-2, tolerance=1e-10)
    expected, _ = run(problem, tolerance=1e-10)
    np.testing.assert_allclose(jnp.delete(found, 1, axis=1), expected, atol=1e-8)
    np.testing.assert_allclose(found[:, 1], 0, atol=1e-12)
    assert info.result == mm.Result.CONVERGED


def test_different_labels_may_be_removed_for_every_example():
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(30, 3)), rng.integers(4, size=30)
    allowed = rng.random((30, 4)) < 0.6
    allowed[np.arange(30), labels] = True

    def masked(params, inputs):
        x, allowed = inputs
        return jnp.where(allowed, x @ params, -jnp.inf)

    params, info = mm.run(masked, jnp.zeros((3, 4)), (inputs, allowed), labels, l2=1e-2, tolerance=1e-9)
    gradient = np.zeros((3, 4))
    for x, y, keep in zip(inputs, labels, allowed, strict=True):
        weights = np.where(keep, np.exp(x @ params), 0)
        gradient += np.outer(x, weights / weights.sum() - np.eye(4)[y]) / 30
    np.testing.assert_allclose(gradient + 1e-2 * params, 0, atol=1e-9)
    assert (np.diff(info.history.objective) <= 1e-15).all()


@pytest.mark.parametrize("l2", [1e-2, 1e-6, 1e-10])
def test_separable_data_has_an_optimum_with_a_regulariser(l2):
    inputs = jnp.asarray([[1.0, 2.0], [2.0, 1.5], [-1.0, -1.0], [-2.0, -0.5]])
    labels = jnp.array([0, 0, 1, 1])
    params, info = mm.run(qbound.linear_logits, jnp.zeros((2, 2)), inputs, labels, l2=l2, tolerance=1e-3 * l2)
    assert info.result == mm.Result.CONVERGED
    assert info.objective < 0.1
    assert (jnp.argmax(inputs @ params, axis=1) == labels).all()


def test_explicit_features_of_the_paper():
    """Logits features @ theta, with features (b, n, d)."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(25, 4, 3)), rng.integers(4, size=25)
    theta, info = mm.run(lambda theta, f: f @ theta, jnp.zeros(3), features, labels, l2=0.1, tolerance=1e-9)
    p = jax.nn.softmax(features @ theta, axis=1)
    g = np.mean(np.einsum("jn,jnd->jd", p - problems.one_hot(labels, 4), features), axis=0) + 0.1 * theta
    np.testing.assert_allclose(g, 0, atol=1e-9)
    assert info.result == mm.Result.CONVERGED


def test_sequences_have_a_row_of_logits_for_every_position():
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(5, 6, 4)), rng.integers(3, size=(5, 6))
    padding = np.arange(6)[None, :] < np.array([6, 2, 3, 6, 1])[:, None]
    padding = padding.astype(float)
    options = {"l2": 0.1, "tolerance": 1e-9}
    found, _ = mm.run(qbound.linear_logits, jnp.zeros((4, 3)), inputs, labels, example_weights=padding, **options)
    rows = (x.reshape(30, *x.shape[2:]) for x in (inputs, labels))
    flat, _ = mm.run(qbound.linear_logits, jnp.zeros((4, 3)), *rows, example_weights=padding.ravel(), **options)
    np.testing.assert_allclose(found, flat, atol=1e-8)


def test_preconditioner_saves_steps_of_cg():
    problem = problems.random(b=200, d=30, n=4, start=0.0)
    scales = np.logspace(0, 3, 30)
    problem = problem._replace(inputs=problem.inputs * scales)

    def precondition(r):
        return r / (0.1 * jnp.asarray(scales)[:, None] ** 2)

    plain, slow = run(problem, l2=1e-2, solver="cg", max_cg_steps=2000, tolerance=1e-6, throw=False)
    found, fast = run(problem, l2=1e-2, solver="cg", max_cg_steps=2000, tolerance=1e-6, precondition=precondition)
    assert int(fast.cg_steps) < int(slow.cg_steps) / 3
    np.testing.assert_allclose(found, plain, atol=1e-3)


def test_second_run_compiles_nothing():
    traces = []

    def counted(params, inputs):
        traces.append(None)
        return inputs @ params

    params, inputs, labels = problems.random().cast(jnp.float64)
    mm.run(counted, params, inputs, labels, l2=1e-2)
    first = len(traces)
    assert first > 0
    mm.run(counted, params + 1, 2 * inputs, labels, l2=1e-1, tolerance=1e-4)
    assert len(traces) == first


def test_run_can_be_traced():
    params, inputs, labels = problems.random().cast(jnp.float64)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def path(l2, inputs):
        return mm.run(linear, params, inputs, labels, l2=l2, tolerance=1e-9, throw=False)

    found, info = path(jnp.array([1.0, 0.1, 0.01]), inputs)
    for l2, one, steps in zip([1.0, 0.1, 0.01], found, info.steps, strict=True):
        expected, alone = mm.run(linear, params, inputs, labels, l2=l2, tolerance=1e-9)
        np.testing.assert_allclose(one, expected, atol=1e-8)
        assert steps == alone.steps
    assert (info.result == mm.Result.CONVERGED).all()
    with pytest.raises(ValueError, match="throw: expected False inside jax.jit"):
        jax.jit(lambda l2: mm.run(linear, params, inputs, labels, l2=l2))(0.1)


def test_callback_sees_every_step_in_order():
    seen = []
    _, info = run(problems.random(), callback=lambda info: seen.append(info))
    jax.effects_barrier()
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(seen))
    assert [int(info.steps) for info in seen] == list(range(1, int(info.steps) + 1))
    np.testing.assert_array_equal([info.objective for info in seen], info.history.objective)


def test_start_at_the_optimum_takes_no_step():
    problem = problems.random()
    params, _ = run(problem, tolerance=1e-10)
    again, info = run(problem._replace(params=params), tolerance=1e-9)
    assert info.steps == 0
    assert info.certificate == mm.Certificate.NONE
    assert info.history.objective.shape == (0,)
    np.testing.assert_array_equal(again, params)


def test_step_limit_is_an_error_that_keeps_what_was_found():
    problem = problems.random(start=3.0)
    params, info = run(problem, max_steps=2, throw=False)
    assert info.result == mm.Result.STEP_LIMIT
    assert info.steps == 2
    with pytest.raises(mm.NotConverged, match="after max_steps steps; .* Gradient norm") as caught:
        run(problem, max_steps=2)
    np.testing.assert_array_equal(caught.value.params, params)
    assert caught.value.result == mm.Result.STEP_LIMIT
    assert caught.value.info.objective == info.objective


def test_tolerance_beyond_the_dtype_ends_the_run():
    inputs, labels = data("iris")
    problem = problems.Problem(np.zeros((4, 3)), inputs, labels).cast(jnp.float32)
    params, info = mm.run(qbound.linear_logits, *problem, l2=1e-2, tolerance=0.0, throw=False)
    assert info.result == mm.Result.STALLED
    assert info.steps < 40
    assert info.gradient_norm < 1e-6
    with pytest.raises(mm.NotConverged, match="rounding errors of the dtype"):
        mm.run(qbound.linear_logits, *problem, l2=1e-2, tolerance=0.0)


def network(params, inputs):
    return jnp.tanh(inputs @ params) * 3


def relu(params, inputs):
    return jax.nn.relu(inputs @ params)


@pytest.mark.parametrize("model", [network, relu])
def test_model_that_is_not_affine_is_found_out(model):
    params, inputs, labels = problems.random(start=0.5).cast(jnp.float64)
    found, info = mm.run(model, params, inputs, labels, l2=1e-3, throw=False)
    assert info.result == mm.Result.NOT_AFFINE
    assert info.objective <= mm.init(model, params, inputs, labels, l2=1e-3).objective
    assert np.isfinite(found).all()
    with pytest.raises(ValueError, match="logits_fn: expected logits that are affine"):
        mm.run(model, params, inputs, labels, l2=1e-3)


def broken(**changes):
    """A fine problem but for what is changed."""
    params, inputs, labels = problems.random().cast(jnp.float64)
    arguments = {"params": params, "inputs": inputs, "labels": labels, "l2": 0.1, "example_weights": None}
    return arguments | changes


def poisoned(value):
    return problems.random().cast(jnp.float64).inputs.at[3, 1].set(value)


BAD_VALUES = {
    "NaN in inputs": ({"inputs": poisoned(jnp.nan)}, mm.Result.NOT_FINITE, "inputs: expected finite"),
    "infinity in inputs": ({"inputs": poisoned(jnp.inf)}, mm.Result.NOT_FINITE, "inputs: expected finite"),
    "NaN in params": ({"params": jnp.full((4, 3), jnp.nan)}, mm.Result.NOT_FINITE, "params, inputs: expected"),
    "label too large": ({"labels": jnp.full(30, 3)}, mm.Result.BAD_LABELS, "labels: expected integers from 0"),
    "label negative": ({"labels": jnp.full(30, -1)}, mm.Result.BAD_LABELS, "labels: expected integers from 0"),
    "rows that sum to 2": ({"labels": jnp.full((30, 3), 2 / 3)}, mm.Result.BAD_LABELS, "rows of n nonnegative"),
    "rows that sum to a half": ({"labels": jnp.full((30, 3), 1 / 6)}, mm.Result.BAD_LABELS, "that sum to 1"),
    "negative probability": (
        {"labels": jnp.tile(jnp.array([1.5, -0.5, 0.0]), (30, 1))},
        mm.Result.BAD_LABELS,
        "nonnegative probabilities",
    ),
    "NaN in labels": ({"labels": jnp.full((30, 3), jnp.nan)}, mm.Result.BAD_LABELS, "labels: expected"),
    "negative weight": (
        {"example_weights": jnp.ones(30).at[0].set(-1)},
        mm.Result.BAD_WEIGHTS,
        "example_weights: expected finite numbers >= 0",
    ),
    "no weight": ({"example_weights": jnp.zeros(30)}, mm.Result.BAD_WEIGHTS, "not all 0"),
    "l2 zero": ({"l2": 0.0}, mm.Result.BAD_L2, "l2: expected a finite number > 0.*optimum need not exist"),
    "l2 negative": ({"l2": -1.0}, mm.Result.BAD_L2, "l2: expected a finite number > 0"),
    "l2 an array that is negative": ({"l2": jnp.asarray(-1.0)}, mm.Result.BAD_L2, "l2: expected a finite number"),
    "l2 infinite": ({"l2": float("inf")}, mm.Result.BAD_L2, "l2: expected a finite number > 0"),
    "l2 NaN": ({"l2": float("nan")}, mm.Result.BAD_L2, "l2: expected a finite number > 0"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_are_errors_or_result_codes(name):
    changes, result, message = BAD_VALUES[name]
    arguments = broken(**changes)
    params, inputs, labels = (arguments.pop(key) for key in ("params", "inputs", "labels"))
    found, info = mm.run(qbound.linear_logits, params, inputs, labels, **arguments, throw=False)
    assert mm.Result(int(info.result)) == result
    assert result.bad_input
    assert info.steps == 0
    np.testing.assert_array_equal(found, params)
    with pytest.raises(ValueError, match=message):
        mm.run(qbound.linear_logits, params, inputs, labels, **arguments)


def test_regulariser_of_no_leaf_may_be_negative():
    params, inputs, labels = problems.random().cast(jnp.float64)
    params = {"weights": params, "bias": jnp.zeros(3)}
    for bias, result in ((0.0, mm.Result.UNFINISHED), (-0.1, mm.Result.BAD_L2)):
        l2 = {"weights": 0.1, "bias": bias}
        assert mm.init(qbound.linear_logits, params, inputs, labels, l2=l2).result == result


def test_step_and_run_have_the_same_defaults():
    of_step, of_run = (inspect.signature(function).parameters for function in (mm.step, mm.run))
    shared = (set(of_step) & set(of_run)) - {"tolerance"}
    assert {name: of_step[name].default for name in shared} == {name: of_run[name].default for name in shared}
    assert of_step["tolerance"].default == 0


def test_observed_label_that_is_removed_is_an_error():
    params, inputs, labels = problems.random().cast(jnp.float64)

    def masked(params, inputs):
        return (inputs @ params).at[:, 0].set(-jnp.inf)

    with pytest.raises(ValueError, match="observed label removed"):
        mm.run(masked, params, inputs, labels, l2=0.1)


BAD_SHAPES = {
    "labels of another length": ({"labels": jnp.zeros(5, int)}, ValueError, r"labels: expected integers of"),
    "probabilities of another shape": ({"labels": jnp.ones((30, 2))}, ValueError, r"labels: expected probabilities of"),
    "labels that are no numbers": ({"labels": jnp.ones(30, bool)}, TypeError, "labels: expected integers, or rows"),
    "weights of another length": (
        {"example_weights": jnp.ones(5)}, ValueError, r"example_weights: expected shape \(30,\)"
    ),
    "params of another shape": ({"params": jnp.zeros((5, 3))}, ValueError, r"inputs: expected shape \(..., 5\)"),
    "params of integers": ({"params": jnp.zeros((4, 3), int)}, TypeError, "params: expected float arrays"),
    "no params": ({"params": {}}, ValueError, "params: expected at least one array"),
    "l2 of another structure": ({"l2": {"a": 1.0}}, ValueError, "l2: expected a number, or a tree of numbers"),
    "l2 of many numbers": ({"l2": jnp.ones(3)}, ValueError, "l2: expected a number for each leaf"),
    "eta of 2": ({"eta": 2.0}, ValueError, r'eta: expected "search" or a number in \(0, 2\); got 2.0'),
    "eta of another name": ({"eta": "armijo"}, ValueError, "eta: expected one of 'search'"),
    "max_steps of 0": ({"max_steps": 0}, ValueError, "max_steps: expected an integer > 0"),
    "max_cg_steps of 1.5": ({"max_cg_steps": 1.5}, TypeError, "max_cg_steps: expected an integer > 0"),
    "negative tolerance": ({"tolerance": -1.0}, ValueError, "tolerance: expected a finite number >= 0"),
    "curvature unknown": ({"curvature": "newton"}, ValueError, "curvature: expected one of 'auto'"),
    "solver unknown": ({"solver": "qr"}, ValueError, "solver: expected one of 'auto'"),
    "order unknown": ({"order": "ascending"}, ValueError, "order: expected one of"),
    "tolerance an array that is negative": (
        {"tolerance": jnp.asarray(-1.0)}, ValueError, "tolerance: expected a finite number >= 0"
    ),
    "eta an array of 5": ({"eta": jnp.asarray(5.0)}, ValueError, r"eta: expected .* in \(0, 2\)"),
    "l2 a string": ({"l2": "a"}, TypeError, "l2: expected an array of numbers"),
    "labels strings": ({"labels": np.array(["a", "b"])}, TypeError, "labels: expected an array of numbers"),
    "no labels": ({"labels": None}, TypeError, "labels: expected integers"),
    "weights a string": ({"example_weights": "x"}, TypeError, "example_weights: expected an array of numbers"),
    "params a string": ({"params": "a"}, TypeError, "params: expected an array of numbers"),
    "inputs complex": ({"inputs": jnp.ones((30, 4), complex)}, TypeError, "inputs: expected real numbers"),
    "weights complex": (
        {"example_weights": jnp.ones(30, complex)}, TypeError, "example_weights: expected an array of real numbers"
    ),
    "l2 complex": ({"l2": 1j}, TypeError, "l2: expected an array of real numbers"),
    "preconditioner of another shape": (
        {"precondition": lambda r: r[0], "solver": "cg"}, ValueError, "precondition: expected an array of shape"
    ),
    "callback no function": ({"callback": 3}, TypeError, "callback: expected a function"),
    "preconditioner no function": ({"precondition": 3}, TypeError, "precondition: expected a function"),
}  # fmt: skip


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("name", BAD_SHAPES)
def test_bad_shapes_and_options_are_errors(name):
    changes, error, message = BAD_SHAPES[name]
    arguments = broken(**changes)
    params, inputs, labels = (arguments.pop(key) for key in ("params", "inputs", "labels"))
    with pytest.raises(error, match=message):
        mm.run(qbound.linear_logits, params, inputs, labels, **arguments, throw=False)


@pytest.mark.usefixtures("without_type_checks")
def test_integers_may_be_those_of_numpy():
    _, info = run(problems.random(start=3.0), max_steps=np.int64(2), max_cg_steps=np.int64(9), throw=False)
    assert info.steps == 2


def test_parameters_may_have_leaves_without_entries():
    """Such as the weights of a layer that some configuration leaves out."""
    params, inputs, labels = problems.random().cast(jnp.float64)
    tree = {"weights": params, "nothing": jnp.zeros((0, 3))}
    found, info = mm.run(lambda tree, x: x @ tree["weights"], tree, inputs, labels, l2=0.1)
    expected, _ = mm.run(linear, params, inputs, labels, l2=0.1)
    np.testing.assert_allclose(found["weights"], expected, atol=1e-6)
    assert found["nothing"].shape == (0, 3)
    assert info.result == mm.Result.CONVERGED


def test_numbers_out_of_range_that_are_traced_are_a_result_code():
    params, inputs, labels = problems.random().cast(jnp.float64)

    @jax.jit
    def result(eta, tolerance):
        return mm.run(linear, params, inputs, labels, l2=0.1, eta=eta, tolerance=tolerance, throw=False)[1].result

    assert result(1.0, 1e-5) == mm.Result.CONVERGED
    assert result(2.5, 1e-5) == mm.Result.BAD_OPTION
    assert result(1.0, -1.0) == mm.Result.BAD_OPTION

    @jax.jit
    def step(eta, tolerance):
        state = mm.init(linear, params, inputs, labels, l2=0.1)
        state, info = mm.step(linear, state, inputs, labels, l2=0.1, eta=eta, tolerance=tolerance)
        return info.result, state.steps

    assert step(1.0, 0.0) == (mm.Result.UNFINISHED, 1)
    assert step(2.5, 0.0) == (mm.Result.BAD_OPTION, 0)
    assert step(1.0, -1.0) == (mm.Result.BAD_OPTION, 0)


@pytest.mark.usefixtures("without_type_checks")
def test_model_must_be_a_function():
    with pytest.raises(TypeError, match="logits_fn: expected a function"):
        mm.run(None, jnp.zeros((4, 3)), jnp.zeros((2, 4)), jnp.zeros(2, int), l2=0.1)


def test_codes_are_all_different_and_keep_their_numbers():
    assert [code.value for code in mm.Result.__members__.values()] == list(range(len(mm.Result)))
    assert [code.value for code in mm.Certificate.__members__.values()] == [0, 1, 2]


@pytest.mark.parametrize("place", [0, 1, 2], ids=["eta", "tolerance", "cg_tolerance"])
def test_any_option_that_is_not_a_number_is_a_bad_option(place):
    params, inputs, labels = problems.random().cast(jnp.float64)
    state = mm.init(qbound.linear_logits, params, inputs, labels, l2=0.1)
    numbers = [jnp.asarray(1.0), jnp.asarray(0.0), jnp.asarray(0.1)]
    assert run_module._checked_numbers(state, *numbers) == mm.Result.UNFINISHED
    numbers[place] = jnp.asarray(jnp.nan)
    assert run_module._checked_numbers(state, *numbers) == mm.Result.BAD_OPTION


def test_gradient_is_right_where_labels_are_not_the_last_axis():
    params, inputs, labels = problems.random().cast(jnp.float64)
    expected = mm.init(qbound.linear_logits, params, inputs, labels, l2=0.1).gradient
    found = mm.init(lambda w, x: x @ w.T, params.T, inputs, labels, l2=0.1).gradient
    np.testing.assert_allclose(found.T, expected, rtol=1e-10)
