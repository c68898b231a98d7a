"""Small problems for the transforms, and one jitted loop for all of them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from tests import reference


class Problem(NamedTuple):
    params: dict
    inputs: jax.Array
    labels: jax.Array


def linear(b=12, d=4, n=3, seed=0, dtype=jnp.float64, scale=1.0):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(b, d)) * scale
    params = {"bias": rng.normal(size=n), "weights": 0.5 * rng.normal(size=(d, n))}
    return Problem(
        jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params),
        jnp.asarray(inputs, dtype),
        jnp.asarray(rng.integers(n, size=b)),
    )


def affine(params, x):
    """The same model as `qbound.linear_logits`, but nothing is known about it."""
    return x @ params["weights"] + params["bias"][None, :]


def affine_curvature(params, x):
    """The mean curvature of `affine` on a batch, as a matrix, and its logits."""
    vector, unravel = ravel_pytree(params)
    jacobian = np.asarray(jax.jit(jax.jacobian(lambda v: affine(unravel(v), x)))(vector))
    logits = np.asarray(affine(params, x))
    terms = [
        j.T @ reference.logit_bound(h, reference.max_first(h))[2] @ j for j, h in zip(jacobian, logits, strict=True)
    ]
    return np.mean(terms, axis=0), logits


def network(params, x):
    return jnp.tanh(x @ params["first"]) @ params["weights"] + params["bias"][None, :]


def network_params(d=4, hidden=5, n=3, seed=1, dtype=jnp.float64):
    rng = np.random.default_rng(seed)
    shapes = {"first": (d, hidden), "weights": (hidden, n), "bias": (n,)}
    return {name: jnp.asarray(rng.normal(size=shape) / 2, dtype) for name, shape in shapes.items()}


def paper_schedule(eta):
    """eta_0/t, for t from 1."""
    return lambda step: eta / (step.astype(jnp.float64) + 1)


def flat(tree):
    """All entries of a tree, in NumPy: JAX would compile a program for its shapes."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def loss(logits_fn, params, inputs, labels, weights=None):
    """The mean cross-entropy, weighted if there are weights."""
    logits = logits_fn(params, inputs)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(each) if weights is None else jnp.sum(weights * each) / jnp.sum(weights)


@functools.partial(jax.jit, static_argnames="logits_fn")
def gradient(logits_fn, params, inputs, labels, weights=None):
    """That of `loss`, in the parameters."""
    return jax.grad(loss, argnums=1)(logits_fn, params, inputs, labels, weights)


@functools.partial(jax.jit, static_argnames=("tx", "logits_fn"))
def first_update(tx, logits_fn, params, inputs, labels, weights=None):
    """The first update of a run, and the state after it."""
    grads = gradient(logits_fn, params, inputs, labels, weights)
    extra = {} if weights is None else {"example_weights": weights}
    return tx.update(grads, tx.init(params), params, inputs=inputs, **extra)


@functools.partial(jax.jit, static_argnames=("tx", "logits_fn"))
def train(tx, logits_fn, params, inputs, labels):
    """One pass over batches (t, b, ...): every iterate, and the last state."""

    def step(carry, batch):
        params, state = carry
        x, y = batch
        value, grads = jax.value_and_grad(loss, argnums=1)(logits_fn, params, x, y)
        updates, state = tx.update(grads, state, params, inputs=x, value=value)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    (_, state), iterates = jax.lax.scan(step, (params, tx.init(params)), (inputs, labels))
    return iterates, state
