"""Tables and figures of the suite, from the file that sums it up and nothing else."""

import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.benchmarks.suite.contestants import CONTESTANTS
from experiments.benchmarks.suite.data import DATA_SETS
from experiments.benchmarks.suite.pool import NOT_INSTALLED
from experiments.errors import UserError, writing
from experiments.plots import panels, save

__all__ = ["Cell", "cells", "draw_curves", "draw_profile", "fill", "tables"]

# A cell is won or lost by more than the noise of a clock.
EVEN = 1.1


class Side(NamedTuple):
    """The fastest of ours, or of the peers."""

    method: str
    seconds: float  # the median of turns
    passes: float | None


class Cell(NamedTuple):
    """A target of a problem.

    `ratio` is the time of the best peer over that of the best of ours, in the same turn, in the median of turns;
    infinite or 0 where one side did not arrive. Where no peer arrived, `at_least` is what they were given to.
    """

    data: str
    l2: float
    target: float
    ours: Side | None
    peer: Side | None
    ratio: float | None
    low: float | None
    high: float | None
    at_least: float | None = None


def cells(summary: dict[str, Any]) -> list[Cell]:
    """All of them; those that nobody of one side has reached have no ratio."""
    found = []
    for problem in summary["problems"]:
        for i, target in enumerate(summary["targets"]):
            sides = [_fastest(problem, i, ours) for ours in (True, False)]
            ratios = []
            if all(sides):
                ours, peer = (side[1] for side in sides)  # pyright: ignore[reportOptionalSubscript]
                ratios = [_quotient(b, a) for a, b in zip(ours, peer, strict=True)]
            low, high = min(ratios, default=None), max(ratios, default=None)
            ratio = statistics.median_low(ratios) if ratios else None
            ours, peer = (None if side is None else side[0] for side in sides)
            at_least = _least_limit(problem) / ours.seconds if ours is not None and peer is None else None
            found.append(Cell(problem["data"], problem["l2"], target, ours, peer, ratio, low, high, at_least))
    return found


def _fastest(problem: dict[str, Any], i: int, ours: bool) -> tuple[Side, list[float]] | None:
    """The entry of a final with the least median to target i, and its turns."""
    candidates = []
    for entry in problem["finals"]:
        if CONTESTANTS[entry["method"]].ours == ours:
            turns = [math.inf if turn[i] is None else turn[i] for turn in entry["seconds"]]
            candidates.append((float(np.median(turns)), entry["method"], turns))
    median, method, turns = min(candidates, default=(math.inf, "", []))
    if math.isinf(median):
        return None
    return Side(method, median, problem["methods"][method]["passes"][i]), turns


def _quotient(peer: float, ours: float) -> float:
    """That of their times, of which one may be infinite."""
    if ours == 0:  # where the start is good enough
        return 1.0 if peer == 0 else math.inf
    return 0.0 if math.isinf(ours) else peer / ours


def _least_limit(problem: dict[str, Any]) -> float:
    """What every peer was given, in seconds."""
    return min(one["limit"] for name, one in problem["methods"].items() if not CONTESTANTS[name].ours)


def _label(method: str) -> str:
    return CONTESTANTS[method].label


def _title(data: str) -> str:
    return DATA_SETS[data].title


def _power(number: float) -> str:
    return f"{number:.0e}".replace("e-0", "e-")


def _row(*columns: Any) -> str:
    return f"| {' | '.join(str(column) for column in columns)} |"


def _head(*columns: str) -> list[str]:
    return [_row(*columns), "|" + "---|" * len(columns)]


def _time(seconds: float) -> str:
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def _ratio(cell: Cell) -> str:
    if cell.ratio is not None:
        text = f"{cell.ratio:.1f}" if cell.ratio >= 0.95 else f"{cell.ratio:.2f}"
        return f"**{text}**" if cell.ratio < 1 / EVEN else text
    if cell.at_least is not None:
        return f"> {cell.at_least:.1f}"
    return "neither" if cell.ours is None else "**only peers**"


def ratio_table(summary: dict[str, Any], l2: float | None = None) -> str:
    """A row for each problem, or for each with one penalty; a column for each target."""
    by_problem: dict[tuple[str, float], list[Cell]] = {}
    for cell in cells(summary):
        if l2 in (None, cell.l2):
            by_problem.setdefault((cell.data, cell.l2), []).append(cell)
    lines = _head("data", "l2", *map(_power, summary["targets"]))
    for (data, penalty), row in by_problem.items():
        lines.append(_row(_title(data), _power(penalty), *map(_ratio, row)))
    return "\n".join(lines)


def cell_table(summary: dict[str, Any]) -> str:
    """A row for each cell: who, seconds, passes, ratio and its spread."""
    lines = _head("data", "l2", "to", "ours", "s", "passes", "best peer", "s", "passes", "ratio", "turns")
    for cell in cells(summary):
        sides = []
        for side in (cell.ours, cell.peer):
            passes = "-" if side is None or side.passes is None else f"{side.passes:.3g}"
            sides += ["-"] * 3 if side is None else [_label(side.method), _time(side.seconds), passes]
        spread = "" if cell.low is None else f"{cell.low:.2g} to {cell.high:.2g}"
        lines.append(_row(_title(cell.data), _power(cell.l2), _power(cell.target), *sides, _ratio(cell), spread))
    return "\n".join(lines)


