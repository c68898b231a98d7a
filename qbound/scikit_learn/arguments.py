"""What the parameters of an estimator, and weights, may be: checked when it is fitted, as scikit-learn has it."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple, cast

import numpy as np
from sklearn.utils import check_array, check_random_state
from sklearn.utils.class_weight import compute_class_weight


class Rule(NamedTuple):
    """What a value may be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def check_parameters(estimator: Any, rules: Mapping[str, Rule]) -> None:
    """Raise a ValueError for the first attribute that breaks its rule."""
    for name, rule in rules.items():
        if not rule.holds(value := getattr(estimator, name)):
            raise ValueError(f"{name}: expected {rule.words}; got {value!r}")


def number(words: str, holds: Callable[[Any], bool]) -> Rule:
    """A number that is a float, or can be made one, and no NaN."""

    def test(value: Any) -> bool:
        try:
            return isinstance(value, Real) and not math.isnan(float(value)) and holds(float(value))
        except OverflowError:  # whole numbers can be larger than any float
            return False

    return Rule(words, test)


def or_none(rule: Rule) -> Rule:
    """What the rule says, or None."""
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


# Weights of examples, whatever their size: sums and products of them that would overflow, or vanish, do not.


class Weights(NamedTuple):
    """Weights (b,) are `parts` times 2^`exponent`; the largest part is between 1/4 and 1, or all are zero."""

    parts: np.ndarray
    exponent: int


def equal_weights(examples: int) -> Weights:
    """Weights of 1, as `weights_of` would have them, in a small part of the time."""
    return Weights(np.full(examples, 0.5), 1)


def sample_weights(given: Any, examples: int) -> np.ndarray:
    """The weights of the examples (b,) in float64: as given, one number for all, or 1 for None."""
    if given is None or isinstance(given, Real):
        given = np.full(examples, 1.0 if given is None else given)
    found = cast(Any, check_array)(
        given, accept_sparse=False, dtype=np.float64, order="C", ensure_2d=False, allow_nd=True, ensure_min_samples=0,
        input_name="sample_weight",
    )  # fmt: skip
    if found.shape != (examples,):
        raise ValueError(f"sample_weight: expected one number for each of {examples} rows; got shape {found.shape}")
    if np.any(found < 0):
        raise ValueError(f"sample_weight: expected no negative numbers; got {found.min()}")
    return found


def class_weights(given: Any, classes: np.ndarray, y: np.ndarray, of_examples: np.ndarray | None) -> np.ndarray:
    """The weight of each class; `y` and `of_examples` are what classes are balanced by."""
    if of_examples is not None:
        # Balance does not depend on their unit, and their sums then do not overflow.
        of_examples = _weights(*np.frexp(of_examples)).parts
    found = compute_class_weight(given, classes=classes, y=y, sample_weight=of_examples)
    if not np.all((found >= 0) & np.isfinite(found)):
        raise ValueError(f"class_weight: expected finite numbers that are not negative; got {found}")
    return found


def weights_of(of_examples: np.ndarray, of_class: np.ndarray | None, labels: np.ndarray) -> Weights:
    """The weights of examples, times those of their classes."""
    mantissas, exponents = np.frexp(of_examples)
    if of_class is not None:
        of_mantissas, of_exponents = np.frexp(of_class)
        mantissas, exponents = mantissas * of_mantissas[labels], exponents + of_exponents[labels]
    return _weights(mantissas, exponents)


def _weights(mantissas: np.ndarray, exponents: np.ndarray) -> Weights:
    positive = mantissas > 0
    if not np.any(positive):
        return Weights(np.zeros_like(mantissas), 0)
    # Faster than to take those of positive ones.
    exponent = int(np.max(np.where(positive, exponents, np.iinfo(exponents.dtype).min)))
    return Weights(np.ldexp(mantissas, exponents - exponent), exponent)
