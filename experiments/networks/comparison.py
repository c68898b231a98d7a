"""Methods on one network, tuned alike, and the shortest runs by which they reach what AdamW reaches.

Every method has a grid of the same size: learning rates, variants of the method, schedules, each tried once with the
seed for tuning. AdamW runs for all steps, and its mean loss at the end over the other seeds is the target. Learning
rates depend on the number of steps, so a loss on the way of a long run says nothing of a short one: every other method
has runs of several lengths, from the shortest on, until the mean loss at the end reaches the target. Grids are tried at
some lengths, and other lengths take the setting of the nearest. With a `level`, that is the target, and AdamW one of
all.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.errors import UserError
from experiments.fields import Checked, Count, FolderName, NotNegative, Positive, Seed, Share
from experiments.lock import alone_in
from experiments.networks.data import DataSet
from experiments.networks.methods import Method, Schedule
from experiments.networks.models import Kind, Network
from experiments.networks.runs import Laboratory
from experiments.networks.train import Outcome, Run
from experiments.runs import write_json

__all__ = ["Comparison", "Contender", "Setting", "grid", "in_small", "perform_all"]

REFERENCE = "AdamW"


@dataclasses.dataclass(frozen=True)
class Contender(Checked):
    """A method in a comparison, and what it is tuned over beside schedules.

    Attributes:
      label: of tables and figures.
      variants: of the method.
      learning_rates: each with every variant.
      lengths: of its runs, where one takes too long for those of all.
    """

    label: str
    variants: tuple[Method, ...]
    learning_rates: tuple[Positive, ...]
    lengths: tuple[Share, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Comparison(Checked):
    """One network, on some data sets with some sizes of batches.

    Attributes:
      name: of the folder under `output`.
      network: its kind.
      sizes: its numbers; see experiments/networks/models.py.
      rows: that are trained on, at most.
      evaluated: rows of each kind that losses are taken of, at most.
      batches: sizes.
      steps: of the longest runs, one number for each size of batch.
      measure: what is made small, by tuning too.
      level: of the measure that is to be reached; None for that at which AdamW ends.
      lengths: of runs, as shares of all steps, from the shortest on.
      tuned_at: those of them at which grids are tried.
      slack: a length at which the run with the seed for tuning ends above 1 + slack times the target is given up.
      seeds: of the runs that count.
      records: of a run.
      turn_steps: steps of a method in its turn, when the cost of a step is measured: as many as there are between two
        updates of its factors, so that every turn has one.
      turns: of every method.
    """

    name: FolderName
    network: Kind
    sizes: tuple[Count, ...]
    data_sets: tuple[DataSet, ...]
    rows: Count
    evaluated: Count
    batches: tuple[Count, ...]
    steps: tuple[Count, ...]
    measure: Literal["train_loss", "test_loss"]
    contenders: tuple[Contender, ...]
    schedules: tuple[Schedule, ...]
    lengths: tuple[Share, ...]
    tuned_at: tuple[Share, ...]
    level: Positive | None = None
    slack: NotNegative = 0.05
    tuning_seed: Seed = 0
    seeds: tuple[Seed, ...] = (1, 2, 3)
    records: Count = 2
    turn_steps: Count = 20
    turns: Count = 7
    output: str = "results/networks"

    def __post_init__(self):
        super().__post_init__()
        Network(self.network, self.sizes)
        if (self.network == "transformer") != (self.data_sets == ("stdlib",)):
            raise ValueError(f"data_sets: expected stdlib for a transformer, images for others; got {self.data_sets}")
        if len(self.steps) != len(self.batches):
            raise ValueError(f"steps: expected one number for each of {len(self.batches)} batches; got {self.steps}")
        if 1.0 not in self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths: expected rising shares with 1 as the last; got {self.lengths}")
        if 1.0 not in self.tuned_at or not set(self.tuned_at) <= set(self.lengths):
            raise ValueError(f"tuned_at: expected some of the lengths, 1 among them; got {self.tuned_at}")
        labels = [contender.label for contender in self.contenders]
        if len(set(labels)) < len(labels) or REFERENCE not in labels:
            raise ValueError(f"contenders: expected each label once, and {REFERENCE} among them; got {labels}")
        sizes = {c.label: len(c.learning_rates) * len(c.variants) for c in self.contenders}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"contenders: expected grids of the same size; got {sizes}")


class Setting(NamedTuple):
    """What is tuned."""

    method: Method
    learning_rate: float
    schedule: Schedule


def grid(comparison: Comparison, contender: Contender) -> list[Setting]:
    """All settings of a contender."""
    choices = itertools.product(contender.variants, contender.learning_rates, comparison.schedules)
    return [Setting(*choice) for choice in choices]


def in_small(comparison: Comparison, data_set: DataSet) -> Comparison:
    """A look at everything in seconds, and nothing to conclude from."""
    sizes = {"perceptron": (16,), "convolutional": (4, 8, 16), "transformer": (1, 16, 2, 16)}[comparison.network]
    contenders = tuple(
        dataclasses.replace(c, learning_rates=(_middle(c.learning_rates),), variants=c.variants[:1], lengths=None)
        for c in comparison.contenders
    )
    batches = (50,) if comparison.level is None else (25, 50)
    return dataclasses.replace(
        comparison, sizes=sizes, data_sets=("stdlib",) if comparison.network == "transformer" else (data_set,),
        rows=1000, evaluated=300, batches=batches, steps=(30,) * len(batches), contenders=contenders,
        level=None if comparison.level is None else 1.5, schedules=comparison.schedules[:1], lengths=(0.5, 1.0),
        tuned_at=(1.0,), seeds=comparison.seeds[:1], records=1, turn_steps=3, turns=2,
    )  # fmt: skip


def _middle(values: Sequence[float]) -> float:
    return values[len(values) // 2]


def perform_all(
    comparison: Comparison, data_dir: str | None = None, peers: frozenset[str] = frozenset(), show: bool = True
) -> Path:
    """Make every run, write what was found to summary.json, and say where that is; `peers` may be installed."""
    taking_part = tuple(c for c in comparison.contenders if c.variants[0].environment in (None, *peers))
    comparison = dataclasses.replace(comparison, contenders=taking_part)
    folder = Path(comparison.output) / comparison.name
    with alone_in(folder):
        laboratory = Laboratory(folder, data_dir, show)
        cells = []
        for data_set in comparison.data_sets:
            for batch, steps in zip(comparison.batches, comparison.steps, strict=True):
                cells.append(_Cell(comparison, laboratory, data_set, batch, steps).perform())
                summary = {"comparison": dataclasses.asdict(comparison), "cells": cells}
                write_json(folder / "summary.json", summary)
    return folder / "summary.json"


class _Cell:
    """One data set with one size of batch."""

    def __init__(self, comparison: Comparison, laboratory: Laboratory, data_set: DataSet, batch: int, steps: int):
        self._comparison, self._laboratory = comparison, laboratory
        self._data_set: DataSet = data_set
        self._batch, self._steps = batch, steps
        self._folder = laboratory.folder / f"{data_set}-{batch}"
        self._best: dict[tuple[str, float], Setting] = {}

    def perform(self) -> dict[str, Any]:
        """What tables and figures are made from."""
        comparison, target = self._comparison, self._comparison.level
        found: dict[str, dict[str, Any]] = {}
        # The reference first: it says what the others are to reach.
        for contender in sorted(comparison.contenders, key=lambda c: c.label != REFERENCE):
            is_goal = target is None
            lengths = (1.0,) if is_goal else contender.lengths or comparison.lengths
            with self._laboratory.forgiving(f"{self._data_set}, batches of {self._batch}, {contender.label}"):
                found[contender.label] = self._contender(contender, lengths, target)
            if is_goal:
                target = self._target(found)
        runs = {
            label: self._run(Setting(*one["points"][-1]["setting"]), one["points"][-1]["steps"], comparison.tuning_seed)
            for label, one in found.items()
        }
        costs = {}
        if REFERENCE in runs:
            how = {"steps": comparison.turn_steps, "turns": comparison.turns}
            costs = self._laboratory.costs(runs, self._folder, REFERENCE, **how)
        for label, one in found.items():
            one["cost"] = costs[label]._asdict() if label in costs else None
            for point in one["points"]:
                method, *rest = point["setting"]
                point["setting"] = [dataclasses.asdict(method), *rest]
        return {
            "data_set": self._data_set,
            "batch": self._batch,
            "steps": self._steps,
            "target": target,
            "contenders": found,
        }

    def _target(self, found: dict[str, dict[str, Any]]) -> float:
        values: list[float] = found[REFERENCE]["points"][-1]["values"] if REFERENCE in found else []
        if not values or None in values:
            raise UserError(
                f"{self._data_set}, batches of {self._batch}: expected {REFERENCE} to end with a number; it did not. "
                "Give it smaller learning_rates"
            )
        return float(np.mean(values))

    def _contender(self, contender: Contender, lengths: Sequence[float], target: float | None) -> dict[str, Any]:
        """Its points, one for each length: the last one counts."""
        points, reached = [], target is None
        for length in lengths:
            steps, is_last = self._count(length), length == lengths[-1]
            setting = self._tuned(contender, lengths, length)
            trial, where = self._perform(contender, setting, steps, self._comparison.tuning_seed)
            value = self._value(trial)
            point = {"length": length, "steps": steps, "setting": setting, "tuning": _finite(value), "runs": [where]}
            points.append({**point, "values": [], "seconds": [], "test_errors": []})
            if not is_last and target is not None and not value <= (1 + self._comparison.slack) * target:
                continue
            outcomes = [self._perform(contender, setting, steps, seed) for seed in self._comparison.seeds]
            values = [self._value(outcome) for outcome, _ in outcomes]
            points[-1] |= {
                "values": [_finite(value) for value in values],
                "seconds": [outcome.seconds for outcome, _ in outcomes],
                "test_errors": [_finite(outcome.records[-1]["test_error"]) for outcome, _ in outcomes],
                "runs": [where for _, where in outcomes],
            }
            reached = target is None or float(np.mean(values)) <= target
            if reached:
                break
        return {"points": points, "reached": reached}

    def _tuned(self, contender: Contender, lengths: Sequence[float], length: float) -> Setting:
        """The best setting at the nearest length at which the grid is tried."""
        at = [one for one in self._comparison.tuned_at if one in lengths] or lengths
        nearest = min(at, key=lambda one: abs(math.log(one / length)))
        key = contender.label, nearest
        if key not in self._best:
            values = {}
            for setting in grid(self._comparison, contender):
                outcome, _ = self._perform(contender, setting, self._count(nearest), self._comparison.tuning_seed)
                values[setting] = self._value(outcome)
            self._best[key] = min(values, key=lambda setting: values[setting])
        return self._best[key]

    def _count(self, length: float) -> int:
        return max(1, round(length * self._steps))

    def _value(self, outcome: Outcome) -> float:
        value = outcome.records[-1][self._comparison.measure]
        return value if outcome.ended == "finished" and math.isfinite(value) else math.inf

    def _perform(self, contender: Contender, setting: Setting, steps: int, seed: int) -> tuple[Outcome, str]:
        return self._laboratory.perform(self._run(setting, steps, seed), self._folder, contender.label)

    def _run(self, setting: Setting, steps: int, seed: int) -> Run:
        comparison = self._comparison
        return Run(
            network=Network(comparison.network, comparison.sizes), data_set=self._data_set, rows=comparison.rows,
            evaluated=comparison.evaluated, batch=self._batch, steps=steps, method=setting.method,
            learning_rate=setting.learning_rate, schedule=setting.schedule, scale=1.0, seed=seed,
            records=comparison.records,
        )  # fmt: skip


def _finite(value: float) -> float | None:
    """JSON has no word for numbers that are not finite but null."""
    return value if math.isfinite(value) else None
