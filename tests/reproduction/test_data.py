"""Data sets are prepared completely or not at all, from the right files only, and read as they are in those files."""

import errno
import functools
import gzip
import hashlib
import http.server
import importlib
import os
import shutil
import threading

import numpy as np
import pytest
import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.download.downloader import _Downloader

from experiments import data
from experiments.datasets import preparation
from experiments.datasets.adult import file_format
from experiments.datasets.errors import RawFileError

ADULT = {
    "adult.data": """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, \
United-States, <=50K
52, ?, 209642, HS-grad, 9, Married-civ-spouse, ?, Husband, Black, Male, 0, 0, 45, ?, >50K
30, Private, 100, Masters, 14, Divorced, Sales, Wife, White, Female, 0, 0, 40, Hong, <=50K

""",
    "adult.test": """\
|1x3 Cross validator
25, Private, 226802, 11th, 7, Never-married, Machine-op-inspct, Own-child, Black, Male, 0, 5, 40, Peru, <=50K.
61, Private, 1, 11th, 7, Never-married, Machine-op-inspct, Own-child, Black, Male, 0, 0, 40, United-States, >50K.

""",
}
IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
RANDOM = np.random.default_rng(0)
PIXELS = {name: RANDOM.integers(0, 256, (7, 28, 28), np.uint8) for name in ("kmnist", "fashion_mnist")}
SHOWN = np.array([3, 1, 4, 1, 5, 9, 2], np.uint8)
TRAIN = 5
PACKAGES = ("adult", "kmnist", "fashion_mnist")


def idx(array):
    lengths = np.asarray(array.shape, ">u4").tobytes()
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + lengths + array.tobytes(), mtime=0)


def builder(package):
    return importlib.import_module(f"experiments.datasets.{package}.{package}_dataset_builder").Builder


def sha256(content):
    return hashlib.sha256(content).hexdigest()


class Files:
    """Small files in the published formats, and the power to say that they are the published ones."""

    def __init__(self, root, monkeypatch):
        self.root, self.cache, self.monkeypatch = root / "raw", root / "cache", monkeypatch
        self.address = "http://127.0.0.1:9"
        for name, content in ADULT.items():
            self.write("adult", name, content.encode())
        for package, pixels in PIXELS.items():
            for start, rows in (("train", slice(TRAIN)), ("t10k", slice(TRAIN, None))):
                self.write(package, f"{start}-images-idx3-ubyte.gz", idx(pixels[rows]))
                self.write(package, f"{start}-labels-idx1-ubyte.gz", idx(SHOWN[rows]))
        self.publish()

    def write(self, package, name, content):
        path = self.root / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def publish(self):
        """Expect the files as they are now, at `address` or in the folder."""
        for package in PACKAGES:
            infos = {
                f"{self.address}/{package}/{path.name}": UrlInfo(
                    size=tfds.core.utils.Size(path.stat().st_size),
                    checksum=sha256(path.read_bytes()),
                    filename=path.name,
                )
                for path in sorted((self.root / package).iterdir())
            }
            self.monkeypatch.setattr(builder(package), "url_infos", infos)

    def load(self, name):
        return data.load(name, data_dir=str(self.root), cache_dir=str(self.cache))

    def left(self):
        """What is in the cache besides locks and the name of the default configuration."""
        paths = (path.relative_to(self.cache) for path in self.cache.rglob("*") if path.is_file())
        return sorted(str(path) for path in paths if path.suffix != ".lock" and path.name != "metadata.json")


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.delenv("QBOUND_DATA_DIR", raising=False)
    monkeypatch.delenv("QBOUND_CACHE_DIR", raising=False)
    return Files(tmp_path, monkeypatch)


