"""Tables and figures of comparisons, from the files that they left and nothing else."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.networks.data import TITLES
from experiments.plots import panels, save
from experiments.report import commits_of, footnote
from experiments.runs import read_json

__all__ = ["LOOKS", "OTHER", "Look", "draw", "table", "versions"]

REFERENCE = "AdamW"


class Look(NamedTuple):
    """How a line is drawn."""

    color: str
    style: Any
    marker: str


LOOKS = {
    "AdamW": Look("black", "-", "o"),
    "NadamW": Look("#777777", "--", "o"),
    "Muon": Look("#D55E00", "-", "^"),
    "schedule-free AdamW": Look("#E69F00", "-.", "v"),
    "momentum SGD": Look("#56B4E9", "-.", "x"),
    "layerwise SPFB": Look("#0072B2", "-", "s"),
    "layerwise Gauss-Newton": Look("#009E73", "--", "D"),
    "SPFB": Look("#CC79A7", ":", "P"),
    "kfac-jax": Look("#882255", "--", "*"),
    "PSGD Kron": Look("#44AA99", ":", "h"),
}
OTHER = Look("#999999", "-", ".")
MEASURES = {"train_loss": "training loss", "test_loss": "held-out loss"}


class Line(NamedTuple):
    """What a table says of a method in a cell; ratios are None where one of the two has not reached the target."""

    label: str
    point: dict[str, Any]
    reached: bool
    ms: float
    cost: dict[str, float] | None
    at_edge: bool  # whether its learning rate is the lowest or highest of three or more
    steps_ratio: float | None = None
    seconds_ratio: float | None = None  # by steps and the cost of a step


def table(path: Path) -> str:
    """A table for each data set and size of batch, in Markdown."""
    summary = read_json(path)
    return "\n\n".join(f"{_title(summary, cell)}\n\n{_table(summary, cell)}" for cell in summary["cells"])


def _title(summary: dict[str, Any], cell: dict[str, Any]) -> str:
    comparison = summary["comparison"]
    measure, seeds = MEASURES[comparison["measure"]], ", ".join(map(str, comparison["seeds"]))
    whose = f"at which {REFERENCE} ends after {cell['steps']} steps" if comparison["level"] is None else "that is given"
    return (
        f"### {comparison['network'].capitalize()}, {TITLES[cell['data_set']]}, batches of {cell['batch']:,}\n\n"
        f"To a {measure} of {cell['target']:.4f}, {whose}; means over seeds {seeds}. Steps, the cost of a step "
        f"and seconds are ratios to {REFERENCE}'s; a star is for a learning rate at the edge of its grid."
    )


def _table(summary: dict[str, Any], cell: dict[str, Any]) -> str:
    measure = MEASURES[summary["comparison"]["measure"]]
    header = (
        "method",
        "steps",
        "ratio",
        "a step (quartiles)",
        "seconds",
        f"{measure} at the end",
        "test error",
        "setting",
    )
    rows = [header, ("---",) * len(header)]
    rows += [_row(line, _first_length(summary, line)) for line in lines(summary, cell)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _first_length(summary: dict[str, Any], line: Line) -> bool:
    """Whether no shorter run was tried: it may do with less."""
    return summary["comparison"]["lengths"][0] == line.point["length"] < 1


def _row(line: Line, is_shortest: bool) -> tuple[str, ...]:
    point, cost = line.point, line.cost
    method, rate, schedule = point["setting"]
    star = "*" if line.at_edge else ""
    told = ", ".join(f"{name} {value}" for name, value in method.items() if name != "name" and value not in (None, 0.0))
    most = "at most " if is_shortest and line.reached else ""
    return (
        line.label,
        f"{most}{point['steps']}" if line.reached else f"not in {point['steps']}",
        _ratio(line.steps_ratio),
        "-" if cost is None else f"{cost['ratio']:.2f} ({cost['ratio_low']:.2f} to {cost['ratio_high']:.2f})",
        _ratio(line.seconds_ratio),
        _spread(point["values"], "{:.4f}"),
        _spread([None if error is None else 100 * error for error in point["test_errors"]], "{:.2f}") + " %",
        f"{rate:g}{star}, {schedule}{', ' if told else ''}{told}",
    )


def lines(summary: dict[str, Any], cell: dict[str, Any]) -> list[Line]:
    """All methods of a cell, in the order of the configuration.

    Seconds are steps times the cost of a step, both as ratios, since clocks of runs an hour apart differ.
    """
    found = cell["contenders"]
    base = found.get(REFERENCE)
    rates = {one["label"]: one["learning_rates"] for one in summary["comparison"]["contenders"]}
    result = []
    for label in [label for label in rates if label in found]:
        one, point = found[label], found[label]["points"][-1]
        seconds, cost = _mean(point["seconds"]), one["cost"]
        ms = 1e3 * (seconds / point["steps"] if cost is None else cost["seconds"])
        at_edge = len(rates[label]) > 2 and point["setting"][1] in (min(rates[label]), max(rates[label]))
        line = Line(label, point, one["reached"], ms, cost, at_edge)
        if one["reached"] and base is not None and base["reached"]:
            goal = base["points"][-1]
            steps = point["steps"] / goal["steps"]
            by_cost = None if cost is None else steps * cost["ratio"]
            line = line._replace(steps_ratio=steps, seconds_ratio=by_cost)
        result.append(line)
    return result


def _mean(values: Sequence[float | None]) -> float:
    return float(np.mean([math.inf if value is None else value for value in values])) if values else math.inf


def _spread(values: Sequence[float | None], form: str) -> str:
    """Mean and standard deviation over seeds; how many of them have no number."""
    kept = [value for value in values if value is not None]
    if not kept:
        return "no number"
    text = form.format(np.mean(kept))
    if len(kept) > 1:
        text += f" ± {form.format(np.std(kept, ddof=1))}"
    return text if len(kept) == len(values) else f"{text}, {len(values) - len(kept)} of {len(values)} diverged"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def draw(path: Path) -> Path:
    """A row for each cell: the measure at the end of runs of several lengths, against steps and against seconds.

    A point is the mean over seeds, or the run with the seed for tuning where there is no other. Where a level is given
    there is one row: steps and seconds to it against the size of batches.
    """
    summary = read_json(path)
    if summary["comparison"]["level"] is not None and len(summary["comparison"]["batches"]) > 1:
        return _draw_batches(summary, path)
    figure, axes = panels(len(summary["cells"]), 2, height=3.2)
    handles: dict[str, Any] = {}
    for cell, (left, right) in zip(summary["cells"], axes, strict=True):
        for line in lines(summary, cell):
            look = LOOKS.get(line.label, OTHER)
            points = [_point(point) for point in cell["contenders"][line.label]["points"]]
            steps, values = np.array(
                [(steps, value) for steps, value in points if math.isfinite(value)] or [(math.nan, math.nan)]
            ).T
            for axis, x in ((left, steps), (right, steps * line.ms / 1e3)):
                (handles[line.label],) = axis.plot(
                    x, values, color=look.color, linestyle=look.style, marker=look.marker, markersize=4
                )
        for axis, xlabel in ((left, "steps of the run"), (right, "seconds of training")):
            handles["target"] = axis.axhline(cell["target"], color="#999999", linewidth=1)
            axis.set(xscale="log", yscale="log", xlabel=xlabel)
            axis.grid(alpha=0.25)
        left.set_ylabel(f"{MEASURES[summary['comparison']['measure']]} at the end")
        left.set_title(f"{TITLES[cell['data_set']]}, batches of {cell['batch']:,}", loc="left", fontsize=10)
    return _finish(figure, handles, summary, path)


def _point(point: dict[str, Any]) -> tuple[float, float]:
    values = point["values"] or [point["tuning"]]
    return point["steps"], _mean(values)


def _draw_batches(summary: dict[str, Any], path: Path) -> Path:
    data_sets = summary["comparison"]["data_sets"]
    figure, axes = panels(len(data_sets), 2, height=3.2)
    handles: dict[str, Any] = {}
    for data_set, (left, right) in zip(data_sets, axes, strict=True):
        cells = [cell for cell in summary["cells"] if cell["data_set"] == data_set]
        for label in [contender["label"] for contender in summary["comparison"]["contenders"]]:
            look = LOOKS.get(label, OTHER)
            found = [(cell["batch"], line) for cell in cells for line in lines(summary, cell) if line.label == label]
            kept = [(batch, line.point["steps"], line.ms) for batch, line in found if line.reached]
            if kept:
                batch, steps, ms = np.array(kept).T
                for axis, y in ((left, steps), (right, steps * ms / 1e3)):
                    (handles[label],) = axis.plot(
                        batch, y, color=look.color, linestyle=look.style, marker=look.marker, markersize=4
                    )
        for axis, ylabel in ((left, "steps"), (right, "seconds of training")):
            axis.set(xscale="log", yscale="log", xlabel="batch size", ylabel=f"{ylabel} to the level")
            axis.grid(alpha=0.25)
        left.set_title(f"{TITLES[data_set]}, to {summary['comparison']['level']:g}", loc="left", fontsize=10)
    return _finish(figure, handles, summary, path)


def _finish(figure: Any, handles: dict[str, Any], summary: dict[str, Any], path: Path) -> Path:
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{summary['comparison']['network']}; {versions(path)}", fontsize=8, color="#555555")
    return save(figure, str(path.parent / f"{path.parent.name}.png"))


def versions(path: Path) -> str:
    """Which revisions made the runs beside a summary."""
    folders = [found.parent for found in path.parent.glob("*/*/*/environment.json")]
    return footnote(frozenset(commit for folder in folders for commit in commits_of(folder)))
