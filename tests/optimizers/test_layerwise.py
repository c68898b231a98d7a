"""Layerwise SPFB: networks of all kinds, numbers that go wrong, and where a matrix comes from."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

import qbound
from tests import processes, reference
from tests.optimizers import problems
from tests.optimizers.problems import flat, network

both_kinds = pytest.mark.parametrize("factors", ["estimate", "bound"])


def problem(b=60, d=4, dtype=jnp.float64):
    """Three labels that no linear model can tell apart."""
    x = jnp.asarray(np.random.default_rng(3).normal(size=(b, d)), dtype)
    return x, jnp.argmax(x[:, :3] * x[:, 1:4], axis=1)


def random(seed=0, /, **shapes):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape) / 2) for name, shape in shapes.items()}


def train(make, logits_fn, params, inputs, labels, rate=1.0, state=None):
    """Thirty full batches at a rate: the loss before every step and after the last, the parameters and the state."""
    return run(make, logits_fn, params, make(rate).init(params) if state is None else state, inputs, labels, rate)


@functools.partial(jax.jit, static_argnames=("make", "logits_fn"))
def run(make, logits_fn, params, state, inputs, labels, rate):
    tx = make(rate)

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(problems.loss, argnums=1)(logits_fn, params, inputs, labels)
        updates, state = tx.update(grads, state, params, inputs=inputs, value=value)
        return (optax.apply_updates(params, updates), state), value

    (params, state), losses = jax.lax.scan(step, (params, state), length=30)
    return jnp.append(losses, problems.loss(logits_fn, params, inputs, labels)), params, state


def layerwise(logits_fn, **options):
    """From a learning rate to an optimizer."""
    return functools.partial(qbound.layerwise_spfb, logits_fn=logits_fn, **options)


of_network = layerwise(network)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# Numbers that are not finite


def relu_network(params, x):
    hidden = jax.nn.relu(x @ params["first"] + params["shift"][None, :])
    return hidden @ params["weights"] + params["bias"][None, :]


def relu_params():
    return random(first=(4, 20), weights=(20, 3), bias=(3,)) | {"shift": jnp.zeros(20)}


@functools.cache
def started():
    """A compiled update with a batch and its gradients, the first state, and that after a few updates."""
    tx, params, (x, y) = layerwise(relu_network)(1.0), relu_params(), problem()
    grads, update, first = problems.gradient(relu_network, params, x, y), jax.jit(tx.update), tx.init(params)
    state = first
    # The next update does not invert factors.
    for _ in range(4):
        _, state = update(grads, state, params, inputs=x)
    return update, params, x, grads, first, state


def has_moved(updates):
    return bool(np.isfinite(flat(updates)).all() and np.abs(flat(updates)).max() > 0)


BAD = {
    "gradients that are NaN": (jnp.nan, 1.0),
    "gradients that are infinite": (jnp.inf, 1.0),
    "logits that are NaN": (1.0, jnp.nan),
    "logits that are infinite": (1.0, 1e308),
    "inputs that are infinite": (1.0, jnp.inf),
    "both": (jnp.nan, jnp.nan),
}


@pytest.mark.parametrize("case", BAD)
def test_batch_that_is_not_finite_is_skipped_reported_and_forgotten(case):
    update, params, x, grads, _, before = started()
    of_grads, of_inputs = BAD[case]
    bad_grads, bad_x = grads | {"first": grads["first"].at[1, 2].multiply(of_grads)}, x.at[7].multiply(of_inputs)
    updates, after = update(bad_grads, before, params, inputs=bad_x)
    np.testing.assert_array_equal(flat(updates), 0)
    (before, *_), (state, *_) = before, after
    info = state.layerwise_info
    assert info.layerwise_nonfinite and info.layerwise_nonfinite_total == 1
    assert info.layerwise_step_length == info.layerwise_predicted_decrease == 0
    assert_same(state.layerwise_length, before.layerwise_length)
    assert_same(state.layerwise_directions, before.layerwise_directions)
    assert np.isfinite(flat(state.layerwise_factors)).all()
    if np.isnan(of_inputs):
        assert_same(state.layerwise_factors, before.layerwise_factors)
    updates, (state, *_) = update(grads, after, params, inputs=x)
    assert has_moved(updates)
    assert not state.layerwise_info.layerwise_nonfinite
    assert state.layerwise_info.layerwise_nonfinite_total == 1


def test_first_good_batch_is_solved_with_whenever_it_comes():
    update, params, x, grads, state, _ = started()
    nan = jax.tree.map(lambda leaf: leaf * jnp.nan, grads)
    for bad in range(1, 14):
        updates, state = update(nan, state, params, inputs=x.at[0, 0].set(jnp.nan))
        np.testing.assert_array_equal(flat(updates), 0)
        assert optax.tree.get(state, "layerwise_nonfinite_total") == bad
        if bad in (1, 13):
            updates, _ = update(grads, state, params, inputs=x)
            assert has_moved(updates) and flat(updates) @ flat(grads) < 0


def test_batch_whose_products_overflow_does_not_stay_in_the_factors():
    """Probes of which every number is finite, and no square."""
    update, params, x, grads, _, before = started()
    blind = params | {"first": params["first"].at[3].set(0)}
    updates, state = update(grads, before, blind, inputs=x.at[:, 3].multiply(1e200))
    assert np.isfinite(flat(updates)).all()
    assert_same(state[0].layerwise_factors, before[0].layerwise_factors)
    updates, state = update(grads, state, params, inputs=x)
    assert has_moved(updates) and not optax.tree.get(state, "layerwise_nonfinite")


@functools.cache
def started_with_arrays_for_options():
    """Options may be arrays, as of `optax.inject_hyperparams`: those out of their range are NaN."""
    params, (x, y) = problems.network_params(), problem()
    grads = problems.gradient(network, params, x, y)
    good = {"learning_rate": 1.0, "damping": 0.3, "decay": 0.85, "momentum": 0.8, "l2": 0.01}

    @jax.jit
    def update(state, options):
        tx = qbound.layerwise_spfb(logits_fn=network, solve_every=4, **options)
        return tx.update(grads, state, params, inputs=x)

    state = of_network(1.0).init(params)
    for _ in range(12):
        _, state = update(state, good)
    return update, state, good


@pytest.mark.parametrize(
    ("name", "number"),
    [("learning_rate", jnp.nan), ("damping", -0.1), ("decay", 1.5), ("momentum", -0.1), ("l2", -0.1)],
)
def test_option_out_of_its_range_is_reported_and_forgotten(name, number):
    update, state, good = started_with_arrays_for_options()
    updates, state = update(state, good | {name: number})
    np.testing.assert_array_equal(flat(updates), 0)
    assert optax.tree.get(state, "layerwise_nonfinite")
    updates, state = update(state, good)
    assert has_moved(updates) and not optax.tree.get(state, "layerwise_nonfinite")
    for factors in state[0].layerwise_factors.layer_factors:
        assert np.isfinite(flat(factors)).all() and np.all(factors.solve_values > 0)


def test_labels_that_are_removed_stay_so():
    def model(params, x):
        return network(params, x) + jnp.asarray([0, 0, 0, -jnp.inf])[None, :]

    x, y = problem()
    losses, params, state = train(layerwise(model), model, problems.network_params(n=4), x, y)
    assert np.isfinite(flat(params)).all() and losses[-1] < 0.8 * losses[0]
    assert optax.tree.get(state, "layerwise_nonfinite_total") == 0


# Arrays without curvature, and of every shape


@both_kinds
def test_layer_that_is_dead_does_not_move_and_moves_again_when_revived(factors):
    make, (x, y) = layerwise(relu_network, factors=factors), problem()
    dead = relu_params() | {"shift": jnp.full(20, -100.0)}
    losses, params, state = train(make, relu_network, dead, x, y)
    assert_same(params | {"bias": dead["bias"]}, dead)
    assert np.abs(params["bias"] - dead["bias"]).max() > 0 and losses[-1] < losses[0]
    assert optax.tree.get(state, "layerwise_nonfinite_total") == 0
    revived = params | {"shift": jnp.zeros(20)}
    first, params, state = train(make, relu_network, revived, x, y, state=state)
    second, params, state = train(make, relu_network, params, x, y, state=state)
    alive, *_ = train(make, relu_network, relu_params(), x, y)
    assert np.abs(params["first"] - revived["first"]).max() > 0.01
    assert optax.tree.get(state, "layerwise_nonfinite_total") == 0
    assert max(np.max(first), np.max(second)) < 1.05 * first[0]
    # In twice the time about as good as what was never dead.
    assert second[-1] < 2 * alive[-1]


@pytest.mark.parametrize("l2", [0.0, 0.01])
def test_array_that_logits_do_not_depend_on_stays_or_goes_to_zero_with_l2(l2):
    start = problems.network_params() | {"unused": jnp.arange(1.0, 7).reshape(2, 3)}
    losses, params, _ = train(layerwise(network, l2=l2), network, start, *problem())
    assert losses[-1] < 0.8 * losses[0]
    if l2 == 0:
        assert_same(params["unused"], start["unused"])
    else:
        assert np.abs(params["unused"]).max() < 0.3


SHAPES = {
    "scalar": (),
    "vector": (3,),
    "one": (1, 1),
    "row": (1, 3),
    "column": (4, 1),
    "three": (2, 2, 3),
    "empty": (0,),
    "without rows": (0, 3),
    "without columns": (3, 0),
}


def model_of_every_shape(params, x):
    row = params["scalar"] * params["row"][0] + params["vector"] + params["one"][0, 0]
    logits = x @ (params["column"] * row[None, :])
    empty = jnp.sum(params["empty"]) + jnp.sum(params["without rows"]) + jnp.sum(params["without columns"])
    return logits + x @ params["three"].reshape(4, 3) + empty


@both_kinds
def test_arrays_of_every_shape(factors):
    start = random(1, **SHAPES)
    x, y = problem()
    losses, params, state = train(layerwise(model_of_every_shape, factors=factors), model_of_every_shape, start, x, y)
    assert losses[-1] < 0.9 * losses[0]
    assert np.isfinite(flat(params)).all() and np.isfinite(flat(state)).all()
    assert {name: leaf.shape for name, leaf in params.items()} == SHAPES
    assert all(np.abs(params[name] - start[name]).max(initial=1e-9) > 0 for name in SHAPES)


# Errors


def test_errors_of_a_model_and_of_what_an_update_is_given():
    params, (x, _) = problems.network_params(), problem()
    tx = of_network(1.0)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"inputs: expected the batch that the gradient is of.*got None"):
        tx.update(params, state, params)
    with pytest.raises(ValueError, match=r"params: expected the parameters; got None"):
        tx.update(params, state, inputs=x)
    with pytest.raises(TypeError, match=r"params: expected float arrays; got one of dtype int64"):
        tx.init(params | {"count": jnp.arange(3)})
    with pytest.raises(ValueError, match=r"updates: expected a tree of structure"):
        tx.update(params | {"more": x}, state, params, inputs=x)
    pair = of_network(1.0, logits_fn=lambda params, x: (network(params, x), x))
    with pytest.raises((TypeError, ValueError), match=r"logits_fn: expected it to return float logits .*; got \("):
        pair.update(params, pair.init(params), params, inputs=x)
    with pytest.raises(ValueError, match=r"value: expected the loss, because of adaptive_damping; got None"):
        adaptive = of_network(1.0, adaptive_damping=0.1)
        adaptive.update(params, adaptive.init(params), params, inputs=x)


@pytest.mark.parametrize("make", [qbound.layerwise_spfb, qbound.spfb, qbound.lspfb])
def test_update_without_any_parameter_is_named(make):
    tx = make(1.0, lambda params, x: x, l2=1.0, **({"rank": 2} if make is qbound.lspfb else {}))
    with pytest.raises(ValueError, match="^params: expected at least one array; got {}"):
        tx.update({}, tx.init({}), {}, inputs=jnp.ones((5, 3)))


@pytest.mark.parametrize("b", [60, 600])
def test_weights_that_do_not_fit_the_examples_are_named(b):
    params, (x, _) = problems.network_params(), problem(b)
    tx = of_network(1.0)
    with pytest.raises(ValueError, match=rf"example_weights: expected shape \({b},\)"):
        tx.update(params, tx.init(params), params, inputs=x, example_weights=jnp.ones(b - 8))


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"logits_fn": "network"}, TypeError, r"logits_fn: expected a function; got 'network'"),
        ({"damping": 0.0}, ValueError, r"damping: expected a finite number > 0; got 0.0"),
        ({"l2": -1.0}, ValueError, r"l2: expected a finite number >= 0; got -1.0"),
        ({"weight_decay": -1.0}, ValueError, r"weight_decay: expected a finite number >= 0; got -1.0"),
        ({"momentum": 1.0}, ValueError, r"momentum: expected a number in \[0, 1\); got 1.0"),
        ({"decay": 1.0}, ValueError, r"decay: expected a number in \[0, 1\); got 1.0"),
        ({"factors": "diagonal"}, ValueError, r"factors: expected one of 'estimate', 'bound'; got 'diagonal'"),
        ({"curvature": "hessian"}, ValueError, r"curvature: expected one of 'bound', 'gauss_newton'; got"),
        ({"order": "any"}, ValueError, r"order: expected one of 'descending', 'max_first', 'given'; got 'any'"),
        ({"probe_examples": 0}, ValueError, r"probe_examples: expected an integer > 0; got 0"),
        ({"update_every": 1.5}, TypeError, r"update_every: expected an integer > 0; got 1.5"),
        ({"solve_every": 0}, ValueError, r"solve_every: expected an integer > 0; got 0"),
        ({"longest_axis": None}, TypeError, r"longest_axis: expected an integer > 0; got None"),
        ({"adaptive_damping": 0.0}, ValueError, r"adaptive_damping: expected a finite number > 0; got 0.0"),
        ({"seed": "a"}, TypeError, r"seed: expected an integer; got 'a'"),
    ],
)
def test_errors_when_built(options, error, words):
    with pytest.raises(error, match=words):
        qbound.layerwise_spfb(1.0, **{"logits_fn": network, **options})


NOTHING = {"first": None, "weights": None, "bias": None}


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    "axes",
    [
        NOTHING | {"first": qbound.LeafAxes((0,), (2,))},
        NOTHING | {"first": qbound.LeafAxes((0,), (-2,))},
        NOTHING | {"bias": qbound.LeafAxes((0,), (1,))},
        NOTHING | {"bias": "rows"},
        {"first": None, "weights": None},
        qbound.LeafAxes((0,), (1,)),
        lambda params: [None, None, None],
        "rows",
    ],
)
def test_axes_that_do_not_fit_are_named_at_init(axes):
    with pytest.raises((TypeError, ValueError), match="^axes: expected "):
        of_network(1.0, axes=axes).init(problems.network_params())


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(("axes", "name"), [((0, (1,)), "rows"), (((0,), 1), "columns"), (((0,), ("1",)), "columns")])
def test_axes_that_are_no_tuples_are_named(axes, name):
    with pytest.raises(TypeError, match=f"^{name}: expected a tuple of axes"):
        qbound.LeafAxes(*axes)


def test_axes_of_parameters_with_none_among_them():
    axes = NOTHING | {"first": qbound.LeafAxes((1,), (0,))}
    params = problems.network_params() | {"bias": None}
    of_first, of_weights = of_network(1.0, axes=axes).init(params)[0].layerwise_factors.layer_factors
    assert (of_first.factor_rows.shape, of_weights.factor_rows.shape) == ((1, 5, 5), (1, 5, 5))
    assert of_first.factor_columns.shape == (1, 4, 4)


# Learning rates, and where parameters start


@pytest.mark.parametrize("model", [network, relu_network])
def test_loss_never_rises_much_at_rates_over_eight_decades(model):
    start = problems.network_params(hidden=20) if model is network else relu_params()
    make = layerwise(model)
    ends = []
    for rate in (1e-3, 1e-1, 1.0, 1e1, 1e3, 1e5):
        losses, params, state = train(make, model, start, *problem(), rate)
        assert np.max(losses) < 1.03 * losses[0], rate
        assert np.isfinite(flat(params)).all()
        assert optax.tree.get(state, "layerwise_nonfinite_total") == 0
        ends.append(losses[-1])
    assert ends[2] < ends[1] < ends[0] < losses[0]
    assert ends[2] < 0.6 * losses[0]


def test_first_step_from_small_weights_does_not_leave_what_is_linear():
    """All layers grow at once: 40 times their size where each alone would be right."""

    def deep(params, x):
        for name in ("first", "second", "third", "fourth"):
            x = jax.nn.relu(x @ params[name])
        return x @ params["last"]

    shapes = {"first": (4, 30), "second": (30, 30), "third": (30, 30), "fourth": (30, 30), "last": (30, 3)}
    start = jax.tree.map(lambda leaf: 0.1 * leaf, random(**shapes))
    losses, *_ = train(layerwise(deep), deep, start, *problem())
    assert np.max(losses) <= losses[0] + 1e-9


def test_nonlinearity_is_that_of_the_update_that_is_made():
    params, (x, y) = relu_params(), problem()
    shares = []
    for rate in (1e-3, 1e-2, 1.0):
        _, (state, *_) = problems.first_update(layerwise(relu_network)(rate), relu_network, params, x, y)
        shares.append(float(state.layerwise_info.layerwise_nonlinearity))
    assert 0 < shares[0] < 0.2 * shares[1] < 0.2 * shares[2] < 0.1


def test_linear_models_are_linear_whatever_they_make_of_the_batch():
    """The look ahead is of the same examples as the length: a dropout mask is that of the examples it is drawn for."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(600, 4)))
    tx = layerwise(lambda w, inputs: dropped(*inputs) @ w, inputs_axes=(None, 0))(1.0)
    w, key = jnp.zeros((4, 3)), jax.random.key(1)
    grads = jax.random.normal(jax.random.key(2), (4, 3))
    _, (state, *_) = tx.update(grads, tx.init(w), w, inputs=(key, x))
    assert state.layerwise_info.layerwise_step_length > 0
    assert state.layerwise_info.layerwise_nonlinearity < 1e-6


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)


