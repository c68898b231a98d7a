"""A run as a folder: what was asked, what was found, where, and enough to go on after an interruption.

config.json        the run; its hash is in the name of the folder
environment.json   for every start of the run: commit, whether files differed from it, versions, device
metrics.jsonl      one record a line; the same for the same run, byte by byte, however often it was interrupted
timing.jsonl       seconds of training, one line for each record
checkpoint.npz     parameters and state after the last record; once the run has ended, parameters and its result
result.json        how the run ended; a run that has this is not repeated
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import subprocess
import zipfile
import zlib
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.errors import UserError, writing
from experiments.methods import first_state, numbers
from experiments.train import Problem, Run, Snapshot, train

__all__ = ["Result", "environment", "folder_of", "perform", "read_json", "read_lines", "read_result", "write_json"]

METRICS, TIMING, CHECKPOINT, RESULT = "metrics.jsonl", "timing.jsonl", "checkpoint.npz", "result.json"
ENVIRONMENT = "environment.json"
REMOVE = "Remove it, and what it was of is made again"
# Raised for a checkpoint that is not there, has not what is looked for, or is damaged.
UNREADABLE = (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)
PACKAGES = ("jax", "jaxlib", "optax", "numpy", "qbound")


class Result(NamedTuple):
    """How a run ended, and its last record."""

    ended: str
    step: int
    seconds: float
    metrics: dict[str, float]


def folder_of(run: Run, parent: Path) -> Path:
    """Of a name that tells runs apart, and a hash that tells configurations apart."""
    text = json.dumps(dataclasses.asdict(run), sort_keys=True)
    name = f"{run.split}-{run.learning_rate:g}-{run.schedule}-{run.l2:g}-{run.damping:g}-seed{run.seed}"
    return parent / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def perform(
    run: Run, problem: Callable[[], Problem], folder: Path, show: Callable[[Snapshot, int], None] = lambda *_: None
) -> Result:
    """The result of a run: read if it has ended, gone on with if it was interrupted, else made.

    `problem` is called only if there is something to train, and `show` with every snapshot and the number of rows.
    """
    if (found := read_result(folder)) is not None:
        return found
    if (found := _read_ended(folder)) is not None:
        _write_result(folder, found)
        return found
    data = problem()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dataclasses.asdict(run))
    starts = read_json(folder / ENVIRONMENT) if (folder / ENVIRONMENT).exists() else []
    write_json(folder / ENVIRONMENT, [*starts, {**environment(), "seed": run.seed}])
    start = _restore(run, data, folder / CHECKPOINT)
    for file in (METRICS, TIMING):
        _drop_lines_after(folder / file, -1 if start is None else start.step)
    for snapshot in train(run, data, start):
        epoch = snapshot.step * run.batch / len(data.train.labels)
        _append(folder / METRICS, {"step": snapshot.step, "epoch": epoch, **snapshot.metrics})
        _append(folder / TIMING, {"step": snapshot.step, "seconds": snapshot.seconds})
        show(snapshot, len(data.train.labels))
        if snapshot.ended is None:
            _save(folder / CHECKPOINT, snapshot, {"params": snapshot.params, "state": snapshot.state})
            continue
        # The checkpoint first, so that a run with a result has no older one. Where death comes between the two, the
        # result is in the checkpoint.
        found = Result(snapshot.ended, snapshot.step, snapshot.seconds, snapshot.metrics)
        _save(folder / CHECKPOINT, snapshot, {"params": snapshot.params}, result=json.dumps(_as_json(found)))
        _write_result(folder, found)
        return found
    raise AssertionError("a run ends with a snapshot that says how")


def read_result(folder: Path) -> Result | None:
    """None if the run has not ended."""
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        return _from_json(read_json(path))
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: expected the result of a run; found: {error!r}. {REMOVE}") from error


def _read_ended(folder: Path) -> Result | None:
    """The result in the last checkpoint of a run that has ended; None if that has not all of its records."""
    try:
        with np.load(folder / CHECKPOINT) as file:
            found = _from_json(json.loads(str(file["result"])))
        return found if read_lines(folder)[-1]["step"] == found.step else None
    except (*UNREADABLE, IndexError):
        return None


def _write_result(folder: Path, result: Result) -> None:
    write_json(folder / RESULT, _as_json(result))


def _as_json(result: Result) -> dict[str, Any]:
    return {**result._asdict(), "metrics": _without_nan(result.metrics)}


def _from_json(content: Any) -> Result:
    return Result(**{**content, "metrics": _with_nan(content["metrics"])})


def read_lines(folder: Path) -> list[dict[str, float]]:
    """The records of a run, each with its seconds."""
    try:
        metrics, timing = (
            [json.loads(line) for line in (folder / file).read_text().splitlines()] for file in (METRICS, TIMING)
        )
        return [_with_nan({**one, **other}) for one, other in zip(metrics, timing, strict=True)]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: expected the records of a run; found: {error}. {REMOVE}") from error


def read_json(path: Path) -> Any:
    """What `write_json` wrote."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected JSON; found: {error}. {REMOVE}") from error


