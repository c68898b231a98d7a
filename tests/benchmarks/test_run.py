"""Heats and finals: who is run with what, and that an interrupted benchmark goes on."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from experiments.benchmarks.suite import data, pool, run
from experiments.benchmarks.suite.contestants import CONTESTANTS, ENVIRONMENTS, Environment
from experiments.benchmarks.suite.pool import Pool
from experiments.benchmarks.suite.race import Outcome
from experiments.errors import UserError
from tests import processes
from tests.benchmarks.small import rows

METHODS = ("estimator", "kspfb", "adam", "lbfgs", "bohning")


class FakePool:
    """Remembers what it was asked to run, and answers at once."""

    def __init__(self, folder=None):
        self.requests = []

    def run(self, environment, request):
        self.requests.append(request)
        if len(self.requests) == self.interrupt_at:
            raise KeyboardInterrupt
        least = request["goal"] / (1 + run.GOAL)
        speed = 1 + len(request["function"]) + request["setting"].get("rate", 0)
        if request["setting"].get("steps") == 60:  # short schedules end early
            return Outcome("finished", 0.5, [(0.001 * speed, 1.0, least * 1.05)])
        trace = [(0.01 * speed, 1.0, least * 1.05), (0.02 * speed, 2.0, least * (1 + 5e-7))]
        return Outcome("reached", 0.5, trace)

    def stop(self):
        pass

    def versions(self, names):
        return {name: "jax==0" for name in names}

    interrupt_at = None


@pytest.fixture
def fake(monkeypatch):
    """Two data sets of a moment, and a pool that runs nothing."""
    sets = {name: data.DataSet(name, "real", lambda _: (*rows(3), 3)) for name in ("one", "two")}
    for module in (data, run):
        monkeypatch.setattr(module, "DATA_SETS", sets)
    made = FakePool()
    monkeypatch.setattr(run, "Pool", lambda folder: made)
    return made


PLAN = {"data": ("one", "two"), "methods": METHODS, "penalties": (1e-4, 1e-2), "turns": 2}


def keys(requests):
    return [(r["folder"], r["l2"], r["function"], json.dumps(r["setting"]), r["seed"]) for r in requests]


@pytest.mark.parametrize("interrupt_at", [9, 20], ids=["in a heat", "in a final"])
def test_interrupted_benchmark_goes_on_where_it_was(fake, tmp_path, interrupt_at):
    whole = tmp_path / "whole"
    run.perform(run.Plan(**PLAN), whole)
    expected = [(*key[1:],) for key in keys(fake.requests)]
    seconds = [r["seconds"] for r in fake.requests]
    fake.requests, fake.interrupt_at = [], interrupt_at
    with pytest.raises(KeyboardInterrupt):
        run.perform(run.Plan(**PLAN), tmp_path / "parts")
    first, fake.requests, fake.interrupt_at = fake.requests, [], None
    run.perform(run.Plan(**PLAN), tmp_path / "parts")
    assert [(*key[1:],) for key in keys(first[:-1] + fake.requests)] == expected
    # The limits of runs are those of the whole one, too.
    assert [r["seconds"] for r in first[:-1] + fake.requests] == seconds
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (whole, tmp_path / "parts")]
    assert summaries[0]["problems"] == summaries[1]["problems"]
    fake.requests = []
    run.perform(run.Plan(**PLAN), whole)
    assert fake.requests == []


def test_all_settings_are_tried_with_one_penalty_and_the_useful_ones_with_others(fake, tmp_path):
    run.perform(run.Plan(**PLAN), tmp_path)
    heats = [r for r in fake.requests if r["folder"].endswith("one") and r["seed"] == 0]
    adam = [r["setting"] for r in heats if r["setting"].get("name") == "adam" and r["l2"] == 1e-4]
    assert adam == list(CONTESTANTS["adam"].settings)
    others = [r["setting"] for r in heats if r["setting"].get("name") == "adam" and r["l2"] == 1e-2]
    # The shortest schedule was the fastest to the first target, and another one to the last.
    assert [s["steps"] for s in others] == [60, 250]


def test_final_may_take_longer_than_its_heats_but_not_longer_than_any_run(fake, tmp_path):
    run.perform(run.Plan(**PLAN, least_seconds=3.0, most_seconds=5.0), tmp_path / "most")
    run.perform(run.Plan(**PLAN, least_seconds=3.0), tmp_path / "twice")
    for first, final, requests in zip((5.0, 8.0), (5.0, 6.0), np.array_split(fake.requests, 2), strict=True):
        # Before anyone has arrived, a heat may take as long as any run.
        assert {r["seconds"] for r in requests if r["seed"] == 0} == {first, 3.0}
        assert {r["seconds"] for r in requests if r["seed"] > 0} == {final}


def test_final_has_the_fastest_of_both_sides_in_turns(fake, tmp_path):
    run.perform(run.Plan(**PLAN), tmp_path)
    finals = [r for r in fake.requests if r["folder"].endswith("one") and r["l2"] == 1e-4 and r["seed"] > 0]
    functions = [(r["function"], r["seed"]) for r in finals]
    # KSPFB to the first target with its shortest schedule, the estimator or KSPFB to the last; and two peers.
    assert {f for f, _ in functions} >= {"stochastic:run", "full_batch:lbfgs"}
    peers = {json.dumps(r["setting"]) for r in finals if not _is_ours(r)}
    alone = run.Plan(**{**PLAN, "peers": 1})
    fake.requests = []
    run.perform(alone, tmp_path / "alone")
    finals = [r for r in fake.requests if r["folder"].endswith("one") and r["l2"] == 1e-4 and r["seed"] > 0]
    assert {json.dumps(r["setting"]) for r in finals if not _is_ours(r)} < peers
    turns = [seed for _, seed in functions]
    assert turns == sorted(turns) and set(turns) == {1, 2}
    assert [f for f, seed in functions if seed == 1] == [f for f, seed in functions if seed == 2]


def _is_ours(request):
    return request["function"].startswith("estimator") or request["setting"].get("name") == "kspfb"


def test_runs_may_take_so_many_times_as_long_as_the_best(fake, tmp_path):
    plan = run.Plan(**PLAN, patience=5, least_seconds=0.2, most_seconds=7.0)
    run.perform(plan, tmp_path)
    first, second = fake.requests[:2]
    assert first["seconds"] == 7.0
    best = json.loads((tmp_path / "one/0.0001/estimator-0.json").read_text())["trace"][-1][0]
    assert second["seconds"] == pytest.approx(max(0.2, 5 * best))


def test_method_that_was_killed_is_not_run_again_on_these_data(fake, tmp_path, monkeypatch):
    answer = fake.run

    def killing(environment, request):
        outcome = answer(environment, request)
        return Outcome("killed", message="no answer") if request["setting"].get("memory") == 5 else outcome

    monkeypatch.setattr(fake, "run", killing)
    run.perform(run.Plan(**PLAN), tmp_path)
    # Once for each data set, and other settings are run.
    assert sum(r["setting"].get("memory") == 5 for r in fake.requests) == 2
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["problems"][0]["methods"]["lbfgs"]["ended"] == {"killed": 1, "reached": 3}


def test_method_of_ours_that_was_killed_is_not_run_with_another_setting(fake, tmp_path, monkeypatch):
    answer = fake.run

    def killing(environment, request):
        outcome = answer(environment, request)
        return Outcome("killed", message="no answer") if request["setting"].get("name") == "kspfb" else outcome

    monkeypatch.setattr(fake, "run", killing)
    run.perform(run.Plan(**PLAN), tmp_path)
    assert sum(r["setting"].get("name") == "kspfb" for r in fake.requests) == 2
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["problems"][0]["methods"]["kspfb"]["ended"] == {"killed": len(CONTESTANTS["kspfb"].settings)}


def test_run_with_another_setting_than_now_is_made_again(fake, tmp_path, monkeypatch):
    run.perform(run.Plan(**PLAN), tmp_path)
    fake.requests = []
    changed = dataclasses.replace(CONTESTANTS["lbfgs"], settings=({"memory": 7}, *CONTESTANTS["lbfgs"].settings[1:]))
    monkeypatch.setitem(CONTESTANTS, "lbfgs", changed)
    run.perform(run.Plan(**PLAN), tmp_path)
    heats = [r for r in fake.requests if r["seed"] == 0 and r["l2"] == 1e-4]
    assert [r["setting"] for r in heats] == [{"memory": 7}] * 2


def test_what_could_not_be_installed_is_tried_another_time(fake, tmp_path, monkeypatch):
    answer = fake.run
    monkeypatch.setattr(fake, "run", lambda *_: Outcome("not installed", message="no network"))
    run.perform(run.Plan(**PLAN), tmp_path)
    monkeypatch.setattr(fake, "run", answer)
    run.perform(run.Plan(**PLAN), tmp_path)
    assert len(fake.requests) > 40


def test_data_sets_are_taken_in_the_order_in_which_they_lend_settings():
    plan = run.Plan(data=("labels_10000", "digits", "labels_300"))
    assert plan.data == ("digits", "labels_300", "labels_10000")
    with pytest.raises(UserError, match="penalties: expected a number above 0"):
        run.Plan(penalties=(0.0,))


def test_quick_plan_tries_settings_from_all_over_the_grid(fake, tmp_path):
    run.perform(dataclasses.replace(run.QUICK, data=("one",), methods=METHODS), tmp_path)
    adam = [r["setting"] for r in fake.requests if r["setting"].get("name") == "adam" and r["seed"] == 0]
    assert [(s["rate"], s["steps"]) for s in adam] == [(0.01, 60), (0.03, 1000), (0.1, 5000)]


def test_peers_have_at_least_as_many_settings_as_ours():
    nothing_to_tune = {"bohning", *(name for name in CONTESTANTS if name.startswith("scikit_learn_"))}
    ours = {name: len(c.settings) for name, c in CONTESTANTS.items() if c.ours}
    peers = {n: len(c.settings) for n, c in CONTESTANTS.items() if not c.ours and n not in nothing_to_tune}
    assert max(ours.values()) <= min(peers.values()), peers


@pytest.mark.parametrize("argument", ["data", "methods"])
def test_unknown_names_are_one_clear_line(argument):
    with pytest.raises(UserError, match=f"{argument}: expected some of .*; got 'nonsense'"):
        run.Plan(**{argument: ("nonsense",)})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--methods", "sdg"], "error: methods: expected some of linear_fit, estimator"),
        (["--data", "mnist"], "error: data: expected some of digits, adult_one_hot"),
        (["--data", "kmnist", "--data-dir", "nowhere"], "nowhere"),
    ],
)
def test_command_says_what_is_wrong_in_one_line(arguments, expected, tmp_path):
    done = processes.run(
        "-m", "experiments.benchmarks.suite", "--output", str(tmp_path / "out"), *arguments,
        QBOUND_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and expected in last
    assert "Traceback" not in done.stderr


def test_peer_that_cannot_be_installed_is_listed_as_such(tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "cyanure", Environment(("a-package-that-there-is-not==0.0.0",)))
    monkeypatch.setattr(pool, "ROOT", tmp_path)

    def no_index(command, **options):
        if "install" in command:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(pool.subprocess, "run", no_index)
    workers = Pool(tmp_path)
    outcome = workers.run("cyanure", {"seconds": 1.0})
    assert outcome.ended == "not installed"
    assert "No matching distribution" in outcome.message
    assert workers.versions({"cyanure"})["cyanure"].startswith("not installed: ")


REQUEST = {"l2": 1e-2, "seconds": 20.0, "setting": {}, "seed": 0, "goal": 0.0, "spacing": 1.2}


@pytest.fixture
def folder(tmp_path):
    x, y = rows(3, examples=200)
    for name, array in (("inputs", x), ("labels", y), ("classes", 3)):
        np.save(tmp_path / f"{name}.npy", array)
    return tmp_path


def test_worker_answers_and_survives_methods_that_fail(folder):
    workers = Pool(folder)
    try:
        request = {**REQUEST, "folder": str(folder)}
        failed = workers.run("scikit_learn", {**request, "function": "scikit_learn:solver"})
        assert (failed.ended, failed.message) == ("failed", "KeyError: 'solver'")
        setting = {"solver": "newton-cg"}
        done = workers.run("scikit_learn", {**request, "function": "scikit_learn:solver", "setting": setting})
        assert done.ended == "finished"
        assert done.trace[-1][2] < done.trace[0][2]
    finally:
        workers.stop()


def test_worker_that_dies_or_hangs_is_an_outcome(folder, monkeypatch):
    workers = Pool(folder)
    monkeypatch.setattr(workers, "_python", lambda name: sys.executable)
    request = {**REQUEST, "folder": str(folder), "function": "scikit_learn:saga"}
    try:
        monkeypatch.setattr(pool, "GRACE", -59.9)  # no time to start
        hung = workers.run("scikit_learn", request)
        assert (hung.ended, hung.message[:12]) == ("killed", "no answer in")
        monkeypatch.setattr(pool, "GRACE", 120.0)
        worker = workers._worker("scikit_learn")
        worker.kill()
        worker.wait()
        monkeypatch.setattr(workers, "_worker", lambda name: worker)
        died = workers.run("scikit_learn", request)
        assert died.ended == "killed"
        assert "exit code -9" in died.message
    finally:
        workers.stop()
