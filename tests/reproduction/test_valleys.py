"""Wide valleys: what is minimised, what is measured, and what is left in files."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import networks_valleys
from experiments.networks import valleys
from experiments.networks.data import problem_of
from experiments.networks.methods import Method
from experiments.networks.models import Network
from experiments.networks.train import Run, train
from experiments.networks.valleys import ValleyRun
from tests import reference

NETWORK = Network("perceptron", (12,))
PROBLEM = problem_of("digits", 300, 0)


def a_run(**changes):
    fields = dict(
        network=NETWORK, data_set="digits", rows=300, evaluated=300, batch=50, steps=60, schedule="cosine",
        learning_rate=1e-2, weight_decay=1e-3, penalty="trace", strength=0.0, seed=3,
    )  # fmt: skip
    return ValleyRun(**(fields | changes))


@functools.cache
def ends(**changes):
    return valleys.train(a_run(**changes), PROBLEM).records[-1]


@pytest.mark.parametrize("penalty", ["trace", "sam"])
def test_without_a_penalty_it_is_adamw(penalty):
    run = a_run()
    method = Method("adamw", b2=0.98, weight_decay=run.weight_decay)
    other = Run(
        network=NETWORK, data_set="digits", rows=300, evaluated=300, batch=50, steps=60, method=method,
        learning_rate=run.learning_rate, schedule="cosine", scale=1.0, seed=3, records=1,
    )  # fmt: skip
    expected, found = train(other, PROBLEM).records[-1], ends() if penalty == "trace" else ends(penalty="sam")
    for name in ("train_loss", "test_loss", "train_error"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("penalty", "strength"), [("trace", 3e-3), ("sam", 0.3)])
def test_penalties_lead_to_a_smaller_trace_and_cost_training_loss(penalty, strength):
    plain, found = ends(), ends(penalty=penalty, strength=strength)
    assert found["trace"] < 0.9 * plain["trace"]
    assert found["train_loss"] > plain["train_loss"]


def test_trace_at_the_end_is_that_of_the_dense_curvature():
    params = NETWORK.first_params(0, 64, 10)
    inputs = PROBLEM.train.inputs[:40]
    found = valleys.trace(NETWORK, params, inputs)
    logits = np.asarray(NETWORK.logits(params, jnp.asarray(inputs)))
    slopes = jax.jacobian(lambda params: NETWORK.logits(params, jnp.asarray(inputs)))(params)
    exact = 0.0
    for leaf in jax.tree.leaves(slopes):
        for h, j in zip(logits, np.asarray(leaf).reshape(40, 10, -1), strict=True):
            exact += np.trace(j.T @ reference.logit_bound(h, reference.max_first(h))[2] @ j) / 40
    np.testing.assert_allclose(found, exact, rtol=0.35)


def test_experiment_is_resumable_and_says_what_was_found(tmp_path, capsys):
    config = valleys.in_small(networks_valleys.config(), "digits")
    config = dataclasses.replace(config, steps=5, output=str(tmp_path))
    assert config.seeds == (1, 2) and len(networks_valleys.config().seeds) == 5
    path = valleys.perform_all(config)
    assert "made before" not in capsys.readouterr().out
    table = valleys.table(path)
    assert [row.split("|")[1].strip() for row in table.splitlines()[4:]] == [
        "AdamW", f"weight of the trace {config.weights[0]:g}", f"radius of SAM {config.radii[0]:g}",
    ]  # fmt: skip
    found = json.loads(path.read_text())["ends"]["digits"]
    assert found["trace"]["0.0"] == found["sam"]["0.0"]
    assert all(len(values) == 2 for values in found["sam"]["0.0"].values())
    assert valleys.draw(path).stat().st_size > 10_000
    valleys.perform_all(config)
    # Those without a penalty are in both parts, and shown once.
    assert capsys.readouterr().out.count("made before") == 6
    assert valleys.table(path) == table


def test_strengths_that_do_not_rise_are_named():
    with pytest.raises(ValueError, match="^weights: expected rising numbers"):
        dataclasses.replace(networks_valleys.config(), weights=(1e-3, 1e-4))
