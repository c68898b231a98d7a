"""The window of recent examples: what is in it, what is made of it, and why it is there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import qbound
from qbound.optimizers.memory import (
    empty_window,
    longest_step,
    no_limit_yet,
    push,
    trust,
    trust_in,
    updated_limit,
    withdraw_unless,
)
from tests.optimizers import problems

SHAPE = jax.ShapeDtypeStruct((4,), jnp.float64)


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0])


@functools.cache
def windowed(window, solver="dense", **options):
    return qbound.scale_by_spfb(
        problems.affine, damping=0.01, solver=solver, window=window, inputs_like=SHAPE, **options
    )


@functools.cache
def jitted(tx):
    return jax.jit(tx.update)


def _grads(p, x, y):
    return problems.gradient(problems.affine, p.params, x, y)


# The buffer


def test_window_holds_the_last_examples_in_a_ring():
    window = empty_window(5, jnp.zeros(2), 0, (), jnp.float64)
    data = np.arange(26.0).reshape(13, 2)
    seen = 0
    for count in (2, 2, 3, 1, 5):
        batch = data[seen : seen + count]
        window = push(window, [jnp.asarray(batch)], jnp.full(count, 1.0))
        seen += count
        recent = data[max(0, seen - 5) : seen]
        assert window.window_filled == len(recent)
        kept = np.asarray(window.window_examples[0])[np.asarray(window.window_weights) > 0]
        np.testing.assert_array_equal(np.sort(kept, axis=0), recent)


def test_batch_larger_than_the_window_leaves_its_last_examples():
    window = empty_window(3, jnp.zeros(()), 0, (), jnp.float64)
    window = push(window, [jnp.arange(7.0)], jnp.ones(7))
    assert window.window_filled == 3
    np.testing.assert_array_equal(np.sort(window.window_examples[0]), [4, 5, 6])


def test_batch_can_be_withdrawn():
    window = push(empty_window(5, jnp.zeros(()), 0, (), jnp.float64), [jnp.arange(4.0)], jnp.ones(4))
    pushed = push(window, [jnp.full(3, jnp.nan)], jnp.ones(3))
    for accepted, expected in ((True, pushed), (False, window)):
        jax.tree.map(np.testing.assert_array_equal, withdraw_unless(jnp.array(accepted), pushed, window, 3), expected)


# The curvature


@pytest.mark.parametrize("solver", ["dense", "woodbury", "cg"])
def test_full_window_gives_the_step_with_its_mean_curvature(solver):
    p = problems.linear(b=24)
    options = {} if solver != "cg" else {"max_steps": 200, "tolerance": 1e-12}
    tx = windowed(10, solver, **options)
    state = tx.init(p.params)
    for start in range(0, 24, 4):
        x, y = p.inputs[start : start + 4], p.labels[start : start + 4]
        grads = _grads(p, x, y)
        updates, state = jitted(tx)(grads, state, p.params, inputs=x)
    assert state.spfb_info.spfb_step_length == 1
    plain = qbound.scale_by_spfb(problems.affine, damping=0.01, solver="dense")
    expected, _ = jitted(plain)(grads, plain.init(p.params), p.params, inputs=x, curvature_inputs=p.inputs[14:])
    np.testing.assert_allclose(flat(updates), flat(expected), rtol=1e-7, atol=1e-9)


def test_weights_stay_with_their_examples():
    p = problems.linear(b=8)
    weights = jnp.asarray([1.0, 0, 2, 1, 0, 1, 3, 1])
    tx = windowed(8)
    state = tx.init(p.params)
    for half in (slice(0, 4), slice(4, 8)):
        grads = _grads(p, p.inputs[half], p.labels[half])
        updates, state = jitted(tx)(grads, state, p.params, inputs=p.inputs[half], example_weights=weights[half])
    plain = qbound.scale_by_spfb(problems.affine, damping=0.01, solver="dense")
    expected, _ = jitted(plain)(
        grads, plain.init(p.params), p.params, curvature_inputs=p.inputs, curvature_weights=weights
    )
    np.testing.assert_allclose(flat(updates), flat(expected), rtol=1e-9)


def test_batch_as_large_as_the_window_is_the_paper():
    p = problems.linear(b=12)
    grads = _grads(p, p.inputs, p.labels)
    tx, plain = windowed(12), qbound.scale_by_spfb(problems.affine, damping=0.01, solver="dense")
    updates, state = jitted(tx)(grads, tx.init(p.params), p.params, inputs=p.inputs)
    expected, _ = jitted(plain)(grads, plain.init(p.params), p.params, inputs=p.inputs)
    np.testing.assert_allclose(flat(updates), flat(expected), rtol=1e-12)
    assert state.spfb_info.spfb_step_length == 1


def test_steps_are_held_back_while_the_window_fills():
    p = problems.linear(b=24)
    tx = windowed(16)
    state = tx.init(p.params)
    lengths = []
    for start in range(0, 24, 4):
        x, y = p.inputs[start : start + 4], p.labels[start : start + 4]
        updates, state = jitted(tx)(_grads(p, x, y), state, p.params, inputs=x)
        lengths.append(float(state.spfb_info.spfb_step_length))
        # The loss of the batch itself does not rise, however little the window knows.
        if lengths[-1] < 1:
            moved = optax.apply_updates(p.params, jax.tree.map(jnp.negative, updates))
            assert problems.loss(problems.affine, moved, x, y) <= problems.loss(problems.affine, p.params, x, y)
    assert all(0 < length <= k / (k + 30) for length, k in zip(lengths[:3], (4, 8, 12), strict=True))
    assert lengths[3:] == [1, 1, 1]


def test_example_that_is_not_finite_does_not_stay():
    p = problems.linear(b=8)
    tx = windowed(6)
    state = tx.init(p.params)
    grads = _grads(p, p.inputs, p.labels)
    _, state = jitted(tx)(grads, state, p.params, inputs=p.inputs[:3])
    before = state.spfb_window
    updates, state = jitted(tx)(grads, state, p.params, inputs=p.inputs[3:6].at[1, 1].set(jnp.nan))
    np.testing.assert_array_equal(flat(updates), 0 * flat(p.params))
    assert state.spfb_info.spfb_nonfinite
    jax.tree.map(np.testing.assert_array_equal, state.spfb_window, before)
    _, state = jitted(tx)(grads, state, p.params, inputs=p.inputs[3:6])
    assert not state.spfb_info.spfb_nonfinite
    assert state.spfb_window.window_filled == 6


def test_window_of_trees_with_shared_arrays():
    """Examples of two arrays, and a frozen part that has no axis of examples and is not stored."""
    p = problems.linear(b=12)

    def model(params, inputs):
        frozen, (a, b) = inputs
        return problems.affine(params, jnp.concatenate([a, b[:, None]], axis=1)) + frozen["bias"][None, :]

    def inputs(rows):
        return {"bias": jnp.arange(3.0)}, (p.inputs[rows, :3], p.inputs[rows, 3])

    like = {"bias": jnp.zeros(3)}, (jax.ShapeDtypeStruct((3,), jnp.float64), jnp.zeros(()))
    options = {"damping": 0.01, "solver": "dense"}
    tx = qbound.scale_by_spfb(model, window=12, inputs_like=like, inputs_axes=(None, 0), **options)
    state = tx.init(p.params)
    for rows in (slice(0, 6), slice(6, 12)):
        updates, state = jitted(tx)(p.params, state, p.params, inputs=inputs(rows))
    assert sorted(leaf.shape for leaf in state.spfb_window.window_examples) == [(12,), (12, 3)]
    plain = qbound.scale_by_spfb(model, **options)
    expected, _ = jitted(plain)(p.params, plain.init(p.params), p.params, inputs=inputs(slice(0, 12)))
    np.testing.assert_allclose(flat(updates), flat(expected), rtol=1e-8)


def test_window_of_sequences_keeps_the_weight_of_every_position():
    p = problems.linear(b=8)
    model = qbound.linear_logits
    sequences = p.inputs.reshape(4, 2, 4)
    mask = jnp.asarray([[1.0, 1], [1, 0], [1, 1], [1, 0]])
    options = {"damping": 0.01, "solver": "dense"}
    tx = qbound.scale_by_spfb(model, window=4, inputs_like=jax.ShapeDtypeStruct((2, 4), jnp.float64), **options)
    state = tx.init(p.params)
    for rows in (slice(0, 2), slice(2, 4)):
        updates, state = jitted(tx)(p.params, state, p.params, inputs=sequences[rows], example_weights=mask[rows])
    assert state.spfb_window.window_weights.shape == (4, 2)
    plain = qbound.scale_by_spfb(model, **options)
    expected, _ = jitted(plain)(p.params, plain.init(p.params), p.params, inputs=sequences, example_weights=mask)
    np.testing.assert_allclose(flat(updates), flat(expected), rtol=1e-8)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            jnp.ones((3, 5)),
            r"inputs: expected examples of shape \(4,\) and dtype float64.*; got float64 of shape \(3, 5\)",
        ),
        (jnp.ones((3, 4), jnp.uint8), r"inputs: expected examples of .* dtype float64, as in inputs_like.*; got uint8"),
        ((jnp.ones((3, 4)), jnp.ones((3, 4))), r"inputs: expected a tree like inputs_like, of structure"),
    ],
)
def test_inputs_unlike_the_window_are_named(inputs, words):
    p = problems.linear(b=5)
    first = lambda params, x: problems.affine(params, jax.tree.leaves(x)[0][:, :4])  # noqa: E731
    tx = qbound.scale_by_spfb(first, damping=0.1, window=6, inputs_like=SHAPE)
    with pytest.raises(ValueError, match=words):
        tx.update(p.params, tx.init(p.params), p.params, inputs=inputs)


def _batches(tx, p, size, params=None, steps=None):
    """Updates at fixed parameters, batch after batch: the states."""
    params = p.params if params is None else params
    state, states = tx.init(params), []
    for start in range(0, len(p.labels), size)[:steps]:
        x, y = p.inputs[start : start + size], p.labels[start : start + size]
        _, state = jitted(tx)(_grads(p, x, y), state, params, inputs=x)
        states.append(state)
    return states


def test_model_need_not_be_finite_at_inputs_of_zero():
    """Places without an example hold copies of a real one: a weight of 0 does not undo a NaN."""
    p = problems.linear(b=12)

    def normalised(params, x):
        return problems.affine(params, x / jnp.linalg.norm(x, axis=1, keepdims=True))

    tx = qbound.scale_by_spfb(normalised, damping=0.01, solver="cg", window=100, inputs_like=SHAPE)
    last = _batches(tx, p, 4)[-1]
    assert last.spfb_info.spfb_nonfinite_total == 0
    assert last.spfb_window.window_filled == 12


def test_window_starts_again_when_the_parameters_have_moved_away_from_an_old_example():
    """The logarithm of a negative number, for an example that was fine when it entered."""
    x = jnp.asarray([[0.1], [5.0], [0.2], [0.3]])

    def model(theta, x):
        h = jnp.log(2 + x * theta[None, :])
        return jnp.concatenate([h, 0 * h], axis=1)

    tx = qbound.scale_by_spfb(model, damping=0.1, solver="cg", window=8, inputs_like=jnp.zeros(1))
    theta = jnp.zeros(1)
    _, state = jitted(tx)(theta + 1, tx.init(theta), theta, inputs=x)
    assert not state.spfb_info.spfb_nonfinite
    moved = theta - 1.0
    good = x[:1]
    updates, state = jitted(tx)(theta + 1, state, moved, inputs=good)
    assert updates == 0
    assert state.spfb_info.spfb_nonfinite
    assert state.spfb_window.window_filled == 1
    updates, state = jitted(tx)(theta + 1, state, moved, inputs=good)
    assert updates != 0
    assert not state.spfb_info.spfb_nonfinite


def test_limit_is_what_earlier_batches_allow():
    """2 E[g's]/E[s'Bs] over the batches before; the current one has no say."""
    p = problems.linear(b=40, d=4, n=3)
    tx = qbound.spfb(1.0, problems.affine, damping=0.01, solver="dense", window=16, inputs_like=SHAPE)
    plain = windowed(16)
    alone = qbound.scale_by_spfb(problems.affine, damping=0.01, solver="dense")
    states, solves = (_batches(t, p, 1, steps=24) for t in (tx, plain))
    slopes, curved, lengths = [], [], []
    for k, (state, solve) in enumerate(zip(states, solves, strict=True)):
        x, y = p.inputs[k : k + 1], p.labels[k : k + 1]
        g = flat(_grads(p, x, y))
        # Places without an example have weight 0, as in the window.
        weights = (np.arange(16) < k + 1).astype(float)
        recent = p.inputs[np.arange(16) + max(0, k - 15)]
        s, _ = jitted(alone)(
            _grads(p, x, y), alone.init(p.params), p.params, curvature_inputs=recent, curvature_weights=weights
        )
        own, _ = problems.affine_curvature(p.params, x)
        s = flat(s)
        if k > 15:
            expected = min(1.0, 2 * np.dot(*_averaged(slopes, 1 / 16)) / np.dot(*_averaged(curved, 1 / 16)))
            lengths.append(float(optax.tree.get(state, "spfb_step_length")))
            np.testing.assert_allclose(lengths[-1], expected, rtol=1e-6)
            assert solve.spfb_info.spfb_step_length == 1
        slopes.append(g @ s)
        curved.append(s @ own @ s + 0.01 * s @ s)
    assert min(lengths) < 1


def _averaged(values, weight):
    """The values with their weights in a running average that starts as a plain mean."""
    weights = []
    for t in range(len(values)):
        new = max(1 / (t + 1), weight)
        weights = [w * (1 - new) for w in weights] + [new]
    return np.array(values), np.array(weights)


def test_limit_follows_the_learning_rate():
    """What is limited is the learning rate times the step: with a small rate there is nothing to limit."""
    p = problems.linear(b=40)
    options = {"damping": 0.01, "solver": "dense", "window": 16, "inputs_like": SHAPE}
    whole, small, scheduled, free = (
        _batches(qbound.spfb(rate, problems.affine, **options, limit_steps=limited), p, 1, steps=20)[-1]
        for rate, limited in ((1.0, True), (0.01, True), (lambda t: jnp.where(t < 19, 1.0, 0.5), True), (1.0, False))
    )
    length = lambda state: float(optax.tree.get(state, "spfb_step_length"))  # noqa: E731
    assert length(whole) < 0.5
    assert length(small) == length(free) == 1
    np.testing.assert_allclose(length(scheduled), 2 * length(whole))


def test_batch_that_is_not_finite_leaves_the_limit_as_it_was():
    limit = updated_limit(no_limit_yet(jnp.float64), jnp.asarray(1.0), jnp.asarray(4.0), 0.1)
    assert longest_step(no_limit_yet(jnp.float64)) == jnp.inf
    assert longest_step(limit) == 0.5
    # The first of them count alike.
    second = updated_limit(limit, jnp.asarray(3.0), jnp.asarray(8.0), 0.1)
    np.testing.assert_allclose([second.limit_slope, second.limit_curvature], [2.0, 6.0])
    for slope, curvature in ((jnp.nan, 1.0), (1.0, jnp.inf), (jnp.inf, jnp.nan)):
        after = updated_limit(limit, jnp.asarray(slope), jnp.asarray(curvature), 0.1)
        assert longest_step(after) == 0.5
        assert after.limit_updates == limit.limit_updates + 1  # a schedule goes on all the same


def test_places_without_an_example_hold_copies_of_the_first():
    window = push(empty_window(5, jnp.zeros(2), 0, (), jnp.float64), [jnp.asarray([[1.0, 2], [3, 4]])], jnp.ones(2))
    np.testing.assert_array_equal(window.window_examples[0], [[1, 2], [3, 4], [1, 2], [1, 2], [1, 2]])
    np.testing.assert_array_equal(window.window_weights, [1, 1, 0, 0, 0])


@pytest.mark.parametrize("bad", ["gradient", "inputs"])
def test_batch_that_is_to_blame_leaves_the_window_as_it_was(bad):
    """Either the gradient, of a parameter that no logit depends on, or the inputs alone are not finite."""
    p = problems.linear()
    params = p.params | {"unused": jnp.zeros(1)}
    tx = windowed(8, "cg")
    grads = _grads(p, p.inputs[:4], p.labels[:4]) | {"unused": jnp.zeros(1)}
    _, before = jitted(tx)(grads, tx.init(params), params, inputs=p.inputs[:4])
    inputs = p.inputs[4:6]
    if bad == "gradient":
        grads = grads | {"unused": jnp.full(1, jnp.nan)}
    else:
        inputs = inputs.at[0, 0].set(jnp.nan)
    updates, after = jitted(tx)(grads, before, params, inputs=inputs)
    assert after.spfb_info.spfb_nonfinite and not np.any(flat(updates))
    jax.tree.map(np.testing.assert_array_equal, after.spfb_window, before.spfb_window)


def test_examples_of_which_some_position_counts_are_trusted():
    window = push(
        empty_window(4, jnp.zeros(2), 0, (2,), jnp.float64), [jnp.ones((3, 2))], jnp.array([[1.0, 0], [0, 0], [1, 1]])
    )
    assert trust(window) == trust_in(jnp.asarray(2.0)) == 2 / 32
