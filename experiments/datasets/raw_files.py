"""The files that a data set is made of, as they were published: where they are, and whether they are the right ones."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import checksums, download_manager

from experiments.datasets.errors import RawFileError

__all__ = ["fetch", "verify"]


def fetch(
    dl_manager: tfds.download.DownloadManager, published: Mapping[str, checksums.UrlInfo] | None
) -> dict[str, Path]:
    """Take the files from the manual folder of `dl_manager`, or download them, and verify every one.

    Args:
      dl_manager: the one that TensorFlow Datasets hands to a builder.
      published: size, sha256 and name of every file by its address, as in checksums.tsv: `url_infos` of a builder.

    Returns:
      Paths by the name of the file.
    """
    if not published:
        raise RawFileError("checksums.tsv: expected the addresses of the files, beside the builder; found none")
    found = {}
    # One by one: of several at once, some would still be written to the folder after one has failed.
    for url, info in published.items():
        try:
            path = Path(dl_manager.download(url))
        except download_manager.NonMatchingChecksumError as error:
            # Its last line is a link to what authors of data sets can do about it.
            raise RawFileError(" ".join(str(error).splitlines()[:-1])) from error
        # Again, because TensorFlow Datasets trusts what it downloaded earlier by the name of the file.
        verify(path, info)
        found[info.filename] = path
    return found


def verify(path: Path, published: checksums.UrlInfo) -> None:
    """Refuse a file that has not the sha256 it was published with."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != published.checksum:
        raise RawFileError(
            f"{path}: expected the sha256 {published.checksum}, of {int(published.size):,} bytes; found {found}, of "
            f"{path.stat().st_size:,} bytes. The file is incomplete, or another one"
        )
