"""Heats and finals: every method with every setting, then the fastest of both sides against each other, in turns.

A heat runs a method once with each of its settings, and says which is the fastest to each target. That is done with one
penalty for each data set; with the others only the settings that were the fastest to some target there are run, and
where the best accuracy was reached. The final runs what was fastest in the heats to some target, of ours and of the
peers, again, in turns: its times are those of the tables, and nobody is in them for a lucky run.

No run takes longer than a multiple of what the best one before it took to the last target, in a final twice as long.
Every run is a file, and what has one is not run again.
"""

import dataclasses
import math
import platform
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.benchmarks.suite.contestants import CONTESTANTS
from experiments.benchmarks.suite.data import DATA_SETS, PENALTIES, TARGETS, make
from experiments.benchmarks.suite.optimum import optimum
from experiments.benchmarks.suite.pool import Pool
from experiments.benchmarks.suite.race import Outcome, time_to
from experiments.errors import UserError, writing
from experiments.fields import Checked, Count, Positive
from experiments.lock import alone_in
from experiments.runs import environment, read_json, write_json

__all__ = ["FULL", "QUICK", "Plan", "collect", "perform"]

TUNING_PENALTY = 1e-4
# Each checkpoint that is looked at comes at least this many times as late as the one before.
HEAT_SPACING, FINAL_SPACING = 1.2, 1.05
# Finals may take this many times as long as heats: what arrived in a heat is not to miss its final by a slow clock.
FINAL_LENIENCE = 2.0
# A method may stop a little below the last target.
GOAL = 0.98 * TARGETS[-1]


@dataclasses.dataclass(frozen=True)
class Plan(Checked):
    """What is run.

    Attributes:
      data: names of data sets.
      methods: names of contestants.
      penalties: of the objective.
      patience: a heat may take this many times as long as the best run before it took to the last target,
      least_seconds: but at least this long,
      most_seconds: and any run at most this long.
      turns: of a final.
      peers: how many of them, for each target, are in a final.
      settings: of a method, that are tried at most.
    """

    data: tuple[str, ...] = tuple(DATA_SETS)
    methods: tuple[str, ...] = tuple(CONTESTANTS)
    penalties: tuple[Positive, ...] = PENALTIES
    patience: Positive = 2.5
    least_seconds: Positive = 0.5
    most_seconds: Positive = 8.0
    turns: Count = 3
    peers: Count = 2
    settings: Count = 12

    def __post_init__(self):
        try:
            super().__post_init__()
        except ValueError as error:
            raise UserError(str(error)) from error
        for name, known in (("data", DATA_SETS), ("methods", CONTESTANTS)):
            for one in getattr(self, name):
                if one not in known:
                    raise UserError(f"{name}: expected some of {', '.join(known)}; got {one!r}")
        # In one order: some data sets take the settings that were found for others.
        object.__setattr__(self, "data", tuple(name for name in DATA_SETS if name in self.data))


FULL = Plan()
QUICK = Plan(
    data=("digits", "labels_10", "condition_1e4"), penalties=(TUNING_PENALTY,), most_seconds=2.0, turns=1, settings=3
)


class Entry(NamedTuple):
    """A method with one of its settings."""

    method: str
    setting: int


def perform(plan: Plan, folder: Path, data_dir: str | None = None) -> Path:
    """Run what has no file yet, and say where the summary is."""
    with alone_in(folder):
        return _perform(plan, folder, data_dir)


def _perform(plan: Plan, folder: Path, data_dir: str | None) -> Path:
    pool = Pool(folder)
    began = time.monotonic()
    try:
        # All of them first: what is missing is missed at once.
        made = {name: make(name, folder / "data", data_dir) for name in plan.data}
        for name, rows in made.items():
            for l2 in sorted(plan.penalties, key=lambda l2: l2 != TUNING_PENALTY):
                _Problem(plan, folder, rows, name, l2, pool, began).run()
            # A process can hold a limited number of programs.
            pool.stop()
            used = {CONTESTANTS[method].environment for method in plan.methods}
            write_json(folder / "summary.json", collect(plan, folder, pool.versions(used)))
    finally:
        pool.stop()
    return folder / "summary.json"


