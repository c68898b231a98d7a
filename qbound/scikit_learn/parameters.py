"""What the parameters of an estimator may be, checked when it is fitted and not before, as scikit-learn has it."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils import check_random_state

__all__ = [
    "Rule", "balance_or_dict", "boolean", "check_parameters", "number", "one_of", "or_none", "seed", "verbosity",
    "whole",
]  # fmt: skip


class Rule(NamedTuple):
    """In words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


def check_parameters(estimator: Any, rules: Mapping[str, Rule]) -> None:
    """Raise a ValueError for the first attribute that breaks its rule."""
    for name, rule in rules.items():
        if not rule.holds(value := getattr(estimator, name)):
            raise ValueError(f"{name}: expected {rule.words}; got {value!r}")


def number(words: str, holds: Callable[[Any], bool]) -> Rule:
    """One that is a float, or can be made one, and no NaN."""

    def test(value: Any) -> bool:
        try:
            return isinstance(value, Real) and not math.isnan(float(value)) and holds(float(value))
        except OverflowError:  # whole numbers can be larger than any float
            return False

    return Rule(words, test)


def or_none(rule: Rule) -> Rule:
    """None as well."""
    return Rule(f"{rule.words}, or None", lambda value: value is None or rule.holds(value))


def whole(words: str, least: int) -> Rule:
    """A whole number."""
    return Rule(words, lambda value: isinstance(value, Integral) and int(value) >= least)


def one_of(*texts: str) -> Rule:
    """One of some texts."""
    return Rule(" or ".join(map(repr, texts)), lambda value: isinstance(value, str) and value in texts)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_seed(value: Any) -> bool:
    try:
        check_random_state(value)
    except ValueError:
        return False
    return True


boolean = Rule("True or False", _is_boolean)
verbosity = Rule(
    "True, False or a whole number from 0 on",
    lambda value: _is_boolean(value) or (isinstance(value, Integral) and int(value) >= 0),
)
seed = Rule("a whole number from 0 to 2^32 - 1, a numpy.random.RandomState or None", _is_seed)
balance_or_dict = Rule(
    "a dict, 'balanced' or None",
    lambda value: value is None or isinstance(value, dict) or (isinstance(value, str) and value == "balanced"),
)
