"""Everything that must hold, on hostile data, for minutes.

    python -m experiments.soak [--part NAME] [--checks N] [--steps N]

Prints one table; the exit code is 1 if anything was violated.

    bounds   every bound of the library in float32 against the function in long double, at its point, near and far
    streams  every transform on streams that are sorted, heavy-tailed, rescaled and so on, at rates of 0.01 to 100
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from experiments import soak_bounds, soak_streams
from experiments.soak_rows import Row, table

__all__ = ["PARTS", "main"]

# Each takes how much was asked for, in its own unit, and a function to report progress with.
PARTS: dict[str, Callable[[int, Callable[[str], None]], list[Row]]] = {
    "bounds": soak_bounds.run,
    "streams": soak_streams.run,
}
CHECKS = 1_000_000
EVERY = 2.0  # seconds between two lines of progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if there was a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=_count, default=CHECKS, help=f"of bounds, about; {CHECKS:,} by default")
    parser.add_argument(
        "--steps", type=_steps, default=soak_streams.STEPS, help="of each stream; %(default)s by default"
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="all by default; may be given more than once")
    options = parser.parse_args(arguments)
    rows = []
    for part in options.part or PARTS:
        amount = options.steps if part == "streams" else options.checks
        rows += [(part, row) for row in PARTS[part](amount, _progress(part))]
    violations = sum(row.violations for _, row in rows)
    print(table(rows))
    for _, row in rows:
        for failure in row.failures:
            print(failure)
    print(f"{sum(row.checks for _, row in rows):,} checks, {violations:,} violations")
    return 1 if violations else 0


def _progress(part: str) -> Callable[[str], None]:
    """Prints what it is given, but not more than one line in a number of seconds."""
    began = time.monotonic()
    last = -EVERY

    def show(what: str) -> None:
        nonlocal last
        now = time.monotonic() - began
        if now - last >= EVERY:
            last = now
            print(f"{part}, {now:.0f} s: {what}", file=sys.stderr, flush=True)

    return show


def _steps(text: str) -> int:
    steps = _count(text)
    if steps % soak_streams.PARTS:
        raise argparse.ArgumentTypeError(f"expected a multiple of {soak_streams.PARTS}; got {text}")
    return steps


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected an integer > 0; got {text}")
    return count


if __name__ == "__main__":
    sys.exit(main())
