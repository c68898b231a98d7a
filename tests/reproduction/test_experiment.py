"""Comparisons: how settings are chosen, and what is refused."""

import dataclasses
import importlib
import json

import numpy as np
import pytest

from experiments import experiment as comparison
from experiments import report, runs
from experiments.errors import UserError
from experiments.experiment import Experiment
from experiments.methods import Method
from tests.reproduction.tiny import CONFIGS, ROWS, WIDTH, an_experiment, tiny_data


@pytest.mark.usefixtures("tiny")
def test_every_config_runs_two_steps(tmp_path):
    """All in one test, so that a method is compiled once for all configurations."""
    found = 0
    for name in CONFIGS:
        config = importlib.import_module(f"configs.{name}").config()
        if isinstance(config, Experiment):
            assert config.name == name
            shorter = tuple(
                dataclasses.replace(
                    c, epochs=2 * 50 / ROWS, chunk=2, learning_rates=c.learning_rates[:1], dampings=c.dampings[:1]
                )
                for c in config.contenders
            )
            config = dataclasses.replace(
                config, batch=50, contenders=shorter, schedules=("inverse",), l2=(1e-3,), seeds=1, tuning_share=1.0,
                intercept=False, output=str(tmp_path),
            )  # fmt: skip
            summary = report.read_summary(comparison.perform_all(config, show=False))
            assert all(curve.records[0][-1]["step"] == 2 for curve in summary.curves.values())
            assert all(curve.divergences() == 0 for curve in summary.curves.values())
            found += len(summary.curves)
    assert found == 4 + 4 * 12 + 6 * 4


def test_configs_have_grids_of_one_size_and_an_honest_choice():
    for name in CONFIGS:
        config = importlib.import_module(f"configs.{name}").config()
        if isinstance(config, Experiment):
            assert {len(comparison.grid(config, contender)) for contender in config.contenders} == {
                16 if name == "digits" else 24
            }
            assert config.select == "validation"


def test_penalty_is_that_of_the_best_setting_and_others_have_their_best_with_it(tmp_path):
    """Where methods disagree on it, and validation rows with test rows."""

    def result(loss, error, ended="finished"):
        return runs.Result(ended, 1, 0.0, {"validation_loss": loss, "test_error": error})

    a, b, c = (comparison.Setting(rate, "cosine", l2, 0.0) for rate, l2 in ((1.0, 0.1), (2.0, 0.1), (1.0, 0.2)))
    trials = {
        "one": {a: result(0.5, 0.3), b: result(0.4, 0.4), c: result(0.45, 0.2)},
        "other": {
            a: result(0.7, 0.5),
            b: result(0.8, 0.4),
            c: result(0.6, 0.6),
            c._replace(damping=1.0): result(0, 0, "diverged"),
        },
    }
    on_validation, on_test = an_experiment(tmp_path), an_experiment(tmp_path, select="test")
    assert comparison._choose_l2(on_validation, trials) == 0.1
    assert [comparison._choose(on_validation, found, 0.1) for found in trials.values()] == [b, a]
    assert comparison._choose_l2(on_test, trials) == 0.2
    assert [comparison._choose(on_test, found, 0.2) for found in trials.values()] == [c, c]
    lost = {"one": {a: result(np.nan, 0.1), b: result(0.1, 0.1, "diverged")}}
    with pytest.raises(UserError, match="every setting of every method diverged"):
        comparison._choose_l2(on_validation, lost)


@pytest.mark.usefixtures("tiny")
def test_settings_are_chosen_on_validation_rows_and_share_one_penalty(tmp_path):
    config = an_experiment(tmp_path)
    summary = json.loads(comparison.perform_all(config, show=False).read_text())
    assert summary["l2"] == 1e-3
    assert {setting["l2"] for setting in summary["chosen"].values()} == {1e-3}
    for contender in config.contenders:
        trials = {}
        for folder in (tmp_path / "tiny" / comparison.slug(contender.label)).glob("tuning-*"):
            fields = json.loads((folder / "config.json").read_text())
            trials[(fields["learning_rate"], fields["l2"], fields["damping"])] = runs.read_result(folder).metrics
        assert len(trials) == 4
        best = min((key for key in trials if key[1] == 1e-3), key=lambda key: trials[key]["validation_loss"])
        chosen = summary["chosen"][contender.label]
        assert (chosen["learning_rate"], chosen["l2"], chosen["damping"]) == best


