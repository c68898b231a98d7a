"""The training loop: a softmax model by any of the methods, in chunks of steps that are one compiled scan each.

The clock runs in the chunks alone. Gathering the batches, compiling, and evaluating are the same for every method and
are not on it.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qbound
from experiments.errors import UserError
from experiments.methods import Method, Numbers, Schedule, first_state, numbers, optimizer

__all__ = ["Problem", "Rows", "Run", "Snapshot", "batch_rows", "due", "total_steps", "train"]

Ended = Literal["finished", "budget", "diverged"]

# Records are this many times further apart than the ones before: a curve on logarithmic axes has the same number
# everywhere, and evaluating takes a small part of any run.
SPACING = 1.25


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides a curve."""

    data_set: str
    split: Literal["tuning", "all"]  # "tuning" trains without the validation rows
    validation: float  # the share of training rows kept for validation
    intercept: bool
    batch: int
    method: Method
    learning_rate: float
    schedule: Schedule
    l2: float
    damping: float
    epochs: float
    chunk: int  # steps to a compiled loop; between chunks the run can be recorded, stopped and resumed
    seconds: float  # of training at most: the run ends with the first chunk that reaches them
    seed: int


class Rows(NamedTuple):
    """Inputs (rows, d) and labels (rows,)."""

    inputs: Any
    labels: Any


class Problem(NamedTuple):
    """What is trained on, and what is evaluated beside it, by name."""

    train: Rows
    held_out: dict[str, Rows]
    classes: int


class Snapshot(NamedTuple):
    """A run so far: enough to go on from."""

    step: int
    seconds: float
    params: Any
    state: Any
    metrics: dict[str, float]
    ended: Ended | None


def train(run: Run, problem: Problem, start: Snapshot | None = None) -> Iterator[Snapshot]:
    """Snapshots of a run, from `start` if there is one; the last says how the run ended.

    The same run gives the same numbers, wherever it was interrupted; only seconds, and a budget that ends it, differ.
    """
    rows, width = len(problem.train.labels), problem.train.inputs.shape[1]
    if run.batch > rows:
        raise UserError(f"batch: expected at most the {rows} training rows of {run.data_set}; got {run.batch}")
    total = total_steps(run, rows)
    setting = numbers(run.learning_rate, run.schedule, total, run.l2, run.damping)
    program = _program(run.method, run.chunk, run.batch, width, problem.classes)
    if start is None:
        params = jnp.zeros((width, problem.classes), jnp.float32)
        state = first_state(run.method, setting, params)
        start = Snapshot(0, 0.0, params, state, evaluate(params, problem, run.l2), None)
        yield start
    step, seconds, params, state = start[:4]
    while step < total:
        which = batch_rows(rows, run.batch, run.seed, range(step, step + run.chunk))
        batches = jax.block_until_ready(gather(problem.train, which))
        began = time.perf_counter()
        params, state = jax.block_until_ready(program(params, state, batches, setting))
        seconds += time.perf_counter() - began
        step += run.chunk
        over = step >= total or seconds >= run.seconds
        if over or due(step // run.chunk):
            metrics = evaluate(params, problem, run.l2)
            ended = _ended(metrics, step >= total, over)
            yield Snapshot(step, seconds, params, state, metrics, ended)
            if ended is not None:
                return


def total_steps(run: Run, rows: int) -> int:
    """Of whole chunks, about as many as its epochs have."""
    return max(1, round(run.epochs * rows / run.batch / run.chunk)) * run.chunk


def _ended(metrics: dict[str, float], complete: bool, over: bool) -> Ended | None:
    if not np.isfinite(metrics["objective"]):
        return "diverged"
    return "finished" if complete else "budget" if over else None


def due(chunk: int) -> bool:
    """Whether the run is recorded after a number of chunks."""
    return chunk == 1 or int(np.log(chunk) / np.log(SPACING)) > int(np.log(chunk - 1) / np.log(SPACING))


def batch_rows(rows: int, batch: int, seed: int, steps: range) -> np.ndarray:
    """Which rows the batches of `steps` have, (steps, batch): each epoch in an order of its own, without its rest."""
    per_epoch = rows // batch
    found = []
    for epoch in range(steps.start // per_epoch, (steps.stop - 1) // per_epoch + 1):
        order = np.random.default_rng([seed, epoch]).permutation(rows)[: per_epoch * batch].reshape(per_epoch, batch)
        first = epoch * per_epoch
        found.append(order[max(steps.start - first, 0) : steps.stop - first])
    return np.concatenate(found).astype(np.int32)


@jax.jit
def gather(rows: Rows, which: jax.Array) -> Rows:
    """Batches (steps, batch, d)."""
    return Rows(rows.inputs[which], rows.labels[which])


@functools.lru_cache
def _program(method: Method, steps: int, batch: int, width: int, classes: int):
    """Compiled before any clock runs: (params, state, batches, numbers) -> (params, state)."""

    def chunk(params, state, batches: Rows, setting: Numbers):
        transform = optimizer(method, setting, width)

        def step(carry, rows: Rows):
            params, state = carry
            grads = jax.grad(loss)(params, rows)
            updates, state = transform.update(grads, state, params, inputs=rows.inputs)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), batches)[0]

    params = jax.ShapeDtypeStruct((width, classes), jnp.float32)
    setting = jax.eval_shape(lambda: numbers(1.0, "constant", 1, 1.0, 1.0))
    state = jax.eval_shape(functools.partial(first_state, method), setting, params)
    batches = Rows(
        jax.ShapeDtypeStruct((steps, batch, width), jnp.float32), jax.ShapeDtypeStruct((steps, batch), jnp.int32)
    )
    return jax.jit(chunk).lower(params, state, batches, setting).compile()


def loss(params: jax.Array, rows: Rows) -> jax.Array:
    """The mean cross-entropy."""
    logits = qbound.linear_logits(params, rows.inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows.labels).mean()


@jax.jit
def _measure(params, rows: Rows):
    logits = qbound.linear_logits(params, rows.inputs)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, rows.labels).mean()
    error = jnp.mean(jnp.argmax(logits, axis=1) != rows.labels)
    # Logits that are no numbers have a largest one all the same, the first.
    return loss, jnp.where(jnp.isfinite(loss), error, jnp.nan)


def evaluate(params: jax.Array, problem: Problem, l2: float) -> dict[str, float]:
    """The objective on all training rows, and loss and share of errors on the rows held out."""
    value, error = _measure(params, problem.train)
    found = {"objective": float(value) + l2 / 2 * float(jnp.sum(params**2)), "train_error": float(error)}
    for name, rows in problem.held_out.items():
        found[f"{name}_loss"], found[f"{name}_error"] = map(float, _measure(params, rows))
    return found
