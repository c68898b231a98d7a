"""One run: a network, a method with a setting, a number of steps.

The clock runs in the steps alone. Batches lie ready, programs are compiled before, on a state that is thrown away, and
evaluations are apart; all of that is the same for every method. A step is a call from Python, not a scan: in a loop,
XLA's convolutions on CPU are many times slower.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.errors import UserError
from experiments.networks.data import DataSet, Problem, Rows, batches, some
from experiments.networks.methods import Method, Numbers, Schedule, evaluated, learning_rate, numbers, transform
from experiments.networks.models import Network
from experiments.train import batch_rows

__all__ = ["Outcome", "Run", "Trainer", "check_batch", "evaluate", "loss", "ready_trainer", "train"]

# Rows that are evaluated at a time.
PIECE = 1000


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides a result.

    Attributes:
      rows: for training, at most.
      evaluated: rows of each kind that losses are taken of, at most.
      scale: of the first weights, in units of their usual size.
      records: evaluations on the way, the last of them at the end.
    """

    network: Network
    data_set: DataSet
    rows: int
    evaluated: int
    batch: int
    steps: int
    method: Method
    learning_rate: float
    schedule: Schedule
    scale: float
    seed: int
    records: int

    @property
    def title(self) -> str:
        """What tells it from others of its method."""
        return f"{self.steps}-{self.learning_rate:g}-{self.schedule}-seed{self.seed}"

    @property
    def environment(self) -> str | None:
        """That of a peer with packages of its own."""
        return self.method.environment

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Run":
        """What `dataclasses.asdict` and JSON made of one."""
        network = Network(content["network"]["kind"], tuple(content["network"]["sizes"]))
        return cls(**{**content, "network": network, "method": Method(**content["method"])})


class Outcome(NamedTuple):
    """How a run ended; records are of step 0 first."""

    ended: Literal["finished", "diverged"]
    steps: int
    seconds: float
    compile_seconds: float
    records: list[dict[str, float]]


class Trainer(Protocol):
    """A state that goes on by steps; `warm_up` of them have called every program that there is."""

    warm_up: int

    def step(self, inputs: jax.Array, labels: jax.Array) -> None: ...

    def wait(self) -> None: ...

    def params(self) -> Any: ...


class OptaxTrainer:
    """One jitted step, which is given its parameters and state to overwrite."""

    warm_up = 1

    def __init__(self, run: Run, params: Any):
        self._run, self._params = run, params
        self._numbers = numbers(run.learning_rate, run.schedule, run.steps)
        # A copy, because an array that is in a state twice, or in the parameters too, cannot be given away.
        state = _transform(run.method, run.network, self._numbers).init(params)
        self._state = jax.tree.map(jnp.copy, state)

    def step(self, inputs: jax.Array, labels: jax.Array) -> None:
        run = self._run
        self._params, self._state = _step(
            self._params, self._state, self._numbers, inputs, labels, method=run.method, network=run.network
        )

    def wait(self) -> None:
        jax.block_until_ready((self._params, self._state))

    def params(self) -> Any:
        return evaluated(self._run.method, self._params, self._state)


def _transform(method: Method, network: Network, setting: Numbers) -> optax.GradientTransformationExtraArgs:
    return transform(method, learning_rate(setting), network.logits)


@functools.partial(jax.jit, static_argnames=("method", "network"), donate_argnums=(0, 1))
def _step(params, state, setting: Numbers, inputs, labels, *, method: Method, network: Network):
    value, grads = jax.value_and_grad(functools.partial(loss, network))(params, inputs, labels)
    rule = _transform(method, network, setting)
    updates, state = rule.update(grads, state, params, inputs=inputs, value=value)
    return optax.apply_updates(params, updates), state


def loss(network: Network, params: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy over examples, and over positions if they have any."""
    logits = network.logits(params, inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def ready_trainer(run: Run, problem: Problem) -> tuple[Trainer, float]:
    """At its start, with all its programs compiled, and how many seconds that took."""
    check_batch(run, problem)
    ((inputs, labels),) = next(batches(problem.train, batch_rows(len(problem.train.labels), run.batch, 0, range(1))))
    make = _kfac_trainer if run.method.name == "kfac" else OptaxTrainer

    def start() -> Trainer:
        params = run.network.first_params(run.seed, problem.train.inputs.shape[1], problem.classes, run.scale)
        return make(run, params)

    began = time.perf_counter()
    thrown_away = start()
    for _ in range(thrown_away.warm_up):
        thrown_away.step(inputs, labels)
    thrown_away.wait()
    return start(), time.perf_counter() - began


def _kfac_trainer(run: Run, params: Any) -> Trainer:
    from experiments.networks.kfac import KfacTrainer

    return KfacTrainer(run, params)


def check_batch(run: Any, problem: Problem) -> None:
    """Whether there are so many rows."""
    if run.batch > (rows := len(problem.train.labels)):
        raise UserError(f"batches: expected at most the {rows} training rows of {run.data_set}; got {run.batch}")


def train(run: Run, problem: Problem, show: Callable[[int], None] = lambda step: None) -> Outcome:
    """To its end, or to the first record without a number; `show` is called with steps that were made."""
    trainer, compile_seconds = ready_trainer(run, problem)
    parts = {"train": some(problem.train, run.evaluated), "test": some(problem.test, run.evaluated)}
    records = [{"step": 0, "seconds": 0.0, **evaluate(run.network, trainer.params(), parts)}]
    marks = sorted({max(1, round(run.steps * i / run.records)) for i in range(1, run.records + 1)})
    step, seconds = 0, 0.0
    for mark in marks:
        which = batch_rows(len(problem.train.labels), run.batch, run.seed, range(step, mark))
        for ready in batches(problem.train, which):
            began = time.perf_counter()
            for inputs, labels in ready:
                trainer.step(inputs, labels)
            trainer.wait()
            seconds += time.perf_counter() - began
            step += len(ready)
            show(step)
        records.append({"step": step, "seconds": seconds, **evaluate(run.network, trainer.params(), parts)})
        if not np.isfinite(records[-1]["train_loss"]):
            return Outcome("diverged", step, seconds, compile_seconds, records)
    return Outcome("finished", step, seconds, compile_seconds, records)


def evaluate(network: Network, params: Any, parts: Mapping[str, Rows]) -> dict[str, float]:
    """Loss and share of errors on each part."""
    found = {}
    for name, rows in parts.items():
        count = len(rows.labels)
        pieces = [slice(start, start + PIECE) for start in range(0, count, PIECE)]
        sums = [_measure(params, rows.inputs[one], rows.labels[one], network=network) for one in pieces]
        total, errors = np.sum([[float(value) for value in pair] for pair in sums], axis=0)
        entries = rows.labels.size
        # Logits that are no numbers have a largest one all the same, the first.
        found[f"{name}_loss"] = float(total / entries)
        found[f"{name}_error"] = float(errors / entries) if np.isfinite(total) else np.nan
    return found


@functools.partial(jax.jit, static_argnames="network")
def _measure(params, inputs, labels, *, network: Network):
    logits = network.logits(params, inputs)
    total = optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()
    return total, jnp.sum(jnp.argmax(logits, axis=-1) != labels)
