"""Peers that have environments of their own: by stand-ins for their libraries, and themselves where installed."""

import importlib
import sys
import types

import jax
import numpy as np
import pytest
import sklearn.linear_model

from experiments.benchmarks.suite import pool
from experiments.benchmarks.suite.contestants import CONTESTANTS, ENVIRONMENTS
from experiments.benchmarks.suite.problem import batch_size
from experiments.benchmarks.suite.race import race
from tests.benchmarks.small import L2, problem

PEERS = [name for name, c in CONTESTANTS.items() if ENVIRONMENTS[c.environment].packages]


@pytest.fixture
def adapter(monkeypatch):
    """The module of a peer, imported with stand-ins for what it imports."""

    def load(name, **modules):
        for module, content in modules.items():
            monkeypatch.setitem(sys.modules, module.replace("__", "."), types.SimpleNamespace(**content))
        path = f"experiments.benchmarks.suite.methods.{name}"
        monkeypatch.delitem(sys.modules, path, raising=False)
        found = importlib.import_module(path)
        # So that no one else gets the one with stand-ins.
        monkeypatch.delitem(sys.modules, path)
        return found

    return load


class Classifier:
    """Cyanure's, by scikit-learn: one vector for two classes, whose penalty is lambda_1/2 |w|^2, else (d, n)."""

    made = []

    def __init__(self, **options):
        self.options = options
        self.made.append(options)

    def fit(self, inputs, labels):
        c = 1 / (self.options["lambda_1"] * len(labels))
        epochs = self.options["max_iter"]
        model = sklearn.linear_model.LogisticRegression(C=c, fit_intercept=False, max_iter=epochs, tol=1e-9)
        coefficients = model.fit(inputs, labels).coef_
        self.coef_ = coefficients[0] if len(coefficients) == 1 else coefficients.T


@pytest.mark.filterwarnings("ignore:lbfgs failed to converge")
@pytest.mark.parametrize("classes", [2, 3])
def test_cyanure_is_asked_for_the_same_objective(adapter, classes):
    Classifier.made = []
    module = adapter("cyanure", cyanure={}, cyanure__estimators={"Classifier": Classifier})
    one, least = problem(classes)
    outcome = race(module.cyanure, one, {"solver": "acc-svrg"}, 0)
    values = [value for *_, value in outcome.trace]
    assert outcome.ended == "reached"
    assert min(values) <= least * (1 + 1.1e-6) and min(values) >= least * (1 - 1e-9)
    # From zero, and each fit by its own clock and its own number of epochs, more and more of them.
    assert values[0] == pytest.approx(np.log(classes))
    epochs = [options["max_iter"] for options in Classifier.made]
    assert epochs[1:] == sorted(set(epochs[1:])) and [passes for _, passes, _ in outcome.trace][1:] == epochs[1:]
    assert {options["loss"] for options in Classifier.made} == {"logistic" if classes == 2 else "multiclass-logistic"}
    assert all(options["solver"] == "acc-svrg" and not options["fit_intercept"] for options in Classifier.made)


class Optimizer:
    """kfac-jax's, as gradient descent."""

    made = []

    def __init__(self, *, value_and_grad_func, **options):
        self.gradient, self.options = jax.jit(value_and_grad_func), options
        self.numbers, self.batches = [], []
        self.made.append(self)

    def init(self, params, key, batch):
        return ()

    def step(self, params, state, key, *, data_iterator, global_step_int, learning_rate, momentum, damping):
        batch = next(data_iterator)
        self.batches.append(batch[1].shape)
        self.numbers.append((global_step_int, float(learning_rate), float(momentum), float(damping)))
        _, gradient = self.gradient(params, batch)
        # The library writes to the memory that it was given.
        new = params - 10 * learning_rate * gradient
        params.delete()
        return new, state, {}


@pytest.mark.parametrize("classes", [2, 3])
def test_kfac_is_asked_for_the_same_objective(adapter, classes):
    Optimizer.made = []
    library = {"Optimizer": Optimizer, "register_softmax_cross_entropy_loss": lambda *_: None}
    module = adapter("kfac", kfac_jax=library)
    one, least = problem(classes)
    outcome = race(module.kfac, one, {"epochs": 40, "rate": 0.2, "damping": 1e-3}, 0)
    values = [value for *_, value in outcome.trace]
    # Batches of a sixteenth, and a rate that falls to zero: near the optimum, and not below it.
    assert least * (1 - 1e-9) <= min(values) <= 1.02 * least
    assert values[0] == pytest.approx(np.log(classes))
    (optimizer,) = Optimizer.made
    assert set(optimizer.batches) == {(batch_size(800),)}
    assert optimizer.options["l2_reg"] == L2
    steps = [step for step, *_ in optimizer.numbers]
    first = steps.index(0, 1)
    # A first run to compile, and then the schedule from its start.
    assert steps[first:] == list(range(640)) and first > 0
    rates = [rate for _, rate, *_ in optimizer.numbers[first:]]
    assert rates[0] == pytest.approx(0.2) and rates[-1] < 1e-4 and rates == sorted(rates, reverse=True)
    assert np.array(optimizer.numbers)[:, 2:] == pytest.approx(np.tile([0.9, 1e-3], (len(steps), 1)))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", PEERS)
def test_peer_minimises_the_same_objective_where_it_is_installed(name, classes, tmp_path):
    """`make bench` installs it."""
    contestant = CONTESTANTS[name]
    if not list(pool.ROOT.glob(f".venv-bench-{contestant.environment}/installed-*")):
        pytest.skip(f"no environment of {contestant.environment}")
    one, least = problem(classes)
    for array, value in (("inputs", one.inputs), ("labels", one.labels), ("classes", classes)):
        np.save(tmp_path / f"{array}.npy", value)
    setting = dict(contestant.settings[0])
    setting = {**setting, "steps": 600} if "steps" in setting else setting
    request = {"function": contestant.function, "folder": str(tmp_path), "l2": L2, "goal": one.goal, "seconds": 5.0}
    workers = pool.Pool(tmp_path)
    try:
        outcome = workers.run(contestant.environment, {**request, "setting": setting, "seed": 0, "spacing": 1.2})
    finally:
        workers.stop()
    assert outcome.ended in ("reached", "finished", "limit"), outcome.message
    values = np.array([value for *_, value in outcome.trace])
    assert (values >= least * (1 - 1e-9)).all()
    assert values.min() <= 1.05 * least
