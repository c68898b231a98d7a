"""Linear maps of batches: what is known about `linear_logits` agrees with its Jacobian."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import qbound
from qbound.curvature.model import mean_curvature
from qbound.models.base import axis_flags, full_weights, join, split
from qbound.models.linear import KroneckerMap, linearise

RNG = np.random.default_rng(0)
W, BIAS, X = RNG.normal(size=(4, 3)), RNG.normal(size=3), RNG.normal(size=(5, 4))
PARAMS = {
    "weights alone": jnp.asarray(W),
    "a pair": (jnp.asarray(W), jnp.asarray(BIAS)),
    "a dict, bias first": {"a bias": jnp.asarray(BIAS), "weights": jnp.asarray(W)},
}


def unknown(params, x):
    """The same function, but not the one whose structure is known."""
    return qbound.linear_logits(params, x)


@jax.jit
def everything(params, v, u, factors, g):
    """All operations of both maps."""
    results = []
    for logits_fn in (qbound.linear_logits, unknown):
        logits, batch_map = linearise(logits_fn, params, jnp.asarray(X))
        operations = (
            batch_map.forward(v),
            ravel_pytree(batch_map.transpose(u))[0],
            batch_map.rows(factors),
            batch_map.row_products(factors),
            batch_map.sandwich(factors),
        )
        results.append((logits, *operations))
    return results


@pytest.mark.parametrize("name", PARAMS)
def test_known_structure_equals_the_jacobian(name):
    params = PARAMS[name]
    v = jax.tree.map(lambda leaf: 2 * leaf + 1, params)
    known, general = everything(params, v, RNG.normal(size=(5, 3)), RNG.normal(size=(5, 2, 3)), v)
    for a, b in zip(known, general, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("x", [X[:1], 0 * X[:1]])
@pytest.mark.parametrize("name", PARAMS)
def test_closed_form_of_one_example_equals_the_dense_solve(name, x):
    params = PARAMS[name]
    bound = functools.partial(qbound.log_partition_bound, order="max_first")

    @jax.jit
    def solutions(params):
        curvature = mean_curvature(qbound.linear_logits, params, jnp.asarray(x), jnp.ones(1), bound=bound)
        assert isinstance(curvature.map, KroneckerMap)
        g = jax.tree.map(jnp.cos, params)
        return curvature.solve_by_rows(g, 0.1), curvature.solve_dense(g, 0.1)

    one, dense = solutions(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), one, dense)


def test_linear_logits_of_sequences_and_of_integers():
    params = PARAMS["a pair"]
    sequences = RNG.integers(5, size=(2, 6, 4))
    expected = sequences @ W + BIAS
    np.testing.assert_allclose(qbound.linear_logits(params, sequences), expected, rtol=1e-12)
    logits, batch_map = linearise(qbound.linear_logits, params, sequences)
    np.testing.assert_allclose(logits, expected.reshape(12, 3), rtol=1e-12)
    assert batch_map.shape() == (12, 3)


@pytest.mark.parametrize(
    ("params", "inputs", "words"),
    [
        (jnp.ones((4, 3)), jnp.ones((5, 3)), r"inputs: expected shape \(\.\.\., 4\) .*; got shape \(5, 3\)"),
        (jnp.ones((4, 3)), jnp.ones(4), r"inputs: expected shape .* with an axis of examples; got shape \(4,\)"),
        (
            jnp.ones(4),
            jnp.ones((5, 4)),
            r"params: expected weights of shape \(d, n\).*; got leaves of shapes \[\(4,\)\]",
        ),
        ((jnp.ones((4, 3)), jnp.ones(2)), jnp.ones((5, 4)), r"params: expected a bias of shape \(3,\).*; got \(2,\)"),
        ((jnp.ones((4, 3)), jnp.ones((4, 3))), jnp.ones((5, 4)), r"params: expected weights of shape \(d, n\)"),
    ],
)
@pytest.mark.usefixtures("without_type_checks")
def test_linear_logits_names_what_does_not_fit(params, inputs, words):
    with pytest.raises(ValueError, match=words):
        qbound.linear_logits(params, inputs)


def test_inputs_are_split_by_their_axes_and_joined_again():
    inputs = {"frozen": jnp.ones((7, 2)), "x": (jnp.zeros((5, 4)), None, jnp.arange(5))}
    axes = {"frozen": None, "x": 0}
    examples, shared = split("inputs", inputs, axes)
    assert [leaf.shape for leaf in examples] == [(5, 4), (5,)]
    assert [leaf.shape for leaf in shared] == [(7, 2)]
    again = join(jax.tree.structure(inputs), axis_flags("inputs", inputs, axes), examples, shared)
    jax.tree.map(np.testing.assert_array_equal, again, inputs)


@pytest.mark.parametrize(
    ("inputs", "axes", "words"),
    [
        ((jnp.ones((5, 2)), jnp.ones((4, 2))), 0, r"inputs: expected arrays with the same number of examples"),
        (jnp.ones(()), 0, r"inputs: expected arrays with the same number of examples.*; got shapes \[\(\)\]"),
        (jnp.ones((0, 3)), 0, r"inputs: expected arrays with the same number of examples, at least one"),
        (jnp.ones((5, 2)), None, r"inputs: expected at least one array with a leading axis of examples"),
        (jnp.ones((5, 2)), 1, r"inputs_axes: expected 0 .* or None .*; got 1"),
        (jnp.ones((5, 2)), (0, 0), r"inputs_axes: expected 0 or None for every leaf of inputs.*; got \(0, 0\)"),
    ],
)
def test_inputs_that_cannot_be_split_are_named(inputs, axes, words):
    with pytest.raises(ValueError, match=words):
        split("inputs", inputs, axes)


def test_weights_are_spread_over_positions():
    shape = (3, 2)
    np.testing.assert_array_equal(full_weights("w", None, shape, jnp.float64), np.ones(shape))
    np.testing.assert_array_equal(full_weights("w", np.array([True, False, True]), shape, jnp.float64)[:, 1], [1, 0, 1])
    np.testing.assert_array_equal(full_weights("w", np.arange(6).reshape(3, 2), shape, jnp.float64).ravel(), range(6))
    for wrong in (np.ones(2), np.ones((3, 3)), np.float64(1)):
        with pytest.raises(ValueError, match=r"w: expected shape \(3,\) or \(3, 2\), one for each example; got shape"):
            full_weights("w", wrong, shape, jnp.float64)
