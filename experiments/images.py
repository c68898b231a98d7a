"""Images in the files of MNIST, without MNIST itself: Fashion-MNIST and KMNIST, their training sets.

The files are taken from a folder, `directory` or the environment variable QBOUND_DATA, laid out as
<folder>/fashion_mnist/train-images-idx3-ubyte.gz; without either they are downloaded once, into ~/.cache/qbound. Their
sha256 is checked every time. Fashion-MNIST is by Zalando (MIT), KMNIST by ROIS-DS CODH (CC BY-SA 4.0).
"""

import gzip
import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["DATA_SETS", "DataSet", "images"]

CACHE = "~/.cache/qbound"
CHUNK = 1 << 20


class DataSet(NamedTuple):
    """Where its files are, and the sha256 of those of the training set."""

    address: str
    images_sum: str
    labels_sum: str


DATA_SETS = {
    "fashion_mnist": DataSet(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
    "kmnist": DataSet(
        "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
        "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
        "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
    ),
}


def images(name: str, *, count: int | None = None, directory: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Training images and what they show.

    Args:
      name: "fashion_mnist" or "kmnist".
      count: how many, from the first on; None for all.
      directory: a folder with a folder `name` that has the files; None for that of QBOUND_DATA, or for a download.

    Returns:
      Pixels between 0 and 1 with a 1 at the end, float32 of shape (count, 785), and labels, int32 of shape (count,).
    """
    if name not in DATA_SETS:
        raise ValueError(f"name: expected one of {', '.join(DATA_SETS)}; got {name!r}")
    data = DATA_SETS[name]
    pixels = _array(_file(name, "train-images-idx3-ubyte.gz", data.images_sum, directory), axes=3)
    labels = _array(_file(name, "train-labels-idx1-ubyte.gz", data.labels_sum, directory), axes=1)
    count = len(labels) if count is None else count
    if not 0 < count <= len(labels):
        raise ValueError(f"count: expected at least 1 and at most {len(labels)}, all images of {name}; got {count}")
    flat = pixels[:count].reshape(count, -1).astype(np.float32) / np.float32(255)
    return jnp.asarray(np.c_[flat, np.ones(count, np.float32)]), jnp.asarray(labels[:count], jnp.int32)


def _file(name: str, file: str, expected_sum: str, directory: str | None) -> Path:
    """The path of a file that is there and has the sum it should have."""
    folder = directory or os.environ.get("QBOUND_DATA")
    address = f"{DATA_SETS[name].address}/{file}"
    path = Path(folder or CACHE).expanduser() / name / file
    if not path.exists():
        if folder:
            raise FileNotFoundError(
                f"{path}: expected a file of {name} there; found none. It can be had from {address}, and is "
                "downloaded if no directory is given and QBOUND_DATA is not set"
            )
        _download(address, path, expected_sum)
    _check(path, path, expected_sum)
    return path


def _download(address: str, path: Path, expected_sum: str) -> None:
    """To a temporary file, which takes the place of `path` when it is complete and right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "wb") as target:
            _copy(address, target)
        _check(Path(temporary), address, expected_sum)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _copy(address: str, target) -> None:
    try:
        with urllib.request.urlopen(address, timeout=60) as source:
            size = int(source.headers.get("Content-Length") or 0)
            done = shown = 0
            while chunk := source.read(CHUNK):
                target.write(chunk)
                done += len(chunk)
                if done >= size or done - shown >= size / 10:
                    shown = done
                    print(f"  {address}: {done / 1e6:.1f} of {size / 1e6:.1f} MB", flush=True)
    except urllib.error.URLError as error:
        raise OSError(
            f"{address}: expected a file to download; found {error.reason}. Files that are there already are taken "
            "from the folder that QBOUND_DATA names"
        ) from error


def _check(path: Path, name: object, expected_sum: str) -> None:
    """Compare the sum of the file at `path`, called `name` in the message."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected_sum:
        raise ValueError(
            f"{name}: expected the sha256 {expected_sum}; found {found}, in {path.stat().st_size:,} bytes. The file is "
            "incomplete, or another one"
        )


def _array(path: Path, axes: int) -> np.ndarray:
    """Bytes in the format IDX: 0, 0, the code of bytes, how many axes, their lengths, and the data."""
    content = gzip.decompress(path.read_bytes())
    expected, found = bytes([0, 0, 8, axes]), content[:4]
    if found != expected:
        raise ValueError(f"{path}: expected bytes with {axes} axes, {expected.hex()} at the start; found {found.hex()}")
    shape = np.frombuffer(content, ">u4", axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
