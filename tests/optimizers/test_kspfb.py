"""KSPFB: the Kronecker solve, its running averages, and what is and is not a bound."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qbound
from qbound.curvature.kronecker import BohningLabels
from tests import reference
from tests.optimizers import problems
from tests.optimizers.problems import flat


def label_curvature(logits):
    return np.mean([reference.logit_bound(h, reference.max_first(h))[2] for h in np.asarray(logits)], axis=0)


def moments(x, bias=True):
    x = np.asarray(x)
    x = np.c_[x, np.ones(len(x))] if bias else x
    return x.T @ x / len(x)


def dense_solve(a, b, g, damping):
    """For a gradient (e, n), inputs by labels."""
    system = np.kron(b, a) + damping * np.eye(g.size)
    return np.linalg.solve(system, g.ravel()).reshape(g.shape)


def as_matrix(tree):
    return np.concatenate([tree["weights"], tree["bias"][None, :]])


def one_update(tx, params, inputs, grads=None, **extra):
    return jax.jit(tx.update)(params if grads is None else grads, tx.init(params), params, inputs=inputs, **extra)


@pytest.mark.parametrize("label_curvature_name", ["bound", "bohning"])
def test_update_equals_the_dense_kronecker_solve(label_curvature_name):
    p = problems.linear(b=9)
    a = label_curvature(problems.affine(p.params, p.inputs))
    a = reference.bohning(3) if label_curvature_name == "bohning" else a
    for model in (qbound.linear_logits, problems.affine):
        tx = qbound.scale_by_kspfb(model, damping=0.03, label_curvature=label_curvature_name)
        updates, state = one_update(tx, p.params, p.inputs)
        expected = dense_solve(a, moments(p.inputs), as_matrix(p.params), 0.03)
        np.testing.assert_allclose(as_matrix(updates), expected, rtol=1e-9)
        np.testing.assert_allclose(
            state.kspfb_info.kspfb_predicted_decrease, np.sum(as_matrix(p.params) * expected) / 2, rtol=1e-9
        )


@pytest.mark.parametrize("output_axis", [0, 1])
def test_weights_either_way_round_and_without_a_bias(output_axis):
    p = problems.linear(b=9)
    weights = p.params["weights"] if output_axis == 1 else p.params["weights"].T

    def model(w, x):
        return x @ (w if output_axis == 1 else w.T)

    updates, _ = one_update(qbound.scale_by_kspfb(model, damping=0.1), weights, p.inputs)
    a = label_curvature(p.inputs @ p.params["weights"])
    expected = dense_solve(a, moments(p.inputs, bias=False), np.asarray(p.params["weights"]), 0.1)
    np.testing.assert_allclose(updates if output_axis == 1 else updates.T, expected, rtol=1e-9)


def test_square_weights_need_the_axis_of_labels():
    p = problems.linear(b=9, d=3)
    weights = p.params["weights"]
    with pytest.raises(ValueError, match=r"output_axis: expected 0 or 1, the axis of labels .*\(3, 3\)"):
        qbound.scale_by_kspfb(lambda w, x: x @ w.T, damping=0.1).init(weights)
    with pytest.raises(ValueError, match=r"output_axis: expected 0 or 1, .*without features_fn"):
        qbound.scale_by_kspfb(lambda w, x: x @ w, damping=0.1, features_fn=lambda w, x: x).init(weights[:2])
    tx = qbound.scale_by_kspfb(lambda w, x: x @ w.T, damping=0.1, output_axis=0)
    updates, _ = one_update(tx, weights, p.inputs)
    a = label_curvature(p.inputs @ weights.T)
    expected = dense_solve(a, moments(p.inputs, bias=False), np.asarray(weights).T, 0.1).T
    np.testing.assert_allclose(updates, expected, rtol=1e-9)


def test_last_layer_of_a_network():
    """Its features come from features_fn, with the rest of the network inside the inputs."""
    p, params = problems.linear(b=9), problems.network_params()
    head = {name: params[name] for name in ("weights", "bias")}

    def features(head, inputs):
        first, x = inputs
        return jnp.tanh(x @ first)

    def logits(head, inputs):
        return problems.affine(head, features(head, inputs))

    tx = qbound.scale_by_kspfb(logits, damping=0.1, features_fn=features)
    updates, _ = one_update(tx, head, (params["first"], p.inputs))
    hidden = np.tanh(np.asarray(p.inputs @ params["first"]))
    expected = dense_solve(label_curvature(problems.affine(head, hidden)), moments(hidden), as_matrix(head), 0.1)
    np.testing.assert_allclose(as_matrix(updates), expected, rtol=1e-9)


def test_last_layer_of_a_network_under_partition():
    """The rest of the network is trained by Adam, and the features are handed over as inputs."""
    p = problems.linear(b=60, dtype=jnp.float32)
    model = nn.Dense(5)
    body = model.init(jax.random.key(0), p.inputs)
    params = {"body": body, "head": {"weights": jnp.zeros((5, 3), jnp.float32), "bias": jnp.zeros(3, jnp.float32)}}

    def hidden(params, x):
        return jnp.tanh(model.apply(params["body"], x))

    def loss(params):
        logits = problems.affine(params["head"], hidden(params, p.inputs))
        return optax.softmax_cross_entropy_with_integer_labels(logits, p.labels).mean()

    tx = optax.partition(
        {
            "head": qbound.kspfb(1.0, lambda params, h: problems.affine(params["head"], h), l2=1e-3),
            "body": optax.adam(1e-2),
        },
        {"body": "body", "head": "head"},
    )

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params, inputs=hidden(params, p.inputs))
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state, before = tx.init(params), loss(params)
        for _ in range(20):
            params, state = step(params, state)
        assert loss(params) < 0.97 * before


def test_sequences_and_weights_of_examples():
    p = problems.linear(b=6)
    tx = qbound.scale_by_kspfb(qbound.linear_logits, damping=0.1)
    weights = np.array([1.0, 2, 0, 1, 0, 1])
    rows = np.repeat(np.arange(6), weights.astype(int))
    expected, _ = one_update(tx, p.params, p.inputs[rows])
    weighted, _ = one_update(tx, p.params, p.inputs, example_weights=jnp.asarray(weights))
    np.testing.assert_allclose(flat(weighted), flat(expected), rtol=1e-9)
    sequences, _ = one_update(
        tx, p.params, p.inputs.reshape(2, 3, 4), example_weights=jnp.asarray(weights).reshape(2, 3)
    )
    np.testing.assert_allclose(flat(sequences), flat(expected), rtol=1e-9)


def test_averages_forget_and_factors_are_updated_every_few_steps():
    batches = [problems.linear(b=8, seed=seed) for seed in range(5)]
    params, decay = batches[0].params, 0.6
    tx = qbound.scale_by_kspfb(problems.affine, damping=0.1, decay=decay, update_every=2, label_every=3)
    state, update = tx.init(params), jax.jit(tx.update)
    a = b = count_a = count_b = 0
    for step, p in enumerate(batches):
        updates, state = update(params, state, params, inputs=p.inputs)
        if step % 3 == 0:
            a, count_a = decay * a + label_curvature(problems.affine(params, p.inputs)), decay * count_a + 1
        if step % 2 == 0:
            b, count_b = decay * b + moments(p.inputs), decay * count_b + 1
        expected = dense_solve(a / count_a, b / count_b, as_matrix(params), 0.1)
        np.testing.assert_allclose(as_matrix(updates), expected, rtol=1e-8)


def test_labels_come_from_some_examples():
    p = problems.linear(b=10)
    tx = qbound.scale_by_kspfb(problems.affine, damping=0.1, label_examples=4)
    updates, _ = one_update(tx, p.params, p.inputs)
    some = p.inputs[np.random.default_rng(0).permutation(10)[:4]]
    expected = dense_solve(
        label_curvature(problems.affine(p.params, some)), moments(p.inputs), as_matrix(p.params), 0.1
    )
    np.testing.assert_allclose(as_matrix(updates), expected, rtol=1e-9)


def test_relative_damping_does_not_depend_on_the_units_of_the_loss_or_of_large_columns():
    p = problems.linear(b=10)
    inputs = p.inputs * jnp.asarray([1e4, 1.0, 1.0, 1.0])[None, :]
    tx = qbound.scale_by_kspfb(problems.affine, damping=1e-12, relative_damping=0.5)
    updates, state = one_update(tx, p.params, inputs)
    b = moments(inputs)
    scales = 1 / np.sqrt(np.diag(b) + np.median(np.diag(b)))
    a, scaled = label_curvature(problems.affine(p.params, inputs)), b * np.outer(scales, scales)
    damping = 1e-12 + 0.5 * (1000 / 10) * np.mean(np.linalg.eigvalsh(a)) * np.mean(np.linalg.eigvalsh(scaled))
    np.testing.assert_allclose(state.kspfb_info.kspfb_damping, damping, rtol=1e-9)
    expected = scales[:, None] * dense_solve(a, scaled, scales[:, None] * as_matrix(p.params), damping)
    np.testing.assert_allclose(as_matrix(updates), expected, rtol=1e-8)


def decaying_inputs(b, d):
    """With a few large directions, as images have."""
    rng = np.random.default_rng(5)
    return jnp.asarray(rng.normal(size=(b, d)) * np.exp(-np.arange(d) / 3) @ np.linalg.qr(rng.normal(size=(d, d)))[0])


def test_few_eigenvectors_of_inputs_give_the_mean_of_the_others_to_all_other_directions():
    x = decaying_inputs(50, 30)
    params, grads = jnp.zeros((30, 4)), jnp.asarray(np.random.default_rng(6).normal(size=(30, 4)))
    tx = qbound.scale_by_kspfb(qbound.linear_logits, damping=0.05, input_rank=10)
    updates, state = one_update(tx, params, x, grads)
    inputs = state.kspfb_factors.kspfb_inputs.factor_of_inputs
    assert inputs.vectors.shape == (30, 10)
    values, vectors = np.linalg.eigh(moments(x, bias=False))
    rest = values[:20].mean()
    b = (vectors[:, 20:] * values[20:]) @ vectors[:, 20:].T + rest * vectors[:, :20] @ vectors[:, :20].T
    np.testing.assert_allclose(inputs.tail_eigenvalue, rest, rtol=0.1)
    expected = dense_solve(label_curvature(x @ params), b, np.asarray(grads), 0.05)
    # The leading eigenvectors are found about, the smallest of them worst.
    np.testing.assert_allclose(updates, expected, rtol=0, atol=1e-2 * np.abs(expected).max())


def test_updates_can_be_differentiated():
    """By what the gradient depends on; the factor of inputs is the same for all of it."""
    x, y = decaying_inputs(50, 30), jnp.asarray(np.arange(50) % 4)
    tx = qbound.kspfb(1.0, qbound.linear_logits, l2=1e-3, input_rank=10)

    @jax.jit
    def after_two_steps(params):
        state = tx.init(params)
        for _ in range(2):
            grads = jax.grad(lambda p: optax.softmax_cross_entropy_with_integer_labels(x @ p, y).mean())(params)
            updates, state = tx.update(grads, state, params, inputs=x)
            params = optax.apply_updates(params, updates)
        return jnp.sum(params**2)

    params = 0.1 * jnp.asarray(np.random.default_rng(8).normal(size=(30, 4)))
    direction = jnp.asarray(np.random.default_rng(9).normal(size=(30, 4)))
    slope = jnp.sum(jax.jit(jax.grad(after_two_steps))(params) * direction)
    difference = (after_two_steps(params + 1e-5 * direction) - after_two_steps(params - 1e-5 * direction)) / 2e-5
    np.testing.assert_allclose(slope, difference, rtol=1e-4)


def test_few_inputs_have_all_their_eigenvectors_whatever_the_rank():
    p = problems.linear(b=9)
    for rank in (None, 2, 128):
        tx = qbound.scale_by_kspfb(qbound.linear_logits, damping=0.03, input_rank=rank)
        inputs = tx.init(p.params).kspfb_factors.kspfb_inputs.factor_of_inputs
        assert (inputs.tail_eigenvalue is None) == (rank != 2), rank
    few, all_of_them = (
        one_update(qbound.kspfb(1.0, qbound.linear_logits, l2=1e-3, input_rank=rank), p.params, p.inputs)[0]
        for rank in (128, None)
    )
    np.testing.assert_array_equal(flat(few), flat(all_of_them))


def test_with_the_damping_of_kspfb_few_eigenvectors_are_as_good_as_all():
    x = decaying_inputs(400, 60)
    params = jnp.asarray(np.random.default_rng(7).normal(size=(60, 4)))
    few, all_of_them = (
        flat(one_update(qbound.kspfb(1.0, qbound.linear_logits, l2=1e-4, input_rank=rank), params, x)[0])
        for rank in (20, None)
    )
    assert 0 < np.linalg.norm(few - all_of_them) < 0.02 * np.linalg.norm(all_of_them)


def test_input_rank_must_be_a_whole_number_above_zero():
    with pytest.raises(ValueError, match="input_rank: expected .*; got 0"):
        qbound.kspfb(1.0, qbound.linear_logits, l2=1e-3, input_rank=0)


def kronecker_of(state, labels):
    inputs = state.kspfb_factors.kspfb_inputs.factor_of_inputs
    u, values = np.asarray(inputs.vectors), np.asarray(inputs.values)
    return np.kron(u @ np.diag(values) @ u.T, labels)


def test_it_is_no_bound_but_with_bohnings_labels_it_is_one():
    """Against the curvature of the bound, and against the Hessian of the loss that Böhning's stands above."""
    rng = np.random.default_rng(0)
    # Two kinds of examples: large inputs with balanced logits, small ones with a label that is certain.
    x = np.concatenate([3 * rng.normal(size=(5, 2)), 0.1 * rng.normal(size=(40, 2)) + [[0, 1.0]]])
    weights = np.array([[0.0, 0, 0], [8.0, 0, -8]])
    p = jnp.asarray(weights), jnp.asarray(x)
    logits = x @ weights
    full = np.mean([np.kron(np.outer(xj, xj), label_curvature(h[None])) for xj, h in zip(x, logits, strict=True)], 0)
    _, state = one_update(qbound.scale_by_kspfb(qbound.linear_logits, damping=1e-3), *p)
    product = kronecker_of(state, label_curvature(logits))
    assert np.linalg.eigvalsh(product - full)[0] < -1e-3
    bohning = qbound.scale_by_kspfb(
        qbound.linear_logits, damping=1e-3, label_curvature="bohning", decay=0.0, update_every=1
    )
    _, state = one_update(bohning, *p)
    above = kronecker_of(state, reference.bohning(3))
    for scale in (0, 0.1, 1, 3):  # the Hessian wherever the weights are, so that the quadratic is a global bound
        h = x @ (scale * rng.normal(size=(2, 3)))
        hessian = np.mean([np.kron(np.outer(xj, xj), reference.hessian(hj)) for xj, hj in zip(x, h, strict=True)], 0)
        assert np.linalg.eigvalsh(above - hessian)[0] > -1e-12


