"""The paper's experiments and what goes beyond them, from raw data to pictures and tables.

    python -m experiments.reproduce [--quick] [--data-dir DIR] [--output DIR]

Pictures and tables are in DIR, by default `results/reproduction`, or `results/quick` with --quick:

    paper.png           SGD, SPFB and LSPFB on three data sets, as in the figure of the paper
    small_batches.png   batches of 10 and 100: SPFB as in the paper, damped, and with a window
    beyond.png          KSPFB, tight LSPFB, Adam and momentum beside them
    robustness.png      the objective against the learning rate
    tables.md           what they say, in numbers

What has been run before is not repeated; after an interruption, the same command goes on from where it was. `--quick`
is the same in small, for a look at everything: fewer seeds, ranks and seconds, and nothing to conclude from.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import robustness
from experiments.errors import one_line_errors, writing
from experiments.experiment import Experiment, perform_all
from experiments.lock import alone_in
from experiments.overrides import load_config
from experiments.report import Summary, draw_summaries, footnote, read_summary, table

__all__ = ["main", "quick", "reproduce"]

DATA_SETS = ("adult", "kmnist", "fashion_mnist")
SMALL = (10, 100)
PAPER = ("SGD", "SPFB", *(f"LSPFB k={k}, paper" for k in (1, 5, 10, 100)))
BEYOND = (
    "SGD", "momentum SGD", "Adam", "SPFB", "SPFB, window", "LSPFB k=10, paper", "LSPFB k=10, tight",
    "LSPFB k=100, tight", "KSPFB",
)  # fmt: skip
QUICK = {"SGD", "SPFB", "LSPFB k=1, paper", "LSPFB k=10, tight", "KSPFB", "SPFB, paper"}


def quick(experiment: Experiment) -> Experiment:
    """In small: some contenders, two settings for each, two seeds, a thirtieth of the seconds."""
    small = experiment.batch < 1000
    contenders = tuple(
        dataclasses.replace(
            contender,
            learning_rates=contender.learning_rates[1:3] if len(contender.dampings) == 1 else (1.0,),
            epochs=contender.epochs / 5,
        )
        for contender in experiment.contenders
        if contender.label in QUICK or (small and contender.label == "SPFB, window")
    )
    return dataclasses.replace(
        experiment,
        contenders=contenders,
        schedules=("inverse",),
        l2=(1e-4,),
        seeds=2,
        tuning_seconds=experiment.tuning_seconds / 30,
        seconds=experiment.seconds / 30,
        least_tolerance=1e-3,
    )


def reproduce(output: Path, *, data_dir: str | None, in_small: bool) -> None:
    """All of it; the folder of each comparison is beside the pictures."""
    began = time.monotonic()

    def compare(name: str):
        experiment = dataclasses.replace(load_config(f"configs/{name}.py", Experiment), output=str(output))
        summary = read_summary(perform_all(quick(experiment) if in_small else experiment, data_dir))
        print(f"\n{table(summary)}\n{(time.monotonic() - began) / 60:.1f} minutes so far\n", flush=True)
        return summary

    large = [compare(data_set) for data_set in DATA_SETS]
    small = [compare(f"{data_set}_batch_{batch}") for data_set in DATA_SETS for batch in SMALL]
    rates = dataclasses.replace(load_config("configs/robustness.py", robustness.Robustness), output=str(output))
    if in_small:
        rates = dataclasses.replace(rates, learning_rates=rates.learning_rates[::5], epochs=0.5)
    found = robustness.read(robustness.perform_all(rates, data_dir))

    drawn = (
        draw_summaries(large, output / "paper.png", PAPER),
        draw_summaries(small, output / "small_batches.png"),
        draw_summaries(large, output / "beyond.png", BEYOND),
        robustness.draw(found, output / "robustness.png"),
    )
    parts = [_section(summary) for summary in (*large, *small)]
    parts += [f"### Learning rates\n\n{robustness.table(found)}"]
    parts += [footnote(frozenset().union(found.commits, *(summary.commits for summary in (*large, *small))))]
    with writing(output / "tables.md"):
        (output / "tables.md").write_text("\n\n".join(parts) + "\n")
    print("\n\n".join(parts))
    print(f"\nDrawn: {', '.join(map(str, drawn))}; tables: {output / 'tables.md'}")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")


def _section(summary: Summary) -> str:
    least = f"The least objective is {summary.least_objective:.6f}."
    return f"### {summary.title()}, l2 = {summary.l2:g}\n\n{least}\n\n{table(summary)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="in small, in a few minutes")
    parser.add_argument("--data-dir", help="folder with the raw files of the data sets; by default they are downloaded")
    parser.add_argument("--output", default=None, help="folder for the results")
    given = parser.parse_args(arguments)
    output = Path(given.output or ("results/quick" if given.quick else "results/reproduction"))

    def command() -> int:
        with alone_in(output):
            reproduce(output, data_dir=given.data_dir, in_small=given.quick)
        return 0

    return one_line_errors(command)


if __name__ == "__main__":
    sys.exit(main())
