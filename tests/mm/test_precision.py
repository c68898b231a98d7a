"""Where rounding, dtypes and sizes could lead the method astray."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qbound
from qbound import mm, trees
from qbound.fitting.line import StepLength
from qbound.fitting.step import _noise, _rounded_step, make_problem, model_of, point_at
from tests.mm import problems


def fitted(seed, scale, n=3):
    """Data that a linear model separates, in float32."""
    rng = np.random.default_rng(seed)
    inputs = np.float32(scale * rng.normal(size=(30, 4)))
    return inputs, np.argmax(inputs @ rng.normal(size=(4, n)), axis=1)


@pytest.mark.parametrize("solver", ["dense", "cg"])
@pytest.mark.parametrize(("scale", "l2"), [(300, 2e-9), (100, 1e-8), (100, 1e-6)])
def test_rounding_of_the_gradient_does_not_make_false_certificates(scale, l2, solver):
    """A part of the gradient that is the same for all labels meets no curvature but l2, which is tiny here."""
    for seed in range(5):
        inputs, labels = fitted(seed, scale)
        iterates, infos = problems.trajectory(
            jnp.zeros((4, 3), jnp.float32), inputs, jnp.asarray(labels), l2, steps=15, solver=solver, search=True
        )
        targets = problems.one_hot(labels, 3)
        values = np.array([problems.objective(params, inputs, targets, l2) for params in iterates])
        assert (values[1:] <= 1.001 * values[:-1] + 1e-9).all()
        assert (-np.diff(values) >= 0.9 * np.asarray(infos.certified_decrease, float) - 1e-6 * values[:-1] - 1e-9).all()


SCALES = {"columns of all sizes": np.array([1e-6, 1e-3, 1, 1e3, 1e6]), "large inputs": np.full(5, 1e10)}


def badly_scaled(name, seed):
    """In float32: one unit of rounding of a parameter changes the logits visibly."""
    rng = np.random.default_rng(seed)
    inputs, labels = rng.normal(size=(40, 5)), rng.integers(3, size=40)
    if name == "a large constant":
        inputs[:, 0] += 1e5
    elif name == "nearly the same columns":
        inputs[:, 0] += 1e3
        inputs[:, 1] = inputs[:, 0] + 1e-2 * inputs[:, 1]
    else:
        inputs *= SCALES[name]
    return np.float32(inputs), labels


@pytest.mark.parametrize(
    ("name", "l2", "options"),
    [
        ("columns of all sizes", 1e-3, {}),
        ("columns of all sizes", 1e-10, {"search": True}),
        ("large inputs", 1e-3, {"search": True}),
        ("a large constant", 1e-3, {"search": True, "curvature": "bound", "solver": "dense"}),
        ("nearly the same columns", 1e-8, {}),
    ],
)
def test_certificates_are_for_the_parameters_as_they_are_rounded(name, l2, options):
    for seed in range(3):
        inputs, labels = badly_scaled(name, seed)
        start = jnp.zeros((5, 3), jnp.float32)
        iterates, infos = problems.trajectory(start, inputs, jnp.asarray(labels), l2, steps=30, **options)
        targets = problems.one_hot(labels, 3)
        values = np.array([problems.objective(params, inputs, targets, l2) for params in iterates])
        certified, actual = (np.asarray(x, float) for x in (infos.certified_decrease, infos.actual_decrease))
        assert (actual >= certified).all()
        assert (-np.diff(values) >= 0.99 * certified - 1e-6).all()
        moved = (np.diff(iterates, axis=0) != 0).any(axis=(1, 2))
        np.testing.assert_array_equal(moved, np.asarray(infos.certificate) != mm.Certificate.NONE)
        assert moved[0]


@pytest.mark.parametrize(("name", "l2"), [("columns of all sizes", 1e-3), ("nearly the same columns", 1e-8)])
def test_run_ends_where_rounding_leaves_no_step(name, l2):
    """And a model that is known to be linear is not taken for another."""
    for seed in range(3):
        inputs, labels = badly_scaled(name, seed)
        start = jnp.zeros((5, 3), jnp.float32)
        _, info = mm.run(qbound.linear_logits, start, inputs, labels, l2=l2, solver="cg", eta=1.0, throw=False)
        assert info.result in (mm.Result.STALLED, mm.Result.CONVERGED)
        assert 0 < info.steps < 100


def test_step_that_raises_the_objective_is_not_taken():
    """A model whose errors are too small to tell from rounding, and larger than what is left to gain."""
    start, inputs, labels = problems.random().cast(jnp.float64)
    optimum, _ = mm.run(qbound.linear_logits, start, inputs, labels, l2=0.1, tolerance=1e-10)
    near = optimum + 1e-6 * start
    wrong = 1 - jax.nn.one_hot(labels, 3)

    @functools.partial(jax.jit, static_argnums=0)
    def step(error):
        def model(params, x):
            return x @ params + jnp.where(jnp.any(params != near), error, 0.0) * wrong

        state = mm.init(model, near, inputs, labels, l2=0.1)
        return state, *mm.step(model, state, inputs, labels, l2=0.1, tolerance=0.0)

    _, _, info = step(0.0)
    assert info.steps == 1
    before, after, info = step(1e-9)
    assert info.steps == 0
    assert info.result == mm.Result.STALLED
    assert after.objective == before.objective
    np.testing.assert_array_equal(after.params, near)


def test_slow_convergence_is_not_taken_for_rounding():
    inputs = np.float32(np.random.default_rng(0).normal(size=(40, 5)))
    labels = np.argmax(inputs[:, :3], axis=1)
    _, info = mm.run(
        qbound.linear_logits,
        jnp.zeros((5, 3), jnp.float32),
        inputs,
        labels,
        l2=1e-3,
        curvature="bohning",
        eta=1.0,
        max_steps=3000,
        throw=False,
    )
    assert info.result == mm.Result.CONVERGED
    assert info.steps > 500


@pytest.mark.parametrize(("start", "l2"), [(1e3, 3.0), (1e4, 0.3), (1e5, 0.01)])
def test_far_starts_are_no_sign_of_a_model_that_is_not_affine(start, l2):
    problem = problems.random(start=start).cast(jnp.float32)
    _, info = mm.run(qbound.linear_logits, *problem, l2=l2, throw=False, max_steps=200)
    assert info.result == mm.Result.CONVERGED


def test_large_constant_logits_do_not_hide_a_network():
    """The usual finite mask of -1e9 must not widen what counts as rounding."""
    params, inputs, labels = problems.random(start=1.0).cast(jnp.float32)

    def network(params, inputs):
        logits = 3 * jnp.tanh(inputs @ params)
        return jnp.concatenate([logits, jnp.full((len(inputs), 1), -1e9, logits.dtype)], axis=1)

    _, info = mm.run(network, params, inputs, labels, l2=1e-3, throw=False)
    assert info.result == mm.Result.NOT_AFFINE


def test_dense_solver_converges_in_float32():
    rng = np.random.default_rng(0)
    inputs = np.float32(100 * rng.normal(size=(200, 4)))
    labels = np.argmax(inputs / 100 @ rng.normal(size=(4, 3)) + rng.normal(size=(200, 3)), axis=1)
    start = np.float32(rng.normal(size=(4, 3)) + 1)
    for solver in ("dense", "cg"):
        _, info = mm.run(qbound.linear_logits, start, inputs, labels, l2=1e-3, solver=solver, throw=False)
        assert info.result == mm.Result.CONVERGED, solver


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32])
def test_small_integer_labels_are_not_wrapped(dtype):
    rng = np.random.default_rng(0)
    inputs, labels = np.float32(rng.normal(size=(100, 4))), rng.integers(0, 100, size=100)
    start = jnp.zeros((4, 300), jnp.float32)
    init = functools.partial(jax.jit(functools.partial(mm.init, qbound.linear_logits)), start, inputs, l2=1e-2)
    found, expected = init(labels=labels.astype(dtype)), init(labels=labels)
    assert found.result == mm.Result.UNFINISHED
    np.testing.assert_array_equal(found.gradient, expected.gradient)


def test_parameters_and_inputs_may_differ_in_dtype():
    params, inputs, labels = problems.random().cast(jnp.float64)
    expected, _ = mm.run(qbound.linear_logits, params, inputs, labels, l2=1e-2)
    with jax.numpy_dtype_promotion("standard"):
        found, info = mm.run(lambda p, x: x @ p, params.astype(jnp.float32), inputs, labels, l2=1e-2)
    assert found.dtype == info.objective.dtype == jnp.float32
    np.testing.assert_allclose(found, np.float32(expected), atol=1e-3)


def test_leaves_of_different_dtypes_are_taken_to_the_widest():
    _, inputs, labels = problems.random().cast(jnp.float64)
    params = {"weights": jnp.zeros((4, 3), jnp.float32), "bias": jnp.zeros(3, jnp.float64)}
    found, _ = mm.run(qbound.linear_logits, params, inputs, labels, l2=1e-2, tolerance=1e-10)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.float64)}


def test_model_may_compute_in_bfloat16():
    params, inputs, labels = problems.random(start=0.0).cast(jnp.float32)

    def narrow(params, inputs):
        return inputs.astype(jnp.bfloat16) @ params.astype(jnp.bfloat16)

    found, info = mm.run(narrow, params, inputs, labels, l2=0.1, tolerance=1e-3, throw=False)
    expected, _ = mm.run(qbound.linear_logits, params, inputs, labels, l2=0.1)
    assert info.result in (mm.Result.CONVERGED, mm.Result.STALLED)
    np.testing.assert_allclose(found, expected, atol=0.1)


def test_weights_may_be_huge():
    problem = problems.random(start=0.0).cast(jnp.float32)
    expected, _ = mm.run(qbound.linear_logits, *problem, l2=1e-2, example_weights=jnp.ones(30, jnp.float32))
    found, info = mm.run(qbound.linear_logits, *problem, l2=1e-2, example_weights=jnp.full(30, 1e38, jnp.float32))
    assert info.steps > 1
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_probabilities_are_taken_to_sum_to_one():
    """Otherwise a bias without a regulariser would have no optimum."""
    params, inputs, _ = problems.random(start=0.0).cast(jnp.float64)
    params = {"weights": params, "bias": jnp.zeros(3)}
    l2 = {"weights": 1e-2, "bias": 0.0}
    rows = np.random.default_rng(0).dirichlet(np.ones(3), size=30)
    expected, _ = mm.run(qbound.linear_logits, params, inputs, rows, l2=l2)
    found, _ = mm.run(qbound.linear_logits, params, inputs, 1.0009 * rows, l2=l2)
    np.testing.assert_allclose(found["weights"], expected["weights"], atol=1e-6)


def test_rows_of_weight_zero_may_be_anything():
    params, inputs, labels = problems.random(start=0.0).cast(jnp.float64)

    def with_nan(params, inputs):
        return (inputs @ params).at[0].set(jnp.nan).at[1].set(jnp.inf)

    weights = jnp.ones(30).at[:2].set(0.0)
    found, _ = mm.run(with_nan, params, inputs, labels, l2=1e-2, example_weights=weights, tolerance=1e-9)
    expected, _ = mm.run(qbound.linear_logits, params, inputs, labels, l2=1e-2, example_weights=weights, tolerance=1e-9)
    np.testing.assert_allclose(found, expected, atol=1e-8)


def test_rows_of_weight_zero_may_have_inputs_of_any_size():
    """Their logits overflow, and their probabilities are not numbers."""
    params, inputs, labels = problems.random(start=1.0).cast(jnp.float32)
    weights = jnp.ones(30, jnp.float32).at[:2].set(0.0)
    options = {"l2": 1e-2, "example_weights": weights}
    expected, _ = mm.run(qbound.linear_logits, params, inputs, labels, **options)
    large = inputs.at[0].set(3e38).at[1].set(-3e38)
    assert not jnp.all(jnp.isfinite(large @ params))
    found, _ = mm.run(qbound.linear_logits, params, large, labels, **options)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e-200, 1e200])
def test_gradient_norm_is_euclidean_for_gradients_of_any_size(size):
    """Whose squares may be too small or too large for the dtype."""
    params, inputs, labels = problems.random().cast(jnp.float64)
    state = mm.init(qbound.linear_logits, params / size, size * inputs, labels, l2=1e-300)
    gradient = np.asarray(state.gradient) / size
    assert state.gradient_norm == pytest.approx(size * np.linalg.norm(gradient), rel=1e-12)


@pytest.mark.parametrize("l2", [1e-46, 1e39])
def test_regulariser_may_be_beyond_float32(l2):
    problem = problems.random(start=0.0).cast(jnp.float64)
    _, info = mm.run(qbound.linear_logits, *problem, l2=l2, throw=False)
    assert not mm.Result(int(info.result)).bad_input


@pytest.mark.parametrize("factor", [-1.0, jnp.nan])
def test_preconditioner_that_is_wrong_costs_steps_and_nothing_else(factor):
    problem = problems.random().cast(jnp.float64)
    _, info = mm.run(
        qbound.linear_logits,
        *problem,
        l2=1.0,
        solver="cg",
        precondition=lambda r: factor * r,
        tolerance=1e-6,
        throw=False,
        max_steps=300,
    )
    assert info.result == mm.Result.CONVERGED
    assert (np.diff(info.history.objective) <= 0).all()


@jax.jit
def rounded(part, l2, inputs, params, labels, shares=1.0):
    """A step along the gradient that leads only `part` of the way: as aimed at, as taken, and what that decreases."""
    problem = make_problem(qbound.linear_logits, params, inputs, labels, None, l2)
    state = mm.init(qbound.linear_logits, params, inputs, labels, l2=l2)
    _, linear_map, logits_of = model_of(qbound.linear_logits, params, inputs)
    s, u = state.gradient, linear_map.forward(state.gradient)
    line = problem.line(state.logits, u, jnp.sum(s * s), problem.penalty(s, s))
    length = jnp.asarray(0.3)
    actual = line.decrease(length)
    aimed = StepLength(length, 0.9 * actual, actual, jnp.array(True))
    moved = length * s * jnp.where(shares == 0, 1.0, part)
    point = point_at(problem, linear_map, params - moved, logits_of(params - moved))
    taken, passes = _rounded_step(problem, linear_map, state, s, u, aimed, point, moved)
    return aimed, taken, passes, state.objective - point.objective


@pytest.mark.parametrize("seen", [True, False], ids=["by the logits", "by the penalty alone"])
def test_what_rounding_costs_is_taken_off_the_certificate(seen):
    """Of the logits, or of a parameter that no logit depends on."""
    params, inputs, labels = problems.random().cast(jnp.float64)
    l2, shares = 1e-6, 1.0
    if not seen:
        params, inputs, l2 = params.at[3].set(3.0), inputs.at[:, 3].set(0), 0.1
        shares = (jnp.arange(4) == 3)[:, None].astype(float)
    whole, half = (rounded(part, l2, inputs, params, labels, shares) for part in (1.0, 0.5))
    aimed, taken, passes, decrease = whole
    np.testing.assert_allclose([taken.certified, taken.actual], [aimed.certified, decrease], rtol=1e-9)
    assert passes == 0
    aimed, taken, passes, decrease = half
    assert decrease < 0.95 * aimed.actual
    np.testing.assert_allclose(taken.actual, decrease, rtol=1e-9)
    np.testing.assert_allclose(taken.certified, aimed.certified - (aimed.actual - decrease), rtol=1e-9)
    assert passes == 0.5


def test_step_of_which_nothing_is_certified_is_not_taken(monkeypatch):
    params, inputs, labels = problems.random().cast(jnp.float64)
    state = mm.init(qbound.linear_logits, params, inputs, labels, l2=0.1)
    module = importlib.import_module("qbound.fitting.step")
    whole = module.step_length

    @jax.jit
    def step(certified):
        monkeypatch.setattr(module, "step_length", lambda *a, **k: whole(*a, **k)._replace(certified=certified))
        return mm.step(qbound.linear_logits, state, inputs, labels, l2=0.1)

    for certified, result in ((1e-3, mm.Result.UNFINISHED), (0.0, mm.Result.STALLED)):
        new, info = step(certified)
        assert new.result == result
        assert (info.actual_decrease > 0) == (new.objective < state.objective) == (certified > 0)


def test_norm_of_a_gradient_that_is_infinite_is_infinite():
    assert trees.norm({"weights": jnp.array([1.0, jnp.inf]), "bias": jnp.zeros(2)}) == jnp.inf


def test_noise_is_a_few_units_of_rounding_of_the_objective_and_the_logits_that_count():
    params, inputs, labels = problems.random().cast(jnp.float64)
    weights = jnp.ones(30).at[0].set(0)
    problem = make_problem(qbound.linear_logits, params, inputs, labels, weights, 0.1)
    state = mm.init(qbound.linear_logits, params, inputs, labels, l2=0.1, example_weights=weights)
    logits = state.logits.at[0].set(1e9).at[1, 0].set(-jnp.inf).at[2, 0].set(-300.0)
    units = _noise(problem, state._replace(logits=logits)) / (np.finfo(float).eps * (state.objective + 300))
    assert 1 < units < 20