class _Problem:
    """One data set with one penalty."""

    def __init__(self, plan: Plan, folder: Path, rows: Path, name: str, l2: float, pool: Pool, began: float):
        self.plan, self.rows, self.name, self.l2, self.pool, self.began = plan, rows, name, l2, pool, began
        self.folder = _problem_folder(folder, name, l2)
        # Where settings were chosen, unless here.
        tuned_on = DATA_SETS[name].tuned_on
        tuned_on = tuned_on if tuned_on in plan.data else name
        self.tunes_here = tuned_on == name and l2 == TUNING_PENALTY
        self.tuned = _problem_folder(folder, tuned_on, TUNING_PENALTY)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.least = optimum(rows, l2, self.folder / "optimum.json")["objective"]
        self.best = min((time_to(o, self._value(TARGETS[-1]))[0] for _, o in _heats(self.folder)), default=math.inf)

    def run(self) -> None:
        for method in self.plan.methods:
            for setting in self._settings(method):
                path = self.folder / f"{method}-{setting}.json"
                self._perform(Entry(method, setting), path, "heat", 0, HEAT_SPACING, 1.0)
        entries = _finalists(self.plan, self.folder, self.least)
        for turn in range(self.plan.turns):
            for entry in entries:
                path = self.folder / "final" / f"{entry.method}-{entry.setting}-{turn}.json"
                stage = f"final, turn {turn + 1} of {self.plan.turns}"
                self._perform(entry, path, stage, 1 + turn, FINAL_SPACING, FINAL_LENIENCE)

    def _value(self, target: float) -> float:
        return self.least * (1 + target)

    def _settings(self, method: str) -> list[int]:
        """All, or with other penalties those that were of use with the first."""
        count = len(CONTESTANTS[method].settings)
        tried = np.linspace(0, count - 1, min(count, self.plan.settings)).round().astype(int).tolist()
        if self.tunes_here or TUNING_PENALTY not in self.plan.penalties:
            return tried
        heats = {e.setting: o for e, o in _heats(self.tuned) if e.method == method}
        if len(heats) <= 1:
            return tried[:1]
        least = read_json(self.tuned / "optimum.json")["objective"]
        return useful(heats, [least * (1 + target) for target in TARGETS])

    def _perform(self, entry: Entry, path: Path, stage: str, seed: int, spacing: float, lenience: float) -> None:
        if _is_current(path, entry):
            return
        contestant = CONTESTANTS[entry.method]
        wanted = lenience * max(self.plan.least_seconds, self.plan.patience * self.best)
        seconds = min(self.plan.most_seconds, wanted)
        request = {
            "function": contestant.function,
            "folder": str(self.rows.absolute()),
            "l2": self.l2,
            "goal": self.least * (1 + GOAL),
            "seconds": seconds,
            "setting": contestant.settings[entry.setting],
            "seed": seed,
            "spacing": spacing,
        }
        # What has not come back once, with these data, would not the next time; ours not with another setting, either.
        outcome = self._killed(entry) or self.pool.run(contestant.environment, request)
        outcome = outcome._replace(limit=seconds)
        # What can be installed another time is then run.
        if outcome.ended != "not installed":
            with writing(path):
                path.parent.mkdir(exist_ok=True)
            write_json(path, {**outcome.to_json(), "setting": request["setting"], "commit": environment()["commit"]})
        times = [time_to(outcome, self._value(target))[0] for target in TARGETS]
        self.best = min(self.best, times[-1])
        shown = " ".join("    -  " if math.isinf(t) else f"{t:7.3f}" for t in times)
        print(
            f"{time.monotonic() - self.began:6.0f} s  {self.name} {self.l2:g} {stage}: {contestant.label:<28}"
            f"{entry.setting}  {shown}  {outcome.ended} {outcome.message}",
            flush=True,
        )

    def _killed(self, entry: Entry) -> Outcome | None:
        runs = (run for folder in self.folder.parent.iterdir() for run in _heats(folder))
        is_ours = CONTESTANTS[entry.method].ours
        outcomes = (o for of, o in runs if of == entry or (is_ours and of.method == entry.method))
        return next((outcome for outcome in outcomes if outcome.ended == "killed"), None)


def useful(heats: dict[int, Outcome], values: list[float]) -> list[int]:
    """The settings that were the fastest to some value, and the one that came the furthest."""
    chosen = set()
    for value in values:
        best = min(heats, key=lambda setting: time_to(heats[setting], value))
        if math.isfinite(time_to(heats[best], value)[0]):
            chosen.add(best)
    chosen.add(min(heats, key=lambda setting: _lowest(heats[setting])))
    return sorted(chosen)


def _lowest(outcome: Outcome) -> float:
    return min((value for *_, value in outcome.trace if math.isfinite(value)), default=math.inf)


def _problem_folder(folder: Path, name: str, l2: float) -> Path:
    return folder / name / f"{l2:g}"


