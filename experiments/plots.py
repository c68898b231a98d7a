"""Pictures made without a screen."""

from pathlib import Path
from typing import Any

from experiments.errors import writing

__all__ = ["panels", "save", "two_panels"]


def two_panels(**options) -> tuple[Any, Any, Any]:
    """A figure and its two axes."""
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(11, 4.2), layout="constrained", **options)
    return figure, left, right


def panels(rows: int, columns: int, height: float = 2.9) -> tuple[Any, Any]:
    """A figure and its axes, (rows, columns); `height` of a row in inches."""
    size = (3.6 * columns, height * rows + 0.9)
    return _pyplot().subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, output: str) -> Path:
    """Write the figure, make its folder if there is none, and say where."""
    path = Path(output)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    _pyplot().close(figure)
    return path
