"""Configurations from files, and changes to them from the command line: field=value."""

import dataclasses
import importlib.util
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.errors import UserError

__all__ = ["load_config", "override"]

ROOT = Path(__file__).parent.parent


def load_config(path: str, kind: type) -> Any:
    """What `config()` of a Python file returns, which must be a `kind`; the path may be one from the project's root."""
    file = Path(path) if Path(path).is_file() else ROOT / path
    if not file.is_file():
        files = sorted((ROOT / "configs").glob("*.py"))
        known = [f"configs/{other.name}" for other in files if other.stem not in ("__init__", "common")]
        raise UserError(f"{path}: expected a file with a configuration; found none. There are: {', '.join(known)}")
    spec = importlib.util.spec_from_file_location(f"configs.{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: expected a Python file, whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found = module.config() if hasattr(module, "config") else None
    except (ValueError, TypeError, NameError, ImportError, SyntaxError) as error:
        raise UserError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(found, kind):
        raise UserError(
            f"{path}: expected a function config() that returns {kind.__name__}; got {type(found).__name__}"
        )
    return found


def override(config: Any, changes: Sequence[str]) -> Any:
    """A copy with fields changed: numbers, texts, and lists with commas; `contenders` are chosen by their labels."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    hints = typing.get_type_hints(type(config))
    values = {}
    for change in changes:
        name, sign, text = change.partition("=")
        if not sign:
            raise UserError(f"{change}: expected field=value")
        if name not in fields:
            raise UserError(f"{name}: expected one of the fields {', '.join(fields)}")
        values[name] = _value(name, text, hints[name], getattr(config, name))
    try:
        return dataclasses.replace(config, **values)
    except ValueError as error:
        raise UserError(str(error)) from error


def _value(name: str, text: str, hint: Any, before: Any) -> Any:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and dataclasses.is_dataclass(parts[0]):
        known = {item.label: item for item in before}
        return tuple(known[label] for label in _labels(name, text, list(known)))
    if origin is tuple:
        return tuple(_value(name, part, parts[0], None) for part in text.split(","))
    if origin is typing.Literal:
        if text not in parts:
            raise UserError(f"{name}: expected one of {', '.join(map(str, parts))}; got {text!r}")
        return text
    if origin is types.UnionType:
        if text == "None":
            return None
        return _value(name, text, next(part for part in parts if part is not type(None)), before)
    if hint is bool:
        if text not in ("True", "False"):
            raise UserError(f"{name}: expected True or False; got {text!r}")
        return text == "True"
    try:
        return hint(text)
    except ValueError as error:
        raise UserError(f"{name}: expected {hint.__name__}; got {text!r}") from error


def _labels(name: str, text: str, known: list[str]) -> list[str]:
    """Labels with commas between them, and some within them: the longest that fits comes first."""
    found, rest = [], text.strip()
    while rest:
        fits = [label for label in known if rest == label or rest.startswith(f"{label},")]
        if not fits:
            raise UserError(f"{name}: expected labels among {'; '.join(known)}; got {rest!r}")
        found.append(max(fits, key=len))
        rest = rest[len(found[-1]) :].lstrip(",").lstrip()
    return found
