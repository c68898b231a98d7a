"""SPFB takes the step of the paper, by every solver, for every kind of model, and says how it went."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import qbound
from qbound import trees
from qbound.curvature import model as solvers
from qbound.curvature.model import cheapest, mean_curvature
from tests import reference
from tests.optimizers import problems
from tests.optimizers.problems import flat

SOLVERS = ("dense", "woodbury", "cg")
TIGHT = {"max_steps": 200, "tolerance": 1e-12}


@functools.cache
def direction(logits_fn, **options):
    """One object for the same options, so that the jitted functions of `problems` are compiled once."""
    return qbound.scale_by_spfb(logits_fn, **options)


def features(theta, f):
    """The paper's model: explicit features f (b, n, d)."""
    return f @ theta


@functools.cache
def jitted(tx):
    return jax.jit(tx.update)


# Algorithm 2


@pytest.mark.parametrize("order", ["given", "max_first", "descending"])
@pytest.mark.parametrize("batch", [1, 6])
def test_iterates_equal_algorithm_2(batch, order):
    rng = np.random.default_rng(batch)
    f, theta = rng.normal(size=(7, batch, 4, 5)), rng.normal(size=5)
    labels = rng.integers(4, size=(7, batch))
    tx = qbound.spfb(problems.paper_schedule(0.9), features, l2=0.05, order=order, solver="dense")
    iterates, _ = problems.train(tx, features, jnp.asarray(theta), f, labels)
    rates = [0.9 / (step + 1) for step in range(7)]
    expected = reference.algorithm_2(theta, zip(f, labels, strict=True), rates, 0.05, order)
    np.testing.assert_allclose(iterates, expected[1:], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("logits_fn", [qbound.linear_logits, problems.affine])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("b", [1, 30])
def test_every_solver_equals_the_reference(b, solver, logits_fn):
    p = problems.linear(b=b)
    tx = direction(logits_fn, damping=0.01, solver=solver, **TIGHT)
    update, state = problems.first_update(tx, logits_fn, p.params, p.inputs, p.labels)
    # In the paper's form: features of weights and bias, in the order of the tree.
    f = np.concatenate([np.broadcast_to(np.eye(3), (b, 3, 3)), reference.linear_features(np.asarray(p.inputs), 3)], 2)
    theta = flat(p.params)
    _, sigma = reference.batch_bound(theta, f, "max_first")
    grads = problems.gradient(logits_fn, p.params, p.inputs, p.labels)
    expected = np.linalg.solve(sigma + 0.01 * np.eye(len(theta)), flat(grads))
    np.testing.assert_allclose(flat(update), expected, rtol=1e-7, atol=1e-8)
    info = state.spfb_info
    assert info.spfb_residual < 1e-9
    assert (info.spfb_steps > 0) == (solver == "cg")
    np.testing.assert_allclose(info.spfb_predicted_decrease, flat(grads) @ expected / 2, rtol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_explicit_features_agree_with_the_model(solver):
    p = problems.linear(b=8)
    f = reference.linear_features(np.asarray(p.inputs), 3)
    options = {"damping": 0.02, "solver": solver, **TIGHT}
    weights = p.params["weights"]
    model = lambda w, x: x @ w  # noqa: E731
    update, _ = problems.first_update(direction(model, **options), model, weights, p.inputs, p.labels)
    explicit, _ = problems.first_update(direction(features, **options), features, weights.ravel(), f, p.labels)
    np.testing.assert_allclose(update.ravel(), explicit, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_network_step_is_that_of_its_linearisation(solver):
    p, params = problems.linear(b=6), problems.network_params()
    tx = direction(problems.network, damping=0.05, solver=solver, **TIGHT)
    update, _ = problems.first_update(tx, problems.network, params, p.inputs, p.labels)
    vector, unravel = ravel_pytree(params)
    f = np.asarray(jax.jit(jax.jacobian(lambda v: problems.network(unravel(v), p.inputs)))(vector))
    logits = np.asarray(problems.network(params, p.inputs))
    sigma = np.mean(
        [j.T @ reference.logit_bound(h, reference.max_first(h))[2] @ j for j, h in zip(f, logits, strict=True)], 0
    )
    g = flat(problems.gradient(problems.network, params, p.inputs, p.labels))
    expected = np.linalg.solve(sigma + 0.05 * np.eye(len(g)), g)
    np.testing.assert_allclose(flat(update), expected, rtol=1e-7, atol=1e-8)


def test_l2_is_part_of_gradient_and_curvature_and_damping_of_the_curvature_only():
    p = problems.linear()
    tx = qbound.spfb(0.5, problems.affine, l2=0.1, damping=0.2, solver="dense")
    update, _ = problems.first_update(tx, problems.affine, p.params, p.inputs, p.labels)
    grads = problems.gradient(problems.affine, p.params, p.inputs, p.labels)
    objective_grads = trees.add_scaled(grads, jnp.array(0.1), p.params)
    alone = direction(problems.affine, damping=0.3, solver="dense")
    expected, _ = jitted(alone)(objective_grads, alone.init(p.params), p.params, inputs=p.inputs)
    np.testing.assert_allclose(flat(update), -0.5 * flat(expected), rtol=1e-10)


# Batches


@pytest.mark.parametrize("solver", SOLVERS)
def test_duplicating_the_batch_changes_nothing(solver):
    p = problems.linear(b=6)
    tx = direction(problems.affine, damping=0.01, solver=solver, **TIGHT)
    once, _ = problems.first_update(tx, problems.affine, p.params, p.inputs, p.labels)
    twice, _ = problems.first_update(tx, problems.affine, p.params, jnp.tile(p.inputs, (2, 1)), jnp.tile(p.labels, 2))
    np.testing.assert_allclose(flat(once), flat(twice), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("logits_fn", [qbound.linear_logits, problems.affine])
@pytest.mark.parametrize("solver", SOLVERS)
def test_weights_of_zero_remove_examples_and_whole_ones_repeat_them(solver, logits_fn):
    p = problems.linear(b=4)
    tx = direction(logits_fn, damping=0.01, solver=solver, **TIGHT)
    weights = jnp.array([2.0, 0.0, 1.0, 1.0])
    weighted, _ = problems.first_update(tx, logits_fn, p.params, p.inputs, p.labels, weights)
    chosen = jnp.array([0, 0, 2, 3])
    repeated, _ = problems.first_update(tx, logits_fn, p.params, p.inputs[chosen], p.labels[chosen])
    np.testing.assert_allclose(flat(weighted), flat(repeated), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("known", "solver"), [(True, "woodbury"), (True, "cg"), (False, "dense"), (False, "cg")])
def test_sequences_are_examples_and_padding_has_no_weight(known, solver):
    p = problems.linear(b=12)
    model = qbound.linear_logits if known else (lambda params, x: x @ params["weights"] + params["bias"][None, None, :])
    tx = direction(qbound.linear_logits, damping=0.01, solver=solver, **TIGHT)
    expected, _ = problems.first_update(tx, qbound.linear_logits, p.params, p.inputs, p.labels)
    grads = problems.gradient(problems.affine, p.params, p.inputs, p.labels)
    sequences = jnp.concatenate([p.inputs.reshape(3, 4, 4), jnp.full((3, 2, 4), 1e3)], axis=1)
    lengths = (jnp.arange(6) < 4)[None, :] & jnp.ones((3, 1), bool)
    tx = qbound.scale_by_spfb(model, damping=0.01, solver=solver, **TIGHT)
    update, _ = jax.jit(tx.update)(grads, tx.init(p.params), p.params, inputs=sequences, example_weights=lengths)
    np.testing.assert_allclose(flat(update), flat(expected), rtol=1e-6, atol=1e-8)


def test_labels_are_removed_by_infinite_logits():
    p = problems.linear(b=9)

    def masked(params, x):
        return jnp.where(jnp.arange(3)[None, :] == 2, -jnp.inf, problems.affine(params, x))

    def two_labels(params, x):
        return problems.affine(params, x)[:, :2]

    labels = p.labels % 2
    options = {"damping": 0.01, "solver": "cg", **TIGHT}
    update, _ = problems.first_update(direction(masked, **options), masked, p.params, p.inputs, labels)
    expected, _ = problems.first_update(direction(two_labels, **options), two_labels, p.params, p.inputs, labels)
    np.testing.assert_allclose(flat(update), flat(expected), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("solver", ["dense", "cg"])
@pytest.mark.parametrize("size", [4, 100])
def test_microbatches_change_nothing(size, solver):
    p, params = problems.linear(b=10), problems.network_params()
    weights = jnp.asarray(np.random.default_rng(0).uniform(size=10))
    options = {"damping": 0.05, "solver": solver, **TIGHT}
    whole, in_pieces = (
        problems.first_update(
            direction(problems.network, microbatch_size=s, **options),
            problems.network,
            params,
            p.inputs,
            p.labels,
            weights,
        )
        for s in (None, size)
    )
    np.testing.assert_allclose(flat(in_pieces[0]), flat(whole[0]), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(
        in_pieces[1].spfb_info.spfb_predicted_decrease, whole[1].spfb_info.spfb_predicted_decrease, rtol=1e-8
    )


@pytest.mark.parametrize(("max_steps", "is_dense"), [(1, False), (10_000, True)])
def test_solver_of_microbatches_is_the_cheapest_of_those_they_can_have(max_steps, is_dense):
    p = problems.linear()
    assert (cheapest(12, 3, 15, False, max_steps) == "dense") == is_dense
    tx = qbound.scale_by_spfb(problems.affine, damping=1e-2, microbatch_size=4, max_steps=max_steps)
    _, state = jitted(tx)(p.params, tx.init(p.params), p.params, inputs=p.inputs)
    assert (state.spfb_info.spfb_steps == 0) == is_dense


def test_microbatches_bound_the_memory():
    def deep(params, x):
        for _ in range(8):
            x = jnp.tanh(x @ params)
        return x

    params, x = jax.ShapeDtypeStruct((32, 32), jnp.float32), jax.ShapeDtypeStruct((4096, 32), jnp.float32)

    def memory(size):
        tx = qbound.scale_by_spfb(deep, damping=0.1, solver="cg", microbatch_size=size)
        run = jax.jit(lambda g, p, x: tx.update(g, tx.init(p), p, inputs=x)[0])
        return run.lower(params, params, x).compile().memory_analysis().temp_size_in_bytes

    assert memory(128) < memory(None) / 8


def test_curvature_inputs_take_the_place_of_the_batch():
    p, other = problems.linear(b=5), problems.linear(b=20, seed=3)
    tx = direction(problems.affine, damping=0.01, solver="dense")
    grads = problems.gradient(problems.affine, p.params, p.inputs, p.labels)
    state = tx.init(p.params)
    weights = jnp.arange(20.0)
    ours, _ = jitted(tx)(
        grads, state, p.params, inputs=p.inputs, curvature_inputs=other.inputs, curvature_weights=weights
    )
    theirs, _ = jitted(tx)(grads, state, p.params, inputs=other.inputs, example_weights=weights)
    np.testing.assert_allclose(flat(ours), flat(theirs), rtol=1e-12)


# CG


def test_preconditioner_and_warm_start_reach_the_same_solution_in_fewer_steps():
    p = problems.linear(b=40, scale=np.array([1.0, 10.0, 100.0, 0.1]))
    exact, _ = problems.first_update(
        direction(problems.affine, damping=1e-3, solver="dense"), problems.affine, p.params, p.inputs, p.labels
    )
    scales = jnp.asarray([1.0, 100.0, 1e4, 0.01])[:, None] + 1e-3

    def diagonal(g):
        return {"bias": g["bias"], "weights": g["weights"] / scales}

    plain, helped = (
        problems.first_update(
            direction(problems.affine, damping=1e-3, solver="cg", precondition=f, max_steps=300, tolerance=1e-8),
            problems.affine, p.params, p.inputs, p.labels,
        )
        for f in (None, diagonal)
    )  # fmt: skip
    for update, state in (plain, helped):
        assert state.spfb_info.spfb_converged
        np.testing.assert_allclose(flat(update), flat(exact), rtol=1e-4, atol=1e-6)
    assert helped[1].spfb_info.spfb_steps < plain[1].spfb_info.spfb_steps

    warm = qbound.scale_by_spfb(
        problems.affine, damping=1e-3, solver="cg", warm_start=True, max_steps=300, tolerance=1e-8
    )
    grads = problems.gradient(problems.affine, p.params, p.inputs, p.labels)
    update, state = jitted(warm)(grads, warm.init(p.params), p.params, inputs=p.inputs)
    np.testing.assert_allclose(flat(state.spfb_solution), flat(update), rtol=1e-12)
    again, state = jitted(warm)(grads, state, p.params, inputs=p.inputs)
    assert state.spfb_info.spfb_steps <= 2
    np.testing.assert_allclose(flat(again), flat(exact), rtol=1e-4, atol=1e-6)


def test_limit_of_cg_is_reported():
    p = problems.linear(b=40, scale=np.array([1.0, 10.0, 100.0, 0.1]))
    tx = direction(problems.affine, damping=1e-3, solver="cg", max_steps=2)
    _, state = problems.first_update(tx, problems.affine, p.params, p.inputs, p.labels)
    info = state.spfb_info
    assert info.spfb_steps == 2
    assert info.spfb_residual > 1e-3
    assert not info.spfb_converged
    assert not info.spfb_nonfinite


@pytest.mark.parametrize(
    ("b", "n", "p", "known", "expected"),
    [
        (1, 10, 7850, True, "woodbury"),  # the closed form
        (1000, 2, 28, True, "dense"),  # Adult
        (1000, 2, 28, False, "dense"),
        (1000, 10, 7850, True, "cg"),  # images
        (1000, 10, 7850, False, "cg"),
        (10, 10, 7850, True, "woodbury"),
        (2, 3, 40, False, "woodbury"),
        (1000, 1000, 785_000, True, "cg"),
        (1, 1000, 10**9, False, "cg"),  # a Jacobian too large to hold
    ],
)
def test_cost_model_chooses(b, n, p, known, expected):
    assert cheapest(b, n, p, known, max_steps=10) == expected


@pytest.mark.parametrize("logits_fn", [qbound.linear_logits, problems.affine])
@pytest.mark.parametrize("b", [1, 30])
def test_automatic_solver_gives_the_same_step(b, logits_fn):
    p = problems.linear(b=b)
    automatic, dense = (
        problems.first_update(direction(logits_fn, damping=0.01, solver=s), logits_fn, p.params, p.inputs, p.labels)[0]
        for s in ("auto", "dense")
    )
    np.testing.assert_allclose(flat(automatic), flat(dense), rtol=1e-8, atol=1e-10)


# Safety


def _badly_scaled(seed):
    """Logistic regression with columns of very different size, and batches of it."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(300, 20, 6)) * np.geomspace(0.1, 30, 6)
    labels = rng.integers(4, size=(300, 20))
    return jnp.asarray(x), jnp.asarray(labels)


@functools.partial(jax.jit, static_argnames="bound")
def _second_order_run(x, labels, bound):
    """300 steps of learning rate 1 with the curvature of `bound`; the loss of each batch before its step."""
    model = lambda w, x: x @ w  # noqa: E731

    def step(w, batch):
        x, y = batch
        value, g = jax.value_and_grad(problems.loss, argnums=1)(model, w, x, y)
        g = g + 1e-4 * w
        curvature = mean_curvature(model, w, x, jnp.ones(20), bound=bound)
        return w - curvature.solve_dense(g, 1e-4), value

    return jax.lax.scan(step, jnp.zeros((6, 4)), (x, labels))


@pytest.mark.parametrize("seed", range(3))
def test_bound_is_safe_at_learning_rate_one_where_the_exact_hessian_diverges(seed):
    x, labels = _badly_scaled(seed)
    _, newton = _second_order_run(x, labels, bound=qbound.second_order_expansion)
    assert not np.isfinite(newton).all() or np.max(newton) > 1e4, "the test needs a problem where Newton's step fails"

    tx = qbound.spfb(1.0, qbound.linear_logits, l2=1e-4)
    iterates, state = problems.train(tx, qbound.linear_logits, jnp.zeros((6, 4)), x, labels)
    losses = jax.vmap(lambda w: problems.loss(qbound.linear_logits, w, x.reshape(-1, 6), labels.reshape(-1)))(iterates)
    assert np.isfinite(losses).all()
    assert np.max(losses) < 30
    assert optax.tree.get(state, "spfb_nonfinite_total") == 0

    # The same loop, with the bound in place of the expansion.
    w, _ = _second_order_run(x, labels, bound=functools.partial(qbound.log_partition_bound, order="max_first"))
    np.testing.assert_allclose(w, jax.tree.map(lambda leaf: leaf[-1], iterates), rtol=0.2, atol=0.05)


def test_full_batch_step_decreases_by_at_least_what_it_predicts():
    p = problems.linear(b=50, scale=3.0)
    tx = qbound.spfb(1.0, qbound.linear_logits, l2=1e-2, solver="cg", max_steps=3)
    params, state = p.params, None
    state = tx.init(params)

    def objective(params):
        return problems.loss(qbound.linear_logits, params, p.inputs, p.labels) + 5e-3 * trees.dot(params, params)

    step = jax.jit(lambda g, s, params: tx.update(g, s, params, inputs=p.inputs))
    for _ in range(10):
        before = objective(params)
        grads = problems.gradient(qbound.linear_logits, params, p.inputs, p.labels)
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
        predicted = optax.tree.get(state, "spfb_predicted_decrease")
        assert predicted > 0
        assert before - objective(params) >= predicted * (1 - 1e-9)


def _poisoned(what):
    p = problems.linear(b=5)
    grads = problems.gradient(problems.affine, p.params, p.inputs, p.labels)
    inputs = p.inputs
    if what == "gradient":
        grads["weights"] = grads["weights"].at[0, 0].set(jnp.nan)
    elif what == "infinite gradient":
        grads["bias"] = grads["bias"].at[0].set(jnp.inf)
    elif what == "logits":
        inputs = inputs.at[2, 1].set(jnp.nan)
    elif what == "infinite logits":
        inputs = inputs.at[2, 1].set(jnp.inf)
    return p, grads, inputs


@pytest.mark.parametrize("logits_fn", [qbound.linear_logits, problems.affine])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("what", ["gradient", "infinite gradient", "logits", "infinite logits"])
def test_numbers_that_are_not_finite_give_no_step_and_are_flagged(what, solver, logits_fn):
    p, grads, inputs = _poisoned(what)
    tx = direction(logits_fn, damping=0.01, solver=solver)
    update = jitted(tx)
    updates, state = update(grads, tx.init(p.params), p.params, inputs=inputs)
    np.testing.assert_array_equal(flat(updates), 0 * flat(p.params))
    assert state.spfb_info.spfb_nonfinite
    assert not state.spfb_info.spfb_converged
    assert state.spfb_info.spfb_step_length == 0
    assert state.spfb_info.spfb_predicted_decrease == 0
    # The next update is as if nothing had happened, but for the count.
    good = problems.gradient(problems.affine, p.params, p.inputs, p.labels)
    updates, state = update(good, state, p.params, inputs=p.inputs)
    assert np.abs(flat(updates)).max() > 0
    assert not state.spfb_info.spfb_nonfinite
    assert state.spfb_info.spfb_nonfinite_total == 1


@pytest.mark.parametrize("solver", SOLVERS)
def test_traced_damping_that_is_not_positive_is_flagged(solver):
    p = problems.linear(b=5)

    @jax.jit
    def run(damping):
        tx = qbound.scale_by_spfb(problems.affine, damping=damping, solver=solver)
        return tx.update(p.params, tx.init(p.params), p.params, inputs=p.inputs)

    for damping in (0.0, -1.0, np.nan):
        updates, state = run(damping)
        np.testing.assert_array_equal(flat(updates), 0 * flat(p.params))
        assert state.spfb_info.spfb_nonfinite


def test_negative_part_of_the_damping_is_flagged():
    p = problems.linear(b=5)

    @jax.jit
    def run(l2, damping):
        tx = qbound.spfb(1.0, problems.affine, l2=l2, damping=damping)
        return tx.update(p.params, tx.init(p.params), p.params, inputs=p.inputs)[1]

    for l2, damping, flag in ((0.1, 0.1, False), (0.1, -0.05, True), (-0.05, 0.1, True)):
        assert optax.tree.get(run(l2, damping), "spfb_nonfinite") == flag


@pytest.mark.parametrize(("solver", "scale"), [("dense", 1e15), ("woodbury", 1e-30), ("cg", 1e-30), ("cg", 1e25)])
def test_gradients_of_any_size_are_solved_for(solver, scale):
    p = problems.linear(b=5, dtype=jnp.float32)
    tx = direction(problems.affine, damping=0.1, solver=solver)
    plain, large = (
        jitted(tx)(trees.scale(jnp.float32(c), p.params), tx.init(p.params), p.params, inputs=p.inputs)
        for c in (1, scale)
    )
    assert not large[1].spfb_info.spfb_nonfinite
    np.testing.assert_allclose(flat(large[0]) / np.float32(scale), flat(plain[0]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("weights", [np.zeros(5), np.array([1.0, 1, 1, 1, -1])])
def test_weights_without_a_mean_are_flagged(weights):
    p = problems.linear(b=5)
    tx = direction(problems.affine, damping=0.1)
    updates, state = jitted(tx)(p.params, tx.init(p.params), p.params, inputs=p.inputs, example_weights=weights)
    np.testing.assert_array_equal(flat(updates), 0 * flat(p.params))
    assert state.spfb_info.spfb_nonfinite


def test_gradient_of_zero_is_no_error():
    p = problems.linear(b=5)
    tx = direction(problems.affine, damping=0.1, solver="cg")
    zero = trees.zeros_like(p.params)
    updates, state = jitted(tx)(zero, tx.init(p.params), p.params, inputs=p.inputs)
    np.testing.assert_array_equal(flat(updates), flat(zero))
    assert state.spfb_info.spfb_converged
    assert not state.spfb_info.spfb_nonfinite


# Precision


@pytest.mark.parametrize("solver", SOLVERS)
def test_float32_agrees_with_float64(solver):
    p = problems.linear(b=30)
    small = problems.linear(b=30, dtype=jnp.float32)
    tx = direction(problems.affine, damping=1e-3, solver=solver, max_steps=100, tolerance=1e-6)
    exact, _ = problems.first_update(tx, problems.affine, p.params, p.inputs, p.labels)
    update, state = problems.first_update(tx, problems.affine, small.params, small.inputs, small.labels)
    assert {leaf.dtype for leaf in jax.tree.leaves(update)} == {jnp.dtype(jnp.float32)}
    assert state.spfb_info.spfb_residual.dtype == jnp.float32
    assert state.spfb_info.spfb_residual < 1e-5
    np.testing.assert_allclose(flat(update), flat(exact), rtol=1e-3, atol=1e-4)


def test_bfloat16_parameters_have_a_float32_curvature():
    p = problems.linear(b=30, dtype=jnp.float32)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p.params)
    grads = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) * jnp.bfloat16(0.1), p.params)
    seen = []

    def model(params, x):
        seen.append(params["weights"].dtype)
        return problems.affine(params, x)

    tx = qbound.scale_by_spfb(model, damping=1e-2, solver="cg", max_steps=100, tolerance=1e-5)
    updates, state = jitted(tx)(grads, tx.init(rounded), rounded, inputs=p.inputs)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    assert set(seen) == {jnp.dtype(jnp.float32)}
    # A residual that bfloat16, with its three digits, could not have.
    assert state.spfb_info.spfb_residual < 2e-5
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (grads, rounded))
    expected, _ = jitted(tx)(wide[0], tx.init(wide[1]), wide[1], inputs=p.inputs)
    np.testing.assert_allclose(flat(updates).astype(np.float32), flat(expected), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_structure_of_linear_logits_is_known_whatever_the_dtype(dtype, monkeypatch):
    """It is what the cost model of solvers asks for."""
    known = []

    def asked(b, n, p, kronecker, max_steps):
        known.append(kronecker)
        return cheapest(b, n, p, kronecker, max_steps)

    monkeypatch.setattr(solvers, "cheapest", asked)
    p = problems.linear(b=8, dtype=dtype)
    for model in (qbound.linear_logits, problems.affine):
        tx = qbound.scale_by_spfb(model, damping=1e-2)
        jax.eval_shape(tx.update, p.params, tx.init(p.params), p.params, inputs=p.inputs)
    assert known == [True, False]


def test_bfloat16_inputs_are_widened_with_the_parameters():
    """For functions that do not mix dtypes; integers, such as tokens, stay what they are."""
    p = problems.linear(b=8, dtype=jnp.bfloat16)
    seen = set()

    def model(params, inputs):
        x, places = inputs
        seen.add((x.dtype.name, places.dtype.name))
        return jax.lax.dot(x, params["weights"]) + params["bias"][None, :]

    tx = qbound.scale_by_spfb(model, damping=1e-2, solver="cg", max_steps=50)
    inputs = p.inputs, jnp.arange(8, dtype=jnp.int8)
    updates, state = jitted(tx)(p.params, tx.init(p.params), p.params, inputs=inputs)
    assert seen == {("float32", "int8")}
    assert updates["bias"].dtype == jnp.bfloat16
    assert state.spfb_info.spfb_residual < 1e-3


def test_step_too_large_for_float16_is_flagged():
    params, grads = jnp.zeros(2, jnp.float16), jnp.full(2, 100.0, jnp.float16)
    tx = qbound.scale_by_spfb(lambda theta, f: f @ theta, damping=1e-4)
    updates, state = jitted(tx)(grads, tx.init(params), params, inputs=jnp.zeros((1, 3, 2), jnp.float32))
    np.testing.assert_array_equal(updates, np.zeros(2, np.float16))
    assert state.spfb_info.spfb_nonfinite


# Adaptive damping


def test_adaptive_damping_shrinks_where_the_bound_keeps_its_promise():
    p = problems.linear(b=50)
    tx = qbound.spfb(1.0, qbound.linear_logits, l2=1e-2, adaptive_damping=1.0, solver="dense")
    many = (jnp.broadcast_to(p.inputs, (15, *p.inputs.shape)), jnp.broadcast_to(p.labels, (15, *p.labels.shape)))
    iterates, state = problems.train(tx, qbound.linear_logits, p.params, *many)
    assert optax.tree.get(state, "spfb_adaptive_damping") < 0.02
    assert optax.tree.get(state, "spfb_reduction_ratio") > 0.9
    # Less damping, faster progress.
    fixed = qbound.spfb(1.0, qbound.linear_logits, l2=1e-2, damping=1.0, solver="dense")
    slow, _ = problems.train(fixed, qbound.linear_logits, p.params, *many)
    objective = lambda w: problems.loss(qbound.linear_logits, w, p.inputs, p.labels) + 5e-3 * trees.dot(w, w)  # noqa: E731
    last = lambda tree: jax.tree.map(lambda leaf: leaf[-1], tree)  # noqa: E731
    assert objective(last(iterates)) < objective(last(slow))


def test_adaptive_damping_grows_where_the_loss_rises():
    """A learning rate of 3 overshoots, whatever the bound says: the decrease is less than predicted."""
    p = problems.linear(b=50)
    tx = qbound.spfb(3.0, qbound.linear_logits, l2=1e-2, adaptive_damping=1e-3, solver="dense")
    values = iter([1.0, 2.0, 3.0, np.nan, 4.0])
    state, params = tx.init(p.params), p.params
    dampings = []
    for value in values:
        updates, state = jitted(tx)(p.params, state, params, inputs=p.inputs, value=value)
        params = optax.apply_updates(params, jax.tree.map(lambda u: 0.1 * u, updates))
        dampings.append(float(optax.tree.get(state, "spfb_adaptive_damping")))
    # No judgement at first; then worse each time; and none right after a loss that was not a number.
    np.testing.assert_allclose(dampings, [1e-3, 2e-3, 4e-3, 8e-3, 8e-3])


def test_adaptive_damping_does_not_take_noise_for_a_verdict():
    """Batches whose losses differ by more than a step changes them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 100, 4))
    y = np.argmax(x[..., :3] + 2 * rng.normal(size=(200, 100, 3)), axis=-1)
    tx = qbound.spfb(0.3, qbound.linear_logits, l2=1e-3, adaptive_damping=0.1, solver="dense")
    _, state = problems.train(tx, qbound.linear_logits, jnp.zeros((4, 3)), x, y)
    assert optax.tree.get(state, "spfb_adaptive_damping") < 10


# Bad input


def _call(logits_fn=problems.affine, params="good", grads="good", update=None, damping=0.1, **options):
    """A first update with something wrong in it."""
    p = problems.linear(b=5)
    tx = qbound.scale_by_spfb(logits_fn, damping=damping, **options)
    state = tx.init(p.params)
    params, grads = (p.params if tree == "good" else tree for tree in (params, grads))
    return jax.eval_shape(lambda: tx.update(grads, state, params, **({"inputs": p.inputs} | (update or {}))))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"update": {"inputs": None}}, ValueError, r"inputs: expected the batch .*; got None"),
        ({"params": None}, ValueError, r"params: expected the parameters; got None"),
        ({"params": {"weights": jnp.ones((4, 3), int)}}, TypeError, r"params: expected float arrays; got one of dtype"),
        ({"grads": {"weights": jnp.ones((4, 3))}}, ValueError, r"updates: expected a tree of structure"),
        ({"logits_fn": None}, TypeError, r"logits_fn: expected a function; got None"),
        ({"logits_fn": lambda p, x: x[:, 0]}, ValueError, r"logits_fn: expected .* \(examples, labels\).*\(5,\)"),
        ({"logits_fn": lambda p, x: jnp.ones((5, 3), int)}, ValueError, r"logits_fn: expected .* float logits.*int"),
        ({"logits_fn": lambda p, x: (x, x)}, ValueError, r"logits_fn: expected it to return float logits"),
        ({"damping": -1.0}, ValueError, r"damping: expected a finite number > 0; got -1.0"),
        ({"damping": 0.0}, ValueError, r"damping: expected a finite number > 0; got 0.0"),
        ({"damping": "0.1"}, TypeError, r"damping: expected a number; got '0.1'"),
        ({"damping": np.float32(-1)}, ValueError, r"damping: expected a finite number > 0; got np.float32\(-1.0\)"),
        (
            {"logits_fn": lambda p, x: x[:, :1]},
            ValueError,
            r"logits_fn: expected logits of at least two labels; .*\(5, 1\)",
        ),
        ({"update": {"curvature_weights": jnp.ones(5)}}, ValueError, r"curvature_weights: expected None without"),
        ({"solver": "newton"}, ValueError, r"solver: expected one of 'auto', 'dense', 'woodbury', 'cg'; got 'newton'"),
        ({"order": "ascending"}, ValueError, r"order: expected one of"),
        ({"max_steps": 0}, ValueError, r"max_steps: expected an integer > 0; got 0"),
        ({"max_steps": 2.5}, TypeError, r"max_steps: expected an integer > 0; got 2.5"),
        ({"tolerance": -1e-3}, ValueError, r"tolerance: expected a finite number >= 0; got -0.001"),
        ({"window": 10}, ValueError, r"inputs_like: expected one example's inputs.*; got window=10"),
        ({"inputs_like": jnp.ones(4)}, ValueError, r"inputs_like: expected one example's inputs.*got window=None"),
        ({"window": -1, "inputs_like": jnp.ones(4)}, ValueError, r"window: expected an integer > 0; got -1"),
        ({"window": 8, "inputs_like": jnp.ones(3)}, Exception, r"dot_general|contracting|inputs"),
        ({"precondition": 3}, TypeError, r"precondition: expected a function, or .*; got 3"),
        (
            {"precondition": lambda g: g, "solver": "dense"},
            ValueError,
            r"precondition: expected None with solver='dense'",
        ),
        ({"precondition": lambda g: g["bias"]}, ValueError, r"precondition: expected a tree of structure"),
        ({"microbatch_size": 0}, ValueError, r"microbatch_size: expected an integer > 0; got 0"),
        ({"microbatch_size": 2, "solver": "woodbury"}, ValueError, r"microbatch_size: expected None with solver"),
        ({"adaptive_damping": 0.0}, ValueError, r"adaptive_damping: expected a finite number > 0; got 0.0"),
        ({"adaptive_damping": 1.0}, ValueError, r"value: expected the loss, because of adaptive_damping; got None"),
        ({"update": {"example_weights": jnp.ones(4)}}, ValueError, r"example_weights: expected shape \(5,\).*\(4,\)"),
        (
            {"window": 8, "inputs_like": jnp.ones(4), "update": {"curvature_inputs": jnp.ones((5, 4))}},
            ValueError,
            r"curvature_inputs: expected None with window=",
        ),
    ],
)
@pytest.mark.usefixtures("without_type_checks")
def test_bad_arguments_are_named(changes, error, words):
    with pytest.raises(error, match=words):
        _call(**changes)


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    "integers",
    [
        {"max_steps": np.int64(3), "solver": "cg"},
        {"window": np.int64(8), "inputs_like": jnp.ones(4)},
        {"microbatch_size": np.int64(2), "solver": "cg"},
    ],
)
def test_integers_may_be_those_of_numpy(integers):
    updates, _ = _call(**integers)
    assert jax.tree.structure(updates) == jax.tree.structure(problems.linear(b=5).params)


def test_spfb_needs_l2_or_damping():
    with pytest.raises(ValueError, match=r"damping: expected l2 \+ damping > 0.*; got l2=0 and damping=0"):
        qbound.spfb(1.0, problems.affine)
    with pytest.raises(ValueError, match=r"l2: expected a finite number >= 0; got -0.1"):
        qbound.spfb(1.0, problems.affine, l2=-0.1)
    with pytest.raises(ValueError, match=r"damping: expected a finite number >= 0; got -0.1"):
        qbound.spfb(1.0, problems.affine, l2=1.0, damping=-0.1)
    qbound.spfb(1.0, problems.affine, l2=0.1)
    qbound.spfb(1.0, problems.affine, damping=0.1)
