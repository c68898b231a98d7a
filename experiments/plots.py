"""Pictures of two panels, made without a screen."""

from pathlib import Path
from typing import Any

__all__ = ["save", "two_panels"]


def two_panels(**options) -> tuple[Any, Any, Any]:
    """A figure and its two axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", **options)
    return figure, left, right


def save(figure: Any, output: str) -> Path:
    """Write the figure, make its folder if there is none, and say where."""
    import matplotlib.pyplot as plt

    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