@pytest.fixture
def server(files):
    """The files on a server, published at its address."""
    requested = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            requested.append((self.command, self.path))

    handler = functools.partial(Handler, directory=str(files.root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        files.address = f"http://127.0.0.1:{running.server_address[1]}"
        files.publish()
        yield requested
        running.shutdown()
        thread.join()


def refused(files, name, match):
    """The text of the error, one line, after which nothing is left in the cache."""
    with pytest.raises(data.DataError, match=match) as caught:
        files.load(name)
    assert "\n" not in str(caught.value)
    assert files.left() == []
    return str(caught.value)


@pytest.mark.parametrize("name", PIXELS)
def test_images_are_pixels_between_0_and_1(files, name, capsys, caplog):
    found = files.load(name)
    pixels = (PIXELS[name].reshape(7, 784).astype(np.float32) / np.float32(255)).astype(np.float32)
    np.testing.assert_array_equal(found.train_inputs, pixels[:TRAIN])
    np.testing.assert_array_equal(found.test_inputs, pixels[TRAIN:])
    np.testing.assert_array_equal(found.train_labels, SHOWN[:TRAIN])
    np.testing.assert_array_equal(found.test_labels, SHOWN[TRAIN:])
    assert [part.dtype for part in found[:4]] == [np.float32, np.int32] * 2
    assert found.classes == 10
    shown = capsys.readouterr()
    assert (shown.out, caplog.records) == ("", [])
    assert [line.split(":")[0] for line in shown.err.splitlines()] == [name, name]


def test_image_sets_do_not_get_each_others_files(files):
    first, second, again = files.load("kmnist"), files.load("fashion_mnist"), files.load("kmnist")
    assert not np.array_equal(first.train_inputs, second.train_inputs)
    np.testing.assert_array_equal(first.train_inputs, again.train_inputs)
    np.testing.assert_array_equal(second.train_inputs * 255, PIXELS["fashion_mnist"][:TRAIN].reshape(TRAIN, -1))


def test_image_sets_downloaded_do_not_get_each_others_files(files, server):
    for name, pixels in PIXELS.items():
        found = data.load(name, cache_dir=str(files.cache))
        np.testing.assert_array_equal(found.train_inputs * 255, pixels[:TRAIN].reshape(TRAIN, -1))
    assert len([path for command, path in server if command == "GET"]) == 8
    assert not (files.cache / "downloads").exists()


def test_records_read_alone_are_those_of_the_arrays(files):
    arrays = files.load("kmnist")
    source = builder("kmnist")(data_dir=str(files.cache), file_format="array_record").as_data_source("train")
    assert [len(source), source[0]["image"].shape] == [TRAIN, (28, 28, 1)]
    for row, label, record in zip(arrays.train_inputs, arrays.train_labels, source, strict=True):
        np.testing.assert_array_equal(row * 255, record["image"].ravel())
        assert label == record["label"]


# By adult.names, and "?" last: of the first file, then of the second.
ORDINAL = [
    [39, 5, 77516, 0, 13, 2, 8, 3, 0, 1, 2174, 0, 40, 0],
    [52, 8, 209642, 3, 9, 0, 14, 2, 4, 1, 0, 0, 45, 41],
    [30, 0, 100, 10, 14, 1, 3, 0, 0, 0, 0, 0, 40, 39],
]
ORDINAL_TEST = [
    [25, 0, 226802, 2, 7, 2, 7, 1, 4, 1, 0, 5, 40, 38],
    [61, 0, 1, 2, 7, 2, 7, 1, 4, 1, 0, 0, 40, 0],
]


def test_adult_is_parsed_and_standardised_by_training_rows(files):
    found = files.load("adult")
    np.testing.assert_array_equal(found.train_labels, [0, 1, 0])
    np.testing.assert_array_equal(found.test_labels, [0, 1])
    assert (found.train_inputs.dtype, found.train_labels.dtype, found.classes) == (np.float32, np.int32, 2)
    train, test = np.array(ORDINAL, float), np.array(ORDINAL_TEST, float)
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    constant = list(file_format.COLUMNS).index("capital-loss")
    deviation[constant] = np.inf
    np.testing.assert_allclose(found.train_inputs, (train - mean) / deviation, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.test_inputs, (test - mean) / deviation, rtol=1e-5, atol=1e-6)
    assert found.test_inputs[0, constant] == 0


def test_adult_one_hot_has_a_column_for_each_category(files):
    assert len(file_format.one_hot_names()) == 108
    found = files.load("adult_one_hot")
    assert found.train_inputs.shape == (3, 108)
    assert np.isfinite(found.train_inputs).all()
    for column, name in enumerate(file_format.one_hot_names()):
        feature, _, category = name.partition("=")
        place = list(file_format.COLUMNS).index(feature)
        code = file_format.COLUMNS[feature].index(category) if category else None
        raw = np.array([row[place] if code is None else row[place] == code for row in ORDINAL], float)
        spread = raw.std() or np.inf
        np.testing.assert_allclose(found.train_inputs[:, column], (raw - raw.mean()) / spread, rtol=1e-5, atol=1e-6)
    assert "native-country=?" in file_format.one_hot_names()
    assert "sex=?" not in file_format.one_hot_names()


@pytest.mark.parametrize(
    ("file", "old", "new", "match"),
    [
        ("adult.data", "HS-grad", "Kindergarten", r"adult.data, line 2: education: expected one of .*'Kindergarten'"),
        ("adult.data", "Hong, <=50K", "Hong", "adult.data, line 3: expected 14 fields and a label; found 14 in all"),
        ("adult.data", "Hong, <=50K", "Hong, 1, <=50K", "line 3: expected 14 fields and a label; found 16 in all"),
        ("adult.data", ">50K", "50K", "adult.data, line 2: expected the label <=50K or >50K; found '50K'"),
        ("adult.data", "39", "?", r"adult.data, line 1: age: expected a number; found '\?'"),
        ("adult.data", "Female", "?", r"adult.data, line 3: sex: expected one of Female, Male; found '\?'"),
        ("adult.test", ">50K.", ">50K..", r"adult.test, line 3: expected the label <=50K or >50K; found '>50K.'"),
        ("adult.test", "|1x3", "1x3", "adult.test, line 1: expected 14 fields and a label; found 1 in all"),
    ],
)
def test_wrong_line_of_adult_is_refused_with_its_number(files, file, old, new, match):
    content = ADULT[file].replace(old, new, 1)
    assert content != ADULT[file]
    files.write("adult", file, content.encode())
    files.publish()
    refused(files, "adult", match)


@pytest.mark.parametrize("package", PACKAGES)
def test_file_with_another_sum_is_refused_by_name(files, package):
    file = "adult.test" if package == "adult" else LABELS
    path = files.root / package / file
    good = path.read_bytes()
    path.write_bytes(good[:-3])
    text = refused(files, package, f"{path}: expected the sha256 {sha256(good)}")
    assert f"found {sha256(good[:-3])}, of {len(good) - 3:,} bytes" in text
    path.write_bytes(good)
    assert len(files.load(package).train_labels)


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        (IMAGES, idx(PIXELS["kmnist"][:TRAIN])[:-50], "expected a complete gzip file; found: "),
        (IMAGES, idx(SHOWN), "expected bytes with 3 axes, 00000803 at the start; found 00000801"),
        (IMAGES, idx(PIXELS["kmnist"][:TRAIN, :27]), r"expected images of 28 x 28; found \(27, 28\)"),
        (LABELS, gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 5, 1, 2])), r"expected 5 bytes, \(5,\), .* found 2"),
        (LABELS, gzip.compress(bytes([0, 0, 8, 1, 0])), "expected the lengths of 1 axes; found the end of the file"),
        (LABELS, idx(SHOWN), "expected 5 labels, one an image; found 7"),
        (LABELS, idx(SHOWN[:TRAIN] + 6), "expected labels below 10; found 11"),
    ],
    ids=["cut off", "other axes", "other size", "too few bytes", "no lengths", "more labels", "unknown label"],
)
def test_file_of_another_format_is_refused_by_name(files, file, content, match):
    path = files.write("kmnist", file, content)
    files.publish()
    refused(files, "kmnist", f"{path}: {match}")


