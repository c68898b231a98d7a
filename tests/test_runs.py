"""Runs, comparisons and commands: on tiny data, what they leave behind and what they say to a wrong word."""

import dataclasses
import errno
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qbound
from experiments import experiment as comparison
from experiments import methods, report, reproduce, robustness, runs, train
from experiments import run as command
from experiments.data import Data
from experiments.errors import UserError
from experiments.experiment import Contender, Experiment
from experiments.methods import Method
from experiments.overrides import load_config, override
from experiments.progress import Progress
from experiments.robustness import Robustness
from experiments.train import Problem, Rows, Run

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem not in ("__init__", "common"))
ROWS, WIDTH, CLASSES = 1300, 4, 3


@pytest.fixture(autouse=True)
def default_mode():
    """Experiments run in JAX's own mode: float32, and its promotion of dtypes and ranks."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def tiny_data(name="tiny", *, data_dir=None) -> Data:
    """A problem that every data set stands for."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(ROWS + 200, WIDTH)).astype(np.float32)
    labels = np.argmax(inputs[:, :CLASSES] + random.normal(size=(len(inputs), CLASSES)), axis=1).astype(np.int32)
    return Data(inputs[:ROWS], labels[:ROWS], inputs[ROWS:], labels[ROWS:], CLASSES)


@pytest.fixture
def tiny(monkeypatch):
    for module in (comparison, robustness):
        monkeypatch.setattr(module, "load", tiny_data)


def tiny_problem() -> Problem:
    data = tiny_data()
    rows = Rows(jnp.asarray(data.train_inputs), jnp.asarray(data.train_labels))
    return Problem(rows, {"test": Rows(jnp.asarray(data.test_inputs), jnp.asarray(data.test_labels))}, CLASSES)


def a_run(**changes) -> Run:
    first = Run(
        data_set="tiny", split="all", validation=0.2, intercept=False, batch=100, method=Method("adam"),
        learning_rate=0.1, schedule="cosine", l2=1e-3, damping=0.0, epochs=2, chunk=2, seconds=100.0, seed=0,
    )  # fmt: skip
    return dataclasses.replace(first, **changes)


def an_experiment(output, **changes) -> Experiment:
    first = Experiment(
        name="tiny",
        data_set="tiny",
        batch=100,
        contenders=(
            Contender("SGD", Method("sgd"), (0.1, 1.0), epochs=2, chunk=2),
            Contender("SPFB", Method("spfb"), (1.0,), dampings=(0.0, 0.1), epochs=2, chunk=2),
        ),
        schedules=("inverse",),
        l2=(1e-3, 1e-1),
        tuning_share=0.5,
        tuning_seconds=100.0,
        seconds=100.0,
        seeds=2,
        output=str(output),
    )
    return dataclasses.replace(first, **changes)


# The loop.


def test_batches_of_an_epoch_have_every_row_once_and_each_seed_its_own_order():
    first = train.batch_rows(10, 3, 0, range(0, 3))
    assert first.shape == (3, 3)
    assert len(set(first.ravel().tolist())) == 9
    np.testing.assert_array_equal(train.batch_rows(10, 3, 0, range(2, 5))[0], first[2])
    np.testing.assert_array_equal(train.batch_rows(10, 3, 0, range(2, 5))[1:], train.batch_rows(10, 3, 0, range(3, 5)))
    assert not np.array_equal(first, train.batch_rows(10, 3, 0, range(3, 6)))
    assert not np.array_equal(first, train.batch_rows(10, 3, 1, range(0, 3)))


def test_loop_takes_the_steps_of_a_plain_optax_loop():
    problem, run = tiny_problem(), a_run(method=Method("momentum"), schedule="inverse", epochs=1, chunk=13)
    *_, last = train.train(run, problem)
    assert (last.step, last.ended) == (13, "finished")
    w, trace = np.zeros((WIDTH, CLASSES)), 0.0
    for t, rows in enumerate(train.batch_rows(ROWS, 100, 0, range(13))):
        x, y = np.asarray(problem.train.inputs)[rows], np.asarray(problem.train.labels)[rows]
        p = np.exp(x @ w)
        p /= p.sum(axis=1, keepdims=True)
        gradient = x.T @ (p - np.eye(CLASSES)[y]) / 100 + run.l2 * w
        trace = gradient + methods.MOMENTUM * trace
        w = w - 0.1 / (1 + 10 * t / 13) * trace
    np.testing.assert_allclose(last.params, w, atol=1e-5)
    x, y = np.asarray(problem.train.inputs, float), np.asarray(problem.train.labels)
    h = x @ w
    expected = np.mean(np.log(np.exp(h).sum(axis=1)) - h[np.arange(ROWS), y]) + run.l2 / 2 * np.sum(w**2)
    assert last.metrics["objective"] == pytest.approx(expected, rel=1e-5)
    x, y = map(np.asarray, problem.held_out["test"])
    wrong = np.argmax(x @ w, axis=1) != y
    assert last.metrics["test_error"] == pytest.approx(np.mean(wrong), abs=1e-6)


