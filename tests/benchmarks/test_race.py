"""A run of a method, judged: what it reaches when, and how it ended."""

import math

import numpy as np
import pytest

from experiments.benchmarks.suite import contestants, worker
from experiments.benchmarks.suite.objective import certified_gap, objective, objective_and_gradient_norm
from experiments.benchmarks.suite.optimum import ENOUGH, find
from experiments.benchmarks.suite.problem import Checkpoint, Problem, Ready, batch_size, blocks
from experiments.benchmarks.suite.race import Outcome, race, time_to
from tests.benchmarks.small import L2, problem, rows


def quadratic(params, inputs, labels, l2):
    """1 + |w|^2 / 2."""
    return 1 + float(np.sum(params**2)) / 2


def descent(rate, first=1.0, seconds_each=0.5):
    """Gradient descent on the quadratic: w is (1 - rate)^k after k passes."""

    def method(problem, setting, seed):
        yield Ready(3.0)
        w = np.array([first])
        for k in range(2000):
            yield Checkpoint(seconds_each * k, k, w)
            w = w - rate * w

    return method


EMPTY = Problem("quadratic", np.zeros((1, 1), np.float32), np.zeros(1, np.int32), 2, 0.0, goal=1 + 1e-7, seconds=1e9)


def test_quadratic_reaches_its_targets_at_known_passes():
    outcome = race(descent(0.1), EMPTY, {}, 0, evaluate=quadratic)
    assert (outcome.ended, outcome.compile_seconds) == ("reached", 3.0)
    for target in (1e-1, 1e-3, 1e-6):
        # |w|^2/2 = 0.81^k / 2 <= target.
        known = math.ceil(math.log(2 * target) / math.log(0.81))
        seconds, passes = time_to(outcome, 1 + target)
        assert seconds == 0.5 * passes
        # Checkpoints are looked at in steps of 5 %, and never before the target.
        assert known <= passes <= math.ceil(1.05 * known)
    assert time_to(outcome, 1.0) == (math.inf, math.inf)


def test_trace_is_that_of_the_quadratic():
    outcome = race(descent(0.1), EMPTY, {}, 0, evaluate=quadratic)
    for seconds, passes, value in outcome.trace:
        assert value == pytest.approx(1 + 0.81**passes / 2, rel=1e-12)
        assert seconds == 0.5 * passes


@pytest.mark.parametrize("rate", [2.5, math.nan], ids=["grows", "not a number"])
def test_method_that_diverges_is_reported_as_such(rate):
    outcome = race(descent(rate), EMPTY, {}, 0, evaluate=quadratic)
    assert outcome.ended == "diverged"
    assert len(outcome.trace) < 60
    # And survives the way through a file, where NaN has no word.
    again = Outcome.from_json(outcome.to_json())
    np.testing.assert_equal(again.trace, outcome.trace)


def test_limit_of_time_ends_a_run():
    outcome = race(descent(0.1, first=1e1), EMPTY._replace(seconds=5.0), {}, 0, evaluate=quadratic)
    assert outcome.ended == "limit"
    assert outcome.trace[-1][0] == 5.5


def test_method_that_stops_by_itself_has_finished_and_its_last_point_counts():
    def method(problem, setting, seed):
        yield Ready(0.0)
        for k in range(101):
            yield Checkpoint(1 + k / 1000, k, np.array([1 - k / 100]))

    outcome = race(method, EMPTY._replace(goal=0.0), {}, 0, evaluate=quadratic)
    assert outcome.ended == "finished"
    assert outcome.trace[-1] == (1.1, 100, 1.0)


def test_whole_fits_are_compared_by_their_own_seconds():
    def method(problem, setting, seed):
        yield Ready(0.0)
        for seconds, w in ((2.0, 1.0), (1.0, 0.1), (0.9, 0.1), (1.01, 0.1)):
            yield Checkpoint(seconds, 1.0, np.array([w]), whole=True)

    outcome = race(method, EMPTY._replace(goal=0.0), {}, 0, evaluate=quadratic)
    assert [seconds for seconds, *_ in outcome.trace] == [2.0, 1.0, 0.9, 1.01]
    # The first that is good enough, and not the luckiest of several.
    assert time_to(outcome, quadratic(np.array([0.1]), *[None] * 3))[0] == 1.0