def test_above_a_thousand_labels_the_factor_is_bohnings():
    n = 1001
    weights = jnp.zeros((2, n))
    tx = qbound.scale_by_kspfb(qbound.linear_logits, damping=0.5)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2)))
    g = jnp.asarray(np.random.default_rng(1).normal(size=(2, n)))
    updates, state = one_update(tx, weights, x, grads=g)
    assert state.kspfb_factors.kspfb_labels is None
    b, mean = moments(x, bias=False), np.mean(g, axis=1, keepdims=True)
    expected = np.linalg.solve(b / 2 + 0.5 * np.eye(2), g - mean) + mean / 0.5
    np.testing.assert_allclose(updates, expected, rtol=1e-9)


def test_bohnings_labels_in_closed_form():
    labels = BohningLabels(5, jnp.float64)
    g = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))
    np.testing.assert_allclose(labels.apply(g, lambda a: a), reference.bohning(5) @ g, atol=1e-15)
    np.testing.assert_allclose(labels.mean_value(), np.trace(reference.bohning(5)) / 5)


def test_numbers_that_are_not_finite_are_skipped_and_reported():
    p = problems.linear(b=9)
    tx = qbound.scale_by_kspfb(problems.affine, damping=0.1, update_every=2)
    update = jax.jit(tx.update)
    bad = p.inputs.at[0, 0].set(jnp.inf)
    # From the first step on: nothing is known yet.
    updates, state = update(p.params, tx.init(p.params), p.params, inputs=bad)
    np.testing.assert_array_equal(flat(updates), 0)
    assert state.kspfb_info.kspfb_nonfinite and state.kspfb_info.kspfb_nonfinite_total == 1
    # The next batch is then factorised, though it is not its turn.
    updates, state = update(p.params, state, p.params, inputs=p.inputs)
    expected, _ = one_update(tx, p.params, p.inputs)
    np.testing.assert_allclose(flat(updates), flat(expected))
    assert not state.kspfb_info.kspfb_nonfinite
    # A bad batch leaves the factors as they were; a bad gradient is skipped.
    updates, after = update(p.params, state, p.params, inputs=bad)
    np.testing.assert_allclose(flat(updates), flat(expected))
    jax.tree.map(np.testing.assert_array_equal, after.kspfb_factors, state.kspfb_factors)
    nan = jax.tree.map(lambda leaf: leaf * jnp.nan, p.params)
    updates, after = update(nan, after, p.params, inputs=p.inputs)
    np.testing.assert_array_equal(flat(updates), 0)
    assert after.kspfb_info.kspfb_nonfinite_total == 2


