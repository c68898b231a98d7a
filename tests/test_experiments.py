"""The experiments run, on small settings, and say what they should."""

import dataclasses
import importlib
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import demo, label_order
from experiments.benchmarks import bound as bound_benchmark
from experiments.benchmarks import timing

CONFIGS = sorted(
    path.stem for path in (Path(__file__).parent.parent / "configs").glob("*.py") if path.stem != "__init__"
)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_frozen_and_gives_its_command(name):
    module = importlib.import_module(f"configs.{name}")
    assert module.__doc__ is not None
    assert "Command: python -m experiments." in module.__doc__
    field = dataclasses.fields(module.config())[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(module.config(), field, 0)


def test_demo_draws_bounds_that_are_bounds(tmp_path):
    settings = importlib.import_module("configs.demo").config()
    settings = dataclasses.replace(settings, output=str(tmp_path / "made" / "demo.png"))
    output = demo.draw(settings)
    assert output.read_bytes().startswith(b"\x89PNG")
    _, above = demo.gaps(settings, np.linspace(-6, 6, 41))
    for name, gap in above.items():
        if name == "second-order expansion":
            assert gap.min() < -1
        else:
            assert gap.min() > -1e-5
            assert gap.max() > 1
    table = demo.gap_table(settings).splitlines()
    assert len(table) == 1 + len(demo.CURVES)
    assert len({len(row) for row in table}) == 1


def test_traces_are_ordered_as_the_documentation_says():
    traces = label_order.mean_traces(draws=200)
    assert list(traces.values())[:5] == sorted(list(traces.values())[:5])
    assert traces["exact Hessian"] < traces["bound, descending"]
    assert traces["Böhning"] == pytest.approx(4.5)


def test_largest_eigenvalue_of_two_labels_is_one_half():
    value, t = label_order.largest_eigenvalues(2)
    assert value == pytest.approx(0.5)
    assert t == 0


def test_comparison_measures_ratios_to_its_reference():
    def slow(x):
        return jax.pure_callback(lambda x: time.sleep(0.02) or x, x, x)

    result = timing.compare({"fast": lambda x: x + 1, "slow": slow}, (np.float64(1.0),), "fast", budget=0.1)
    assert result["fast"].ratio == 1
    assert result["slow"].ratio > 5
    assert result["slow"].seconds > 0.02
    assert result["slow"].ratio_low <= result["slow"].ratio <= result["slow"].ratio_high


def test_benchmark_limits_belong_to_what_is_measured():
    measured = {name for _, _, candidates in bound_benchmark.cases() for name in candidates}
    assert set(bound_benchmark.LIMITS) <= measured
