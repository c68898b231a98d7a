"""What a part of the soak reports: one row for each thing that was checked, and the table of all rows."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Row", "table"]


class Row(NamedTuple):
    """Of one thing that was checked.

    Attributes:
      name: what it was.
      checks: how many there were.
      violations: how many went beyond the allowance, or ended in NaN.
      worst: what came nearest to the allowance or went furthest beyond it, in its unit; None if nothing is held to it.
      allowance: what may be.
      failures: what to say of violations one by one.
    """

    name: str
    checks: int
    violations: int
    worst: float | None
    allowance: float
    failures: tuple[str, ...] = ()


def table(rows: Sequence[tuple[str, Row]]) -> str:
    """Rows with the part each belongs to, in Markdown."""
    lines = ["| part | what | checks | violations | worst | allowance |", "|---|---|---|---|---|---|"]
    lines += [f"| {part} | {row.name} | {row.checks:,} | {row.violations:,} | {_worst(row)} |" for part, row in rows]
    return "\n".join(lines)


def _worst(row: Row) -> str:
    return "| " if row.worst is None else f"{row.worst:.3g} | {row.allowance:g}"