def _heats(folder: Path) -> Iterator[tuple[Entry, Outcome]]:
    for path in sorted(folder.glob("*-*.json")):
        method, setting = path.stem.rsplit("-", 1)
        if _is_current(path, entry := Entry(method, int(setting))):
            yield entry, Outcome.from_json(read_json(path))


def _finals(folder: Path) -> Iterator[tuple[Entry, int, Outcome]]:
    for path in sorted((folder / "final").glob("*-*-*.json")):
        method, setting, turn = path.stem.rsplit("-", 2)
        if _is_current(path, entry := Entry(method, int(setting))):
            yield entry, int(turn), Outcome.from_json(read_json(path))


def _is_current(path: Path, entry: Entry) -> bool:
    """Whether there is a file of this entry, with the setting that it has now."""
    settings = CONTESTANTS[entry.method].settings if entry.method in CONTESTANTS else ()
    return path.exists() and entry.setting < len(settings) and read_json(path)["setting"] == settings[entry.setting]


def _finalists(plan: Plan, folder: Path, least: float) -> list[Entry]:
    """For each target the fastest of ours in the heats, and the fastest peers."""
    heats = [(entry, outcome) for entry, outcome in _heats(folder) if entry.method in plan.methods]
    chosen: dict[Entry, None] = {}
    for target in TARGETS:
        times = {entry: time_to(outcome, least * (1 + target))[0] for entry, outcome in heats}
        fastest = sorted((entry for entry in times if math.isfinite(times[entry])), key=times.__getitem__)
        for ours, count in ((True, 1), (False, plan.peers)):
            # One setting of each method.
            methods: dict[str, Entry] = {}
            for entry in fastest:
                if CONTESTANTS[entry.method].ours == ours:
                    methods.setdefault(entry.method, entry)
            chosen.update(dict.fromkeys(list(methods.values())[:count]))
    return list(chosen)


def collect(plan: Plan, folder: Path, versions: dict[str, str]) -> dict[str, Any]:
    """All that tables and figures are made from."""
    problems = []
    for name in plan.data:
        for l2 in plan.penalties:
            where = _problem_folder(folder, name, l2)
            if (where / "optimum.json").exists():
                least = read_json(where / "optimum.json")
                found = {"methods": _best_heats(where, least["objective"]), "finals": _turns(where, least["objective"])}
                problems.append({"data": name, "l2": l2, "optimum": least, **found})
    return {
        "plan": dataclasses.asdict(plan),
        "environment": {**environment(), "processor": _processor()},
        "commits": sorted({read_json(path)["commit"] or "unknown" for path in folder.glob("*/*/**/*-*.json")}),
        "versions": versions,
        "targets": list(TARGETS),
        "problems": problems,
    }


def _best_heats(folder: Path, least: float) -> dict[str, Any]:
    """For each method the fastest of its settings to each target, null where none has reached it; and how all ended."""
    of_method: dict[str, list[tuple[int, Outcome]]] = {}
    for entry, outcome in _heats(folder):
        of_method.setdefault(entry.method, []).append((entry.setting, outcome))
    found = {}
    for method, runs in of_method.items():
        best = [min((*time_to(o, least * (1 + target)), setting) for setting, o in runs) for target in TARGETS]
        found[method] = {
            "seconds": [_rounded(seconds) for seconds, _, _ in best],
            "passes": [_rounded(passes) for _, passes, _ in best],
            "settings": [None if math.isinf(seconds) else setting for seconds, _, setting in best],
            "compile_seconds": _rounded(max(o.compile_seconds for _, o in runs)),
            "limit": _rounded(min(o.limit for _, o in runs)),
            "ended": dict(Counter(o.ended for _, o in runs)),
            "messages": sorted({o.message for _, o in runs if o.message}),
        }
    return found


def _turns(folder: Path, least: float) -> list[dict[str, Any]]:
    """For each entry of the final, its seconds to each target in each turn."""
    turns: dict[Entry, dict[int, Outcome]] = {}
    for entry, turn, outcome in _finals(folder):
        turns.setdefault(entry, {})[turn] = outcome
    return [
        {
            **entry._asdict(),
            "seconds": [[_rounded(time_to(of[turn], least * (1 + t))[0]) for t in TARGETS] for turn in sorted(of)],
            "ended": dict(Counter(outcome.ended for outcome in of.values())),
            "messages": sorted({outcome.message for outcome in of.values() if outcome.message}),
        }
        for entry, of in turns.items()
    ]


def _processor() -> str:
    """Its name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _rounded(number: float) -> float | None:
    """To four digits; null for what is infinite."""
    return None if math.isinf(number) else float(f"{number:.4g}")
