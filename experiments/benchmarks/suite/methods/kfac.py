"""K-FAC by its authors (Martens and Grosse 2015), https://github.com/google-deepmind/kfac-jax."""

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import kfac_jax
import numpy as np

from experiments.benchmarks.suite.problem import Checkpoint, Problem, Ready, batch_size, blocks

__all__ = ["kfac"]

_STEPS = 10  # Between checkpoints.

_DAMPING_INTERVAL = 5  # Steps after which an adaptive damping is looked at, the library's default.

Array = jax.Array
Batch = tuple[Array, Array]


def kfac(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """K-FAC on batches, one dense layer without a bias.

    Settings: `rate`, `epochs`, `momentum` and `damping`, or `adaptive`, where the library finds all but `epochs` and
    the first damping from its quadratic model; `curvature_every`, `inverse_every` (steps), `burnin` (batches for the
    first curvature), `estimation` (the library's mode). X'X takes most of a step, and the library's defaults, to update
    it in every step and after 10 batches of burning in, took twice the time for the same objective.
    """
    optimizer = _optimizer(problem, setting)
    started = time.perf_counter()
    # Programs differ between the steps that update curvature or damping and those that do not: try them all.
    for _ in _run(problem, setting, seed, optimizer, math.lcm(_curvature_every(setting), _DAMPING_INTERVAL)):
        pass
    yield Ready(time.perf_counter() - started)
    yield from _run(problem, setting, seed, optimizer, _steps(problem, setting))


def _run(
    problem: Problem, setting: Mapping[str, Any], seed: int, optimizer: kfac_jax.Optimizer, limit: float
) -> Iterator[Checkpoint]:
    """Checkpoints from zero on."""
    inputs, labels = jnp.asarray(problem.inputs), jnp.asarray(problem.labels)
    batches = _batches(inputs, labels, seed)
    params = jnp.zeros((problem.inputs.shape[1], problem.classes), jnp.float32)
    key = jax.random.key(seed)
    state = optimizer.init(params, key, _slice(inputs, labels, 0))
    jax.block_until_ready(state)
    yield Checkpoint(0.0, 0.0, np.zeros(params.shape, np.float32))
    seconds, done = 0.0, 0
    while done < limit:
        steps = int(min(_STEPS, limit - done))
        started = time.perf_counter()
        for step in range(done, done + steps):
            numbers = _numbers(problem, setting, step)
            key, step_key = jax.random.split(key)
            params, state, _ = optimizer.step(
                params, state, step_key, data_iterator=batches, global_step_int=step, **numbers
            )
        jax.block_until_ready((params, state))
        seconds += time.perf_counter() - started
        done += steps
        # A copy, because the next step is given this memory to write to.
        yield Checkpoint(seconds, _passes(problem, setting, done), np.array(params))


def _optimizer(problem: Problem, setting: Mapping[str, Any]) -> kfac_jax.Optimizer:
    def objective(params: Array, batch: Batch) -> Array:
        inputs, labels = batch
        logits = inputs @ params
        kfac_jax.register_softmax_cross_entropy_loss(logits, labels)
        losses = jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return jnp.mean(losses) + problem.l2 / 2 * jnp.vdot(params, params)

    adaptive = setting.get("adaptive", False)
    return kfac_jax.Optimizer(
        value_and_grad_func=jax.value_and_grad(objective),
        l2_reg=problem.l2,
        use_adaptive_learning_rate=adaptive,
        use_adaptive_momentum=adaptive,
        use_adaptive_damping=adaptive,
        initial_damping=_damping(setting) if adaptive else None,
        damping_adaptation_interval=_DAMPING_INTERVAL,
        num_burnin_steps=_burnin(setting),
        curvature_update_period=_curvature_every(setting),
        inverse_update_period=setting.get("inverse_every", max(5, _curvature_every(setting))),
        estimation_mode=setting.get("estimation"),
    )


def _numbers(problem: Problem, setting: Mapping[str, Any], step: int) -> dict[str, Array]:
    """Rate, momentum and damping of a step, unless the library finds them."""
    if setting.get("adaptive", False):
        return {}
    progress = step / _steps(problem, setting)
    numbers = {
        "learning_rate": setting.get("rate", 0.1) * (1 + math.cos(math.pi * progress)) / 2,
        "momentum": setting.get("momentum", 0.9),
        "damping": _damping(setting),
    }
    return {name: jnp.asarray(number, jnp.float32) for name, number in numbers.items()}


def _passes(problem: Problem, setting: Mapping[str, Any], steps: int) -> float:
    """A gradient is one on a batch, and X'X half a one, though it has d columns and a gradient n.

    Burning in is a forward product and X'X. The quadratic model is a forward product with each of two directions, and
    an adaptive damping takes one more for the loss at the new point.
    """
    passes = steps + 0.5 * math.ceil(steps / _curvature_every(setting)) + _burnin(setting)
    if setting.get("adaptive", False):
        passes += steps + 0.5 * (steps // _DAMPING_INTERVAL)
    examples = len(problem.labels)
    return passes * batch_size(examples) / examples


def _steps(problem: Problem, setting: Mapping[str, Any]) -> float:
    """Steps of the whole schedule, without end if there is none."""
    examples = len(problem.labels)
    return round(setting["epochs"] * (examples // batch_size(examples))) if "epochs" in setting else math.inf


def _damping(setting: Mapping[str, Any]) -> float:
    return setting.get("damping", 1e-3)


def _burnin(setting: Mapping[str, Any]) -> int:
    return setting.get("burnin", 2)


def _curvature_every(setting: Mapping[str, Any]) -> int:
    return setting.get("curvature_every", 10)


def _batches(inputs: Array, labels: Array, seed: int) -> Iterator[Batch]:
    for start in itertools.chain.from_iterable(blocks(len(labels), seed)):
        yield _slice(inputs, labels, start)


@jax.jit
def _slice(inputs: Array, labels: Array, start: int) -> Batch:
    size = batch_size(len(labels))
    return tuple(jax.lax.dynamic_slice_in_dim(a, start, size) for a in (inputs, labels))