def test_rows_of_logits_may_be_positions_of_fewer_examples():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(60, 10, 4)))
    tx = layerwise(lambda w, x: (x @ w).reshape(-1, 3))(1.0)
    w, grads = jnp.zeros((4, 3)), jax.random.normal(jax.random.key(2), (4, 3))
    updates, _ = tx.update(grads, tx.init(w), w, inputs=x)
    assert has_moved(updates)


def test_model_that_computes_in_less_precision_is_not_taken_for_nonlinear():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(100, 4)), jnp.float32)
    tx = layerwise(lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))(1e-3)
    w, grads = jnp.ones((4, 3), jnp.float32), jax.random.normal(jax.random.key(2), (4, 3), jnp.float32)
    _, (state, *_) = tx.update(grads, tx.init(w), w, inputs=x)
    assert state.layerwise_info.layerwise_nonlinearity < 0.1


def test_direction_against_the_gradient_is_forgotten():
    """The mean of directions leads back where the gradient turns: the update is then that of this gradient alone."""
    tx, params, (x, y) = of_network(1.0), problems.network_params(hidden=20), problem()
    grads, state = problems.gradient(network, params, x, y), None
    update, state = jax.jit(tx.update), tx.init(params)
    for _ in range(6):
        _, state = update(grads, state, params, inputs=x)
    turned = jax.tree.map(lambda leaf: -leaf / 4, grads)
    updates, (after, *_) = update(turned, state, params, inputs=x)
    assert flat(updates) @ flat(turned) < 0
    assert after.layerwise_directions.mean_direction_weight == 1
    assert state[0].layerwise_directions.mean_direction_weight > 2


