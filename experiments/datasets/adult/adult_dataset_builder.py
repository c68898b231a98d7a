"""Adult, also called Census Income, as a builder of TensorFlow Datasets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from experiments.datasets.adult import file_format
from experiments.datasets.raw_files import fetch

__all__ = ["Builder"]

FILES = {"train": "adult.data", "test": "adult.test"}
# What each configuration makes of a row, and what it calls the numbers.
CONFIGS = {
    "ordinal": (file_format.ordinal_row, list(file_format.COLUMNS)),
    "one_hot": (file_format.one_hot_row, file_format.one_hot_names()),
}


class Builder(tfds.core.GeneratorBasedBuilder):
    """48,842 people of the census of 1994, and whether they earned more than 50,000 dollars."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "The files of the publisher, rows in their order."}
    BUILDER_CONFIGS: ClassVar = [
        tfds.core.BuilderConfig(
            name="ordinal", description="14 numbers, categories as codes in the order of adult.names."
        ),
        tfds.core.BuilderConfig(
            name="one_hot", description="108 numbers, one for each category of each categorical column."
        ),
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        _, names = CONFIGS[str(self.builder_config_name)]
        features = {
            # As bytes: a list of numbers takes several times as long to read.
            "features": tfds.features.Tensor(
                shape=(len(names),), dtype=np.float32, encoding=tfds.features.Encoding.BYTES, doc=", ".join(names)
            ),
            "label": tfds.features.ClassLabel(names=list(file_format.LABELS)),
        }
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("features", "label"),
            homepage="https://archive.ics.uci.edu/dataset/2/adult",
            disable_shuffling=True,  # rows are in the order of the files
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        paths = fetch(dl_manager, self.url_infos)
        return {split: self._generate_examples(paths[file]) for split, file in FILES.items()}

    def _generate_examples(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        of_row, _ = CONFIGS[str(self.builder_config_name)]
        for index, (row, label) in enumerate(file_format.rows(path)):
            yield index, {"features": np.asarray(of_row(row), np.float32), "label": label}
