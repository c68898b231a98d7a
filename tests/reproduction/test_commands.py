"""Commands on tiny data: what they leave behind, and what they say to a user's mistake."""

import dataclasses
import errno
import importlib
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import qbound
from experiments import experiment as comparison
from experiments import reproduce, robustness, train
from experiments import run as command
from experiments.experiment import Experiment
from experiments.overrides import load_config, override
from experiments.progress import Progress
from experiments.robustness import Robustness
from tests import processes
from tests.reproduction.tiny import CLASSES, ROOT, ROWS, WIDTH, a_run, tiny_data


@pytest.mark.usefixtures("tiny")
def test_robustness_shows_what_diverges(tmp_path):
    config = importlib.import_module("configs.robustness").config()
    assert max(config.learning_rates) / min(config.learning_rates) == pytest.approx(1e5)
    config = dataclasses.replace(
        config, data_sets=("adult",), learning_rates=(0.1, 1e30), epochs=0.1, batch=50, output=str(tmp_path),
        intercept=False, entrants=tuple(dataclasses.replace(one, chunk=2) for one in config.entrants),
    )  # fmt: skip
    path = robustness.perform_all(config, show=False)
    found = robustness.read(path)
    assert set(found.end["adult"]) == {"SGD", "Adam", "SPFB", "LSPFB k=10", "exact Hessian"}
    assert found.start["adult"] == pytest.approx(np.log(CLASSES), rel=1e-5)
    assert all(values[0.1] < found.start["adult"] < values[1e30] for values in found.end["adult"].values())
    assert np.isinf(found.end["adult"]["SGD"][1e30])
    text = robustness.table(found)
    assert "| Adult | SGD | 0.1 to 0.1, 1 of 2 |" in text and "overflow" in text
    assert robustness.draw(found, tmp_path / "made" / "rates.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("tiny")
def test_reproduction_in_small_draws_everything_and_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(reproduce, "DATA_SETS", ("adult",))
    monkeypatch.setattr(reproduce, "QUICK", {"SGD", "SPFB, paper"})
    real = reproduce.load_config

    def shorter(path, kind):
        config = real(path, kind)
        return dataclasses.replace(config, entrants=config.entrants[:1]) if kind is Robustness else config

    monkeypatch.setattr(reproduce, "load_config", shorter)
    assert reproduce.main(["--quick", "--output", str(tmp_path)]) == 0
    made = {path.name for path in tmp_path.iterdir() if path.is_file() and path.name != ".lock"}
    assert made == {"paper.png", "small_batches.png", "beyond.png", "robustness.png", "tables.md"}
    text = (tmp_path / "tables.md").read_text()
    assert "### Adult, batches of 10, l2 = 0.0001" in text and "### Learning rates" in text and "revision " in text
    capsys.readouterr()
    assert reproduce.main(["--quick", "--output", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert lines and all(line.endswith("made before") for line in lines)
    assert (tmp_path / "tables.md").read_text() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["configs/nothing.py"],
            "configs/nothing.py: expected a file with a configuration; found none. There are: con",
        ),
        (["configs/demo.py"], "configs/demo.py: expected a function config() that returns Experiment; got DemoConfig"),
        (["README.md"], "README.md: expected a Python file"),
        (["configs/digits.py", "sedes=3"], "sedes: expected one of the fields name, data_set, batch"),
        (["configs/digits.py", "seeds"], "seeds: expected field=value"),
        (["configs/digits.py", "seeds=many"], "seeds: expected int; got 'many'"),
        (["configs/digits.py", "seeds=0"], "seeds: expected a whole number above 0; got 0"),
        (["configs/digits.py", "intercept=maybe"], "intercept: expected True or False; got 'maybe'"),
        (["configs/digits.py", "select=luck"], "select: expected one of validation, test; got 'luck'"),
        (
            ["configs/digits.py", "contenders=SGD,Magic"],
            "contenders: expected labels among SGD; SPFB; SPFB, window; KSPFB; got 'Magic'",
        ),
        (["configs/digits.py", "data_set=mnist"], "name: expected one of digits, adult"),
        (["configs/digits.py", "batch=5000"], "batch: expected at most the 1250 training rows of digits; got 5000"),
        (["configs/digits.py", "validation=0.0001"], "validation: expected a share with rows in both parts, of 1500"),
        (
            ["configs/digits.py", "name=../.."],
            "name: expected the name of a folder, without / or \\ in it; got '../..'",
        ),
        (["configs/digits.py", "name=/etc/x"], "name: expected the name of a folder"),
        (["configs/digits.py", "name=robustness"], "name: expected another than least, robustness"),
        (["configs/digits.py", "l2=0.1,-1"], "l2: expected a number of at least 0 and below 3e+38; got -1.0"),
        (["configs/digits.py", "tuning_share=inf"], "tuning_share: expected a share above 0 and at most 1; got inf"),
        (["configs/digits.py", "least_tolerance=nan"], "least_tolerance: expected a number above 0 and below 3e+38"),
        (["configs/kmnist.py", "--data-dir", "/no/such/folder", "seeds=1"], "/no/such/folder/kmnist"),
        (["configs/digits.py", "output=README.md/x"], "README.md/x"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_mistake_of_a_user_is_one_line_that_says_what_to_do(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("QBOUND_CACHE_DIR", str(tmp_path / "cache"))
    where = [] if any("output" in one for one in arguments) else [f"output={tmp_path}"]
    assert command.main([arguments[0], *where, *arguments[1:]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: ") and message in error


def test_contenders_are_chosen_by_labels_that_may_have_commas():
    config = load_config("configs/digits.py", Experiment)
    chosen = override(config, ["contenders=SPFB, window,SPFB,SGD"]).contenders
    assert [contender.label for contender in chosen] == ["SPFB, window", "SPFB", "SGD"]


def test_configs_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/digits.py", Experiment).name == "digits"


@pytest.mark.usefixtures("tiny")
def test_full_disk_is_one_line_that_says_what_to_do(tmp_path, monkeypatch, capsys):
    """The system does not name the file."""
    real = Path.open

    def full(path, mode="r", *arguments, **options):
        if path.name == "metrics.jsonl" and mode == "a":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", full)
    assert command.main(["configs/digits.py", f"output={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "metrics.jsonl: No space left on device; make room there, or choose another for the results" in error


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (robustness.main, ["rates=1"], "rates: expected one of the fields data_sets, entrants, learning_rates"),
        (robustness.main, ["batch=0"], "batch: expected a whole number above 0; got 0"),
        (robustness.main, ["data_sets=kmnist", "--data-dir", "/no/such", "seed=1"], "/no/such/kmnist"),
        (
            reproduce.main,
            ["--output", "README.md"],
            "README.md: File exists; make that a folder that can be written to",
        ),
    ],
    ids=["field", "number", "folder", "output"],
)
def test_other_commands_say_what_to_do_too(main, arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("QBOUND_CACHE_DIR", str(tmp_path / "cache"))
    assert main([*arguments, *([] if main is reproduce.main else [f"output={tmp_path}"])]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_command_of_robustness_takes_its_own_configuration(tmp_path):
    """Started as a module, whose classes are then there twice."""
    done = processes.run("-m", "experiments.robustness", "l2=-1", f"output={tmp_path}")
    message = "error: l2: expected a number above 0 and below 3e+38; got -1.0"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, message)


def test_config_of_one_s_own_with_a_mistake_is_named(tmp_path, capsys):
    path = tmp_path / "mine.py"
    for text, message in (("def config(:", "SyntaxError"), ("import nothing_of_that_name", "ModuleNotFoundError")):
        path.write_text(text)
        assert command.main([str(path)]) == 2
        assert f"error: {path}: {message}" in capsys.readouterr().err


def test_progress_on_a_terminal_is_one_line_with_all_there_is_to_know(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    progress = Progress("tiny", 3, show=True)
    show = progress.run("SGD, seed 0", a_run(epochs=1, seconds=100.0))
    metrics = {"objective": 0.5, "test_error": 0.25}
    show(train.Snapshot(8, 2.0, None, None, metrics, None), ROWS)
    shown = capsys.readouterr().out.split("\r")[-2]
    assert "[1/3] tiny: SGD, seed 0" in shown
    assert "objective 0.5000, test accuracy 75.00%  step 8/12, 4/s, 1 s left" in shown
    monkeypatch.setenv("COLUMNS", "40")
    show(train.Snapshot(8, 99.5, None, None, metrics, None), ROWS)
    assert len(capsys.readouterr().out.replace("\x1b[2K", "").strip("\r")) == 39


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "perform_all", interrupted)
    assert command.main(["configs/digits.py", f"output={tmp_path}"]) == 130
    assert "the same command goes on" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny")
def test_changes_reach_the_comparison_and_its_table_is_printed(tmp_path, capsys):
    changes = ["contenders=SGD", "seeds=2", "l2=0.01", "schedules=cosine,constant", "intercept=False", "batch=50"]
    assert command.main([*changes, f"output={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert "| SGD | " in shown and "Drawn to " in shown
    summary = json.loads((tmp_path / "digits" / "summary.json").read_text())
    assert summary["l2"] == 0.01
    assert len(summary["runs"]["SGD"]) == 2
    assert summary["experiment"]["schedules"] == ["cosine", "constant"]
    least = json.loads(next((tmp_path / "least").glob("digits-*.json")).read_text())
    problem = comparison.problem_of(tiny_data(), "all", 0.5, False)
    params, _ = qbound.mm.run(qbound.linear_logits, jnp.zeros((WIDTH, CLASSES)), *problem.train, l2=0.01)
    assert least["objective"] == pytest.approx(train.evaluate(params, problem, 0.01)["objective"], abs=1e-6)
