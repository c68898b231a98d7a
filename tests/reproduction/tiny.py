"""A problem of a moment, for runs and comparisons that are made in a test."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from experiments.data import Data
from experiments.experiment import Contender, Experiment
from experiments.methods import Method
from experiments.train import Problem, Rows, Run

ROOT = Path(__file__).parent.parent.parent
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem not in ("__init__", "common"))
ROWS, WIDTH, CLASSES = 1300, 4, 3


def tiny_data(name="tiny", *, data_dir=None) -> Data:
    """A problem that every data set stands for."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(ROWS + 200, WIDTH)).astype(np.float32)
    labels = np.argmax(inputs[:, :CLASSES] + random.normal(size=(len(inputs), CLASSES)), axis=1).astype(np.int32)
    return Data(inputs[:ROWS], labels[:ROWS], inputs[ROWS:], labels[ROWS:], CLASSES)


def tiny_problem() -> Problem:
    data = tiny_data()
    rows = Rows(jnp.asarray(data.train_inputs), jnp.asarray(data.train_labels))
    return Problem(rows, {"test": Rows(jnp.asarray(data.test_inputs), jnp.asarray(data.test_labels))}, CLASSES)


def a_run(**changes) -> Run:
    first = Run(
        data_set="tiny", split="all", validation=0.2, intercept=False, batch=100, method=Method("adam"),
        learning_rate=0.1, schedule="cosine", l2=1e-3, damping=0.0, epochs=2, chunk=2, seconds=100.0, seed=0,
    )  # fmt: skip
    return dataclasses.replace(first, **changes)


def an_experiment(output, **changes) -> Experiment:
    first = Experiment(
        name="tiny",
        data_set="tiny",
        batch=100,
        contenders=(
            Contender("SGD", Method("sgd"), (0.1, 1.0), epochs=2, chunk=2),
            Contender("SPFB", Method("spfb"), (1.0,), dampings=(0.0, 0.1), epochs=2, chunk=2),
        ),
        schedules=("inverse",),
        l2=(1e-3, 1e-1),
        tuning_share=0.5,
        tuning_seconds=100.0,
        seconds=100.0,
        seeds=2,
        output=str(output),
    )
    return dataclasses.replace(first, **changes)