def test_missing_folder_and_missing_file_are_named_with_where_to_get_it(files):
    path = files.root / "kmnist" / IMAGES
    path.unlink()
    text = refused(files, "kmnist", f"{path}: expected a file of kmnist there; found none")
    assert f"{files.address}/kmnist/{IMAGES}" in text
    with pytest.raises(data.DataError, match=f"{files.root}/none/kmnist/t10k.*: expected a file of kmnist there"):
        data.load("kmnist", data_dir=str(files.root / "none"), cache_dir=str(files.cache))
    with pytest.raises(data.DataError, match="name: expected one of digits, adult, .*; got 'mnist'"):
        files.load("mnist")


def test_folders_are_those_of_the_environment_variables(files, monkeypatch):
    monkeypatch.setenv("QBOUND_DATA_DIR", str(files.root))
    monkeypatch.setenv("QBOUND_CACHE_DIR", str(files.cache))
    np.testing.assert_array_equal(data.load("kmnist").train_labels, SHOWN[:TRAIN])
    assert (files.cache / "kmnist" / "1.0.0").is_dir()
    monkeypatch.delenv("QBOUND_CACHE_DIR")
    monkeypatch.setenv("HOME", str(files.root / "home"))
    data.load("kmnist")
    assert (files.root / "home" / ".cache" / "qbound" / "kmnist" / "1.0.0").is_dir()


