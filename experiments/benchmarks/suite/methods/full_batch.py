"""Full-batch methods in JAX, each a program of one step or a few: optax's L-BFGS, Böhning's bound, and ours."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import qbound
from experiments.benchmarks.suite.problem import Checkpoint, Problem, Ready
from experiments.train import Rows, loss

__all__ = ["bohning", "lbfgs", "mm"]

# Programs of several steps where one takes less than a millisecond or so.
SMALL, FEW_STEPS = 3e8, 5


def _iterate(
    problem: Problem,
    start: Callable[[Any, Any], tuple[Any, Any]],
    step: Callable[[Any, Any, Any], tuple[Any, Any, Any]],
) -> Iterator[Ready | Checkpoint]:
    """Checkpoints of a method; those inside a program of several steps are at equal distances in time.

    Args:
      problem: to be solved.
      start: from data to a state and the passes it took, compiled; on the clock.
      step: from a state and data to a state, the passes it took and the parameters after every step (k, d, n). The
        method ends when the last of them stay where they are.
    """
    inputs, labels = jnp.asarray(problem.inputs), jnp.asarray(problem.labels)
    began = time.perf_counter()
    state, _ = start(inputs, labels)
    # Twice: what a step gives may be of other types than what it was given at first, and is then another program.
    for _ in range(2):
        state, *_ = jax.block_until_ready(step(state, inputs, labels))
    yield Ready(time.perf_counter() - began)
    before = jnp.zeros((problem.inputs.shape[1], problem.classes))
    yield Checkpoint(0.0, 0.0, before)
    began = time.perf_counter()
    state, more = jax.block_until_ready(start(inputs, labels))
    seconds, passes = time.perf_counter() - began, float(more)
    while True:
        began = time.perf_counter()
        state, more, found = jax.block_until_ready(step(state, inputs, labels))
        took = time.perf_counter() - began
        for i, params in enumerate(found):
            share = (i + 1) / len(found)
            yield Checkpoint(seconds + share * took, passes + share * float(more), params)
        seconds, passes = seconds + took, passes + float(more)
        if bool(jnp.all(found[-1] == before)):
            return
        before = found[-1]


def _objective(params, inputs, labels, l2):
    return loss(params, Rows(inputs, labels)) + l2 / 2 * jnp.sum(params**2)


def _steps(problem: Problem) -> int:
    return FEW_STEPS if problem.inputs.size * problem.classes < SMALL else 1


class _Lbfgs(NamedTuple):
    params: Any
    state: Any


def lbfgs(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """optax.lbfgs with its line search, and a `memory` of as many steps."""
    del seed
    d, n, steps = problem.inputs.shape[1], problem.classes, _steps(problem)
    l2 = jnp.float32(problem.l2)

    @jax.jit
    def start(inputs, labels):
        params = jnp.zeros((d, n), jnp.float32)
        return _Lbfgs(params, optax.lbfgs(memory_size=setting["memory"]).init(params)), 0.0

    step = functools.partial(_lbfgs_steps, l2=l2, memory=setting["memory"], steps=steps)
    return _iterate(problem, start, step)


@functools.partial(jax.jit, static_argnames=("memory", "steps"))
def _lbfgs_steps(state: _Lbfgs, inputs, labels, l2, *, memory: int, steps: int):
    transform = optax.lbfgs(memory_size=memory)

    def value_fn(params):
        return _objective(params, inputs, labels, l2)

    def step(state: _Lbfgs, _):
        value, grad = optax.value_and_grad_from_state(value_fn)(state.params, state=state.state)
        updates, new = transform.update(grad, state.state, state.params, value=value, grad=grad, value_fn=value_fn)
        params = optax.apply_updates(state.params, updates)
        passes = optax.tree.get(new, "info").num_linesearch_steps.astype(jnp.float32)
        return _Lbfgs(params, new), (passes, params)

    state, (passes, params) = jax.lax.scan(step, state, None, length=steps)
    return state, jnp.sum(passes), params


def mm(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """qbound.mm, step by step; with a `curvature` of "hessian" that is Newton-CG, with certificates."""
    del seed
    params = jnp.zeros((problem.inputs.shape[1], problem.classes), jnp.float32)
    l2, curvature = jnp.float32(problem.l2), setting.get("curvature", "auto")
    return _iterate(
        problem,
        lambda inputs, labels: (_mm_start(params, inputs, labels, l2), 1.0),
        lambda state, inputs, labels: _mm_step(state, inputs, labels, l2, curvature=curvature),
    )


@jax.jit
def _mm_start(params, inputs, labels, l2):
    return qbound.mm.init(qbound.linear_logits, params, inputs, labels, l2=l2)


@functools.partial(jax.jit, static_argnames="curvature")
def _mm_step(state, inputs, labels, l2, *, curvature):
    state, info = qbound.mm.step(qbound.linear_logits, state, inputs, labels, l2=l2, curvature=curvature)
    return state, info.passes, state.params[None]


class _Nesterov(NamedTuple):
    params: Any
    before: Any
    momentum: Any  # t of the sequence t <- (1 + sqrt(1 + 4 t^2))/2
    factor: Any


def bohning(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """Böhning's bound, factorised once, with Nesterov's acceleration and restarts by the gradient.

    The curvature of every example is at most 1/2 (I - 11'/n) (x) x x', so on what sums to 0 over labels one matrix of
    the size of inputs serves for all steps: the method of QMME (arXiv 2507.04247).
    """
    del setting, seed
    params = jnp.zeros((problem.inputs.shape[1], problem.classes), jnp.float32)
    l2, steps = jnp.float32(problem.l2), _steps(problem)
    return _iterate(
        problem,
        lambda inputs, labels: (_bohning_start(params, inputs, l2), 1.0),
        lambda state, inputs, labels: _bohning_steps(state, inputs, labels, l2, steps=steps),
    )


@jax.jit
def _bohning_start(params, inputs, l2):
    moments = inputs.T @ inputs / len(inputs)
    factor = jnp.linalg.cholesky(moments / 2 + l2 * jnp.eye(len(moments)))
    return _Nesterov(params, params, jnp.ones(()), factor)


@functools.partial(jax.jit, static_argnames="steps")
def _bohning_steps(state: _Nesterov, inputs, labels, l2, *, steps: int):
    def step(state: _Nesterov, _):
        t = (1 + jnp.sqrt(1 + 4 * state.momentum**2)) / 2
        ahead = state.params + (state.momentum - 1) / t * (state.params - state.before)
        gradient = jax.grad(_objective)(ahead, inputs, labels, l2)
        params = ahead - jax.scipy.linalg.cho_solve((state.factor, True), gradient)
        # Momentum that points uphill has done its work (O'Donoghue and Candès, 2015).
        uphill = jnp.sum(gradient * (params - state.params)) > 0
        return _Nesterov(params, state.params, jnp.where(uphill, 1.0, t), state.factor), params

    state, params = jax.lax.scan(step, state, None, length=steps)
    return state, jnp.float32(steps), params
