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
      worst: the largest excess, in the unit of the allowance; 0 if there was none.
      allowance: what is explained by rounding.
    """

    name: str
    checks: int
    violations: int
    worst: float
    allowance: float


def table(rows: Sequence[tuple[str, Row]]) -> str:
    """Rows with the part each belongs to, in Markdown."""
    lines = ["| part | what | checks | violations | worst | allowance |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {part} | {row.name} | {row.checks:,} | {row.violations:,} | {row.worst:.3g} | {row.allowance:g} |"
        for part, row in rows
    ]
    return "\n".join(lines)