def _without_nan(record: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no word for numbers that are not finite but null."""
    return {name: value if math.isfinite(value) else None for name, value in record.items()}


def _with_nan(record: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in record.items()}


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    _write(path, json.dumps(content, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.part")
    with writing(path):
        temporary.write_text(text)
        os.replace(temporary, path)


def _append(path: Path, record: Mapping[str, float]) -> None:
    with writing(path), path.open("a") as file:
        file.write(json.dumps(_without_nan(record), allow_nan=False) + "\n")


def _drop_lines_after(path: Path, step: int) -> None:
    """Those that a run wrote after its last checkpoint, the last perhaps in part."""
    kept = []
    before = path.read_text() if path.exists() else ""
    for line in before.splitlines():
        try:
            if json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            break
        kept.append(line + "\n")
    if (after := "".join(kept)) != before:
        _write(path, after)


def _save(path: Path, snapshot: Snapshot, kept: Any, **more: str) -> None:
    arrays: dict[str, Any] = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(kept))} | more
    temporary = path.with_name("checkpoint.part.npz")
    with writing(path):
        np.savez(temporary, step=snapshot.step, seconds=snapshot.seconds, **arrays)
        os.replace(temporary, path)


def _restore(run: Run, problem: Problem, path: Path) -> Snapshot | None:
    """None if there is no checkpoint that a run can go on from: it begins again."""
    params = jax.ShapeDtypeStruct((problem.train.inputs.shape[1], problem.classes), np.float32)
    setting = numbers(run.learning_rate, run.schedule, 1, run.l2, run.damping)
    shapes = {"params": params, "state": jax.eval_shape(functools.partial(first_state, run.method), setting, params)}
    leaves, treedef = jax.tree.flatten(shapes)
    try:
        with np.load(path) as file:
            found = [file[f"leaf{i}"] for i in range(len(leaves))]
            step, seconds = int(file["step"]), float(file["seconds"])
    except UNREADABLE:
        return None
    if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in zip(found, leaves, strict=True)):
        return None  # of a method that kept another state
    kept = jax.tree.unflatten(treedef, [jax.numpy.asarray(leaf) for leaf in found])
    return Snapshot(step, seconds, kept["params"], kept["state"], {}, None)


@functools.cache
def environment() -> dict[str, Any]:
    """What the numbers may depend on beside the run."""
    device = jax.devices()[0]
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": (status := _git("status", "--porcelain")) is None or status != "",
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
        "device": f"{device.platform}, {device.device_kind}, {os.cpu_count()} cores",
        "machine": platform.platform(),
    }


def _git(*arguments: str) -> str | None:
    """None without git, or outside a clone."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