def test_prepared_set_needs_no_files_any_more(files, capsys):
    first = files.load("adult")
    for path in (files.root / "adult").iterdir():
        path.write_bytes(b"another")
    capsys.readouterr()
    np.testing.assert_array_equal(files.load("adult").train_inputs, first.train_inputs)
    (files.root / "adult").rename(files.root / "gone")
    np.testing.assert_array_equal(files.load("adult").train_inputs, first.train_inputs)
    assert capsys.readouterr().err == ""
    (files.cache / ".adult.lock").unlink()
    files.load("adult")
    assert not (files.cache / ".adult.lock").exists(), "a prepared set is read from a folder that cannot be written to"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError("boom"), OSError("text alone")])
def test_interrupted_preparation_is_begun_anew(files, monkeypatch, stop):
    made = builder("kmnist")._generate_examples

    def interrupted(self, *paths):
        yield from list(made(self, *paths))[:3]
        assert list(files.cache.rglob("incomplete.*"))
        raise stop

    with monkeypatch.context() as patch:
        patch.setattr(builder("kmnist"), "_generate_examples", interrupted)
        with pytest.raises((KeyboardInterrupt, RuntimeError, data.DataError)):
            files.load("kmnist")
    assert files.left() == []
    assert [path.name for path in files.cache.iterdir()] == [".kmnist.lock"]
    assert len(files.load("kmnist").train_labels) == TRAIN


def test_what_a_killed_preparation_left_is_removed(files):
    for folder in ("kmnist/incomplete.ABCDEF_1.0.0", "downloads/kmnist/extracted"):
        (files.cache / folder).mkdir(parents=True)
        (files.cache / folder / "part").write_bytes(b"half")
    assert len(files.load("kmnist").train_labels) == TRAIN
    assert [path.name for path in (files.cache / "kmnist").iterdir()] == ["1.0.0"]
    assert not (files.cache / "downloads").exists()


def test_damaged_prepared_set_is_named(files):
    files.load("kmnist")
    folder = files.cache / "kmnist" / "1.0.0"
    for path in folder.glob("*train.array_record*"):
        path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(data.DataError, match=f"{folder}: expected the prepared rows of train; found: .* Remove that"):
        files.load("kmnist")


def test_download_of_another_file_is_refused(files, server):
    (files.root / "kmnist" / IMAGES).write_bytes(b"<html>not here</html>")
    with pytest.raises(data.DataError, match=f"{files.address}/kmnist/{IMAGES}.* wrong checksum") as caught:
        data.load("kmnist", cache_dir=str(files.cache))
    assert "\n" not in str(caught.value)
    assert files.left() == []


def test_earlier_download_is_verified_again(files, server):
    downloads = files.cache / "downloads"
    for cache in ("first", "second"):
        made = builder("kmnist")(data_dir=str(files.cache / cache), file_format="array_record")
        if cache == "first":
            made.download_and_prepare(download_dir=str(downloads))
            path = max(downloads.rglob("*.gz"), key=lambda path: path.stat().st_size)
            path.write_bytes(idx(PIXELS["fashion_mnist"][:TRAIN]))
        else:
            with pytest.raises(RawFileError, match=f"{path}: expected the sha256"):
                made.download_and_prepare(download_dir=str(downloads))


def test_second_process_waits_for_the_first(files, capsys):
    fcntl = pytest.importorskip("fcntl")
    files.cache.mkdir()
    found = []
    with (files.cache / ".kmnist.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: found.append(files.load("kmnist")))
        thread.start()
        thread.join(timeout=0.5)
        assert files.left() == []
        assert thread.is_alive()
    thread.join(timeout=30)
    assert len(found[0].train_labels) == TRAIN
    assert "kmnist: waiting for another process that prepares it" in capsys.readouterr().err


def test_without_network_local_files_are_proposed(files, monkeypatch):
    with pytest.raises(
        data.DataError, match="expected to download kmnist .*found: .*refused.* Set QBOUND_DATA_DIR, or"
    ):
        data.load("kmnist", cache_dir=str(files.cache))

    def broken(self, url, *arguments):
        raise requests.ConnectionError(f"connection to {url}\nlost")

    monkeypatch.setattr(preparation, "_announce_download", lambda *arguments: None)
    monkeypatch.setattr(_Downloader, "_sync_download", broken)
    with pytest.raises(data.DataError, match="expected to download kmnist .*lost. Set QBOUND_DATA_DIR, or --data-dir"):
        data.load("kmnist", cache_dir=str(files.cache))
    assert files.left() == []


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "expected room to prepare kmnist.*No space left.*Make room"),
        (RuntimeError("write() failed: No space left on device;\nat byte 7"), "expected room to prepare kmnist"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "there"), "there: .*Read-only file system.*QBOUND_CACHE_DIR"),
    ],
)
def test_cache_without_room_or_not_to_be_written_is_named(files, monkeypatch, error, match):
    def failing(path, examples):
        raise error

    monkeypatch.setattr(tfds.core.file_adapters.ArrayRecordFileAdapter, "write_examples", failing)
    refused(files, "kmnist", match)


