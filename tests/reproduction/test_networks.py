"""Networks: what is trained, how lengths and settings are chosen, and what is left in files."""

import dataclasses
import importlib
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qbound
from experiments.errors import UserError
from experiments.networks import __main__ as command
from experiments.networks import comparison as comparisons
from experiments.networks import data, environments, rates, report, runs, train, worker
from experiments.networks.comparison import Comparison, Contender
from experiments.networks.data import Problem, Rows
from experiments.networks.environments import Failed
from experiments.networks.methods import SCHEDULES, Method, learning_rate, muon_dimensions, numbers, transform
from experiments.networks.models import Network
from experiments.networks.train import Outcome, Run
from experiments.networks.turns import take_turns
from experiments.train import batch_rows

NETWORKS = {
    "perceptron": Network("perceptron", (5,)),
    "convolutional": Network("convolutional", (2, 3, 4)),
    "transformer": Network("transformer", (1, 4, 2, 6)),
}
NAMES = ("perceptron", "convolutional", "transformer", "large_batches", "rates")
LAYERWISE = pytest.mark.skipif(not hasattr(qbound, "layerwise_spfb"), reason="qbound has no layerwise_spfb")
# The learning rate of Muon's Adam is an argument from optax 0.2.7 on.
MUON = pytest.mark.skipif(
    tuple(map(int, optax.__version__.split(".")[:3])) < (0, 2, 7), reason="optax has no rate for the rest"
)
METHODS = [
    Method("adamw", b2=0.99, weight_decay=0.1),
    Method("nadamw"),
    pytest.param(Method("muon", adam_ratio=0.1), marks=MUON),
    Method("schedule_free_adamw", b1=0.9),
    Method("momentum", momentum=0.8, l2=0.1),
    Method("spfb", damping=0.1, max_steps=2),
    pytest.param(Method("layerwise_spfb", damping=0.1, curvature="bound"), marks=LAYERWISE),
    pytest.param(Method("layerwise_spfb", damping=0.1, curvature="gauss_newton"), marks=LAYERWISE),
]


def tiny_problem(*_) -> Problem:
    random = np.random.default_rng(0)
    inputs = random.normal(size=(80, 16)).astype(np.float32)
    labels = np.argmax(inputs[:, :3], axis=1).astype(np.int32)
    return Problem(Rows(inputs[:60], labels[:60]), Rows(inputs[60:], labels[60:]), 3)


def a_run(**changes) -> Run:
    first = Run(
        network=NETWORKS["perceptron"], data_set="digits", rows=60, evaluated=50, batch=20, steps=4,
        method=Method("adamw"), learning_rate=0.1, schedule="cosine", scale=1.0, seed=0, records=2,
    )  # fmt: skip
    return dataclasses.replace(first, **changes)


def a_comparison(output, **changes) -> Comparison:
    first = Comparison(
        name="tiny", network="perceptron", sizes=(5,), data_sets=("digits",), rows=60, evaluated=50, batches=(20,),
        steps=(8,), measure="train_loss", schedules=SCHEDULES, lengths=(0.25, 0.5, 1.0), tuned_at=(0.25, 1.0),
        contenders=(
            Contender("momentum SGD", (Method("momentum"),), (0.03, 0.3)),
            Contender("AdamW", (Method("adamw"),), (0.001, 0.01)),
        ),
        seeds=(1, 2), records=1, turn_steps=1, turns=2, output=str(output),
    )  # fmt: skip
    return dataclasses.replace(first, **changes)


@pytest.fixture
def tiny_networks(monkeypatch):
    """Every data set is a tiny one."""
    monkeypatch.setattr(runs, "problem_of", tiny_problem)


def parameters(kind, inputs=784, classes=10):
    sizes = {"perceptron": (256, 128), "convolutional": (16, 32, 64), "transformer": (2, 96, 4, 64)}[kind]
    return jax.eval_shape(lambda: Network(kind, sizes).first_params(0, inputs, classes))


