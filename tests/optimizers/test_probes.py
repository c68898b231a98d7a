"""Probes are random, and what they are samples of is not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.flatten_util import ravel_pytree

import qbound
from qbound.families.softmax import Softmax
from qbound.optimizers.lengths import LEAST_ROWS
from qbound.optimizers.probes import label_curvature, probe, random_signs, row_weights, some_examples, spacing
from tests import reference, strategies
from tests.optimizers import problems

ORDERS = {
    "descending": reference.descending,
    "max_first": reference.max_first,
    "given": lambda logits: np.arange(len(logits)),
}
MANY = 20_000


@functools.cache
def network():
    p = problems.linear(b=6)
    return problems.network_params(), p.inputs


def tied(params, x):
    """A matrix that is used twice, the second time turned, at three positions of each example."""
    h = jnp.tanh(x @ params["first"])
    return jnp.stack([h @ params["first"].T, 2 * h @ params["first"].T, x @ params["square"]], axis=1)


def dense_curvature(logits_fn, params, x, weights, order, exact=False):
    """sum_j w_j J_j'M_j J_j by matrices, for all parameters as one vector."""
    vector, unravel = ravel_pytree(params)

    def rows(v):
        logits = logits_fn(unravel(v), x)
        return logits.reshape(-1, logits.shape[-1])

    logits, jacobian = np.asarray(rows(vector)), np.asarray(jax.jacobian(rows)(vector))
    total = 0
    for w, h, j in zip(weights, logits, jacobian, strict=True):
        p = reference.softmax(h)
        m = np.diag(p) - np.outer(p, p) if exact else reference.logit_bound(h, ORDERS[order](h))[2]
        total = total + w * j.T @ m @ j
    return total


@functools.partial(jax.jit, static_argnames=("logits_fn", "order", "exact", "many"))
def moments(logits_fn, params, x, weights, order, exact=False, many=MANY):
    """The mean outer product of probes with themselves."""
    curvature = label_curvature(Softmax(order), exact)

    def one(key):
        g, _ = ravel_pytree(probe(logits_fn, params, x, weights, curvature, key))
        return g

    g = jax.vmap(one)(jax.random.split(jax.random.key(0), many))
    return g.T @ g / many


