"""KMNIST as a builder of TensorFlow Datasets."""

from typing import ClassVar

import tensorflow_datasets as tfds

from experiments.datasets.idx_images import IdxImages

__all__ = ["Builder"]


class Builder(IdxImages):
    """70,000 images of handwritten Hiragana, 28 x 28 bytes, in ten classes."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "The files of the publisher, rows in their order."}
    # One syllable of each column of the syllabary, in the order of the publisher.
    LABELS = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
    HOMEPAGE = "http://codh.rois.ac.jp/kmnist/"
