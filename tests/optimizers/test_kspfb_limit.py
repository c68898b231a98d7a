"""KSPFB on batches that are not like the first: how long a step may be, and when factors are made anew."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qbound
from qbound.families.softmax import Softmax
from qbound.optimizers import kronecker_factors, kspfb
from qbound.optimizers.directions import mean_direction, no_directions_yet, share_of_next
from tests import reference
from tests.optimizers import problems

ZERO = np.log(5)


def stream(kind, seed=0, rows=4000, inputs=20):
    """Five labels, and inputs in an order or of a size that no single batch shows."""
    x = jax.random.normal(jax.random.key(seed), (rows, inputs), jnp.float32)
    y = jnp.argmax(x[:, :5] + jax.random.gumbel(jax.random.key(seed + 100), (rows, 5), jnp.float32), axis=1)
    sizes = np.random.default_rng(seed)
    if kind == "first batch is small":
        x = x.at[:100].multiply(0.02)
    if kind == "sorted by size":
        x = x * jnp.asarray(np.exp(1.5 * sizes.normal(size=(rows, 1))), x.dtype)
        by_size = jnp.argsort(jnp.sum(x**2, axis=1))
        x, y = x[by_size], y[by_size]
    if kind == "heavy tails":
        x = x * jnp.asarray(np.abs(sizes.standard_cauchy(size=(rows, 1))), x.dtype)
    return x, y


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(qbound.linear_logits(params, x), y).mean()


def decaying(steps):
    """`optax.cosine_decay_schedule(2.0, steps)`, which mixes dtypes."""
    return lambda step: 1 + jnp.cos(jnp.pi * step.astype(jnp.float32) / steps)


def run(tx, x, y, batch, epochs=1):
    """The parameters, and what was reported of each step."""

    def step(carry, piece):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, *piece), state, params, inputs=piece[0])
        seen = (optax.tree.get(state, "kspfb_step_length"), optax.tree.get(state, "factor_input_batches"))
        return (optax.apply_updates(params, updates), state), seen

    params = jnp.zeros((x.shape[1], 5), x.dtype)
    pieces = jax.tree.map(lambda a: jnp.tile(a.reshape(-1, batch, *a.shape[1:]), (epochs,) + (1,) * a.ndim), (x, y))
    (params, _), seen = jax.jit(functools.partial(jax.lax.scan, step))((params, tx.init(params)), pieces)
    return params, *map(np.asarray, seen)


@pytest.mark.parametrize(
    ("kind", "batch", "highest"),
    [("first batch is small", 100, 0.9), ("sorted by size", 100, 1.2), ("heavy tails", 10, 1.2)],
)
def test_streams_unlike_their_first_batch_do_not_diverge(kind, batch, highest):
    x, y = stream(kind)
    steps = 4 * len(x) // batch
    params, lengths, _ = run(qbound.kspfb(decaying(steps), qbound.linear_logits, l2=1e-3), x, y, batch, epochs=4)
    assert float(loss(params, x, y)) < highest * ZERO
    assert np.min(lengths) < 1


def test_an_ordinary_stream_is_neither_shortened_nor_factorised_out_of_turn():
    x, y = stream("plain")
    tx = qbound.kspfb(2.0, qbound.linear_logits, l2=1e-3, update_every=16)
    _, lengths, entered = run(tx, x, y, 100)
    np.testing.assert_array_equal(lengths, 1)
    np.testing.assert_array_equal(np.flatnonzero(np.diff(entered, prepend=0)), [0, 16, 32])


@pytest.mark.parametrize("rate", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_never_moves_parameters_to_where_its_bound_is_higher(rate, weighted):
    # The first step, with the curvature of the bound in NumPy. A rate of 100 is far too much.
    p = problems.linear(b=9)
    l2, weights = 1e-2, np.arange(9.0) if weighted else np.ones(9)
    extra = {"example_weights": jnp.asarray(weights)} if weighted else {}
    tx = qbound.kspfb(rate, problems.affine, l2=l2, relative_damping=0.0)

    def mean_loss(params):
        each = optax.softmax_cross_entropy_with_integer_labels(problems.affine(params, p.inputs), p.labels)
        return jnp.sum(jnp.asarray(weights) * each) / weights.sum()

    grads = jax.grad(mean_loss)(p.params)
    updates, state = jax.jit(tx.update)(grads, tx.init(p.params), p.params, inputs=p.inputs, **extra)
    length = optax.tree.get(state, "kspfb_step_length")
    g = jax.tree.map(lambda g, w: np.asarray(g + l2 * w), grads, p.params)
    s = jax.tree.map(lambda u: np.asarray(u) / (-rate * length), updates)
    along = np.asarray(p.inputs) @ s["weights"] + s["bias"][None, :]
    logits = np.asarray(problems.affine(p.params, p.inputs))
    curved = [u @ reference.logit_bound(h, reference.max_first(h))[2] @ u for h, u in zip(logits, along, strict=True)]
    curved = np.average(curved, weights=weights) + l2 * sum(np.sum(a**2) for a in s.values())
    ratio = curved / sum(np.sum(g[name] * s[name]) for name in s)
    np.testing.assert_allclose(optax.tree.get(state, "limit_ratio"), ratio, rtol=1e-8)
    np.testing.assert_allclose(length, min(1, 2 / (rate * ratio)), rtol=1e-8)
    assert (length < 1) == (rate == 100)


def test_a_step_that_is_too_long_forgets_directions_and_makes_factors_anew_in_the_next():
    x, y = stream("first batch is small", rows=400)
    _, lengths, entered = run(qbound.kspfb(2.0, qbound.linear_logits, l2=1e-3), x, y, 100)
    assert lengths[0] == 1
    assert lengths[1] < 0.01
    np.testing.assert_allclose(entered[:3], [1, 1, 1.9], rtol=1e-6)
    # The update of the second batch is along its own direction alone: as without momentum.
    pieces = x.reshape(4, 100, -1), y.reshape(4, 100)
    second = []
    for momentum in (0.0, 0.8):
        tx = qbound.kspfb(2.0, qbound.linear_logits, l2=1e-3, momentum=momentum)
        params = jnp.zeros((20, 5), x.dtype)
        state, updates = tx.init(params), None
        for i in range(2):
            grads = jax.grad(loss)(params, pieces[0][i], pieces[1][i])
            updates, state = jax.jit(tx.update)(grads, state, params, inputs=pieces[0][i])
            params = optax.apply_updates(params, updates)
        second.append(updates)
    np.testing.assert_allclose(*second, rtol=1e-4)


@functools.partial(jax.jit, static_argnames="share")
def limited(limit, step, slope, ratio, rate=1.0, share=1.0):
    """Of a step whose ratio is known beforehand."""
    step, rate, slope, ratio = jnp.int32(step), jnp.asarray(rate), jnp.asarray(slope), jnp.asarray(ratio)
    return kspfb.limited(limit, step, rate, share, slope, lambda: ratio)


def test_limit_looks_at_first_then_now_and_then_and_whenever_the_slope_jumps():
    looked, limit = [], kspfb.no_limit_yet(jnp.float64)
    for step in range(170):
        slope = 30.0 if step == 40 else 1.0
        _, _, limit = limited(limit, step, slope, 0.1)
        looked += [step] if limit.limit_excess > 0 else []
    assert looked == [0, 2, 6, 14, 30, 40, 104, 168]


def test_limit_looks_at_every_step_while_steps_are_close_to_it():
    looked, limit = [], kspfb.no_limit_yet(jnp.float64)
    for step in range(12):
        ratio = 1.5 if step < 4 else 0.1
        _, forget, limit = limited(limit, step, 1.0, ratio)
        assert not forget
        looked += [step] if limit.limit_excess > 0 else []
    assert looked == [0, 1, 2, 3, 4, 6, 10]


def test_one_outlier_does_not_hide_the_next():
    limit = kspfb.no_limit_yet(jnp.float64)
    for step, slope in enumerate([1.0, 1e9, 1.0]):
        _, _, limit = limited(limit, step, slope, 0.1)
    assert limit.limit_slope < 2


def test_usual_slope_moves_by_a_tenth_of_the_way_to_at_most_four_times_itself():
    limit, usual = kspfb.no_limit_yet(jnp.float64), []
    for step, slope in enumerate([2.0, 4.0, 1e9, 0.0]):
        _, _, limit = limited(limit, step, slope, 0.1)
        usual.append(float(limit.limit_slope))
    np.testing.assert_allclose(usual, [2, 2.2, 2.2 * 1.3, 2.2 * 1.3 * 0.9], rtol=1e-12)


@pytest.mark.parametrize("rate", [3.0, -3.0])
def test_limit_is_of_the_share_of_a_step_and_then_of_all_of_it_up_or_down(rate):
    length, forget, limit = limited(kspfb.no_limit_yet(jnp.float64), 0, 1.0, 4.0, rate=rate, share=0.5)
    assert forget
    np.testing.assert_allclose(limit.limit_excess, 3)
    np.testing.assert_allclose(length, 1 / 6)


def test_factors_out_of_turn_become_rarer_until_their_turn_comes():
    limit, made = kspfb.no_limit_yet(jnp.float64)._replace(limit_excess=jnp.asarray(5.0)), []
    for step in range(1, 150):
        wanted, limit = kspfb.wants_factors(limit, jnp.asarray(step, jnp.int32), 64)
        made += [step] if wanted else []
    assert made == [1, 2, 4, 8, 16, 32, 64, 65, 67, 71, 79, 95, 127]


def test_steps_that_are_not_known_are_skipped_and_leave_the_limit_as_it_was():
    start = kspfb.no_limit_yet(jnp.float64)
    length, forget, limit = limited(start, 0, 1.0, np.nan)
    assert np.isnan(length)
    assert not forget
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(a == b), start, limit))


def test_share_of_the_next_direction_is_the_one_it_has_in_the_mean():
    directions = no_directions_yet(jnp.zeros(2), 0.8)
    for expected in (1, 1 / 1.8, 1 / 2.44):
        share = share_of_next(directions, 0.8)
        np.testing.assert_allclose(share, expected, rtol=1e-12)
        mean, _ = mean_direction(directions, jnp.ones(2), 0.8, False)
        without, directions = mean_direction(directions, jnp.zeros(2), 0.8, False)
        np.testing.assert_allclose(mean - without, share, rtol=1e-12)
    assert share_of_next(None, 0.0) == 1


def test_where_there_is_no_gradient_there_is_no_step_and_no_error():
    x, _ = stream("plain", rows=20)
    params = jnp.zeros((20, 5), x.dtype)
    tx = qbound.kspfb(2.0, qbound.linear_logits, l2=1e-3)
    updates, state = jax.jit(tx.update)(params, tx.init(params), params, inputs=x)
    np.testing.assert_array_equal(updates, 0)
    assert not optax.tree.get(state, "kspfb_nonfinite") and optax.tree.get(state, "kspfb_step_length") == 1


def test_ratio_of_a_step_uphill_is_not_a_number():
    p = problems.linear(b=9)
    layout = kronecker_factors.layout_of(p.params, problems.affine, None, 1)
    batch = kspfb.BatchRows(p.inputs, problems.affine(p.params, p.inputs), None)
    options = types.SimpleNamespace(family=Softmax())
    for sign in (1, -1):
        s = jax.tree.map(lambda leaf, sign=sign: sign * leaf, p.params)
        ratio = kspfb._ratio(options, layout, batch, p.params, s, jnp.asarray(1e-3))
        assert np.isnan(ratio) == (sign < 0)


@pytest.mark.parametrize(
    ("moments", "typical"), [([9.0, 1.0, 4.0], 4.0), ([0.0, 8.0, 0.0, 0.0], 2.0), ([0.0, 0.0], None)]
)
def test_inputs_are_scaled_by_what_is_typical_the_median_unless_most_are_zero(moments, typical):
    expected = np.ones(2) if typical is None else 1 / np.sqrt(np.array(moments) + typical)
    np.testing.assert_allclose(kronecker_factors.input_scales(jnp.asarray(moments)), expected, rtol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_large_batches_are_not_copied(weighted, bias):
    # Compiled only. The batch has 4 GB in float32, and no temporary may be of that size.
    rows, inputs = 1_000_000, 1000
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {"weights": shape((inputs, 10)), **({"bias": shape((10,))} if bias else {})}
    tx = qbound.kspfb(2.0, qbound.linear_logits if bias else lambda p, x: x @ p["weights"], l2=1e-4)
    extra = {"example_weights": shape((rows,))} if weighted else {}
    update = jax.jit(tx.update).lower(
        params, jax.eval_shape(tx.init, params), params, inputs=shape((rows, inputs)), **extra
    )
    memory = update.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.5e9


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [7, 21, 23])
def test_moments_some_rows_at_a_time_equal_those_of_all(weighted, bias, rows):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    w = np.arange(rows) / np.arange(rows).sum() if weighted else np.full(rows, 1 / rows)
    found = jax.jit(kronecker_factors.second_moments, static_argnums=(2, 3, 4))(
        jnp.asarray(x), jnp.asarray(w) if weighted else None, bias, jnp.float64, 7 * 3
    )
    x = np.c_[x, np.ones(rows)] if bias else x
    np.testing.assert_allclose(found, x.T @ (w[:, None] * x), rtol=1e-6, atol=1e-7)


def test_examples_of_weight_zero_may_have_inputs_and_logits_that_are_not_finite():
    rows, w = np.random.default_rng(0).normal(size=(5, 3)), jnp.asarray([0.25, 0, 0.5, 0, 0.25])
    bad = jnp.asarray(np.where(np.asarray(w)[:, None] == 0, np.inf, rows))
    rows = jnp.asarray(rows)
    for of in (
        lambda x: kronecker_factors.second_moments(x, w, True, jnp.float64),
        lambda h: kronecker_factors.mean_label_curvature(h, w, Softmax()),
    ):
        np.testing.assert_allclose(of(bad), of(rows), rtol=1e-12)


def test_too_many_inputs_for_a_matrix_are_an_error_that_says_how_many():
    tx = qbound.kspfb(2.0, qbound.linear_logits, l2=1e-4)
    with pytest.raises(ValueError, match=r"at most 32,768 inputs.*got 1,000,000 inputs, a matrix of 3,725 GiB"):
        jax.eval_shape(tx.init, jax.ShapeDtypeStruct((1_000_000, 10), jnp.float32))