@pytest.mark.parametrize("scale", [0.1, 10.0, 1000.0])
def test_rate_of_one_trains_from_weights_of_any_size(scale):
    """At the largest all examples are certain of a label, and most of a wrong one."""
    start = jax.tree.map(lambda leaf: scale * leaf, problems.network_params(hidden=20))
    losses, *_ = train(of_network, network, start, *problem())
    assert losses[-1] < 0.9 * losses[0]
    assert np.max(losses) < 1.03 * losses[0]


@pytest.mark.parametrize("logit", [50.0, 400.0, 1000.0])
def test_examples_that_are_certain_of_a_wrong_label_are_learned(logit):
    """Their Hessian vanishes, in the last case to the last digit; the bound does not."""

    def model(w, x):
        return x @ w

    y = 1 + jnp.arange(10) % 2
    losses, *_ = train(layerwise(model), model, jnp.asarray([[logit, 0, 0]]), jnp.ones((10, 1)), y)
    assert np.max(losses) == losses[0]
    assert losses[-1] < 0.05 * losses[0]


def test_schedule_is_followed_and_a_rate_of_zero_does_not_move():
    rates = np.array([1.0, 0.3, 0.0, 0.7])
    tx = of_network(lambda t: jnp.asarray(rates)[t])
    params, (x, y) = problems.network_params(), problem()
    grads = problems.gradient(network, params, x, y)
    constant = jax.jit(lambda rate, state: of_network(rate).update(grads, state, params, inputs=x))
    state, update = tx.init(params), jax.jit(tx.update)
    of_constant = of_network(1.0).init(params)
    for rate in rates:
        expected, of_constant = constant(rate, of_constant)
        updates, state = update(grads, state, params, inputs=x)
        np.testing.assert_allclose(flat(updates), flat(expected), rtol=1e-9)
        assert (np.abs(flat(updates)).max() > 0) == (rate > 0)


