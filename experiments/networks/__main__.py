"""Networks by layerwise SPFB and by its peers, tuned alike.

    python -m experiments.networks [NAME ...] [field=value ...] [--peers] [--quick] [--data-dir DIR] [--output DIR]

Names of experiments; all of them by default:

    perceptron      784-256-128-10, KMNIST and Fashion-MNIST
    convolutional   two convolutions and two dense layers, 20,000 images of each
    transformer     two layers, on the source of Python's standard library
    transformer_large   the same with larger batches
    large_batches   the perceptron to a fixed loss, with batches of 125 to 16,000
    rates           the loss against the learning rate, with first weights of three sizes
    valleys         the trace of the curvature in the loss, and sharpness-aware minimisation, on test error

and of peers with packages of their own, `kfac` and `psgd`, which are installed in .venv-bench-networks-NAME when they
are named, or all of them with --peers. Fields are those of configs/networks_NAME.py: `contenders=AdamW,Muon seeds=1`,
for example. Results are in DIR, by default results/networks, or results/networks_quick with --quick. That is everything
in small, in minutes, on scikit-learn's digits unless a folder with data sets is given: a look, and nothing to conclude
from. What has been run is not repeated, so remove that folder after a change of a method; after an interruption, the
same command goes on.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.errors import UserError, one_line_errors, writing
from experiments.networks import comparison, rates, report, valleys
from experiments.networks.comparison import Comparison
from experiments.networks.data import DataSet
from experiments.networks.environments import PACKAGES
from experiments.networks.rates import Rates
from experiments.networks.valleys import Valleys
from experiments.overrides import load_config, override

__all__ = ["EXPERIMENTS", "main", "perform"]

EXPERIMENTS = ("perceptron", "convolutional", "transformer", "transformer_large", "large_batches", "rates", "valleys")


Config = Comparison | Rates | Valleys
# What a configuration is made smaller and performed by.
KINDS: dict[type, Any] = {Comparison: comparison, Rates: rates, Valleys: valleys}


def perform(config: Config, data_dir: str | None, peers: frozenset[str]) -> str:
    """Make the runs of one experiment, and say what was found: tables, and where the figure is."""
    kind = KINDS[type(config)]
    path = kind.perform_all(config, data_dir, peers)
    shown = report if kind is comparison else kind
    found, figure = shown.table(path), shown.draw(path)
    with writing(path.parent):
        (path.parent / "tables.md").write_text(found + "\n")
    return f"{found}\n\nDrawn to {figure}"


def _config(name: str, changes: Sequence[str], output: str | None, quick: DataSet | None) -> Config:
    kind = {"rates": Rates, "valleys": Valleys}.get(name, Comparison)
    config: Any = load_config(f"configs/networks_{name}.py", kind)
    if quick is not None:
        config = KINDS[kind].in_small(config, quick)
        config = dataclasses.replace(config, output=f"{config.output}_quick")
    return override(config, [*changes, *([] if output is None else [f"output={output}"])])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="NAME or field=value", help="what to run, and changes to it")
    parser.add_argument("--peers", action="store_true", help="install peers with packages of their own, and run them")
    parser.add_argument("--quick", action="store_true", help="in small, in a few minutes")
    parser.add_argument("--data-dir", help="folder with the raw files of the data sets; by default they are downloaded")
    parser.add_argument("--output", help="folder for the results")
    given = parser.parse_intermixed_args(arguments)

    def command() -> int:
        names = [word for word in given.words if "=" not in word]
        changes = [word for word in given.words if "=" in word]
        for name in names:
            if name not in (*EXPERIMENTS, *PACKAGES):
                raise UserError(f"{name}: expected one of {', '.join((*EXPERIMENTS, *PACKAGES))}, or field=value")
        peers = frozenset(PACKAGES if given.peers else set(names) & set(PACKAGES))
        has_data = given.data_dir or os.environ.get("QBOUND_DATA_DIR")
        quick: DataSet | None = None if not given.quick else "fashion_mnist" if has_data else "digits"
        chosen = [name for name in EXPERIMENTS if name in names] or EXPERIMENTS
        # All of them first: a mistake in one is said at once.
        configs = [_config(name, changes, given.output, quick) for name in chosen]
        for config in configs:
            print(f"\n{perform(config, given.data_dir, peers)}", flush=True)
        print(f"\nResults are in {Path(configs[0].output)}")
        return 0

    return one_line_errors(command)


if __name__ == "__main__":
    sys.exit(main())
