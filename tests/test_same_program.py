"""A model is known by what it computes, and not by its name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qbound
from qbound.models.linear import KroneckerMap, is_linear_logits, linearise, same_program

linear = qbound.linear_logits
D, N = 6, 3
WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=(D, N)))
INPUTS = jnp.asarray(np.random.default_rng(1).normal(size=(8, D)))
PARAMS = {
    "weights": WEIGHTS,
    "bias": (WEIGHTS, jnp.ones(N)),
    "many labels": jnp.ones((D, 2 * D)),
    "float16": WEIGHTS.astype(jnp.float16),
}
SAME = {
    "jit": jax.jit(linear),
    "lambda": lambda params, x: linear(params, x),
    "partial": functools.partial(linear),
    "jit of a lambda": jax.jit(lambda params, x: linear(params, x)),
    "jit inside": lambda params, x: jax.jit(linear)(params, inputs=x),
    "checkpoint": jax.checkpoint(linear),
    "one that names inputs": lambda params, data: linear(inputs=data, params=params),
}
OTHER = {
    "a shift": lambda params, x: linear(params, x) + 1.0,
    "a constant array": lambda params, x: linear(params, x) + jnp.arange(1.0)[None, :],
    "a temperature": lambda params, x: 2.0 * linear(params, x),
    "features": lambda params, x: linear(params, jnp.tanh(x)),
    "other weights": lambda params, x: linear(jax.tree.map(lambda leaf: jnp.ones_like(leaf), params), x),
    "weights that are constants": lambda params, x: linear(jax.lax.stop_gradient(params), x),
    "rows turned round": lambda params, x: linear(params, x)[::-1],
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("model", SAME.values(), ids=SAME)
def test_wrapped_model_is_known(model, params):
    assert is_linear_logits(model, params, INPUTS)
    assert jax.jit(lambda params, x: jnp.array(is_linear_logits(model, params, x)))(params, INPUTS)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("model", OTHER.values(), ids=OTHER)
def test_model_of_another_kind_is_not(model, params):
    assert not is_linear_logits(model, params, INPUTS)


def test_parameters_and_inputs_of_another_kind_are_not_those_of_a_linear_model():
    def network(params, x):
        return jnp.tanh(x["a"] @ params[0]) @ params[1]

    assert not is_linear_logits(network, [jnp.ones((D, 4)), jnp.ones((4, N))], {"a": INPUTS})
    assert not is_linear_logits(lambda params, x: x @ params.T, jnp.ones((D, D)), INPUTS)
    assert not is_linear_logits(lambda params, x: x["a"] @ params, WEIGHTS, {"a": INPUTS})
    assert not is_linear_logits(lambda params, x: (x @ params[0])[:, None] * jnp.ones(2), [jnp.ones(D)], INPUTS)


def test_structure_is_kept():
    for model in SAME.values():
        assert isinstance(linearise(model, WEIGHTS, INPUTS)[1], KroneckerMap)
    assert not isinstance(linearise(OTHER["a shift"], WEIGHTS, INPUTS)[1], KroneckerMap)


def test_full_batches_have_the_same_run():
    """Bit by bit: `linear_logits` is protected against the rounding of what all labels share."""
    labels = jnp.argmax(INPUTS[:, :N], axis=1)

    def run(model):
        inputs, zero = (a.astype(jnp.float32) for a in (INPUTS, 1e3 + 0 * WEIGHTS))
        return qbound.mm.run(model, zero, inputs, labels, l2=1e-3, throw=False)[0]

    expected = np.asarray(run(linear))
    for name in ("jit", "lambda", "partial"):
        np.testing.assert_array_equal(run(SAME[name]), expected)


@pytest.mark.parametrize("make", [qbound.spfb, functools.partial(qbound.lspfb, rank=2), qbound.kspfb])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_transforms_take_the_same_step(make, dtype):
    """Square weights: only the model tells which axis is that of labels."""
    params, inputs = jnp.eye(N, dtype=dtype), INPUTS[:, :N].astype(dtype)

    def update(model):
        tx = make(1.0, model, l2=1e-2)
        return jax.jit(tx.update)(0.1 * params, tx.init(params), params, inputs=inputs)[0]

    found, expected = (np.asarray(update(model), np.float32) for model in (SAME["lambda"], linear))
    np.testing.assert_array_equal(found, expected)


def test_programs_differ_by_types_arguments_numbers_and_structures():
    x, y = jnp.ones(3), jnp.zeros(3)
    assert same_program(lambda x, y: x + 2.0 * y, jax.jit(lambda x, y: x + 2.0 * y), x, y)
    for other in (
        lambda x, y: x + 3.0 * y,
        lambda x, y: y + 2.0 * x,
        lambda x, y: x - 2.0 * y,
        lambda x, y: (x + 2.0 * y,),
        lambda x, y: (x + 2.0 * y).astype(jnp.float32),
        lambda x, y: y,
        lambda x, y: x + 2.0 * y + jnp.sum(x) * 0,
    ):
        assert not same_program(lambda x, y: x + 2.0 * y, other, x, y)
    several = np.arange(3.0)
    assert not same_program(lambda x, y: x + several, lambda x, y: x + several, x, y), "arrays are not compared"


def test_constants_without_a_number_are_no_error():
    """A value that is being differentiated, and a random key: both may stand in a model's closure."""

    def looks_linear(scale):
        assert not is_linear_logits(lambda params, x: linear(params, x) * scale, WEIGHTS, INPUTS)
        return scale

    for transformation in (lambda f: f, jax.grad, jax.jit):
        transformation(looks_linear)(2.0)
    key = jax.random.key(0)
    assert not is_linear_logits(
        lambda params, x: linear(params, x) + jax.random.normal(key, (len(x), N)), WEIGHTS, INPUTS
    )