def test_parameters_in_half_the_precision():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), problems.network_params())
    x, y = problem(dtype=jnp.bfloat16)
    losses, after, state = train(of_network, network, params, x, y)
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state[0]) if leaf.dtype.kind not in "ib"} == {jnp.dtype(jnp.float32)}
    assert np.isfinite(flat(after).astype(np.float32)).all()
    assert losses[-1] < 0.8 * losses[0]
    updates, _ = jax.eval_shape(functools.partial(of_network(1.0).update, inputs=x), params, state, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}


# Weights of examples


def test_examples_without_weight_change_nothing():
    tx, params, (x, y) = of_network(1.0), problems.network_params(), problem()
    weights = jnp.where(jnp.arange(60) % 3 == 0, 0.0, 1.0 + jnp.arange(60.0) % 2)
    expected, state = problems.first_update(tx, network, params, x, y, weights)
    huge = jnp.where(weights[:, None] == 0, 1e30 * x, x)
    updates, state_of_huge = problems.first_update(tx, network, params, huge, y, weights)
    np.testing.assert_allclose(flat(updates), flat(expected), rtol=1e-12)
    np.testing.assert_allclose(flat(state_of_huge), flat(state), rtol=1e-9, atol=1e-15)
    # Nor does the unit of the weights.
    updates, _ = problems.first_update(tx, network, params, x, y, 7 * weights)
    np.testing.assert_allclose(flat(updates), flat(expected), rtol=1e-12)


