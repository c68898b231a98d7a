"""How the objective at the end depends on the learning rate, over five orders of magnitude.

    python -m experiments.robustness [field=value ...] [--data-dir DIR]

Constant learning rates, from zero, no damping beside the penalty. The exact Hessian stands in the step of SPFB where
the curvature of the bound does, with everything else the same: what differs is that one is an upper bound.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.data import load
from experiments.errors import one_line_errors
from experiments.experiment import problem_of, slug
from experiments.fields import Checked, Count, Epochs, NotNegative, Positive, Seed
from experiments.lock import alone_in
from experiments.methods import Method
from experiments.overrides import load_config, override
from experiments.plots import panels, save
from experiments.progress import Progress
from experiments.report import TITLES, commits_of, footnote
from experiments.runs import folder_of, perform, read_json, read_lines, read_result, write_json
from experiments.train import Problem, Run

__all__ = ["Entrant", "Found", "Robustness", "draw", "main", "perform_all", "read", "table"]


@dataclasses.dataclass(frozen=True)
class Entrant(Checked):
    """A method, and how many steps of it are one compiled loop."""

    label: str
    method: Method
    chunk: Count
    damping: NotNegative = 0.0


@dataclasses.dataclass(frozen=True)
class Robustness(Checked):
    """One picture."""

    data_sets: tuple[str, ...]
    entrants: tuple[Entrant, ...]
    learning_rates: tuple[Positive, ...]
    l2: Positive
    batch: Count
    epochs: Epochs
    seconds: Positive  # of training, for each run: a few times what the slowest needs
    seed: Seed = 0
    intercept: bool = True
    output: str = "results"


LOOKS = {
    "SGD": ("black", "-", "o"),
    "Adam": ("#56B4E9", "-.", "v"),
    "SPFB": ("#0072B2", "-", "s"),
    "LSPFB k=10": ("#009E73", "--", "^"),
    "exact Hessian": ("#D55E00", ":", "X"),
}


def perform_all(config: Robustness, data_dir: str | None = None, show: bool = True) -> Path:
    """Make every run, and say where the list of them is."""
    folder = Path(config.output) / "robustness"
    with alone_in(folder):
        return _perform_all(config, folder, data_dir, show)


def _perform_all(config: Robustness, folder: Path, data_dir: str | None, show: bool) -> Path:
    progress = Progress("robustness", len(config.data_sets) * len(config.entrants) * len(config.learning_rates), show)
    runs: dict[str, dict[str, dict[str, str]]] = {}
    for data_set in config.data_sets:
        problem = _problem(config, data_set, data_dir)
        runs[data_set] = {}
        for entrant in config.entrants:
            runs[data_set][entrant.label] = {}
            for rate in config.learning_rates:
                run = Run(
                    data_set=data_set, split="all", validation=0.5, intercept=config.intercept, batch=config.batch,
                    method=entrant.method, learning_rate=rate, schedule="constant", l2=config.l2,
                    damping=entrant.damping, epochs=config.epochs, chunk=entrant.chunk, seconds=config.seconds,
                    seed=config.seed,
                )  # fmt: skip
                where = folder_of(run, folder / data_set / slug(entrant.label))
                label = f"{data_set}, {entrant.label}, {rate:g}"
                progress.done(perform(run, problem, where, progress.run(label, run)))
                runs[data_set][entrant.label][repr(rate)] = str(where.relative_to(folder))
    write_json(folder / "summary.json", {"config": dataclasses.asdict(config), "runs": runs})
    return folder / "summary.json"


def _problem(config: Robustness, data_set: str, data_dir: str | None) -> Callable[[], Problem]:
    """Read when first needed."""
    return functools.cache(lambda: problem_of(load(data_set, data_dir=data_dir), "all", 0.5, config.intercept))


class Found(NamedTuple):
    """Objectives by data set, method and learning rate: at the start, and at the end, inf if that is no number.

    Attributes:
      stopped: how many runs their budget ended before the last epoch.
    """

    start: dict[str, float]
    end: dict[str, dict[str, dict[float, float]]]
    epochs: float
    stopped: int
    commits: frozenset[str]


def read(path: Path) -> Found:
    """From summary.json and the folders of runs that it names."""
    summary = read_json(path)
    start, end, commits, stopped = {}, {}, set(), 0
    for data_set, entrants in summary["runs"].items():
        end[data_set] = {}
        for label, runs in entrants.items():
            end[data_set][label] = {}
            for rate, name in runs.items():
                result = read_result(path.parent / name)
                value = np.nan if result is None else result.metrics["objective"]
                stopped += result is None or result.ended == "budget"
                end[data_set][label][float(rate)] = float(value) if np.isfinite(value) else np.inf
                start[data_set] = read_lines(path.parent / name)[0]["objective"]
                commits.update(commits_of(path.parent / name))
    return Found(start, end, summary["config"]["epochs"], stopped, frozenset(commits))


def table(found: Found) -> str:
    """The range of learning rates that end below the start, and the best objective, in Markdown."""
    rows = [
        "| data | method | ends below its start for | best objective | at | worst objective |",
        "|---|---|---|---|---|---|",
    ]
    for data_set, entrants in found.end.items():
        for label, values in entrants.items():
            good = [rate for rate, value in values.items() if value < found.start[data_set]]
            best = min(values, key=lambda rate: values[rate])
            span = f"{min(good):g} to {max(good):g}, {len(good)} of {len(values)}" if good else "none"
            worst = max(values.values())
            rows.append(
                f"| {TITLES.get(data_set, data_set)} | {label} | {span} | {values[best]:.4f} | {best:g} | "
                f"{'overflow' if np.isinf(worst) else format(worst, '.3g')} |"
            )
    return "\n".join(rows)


def draw(found: Found, output: Path) -> Path:
    """One panel for each data set; runs without a number at the end are drawn at the top."""
    figure, axes = panels(1, len(found.end), height=3.6)
    handles = {}
    for axis, (data_set, entrants) in zip(axes[0], found.end.items(), strict=True):
        start = found.start[data_set]
        lowest = min(min(values.values()) for values in entrants.values())
        top = 1e4 * start
        for label, values in entrants.items():
            color, style, marker = LOOKS.get(label, ("#999999", "-", "."))
            rates, ends = list(values), np.minimum(list(values.values()), top)
            (handles[label],) = axis.plot(
                rates, ends, color=color, linestyle=style, marker=marker, markersize=5, clip_on=False
            )
        handles["at the start"] = axis.axhline(start, color="#999999", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="learning rate", ylim=(0.9 * lowest, top))
        axis.set_title(f"{TITLES.get(data_set, data_set)}", loc="left", fontsize=10, fontweight="bold")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel(f"objective after {found.epochs:g} epochs")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    stopped = f"; {found.stopped} runs ended earlier, by their budget" if found.stopped else ""
    top = "at the top: 10,000 times the start and more, or no number"
    figure.suptitle(f"{top}{stopped}; {footnote(found.commits)}", fontsize=8, color="#555555")
    return save(figure, str(output))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="field=value", help="changes to configs/robustness.py")
    parser.add_argument("--data-dir", help="folder with the raw files of the data sets; by default they are downloaded")
    given = parser.parse_intermixed_args(arguments)

    def command() -> int:
        config = override(load_config("configs/robustness.py", Robustness), given.changes)
        path = perform_all(config, given.data_dir)
        found = read(path)
        print(f"\n{table(found)}")
        print(f"\nDrawn to {draw(found, path.parent / 'robustness.png')}")
        return 0

    return one_line_errors(command)


if __name__ == "__main__":
    # That of the module by its name, of whose classes configurations are; those of __main__ are others.
    from experiments.robustness import main as command

    sys.exit(command())
