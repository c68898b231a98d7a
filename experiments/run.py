"""Tune and train the methods of one configuration, and draw them.

    python -m experiments.run [configs/fashion_mnist.py] [field=value ...] [--data-dir DIR]

For example `seeds=2 seconds=10 contenders=SGD,SPFB`. Without a file it is scikit-learn's digits. Results are in the
folder `output`, by the name of the configuration: a folder for every run, summary.json, a picture and a table. What has
been run before is not repeated; after an interruption, the same command goes on from where it was.
"""

import argparse
import sys

from experiments.errors import one_line_errors
from experiments.experiment import Experiment, perform_all
from experiments.overrides import load_config, override
from experiments.report import draw_summaries, read_summary, table

__all__ = ["main"]

DEFAULT = "configs/digits.py"  # needs no download


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=DEFAULT, help=f"a Python file of configs/; by default {DEFAULT}")
    parser.add_argument("changes", nargs="*", metavar="field=value", help="changes to the configuration")
    parser.add_argument("--data-dir", help="folder with the raw files of the data sets; by default they are downloaded")
    given = parser.parse_intermixed_args(arguments)
    if "=" in given.config:  # the file was left out
        given.changes, given.config = [given.config, *given.changes], DEFAULT

    def command() -> int:
        experiment = override(load_config(given.config, Experiment), given.changes)
        summary = read_summary(perform_all(experiment, given.data_dir))
        print(f"\n{table(summary)}")
        print(f"\nDrawn to {draw_summaries([summary], summary.folder / 'curves.png')}")
        return 0

    return one_line_errors(command)


if __name__ == "__main__":
    sys.exit(main())