def count_table(summary: dict[str, Any]) -> str:
    """Cells by family: won by so much, even, lost."""
    lines = _head("", "cells", "ours 2 times ahead or more", "ahead", "within 10 %", "behind", "neither arrived")
    groups: dict[str, list[Cell]] = {}
    for cell in cells(summary):
        of_family = {"real": _title(cell.data), "labels": "10 to 10,000 labels", "condition": "condition 1e1 to 1e8"}
        groups.setdefault(of_family[DATA_SETS[cell.data].family], []).append(cell)
    groups["all"] = [cell for group in groups.values() for cell in group]
    for name, group in groups.items():
        kinds = Counter(_kind(cell) for cell in group)
        lines.append(
            _row(name, len(group), *(kinds[kind] for kind in ("double", "ahead", "even", "behind", "neither")))
        )
    return "\n".join(lines)


def _kind(cell: Cell) -> str:
    ratio = cell.at_least if cell.ratio is None else cell.ratio
    if ratio is None:
        return "neither" if cell.peer is None else "behind"
    limits = {"double": 2.0, "ahead": EVEN, "even": 1 / EVEN}
    return next((kind for kind, limit in limits.items() if ratio >= limit), "behind")


def method_table(summary: dict[str, Any]) -> str:
    """For each method: in how many cells it arrived, how often it was the fastest, how runs ended, compile time."""
    columns = ("targets reached", "fastest", "diverged", "failed or killed", "compile s")
    lines = _head("method", *columns)
    total = len(summary["problems"]) * len(summary["targets"])
    fastest = Counter(
        min(times, key=times.__getitem__) for times in _heat_times(summary) if min(times.values(), default=0.0) > 0
    )
    for method, contestant in CONTESTANTS.items():
        found = [problem["methods"][method] for problem in summary["problems"] if method in problem["methods"]]
        version = summary["versions"].get(contestant.environment, "")
        if not found:
            lines.append(_row(_label(method), version if version.startswith(NOT_INSTALLED) else "not run", *[""] * 4))
            continue
        ended = sum((Counter(one["ended"]) for one in [*found, *_finals_of(summary, method)]), Counter())
        reached = sum(seconds is not None for one in found for seconds in one["seconds"])
        wrong = ended["failed"] + ended["killed"]
        compiling = f"{max(one['compile_seconds'] for one in found):.1f}"
        lines.append(
            _row(_label(method), f"{reached} of {total}", fastest[method], ended["diverged"], wrong, compiling)
        )
    return "\n".join(lines)


def _finals_of(summary: dict[str, Any], method: str) -> list[dict[str, Any]]:
    return [entry for problem in summary["problems"] for entry in problem["finals"] if entry["method"] == method]


def failure_list(summary: dict[str, Any]) -> str:
    """Every message of a run that went wrong, and where."""
    found: dict[tuple[str, str], list[str]] = {}
    for problem in summary["problems"]:
        where = f"{_title(problem['data'])} {_power(problem['l2'])}"
        runs = [*problem["methods"].items(), *((entry["method"], entry) for entry in problem["finals"])]
        for method, one in runs:
            for message in one["messages"]:
                places = found.setdefault((method, message), [])
                places += [where] if where not in places else []
    lines = [f"- {_label(method)}: {message} ({'; '.join(where)})" for (method, message), where in found.items()]
    return "\n".join(lines) or "- None."


def machine_list(summary: dict[str, Any]) -> str:
    """What the numbers may depend on."""
    about = summary["environment"]
    lines = [f"- machine: {about['processor']}, {about['device']}, {about['machine']}"]
    lines.append(f"- commit: {', '.join(summary['commits'])}{', with changes' if about['dirty'] else ''}")
    return "\n".join([*lines, *(f"- {name}: {text}" for name, text in summary["versions"].items())])


def estimator_table(summary: dict[str, Any]) -> str:
    """The estimator and the best of scikit-learn's solvers: seconds to each target, in the heats."""
    lines = _head("data", "l2", *(f"to {_power(target)}" for target in summary["targets"]))
    for problem in summary["problems"]:
        solvers = {name: one for name, one in problem["methods"].items() if name.startswith("scikit_learn_")}
        if "estimator" not in problem["methods"] or not solvers:
            continue
        texts = []
        for i, ours in enumerate(problem["methods"]["estimator"]["seconds"]):
            theirs = min((s for one in solvers.values() if (s := one["seconds"][i]) is not None), default=None)
            ratio = "" if ours is None or theirs is None else f": {theirs / ours:.2g}"
            texts.append(" / ".join("-" if s is None else _time(s) for s in (ours, theirs)) + ratio)
        lines.append(_row(_title(problem["data"]), _power(problem["l2"]), *texts))
    return "\n".join(lines)


