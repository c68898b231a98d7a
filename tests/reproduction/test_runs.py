"""A run as a folder: what it leaves behind, and that it goes on to the same numbers wherever it was killed."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from experiments import runs
from experiments.errors import UserError
from experiments.methods import Method
from experiments.train import Run
from tests import processes
from tests.reproduction.tiny import CLASSES, ROOT, WIDTH, a_run, tiny_problem


def test_run_leaves_config_environment_metrics_and_checkpoint(tmp_path):
    run = a_run()
    folder = runs.folder_of(run, tmp_path)
    result = runs.perform(run, tiny_problem, folder)
    config = json.loads((folder / "config.json").read_text())
    assert Run(**{**config, "method": Method(**config["method"])}) == run
    (start,) = json.loads((folder / "environment.json").read_text())
    assert set(start) == {"commit", "dirty", "versions", "device", "machine", "seed"}
    assert start["versions"]["jax"] == jax.__version__
    records = runs.read_lines(folder)
    assert [r["step"] for r in records] == [0, 2, 4, 6, 8, 10, 12, 16, 20, 24, 26]
    assert records[-1]["epoch"] == pytest.approx(2)
    assert (np.diff([r["seconds"] for r in records]) > 0).all()
    assert result.metrics["objective"] == records[-1]["objective"] < records[0]["objective"]
    with np.load(folder / "checkpoint.npz") as kept:
        assert kept["leaf0"].shape == (WIDTH, CLASSES)
        assert int(kept["step"]) == 26


def test_finished_run_is_not_repeated_and_another_one_is_not_taken_for_it(tmp_path):
    def never():
        raise AssertionError("nothing is left to train")

    run = a_run(epochs=0.5)
    first = runs.perform(run, tiny_problem, runs.folder_of(run, tmp_path))
    assert runs.perform(run, never, runs.folder_of(run, tmp_path)) == first
    for change in ({"seed": 1}, {"epochs": 1}, {"method": Method("sgd")}, {"seconds": 5.0}):
        assert runs.folder_of(dataclasses.replace(run, **change), tmp_path) != runs.folder_of(run, tmp_path)


def test_run_begins_again_where_its_checkpoint_is_of_no_use(tmp_path):
    run = a_run(epochs=0.5)
    folder = tmp_path / "run"
    runs.perform(run, tiny_problem, folder)
    whole = (folder / "metrics.jsonl").read_bytes()

    def parameters_alone(path):
        with np.load(path) as file:
            kept = {name: file[name] for name in ("step", "seconds", "leaf0")}
        np.savez(path, **kept)

    for damage in (
        parameters_alone,
        lambda path: path.write_bytes(b"PK"),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: (folder / "metrics.jsonl").unlink(),
        lambda path: (folder / "metrics.jsonl").write_bytes(whole.rsplit(b"\n", 2)[0] + b"\n"),
        lambda path: (folder / "metrics.jsonl").write_bytes(b'{"st": 0}\n'),
    ):
        (folder / "result.json").unlink()
        damage(folder / "checkpoint.npz")
        runs.perform(run, tiny_problem, folder)
        assert (folder / "metrics.jsonl").read_bytes() == whole


ENDS = {
    "finished": {},
    "budget": {"seconds": 1e-9},
    "diverged": {"learning_rate": 1e38, "method": Method("sgd")},
}


@pytest.mark.parametrize("ended", ENDS)
def test_run_with_a_result_has_the_checkpoint_of_its_last_step(tmp_path, monkeypatch, ended):
    """Killed before each of its last writes, and begun again or not."""
    run = a_run(epochs=0.5, **ENDS[ended])
    real, writes = os.replace, []

    def killed_at(at, folder):
        writes.clear()

        def replace(source, target):
            writes.append(target)
            if len(writes) == at:
                raise Killed
            real(source, target)

        monkeypatch.setattr(os, "replace", replace)
        with contextlib.suppress(Killed):
            runs.perform(run, tiny_problem, folder)
        monkeypatch.undo()
        return len(writes)

    last = killed_at(None, tmp_path / "whole")
    for at in range(last - 2, last + 1):
        folder = tmp_path / str(at)
        assert killed_at(at, folder) == at
        if (found := runs.read_result(folder)) is not None:
            assert checkpoint(folder)["step"] == found.step
        result = runs.perform(run, tiny_problem, folder)
        assert result.ended == ended and result.step == runs.read_lines(folder)[-1]["step"]
        np.testing.assert_equal(result, runs.read_result(folder))
        assert checkpoint(folder)["step"] == result.step
        assert "leaf1" not in checkpoint(folder), "no state is kept of a run that has ended"


def checkpoint(folder):
    with np.load(folder / "checkpoint.npz") as file:
        return dict(file)


def test_end_of_a_run_is_read_from_its_checkpoint_where_the_result_is_missing(tmp_path):
    """Nothing is trained again, which would take other seconds."""

    def never():
        raise AssertionError("nothing is left to train")

    run = a_run(epochs=0.5)
    first = runs.perform(run, tiny_problem, tmp_path)
    (tmp_path / "result.json").unlink()
    assert runs.perform(run, never, tmp_path) == first == runs.read_result(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *((name, '{"ended": ') for name in ("result.json", "environment.json", "metrics.jsonl")),
        *(("result.json", content) for content in ('{"ended": "finished"}', "[]", '{"metrics": 1}', '{"metrics": {}}')),
        ("metrics.jsonl", "1"),
    ],
)
def test_damaged_file_of_a_run_is_named(tmp_path, file, content):
    run = a_run(epochs=0.5)
    runs.perform(run, tiny_problem, tmp_path)
    if file == "environment.json":
        (tmp_path / "result.json").unlink()
        (tmp_path / "checkpoint.npz").unlink()
    if file == "metrics.jsonl":
        (tmp_path / "timing.jsonl").write_text("1")
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=f"{tmp_path}.*Remove it, and what it was of is made again"):
        runs.perform(run, tiny_problem, tmp_path)
        runs.read_lines(tmp_path)


class Killed(BaseException):
    """Stands for a signal."""


def test_run_killed_at_any_write_resumes_to_the_same_metrics(tmp_path, monkeypatch):
    """At every operation on files, before it and half-way through it."""
    run = a_run(method=Method("momentum"), epochs=1)
    whole = tmp_path / "whole"
    runs.perform(run, tiny_problem, whole)
    real_replace, real_append = os.replace, runs._append
    kills = 0
    for at in range(100):
        folder, count = tmp_path / f"killed{at}", [0]

        def due(count=count, at=at):
            count[0] += 1
            return count[0] - 1 == at

        def replace(source, target, due=due):
            if due():
                raise Killed
            real_replace(source, target)

        def append(path, record, due=due):
            if due():
                with path.open("a") as file:
                    file.write('{"step": 99, "obj')
                raise Killed
            real_append(path, record)

        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(runs, "_append", append)
        try:
            runs.perform(run, tiny_problem, folder)
        except Killed:
            kills += 1
        else:
            break
        finally:
            monkeypatch.undo()
        before = (folder / "metrics.jsonl").read_text().count('"epoch"') if (folder / "metrics.jsonl").exists() else 0
        result = runs.perform(run, tiny_problem, folder)
        assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes(), (
            f"killed at write {at}"
        )
        assert len(runs.read_lines(folder)) >= before
        assert result == runs.read_result(folder)
        shutil.rmtree(folder)
    assert kills > 20


@pytest.mark.parametrize("method", [Method("kspfb"), Method("spfb", window=150), Method("lspfb", rank=3)], ids=str)
def test_state_of_every_kind_of_method_goes_on_where_it_was(tmp_path, method):
    run = a_run(method=method, damping=0.1, learning_rate=1.0, epochs=0.6)
    runs.perform(run, tiny_problem, tmp_path / "whole")

    def kill(snapshot, rows):
        if snapshot.step == 4:
            raise Killed

    with pytest.raises(Killed):
        runs.perform(run, tiny_problem, tmp_path / "killed", kill)
    runs.perform(run, tiny_problem, tmp_path / "killed")
    assert len(json.loads((tmp_path / "killed" / "environment.json").read_text())) == 2
    assert (tmp_path / "killed" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_command_killed_by_a_signal_goes_on(tmp_path):
    """The real thing, as a user would: no handler sees this signal."""
    changes = ["contenders=SGD", "seeds=1", "l2=0.001", "schedules=cosine", "batch=10"]

    def start(output):
        arguments = [sys.executable, "-m", "experiments.run", *changes, f"output={tmp_path / output}"]
        return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, env=processes.environment(quick=True))

    process = start("killed")
    stop = time.monotonic() + 120
    while not list(tmp_path.glob("killed/*/sgd/all-*/checkpoint.npz")) and time.monotonic() < stop:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run was over before it could be killed"
    both = [start("killed"), start("whole")]
    assert [process.wait() for process in both] == [0, 0]
    (killed,), (whole,) = (list(tmp_path.glob(f"{output}/*/sgd/all-*")) for output in ("killed", "whole"))
    assert len(json.loads((killed / "environment.json").read_text())) == 2
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