def sequence_model(params, x):
    return jnp.tanh(x @ params["first"]) @ params["weights"] + params["bias"][None, None, :]


def test_padding_of_sequences_changes_nothing():
    tx, params, (x, y) = layerwise(sequence_model)(1.0), problems.network_params(), problem()
    x, y = x.reshape(12, 5, 4), y.reshape(12, 5)
    weights = (jnp.arange(5)[None, :] < 1 + jnp.arange(12)[:, None] % 5).astype(x.dtype)
    expected, _ = problems.first_update(tx, sequence_model, params, x, y, weights)
    padded = jnp.where(weights[:, :, None] == 0, 1e30, x)
    updates, _ = problems.first_update(tx, sequence_model, params, padded, y, weights)
    np.testing.assert_allclose(flat(updates), flat(expected), rtol=1e-12)


def test_probes_are_of_examples_that_have_a_weight():
    """As where few examples have a label: of those that are looked at in turn, some hold none."""
    params, (x, y) = problems.network_params(), problem(600)
    weights = (jnp.arange(600) % 4 == 1).astype(x.dtype)
    tx = of_network(1.0)
    state, update = tx.init(params), jax.jit(tx.update)
    grads = problems.gradient(network, params, x, y, weights)
    for _ in range(4):
        updates, state = update(grads, state, params, inputs=x, example_weights=weights)
        assert not optax.tree.get(state, "layerwise_nonfinite")
        assert np.abs(flat(updates)).max() > 0


