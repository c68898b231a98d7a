"""What data sets in the files of MNIST have in common: four of them, in the format IDX, compressed."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from experiments.datasets.errors import RawFileError
from experiments.datasets.raw_files import fetch

__all__ = ["IdxImages", "read_idx"]

FILES = {"train": "train", "test": "t10k"}
SIDE = 28


class IdxImages(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A builder for images of 28 x 28 bytes: a data set says what its labels are called, and where its files are."""

    LABELS: tuple[str, ...]
    HOMEPAGE: str

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            # As bytes: a list of 784 numbers takes ten times as long to read.
            "image": tfds.features.Tensor(shape=(SIDE, SIDE, 1), dtype=np.uint8, encoding=tfds.features.Encoding.BYTES),
            "label": tfds.features.ClassLabel(names=list(self.LABELS)),
        }
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
            homepage=self.HOMEPAGE,
            disable_shuffling=True,  # rows are in the order of the files
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        paths = fetch(dl_manager, self.url_infos)
        return {
            split: self._generate_examples(
                paths[f"{start}-images-idx3-ubyte.gz"], paths[f"{start}-labels-idx1-ubyte.gz"]
            )
            for split, start in FILES.items()
        }

    def _generate_examples(self, images_path: Path, labels_path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        images, labels = read_idx(images_path, axes=3), read_idx(labels_path, axes=1)
        if images.shape[1:] != (SIDE, SIDE):
            raise RawFileError(f"{images_path}: expected images of {SIDE} x {SIDE}; found {images.shape[1:]}")
        if len(labels) != len(images):
            raise RawFileError(f"{labels_path}: expected {len(images)} labels, one an image; found {len(labels)}")
        if labels.size and labels.max() >= len(self.LABELS):
            raise RawFileError(f"{labels_path}: expected labels below {len(self.LABELS)}; found {labels.max()}")
        for index, (image, label) in enumerate(zip(images[..., None], labels, strict=True)):
            yield index, {"image": image, "label": int(label)}


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Bytes in the format IDX: 0, 0, the code of bytes, how many axes, their lengths, and the data."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RawFileError(f"{path}: expected a complete gzip file; found: {error}") from error
    expected, found = bytes([0, 0, 8, axes]), content[:4]
    if found != expected:
        raise RawFileError(
            f"{path}: expected bytes with {axes} axes, {expected.hex()} at the start; found {found.hex()}"
        )
    start = 4 + 4 * axes
    if len(content) < start:
        raise RawFileError(f"{path}: expected the lengths of {axes} axes; found the end of the file")
    shape = tuple(int(length) for length in np.frombuffer(content, ">u4", axes, offset=4))
    size = int(np.prod(shape, dtype=np.int64))
    if len(content) != start + size:
        raise RawFileError(f"{path}: expected {size} bytes, {shape}, after the lengths; found {len(content) - start}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
