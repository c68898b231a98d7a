"""Every method against every peer, on the same problems, in one run.

    python -m experiments.benchmarks.suite [--quick] [--data NAME ...] [--methods NAME ...] [--penalties L2 ...]
        [--output DIR] [--data-dir DIR]

Results go to results/bench, or results/bench_quick, and an interrupted run goes on from there. Peers that need packages
of their own get an environment, .venv-bench-NAME.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from experiments.benchmarks.suite.run import FULL, QUICK, perform
from experiments.errors import one_line_errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three small data sets, in less than 10 minutes")
    parser.add_argument("--data", nargs="+", help="names of data sets; all by default")
    parser.add_argument("--methods", nargs="+", help="names of methods; all by default")
    parser.add_argument("--penalties", nargs="+", type=float, help="of the objective; all by default")
    parser.add_argument("--output", help="folder of the results")
    parser.add_argument("--data-dir", help="folder with the published files; by default they are downloaded")
    arguments = parser.parse_args()
    chosen = {name: tuple(value) for name in ("data", "methods", "penalties") if (value := getattr(arguments, name))}
    plan = dataclasses.replace(QUICK if arguments.quick else FULL, **chosen)
    output = Path(arguments.output or ("results/bench_quick" if arguments.quick else "results/bench"))
    print(perform(plan, output, arguments.data_dir))
    return 0


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
