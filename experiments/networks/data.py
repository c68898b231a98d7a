"""What networks are trained on: images, and the source text of Python's standard library, byte by byte."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data import load
from experiments.errors import UserError, writing

__all__ = ["TITLES", "DataSet", "Problem", "Rows", "batches", "problem_of", "restore", "save", "some"]

DataSet = Literal["digits", "kmnist", "fashion_mnist", "stdlib"]
TITLES = {
    "digits": "digits",
    "kmnist": "KMNIST",
    "fashion_mnist": "Fashion-MNIST",
    "stdlib": "Python's standard library",
}
HELD_OUT = 0.05  # of the text
BYTES = 256
# Of batches that lie ready at a time.
MOST_MEMORY = 2e8


class Rows(NamedTuple):
    """Images (b, d) in float32 and labels (b,), or bytes (b, t) and the bytes after them (b, t), in int32."""

    inputs: np.ndarray
    labels: np.ndarray


class Problem(NamedTuple):
    """What is trained on, and what is not."""

    train: Rows
    test: Rows
    classes: int


def problem_of(data_set: DataSet, rows: int, positions: int, data_dir: str | None = None) -> Problem:
    """The first `rows` rows for training, or all if there are fewer; sequences have `positions` bytes."""
    if data_set == "stdlib":
        return _text(_library(), rows, positions)
    data = load(data_set, data_dir=data_dir)
    train = Rows(data.train_inputs[:rows], data.train_labels[:rows])
    return Problem(train, Rows(data.test_inputs, data.test_labels), data.classes)


def _library() -> bytes:
    """The modules that are files, in the order of their names; packages, among them all tests, are left out."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not text:
        raise UserError(f"{folder}: expected the source of the standard library; found no *.py there")
    return text


def _text(text: bytes, rows: int, positions: int) -> Problem:
    """Sequences one after the other, the last of them held out."""
    values = np.frombuffer(text, np.uint8).astype(np.int32)
    count = (len(values) - 1) // positions
    used = count * positions
    sequences = Rows(values[:used].reshape(count, positions), values[1 : used + 1].reshape(count, positions))
    kept = count - max(1, round(HELD_OUT * count))
    train, test = (Rows(*(part[which] for part in sequences)) for which in (slice(kept), slice(kept, None)))
    return Problem(Rows(*(part[:rows] for part in train)), test, BYTES)


def some(rows: Rows, count: int) -> Rows:
    """At most so many, evenly spread."""
    if len(rows.labels) <= count:
        return rows
    which = np.linspace(0, len(rows.labels) - 1, count).astype(np.int64)
    return Rows(rows.inputs[which], rows.labels[which])


def batches(rows: Rows, which: np.ndarray) -> Iterator[list[tuple[jax.Array, jax.Array]]]:
    """Those that the rows (steps, batch) of `which` make: gathered before they are needed, some at a time."""
    size = which.shape[1] * max(1, rows.inputs[0].nbytes)
    some_steps = max(1, min(50, int(MOST_MEMORY / size)))
    for start in range(0, len(which), some_steps):
        found = [
            (jnp.asarray(rows.inputs[one]), jnp.asarray(rows.labels[one])) for one in which[start : start + some_steps]
        ]
        yield jax.block_until_ready(found)


def save(problem: Problem, path: Path) -> None:
    """For a process that has no reader of data sets."""
    temporary = path.with_name(f"part-{path.name}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(temporary, *problem.train, *problem.test, classes=problem.classes)
        temporary.replace(path)


def restore(path: Path) -> Problem:
    """What `save` wrote."""
    with np.load(path) as file:
        arrays = [file[f"arr_{i}"] for i in range(4)]
        return Problem(Rows(*arrays[:2]), Rows(*arrays[2:]), int(file["classes"]))