def test_what_is_reached_after_the_limit_is_not_reached():
    outcome = race(descent(0.1, seconds_each=4.0), EMPTY._replace(seconds=5.0), {}, 0, evaluate=quadratic)
    assert [seconds for seconds, *_ in outcome.trace] == [0.0, 4.0, 8.0]
    assert time_to(outcome, outcome.trace[1][2]) == (4.0, 1)
    assert time_to(outcome, outcome.trace[2][2]) == (math.inf, math.inf)


@pytest.mark.parametrize("classes", [2, 4])
def test_least_objective_is_certified_in_float64(classes):
    x, y = rows(classes)
    found = find(x, y, L2)
    assert found["certified_gap"] <= ENOUGH
    # At any other point the certificate covers the true distance.
    random = np.random.default_rng(0)
    for scale in (1e-6, 1e-3, 1.0):
        params = scale * random.normal(size=(x.shape[1], classes))
        value, norm = objective_and_gradient_norm(params, x, y, L2)
        assert value == pytest.approx(objective(params, x, y, L2), rel=1e-14)
        assert found["objective"] < value <= found["objective"] + certified_gap(norm, L2)


def test_gradient_norm_is_that_of_the_objective():
    x, y = rows(3, examples=50)
    params = np.random.default_rng(1).normal(size=(x.shape[1], 3))
    gradient, step = np.zeros_like(params), 1e-6
    for place in np.ndindex(params.shape):
        shift = np.zeros_like(params)
        shift[place] = step
        gradient[place] = (objective(params + shift, x, y, L2) - objective(params - shift, x, y, L2)) / (2 * step)
    assert objective_and_gradient_norm(params, x, y, L2)[1] == pytest.approx(np.linalg.norm(gradient), rel=1e-7)


def settings_of(name):
    """The first, with a schedule that is short, for methods that have one."""
    setting = dict(contestants.CONTESTANTS[name].settings[0])
    return {**setting, "steps": 600} if "steps" in setting else setting


HERE = [name for name, c in contestants.CONTESTANTS.items() if not contestants.ENVIRONMENTS[c.environment].packages]
# How close each gets: those that build their bound row by row, or have no line search, are far from the rest.
CLOSE = {
    "lspfb_paper": 1e-1,
    "lspfb_tight": 3e-2,
    "spfb": 3e-2,
    "sgd": 1e-3,
    "momentum": 1e-3,
    "adam": 1e-3,
    "kspfb": 1e-3,
}


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", HERE)
def test_every_method_minimises_the_same_objective(name, classes):
    one, least = problem(classes)
    module, function = contestants.CONTESTANTS[name].function.split(":")
    found = worker.importlib.import_module(f"experiments.benchmarks.suite.methods.{module}")
    outcome = race(getattr(found, function), one, worker.in_epochs(one, settings_of(name)), 0)
    seconds, passes, values = np.array(outcome.trace).T
    assert (values >= least * (1 - 1e-9)).all()
    assert values.min() <= least * (1 + CLOSE.get(name, 1.5e-6)), values.min() / least - 1
    assert np.isfinite(passes).all() and passes.max() > 0
    assert seconds.max() > 0


def test_batches_have_every_row_in_some_epoch():
    size = batch_size(1003)
    seen, epochs = set(), blocks(1003, seed=0)
    for _ in range(20):
        starts = next(epochs)
        assert len(set(starts)) == 1003 // size
        for start in starts:
            assert 0 <= start <= 1003 - size
            seen |= set(range(start, start + size))
    assert seen == set(range(1003))


def test_schedules_of_steps_are_given_in_epochs():
    one = EMPTY._replace(labels=np.zeros(32_000, np.int32))
    assert worker.in_epochs(one, {"rate": 1.0, "steps": 64}) == {"rate": 1.0, "epochs": 2.0}
    assert worker.in_epochs(one, {"memory": 5}) == {"memory": 5}


def test_method_that_raises_is_an_outcome(tmp_path, capsys):
    x, y = rows(3)
    for name, array in (("inputs", x), ("labels", y), ("classes", 3)):
        np.save(tmp_path / f"{name}.npy", array)
    request = {"folder": str(tmp_path), "l2": L2, "goal": 0.0, "seconds": 1.0, "setting": {}, "seed": 0, "spacing": 1.2}
    outcome = worker.perform({**request, "function": "full_batch:lbfgs"})
    assert outcome.ended == "failed"
    assert outcome.message == "KeyError: 'memory'"
    assert "Traceback" in capsys.readouterr().err
    assert worker.perform({**request, "function": "missing:run"}).ended == "failed"
