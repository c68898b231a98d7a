"""Configurations say what is wrong with them when they are made, not where it first hurts."""

import dataclasses
import math
import pkgutil
import typing

import pytest

import experiments
from experiments.experiment import Contender, Experiment
from experiments.fields import Checked, Rule, check
from experiments.methods import Method
from experiments.robustness import Robustness
from tests.reproduction.tiny import CONFIGS, an_experiment

for module in pkgutil.walk_packages(experiments.__path__, "experiments."):
    if ".suite.methods" not in module.name and not module.name.endswith("__main__"):
        __import__(module.name)

KINDS = sorted(Checked.__subclasses__(), key=lambda kind: kind.__name__)


def test_all_configurations_are_checked():
    names = {kind.__name__ for kind in KINDS}
    configs = {type(__import__(f"configs.{name}", fromlist=["config"]).config()).__name__ for name in CONFIGS}
    assert len(configs) == 11 and configs <= names
    assert {"Contender", "Entrant", "Method", "Plan"} <= names


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_number_of_a_configuration_has_a_rule_that_nan_inf_and_negative_numbers_break(kind):
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        rules = list(rules_of(hint))
        assert not is_number(hint) or len(rules) == 1, name
        for of, rule in rules:
            wrong = {float: (math.nan, math.inf, -math.inf, -1.0), int: (-1,), str: ("..",)}[of]
            assert not any(rule.holds(value) for value in wrong), name


def is_number(hint):
    return hint in (int, float) or any(is_number(part) for part in typing.get_args(hint) if not isinstance(part, str))


def rules_of(hint):
    parts = typing.get_args(hint)
    if len(parts) == 2 and isinstance(parts[1], Rule):
        yield parts
    else:
        for part in parts:
            yield from rules_of(part)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"l2": (1e-3, -1.0)}, r"l2: expected a number of at least 0 and below 3e\+38; got -1.0"),
        ({"l2": (1e39,)}, "l2: "),
        ({"l2": ()}, "l2: expected at least one; got none"),
        ({"l2": 1e-3}, "l2: expected a tuple; got 0.001"),
        ({"l2": ("0.1",)}, "l2: .*got '0.1'"),
        ({"tuning_share": math.inf}, "tuning_share: expected a share above 0 and at most 1; got inf"),
        ({"tuning_share": 0.0}, "tuning_share: "),
        ({"validation": -0.1}, "validation: "),
        ({"validation": 1.0}, "validation: expected a share above 0 and below 1; got 1.0"),
        ({"least_tolerance": math.nan}, "least_tolerance: expected a number above 0 .*; got nan"),
        ({"least_tolerance": 0.0}, "least_tolerance: "),
        ({"seconds": math.inf}, "seconds: "),
        ({"batch": 10.0}, "batch: expected a whole number above 0; got 10.0"),
        ({"batch": True}, "batch: .*got True"),
        ({"seeds": 0}, "seeds: "),
        ({"intercept": 1}, "intercept: expected bool; got 1"),
        ({"schedules": ("linear",)}, "schedules: expected one of constant, inverse, cosine; got 'linear'"),
        ({"select": "luck"}, "select: expected one of validation, test; got 'luck'"),
        ({"contenders": ()}, "contenders: "),
        ({"contenders": ("SGD",)}, "contenders: expected Contender; got 'SGD'"),
        *(
            ({"name": name}, r"name: expected the name of a folder, without / or \\ in it; got ")
            for name in ("", ".", "..", "../..", "/etc/x", "a/b", "a\\b", "a\0b", "a\nb", " ", None)
        ),
        ({"name": "least"}, "name: expected another than least, robustness"),
    ],
    ids=str,
)
def test_field_that_cannot_be_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        an_experiment(tmp_path, **changes)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Contender, {"learning_rates": (0.0,)}, "learning_rates: expected a number above 0"),
        (Contender, {"epochs": 1e300}, "epochs: .*at most 1e9; got 1e"),
        (Contender, {"chunk": 0}, "chunk: "),
        (Contender, {"dampings": (-1.0,)}, "dampings: "),
        (Method, {"name": "magic"}, "name: expected one of sgd, momentum"),
        (Method, {"name": "lspfb", "rank": 0}, "rank: expected a whole number above 0; got 0"),
        (Method, {"name": "spfb", "window": -5}, "window: "),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_field_of_a_part_that_cannot_be_is_named(kind, fields, message):
    right = {Contender: {"label": "a", "method": Method("sgd"), "learning_rates": (1.0,), "epochs": 1, "chunk": 1}}
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(**{**right.get(kind, {}), **fields})


def test_whole_numbers_are_numbers(tmp_path):
    assert an_experiment(tmp_path, seconds=5, l2=(0,), name="a b-1.5").seconds == 5
    check(Method("lspfb", rank=3))


@pytest.mark.parametrize("kind", [Experiment, Robustness])
def test_rules_are_no_part_of_what_a_command_reads(kind):
    """Overrides take the types without them."""
    assert typing.get_type_hints(kind)["batch"] is int
    assert dataclasses.is_dataclass(kind)