def test_labels_come_from_examples_that_have_a_weight():
    """One position of each sequence counts, as when only the last token has a label."""
    p = problems.linear(b=60)
    inputs, weights = p.inputs.reshape(3, 20, 4), jnp.zeros((3, 20)).at[:, -1].set(1.0)
    tx = qbound.scale_by_kspfb(qbound.linear_logits, damping=0.1, label_examples=4)
    updates, _ = one_update(tx, p.params, inputs, example_weights=weights)
    expected, _ = one_update(tx, p.params, inputs[:, -1])
    np.testing.assert_allclose(flat(updates), flat(expected), rtol=1e-9)


def test_inputs_that_are_all_zero_are_not_taken_for_known():
    p = problems.linear(b=9)
    weights = p.params["weights"]
    tx = qbound.scale_by_kspfb(qbound.linear_logits, damping=1e-4)
    update = jax.jit(tx.update)
    updates, state = update(weights, tx.init(weights), weights, inputs=0 * p.inputs)
    np.testing.assert_array_equal(updates, 0)
    _, state = update(weights, state, weights, inputs=p.inputs)
    assert not state.kspfb_info.kspfb_nonfinite
    np.testing.assert_allclose(state.kspfb_factors.kspfb_inputs.factor_inputs, moments(p.inputs, bias=False))
    assert state.kspfb_factors.kspfb_inputs.factor_input_batches == 1


