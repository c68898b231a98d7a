"""How the loss at the end depends on the learning rate, over five decades, and on the size of the first weights.

Nothing is tuned: every method has one setting beside its learning rate.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from experiments.fields import Checked, Count, FolderName, Positive, Seed
from experiments.lock import alone_in
from experiments.networks.data import TITLES, DataSet
from experiments.networks.methods import Method, Schedule
from experiments.networks.models import Kind, Network
from experiments.networks.report import LOOKS, OTHER, versions
from experiments.networks.runs import Laboratory
from experiments.networks.train import Run
from experiments.plots import panels, save
from experiments.runs import read_json, write_json

__all__ = ["Entrant", "Rates", "draw", "in_small", "perform_all", "table"]

# Of a loss at the end: a rate is good if it is no further above the best loss of its method than this.
GOOD = 0.1


@dataclasses.dataclass(frozen=True)
class Entrant(Checked):
    """A method, and what tables call it."""

    label: str
    method: Method


@dataclasses.dataclass(frozen=True)
class Rates(Checked):
    """One picture; fields are those of `Comparison`, and `scales` are of the first weights."""

    name: FolderName
    network: Kind
    sizes: tuple[Count, ...]
    data_set: DataSet
    rows: Count
    evaluated: Count
    batch: Count
    steps: Count
    schedule: Schedule
    entrants: tuple[Entrant, ...]
    learning_rates: tuple[Positive, ...]
    scales: tuple[Positive, ...]
    seed: Seed = 0
    output: str = "results/networks"

    def __post_init__(self):
        super().__post_init__()
        Network(self.network, self.sizes)
        labels = [entrant.label for entrant in self.entrants]
        if len(set(labels)) < len(labels):
            raise ValueError(f"entrants: expected each label once; got {labels}")


def in_small(rates: Rates, data_set: DataSet) -> Rates:
    """A look at everything in seconds, and nothing to conclude from."""
    return dataclasses.replace(
        rates, sizes=(16,), data_set=data_set, rows=1000, evaluated=300, batch=50, steps=20,
        learning_rates=rates.learning_rates[::5], scales=rates.scales[:2],
    )  # fmt: skip


def perform_all(
    rates: Rates, data_dir: str | None = None, peers: frozenset[str] = frozenset(), show: bool = True
) -> Path:
    """Make every run, write what was found to summary.json, and say where that is; `peers` may be installed."""
    folder = Path(rates.output) / rates.name
    with alone_in(folder):
        laboratory = Laboratory(folder, data_dir, show)
        start: dict[str, float | None] = {}
        ends: dict[str, dict[str, dict[str, float | None]]] = {}
        for scale in rates.scales:
            ends[repr(scale)] = {}
            for entrant in rates.entrants:
                if entrant.method.environment not in (None, *peers):
                    continue
                with laboratory.forgiving(f"scale {scale:g}, {entrant.label}"):
                    found = ends[repr(scale)][entrant.label] = {}
                    for rate in rates.learning_rates:
                        run = _run(rates, entrant, scale, rate)
                        outcome, _ = laboratory.perform(run, folder / f"scale{scale:g}", entrant.label)
                        start[repr(scale)] = _finite(outcome.records[0]["train_loss"])
                        found[repr(rate)] = _finite(outcome.records[-1]["train_loss"])
        write_json(folder / "summary.json", {"rates": dataclasses.asdict(rates), "start": start, "ends": ends})
    return folder / "summary.json"


def _run(rates: Rates, entrant: Entrant, scale: float, rate: float) -> Run:
    return Run(
        network=Network(rates.network, rates.sizes), data_set=rates.data_set, rows=rates.rows,
        evaluated=rates.evaluated, batch=rates.batch, steps=rates.steps, method=entrant.method, learning_rate=rate,
        schedule=rates.schedule, scale=scale, seed=rates.seed, records=1,
    )  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def table(path: Path) -> str:
    """The range of learning rates that end near the best one, and below the start, in Markdown."""
    summary = read_json(path)
    rows = [
        f"| first weights times | method | best loss | at | decades within {GOOD:.0%} of it | ends below start for |",
        "|---|---|---|---|---|---|",
    ]
    for scale, methods in summary["ends"].items():
        start = _number(summary["start"].get(scale))
        for label, ends in methods.items():
            values = {float(rate): _number(value) for rate, value in ends.items()}
            if not values:
                continue
            best = min(values, key=lambda rate: values[rate])
            near = [rate for rate, value in values.items() if value <= (1 + GOOD) * values[best] < math.inf]
            below = [rate for rate, value in values.items() if value < start]
            span = f"{math.log10(max(near) / min(near)):.1f}" if near else "none"
            range_ = f"{min(below):g} to {max(below):g}, {len(below)} of {len(values)}" if below else "none"
            rows.append(f"| {float(scale):g} | {label} | {values[best]:.4f} | {best:g} | {span} | {range_} |")
    return "\n".join(rows)


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def draw(path: Path) -> Path:
    """A panel for each scale; runs without a number at the end are drawn at the top."""
    summary = read_json(path)
    rates, handles = summary["rates"], {}
    figure, axes = panels(1, len(summary["ends"]), height=3.6)
    for axis, (scale, methods) in zip(axes[0], summary["ends"].items(), strict=True):
        start = _number(summary["start"].get(scale))
        top = 10 * start if math.isfinite(start) else 1e3
        for label, ends in methods.items():
            look: Any = LOOKS.get(label, OTHER)
            values = np.minimum([_number(value) for value in ends.values()], top)
            (handles[label],) = axis.plot(
                [float(rate) for rate in ends], values, color=look.color, linestyle=look.style, marker=look.marker,
                markersize=4, clip_on=False,
            )  # fmt: skip
        handles["at the start"] = axis.axhline(min(start, top), color="#999999", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="learning rate")
        axis.set_ylim(top=top)
        axis.set_title(f"first weights times {float(scale):g}", loc="left", fontsize=10, fontweight="bold")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel(f"training loss after {rates['steps']} steps")
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=2 + len(axes[0]) // 2, frameon=False
    )
    where = f"{rates['network']}, {TITLES[rates['data_set']]}, batches of {rates['batch']}"
    figure.suptitle(
        f"{where}; at the top: ten times the start and more, or no number; {versions(path)}",
        fontsize=8, color="#555555",
    )  # fmt: skip
    return save(figure, str(path.parent / "rates.png"))
