"""Pictures and tables of comparisons, from the files that they left and nothing else."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.plots import panels, save
from experiments.runs import read_json, read_lines, read_result

__all__ = ["Curve", "Summary", "draw_summaries", "read_summary", "table"]

TITLES = {
    "adult": "Adult",
    "adult_one_hot": "Adult, one-hot",
    "digits": "digits",
    "fashion_mnist": "Fashion-MNIST",
    "kmnist": "KMNIST",
}


class Look(NamedTuple):
    """How a line is drawn: no two of a picture with the same colour and the same dashes."""

    color: str
    style: Any
    width: float = 1.6


LOOKS = {
    "SGD": Look("black", "-"),
    "momentum SGD": Look("#777777", "--"),
    "Adam": Look("#56B4E9", "-."),
    "SPFB": Look("#0072B2", "-", 2.2),
    "SPFB, paper": Look("#D55E00", "-"),
    "SPFB, damped": Look("#E69F00", "-."),
    "SPFB, window": Look("#0072B2", "--", 2.2),
    "LSPFB k=1, paper": Look("#E69F00", ":"),
    "LSPFB k=5, paper": Look("#E69F00", "--"),
    "LSPFB k=10, paper": Look("#D55E00", "-."),
    "LSPFB k=100, paper": Look("#D55E00", "-"),
    "LSPFB k=10, tight": Look("#009E73", "-."),
    "LSPFB k=100, tight": Look("#009E73", "-"),
    "KSPFB": Look("#CC79A7", "-", 2.2),
}
OTHER = Look("#999999", "-")
CLOSE = 1.001  # times a level: who is as close as that has reached it
ENDS = {"diverged": "X", "interrupted": "P", "budget": "s", "finished": "o"}


@dataclasses.dataclass(frozen=True)
class Curve:
    """All runs of one method: their records, and how they ended."""

    records: tuple[list[dict[str, float]], ...]
    ended: tuple[str, ...]

    def common(self) -> list[float]:
        """The steps that every run has a record of, and the last that every run took."""
        kept = set.intersection(*({record["step"] for record in run} for run in self.records))
        return sorted(kept | {min(run[-1]["step"] for run in self.records)})

    def column(self, name: str) -> np.ndarray:
        """Values (runs, steps) after those steps, on the line between two records where there is none."""
        steps = self.common()
        return np.array([np.interp(steps, [r["step"] for r in run], [r[name] for r in run]) for run in self.records])

    def best(self) -> float:
        """The lowest objective of each run, in the median."""
        return float(np.median([min(_objectives(run)) for run in self.records]))

    def first_below(self, level: float) -> tuple[float, float] | None:
        """Epochs and seconds after which runs are at or below a level, in the median; None if fewer than half are."""
        found = [
            next(((r["epoch"], r["seconds"]) for r, v in zip(run, _objectives(run), strict=True) if v <= level), None)
            for run in self.records
        ]
        reached = [one for one in found if one is not None]
        if 2 * len(reached) < len(found):
            return None
        missing = [(np.inf, np.inf)] * (len(found) - len(reached))
        epochs, seconds = np.percentile(np.array(reached + missing), 50, axis=0, method="lower")
        return float(epochs), float(seconds)

    def ending(self) -> str:
        """How runs ended; of different ends, the one that says most."""
        return next(end for end in ENDS if end in self.ended)

    def divergences(self) -> int:
        """Runs that ended above where they began, or at no number at all."""
        return sum(not run[-1]["objective"] <= run[0]["objective"] for run in self.records)


def _objectives(run: list[dict[str, float]]) -> list[float]:
    return [np.inf if np.isnan(record["objective"]) else record["objective"] for record in run]


@dataclasses.dataclass(frozen=True)
class Summary:
    """A comparison as its files tell it."""

    folder: Path
    experiment: dict[str, Any]
    l2: float
    least_objective: float
    chosen: dict[str, dict[str, Any]]
    tuning_steps: dict[str, float]
    curves: dict[str, Curve]
    commits: frozenset[str]  # of every start of every run; those with changes end in "+"

    def edge(self, label: str) -> str:
        """A star where the learning rate is the lowest or the highest of its grid."""
        rates = next(c["learning_rates"] for c in self.experiment["contenders"] if c["label"] == label)
        return "*" if self.chosen[label]["learning_rate"] in (min(rates), max(rates)) else ""

    def title(self) -> str:
        data_set, batch = self.experiment["data_set"], self.experiment["batch"]
        return f"{TITLES.get(data_set, data_set)}, batches of {batch:,}"


def read_summary(path: Path) -> Summary:
    """From summary.json and the folders of runs that it names."""
    found = read_json(path)
    folders = {label: [path.parent / name for name in names] for label, names in found["runs"].items()}
    return Summary(
        folder=path.parent,
        experiment=found["experiment"],
        l2=found["l2"],
        least_objective=found["least_objective"],
        chosen=found["chosen"],
        tuning_steps=found["tuning_steps"],
        curves={label: _curve(runs) for label, runs in folders.items()},
        commits=frozenset(commit for runs in folders.values() for run in runs for commit in commits_of(run)),
    )


def _curve(folders: Sequence[Path]) -> Curve:
    results = [read_result(folder) for folder in folders]
    return Curve(
        tuple(read_lines(folder) for folder in folders),
        tuple("interrupted" if result is None else result.ended for result in results),
    )


def commits_of(folder: Path) -> list[str]:
    """The commits that a run was made with."""
    starts = read_json(folder / "environment.json")
    return [f"{(start['commit'] or 'unknown')[:9]}{'+' if start['dirty'] else ''}" for start in starts]


def footnote(commits: frozenset[str]) -> str:
    """Which revision made a picture, and a warning where it cannot be had again."""
    text = f"revision {', '.join(sorted(commits))}"
    return f"{text} (+: with uncommitted changes)" if any(one.endswith("+") for one in commits) else text


COLUMNS = (
    ("objective", "epoch", "objective above its least", "epochs"),
    ("objective", "seconds", "objective above its least", "seconds of training"),
    ("test_error", "epoch", "test error", "epochs"),
    ("test_error", "seconds", "test error", "seconds of training"),
)


def draw_summaries(summaries: Sequence[Summary], output: Path, labels: Sequence[str] | None = None) -> Path:
    """One row for each comparison; objective and test error, against epochs and against seconds.

    Lines are medians over seeds, bands reach from the lowest to the highest. `labels` chooses the methods, and their
    order.
    """
    figure, axes = panels(len(summaries), len(COLUMNS))
    handles: dict[str, Any] = {}
    for summary, row in zip(summaries, axes, strict=True):
        shown = [label for label in (labels or summary.curves) if label in summary.curves]
        for (value, against, ylabel, xlabel), axis in zip(COLUMNS, row, strict=True):
            for label in shown:
                handles[label] = _draw_curve(axis, summary, label, value, against)
            _limits(axis, summary, shown, value)
            axis.set(xlabel=xlabel, ylabel=ylabel)
        row[0].set_title(f"{summary.title()}, l2 = {summary.l2:g}", loc="left", fontsize=10, fontweight="bold")
    for marker, text in (("o", "all epochs run"), ("s", "ended by its budget of seconds"), ("X", "diverged")):
        (handles[text],) = axes[0][0].plot([], [], marker=marker, color="#555555", linestyle="none")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    commits = frozenset(commit for summary in summaries for commit in summary.commits)
    choice = {summary.experiment["select"] for summary in summaries}
    chosen = "settings chosen on validation rows" if choice == {"validation"} else "settings chosen on TEST rows"
    figure.suptitle(f"medians and ranges over seeds; {chosen}; {footnote(commits)}", fontsize=8, color="#555555")
    return save(figure, str(output))


def _draw_curve(axis, summary: Summary, label: str, value: str, against: str):
    curve, look = summary.curves[label], LOOKS.get(label, OTHER)
    x, y = np.median(curve.column(against), axis=0)[1:], curve.column(value)[:, 1:]
    seen = np.isfinite(y).any(axis=0)  # what has diverged by then is left out
    x, y = x[seen], np.where(np.isfinite(y), y, np.nan)[:, seen]
    if value == "objective":
        y = np.maximum(y - summary.least_objective, 1e-7)
    middle = np.nanmedian(y, axis=0)
    axis.fill_between(x, np.nanmin(y, axis=0), np.nanmax(y, axis=0), color=look.color, alpha=0.18, linewidth=0)
    (line,) = axis.plot(x, middle, color=look.color, linestyle=look.style, linewidth=look.width)
    end = curve.ending()
    axis.plot(x[-1:], middle[-1:], marker=ENDS[end], markersize=5, color=look.color, linestyle="none")
    steps = int(curve.common()[-1])
    if len(x) and end == "budget" and steps < 10 and (value, against) == ("objective", "epoch"):
        text = f" {steps} step{'s' if steps > 1 else ''}"
        axis.annotate(text, (x[-1], middle[-1]), fontsize=7, color=look.color, va="center")
    return line


def _limits(axis, summary: Summary, shown: Sequence[str], value: str) -> None:
    axis.set(xscale="log", yscale="log")
    axis.grid(alpha=0.25)
    if value == "objective":
        start = max(summary.curves[label].column(value)[:, 0].max() for label in shown)
        axis.set_ylim(top=3 * (start - summary.least_objective))
        return
    lowest = min(np.nanmin(summary.curves[label].column(value)) for label in shown)
    start = max(summary.curves[label].column(value)[:, 0].max() for label in shown)
    axis.set_ylim(0.97 * lowest, max(1.2 * lowest, min(start, 4 * lowest)))
    for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        which(lambda share, _: f"{100 * share:g} %")


def table(summary: Summary) -> str:
    """One row for each method, in Markdown; medians over seeds. A level is reached within 0.1 % of the objective."""
    header = (
        "method", "learning rate", "damping", "tuned with steps", "seeds", "epochs", "seconds", "ended by",
        "objective above least", "at best", "to SGD's best: epochs", "seconds", "to its own best: epochs", "seconds",
        "test error", "diverged",
    )  # fmt: skip
    sgd = summary.curves["SGD"].best() if "SGD" in summary.curves else None
    rows = [header, ("---",) * len(header)]
    for label, curve in summary.curves.items():
        setting = summary.chosen[label]
        last = {name: float(np.median([run[-1][name] for run in curve.records])) for name in curve.records[0][-1]}
        rows.append(
            (
                label,
                f"{setting['learning_rate']:g}{summary.edge(label)}, {setting['schedule']}",
                f"{setting['damping']:g}",
                _number(summary.tuning_steps[label]) if label in summary.tuning_steps else "as another",
                str(len(curve.records)),
                _number(last["epoch"]),
                _number(last["seconds"]),
                {"finished": "epochs"}.get(curve.ending(), curve.ending()),
                f"{last['objective'] - summary.least_objective:.2g}",
                f"{curve.best() - summary.least_objective:.2g}",
                *_reached(None if sgd is None else curve.first_below(CLOSE * sgd)),
                *_reached(curve.first_below(CLOSE * curve.best())),
                f"{last['test_error']:.2%}",
                str(curve.divergences()),
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _reached(found: tuple[float, float] | None) -> tuple[str, str]:
    return ("never", "never") if found is None else (_number(found[0]), _number(found[1]))


def _number(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"