@pytest.mark.parametrize("order", ORDERS)
@given(logits=strategies.logits())
def test_probe_of_a_bound_equals_the_reference(order, logits):
    signs = np.random.default_rng(len(logits)).choice([-1.0, 1.0], size=len(logits))
    bound = qbound.log_partition_bound(jnp.asarray(logits), order=order)
    expected = reference.probe(logits, signs, ORDERS[order](logits))
    np.testing.assert_allclose(bound.curvature.probe(jnp.asarray(signs)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_probe_takes_memory_that_grows_with_the_labels_alone(order):
    n = 50_000

    def run(h, signs):
        return qbound.log_partition_bound(h, order=order).curvature.probe(signs)

    shape = jax.ShapeDtypeStruct((n,), jnp.float32)
    memory = jax.jit(run).lower(shape, shape).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 200 * n


@pytest.mark.parametrize(
    ("order", "exact"), [("descending", False), ("max_first", False), ("given", False), ("max_first", True)]
)
def test_mean_over_many_probes_is_the_curvature(order, exact):
    params, x = network()
    weights = jnp.asarray([0.1, 0.4, 0.0, 0.2, 0.2, 0.1])
    found = moments(problems.network, params, x, weights, order, exact)
    expected = dense_curvature(problems.network, params, x, weights, order, exact)
    # Entries of a mean of MANY products have errors of about their size over sqrt(MANY).
    assert np.abs(found - expected).max() < 6 / np.sqrt(MANY) * np.diag(expected).max()
    np.testing.assert_allclose(np.trace(found), np.trace(expected), rtol=0.05)


def test_mean_over_many_probes_is_the_curvature_of_tied_weights_and_of_positions():
    rng = np.random.default_rng(0)
    params = {"first": jnp.asarray(rng.normal(size=(4, 2))), "square": jnp.asarray(rng.normal(size=(4, 4)))}
    x = jnp.asarray(rng.normal(size=(2, 4)))
    weights = row_weights(tied, params, x, jnp.asarray([1.0, 3.0]))
    np.testing.assert_array_equal(weights, np.repeat([[1], [3]], 3, axis=1))
    weights = weights.reshape(-1) / 12
    found = moments(tied, params, x, weights, "max_first")
    expected = dense_curvature(tied, params, x, weights, "max_first")
    assert np.abs(found - expected).max() < 6 / np.sqrt(MANY) * np.diag(expected).max()


def test_an_example_without_weight_may_be_infinite():
    params, x = network()
    weights = jnp.asarray([0.5, 0.5, 0.0, 0.0, 0.0, 0.0])
    curvature, key = label_curvature(Softmax()), jax.random.key(3)

    def model(params, x):
        return problems.affine({"weights": params["first"][:, :3], "bias": params["bias"]}, x)

    expected = probe(model, params, x, weights, curvature, key)
    found = probe(model, params, x.at[2].set(1e300), weights, curvature, key)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("n", [1, 3, 32, 33, 100])
def test_signs_are_even_and_independent(n):
    signs = np.asarray(random_signs(jax.random.key(n), jnp.zeros((4000, n))))
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert np.abs(signs.mean(0)).max() < 5 / np.sqrt(4000)
    products = signs.T @ signs / 4000 - np.eye(n)
    assert np.abs(products).max() < 6 / np.sqrt(4000)


# The trace.


@pytest.mark.parametrize("order", ORDERS)
def test_trace_is_unbiased(order):
    params, x = network()
    found = qbound.curvature_trace(problems.network, params, x, jax.random.key(0), probes=4000, order=order)
    expected = np.trace(dense_curvature(problems.network, params, x, np.full(6, 1 / 6), order))
    np.testing.assert_allclose(found, expected, rtol=0.03)


def test_trace_takes_weights():
    params, x = network()
    weights, key = jnp.asarray([1.0, 0, 2, 0, 0, 1]), jax.random.key(0)
    found = qbound.curvature_trace(problems.network, params, x, key, probes=4000, example_weights=weights)
    expected = np.trace(dense_curvature(problems.network, params, x, weights / 4, "max_first"))
    np.testing.assert_allclose(found, expected, rtol=0.03)


def test_derivative_of_the_trace_equals_differences():
    params, x = network()
    vector, unravel = ravel_pytree(params)

    @jax.jit
    def trace(v):
        return qbound.curvature_trace(problems.network, unravel(v), x, jax.random.key(0), probes=3)

    derivative = jax.jit(jax.grad(trace))(vector)
    along = jnp.asarray(np.random.default_rng(0).normal(size=vector.shape))
    difference = (trace(vector + 1e-5 * along) - trace(vector - 1e-5 * along)) / 2e-5
    assert abs(float(difference)) > 1e-3
    np.testing.assert_allclose(derivative @ along, difference, rtol=1e-6)


def test_trace_in_a_loss_makes_it_smaller():
    params, x = network()

    @jax.jit
    def step(params, key):
        grads = jax.grad(qbound.curvature_trace, argnums=1)(problems.network, params, x, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    start = qbound.curvature_trace(problems.network, params, x, jax.random.key(1), probes=100)
    for i in range(30):
        params = step(params, jax.random.key(i))
    assert qbound.curvature_trace(problems.network, params, x, jax.random.key(1), probes=100) < 0.7 * start


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"probes": 0}, ValueError, "probes: expected an integer > 0; got 0"),
        ({"order": "ascending"}, ValueError, "order: expected one of"),
        ({"logits_fn": 3}, TypeError, "logits_fn: expected a function; got 3"),
        ({"logits_fn": lambda p, x: (x, p)}, ValueError, "logits_fn: expected it to return float logits"),
        ({"params": {"a": jnp.arange(3)}}, TypeError, "params: expected float arrays; got one of dtype int"),
        ({"example_weights": jnp.ones(5)}, ValueError, r"example_weights: expected shape \(6,\)"),
    ],
)
def test_wrong_arguments_of_the_trace_are_named(change, error, words):
    params, x = network()
    arguments = {"logits_fn": problems.network, "params": params, "inputs": x, "key": jax.random.key(0)}
    with pytest.raises(error, match=words):
        qbound.curvature_trace(**{**arguments, **change})


# A part of a batch.


@pytest.mark.parametrize(
    ("examples", "rows", "wanted", "expected"),
    [
        (500, 500, None, 8),
        (1000, 1000, None, 8),
        (100, 100, None, 1),
        (16_000, 16_000, None, 8),
        (32, 2048, None, 8),
        (256, 16_384, None, 8),
        (2, 1_000_000, None, 2),
        (500, 500, 500, 1),
        (500, 500, 100, 5),
        (500, 500, 1000, 1),
    ],
)
def test_how_many_examples_are_probed(examples, rows, wanted, expected):
    assert spacing(examples, rows, wanted) == expected


def test_lengths_are_of_more_rows_than_probes():
    assert [spacing(rows, rows, None, LEAST_ROWS) for rows in (200, 500, 1000, 2000, 16_000)] == [1, 2, 4, 8, 8]


def test_every_example_has_its_turn_and_shared_arrays_are_handed_through():
    inputs = {"x": jnp.arange(20.0), "table": jnp.arange(3.0), "training": True}
    axes, seen = {"x": 0, "table": None, "training": None}, []
    for turn in range(5):
        part, weights = some_examples(inputs, 10 * inputs["x"], False, axes, 4, jnp.asarray(turn))
        assert part["training"] is True
        np.testing.assert_array_equal(part["table"], inputs["table"])
        np.testing.assert_array_equal(weights, 10 * part["x"])
        seen.append(np.asarray(part["x"]))
    assert [len(x) for x in seen] == [4] * 5
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(20))


@pytest.mark.parametrize("counted", [1, 3, 7, 20])
def test_examples_without_weight_are_passed_over(counted):
    given = np.zeros((20, 2))
    given[np.random.default_rng(0).permutation(20)[:counted], 1] = 1.0
    seen = []
    for turn in range(10):
        part, weights = some_examples(jnp.arange(20.0), jnp.asarray(given), True, 0, 4, jnp.asarray(turn))
        np.testing.assert_array_equal(weights, given[np.asarray(part).astype(int)])
        assert (weights.sum(1) == 1).all()
        seen.append(part)
    assert len(np.unique(seen)) == counted