def _heat_times(summary: dict[str, Any]) -> list[dict[str, float]]:
    """For each cell the seconds of the methods that arrived."""
    return [
        {m: one["seconds"][i] for m, one in problem["methods"].items() if one["seconds"][i] is not None}
        for problem in summary["problems"]
        for i in range(len(summary["targets"]))
    ]


def tables(summary: dict[str, Any]) -> dict[str, str]:
    """All of them, by the names under which the page has them."""
    return {
        "ratios": ratio_table(summary),
        "ratios of one penalty": ratio_table(summary, SHOWN_PENALTY),
        "counts": count_table(summary),
        "cells": cell_table(summary),
        "methods": method_table(summary),
        "failures": failure_list(summary),
        "estimator": estimator_table(summary),
        "machine": machine_list(summary),
    }


def fill(page: Path, found: dict[str, str]) -> None:
    """Put tables where a page has comments with their names; all else stays as it was written."""
    text = page.read_text()
    for name, table in found.items():
        first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if first not in text or last not in text:
            continue
        before, rest = text.split(first, 1)
        text = f"{before}{first}\n{table}\n{last}{rest.split(last, 1)[1]}"
    with writing(page):
        page.write_text(text)


# Of the table in the README and the curves.
SHOWN_PENALTY = 1e-4
LOOKS = {
    "linear_fit": ("#D55E00", "--", 2.4),
    "estimator": ("#D55E00", "-", 2.4),
    "kspfb": ("#CC79A7", "-", 2.4),
    "mm": ("#E69F00", "-", 2.0),
    "newton_cg": ("#E69F00", "--", 2.0),
    "spfb": ("#882255", "-.", 1.6),
    "lspfb_tight": ("#882255", ":", 1.6),
    "lspfb_paper": ("#882255", "--", 1.2),
    "sgd": ("#000000", "-", 1.2),
    "momentum": ("#000000", "--", 1.2),
    "adam": ("#000000", ":", 1.8),
    "lbfgs": ("#0072B2", "-", 1.4),
    "bohning": ("#0072B2", "--", 1.4),
    "scikit_learn_lbfgs": ("#009E73", "-", 1.4),
    "scikit_learn_newton_cg": ("#009E73", "--", 1.4),
    "scikit_learn_newton_cholesky": ("#009E73", ":", 1.8),
    "scikit_learn_saga": ("#009E73", "-.", 1.4),
    "cyanure": ("#56B4E9", "-", 1.4),
    "somax_newton_cg": ("#999999", "-", 1.4),
    "somax_sgn": ("#999999", "--", 1.4),
    "somax_egn": ("#999999", ":", 1.8),
    "kfac": ("#999933", "-", 1.4),
}


def _look(method: str) -> dict[str, Any]:
    color, style, width = LOOKS[method]
    return {"color": color, "linestyle": style, "linewidth": width, "label": _label(method)}


def draw_profile(summary: dict[str, Any], output: str) -> Path:
    """In how many cells a method is within a multiple of the time of the fastest."""
    # Where the start is good enough there is nothing to compare.
    times = [cell for cell in _heat_times(summary) if min(cell.values(), default=1.0) > 0]
    figure, axes = panels(1, 1, height=4.6)
    figure.set_size_inches(10, 5.6)
    factors = np.geomspace(1, 100, 200)
    for method in CONTESTANTS:
        ratios = np.array([cell[method] / min(cell.values()) if method in cell else np.inf for cell in times])
        if np.isfinite(ratios).any():
            axes[0, 0].plot(factors, [(ratios <= f).mean() for f in factors], **_look(method))
    axes[0, 0].set(
        xscale="log", ylim=(0, 1), xlim=(1, 100), xlabel="times the seconds of the fastest method",
        ylabel="share of all targets",
    )  # fmt: skip
    axes[0, 0].grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return save(figure, output)


def draw_curves(summary: dict[str, Any], output: str, l2: float = SHOWN_PENALTY) -> Path:
    """Seconds to each target, a panel for each data set."""
    problems = [problem for problem in summary["problems"] if problem["l2"] == l2]
    if not problems:
        raise UserError(f"l2: expected a penalty of the summary; got {l2:g}")
    columns = min(4, len(problems))
    rows = -(-len(problems) // columns)
    figure, axes = panels(rows, columns)
    for ax, problem in zip(axes.flat, problems, strict=False):
        for method, one in problem["methods"].items():
            points = [(s, t) for s, t in zip(one["seconds"], summary["targets"], strict=True) if s is not None]
            if points:
                ax.plot(*zip(*points, strict=True), marker=".", **_look(method))
        ax.set(xscale="log", yscale="log", title=_title(problem["data"]), ylim=(5e-7, 2e-1))
        ax.xaxis.set_minor_formatter("")  # their numbers would overlap where times are less than ten times apart
        ax.grid(alpha=0.3)
    for ax in axes.flat[len(problems) :]:
        ax.axis("off")
    for ax in axes[-1]:
        ax.set_xlabel("seconds")
    for ax in axes[:, 0]:
        ax.set_ylabel("relative suboptimality")
    unique = {line.get_label(): line for ax in axes.flat for line in ax.get_lines()}
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=5, fontsize=8)
    return save(figure, output)
