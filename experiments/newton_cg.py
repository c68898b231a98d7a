"""Plain Newton-CG with a line search, for comparison: nothing of it is certified.

The same operator, conjugate gradients and forcing as `qbound.mm`, on the same logits. The line search takes the first
of 1, 1/2, 1/4, ... that decreases the objective by 1e-4 of what its slope promises (Armijo's rule), on logits along the
ray, so that a trial costs no pass over the data.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import qbound
from qbound import cg, trees
from qbound.curvature import ModelCurvature
from qbound.models import linearise

__all__ = ["NewtonRun", "NewtonState", "advance", "newton_cg", "start"]

MAX_CG_STEPS = 200


class NewtonState(NamedTuple):
    """Where a run stands."""

    params: jax.Array
    logits: jax.Array
    gradient: jax.Array
    norm: jax.Array
    first_norm: jax.Array
    passes: jax.Array  # over the data, in all


class NewtonRun(NamedTuple):
    """What was found, and for every step the gradient norm after it and the passes over the data it took."""

    params: jax.Array
    steps: jax.Array
    gradient_norm: jax.Array
    first_norm: jax.Array
    norms: jax.Array
    passes: jax.Array


@jax.jit
def start(params, inputs, labels, l2) -> NewtonState:
    """Before the first step."""
    logits, linear_map = linearise(qbound.linear_logits, params, inputs)
    gradient = linear_map.transpose(jax.grad(_loss)(logits, labels)) + l2 * params
    norm = jnp.sqrt(trees.dot(gradient, gradient))
    return NewtonState(params, logits, gradient, norm, norm, jnp.ones_like(norm))


@functools.partial(jax.jit, static_argnames="max_cg_steps")
def advance(state: NewtonState, inputs, labels, l2, tolerance, *, max_cg_steps: int = MAX_CG_STEPS) -> NewtonState:
    """One step."""
    _, linear_map = linearise(qbound.linear_logits, state.params, inputs)
    weights = jnp.full(len(inputs), 1 / len(inputs), state.params.dtype)
    terms = jax.vmap(lambda h: qbound.second_order_expansion(h).curvature)(state.logits)
    hessian = ModelCurvature(terms, weights, linear_map)
    rough = jnp.minimum(0.5, jnp.sqrt(state.norm / state.first_norm))
    s, cg_steps = cg.iterate(
        lambda v: hessian.mv(v) + l2 * v,
        state.gradient,
        max_steps=max_cg_steps,
        tolerance=jnp.maximum(rough, tolerance / (2 * state.norm)),
    )
    u = linear_map.forward(s)
    slope = trees.dot(state.gradient, s)
    before = _loss(state.logits, labels)

    def change(eta):
        penalty = l2 * (eta**2 / 2 * trees.dot(s, s) - eta * trees.dot(state.params, s))
        return _loss(state.logits - eta * u, labels) - before + penalty

    eta = _armijo(change, slope, jnp.ones_like(slope), 8 * jnp.finfo(slope.dtype).eps * jnp.abs(before))
    params, logits = state.params - eta * s, state.logits - eta * u
    gradient = linear_map.transpose(jax.grad(_loss)(logits, labels)) + l2 * params
    norm = jnp.sqrt(trees.dot(gradient, gradient))
    # The displacement of logits is half a pass, the gradient the other.
    return NewtonState(params, logits, gradient, norm, state.first_norm, state.passes + cg_steps + 1.0)


@functools.partial(jax.jit, static_argnames=("max_steps", "max_cg_steps"))
def newton_cg(params, inputs, labels, l2, tolerance, *, max_steps=100, max_cg_steps=MAX_CG_STEPS) -> NewtonRun:
    """Minimise the mean loss of a linear model and l2/2 |params|^2."""

    def step(carry):
        steps, state, norms, passes = carry
        new = advance(state, inputs, labels, l2, tolerance, max_cg_steps=max_cg_steps)
        return steps + 1, new, norms.at[steps].set(new.norm), passes.at[steps].set(new.passes - state.passes)

    zeros = jnp.zeros(max_steps, params.dtype)
    steps, last, norms, passes = jax.lax.while_loop(
        lambda carry: (carry[1].norm > tolerance) & (carry[0] < max_steps),
        step,
        (jnp.zeros((), jnp.int32), start(params, inputs, labels, l2), zeros, zeros),
    )
    return NewtonRun(last.params, steps, last.norm, last.first_norm, norms, passes)


def _loss(logits, labels):
    targets = jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.sum(targets * logits, axis=1))


def _armijo(change: Callable, slope, first, rounding):
    def too_long(eta):
        return (change(eta) > -1e-4 * eta * slope + rounding) & (eta > 1e-10)

    return jax.lax.while_loop(too_long, lambda eta: eta / 2, first)