def test_schedules_are_what_they_are_called():
    def rates(schedule):
        return methods._rate(methods.numbers(2.0, schedule, 10, 0.0, 0.0))(jnp.array([0.0, 5.0, 10.0, 20.0]))

    np.testing.assert_allclose(rates("constant"), 2)
    np.testing.assert_allclose(rates("inverse"), [2, 2 / 6, 2 / 11, 2 / 11], rtol=1e-6)
    np.testing.assert_allclose(rates("cosine"), [2, 1, 0, 0], atol=1e-6)


def test_step_with_the_exact_hessian_is_newton_s():
    problem = tiny_problem()
    x, y = problem.train
    w = jax.random.normal(jax.random.key(0), (WIDTH, CLASSES))
    setting = methods.numbers(1.0, "constant", 1, 0.1, 0.2)
    grads = jax.grad(train.loss)(w, problem.train)
    transform = methods.optimizer(Method("newton"), setting, WIDTH)
    updates, _ = jax.jit(transform.update)(grads, transform.init(w), w, inputs=x)
    hessian = jax.jit(jax.hessian(lambda v: train.loss(v.reshape(w.shape), Rows(x, y))))(w.ravel())
    expected = -np.linalg.solve(hessian + 0.3 * np.eye(w.size), (grads + 0.1 * w).ravel()).reshape(w.shape)
    assert np.linalg.norm(updates - expected) < 2e-3 * np.linalg.norm(expected)


def test_records_are_ever_further_apart():
    kept = [chunk for chunk in range(1, 1001) if train.due(chunk)]
    assert kept[:4] == [1, 2, 3, 4]
    assert len(kept) < 35
    assert max(b / a for a, b in zip(kept[4:], kept[5:], strict=False)) < 1.6


def test_run_ends_with_its_budget_or_when_its_numbers_do():
    problem = tiny_problem()
    *_, last = train.train(a_run(seconds=1e-9), problem)
    assert (last.step, last.ended) == (2, "budget")
    *_, last = train.train(a_run(method=Method("sgd"), learning_rate=1e30, schedule="constant"), problem)
    assert last.ended == "diverged"
    with pytest.raises(ValueError, match="batch: expected at most the 1300 training rows of tiny; got 2000"):
        next(train.train(a_run(batch=2000), problem))


# Folders of runs.


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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
    for damage in (lambda path: None, lambda path: path.write_bytes(b"PK"), lambda path: path.unlink()):
        (folder / "result.json").unlink()  # the checkpoint has parameters alone now
        damage(folder / "checkpoint.npz")
        runs.perform(run, tiny_problem, folder)
        assert (folder / "metrics.jsonl").read_bytes() == whole


@pytest.mark.parametrize("file", ["result.json", "environment.json", "metrics.jsonl"])
def test_damaged_file_of_a_run_is_named(tmp_path, file):
    run = a_run(epochs=0.5)
    runs.perform(run, tiny_problem, tmp_path)
    if file == "environment.json":
        (tmp_path / "result.json").unlink()
    (tmp_path / file).write_text('{"ended": ')
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
        return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL)

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


# Comparisons.


@pytest.mark.usefixtures("tiny")
def test_every_config_runs_two_steps(tmp_path):
    """All in one test, so that a method is compiled once for all configurations."""
    found = 0
    for name in CONFIGS:
        config = importlib.import_module(f"configs.{name}").config()
        if isinstance(config, Experiment):
            assert config.name == name
            shorter = tuple(
                dataclasses.replace(
                    c, epochs=2 * 50 / ROWS, chunk=2, learning_rates=c.learning_rates[:1], dampings=c.dampings[:1]
                )
                for c in config.contenders
            )
            config = dataclasses.replace(
                config, batch=50, contenders=shorter, schedules=("inverse",), l2=(1e-3,), seeds=1, tuning_share=1.0,
                intercept=False, output=str(tmp_path),
            )  # fmt: skip
            summary = report.read_summary(comparison.perform_all(config, show=False))
            assert all(curve.records[0][-1]["step"] == 2 for curve in summary.curves.values())
            assert all(curve.divergences() == 0 for curve in summary.curves.values())
            found += len(summary.curves)
    assert found == 4 + 4 * 12 + 6 * 4


