"""What the fields of configurations may hold, said in their types and checked when a configuration is made."""

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

__all__ = [
    "Above1", "Checked", "Count", "Epochs", "FolderName", "NotNegative", "Part", "Positive", "Seed", "Share", "check",
]  # fmt: skip

# Numbers that programs take in float32.
LARGEST = 3e38


@dataclasses.dataclass(frozen=True)
class Rule:
    """In words, and as a test of a value that has the right type."""

    words: str
    holds: Callable[[Any], bool]


def _between(low: float, high: float) -> Callable[[float], bool]:
    return lambda value: low < value < high


Count = Annotated[int, Rule("a whole number above 0", lambda value: value > 0)]
Seed = Annotated[int, Rule("a whole number from 0 to 2^32 - 1", lambda value: 0 <= value < 2**32)]
Positive = Annotated[float, Rule(f"a number above 0 and below {LARGEST:g}", _between(0, LARGEST))]
NotNegative = Annotated[
    float, Rule(f"a number of at least 0 and below {LARGEST:g}", lambda value: 0 <= value < LARGEST)
]
Above1 = Annotated[float, Rule(f"a number above 1 and below {LARGEST:g}", _between(1, LARGEST))]
# More have no meaning, and counts of steps that overflow.
Epochs = Annotated[float, Rule("a number above 0 and at most 1e9", lambda value: 0 < value <= 1e9)]
Share = Annotated[float, Rule("a share above 0 and at most 1", lambda value: 0 < value <= 1)]
Part = Annotated[float, Rule("a share above 0 and below 1", _between(0, 1))]


def _is_folder_name(value: str) -> bool:
    """And none of those that stand for others."""
    return value.strip(". ") != "" and value.isprintable() and "/" not in value and "\\" not in value


FolderName = Annotated[str, Rule("the name of a folder, without / or \\ in it", _is_folder_name)]


class Checked:
    """A dataclass whose fields are checked when it is made."""

    def __post_init__(self):
        check(self)


def check(config: Any) -> None:
    """Raise a ValueError for the first field that does not hold what its type says."""
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        _check(name, getattr(config, name), hint)


def _check(name: str, value: Any, hint: Any) -> None:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind, rule = parts
        if not (_is_a(value, kind) and rule.holds(value)):
            raise ValueError(f"{name}: expected {rule.words}; got {value!r}")
    elif origin is tuple:
        if not isinstance(value, tuple):
            raise ValueError(f"{name}: expected a tuple; got {value!r}")
        if not value:
            raise ValueError(f"{name}: expected at least one; got none")
        for one in value:
            _check(name, one, parts[0])
    elif origin is Literal:
        if value not in parts:
            raise ValueError(f"{name}: expected one of {', '.join(map(str, parts))}; got {value!r}")
    elif origin in (types.UnionType, typing.Union):
        if value is not None:
            _check(name, value, next(part for part in parts if part is not type(None)))
    elif not _is_a(value, hint):
        raise ValueError(f"{name}: expected {hint.__name__}; got {value!r}")


def _is_a(value: Any, kind: type) -> bool:
    """Whole numbers are numbers, too; True is none."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