# Inside of optax


def test_accumulates_microbatches():
    tx, params = optax.MultiSteps(of_network(1.0), 3), problems.network_params(hidden=20, dtype=jnp.float32)
    x, y = problem(dtype=jnp.float32)

    def step(carry, batch):
        params, state = carry
        x, y = batch
        value, grads = jax.value_and_grad(problems.loss, argnums=1)(network, params, x, y)
        updates, state = tx.update(grads, state, params, inputs=x)
        return (optax.apply_updates(params, updates), state), (value, jnp.abs(updates["first"]).max())

    batches = tuple(jnp.tile(a.reshape(3, 20, *a.shape[1:]), (30, *(1,) * a.ndim)) for a in (x, y))
    with jax.numpy_dtype_promotion("standard"):
        (_, state), (losses, moved) = jax.jit(lambda c: jax.lax.scan(step, c, batches))((params, tx.init(params)))
    np.testing.assert_array_equal(moved > 0, 30 * [False, False, True])
    assert optax.tree.get(state, "layerwise_updates") == 30
    assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])


def test_weight_decay_is_added_to_the_update_of_those_it_is_for():
    params, (x, y) = problems.network_params(), problem()
    mask = {"first": True, "weights": True, "bias": False}
    plain, _ = problems.first_update(of_network(0.5), network, params, x, y)
    tx = of_network(0.5, weight_decay=0.1, weight_decay_mask=mask)
    decayed, _ = problems.first_update(tx, network, params, x, y)
    for name in params:
        expected = plain[name] - (0.5 * 0.1 * params[name] if mask[name] else 0)
        np.testing.assert_allclose(decayed[name], expected, rtol=1e-9, atol=1e-12)


def test_skipped_update_has_no_weight_decay():
    params, (x, y) = problems.network_params(), problem()
    tx = of_network(0.5, weight_decay=0.1)
    grads = jax.tree.map(lambda leaf: leaf * jnp.nan, problems.gradient(network, params, x, y))
    updates, (state, *_) = tx.update(grads, tx.init(params), params, inputs=x)
    np.testing.assert_array_equal(flat(updates), 0)
    assert state.layerwise_info.layerwise_nonfinite_total == 1


def test_adaptive_damping_grows_when_the_loss_rises_and_shrinks_when_it_falls_as_predicted():
    params, (x, y) = problems.network_params(), problem()
    tx = of_network(0.5, adaptive_damping=0.1)
    grads, update = problems.gradient(network, params, x, y), jax.jit(tx.update)
    updates, state = update(grads, tx.init(params), params, inputs=x, value=1.0)
    np.testing.assert_allclose(optax.tree.get(state, "layerwise_damping"), 0.3 + 0.1)
    info, moved = state[0].layerwise_info, optax.apply_updates(params, updates)
    # What half a step is predicted to gain.
    eta = float(info.layerwise_step_length)
    predicted = 0.5 * float(info.layerwise_predicted_decrease + eta**2 / 2 * info.layerwise_curvature)
    predicted -= 0.5**2 * eta**2 / 2 * float(info.layerwise_curvature)
    for change, damping in ((0.1, 0.3 + 0.2), (-predicted, 0.3 + 0.1 / 1.5), (-predicted / 2, 0.3 + 0.1)):
        _, after = update(grads, state, moved, inputs=x, value=1.0 + change)
        np.testing.assert_allclose(optax.tree.get(after, "layerwise_damping"), damping)
        ratio = optax.tree.get(after, "spfb_reduction_ratio")
        np.testing.assert_allclose(ratio, -change / predicted, rtol=1e-6)


def test_update_is_the_same_without_jit():
    w, (x, _) = random(w=(4, 3))["w"], problem()
    tx = qbound.layerwise_spfb(0.5, lambda w, x: x @ w, l2=1e-3)
    results = (jax.tree.leaves(f(w, tx.init(w), w, inputs=x)) for f in (tx.update, jax.jit(tx.update)))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)


def test_second_call_does_not_compile_again():
    update, params, x, grads, first, _ = started()
    for _ in range(2):
        _, first = update(grads, first, params, inputs=x)
    assert update._cache_size() == 1


# Which matrix an array is