def test_configs_have_grids_of_one_size_and_an_honest_choice():
    for name in CONFIGS:
        config = importlib.import_module(f"configs.{name}").config()
        if isinstance(config, Experiment):
            assert {len(comparison.grid(config, contender)) for contender in config.contenders} == {
                16 if name == "digits" else 24
            }
            assert config.select == "validation"


def test_penalty_is_that_of_the_best_setting_and_others_have_their_best_with_it(tmp_path):
    """Where methods disagree on it, and validation rows with test rows."""

    def result(loss, error, ended="finished"):
        return runs.Result(ended, 1, 0.0, {"validation_loss": loss, "test_error": error})

    a, b, c = (comparison.Setting(rate, "cosine", l2, 0.0) for rate, l2 in ((1.0, 0.1), (2.0, 0.1), (1.0, 0.2)))
    trials = {
        "one": {a: result(0.5, 0.3), b: result(0.4, 0.4), c: result(0.45, 0.2)},
        "other": {
            a: result(0.7, 0.5),
            b: result(0.8, 0.4),
            c: result(0.6, 0.6),
            c._replace(damping=1.0): result(0, 0, "diverged"),
        },
    }
    on_validation, on_test = an_experiment(tmp_path), an_experiment(tmp_path, select="test")
    assert comparison._choose_l2(on_validation, trials) == 0.1
    assert [comparison._choose(on_validation, found, 0.1) for found in trials.values()] == [b, a]
    assert comparison._choose_l2(on_test, trials) == 0.2
    assert [comparison._choose(on_test, found, 0.2) for found in trials.values()] == [c, c]
    lost = {"one": {a: result(np.nan, 0.1), b: result(0.1, 0.1, "diverged")}}
    with pytest.raises(UserError, match="every setting of every method diverged"):
        comparison._choose_l2(on_validation, lost)


@pytest.mark.usefixtures("tiny")
def test_settings_are_chosen_on_validation_rows_and_share_one_penalty(tmp_path):
    config = an_experiment(tmp_path)
    summary = json.loads(comparison.perform_all(config, show=False).read_text())
    assert summary["l2"] == 1e-3
    assert {setting["l2"] for setting in summary["chosen"].values()} == {1e-3}
    for contender in config.contenders:
        trials = {}
        for folder in (tmp_path / "tiny" / comparison.slug(contender.label)).glob("tuning-*"):
            fields = json.loads((folder / "config.json").read_text())
            trials[(fields["learning_rate"], fields["l2"], fields["damping"])] = runs.read_result(folder).metrics
        assert len(trials) == 4
        best = min((key for key in trials if key[1] == 1e-3), key=lambda key: trials[key]["validation_loss"])
        chosen = summary["chosen"][contender.label]
        assert (chosen["learning_rate"], chosen["l2"], chosen["damping"]) == best


@pytest.mark.usefixtures("tiny")
def test_choice_on_test_rows_is_the_lowest_test_error_and_makes_no_run_again(tmp_path):
    config = an_experiment(tmp_path)
    comparison.perform_all(config, show=False)
    before = set(tmp_path.glob("*/*/tuning-*"))
    made = json.loads(comparison.perform_all(dataclasses.replace(config, select="test"), show=False).read_text())
    assert set(tmp_path.glob("*/*/tuning-*")) == before
    errors = {}
    for folder in before:
        fields = json.loads((folder / "config.json").read_text())
        if fields["method"]["name"] == "sgd" and fields["l2"] == made["l2"]:
            errors[fields["learning_rate"]] = runs.read_result(folder).metrics["test_error"]
    assert errors[made["chosen"]["SGD"]["learning_rate"]] == min(errors.values())


def test_validation_rows_are_not_trained_on():
    tuning = comparison.problem_of(tiny_data(), "tuning", 0.25, False)
    everything = comparison.problem_of(tiny_data(), "all", 0.25, True)
    assert len(tuning.train.labels) + len(tuning.held_out["validation"].labels) == ROWS
    assert len(tuning.held_out["validation"].labels) == 325
    rows = {name: {tuple(row) for row in np.asarray(part.inputs).tolist()}
            for name, part in {"train": tuning.train, **tuning.held_out}.items()}  # fmt: skip
    assert not rows["train"] & rows["validation"] and not rows["train"] & rows["test"]
    assert everything.train.inputs.shape == (ROWS, WIDTH + 1)
    np.testing.assert_array_equal(everything.train.inputs[:, -1], 1)


