"""What a long comparison shows while it runs: one line for each run, kept up to date on a terminal."""

import sys
import time
from collections.abc import Callable

from experiments.runs import Result
from experiments.train import Run, Snapshot

__all__ = ["Progress"]

QUIET_SECONDS = 10.0  # between lines where they cannot be overwritten


class Progress:
    """Counts runs, and writes a line for each."""

    def __init__(self, name: str, runs: int, show: bool):
        self._name, self._runs, self._show = name, runs, show
        self._count = 0
        self._label = ""
        self._steps = 0
        self._terminal = sys.stdout.isatty()

    def run(self, label: str, run: Run) -> Callable[[Snapshot], None]:
        """Called with every snapshot of the run."""
        self._count += 1
        self._label = label
        self._steps = 0
        first: list[tuple[int, float]] = []
        last = [time.monotonic()]

        def show(snapshot: Snapshot) -> None:
            first[:] = first or [(snapshot.step, snapshot.seconds)]
            self._steps = snapshot.step
            if self._show and (self._terminal or time.monotonic() - last[0] > QUIET_SECONDS):
                last[0] = time.monotonic()
                self._write(self._line(snapshot, run), end="\r" if self._terminal else "\n")

        return show

    def done(self, result: Result) -> None:
        """The last line of the run."""
        if self._show:
            new = "" if self._steps else ", made before"
            rate = result.step / max(result.seconds, 1e-9)
            self._write(
                f"{self._head()}  {_numbers(result.metrics)}  {result.step} steps, {rate:,.0f}/s, "
                f"{result.seconds:.1f} s, {result.ended}{new}"
            )

    def skip(self, reason: str) -> None:
        """A run that is not made."""
        self._count += 1
        if self._show:
            self._write(f"[{self._count}/{self._runs}] {self._name}: {reason}")

    def _head(self) -> str:
        return f"[{self._count}/{self._runs}] {self._name}: {self._label:<34}"

    def _line(self, snapshot: Snapshot, run: Run) -> str:
        rate = snapshot.step / max(snapshot.seconds, 1e-9)
        left = max(run.seconds - snapshot.seconds, 0)
        text = f"step {snapshot.step}, {rate:,.0f}/s, at most {left:.0f} s left"
        return f"{self._head()}  {_numbers(snapshot.metrics)}  {text}"

    def _write(self, line: str, end: str = "\n") -> None:
        clear = "\x1b[2K" if self._terminal else ""
        print(f"{clear}{line}", end=end, flush=True)


def _numbers(metrics: dict[str, float]) -> str:
    return f"objective {metrics['objective']:.4f}, test accuracy {1 - metrics['test_error']:.2%}"