@pytest.mark.parametrize("limited", [True, False])
def test_nothing_is_done_before_both_factors_are_known(limited):
    """Inputs that are finite, and logits that are not."""
    p = problems.linear(b=9)

    def model(params, x):
        return problems.affine(params, x) * jnp.inf

    tx = qbound.kspfb(1.0, model, l2=1e-6) if limited else qbound.scale_by_kspfb(model, damping=1e-6)
    updates, state = one_update(tx, p.params, p.inputs)
    np.testing.assert_array_equal(flat(updates), 0)
    assert optax.tree.get(state, "kspfb_nonfinite")


def test_low_precision_parameters_have_factors_in_float32():
    p = problems.linear(b=9, dtype=jnp.float32)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p.params)
    tx = qbound.scale_by_kspfb(qbound.linear_logits, damping=0.1)
    updates, state = one_update(tx, params, p.inputs)
    assert updates["weights"].dtype == jnp.bfloat16
    assert state.kspfb_factors.kspfb_inputs.factor_inputs.dtype == jnp.float32
    exact, _ = one_update(tx, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), p.inputs)
    np.testing.assert_allclose(flat(updates).astype(np.float32), flat(exact), rtol=2e-2, atol=1e-2)


def test_preconditions_spfb():
    """Columns of sizes 1e-2 to 1e2, where CG alone needs many steps."""
    p = problems.linear(b=90, d=20)
    inputs = p.inputs * jnp.logspace(-2, 2, 20)[None, :]
    kronecker = qbound.scale_by_kspfb(problems.affine, damping=1e-6, update_every=1)
    steps = {}
    for name, precondition in {"alone": None, "kronecker": kronecker}.items():
        tx = qbound.spfb(
            1.0, problems.affine, l2=1e-4, solver="cg", max_steps=300, tolerance=1e-9, precondition=precondition
        )
        _, state = problems.first_update(tx, problems.affine, p.params, inputs, p.labels)
        steps[name] = int(optax.tree.get(state, "spfb_steps"))
    assert optax.tree.get(state, "spfb_converged")
    assert 4 * steps["kronecker"] < steps["alone"], steps
    # Its state is kept: the second update has factors of two batches.
    batches = jnp.stack([inputs] * 2), jnp.stack([p.labels] * 2)
    tx = qbound.spfb(1.0, problems.affine, l2=1e-4, precondition=kronecker)
    _, state = problems.train(tx, problems.affine, p.params, *batches)
    np.testing.assert_allclose(optax.tree.get(state, "factor_input_batches"), 1.9)


