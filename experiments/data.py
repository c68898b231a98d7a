"""The data sets of the experiments as arrays: prepared once by TensorFlow Datasets, with no TensorFlow, then read.

- "digits": scikit-learn's, 1,500 images of 8 x 8 for training and 297 for testing. Nothing is downloaded.
- "adult", "adult_one_hot": 14 or 108 columns, standardised by the training rows.
- "kmnist", "fashion_mnist": pixels between 0 and 1.

Published files are taken from the folder `data_dir` or QBOUND_DATA_DIR, laid out as
<folder>/fashion_mnist/train-images-idx3-ubyte.gz, <folder>/adult/adult.data; without either they are downloaded. Their
sha256 is checked. Prepared sets are kept in `cache_dir`, QBOUND_CACHE_DIR or ~/.cache/qbound, and need no files any
more. Where each comes from, and under which licence, is in experiments/datasets.
"""

import functools
import importlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.datasets.errors import DataError

__all__ = ["NAMES", "Data", "DataError", "load", "with_intercept"]

CACHE = "~/.cache/qbound"
NAMES = ("digits", "adult", "adult_one_hot", "kmnist", "fashion_mnist")
# The package of the builder, and its configuration.
BUILDERS = {
    "adult": ("adult", "ordinal"),
    "adult_one_hot": ("adult", "one_hot"),
    "kmnist": ("kmnist", None),
    "fashion_mnist": ("fashion_mnist", None),
}


class Data(NamedTuple):
    """Inputs are float32 of shape (rows, d), labels int32 of shape (rows,), from 0 to `classes` - 1."""

    train_inputs: np.ndarray
    train_labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    classes: int


def load(name: str, *, data_dir: str | None = None, cache_dir: str | None = None) -> Data:
    """A data set, prepared first if it is not in the cache; rows are in the order of the published files.

    Args:
      name: one of NAMES.
      data_dir: a folder with the published files; None for that of QBOUND_DATA_DIR, or for a download.
      cache_dir: a folder for prepared sets; None for that of QBOUND_CACHE_DIR, or for ~/.cache/qbound.

    Raises:
      DataError: a wrong argument or file, or a circumstance: no network, no room, no right to write.
    """
    if name not in NAMES:
        raise DataError(f"name: expected one of {', '.join(NAMES)}; got {name!r}")
    if name == "digits":
        return _digits()
    builder = _prepared(name, data_dir, cache_dir)
    train_inputs, train_labels = _split(builder, "train")
    test_inputs, test_labels = _split(builder, "test")
    scale = _standardised if name.startswith("adult") else _unit_pixels
    train_inputs, test_inputs = scale(train_inputs, test_inputs)
    return Data(train_inputs, train_labels, test_inputs, test_labels, builder.info.features["label"].num_classes)


def with_intercept(inputs: np.ndarray) -> np.ndarray:
    """The inputs with a column of 1 at the end."""
    return np.concatenate([inputs, np.ones_like(inputs[:, :1])], axis=1)


def _digits() -> Data:
    from experiments.digits import digits

    data = digits(train=1500, seed=0)
    inputs, test_inputs = (np.array(part, np.float32) for part in (data.inputs, data.test_inputs))
    labels, test_labels = (np.array(part, np.int32) for part in (data.labels, data.test_labels))
    return Data(inputs, labels, test_inputs, test_labels, 10)


def _prepared(name: str, data_dir: str | None, cache_dir: str | None) -> Any:
    # Here, since it takes most of a second to import: those who only want digits do not wait for it.
    from experiments.datasets.preparation import prepared

    package, config = BUILDERS[name]
    module = importlib.import_module(f"experiments.datasets.{package}.{package}_dataset_builder")
    files = data_dir or os.environ.get("QBOUND_DATA_DIR")
    cache = Path(cache_dir or os.environ.get("QBOUND_CACHE_DIR") or CACHE).expanduser().absolute()
    return prepared(
        name,
        functools.partial(module.Builder, config=config),
        data_dir=Path(files).expanduser().absolute() if files else None,
        cache_dir=cache,
        folder=f"{package}/{config}" if config else package,
    )


def _split(builder: Any, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of shape (rows, d) as they were stored, and labels.

    Records are decoded here and not by TFDS, which takes three times as long for the same arrays.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.proto import tf_example_pb2

    key, _ = builder.info.supervised_keys
    try:
        source = builder.as_data_source(split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
        records = source.__getitems__(range(len(source)))
        example = tf_example_pb2.Example  # pyright: ignore[reportAttributeAccessIssue]: made when it is imported
        fields = [example.FromString(record).features.feature for record in records]
        content = b"".join(field[key].bytes_list.value[0] for field in fields)
        labels = np.fromiter((field["label"].int64_list.value[0] for field in fields), np.int32, len(fields))
        return np.frombuffer(content, builder.info.features[key].np_dtype).reshape(len(fields), -1), labels
    except Exception as error:  # the reader of the records has no error of its own
        reason = " ".join(str(error).split())
        raise DataError(
            f"{builder.data_dir}: expected the prepared rows of {split}; found: {reason}. Remove that folder, and the "
            "data set is prepared anew"
        ) from error


def _unit_pixels(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return train.astype(np.float32) / np.float32(255), test.astype(np.float32) / np.float32(255)


def _standardised(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean 0 and standard deviation 1 in every column of `train`; 0 in both where `train` has but one value.

    By sums of whole numbers, which are exact in float64: the result has the same bits on every machine.
    """
    mean = train.mean(axis=0, dtype=np.float64)
    variance = np.square(train, dtype=np.float64).mean(axis=0) - mean**2
    varies = (train != train[0]).any(axis=0)
    scale = np.where(varies, 1 / np.sqrt(np.where(varies, variance, 1)), 0)
    return ((train - mean) * scale).astype(np.float32), ((test - mean) * scale).astype(np.float32)