def stacked_network(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return jax.lax.scan(layer, x, params["layers"])[0] @ params["last"]


def separate_network(params, x):
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return x @ params["last"]


@both_kinds
def test_stacked_layers_move_as_separate_ones_do(factors):
    params, (x, y) = random(layers=(3, 4, 4), last=(4, 3)), problem()
    axes = {"layers": qbound.LeafAxes(rows=(1,), columns=(2,)), "last": None}
    stacked = layerwise(stacked_network, factors=factors, axes=axes)(1.0)
    updates, _ = problems.first_update(stacked, stacked_network, params, x, y)
    apart = params | {"layers": tuple(params["layers"])}
    separate = layerwise(separate_network, factors=factors)(1.0)
    expected, _ = problems.first_update(separate, separate_network, apart, x, y)
    np.testing.assert_allclose(updates["layers"], jnp.stack(expected["layers"]), rtol=1e-9)
    np.testing.assert_allclose(updates["last"], expected["last"], rtol=1e-9)


def convolutional_network(params, x):
    dimensions = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, params["kernel"], (1, 1), "SAME", dimension_numbers=dimensions)
    return jnp.mean(jax.nn.relu(x), axis=(1, 2)) @ params["last"]


@pytest.mark.parametrize(
    ("rows", "columns", "sizes"), [(None, None, (1, 18, 8)), ((2,), (3,), (9, 2, 8)), ((2, 0), (-1,), (3, 6, 8))]
)
def test_kernels_of_convolutions(rows, columns, sizes):
    params = random(kernel=(3, 3, 2, 8), last=(8, 3))
    rng = np.random.default_rng(0)
    y = rng.integers(3, size=30)
    # Two channels, with an edge of one of three directions.
    x = rng.normal(size=(30, 6, 6, 2))
    x[np.arange(30), :, :, y % 2] += 1.5 * (y == 2)[:, None, None] + np.sign(np.arange(6) - 2.5)[None, :, None] * (
        y[:, None, None] < 2
    )
    axes = None if rows is None else {"kernel": qbound.LeafAxes(rows, columns), "last": None}
    make = layerwise(convolutional_network, axes=axes)
    losses, _, state = train(make, convolutional_network, params, jnp.asarray(x), jnp.asarray(y))
    k, p, q = sizes
    of_kernel = state[0].layerwise_factors.layer_factors[0]
    assert (of_kernel.factor_rows.shape, of_kernel.factor_columns.shape) == ((k, p, p), (k, q, q))
    assert losses[-1] < 0.8 * losses[0]


def test_axes_may_be_a_function_and_long_axes_have_a_diagonal():
    tx = of_network(1.0, longest_axis=4, axes=lambda params: jax.tree.map(lambda leaf: None, params))
    bias, first, weights = tx.init(problems.network_params())[0].layerwise_factors.layer_factors
    assert (first.factor_rows.shape, first.factor_columns.shape) == ((1, 4, 4), (1, 5))
    assert (weights.factor_rows.shape, weights.factor_columns.shape) == ((1, 5), (1, 3, 3))
    assert bias.factor_rows.shape == (1, 3)
    for kind in ("estimate", "bound"):
        make = layerwise(network, longest_axis=4, factors=kind)
        losses, *_ = train(make, network, problems.network_params(), *problem())
        assert losses[-1] < 0.9 * losses[0]


@functools.cache
def losses_of_tied_weights():
    """The next token is twice the last one, from an embedding that is also the output."""

    def model(params, tokens):
        return jnp.tanh(params["embedding"][tokens] @ params["mix"]) @ params["embedding"].T

    tokens = jnp.asarray(np.random.default_rng(0).integers(7, size=(20, 5)))
    params = random(embedding=(7, 6), mix=(6, 6))
    losses, *_ = train(layerwise(model), model, params, tokens, (2 * tokens) % 7)
    return losses


def test_weights_that_are_tied_train():
    losses = losses_of_tied_weights()
    assert np.min(losses) < 0.1 * losses[0]


def test_batch_that_is_fitted_stays_so():
    """Where next to nothing is left of the loss, steps as long as those before would be far too long."""
    losses = losses_of_tied_weights()
    fitted = np.flatnonzero(losses < 0.05 * losses[0])[0]
    assert fitted < 20 and np.max(losses[fitted:]) < 0.05 * losses[0]
    assert losses[-1] < 0.001 * losses[0]


# Inputs that all examples share, with probes of one example in five


def frozen_model(params, inputs):
    frozen, x = inputs
    return network(params | {"first": frozen}, x)


def dropout_model(params, inputs):
    key, x = inputs
    hidden = jnp.tanh(x @ params["first"])
    kept = jax.random.bernoulli(key, 0.8, hidden.shape)
    return jnp.where(kept, hidden / 0.8, 0) @ params["weights"] + params["bias"][None, :]


def normalised_model(params, inputs):
    statistics, x = inputs
    return network(params, (x - statistics["mean"][None, :]) / statistics["deviation"][None, :])


