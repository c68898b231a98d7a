"""Fashion-MNIST as a builder of TensorFlow Datasets."""

from typing import ClassVar

import tensorflow_datasets as tfds

from experiments.datasets.idx_images import IdxImages

__all__ = ["Builder"]


class Builder(IdxImages):
    """70,000 images of clothes, 28 x 28 bytes, in ten classes."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "The files of the publisher, rows in their order."}
    LABELS = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )
    HOMEPAGE = "https://github.com/zalandoresearch/fashion-mnist"
