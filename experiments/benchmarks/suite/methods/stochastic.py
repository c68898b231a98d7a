"""Stochastic methods as optax transforms, peers and ours in the same loop."""

import functools
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks.suite.problem import Checkpoint, Problem, Ready, batch_size, blocks
from experiments.methods import Method, Numbers, first_state, numbers
from experiments.methods import optimizer as make_optimizer
from experiments.train import Rows, loss

__all__ = ["run"]

CHUNK = 10
METHODS = {
    "sgd": Method("sgd"),
    "momentum": Method("momentum"),
    "adam": Method("adam"),
    "spfb": Method("spfb"),
    "lspfb_paper": Method("lspfb", rank=10, construction="paper"),
    "lspfb_tight": Method("lspfb", rank=10),
    "kspfb": Method("kspfb"),
}


def run(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """By the method `name`, with a learning rate that falls from `rate` to 0 as a cosine, over this many `epochs`.

    With `relative`, the rate is in units of 1/L, with L a bound of the curvature.
    """
    method = METHODS[setting["name"]]
    b, d = problem.inputs.shape
    size = batch_size(b)
    per_epoch = b // size
    chunk = min(CHUNK, per_epoch)
    steps = max(1, round(setting["epochs"] * per_epoch / chunk)) * chunk
    inputs, labels = jnp.asarray(problem.inputs), jnp.asarray(problem.labels)
    rate = setting["rate"] / (float(largest_curvature(inputs)) if setting.get("relative") else 1.0)
    values = numbers(rate, "cosine", steps, problem.l2, setting.get("damping", 0.0))
    program = functools.partial(_steps, inputs=inputs, labels=labels, setting=values, method=method, size=size)

    def start():
        params = jnp.zeros((d, problem.classes), jnp.float32)
        return params, first_state(method, values, params)

    began = time.perf_counter()
    jax.block_until_ready(program(*start(), starts=jnp.zeros(chunk, jnp.int32)))
    compile_seconds = time.perf_counter() - began
    yield Ready(compile_seconds)
    params, state = jax.block_until_ready(start())
    yield Checkpoint(0.0, 0.0, params)
    seconds, passes, starts = 0.0, 0.0, itertools.chain.from_iterable(blocks(b, seed))
    for _ in range(steps // chunk):
        some = np.fromiter(itertools.islice(starts, chunk), np.int32, chunk)
        began = time.perf_counter()
        params, state = jax.block_until_ready(program(params, state, starts=some))
        seconds += time.perf_counter() - began
        passes += chunk * size / b * _passes(method, state)
        yield Checkpoint(seconds, passes, params)


# The state is given away, as in any good loop: curvature is not copied between calls.
@functools.partial(jax.jit, static_argnames=("method", "size"), donate_argnames="state")
def _steps(params, state, inputs, labels, starts, setting: Numbers, *, method: Method, size: int):
    transform = make_optimizer(method, setting, inputs.shape[1])

    def step(carry, start):
        params, state = carry
        x, y = (jax.lax.dynamic_slice_in_dim(rows, start, size) for rows in (inputs, labels))
        grads = jax.grad(loss)(params, Rows(x, y))
        updates, state = transform.update(grads, state, params, inputs=x)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), starts)[0]


def _passes(method: Method, state: Any) -> float:
    """Of a step over its batch: one for the gradient, and one for each iteration of CG, as many as in the last step."""
    return 1.0 + (float(optax.tree.get(state, "spfb_steps")) if method.name == "spfb" else 0.0)


@jax.jit
def largest_curvature(inputs):
    """The largest eigenvalue of X'X/b, halved: no Hessian of the loss has a larger one."""

    def multiply(_, v):
        w = inputs.T @ (inputs @ v) / len(inputs)
        return w / jnp.linalg.norm(w)

    v = jax.lax.fori_loop(0, 20, multiply, jnp.ones(inputs.shape[1], inputs.dtype))
    return jnp.linalg.norm(inputs.T @ (inputs @ v) / len(inputs)) / (2 * jnp.linalg.norm(v))