def test_first_step_is_the_dense_solve_of_the_regularised_gradient():
    """Whatever the momentum: of one direction the mean is that direction."""
    p = problems.linear(b=9)
    grads = problems.gradient(problems.affine, *p)
    g = as_matrix(grads) + 1e-2 * as_matrix(p.params)
    s = dense_solve(label_curvature(problems.affine(p.params, p.inputs)), moments(p.inputs), g, 1e-2)
    for momentum in (0.0, 0.9):
        tx = qbound.kspfb(0.5, problems.affine, momentum=momentum, l2=1e-2, relative_damping=0.0)
        updates, _ = problems.first_update(tx, problems.affine, *p)
        np.testing.assert_allclose(as_matrix(updates), -0.5 * s, rtol=1e-9)


def test_momentum_is_a_debiased_mean_of_directions():
    """-rate times sum_i m^i s_{t-i} / sum_i m^i, over several updates; m is 0.8 by default."""
    p, options = problems.linear(b=9), {"l2": 1e-2, "update_every": 1, "label_every": 1}
    transforms = {m: qbound.kspfb(0.01, problems.affine, momentum=m, **options) for m in (0.0, 0.3)}
    transforms[0.8] = qbound.kspfb(0.01, problems.affine, **options)
    states = {m: tx.init(p.params) for m, tx in transforms.items()}

    @jax.jit
    def update(states, x, y):
        grads = problems.gradient(problems.affine, p.params, x, y)
        both = {m: tx.update(grads, states[m], p.params, inputs=x) for m, tx in transforms.items()}
        return {m: pair[0] for m, pair in both.items()}, {m: pair[1] for m, pair in both.items()}

    directions = []
    for seed in range(4):
        batch = problems.linear(b=9, seed=seed)
        updates, states = update(states, batch.inputs, batch.labels)
        directions.append(flat(updates[0.0]))
        for m in (0.3, 0.8):
            weights = m ** np.arange(len(directions))[::-1]
            np.testing.assert_allclose(flat(updates[m]), weights @ directions / weights.sum(), rtol=1e-9)
    assert np.linalg.norm(directions[0] - directions[1]) > 0.1 * np.linalg.norm(directions[0])


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"damping": 0.0}, ValueError, r"damping: expected a finite number > 0; got 0.0"),
        ({"relative_damping": -1.0}, ValueError, r"relative_damping: expected a finite number >= 0; got -1.0"),
        ({"decay": 1.0}, ValueError, r"decay: expected a number in \[0, 1\); got 1.0"),
        ({"update_every": 0}, ValueError, r"update_every: expected an integer > 0; got 0"),
        ({"label_every": 0}, ValueError, r"label_every: expected an integer > 0; got 0"),
        ({"label_examples": 1.5}, TypeError, r"label_examples: expected an integer > 0; got 1.5"),
        ({"label_curvature": "hessian"}, ValueError, r"label_curvature: expected one of 'bound', 'bohning'; got"),
        ({"output_axis": 2}, ValueError, r"output_axis: expected 0, 1 or None; got 2"),
        ({"features_fn": 3}, TypeError, r"features_fn: expected a function; got 3"),
        ({"logits_fn": "linear"}, TypeError, r"logits_fn: expected a function; got 'linear'"),
    ],
)
def test_errors_when_built(options, error, words):
    with pytest.raises(error, match=words):
        qbound.scale_by_kspfb(**{"logits_fn": problems.affine, "damping": 0.1, **options})