def test_networks_have_the_sizes_that_their_configs_say():
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters("perceptron"))) == 235_146
    convolutional = parameters("convolutional")
    assert convolutional["conv1"]["weights"].shape == (3, 3, 16, 32)
    assert convolutional["dense0"]["weights"].shape == (1568, 64)
    transformer = parameters("transformer", 64, 256)
    assert transformer["block1"]["up"].shape == (96, 384)
    assert sum(leaf.size for leaf in jax.tree.leaves(transformer)) == 2 * 12 * 96**2 + 96 * (2 * 256 + 64 + 5)


def test_first_weights_are_those_of_he_and_scaled():
    params = Network("perceptron", (400,)).first_params(0, 100, 10, scale=3.0)
    assert float(jnp.std(params["dense0"]["weights"])) == pytest.approx(3 * math.sqrt(2 / 100), rel=0.05)
    assert not params["dense0"]["bias"].any()
    again = Network("perceptron", (400,)).first_params(0, 100, 10)
    np.testing.assert_allclose(params["head"]["weights"], 3 * again["head"]["weights"], rtol=1e-6)
    other = Network("perceptron", (400,)).first_params(1, 100, 10)
    assert not np.allclose(other["head"]["weights"], again["head"]["weights"])


def test_convolutions_are_sums_over_windows():
    network = Network("convolutional", (2, 3))
    params = network.first_params(0, 16, 4)
    params["conv0"]["bias"] = jnp.array([0.1, -0.2])
    image = np.random.default_rng(0).normal(size=(4, 4))
    padded = np.pad(image, 1)
    weights, bias = (np.asarray(params["conv0"][name]) for name in ("weights", "bias"))
    windows = np.array([[padded[i : i + 3, j : j + 3] for j in range(4)] for i in range(4)])
    convolved = np.maximum(np.einsum("ijkl,klc->ijc", windows, weights[:, :, 0]) + bias, 0)
    pooled = np.array([[convolved[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max(axis=(0, 1)) for j in (0, 1)]
                       for i in (0, 1)])  # fmt: skip
    hidden = np.maximum(pooled.reshape(1, -1) @ np.asarray(params["dense0"]["weights"]), 0)
    expected = hidden @ np.asarray(params["head"]["weights"])
    found = network.logits(params, jnp.asarray(image.reshape(1, 16), jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_transformer_reads_what_is_before_and_nothing_after():
    network = NETWORKS["transformer"]
    params = network.first_params(0, 6, 7)
    text = jnp.array([[1, 2, 3, 4, 5, 6]])
    found, other = (np.asarray(network.logits(params, one)) for one in (text, text.at[0, 3].set(0)))
    assert found.shape == (1, 6, 7)
    np.testing.assert_array_equal(found[0, :3], other[0, :3])
    assert (np.abs(found[0, 3:] - other[0, 3:]).max(axis=1) > 1e-4).all()


def test_schedules_are_what_they_are_called():
    def at(schedule, steps):
        return np.asarray(learning_rate(numbers(2.0, schedule, 100))(jnp.asarray(steps)))

    np.testing.assert_allclose(at("cosine", [0, 4, 9, 55, 100]), [0.2, 1, 2, 1, 0], atol=1e-6)
    np.testing.assert_allclose(at("constant", [0, 50, 75, 99, 100]), [2, 2, 1, 0.04, 0], rtol=1e-5, atol=1e-6)
    assert (at("cosine", np.arange(100)) > 0).all() and (at("constant", np.arange(100)) > 0).all()


def test_muon_orthogonalises_hidden_weights_and_leaves_the_rest_to_adam():
    dimensions = muon_dimensions(parameters("convolutional"))
    assert dimensions["conv1"]["weights"] == optax.contrib.MuonDimensionNumbers((0, 1, 2), 3)
    assert dimensions["dense0"]["weights"] == optax.contrib.MuonDimensionNumbers((0,), 1)
    assert dimensions["head"]["weights"] is None and dimensions["conv1"]["bias"] is None
    dimensions = muon_dimensions(parameters("transformer", 64, 256))
    assert dimensions["embedding"] == {"bytes": None, "positions": None}
    assert dimensions["block0"]["mlp_gain"] is None and dimensions["block0"]["query"] is not None


@MUON
def test_update_of_muon_for_a_convolution_is_orthogonal_and_the_rest_has_its_own_rate():
    network = NETWORKS["convolutional"]
    params = network.first_params(0, 16, 3)

    def updates(ratio):
        rule = transform(Method("muon", adam_ratio=ratio), lambda step: 1.0, network.logits)
        return rule.update(params, rule.init(params), params)[0]

    one, half = updates(1.0), updates(0.5)
    condition = [np.linalg.cond(np.reshape(tree["conv1"]["weights"], (-1, 3))) for tree in (params, one)]
    assert condition[0] > 1.5 > condition[1]
    np.testing.assert_array_equal(half["conv1"]["weights"], one["conv1"]["weights"])
    np.testing.assert_allclose(half["head"]["weights"], 0.5 * one["head"]["weights"], rtol=1e-5)
    np.testing.assert_allclose(np.std(np.abs(one["head"]["weights"])), 0, atol=1e-4)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name} {method.curvature or ''}".strip())
def test_every_method_trains(method):
    outcome = train.train(a_run(method=method, learning_rate=0.03, steps=6), tiny_problem())
    assert (outcome.ended, outcome.steps, len(outcome.records)) == ("finished", 6, 3)
    first, *_, last = outcome.records
    assert last["train_loss"] < first["train_loss"]
    assert 0 < outcome.records[1]["seconds"] < last["seconds"] == outcome.seconds


@pytest.mark.parametrize("kind", ["convolutional", "transformer"])
def test_other_networks_train(kind):
    problem = tiny_problem()
    if kind == "transformer":
        problem = data._text(b"abcab" * 100, 40, 6)
        assert problem.classes == 256
    outcome = train.train(a_run(network=NETWORKS[kind], learning_rate=0.01, steps=8), problem)
    first, *_, last = outcome.records
    assert last["train_loss"] < first["train_loss"] and last["test_loss"] < first["test_loss"]


def test_loop_takes_the_steps_of_a_plain_optax_loop():
    problem, run = tiny_problem(), a_run(steps=5, records=1)
    outcome = train.train(run, problem)
    rule = optax.adamw(learning_rate(numbers(0.1, "cosine", 5)), weight_decay=0.0)
    params = run.network.first_params(0, 16, 3)
    state = rule.init(params)
    for which in batch_rows(60, 20, 0, range(5)):
        batch = problem.train.inputs[which], problem.train.labels[which]
        grads = jax.grad(lambda params, batch: train.loss(run.network, params, *batch))(params, batch)
        updates, state = rule.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    expected = train.evaluate(run.network, params, {"train": data.some(problem.train, 50), "test": problem.test})
    assert {name: outcome.records[-1][name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_schedule_free_parameters_are_those_to_evaluate():
    run = a_run(method=Method("schedule_free_adamw"), steps=3)
    problem = tiny_problem()
    trainer, _ = train.ready_trainer(run, problem)
    for _ in range(3):
        trainer.step(jnp.asarray(problem.train.inputs[:20]), jnp.asarray(problem.train.labels[:20]))
    handed_over = jax.tree.leaves(trainer.params())
    assert any(not np.allclose(a, b) for a, b in zip(handed_over, jax.tree.leaves(trainer._params), strict=True))


def test_run_ends_where_its_numbers_do():
    outcome = train.train(a_run(method=Method("momentum"), learning_rate=1e30, steps=40, records=10), tiny_problem())
    assert outcome.ended == "diverged" and outcome.steps < 40
    with pytest.raises(UserError, match="batches: expected at most the 60 training rows of digits; got 61"):
        train.train(a_run(batch=61), tiny_problem())


def test_text_is_cut_into_sequences_and_its_end_is_held_out():
    text = bytes(range(200)) * 2
    problem = data._text(text, 1000, 10)
    assert problem.train.inputs.shape == (37, 10) and problem.test.inputs.shape == (2, 10)
    np.testing.assert_array_equal(problem.train.inputs[3], np.arange(30, 40))
    np.testing.assert_array_equal(problem.train.labels[:-1, -1], problem.train.inputs[1:, 0])
    np.testing.assert_array_equal(problem.test.labels[-1], [b % 256 for b in range(181, 191)])
    assert len(data._text(text, 5, 10).train.labels) == 5
    assert b"def dataclass" in data._library()


def test_batches_have_the_rows_that_are_asked_for(monkeypatch):
    rows = tiny_problem().train
    which = batch_rows(60, 20, 0, range(5))
    monkeypatch.setattr(data, "MOST_MEMORY", 2 * rows.inputs[:20].nbytes)
    chunks = list(data.batches(rows, which))
    assert [len(chunk) for chunk in chunks] == [2, 2, 1]
    for chosen, (inputs, labels) in zip(which, [batch for chunk in chunks for batch in chunk], strict=True):
        np.testing.assert_array_equal(inputs, rows.inputs[chosen])
        np.testing.assert_array_equal(labels, rows.labels[chosen])
    np.testing.assert_array_equal(data.some(rows, 3).labels, rows.labels[[0, 29, 59]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Network("perceptron", ()), "sizes: expected at least one; got none"),
        (lambda: Network("transformer", (1, 4, 2)), "sizes: expected 4 numbers for a transformer; got"),
        (lambda: Network("transformer", (1, 5, 2, 6)), "sizes: expected a width that is a multiple of the heads"),
        (lambda: Network("convolutional", (2, 3, 4, 5)).first_params(0, 16, 3), "sizes: expected at most 2 convol"),
        (lambda: Network("transformer", (1, 4, 2, 6)).first_params(0, 7, 3), "sizes: expected as many positions as"),
        (lambda: Method("adamw", damping=0.1), "damping: expected nothing for adamw, which takes b2, weight_decay"),
        (lambda: Method("spfb", max_steps=0), "max_steps: expected a whole number above 0; got 0"),
        (lambda: a_comparison("", data_sets=("stdlib",)), "data_sets: expected stdlib for a transformer, images"),
        (lambda: a_comparison("", steps=(1, 2)), "steps: expected one number for each of 1 batches"),
        (lambda: a_comparison("", lengths=(0.5, 0.25, 1.0)), "lengths: expected rising shares with 1 as the last"),
        (lambda: a_comparison("", tuned_at=(0.3, 1.0)), "tuned_at: expected some of the lengths, 1 among them"),
        (
            lambda: a_comparison("", contenders=(Contender("Muon", (Method("muon"),), (0.1,)),)),
            "contenders: expected each label once, and AdamW among them; got",
        ),
        (
            lambda: a_comparison(
                "", contenders=(*a_comparison("").contenders, Contender("Muon", (Method("muon"),), (0.1,)))
            ),
            "contenders: expected grids of the same size",
        ),
    ],
)
def test_what_cannot_be_is_named(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


@pytest.mark.parametrize("name", NAMES)
def test_configs_have_grids_of_one_size_and_become_small(name):
    config = importlib.import_module(f"configs.networks_{name}").config()
    assert config.name == name
    if name == "rates":
        small = rates.in_small(config, "digits")
        assert max(config.learning_rates) / min(config.learning_rates) == pytest.approx(1e5)
        assert config.scales == (0.1, 1.0, 10.0) and len({one.label for one in config.entrants}) == 10
    else:
        small = comparisons.in_small(config, "digits")
        found = {len(comparisons.grid(config, contender)) for contender in config.contenders}
        assert found == {{"convolutional": 6, "transformer_large": 4}.get(name, 8)}
        assert {len(comparisons.grid(small, contender)) for contender in small.contenders} == {1}
        assert len(config.seeds) >= 2 and config.tuning_seed not in config.seeds
    labels = {one.label for one in (config.entrants if name == "rates" else config.contenders)}
    assert labels <= report.LOOKS.keys()
    assert small.rows <= 1000


class Imagined:
    """A laboratory in which the loss at the end is a formula."""

    def __init__(self, folder, data_dir=None, show=True):
        self.folder, self.asked = folder, []
        Imagined.last = self

    def perform(self, run, parent, label):
        self.asked.append((label, run.steps, run.seed, run.learning_rate))
        best = {"adamw": 16.0, "momentum": 4.0, "muon": 64.0, "nadamw": math.nan}[run.method.name]
        # The best learning rate is 1 for few steps, and 2 for many.
        loss = best / run.steps * (1 + abs(run.learning_rate - (2 if run.steps > 4 else 1))) + 0.01 * run.seed
        record = {"step": run.steps, "seconds": 1.0, "train_loss": loss, "train_error": 0.1, "test_error": 0.2}
        return Outcome("finished", run.steps, 0.5 * run.steps, 0.0, [record]), f"{label}-{run.steps}-{run.seed}"

    def costs(self, asked, parent, reference, **how):
        from experiments.networks.turns import Cost

        return {label: Cost(0.002, 3.0 if label == "momentum SGD" else 1.0, 0.9, 1.1) for label in asked}

    def forgiving(self, label):
        return runs.Laboratory.forgiving(self, label)

    def _line(self, text):
        pass


@pytest.fixture
def imagined(tmp_path, monkeypatch):
    monkeypatch.setattr(comparisons, "Laboratory", Imagined)
    contenders = tuple(
        Contender(label, (Method(name),), (1.0, 2.0))
        for label, name in (("momentum SGD", "momentum"), ("AdamW", "adamw"), ("Muon", "muon"), ("NadamW", "nadamw"))
    )
    return a_comparison(tmp_path, contenders=contenders, steps=(16,), schedules=("cosine",), lengths=(0.125, 0.25, 1.0),
                        tuned_at=(0.25, 1.0))  # fmt: skip


def test_shortest_run_that_reaches_what_adamw_reaches_counts(imagined):
    summary = json.loads(comparisons.perform_all(imagined).read_text())
    (cell,) = summary["cells"]
    found = cell["contenders"]
    assert cell["target"] == pytest.approx(1.015)
    assert [point["steps"] for point in found["AdamW"]["points"]] == [16]
    # At 2 steps the loss is 2: given up after the seed for tuning. At 4 it is that of AdamW.
    points = found["momentum SGD"]["points"]
    assert [(point["steps"], len(point["values"]), point["setting"][1]) for point in points] == [(2, 0, 1.0), (4, 2, 1)]
    assert found["momentum SGD"]["reached"]
    # The seeds of the longest run are made all the same, and one that ends with no number reaches nothing.
    assert not found["Muon"]["reached"] and len(found["Muon"]["points"][-1]["values"]) == 2
    assert found["Muon"]["points"][-1]["setting"][1] == 2.0
    assert found["NadamW"]["points"][-1]["values"] == [None, None]
    tuned = {steps for label, steps, seed, rate in Imagined.last.asked if label == "momentum SGD" and rate == 2.0}
    assert tuned == {4}, "the grid is tried at the lengths for that alone"


def test_level_is_for_all_methods(imagined):
    config = dataclasses.replace(imagined, level=4.2)
    (cell,) = json.loads(comparisons.perform_all(config).read_text())["cells"]
    steps = {label: one["points"][-1]["steps"] for label, one in cell["contenders"].items() if one["reached"]}
    assert steps == {"momentum SGD": 2, "AdamW": 4, "Muon": 16}


def test_tables_have_ratios_and_say_what_was_not_reached(imagined):
    path = comparisons.perform_all(imagined)
    text = report.table(path)
    assert "To a training loss of 1.0150, at which AdamW ends after 16 steps; means over seeds 1, 2." in text
    rows = {
        row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1:] for row in text.splitlines() if "cosine" in row
    }
    assert rows["momentum SGD"][:4] == ["4", "0.25", "3.00 (0.90 to 1.10)", "0.75"]
    assert rows["AdamW"][:2] == ["16", "1.00"]
    assert rows["Muon"][:2] == ["not in 16", "-"] and rows["NadamW"][-3] == "no number"
    assert "1.0150 ± 0.0071" in rows["AdamW"] and rows["AdamW"][-2] == "20.00 ± 0.00 %"
    assert report.draw(path).read_bytes().startswith(b"\x89PNG")
    level = dataclasses.replace(imagined, level=4.2, batches=(20, 40), steps=(16, 16), name="level")
    assert report.draw(comparisons.perform_all(level)).read_bytes().startswith(b"\x89PNG")


def test_shortest_length_of_all_is_said_to_be_enough(imagined):
    text = report.table(comparisons.perform_all(dataclasses.replace(imagined, level=9.0)))
    assert "| at most 2 |" in text and "that is given" in text


def test_comparison_without_a_target_says_so(imagined):
    config = dataclasses.replace(imagined, contenders=(Contender("AdamW", (Method("nadamw"),), (1.0,)),))
    with pytest.raises(UserError, match="digits, batches of 20: expected AdamW to end with a number; it did not"):
        comparisons.perform_all(config)


@pytest.mark.usefixtures("tiny_networks")
def test_comparison_is_made_once_and_what_fails_stops_nothing(tmp_path, monkeypatch, capsys):
    broken = Contender("broken", (Method("kfac"),), (0.1, 0.2))
    config = a_comparison(tmp_path, contenders=(*a_comparison("").contenders, broken))
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    calls = []
    monkeypatch.setattr(environments, "_call", lambda command: calls.append(command) or fail())

    def fail():
        raise Failed("no such package")

    path = comparisons.perform_all(config, peers=frozenset({"kfac"}))
    out = capsys.readouterr().out
    assert "digits, batches of 20, broken: not installed: no such package" in out and "Traceback" not in out
    assert len(calls) == 1
    before = path.read_text()
    assert set(json.loads(before)["cells"][0]["contenders"]) == {"AdamW", "momentum SGD"}
    assert {label["label"] for label in json.loads(before)["comparison"]["contenders"]} == {
        "AdamW", "momentum SGD", "broken",
    }  # fmt: skip
    assert "0 training" not in report.table(path) and "revision" in report.versions(path)
    monkeypatch.setattr(runs, "train", lambda *_: pytest.fail("a run was made twice"))
    monkeypatch.setattr(runs, "take_turns", lambda *_, **__: pytest.fail("costs were measured twice"))
    assert comparisons.perform_all(config, peers=frozenset({"kfac"})).read_text() == before
    assert all(line.endswith("made before") for line in capsys.readouterr().out.splitlines() if " loss " in line)


@pytest.mark.usefixtures("tiny_networks")
def test_run_leaves_its_files_and_an_interrupted_one_is_made_again(tmp_path, monkeypatch):
    laboratory = runs.Laboratory(tmp_path, show=False)
    outcome, name = laboratory.perform(a_run(), tmp_path / "cell", "Adam, W")
    where = tmp_path / name
    assert where.parent.name == "adam__w"
    assert json.loads((where / "config.json").read_text())["method"]["name"] == "adamw"
    assert Run.from_json(json.loads((where / "config.json").read_text())) == a_run()
    assert {"commit", "versions"} <= json.loads((where / "environment.json").read_text())[0].keys()
    assert len((where / "metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((where / "result.json").read_text())["metrics"] == outcome.records[-1]
    assert runs.read(where) == outcome
    assert runs.folder_of(a_run(seed=1), tmp_path) != runs.folder_of(a_run(), tmp_path)
    (where / "result.json").unlink()
    again, _ = laboratory.perform(a_run(), tmp_path / "cell", "Adam, W")
    drop = {"seconds"}
    assert [{k: v for k, v in r.items() if k not in drop} for r in again.records] == [
        {k: v for k, v in r.items() if k not in drop} for r in outcome.records
    ]
    (where / "metrics.jsonl").write_text("[")
    with pytest.raises(UserError, match=f"{where}: expected the result of a run.*Remove it, and what it was of"):
        runs.read(where)


@pytest.mark.usefixtures("tiny_networks")
def test_method_that_cannot_be_run_is_said_in_one_line(tmp_path, monkeypatch):
    laboratory = runs.Laboratory(tmp_path, show=False)
    monkeypatch.setattr(runs, "train", lambda *_: (_ for _ in ()).throw(TypeError("no\nsuch layer")))
    with pytest.raises(Failed, match="^TypeError: no such layer$"):
        laboratory.perform(a_run(), tmp_path, "AdamW")
    assert not list(tmp_path.glob("**/result.json"))


def test_numbers_that_are_not_finite_survive_their_files(tmp_path, monkeypatch):
    record = {"step": 1, "seconds": 0.5, "train_loss": math.inf, "test_loss": math.nan, "test_error": 0.5}
    outcome = Outcome("diverged", 1, 0.5, 0.1, [record])
    monkeypatch.setattr(runs, "train", lambda *_: outcome)
    monkeypatch.setattr(runs, "problem_of", tiny_problem)
    _, name = runs.Laboratory(tmp_path, show=False).perform(a_run(), tmp_path, "AdamW")
    found = runs.read(tmp_path / name)
    assert found is not None and found.ended == "diverged" and math.isnan(found.records[0]["train_loss"])


def test_costs_are_ratios_of_turns():
    asked = {"AdamW": a_run(), "SPFB": a_run(method=Method("spfb", damping=0.1, max_steps=2))}
    found = take_turns(asked, tiny_problem(), "AdamW", steps=2, turns=3)
    assert found["AdamW"].ratio == found["AdamW"].ratio_low == 1
    assert found["SPFB"].seconds > 0 and found["SPFB"].ratio_low <= found["SPFB"].ratio <= found["SPFB"].ratio_high


def test_worker_answers_with_the_outcome_of_the_same_run(tmp_path, monkeypatch):
    problem, run = tiny_problem(), a_run()
    data.save(problem, tmp_path / "rows.npz")
    restored = data.restore(tmp_path / "rows.npz")
    np.testing.assert_array_equal(restored.test.labels, problem.test.labels)
    asked = {"rows": str(tmp_path / "rows.npz"), "runs": {"AdamW": dataclasses.asdict(run)}}
    (tmp_path / "request").write_text(json.dumps({**asked, "task": "train"}))
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "request"), str(tmp_path / "answer")])
    worker.main()
    answer = json.loads((tmp_path / "answer").read_text())
    found, expected = Outcome(**answer["outcome"]), train.train(run, problem)
    assert [one["train_loss"] for one in found.records] == [one["train_loss"] for one in expected.records]
    assert {"jax", "optax"} <= answer["versions"].keys()
    turns = worker.answer({**asked, "task": "turns", "reference": "AdamW", "steps": 1, "turns": 1})
    assert turns["costs"]["AdamW"]["ratio"] == 1
    (tmp_path / "request").write_text(json.dumps({**asked, "task": "train", "rows": "nowhere.npz"}))
    worker.main()
    assert json.loads((tmp_path / "answer").read_text())["error"].startswith("FileNotFoundError: ")


@pytest.mark.usefixtures("tiny_networks")
def test_peer_is_asked_in_its_own_process(tmp_path, monkeypatch):
    """With this Python for that of its environment."""
    monkeypatch.setattr(environments.Peers, "_python", lambda self, name: "python of a peer")

    def process(command, **options):
        assert command[:3] == ["python of a peer", "-m", "experiments.networks.worker"]
        assert "XLA_FLAGS" not in options["env"]
        request = json.loads(Path(command[3]).read_text())
        for run in request["runs"].values():
            run["method"] = dataclasses.asdict(Method("momentum"))
        Path(command[4]).write_text(json.dumps(worker.answer(request)))

    monkeypatch.setattr(environments.subprocess, "run", process)
    laboratory = runs.Laboratory(tmp_path, show=False)
    peer = a_run(method=Method("kfac"))
    outcome, name = laboratory.perform(peer, tmp_path / "cell", "kfac-jax")
    assert outcome.ended == "finished"
    assert json.loads((tmp_path / name / "environment.json").read_text())[0]["versions"]["jax"] == jax.__version__
    costs = laboratory.costs({"AdamW": a_run(), "kfac-jax": peer}, tmp_path, "AdamW", steps=1, turns=2)
    assert set(costs) == {"AdamW", "kfac-jax"}


@pytest.mark.usefixtures("tiny_networks")
def test_rates_show_what_diverges(tmp_path, monkeypatch, capsys):
    config = importlib.import_module("configs.networks_rates").config()
    entrants = [one for one in config.entrants if one.label in ("AdamW", "momentum SGD", "PSGD Kron")]
    config = dataclasses.replace(
        config, sizes=(5,), rows=60, evaluated=50, batch=20, steps=4, learning_rates=(0.01, 1e30), scales=(0.1, 1.0),
        entrants=tuple(entrants), output=str(tmp_path),
    )  # fmt: skip
    path = rates.perform_all(config)
    summary = json.loads(path.read_text())
    assert set(summary["ends"]) == {"0.1", "1.0"} and set(summary["ends"]["1.0"]) == {"AdamW", "momentum SGD"}
    assert summary["ends"]["1.0"]["momentum SGD"]["1e+30"] is None
    assert summary["start"]["0.1"] == pytest.approx(math.log(3), abs=0.05)
    assert summary["start"]["1.0"] > summary["ends"]["1.0"]["AdamW"]["0.01"]
    text = rates.table(path)
    assert "| 1 | momentum SGD | " in text and "| 0.01 to 0.01, 1 of 2 |" in text
    assert rates.draw(path).read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count(" loss ") == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["perceptrons"],
            "perceptrons: expected one of perceptron, convolutional, transformer, transformer_large, large_batches, ",
        ),
        (["perceptron", "sedes=3"], "sedes: expected one of the fields name, network, sizes"),
        (["perceptron", "contenders=Magic"], "contenders: expected labels among AdamW; NadamW; Muon"),
        (["transformer", "sizes=2,96,5,64"], "sizes: expected a width that is a multiple of the heads"),
        (["rates", "scales=0"], "scales: expected a number above 0"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_mistakes_are_said_in_one_line(words, message, capsys):
    assert command.main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.usefixtures("tiny_networks")
def test_command_in_small_leaves_tables_and_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("QBOUND_DATA_DIR", raising=False)
    words = ["perceptron", "contenders=AdamW,momentum SGD", "steps=4", "batches=20", "--quick"]
    assert command.main([*words, "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "### Perceptron, digits, batches of 20" in out and "| momentum SGD | " in out
    made = {path.name for path in (tmp_path / "perceptron").iterdir()}
    assert {"summary.json", "tables.md", "perceptron.png", "digits-20"} <= made
