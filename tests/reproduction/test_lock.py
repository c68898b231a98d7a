"""Two processes never write to one folder of results, and a dead one keeps nobody out."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from experiments import experiment as comparison
from experiments import lock, reproduce, robustness
from experiments import run as command
from experiments.benchmarks.suite import __main__ as suite
from experiments.errors import UserError, one_line_errors
from experiments.lock import alone_in, locked
from tests.reproduction.tiny import ROOT, an_experiment

pytest.importorskip("fcntl")

HOLDER = """
import sys, time
from pathlib import Path
from experiments.lock import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def hold():
    """Another process that is in a folder until it is killed."""
    started = []

    def start(folder):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def run_suite(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["suite", *arguments])
    return one_line_errors(suite.main)


COMMANDS = {
    "run": ("digits", lambda where, _: command.main(["contenders=SGD", f"output={where}"])),
    "robustness": ("robustness", lambda where, _: robustness.main([f"output={where}"])),
    "reproduce": ("", lambda where, _: reproduce.main(["--quick", "--output", str(where)])),
    "suite": ("", lambda where, patch: run_suite(["--quick", "--output", str(where)], patch)),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_second_command_in_a_folder_is_refused_in_one_line(tmp_path, monkeypatch, capsys, hold, name):
    monkeypatch.chdir(ROOT)
    folder, main = COMMANDS[name]
    other = hold(tmp_path / folder)
    assert main(tmp_path, monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"error: {tmp_path / folder}: expected to be alone there; found that process {other.pid} ")
    assert "Wait until that has ended, or choose another folder for the results" in error
    assert [path.name for path in (tmp_path / folder).iterdir()] == [".lock"], "nothing was written there"


@pytest.mark.usefixtures("tiny")
def test_killed_process_leaves_no_lock(tmp_path, capsys, hold):
    other = hold(tmp_path / "digits")
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert command.main(["contenders=SGD", "seeds=1", "l2=0.01", f"output={tmp_path}"]) == 0
    assert json.loads((tmp_path / "digits" / "summary.json").read_text())["l2"] == 0.01


def test_folder_is_free_after_an_error_and_another_is_free_meanwhile(tmp_path):
    with pytest.raises(KeyError), alone_in(tmp_path / "a"):
        with alone_in(tmp_path / "b"):
            pass
        with pytest.raises(UserError, match=f"process {os.getpid()} writes to it"), alone_in(tmp_path / "a"):
            raise AssertionError("two are in one folder")
        raise KeyError
    with alone_in(tmp_path / "a"):
        pass


@pytest.mark.usefixtures("tiny")
def test_comparisons_that_share_a_least_objective_look_for_it_once(tmp_path, monkeypatch, capsys):
    experiment = an_experiment(tmp_path)
    found, problem = [], comparison._Problems(experiment, None)["all"]
    path = tmp_path / "least" / "tiny-0.001-1e-05.json"
    with locked(path.with_suffix(".lock"), lambda owner: None):
        thread = threading.Thread(target=lambda: found.append(comparison._least_objective(experiment, 1e-3, problem)))
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive()
        path.write_text('{"objective": 0.25}')
    thread.join(timeout=30)
    assert found == [0.25]
    assert "waiting for another process that looks for its least objective" in capsys.readouterr().out
    assert comparison._least_objective(experiment, 1e-3 * (1 + 1e-9), problem) != 0.25, "another objective"


@pytest.mark.parametrize("where", ["system", "file system"])
def test_where_there_are_no_locks_that_is_said(tmp_path, monkeypatch, capsys, where):
    if where == "system":
        monkeypatch.setattr(lock, "fcntl", None)
    else:

        def unsupported(file, operation):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with alone_in(tmp_path):
        pass
    said = capsys.readouterr().err
    assert said == f"note: {tmp_path} cannot be locked here: start nothing else that writes there\n"


def test_folder_that_cannot_be_written_to_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: .*; make that a folder that can be written to"):
        with alone_in(tmp_path / "file"):
            pass