@pytest.mark.usefixtures("tiny")
def test_seeds_end_with_the_budget_of_their_method(tmp_path, capsys):
    config = an_experiment(tmp_path, seconds=1e-9, seeds=3)
    summary = report.read_summary(comparison.perform_all(config))
    assert {label: curve.ended for label, curve in summary.curves.items()} == {"SGD": ("budget",), "SPFB": ("budget",)}
    shown = capsys.readouterr().out
    assert "SGD, seed 1: its seconds are used up" in shown
    assert "test accuracy" in shown and "/s" in shown


@pytest.mark.usefixtures("tiny")
def test_setting_of_another_method_is_taken_where_one_is_too_slow_to_tune(tmp_path):
    config = an_experiment(tmp_path)
    slow = dataclasses.replace(config.contenders[0], label="slow", tuned_as="SGD")
    config = dataclasses.replace(config, contenders=(*config.contenders, slow), seeds=1)
    summary = json.loads(comparison.perform_all(config, show=False).read_text())
    assert summary["chosen"]["slow"] == summary["chosen"]["SGD"]
    assert not list((tmp_path / "tiny" / "slow").glob("tuning-*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contenders": ()}, "contenders: expected at least one"),
        ({"select": "luck"}, "select: expected one of validation, test; got 'luck'"),
        ({"validation": 1.0}, "validation: expected a share between 0 and 1"),
        ({"seeds": 0}, "seeds: expected a number above 0; got 0"),
    ],
)
def test_impossible_comparison_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        an_experiment(tmp_path, **changes)


def test_grids_of_different_sizes_and_unknown_methods_are_refused(tmp_path):
    first, second = an_experiment(tmp_path).contenders
    with pytest.raises(ValueError, match="grids of the same size; got {'SGD': 1, 'SPFB': 2}"):
        an_experiment(tmp_path, contenders=(dataclasses.replace(first, learning_rates=(0.1,)), second))
    with pytest.raises(ValueError, match="tuned_as: expected a contender that is tuned, of .*; got 'other'"):
        an_experiment(tmp_path, contenders=(first, dataclasses.replace(second, tuned_as="other")))
    with pytest.raises(ValueError, match="tuned_as: expected a contender that is tuned, of .*; got 'SPFB'"):
        an_experiment(tmp_path, contenders=(first, dataclasses.replace(second, tuned_as="SPFB")))
    with pytest.raises(ValueError, match="name: expected one of sgd, .*; got 'bfgs'"):
        Method("bfgs")
    with pytest.raises(ValueError, match="rank: expected a number for lspfb and none for others; got None for lspfb"):
        Method("lspfb")
    with pytest.raises(ValueError, match="window: expected None for sgd; got 3"):
        Method("sgd", window=3)


# Robustness, and everything at once.


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
    made = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert made == {"paper.png", "small_batches.png", "beyond.png", "robustness.png", "tables.md"}
    text = (tmp_path / "tables.md").read_text()
    assert "### Adult, batches of 10, l2 = 0.0001" in text and "### Learning rates" in text and "revision " in text
    capsys.readouterr()
    assert reproduce.main(["--quick", "--output", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert lines and all(line.endswith("made before") for line in lines)
    assert (tmp_path / "tables.md").read_text() == text


# What is said to a user's mistake.


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
        (["configs/digits.py", "seeds=0"], "seeds: expected a number above 0; got 0"),
        (["configs/digits.py", "intercept=maybe"], "intercept: expected True or False; got 'maybe'"),
        (["configs/digits.py", "select=luck"], "select: expected one of validation, test; got 'luck'"),
        (
            ["configs/digits.py", "contenders=SGD,Magic"],
            "contenders: expected labels among SGD; SPFB; SPFB, window; KSPFB; got 'Magic'",
        ),
        (["configs/digits.py", "data_set=mnist"], "name: expected one of digits, adult"),
        (["configs/digits.py", "batch=5000"], "batch: expected at most the 1250 training rows of digits; got 5000"),
        (["configs/digits.py", "validation=0.0001"], "validation: expected a share with rows in both parts, of 1500"),
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
        (robustness.main, ["batch=0"], "batch: expected a number above 0; got 0"),
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
