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
from qbound import trees
from qbound.curvature import ModelCurvature
from qbound.fitting.step import forcing_tolerance
from qbound.linalg import cg
from qbound.models.linear import linearise

__all__ = ["NewtonRun", "newton_cg"]


class NewtonRun(NamedTuple):
    """What was found, and for every step the gradient norm after it and the passes over the data it took."""

    params: jax.Array
    steps: jax.Array
    gradient_norm: jax.Array
    first_norm: jax.Array
    norms: jax.Array
    passes: jax.Array


class _State(NamedTuple):
    params: jax.Array
    logits: jax.Array
    gradient: jax.Array
    norm: jax.Array
    steps: jax.Array
    norms: jax.Array
    passes: jax.Array


@functools.partial(jax.jit, static_argnames=("max_steps", "max_cg_steps"))
def newton_cg(params, inputs, labels, l2, tolerance, *, max_steps=100, max_cg_steps=200) -> NewtonRun:
    """Minimise the mean loss of a linear model and l2/2 |params|^2."""
    targets = jax.nn.one_hot(labels, params.shape[1], dtype=params.dtype)
    first_logits, linear_map = linearise(qbound.linear_logits, params, inputs)
    weights = jnp.full(len(inputs), 1 / len(inputs), params.dtype)

    def loss(logits):
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.sum(targets * logits, axis=1))

    def gradient(params, logits):
        return linear_map.transpose(jax.grad(loss)(logits)) + l2 * params

    def step(state: _State) -> _State:
        terms = jax.vmap(lambda h: qbound.second_order_expansion(h).curvature)(state.logits)
        hessian = ModelCurvature(terms, weights, linear_map)
        s, cg_steps = cg.iterate(
            lambda v: hessian.mv(v) + l2 * v,
            state.gradient,
            max_steps=max_cg_steps,
            tolerance=forcing_tolerance(state.norm, first_norm, tolerance, 0.5),
        )
        u = linear_map.forward(s)
        slope = trees.dot(state.gradient, s)

        def change(eta):
            penalty = l2 * (eta**2 / 2 * trees.dot(s, s) - eta * trees.dot(state.params, s))
            return loss(state.logits - eta * u) - loss(state.logits) + penalty

        eta = _armijo(change, slope, jnp.ones_like(slope), 8 * jnp.finfo(slope.dtype).eps * jnp.abs(loss(state.logits)))
        params, logits = state.params - eta * s, state.logits - eta * u
        new = gradient(params, logits)
        norm = jnp.sqrt(trees.dot(new, new))
        return _State(
            params,
            logits,
            new,
            norm,
            state.steps + 1,
            state.norms.at[state.steps].set(norm),
            state.passes.at[state.steps].set(cg_steps + 1.0),  # u is half a pass, the gradient the other
        )

    first = gradient(params, first_logits)
    first_norm = jnp.sqrt(trees.dot(first, first))
    zeros = jnp.zeros(max_steps, params.dtype)
    last = jax.lax.while_loop(
        lambda state: (state.norm > tolerance) & (state.steps < max_steps),
        step,
        _State(params, first_logits, first, first_norm, jnp.zeros((), jnp.int32), zeros, zeros),
    )
    return NewtonRun(last.params, last.steps, last.norm, first_norm, last.norms, last.passes)


def _armijo(change: Callable, slope, first, rounding):
    def too_long(eta):
        return (change(eta) > -1e-4 * eta * slope + rounding) & (eta > 1e-10)

    return jax.lax.while_loop(too_long, lambda eta: eta / 2, first)