@pytest.mark.parametrize("name", ["kmnist", "adult_one_hot"])
@pytest.mark.parametrize("content", [b"", b'{"name": "km', b"{}", b"\xff\x00"], ids=["empty", "cut", "other", "bytes"])
def test_damaged_description_of_a_prepared_set_is_one_line_that_says_what_to_do(files, name, content):
    first = files.load(name)
    (path,) = files.cache.rglob("dataset_info.json")
    path.write_bytes(content)
    folder = files.cache / ("kmnist" if name == "kmnist" else "adult/one_hot")
    with pytest.raises(data.DataError) as caught:
        files.load(name)
    text = str(caught.value)
    assert text.startswith(f"{folder}: expected a prepared {name}, with its dataset_info.json; found: ")
    assert text.endswith(". Remove that folder, and the data set is prepared anew") and "\n" not in text
    shutil.rmtree(folder)
    np.testing.assert_array_equal(files.load(name).train_inputs, first.train_inputs)


def test_cache_that_cannot_be_made_is_named(files):
    files.cache.write_text("a file")
    with pytest.raises(data.DataError, match=f"{files.cache}.*: expected to prepare kmnist .*QBOUND_CACHE_DIR"):
        files.load("kmnist")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_cache_without_the_right_to_write_is_named(files):
    files.cache.mkdir(mode=0o500)
    refused(files, "kmnist", f"{files.cache}.*Permission denied.*QBOUND_CACHE_DIR")


def test_digits_need_no_files(monkeypatch):
    monkeypatch.setenv("QBOUND_DATA_DIR", "/nowhere")
    found = data.load("digits")
    assert [part.shape for part in found[:4]] == [(1500, 64), (1500,), (297, 64), (297,)]
    assert [part.dtype for part in found[:4]] == [np.float32, np.int32] * 2
    assert (found.train_inputs.min(), found.train_inputs.max(), found.classes) == (0, 1, 10)


def test_intercept_is_a_column_of_ones_at_the_end():
    inputs = np.arange(6, dtype=np.float32).reshape(3, 2)
    found = data.with_intercept(inputs)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [[0, 1, 1], [2, 3, 1], [4, 5, 1]])


IMAGE_COUNTS = ([6000] * 10, [1000] * 10)
ADULT_COUNTS = ([24720, 7841], [12435, 3846])
# Rows of each label in both splits, columns, and the sha256 of the four arrays one after another.
PUBLISHED = {
    "adult": (*ADULT_COUNTS, 14, "919c1464dae63179586cfd4dfe699929542785db3f848985226cdea798d537fe"),
    "adult_one_hot": (*ADULT_COUNTS, 108, "0d3d302db3e7a16cd67737af7d3dc2c443eb1f5155d814784e1d01bb743c0f3b"),
    "kmnist": (*IMAGE_COUNTS, 784, "403eba4da282d9a70e06e61f67b82ddb2a4f8b2b6d0ca54d495ffaefd393181e"),
    "fashion_mnist": (*IMAGE_COUNTS, 784, "ff053b7549318f80ca0688ea4d4763926c2de132532e451c063dacbe22946fbe"),
}


@pytest.mark.skipif(not os.environ.get("QBOUND_DATA_DIR"), reason="QBOUND_DATA_DIR does not name the published files")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_data_is_complete(name, tmp_path):
    train_counts, test_counts, columns, expected = PUBLISHED[name]
    found = data.load(name, cache_dir=str(tmp_path))
    np.testing.assert_array_equal(np.bincount(found.train_labels), train_counts)
    np.testing.assert_array_equal(np.bincount(found.test_labels), test_counts)
    assert found.train_inputs.shape == (sum(train_counts), columns)
    assert found.test_inputs.shape == (sum(test_counts), columns)
    if name.startswith("adult"):
        np.testing.assert_allclose(found.train_inputs.mean(axis=0, dtype=float), 0, atol=1e-6)
        varying = found.train_inputs.any(axis=0)
        assert varying.all()
        np.testing.assert_allclose(found.train_inputs.std(axis=0, dtype=float), 1, atol=1e-6)
    assert sha256(b"".join(part.tobytes() for part in found[:4])) == expected
