"""The problems: real data sets and two synthetic families, with a least objective that is certified."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments.data import DataError, load, with_intercept
from experiments.errors import UserError, writing

__all__ = ["DATA_SETS", "PENALTIES", "TARGETS", "DataSet", "conditioned", "make", "many_labels"]

# Relative to the least objective.
TARGETS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6)
PENALTIES = (1e-2, 1e-4, 1e-6)
SHUFFLE = 0


@dataclasses.dataclass(frozen=True)
class DataSet:
    """How inputs, labels and the number of classes are made, and what to call them."""

    title: str
    family: str
    rows: Callable[[str | None], tuple[np.ndarray, np.ndarray, int]]
    tuned_on: str | None = None  # another data set whose best settings are taken, where tuning would take too long


def _published(name: str) -> Callable:
    def rows(data_dir: str | None):
        try:
            data = load(name, data_dir=data_dir)
        except DataError as error:
            raise UserError(str(error)) from error
        return data.train_inputs, data.train_labels, data.classes

    return rows


def many_labels(classes: int, inputs: int = 8) -> tuple[np.ndarray, np.ndarray, int]:
    """Every label equally often, and inputs about a mean for each: then probabilities are softmax of linear functions.

    All labels occur, because some peers know no others.
    """
    examples = max(5000, classes)
    generator = np.random.default_rng([1, classes])
    labels = np.arange(examples) % classes
    means = generator.standard_normal((classes, inputs))
    return means[labels] + generator.standard_normal((examples, inputs)), labels, classes


def conditioned(condition: float, examples: int = 20_000, inputs: int = 100, classes: int = 10):
    """Inputs whose second moments have eigenvalues from 1 to 1/condition, in directions of no particular kind.

    Labels depend as much on directions in which inputs are small as on others.
    """
    generator = np.random.default_rng([2, round(np.log10(condition))])
    z = generator.standard_normal((examples, inputs))
    weights = generator.standard_normal((inputs, classes)) * 2 / np.sqrt(inputs)
    labels = np.argmax(z @ weights + generator.gumbel(size=(examples, classes)), axis=1)
    rotation, _ = np.linalg.qr(generator.standard_normal((inputs, inputs)))
    sizes = condition ** (-np.arange(inputs) / (2 * (inputs - 1)))
    return (z * sizes) @ rotation.T, labels, classes


DATA_SETS = {
    "digits": DataSet("digits", "real", _published("digits")),
    "adult_one_hot": DataSet("Adult, one-hot", "real", _published("adult_one_hot")),
    "kmnist": DataSet("KMNIST", "real", _published("kmnist")),
    "fashion_mnist": DataSet("Fashion-MNIST", "real", _published("fashion_mnist")),
    **{
        f"labels_{n}": DataSet(
            f"{n:,} labels", "labels", lambda _, n=n: many_labels(n), "labels_300" if n > 1000 else None
        )
        for n in (10, 300, 10_000)
    },
    **{
        f"condition_1e{k}": DataSet(f"condition 1e{k}", "condition", lambda _, k=k: conditioned(10.0**k))
        for k in (1, 4, 8)
    },
}


def make(name: str, folder: Path, data_dir: str | None) -> Path:
    """The folder of a data set, made unless it is there: rows in random order, with a column of 1."""
    if name not in DATA_SETS:
        raise UserError(f"data: expected some of {', '.join(DATA_SETS)}; got {name!r}")
    path = folder / name
    if (path / "classes.npy").exists():
        return path
    inputs, labels, classes = DATA_SETS[name].rows(data_dir)
    order = np.random.default_rng(SHUFFLE).permutation(len(labels))
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        np.save(path / "inputs.npy", with_intercept(inputs.astype(np.float32))[order])
        np.save(path / "labels.npy", labels.astype(np.int32)[order])
        np.save(path / "classes.npy", classes)  # the last one: now it is whole
    return path