@pytest.mark.parametrize("model", [frozen_model, dropout_model, normalised_model])
def test_inputs_that_all_examples_share_are_handed_through(model):
    x, y = problem(100)
    shared = {
        frozen_model: random(7, first=(4, 20))["first"],
        dropout_model: jax.random.key(0),
        normalised_model: {"mean": jnp.ones(4), "deviation": jnp.full(4, 2.0)},
    }[model]
    params = problems.network_params(hidden=20)
    if model is frozen_model:
        del params["first"]
    seen = []

    def recorded(params, inputs):
        seen.append(inputs[1].shape)
        return model(params, inputs)

    make = functools.partial(layerwise(recorded), inputs_axes=(None, 0), probe_examples=20)
    losses, _, state = train(make, recorded, params, (shared, x), y)
    assert (20, 4) in seen
    assert losses[-1] < 0.8 * losses[0]
    assert optax.tree.get(state, "layerwise_nonfinite_total") == 0


# What is computed


def test_direction_is_the_exact_kronecker_solve_after_many_probes():
    """Of weights that are zero, where every example has the same curvature."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(100, 6)))
    g = jnp.asarray(rng.normal(size=(6, 4)))
    options = {"momentum": 0.0, "decay": 0.99, "update_every": 1, "solve_every": 100, "probe_examples": 100}
    tx = qbound.scale_by_layerwise_spfb(lambda w, x: x @ w, **options)
    w = jnp.zeros_like(g)

    def step(state, _):
        updates, state = tx.update(g, state, w, inputs=x)
        return state, updates

    _, updates = jax.jit(lambda state: jax.lax.scan(step, state, length=401))(tx.init(w))
    m = reference.logit_bound(np.zeros(4), reference.max_first(np.zeros(4)))[2]
    left, right = np.asarray(x.T @ x) / 100, m
    left, right = (a / np.mean(np.diag(a)) + np.sqrt(0.3) * np.eye(len(a)) for a in (left, right))
    expected = np.linalg.solve(left, np.asarray(g)) @ np.linalg.inv(right)
    cosine = np.sum(updates[-1] * expected) / np.linalg.norm(updates[-1]) / np.linalg.norm(expected)
    assert cosine > 0.99
    first = np.sum(updates[0] * expected) / np.linalg.norm(updates[0]) / np.linalg.norm(expected)
    assert first < cosine


def is_program(value):
    return isinstance(value, (ClosedJaxpr, Jaxpr))


def sizes(jaxpr):
    """Of all that a program computes."""
    for equation in jaxpr.eqns:
        yield from (math.prod(variable.aval.shape) for variable in equation.outvars)
        for inner in jax.tree.leaves(equation.params, is_leaf=is_program):
            if is_program(inner):
                yield from sizes(getattr(inner, "jaxpr", inner))


@both_kinds
def test_no_array_is_larger_than_the_largest_factor_or_activation(factors):
    for b, n in ((400, 3), (50, 140)):
        params, x = random(first=(40, 60), weights=(60, n), bias=(n,)), jnp.zeros((b, 40))
        tx = of_network(1.0, factors=factors, probe_examples=b)
        program = jax.make_jaxpr(functools.partial(tx.update, inputs=x))(params, tx.init(params), params)
        assert max(sizes(program.jaxpr)) <= max(b * 60, b * n, 60 * 60, n * n)


TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, qbound
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

rng = np.random.default_rng(0)
x, y = rng.normal(size=(16, 6)).astype(np.float32), rng.integers(4, size=16)
params = {"first": rng.normal(size=(6, 8)).astype(np.float32), "last": rng.normal(size=(8, 4)).astype(np.float32)}

def network(params, x):
    return jnp.tanh(x @ params["first"]) @ params["last"]

tx = qbound.layerwise_spfb(1.0, network, l2=1e-3, probe_examples=1000)

@jax.jit
def step(params, state, x, y):
    def loss(params):
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(network(params, x)) * jax.nn.one_hot(y, 4), axis=1))
    updates, state = tx.update(jax.grad(loss)(params), state, params, inputs=x)
    return jax.tree.map(jnp.add, params, updates), state

def run(x, y, params):
    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state, x, y)
    assert not state[0].layerwise_info.layerwise_nonfinite
    return params

expected = run(jnp.asarray(x), jnp.asarray(y), jax.tree.map(jnp.asarray, params))
for kind, spec in ((AxisType.Auto, P("d")), (AxisType.Explicit, P())):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        data = (jax.device_put(a, NamedSharding(mesh, P("d"))) for a in (x, y))
        moved = run(*data, jax.device_put(params, NamedSharding(mesh, spec)))
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(expected)):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-4)
"""


def test_update_is_the_same_with_a_batch_over_two_devices():
    result = processes.run("-c", TWO_DEVICES, quick=True, devices=2)
    assert result.returncode == 0, result.stderr