@pytest.mark.usefixtures("tiny")
def test_choice_on_test_rows_is_the_lowest_test_error_and_makes_no_run_again(tmp_path):
    config = an_experiment(tmp_path)
    comparison.perform_all(config, show=False)
    before = set(tmp_path.glob("*/*/tuning-*"))
    made = json.loads(comparison.perform_all(dataclasses.replace(config, select="test"), show=False).read_text())
    assert set(tmp_path.glob("*/*/tuning-*")) == before
    errors = {}
    for folder in before:
        fields = json.loads((folder / "config.json").read_text())
        if fields["method"]["name"] == "sgd" and fields["l2"] == made["l2"]:
            errors[fields["learning_rate"]] = runs.read_result(folder).metrics["test_error"]
    assert errors[made["chosen"]["SGD"]["learning_rate"]] == min(errors.values())


def test_validation_rows_are_not_trained_on():
    tuning = comparison.problem_of(tiny_data(), "tuning", 0.25, False)
    everything = comparison.problem_of(tiny_data(), "all", 0.25, True)
    assert len(tuning.train.labels) + len(tuning.held_out["validation"].labels) == ROWS
    assert len(tuning.held_out["validation"].labels) == 325
    rows = {name: {tuple(row) for row in np.asarray(part.inputs).tolist()}
            for name, part in {"train": tuning.train, **tuning.held_out}.items()}  # fmt: skip
    assert not rows["train"] & rows["validation"] and not rows["train"] & rows["test"]
    assert everything.train.inputs.shape == (ROWS, WIDTH + 1)
    np.testing.assert_array_equal(everything.train.inputs[:, -1], 1)


@pytest.mark.usefixtures("tiny")
def test_seeds_end_with_the_budget_of_their_method(tmp_path, capsys):
    config = an_experiment(tmp_path, seconds=1e-9, seeds=3)
    summary = report.read_summary(comparison.perform_all(config))
    assert {label: curve.ended for label, curve in summary.curves.items()} == {"SGD": ("budget",), "SPFB": ("budget",)}
    shown = capsys.readouterr().out
    assert "SGD, seed 1: its seconds are used up" in shown
    assert "test accuracy" in shown and "/s" in shown


@pytest.mark.usefixtures("tiny")
def test_setting_of_another_method_is_taken_where_one_is_too_slow_to_tune(tmp_path):
    config = an_experiment(tmp_path)
    slow = dataclasses.replace(config.contenders[0], label="slow", tuned_as="SGD")
    config = dataclasses.replace(config, contenders=(*config.contenders, slow), seeds=1)
    summary = json.loads(comparison.perform_all(config, show=False).read_text())
    assert summary["chosen"]["slow"] == summary["chosen"]["SGD"]
    assert not list((tmp_path / "tiny" / "slow").glob("tuning-*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contenders": ()}, "contenders: expected at least one; got none"),
        ({"select": "luck"}, "select: expected one of validation, test; got 'luck'"),
        ({"validation": 1.0}, "validation: expected a share above 0 and below 1; got 1.0"),
        ({"seeds": 0}, "seeds: expected a whole number above 0; got 0"),
    ],
)
def test_impossible_comparison_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        an_experiment(tmp_path, **changes)


def test_grids_of_different_sizes_and_unknown_methods_are_refused(tmp_path):
    first, second = an_experiment(tmp_path).contenders
    with pytest.raises(ValueError, match="grids of the same size; got {'SGD': 1, 'SPFB': 2}"):
        an_experiment(tmp_path, contenders=(dataclasses.replace(first, learning_rates=(0.1,)), second))
    with pytest.raises(ValueError, match="tuned_as: expected a contender that is tuned, of .*; got 'other'"):
        an_experiment(tmp_path, contenders=(first, dataclasses.replace(second, tuned_as="other")))
    with pytest.raises(ValueError, match="tuned_as: expected a contender that is tuned, of .*; got 'SPFB'"):
        an_experiment(tmp_path, contenders=(first, dataclasses.replace(second, tuned_as="SPFB")))
    with pytest.raises(ValueError, match="name: expected one of sgd, .*; got 'bfgs'"):
        Method("bfgs")
    with pytest.raises(ValueError, match="rank: expected a number for lspfb and none for others; got None for lspfb"):
        Method("lspfb")
    with pytest.raises(ValueError, match="window: expected None for sgd; got 3"):
        Method("sgd", window=3)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("content", ["{", "{}", "[1]", '{"objective": null}'])
def test_damaged_file_of_the_least_objective_is_named(tmp_path, content):
    an = an_experiment(tmp_path)
    path = tmp_path / "least" / "tiny-0.001-1e-05.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(UserError, match=f"{path}: expected .*Remove it, and what it was of is made again"):
        comparison._least_objective(an, 1e-3, lambda: None)
