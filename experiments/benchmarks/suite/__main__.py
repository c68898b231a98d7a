"""Every method against every peer, on the same problems, in one run.

    python -m experiments.benchmarks.suite [--quick] [--data NAME ...] [--methods NAME ...] [--penalties L2 ...]
        [--output DIR] [--data-dir DIR] [--publish]

Results go to results/bench, or results/bench_quick, and an interrupted run goes on from there; what the same code has
measured is not measured again, so remove that folder after a change. Peers that need packages of their own get an
environment, .venv-bench-NAME. Tables and figures are made from summary.json there, and `--publish` puts them, and that
file, into docs.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from experiments.benchmarks.suite import growth, report
from experiments.benchmarks.suite.run import FULL, QUICK, perform
from experiments.errors import one_line_errors
from experiments.runs import read_json, write_json

DOCS = Path("docs")


def main() -> int:
    """Run what is missing, and show what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three small data sets with one penalty, in minutes")
    parser.add_argument("--data", nargs="+", help="names of data sets; all by default")
    parser.add_argument("--methods", nargs="+", help="names of methods; all by default")
    parser.add_argument("--penalties", nargs="+", type=float, help="of the objective; all by default")
    parser.add_argument("--output", help="folder of the results")
    parser.add_argument("--data-dir", help="folder with the published files; by default they are downloaded")
    parser.add_argument("--publish", action="store_true", help="put tables, figures and the summary into docs")
    arguments = parser.parse_args()
    chosen = {name: tuple(value) for name in ("data", "methods", "penalties") if (value := getattr(arguments, name))}
    plan = dataclasses.replace(QUICK if arguments.quick else FULL, **chosen)
    output = Path(arguments.output or ("results/bench_quick" if arguments.quick else "results/bench"))
    summary = read_json(perform(plan, output, arguments.data_dir))
    show(summary, output)
    if arguments.publish:
        publish(summary, output)
    return 0


def show(summary: dict, output: Path) -> None:
    """The short tables, and where the others and the figures are."""
    found = report.tables(summary)
    for name in ("counts", "ratios", "methods"):
        print(f"\n{found[name]}")
    (output / "tables.md").write_text("\n\n".join(found.values()) + "\n")
    print(f"\n{output / 'tables.md'}")
    print(report.draw_profile(summary, str(output / "profile.png")))
    print(report.draw_curves(summary, str(output / "curves.png"), summary["plan"]["penalties"][0]))


def publish(summary: dict, output: Path) -> None:
    """Into docs, with what steps cost if that was measured."""
    found = report.tables(summary)
    report.draw_profile(summary, str(DOCS / "figures" / "bench_profile.png"))
    report.draw_curves(summary, str(DOCS / "figures" / "bench_curves.png"))
    if (output / "growth.json").exists():
        costs = read_json(output / "growth.json")
        found["growth"] = growth.table(costs)
        growth.draw(costs, str(DOCS / "figures" / "bench_growth.png"))
    write_json(DOCS / "benchmarks.json", summary)
    for page in (DOCS / "benchmarks.md", DOCS / "estimator.md", Path("README.md")):
        report.fill(page, found)
        print(page)


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
