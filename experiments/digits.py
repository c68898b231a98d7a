"""Scikit-learn's embedded digits as a softmax problem: data, objective, optimum. Nothing is downloaded."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qbound
from qbound.curvature.model import mean_curvature

__all__ = ["Digits", "cross_entropy", "digits", "objective", "optimum", "pooled_digits"]


class Digits(NamedTuple):
    """Images, pixels between 0 and 1, and what they show; split at random into training and test."""

    inputs: jax.Array
    labels: jax.Array
    test_inputs: jax.Array
    test_labels: jax.Array


def digits(train: int, seed: int) -> Digits:
    """1,797 images of 8 x 8 pixels in ten classes, `train` of them for training."""
    images, labels = _load()
    order = np.random.default_rng(seed).permutation(len(images))
    inputs, labels = jnp.asarray(images.reshape(-1, 64)[order], jnp.float32), jnp.asarray(labels[order])
    return Digits(inputs[:train], labels[:train], inputs[train:], labels[train:])


def pooled_digits() -> tuple[jax.Array, jax.Array]:
    """The digits 0, 1 and 2 averaged down to 4 x 4 pixels, with a 1 at the end: 51 parameters."""
    images, labels = _load()
    images, labels = images[labels < 3], labels[labels < 3]
    pooled = images.reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(-1, 16)
    return jnp.asarray(np.c_[pooled, np.ones(len(pooled))], jnp.float32), jnp.asarray(labels)


def _load():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8) / 16, labels


def cross_entropy(params, inputs, labels):
    """The mean loss of logistic regression."""
    logits = qbound.linear_logits(params, inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def objective(params, inputs, labels, l2):
    """The mean loss and its regulariser."""
    return cross_entropy(params, inputs, labels) + l2 / 2 * optax.tree.norm(params, squared=True)


def optimum(params, inputs, labels, l2):
    """The parameters that minimise the objective: by the bound, whose steps are safe, then by Newton's method."""

    @functools.partial(jax.jit, static_argnames="bound")
    def step(params, bound):
        grads = jax.grad(objective)(params, inputs, labels, l2)
        curvature = mean_curvature(qbound.linear_logits, params, inputs, jnp.ones(len(inputs)), bound=bound)
        return optax.apply_updates(params, jax.tree.map(jnp.negative, curvature.solve(grads, l2)))

    for bound, steps in ((qbound.log_partition_bound, 30), (qbound.second_order_expansion, 10)):
        for _ in range(steps):
            params = step(params, bound)
    return params
