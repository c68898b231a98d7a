"""What a long comparison shows while it runs: one line for each run, kept up to date on a terminal."""

import shutil
import sys
import time
from collections.abc import Callable

from experiments.runs import Result
from experiments.train import Run, Snapshot, total_steps

__all__ = ["Progress"]

QUIET_SECONDS = 10.0  # between lines where they cannot be overwritten


class Progress:
    """Counts runs, and writes a line for each."""

    def __init__(self, name: str, runs: int, show: bool):
        self._name, self._runs, self._show = name, runs, show
        self._count = 0
        self._label = ""
        self._made = False
        self._written = 0.0
        self._terminal = sys.stdout.isatty()

    def run(self, label: str, run: Run) -> Callable[[Snapshot, int], None]:
        """Called with every snapshot of the run, and the rows it is trained on."""
        self._count += 1
        self._label = label
        self._made = False
        self._written = time.monotonic()
        if self._show and self._terminal:
            self._write(f"{self._head()}  starting", end="\r")

        def show(snapshot: Snapshot, rows: int) -> None:
            self._made = True
            if self._show and (self._terminal or time.monotonic() - self._written > QUIET_SECONDS):
                self._written = time.monotonic()
                self._write(self._line(snapshot, run, rows), end="\r" if self._terminal else "\n")

        return show

    def done(self, result: Result) -> None:
        """The last line of the run."""
        if self._show:
            rate = result.step / max(result.seconds, 1e-9)
            self._write(
                f"{self._head()}  {_numbers(result.metrics)}  {result.step} steps, {rate:,.0f}/s, "
                f"{result.seconds:.1f} s, {result.ended}{'' if self._made else ', made before'}"
            )

    def skip(self, reason: str) -> None:
        """A run that is not made."""
        self._count += 1
        if self._show:
            self._write(f"[{self._count}/{self._runs}] {self._name}: {reason}")

    def _head(self) -> str:
        return f"[{self._count}/{self._runs}] {self._name}: {self._label:<26}"

    def _line(self, snapshot: Snapshot, run: Run, rows: int) -> str:
        rate = snapshot.step / max(snapshot.seconds, 1e-9)
        total = total_steps(run, rows)
        left = max(run.seconds - snapshot.seconds, 0)
        if snapshot.step:
            left = min(left, (total - snapshot.step) / rate)
        text = f"step {snapshot.step}/{total}, {rate:,.0f}/s, {left:.0f} s left"
        return f"{self._head()}  {_numbers(snapshot.metrics)}  {text}"

    def _write(self, line: str, end: str = "\n") -> None:
        if self._terminal:
            # A longer line would be broken in two, of which only the second could be overwritten.
            columns = shutil.get_terminal_size().columns - 1
            line = "\x1b[2K" + (line[:columns] if end == "\r" else line)
        print(line, end=end, flush=True)


def _numbers(metrics: dict[str, float]) -> str:
    return f"objective {metrics['objective']:.4f}, test accuracy {1 - metrics['test_error']:.2%}"
