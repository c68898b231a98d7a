"""What a fit shows while it runs, if that is wanted."""

import math
import sys

from qbound.linear import Progress

__all__ = ["ProgressBar"]

_WIDTH = 24


class ProgressBar:
    """One line on stderr: how far the gradient has come, in orders of magnitude."""

    def __init__(self, tolerance: float, shown: bool):
        self.tolerance, self.shown, self.first = tolerance, shown, 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.shown and self.first:
            print(file=sys.stderr)

    def show(self, progress: Progress):
        """Overwrite it."""
        if not self.shown:
            return
        self.first = self.first or progress.gradient
        way = math.log(self.first / self.tolerance) if 0 < self.tolerance < self.first else 0.0
        gone = math.log(self.first / progress.gradient) if progress.gradient > 0 else way
        gone = gone if math.isfinite(gone) else 0.0
        full = round(_WIDTH * min(max(gone / way, 0.0), 1.0)) if way > 0 else _WIDTH
        line = (
            f"\r[{'#' * full}{'.' * (_WIDTH - full)}] {progress.phase:12} {progress.seconds:6.1f} s  objective "
            f"{progress.objective:.6f}  gradient {progress.gradient:.1e}, tol {self.tolerance:.0e}"
        )
        print(line, end="", file=sys.stderr, flush=True)