def test_errors_of_kspfb_when_built():
    with pytest.raises(ValueError, match=r"damping: expected l2 \+ damping \+ relative_damping > 0"):
        qbound.kspfb(1.0, problems.affine, relative_damping=0.0)
    with pytest.raises(ValueError, match=r"momentum: expected a number in \[0, 1\); got 1.0"):
        qbound.kspfb(1.0, problems.affine, momentum=1.0)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (problems.network_params(), r"params: expected one array of weights.*got leaves of shapes \[\(3,\), \(4, 5\)"),
        ({"kernel": jnp.zeros((2, 3, 4))}, r"params: expected one array of weights"),
        (
            {"weights": jnp.zeros((4, 3)), "bias": jnp.zeros(5)},
            r"params: expected a bias as long as an axis .*\(4, 3\)",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_named_at_init(params, words):
    with pytest.raises(ValueError, match=words):
        qbound.scale_by_kspfb(problems.affine, damping=0.1).init(params)


def test_inputs_that_do_not_fit_are_named_when_traced():
    p = problems.linear(b=9)
    tx = qbound.scale_by_kspfb(lambda params, x: x["a"] @ params["weights"] + params["bias"][None, :], damping=0.1)
    state = tx.init(p.params)
    with pytest.raises(ValueError, match=r"inputs: expected features of shape \(9, 4\); got dict \(features_fn says"):
        jax.eval_shape(functools.partial(tx.update, inputs={"a": p.inputs}), p.params, state, p.params)
    wrong = qbound.scale_by_kspfb(problems.affine, damping=0.1, features_fn=lambda params, x: x[:, :2])
    with pytest.raises(ValueError, match=r"features_fn: expected features of shape \(9, 4\); got \(9, 2\)"):
        wrong.update(p.params, wrong.init(p.params), p.params, inputs=p.inputs)
    labels = qbound.scale_by_kspfb(lambda w, x: x @ w @ jnp.ones((3, 2)), damping=0.1, output_axis=1)
    with pytest.raises(ValueError, match=r"params: expected weights with an axis of 2 labels.*got 3 along axis 1"):
        labels.update(p.inputs[:4, :3], labels.init(p.inputs[:4, :3]), p.inputs[:4, :3], inputs=p.inputs)
    with pytest.raises(ValueError, match=r"inputs: expected the batch that the gradient is of.*got None"):
        tx.update(p.params, state, p.params)
    with pytest.raises(ValueError, match=r"params: expected the parameters; got None"):
        tx.update(p.params, state, inputs=p.inputs)
