"""From published files to a prepared data set in a cache: at most once, and completely or not at all."""

import contextlib
import errno
import io
import os
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import requests
import tensorflow_datasets as tfds
from absl import logging
from tensorflow_datasets.core.download.util import DownloadError

from experiments.datasets.errors import DataError, RawFileError
from experiments.datasets.raw_files import verify
from experiments.lock import locked

__all__ = ["prepared"]

PROBE_SECONDS = 20
LOCAL_FILES = "Set QBOUND_DATA_DIR, or --data-dir, to a folder that has the files"
OTHER_CACHE = "set QBOUND_CACHE_DIR to another folder"


def prepared(
    name: str,
    make: Callable[..., tfds.core.GeneratorBasedBuilder],
    *,
    data_dir: Path | None,
    cache_dir: Path,
    folder: str,
) -> tfds.core.GeneratorBasedBuilder:
    """A builder whose data set is in the cache, prepared now if it was not.

    Args:
      name: of the data set, in messages and for what must not be shared with another.
      make: the class of the builder, its configuration given.
      data_dir: a folder that has a folder named for the builder, with the published files; None to download them.
      cache_dir: where prepared data sets are, in the layout of TensorFlow Datasets.
      folder: of this one, in `cache_dir`.
    """

    def builder_of() -> tfds.core.GeneratorBasedBuilder:
        try:
            return make(data_dir=cache_dir, file_format="array_record")
        except OSError:
            raise
        except Exception as error:  # it reads dataset_info.json there, and has no error of its own for a damaged one
            if not (cache_dir / folder).exists():
                raise
            reason = " ".join(str(error).split()).rstrip(".: ")
            raise DataError(
                f"{cache_dir / folder}: expected a prepared {name}, with its dataset_info.json; found: {reason}. "
                "Remove that folder, and the data set is prepared anew"
            ) from error

    with _one_line(name, cache_dir), _quiet():
        builder = builder_of()
        if not builder.is_prepared():
            waiting = f"{name}: waiting for another process that prepares it"
            with locked(cache_dir / f".{name}.lock", lambda _: _say(waiting)):
                # Anew: another process may have been faster.
                builder = builder_of()
                if not builder.is_prepared():
                    _prepare(name, builder, data_dir)
        return builder


def _prepare(name: str, builder: tfds.core.GeneratorBasedBuilder, data_dir: Path | None) -> None:
    target = Path(builder.data_path)
    # Downloads of its own: with a folder in common, one data set has been given the files of another.
    scratch = Path(builder.data_dir_root) / "downloads" / name
    _remove(*target.parent.glob("incomplete.*"))  # what a killed process left behind
    start = time.perf_counter()
    try:
        if data_dir is None:
            manual = scratch / "manual"
            _announce_download(name, builder)
        else:
            manual = data_dir / builder.name
            _check_local(name, builder, manual)
            _say(f"{name}: preparing it from {manual}, in {target}")
        options = tfds.download.DownloadConfig(
            manual_dir=manual,
            extract_dir=scratch / "extracted",
            force_checksums_validation=True,
            try_download_gcs=False,
        )
        builder.download_and_prepare(download_dir=scratch, download_config=options)
    finally:
        _remove(scratch)
        for folder in (target.parent, target.parent.parent, scratch.parent):
            with contextlib.suppress(OSError):  # not empty, and to be kept
                folder.rmdir()
    _say(f"{name}: prepared in {time.perf_counter() - start:.0f} s")


def _check_local(name: str, builder: tfds.core.GeneratorBasedBuilder, folder: Path) -> None:
    """Refuse what is missing or wrong, which TensorFlow Datasets would try to download."""
    for address, info in (builder.url_infos or {}).items():
        path = folder / (info.filename or "")
        try:
            verify(path, info)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataError(
                f"{path}: expected a file of {name} there; found none. It can be had from {address}, and is "
                "downloaded if neither QBOUND_DATA_DIR nor --data-dir is given"
            ) from error
        except OSError as error:
            raise DataError(f"{path}: expected a file of {name} that can be read; found: {error.strerror}") from error


def _announce_download(name: str, builder: tfds.core.GeneratorBasedBuilder) -> None:
    """Say what will be downloaded, once it is known to be there: without a network, TFDS tries for minutes."""
    published = builder.url_infos or {}
    address = next(iter(published))
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=PROBE_SECONDS).close()
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise DataError(_not_downloaded(name, address, reason)) from error
    size = sum(int(info.size) for info in published.values())
    host = urllib.parse.urlsplit(address).hostname
    _say(f"{name}: downloading {len(published)} files, {size / 1e6:.1f} MB, from {host}, to {builder.data_path}")


def _not_downloaded(name: str, address: str, reason: object) -> str:
    return f"{address}: expected to download {name} from there; found: {reason}. {LOCAL_FILES}"


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave of TFDS's output the progress bars, and those to people only: in a file each step would be a line."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # it warns of every data set that is not prepared yet
    tfds.display_progress_bar(sys.stderr.isatty())
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        tfds.display_progress_bar(True)


@contextlib.contextmanager
def _one_line(name: str, cache_dir: Path) -> Iterator[None]:
    """Turn what the world does to a preparation into errors of one line that say what to do."""
    try:
        yield
    except RawFileError as error:
        raise DataError(str(error)) from error
    except (requests.RequestException, DownloadError) as error:
        request = getattr(error, "request", None)
        reason = " ".join(str(error).split())
        raise DataError(_not_downloaded(name, request.url if request else "the network", reason)) from error
    except OSError as error:
        cause = _numbered(error)
        where = cause.filename or cache_dir
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(_no_room(name, where, cause.strerror)) from error
        raise DataError(
            f"{where}: expected to prepare {name} in {cache_dir}; found: {cause.strerror or cause}. Make that folder "
            f"one that can be written to, or {OTHER_CACHE}"
        ) from error
    except RuntimeError as error:
        # The writer of the records is of another language, and has no other class for a full disk.
        for reason in (os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)):
            if reason in str(error):
                raise DataError(_no_room(name, cache_dir, reason)) from error
        raise


def _no_room(name: str, where: object, reason: object) -> str:
    return f"{where}: expected room to prepare {name}; found: {reason}. Make room, or {OTHER_CACHE}"


def _numbered(error: OSError) -> OSError:
    """The error of the system: TFDS raises others from it, of the same class, with text alone."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause
        cause = cause.__cause__
    return error
