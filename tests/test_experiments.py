"""The experiments run, on small settings, and say what they should."""

import dataclasses
import importlib
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import curves, demo, label_order, small_batches, superlinear, theory
from experiments.benchmarks import bound as bound_benchmark
from experiments.benchmarks import kspfb as kspfb_benchmark
from experiments.benchmarks import low_rank as low_rank_benchmark
from experiments.benchmarks import mm as mm_benchmark
from experiments.benchmarks import spfb as spfb_benchmark
from experiments.benchmarks import timing
from tests import reference

CONFIGS = sorted(
    path.stem
    for path in (Path(__file__).parent.parent / "configs").glob("*.py")
    if path.stem not in ("__init__", "common")
)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_frozen_and_gives_its_command(name):
    module = importlib.import_module(f"configs.{name}")
    assert module.__doc__ is not None
    assert "Command: python -m experiments." in module.__doc__
    field = dataclasses.fields(module.config())[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(module.config(), field, 0)


def test_curves_are_of_bounds_that_are_bounds(tmp_path):
    settings = importlib.import_module("configs.curves").config()
    settings = dataclasses.replace(settings, output=str(tmp_path / "made" / "bound.png"))
    output = curves.draw(settings)
    assert output.read_bytes().startswith(b"\x89PNG")
    _, above = curves.gaps(settings, np.linspace(-6, 6, 41))
    for name, gap in above.items():
        if name == "second-order expansion":
            assert gap.min() < -1
        else:
            assert gap.min() > -1e-5
            assert gap.max() > 1
    table = curves.gap_table(settings).splitlines()
    assert len(table) == 1 + len(curves.CURVES)
    assert len({len(row) for row in table}) == 1


@pytest.fixture
def default_mode():
    """Experiments run in JAX's own mode: float32, and its promotion of dtypes and ranks."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("default_mode")
def test_demo_trains_and_draws(tmp_path, capsys):
    settings = importlib.import_module("configs.demo").config()
    settings = dataclasses.replace(
        settings, epochs=2, sgd_rates=(1.0, 1e4), window=200, output=str(tmp_path / "made" / "demo.png")
    )
    found, least = demo.run(settings)
    assert "epoch   2" in capsys.readouterr().out
    assert [len(curve.objective) for curve in found.values()] == [3, 3, 3]
    for curve in found.values():
        assert curve.objective[0] == pytest.approx(np.log(10), rel=1e-5)
        assert least < curve.objective[-1] < curve.objective[0] / 2
        assert (np.diff(curve.seconds) > 0).all()
        assert curve.test_error[-1] < 0.3
    assert "best of 2 rates (1)" in next(iter(found))
    table = demo.table(settings, found, least).splitlines()
    assert len(table) == 5
    assert demo.draw(settings, found, least).read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("default_mode")
def test_window_removes_the_bias_and_keeps_the_objective_from_leaping(tmp_path):
    """Erratum 9 of the documentation, in small: batches of ten."""
    settings = importlib.import_module("configs.small_batches").config()
    settings = dataclasses.replace(
        settings, batches=(10,), steps=1000, window=500, seeds=2, output=str(tmp_path / "small.png")
    )
    found = small_batches.results(settings)
    excess, worst = ({source: cells[10][i] for source, cells in found.items()} for i in (0, 1))
    start = np.log(3)
    window = "window of recent examples"
    assert excess["the same batch (the paper)"] > 1
    assert excess[window] < 0.02
    assert worst[window] < start
    assert worst["the batch before"] > 20 * start
    assert worst["running average"] > 5 * start
    assert small_batches.table(found).count("\n") == 5
    assert small_batches.draw(settings, found).read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("default_mode")
def test_objective_does_not_leap_while_the_window_fills():
    batch = 1
    settings = importlib.import_module("configs.small_batches").config()
    settings = dataclasses.replace(settings, batches=(batch,), steps=300 // batch - 1, window=300, seeds=3)
    values, _ = small_batches.run(settings, "window of recent examples", batch)
    assert np.max(values) < 1.5 * np.log(3)
    assert np.median(values[:, -1]) < 0.3


@pytest.mark.usefixtures("default_mode")
def test_batches_of_any_size_are_safe_at_learning_rate_one(monkeypatch):
    """Long after the window has filled, and without any decay: batches of three."""
    batch = 3
    monkeypatch.setattr(small_batches, "_rate", lambda step: 1.0 + 0 * step)
    settings = importlib.import_module("configs.small_batches").config()
    settings = dataclasses.replace(settings, batches=(batch,), steps=600, window=200, seeds=2)
    values, _ = small_batches.run(settings, "window of recent examples", batch)
    assert np.max(values) < 1.5 * np.log(3)
    assert np.median(values[:, -1]) < 0.4
    free = small_batches.window_source(limit_steps=False)
    monkeypatch.setitem(small_batches.SOURCES, "without a limit", free)
    values, _ = small_batches.run(settings, "without a limit", batch)
    assert np.max(values) > 5 * np.log(3), "the test needs a problem where steps without a limit are too long"


@pytest.mark.usefixtures("default_mode")
def test_certificates_make_the_full_batch_method_as_fast_as_newton_cg(tmp_path):
    settings = importlib.import_module("configs.superlinear").config()
    settings = dataclasses.replace(settings, max_steps=40, repeats=1, output=str(tmp_path / "superlinear.png"))
    found = superlinear.results(settings)
    newton = found["Newton-CG, line search"]
    for name, curve in found.items():
        assert len(curve.norms) == len(curve.passes) == len(curve.certificates) + 1
        if name.startswith("bound") or name.startswith("Böhning"):
            assert curve.first_below(settings.target) is None
            continue
        assert curve.norms[-1] <= settings.tolerance
        k, reference = curve.first_below(settings.target), newton.first_below(settings.target)
        assert curve.passes[k] <= mm_benchmark.LIMIT * newton.passes[reference]
    assert superlinear.table(settings, found).count("not reached") == 4
    assert superlinear.draw(settings, found).read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("default_mode")
def test_corrected_theorem_holds_and_the_paper_s_version_stops_falling(tmp_path):
    settings = importlib.import_module("configs.theory").config()
    settings = dataclasses.replace(settings, l2=(0.5,), steps=3000, seeds=8, output=str(tmp_path / "theory.png"))
    data, sources = theory.unit_digits(), (theory.INDEPENDENT, theory.SAME)
    found = {0.5: {source: theory.simulate(settings, data, 0.5, source) for source in sources}}
    (independent, known), (same, _) = found[0.5].values()
    t = np.arange(1, 3001)
    assert known.c == pytest.approx(2)
    assert known.eta_0 > 1 / (2 * known.mu_1 * known.lambda_1)
    assert (independent.excess > 0).all()
    assert (independent.excess <= known.q / t).all()
    assert -1.3 < theory.slope(independent.excess) < -0.7
    assert theory.slope(same.excess) > -0.3
    assert same.excess[-1] > 4 * independent.excess[-1]
    assert theory.table(found).count("\n") == 2
    paths = {}
    for source in (theory.INDEPENDENT, theory.SAME):
        paths[source], optimum = theory.counterexample(4000, source)
    assert optimum == pytest.approx(-0.234, abs=1e-3)
    assert np.mean(paths[theory.INDEPENDENT][2000:]) == pytest.approx(optimum, abs=0.05)
    assert np.mean(paths[theory.SAME][2000:]) == pytest.approx(0.733, abs=0.05)
    assert theory.draw(settings, found, paths, optimum).read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("default_mode")
def test_constants_of_the_theorem_are_computed_from_the_data():
    rng = np.random.default_rng(0)
    inputs, labels = 2 * rng.normal(size=(40, 2)), np.arange(40) % 4
    settings = dataclasses.replace(importlib.import_module("configs.theory").config(), c=3.0, steps=5, seeds=2)
    outcome, known = theory.simulate(settings, (inputs, labels), 0.5, theory.INDEPENDENT)
    square = np.max(np.sum(inputs**2, axis=1))
    assert known.mu_1 == pytest.approx(1 / (square + 0.5))
    assert known.lambda_2 == pytest.approx(square / 2 + 0.5)
    assert known.c == pytest.approx(3)
    assert known.first_excess == outcome.excess[0] > 0
    residuals = 0.25 - np.eye(4)[labels]
    assert outcome.second_moment[0] == pytest.approx(np.mean(np.sum(inputs**2, axis=1) * np.sum(residuals**2, axis=1)))
    assert known.second_moment == outcome.second_moment.max()


@pytest.mark.parametrize(("n", "radius", "l2"), [(2, 1.0, 0.1), (10, 2.0, 1e-3)])
def test_constants_of_the_theorem_hold_for_any_logits(n, radius, l2):
    """Eigenvalues of the curvature and of the Hessian, for random weights and inputs of the full length."""
    known = theory.constants(radius, n, l2, 2.0, 1.0, 0.5)
    rng = np.random.default_rng(0)
    for scale in (0.0, 1.0, 10.0, 100.0):
        x = rng.normal(size=3)
        x *= radius / np.linalg.norm(x)
        h = scale * rng.normal(size=n)
        sigma = np.kron(reference.logit_bound(h)[2], np.outer(x, x)) + l2 * np.eye(3 * n)
        hessian = np.kron(reference.hessian(h), np.outer(x, x)) + l2 * np.eye(3 * n)
        inverse = 1 / np.linalg.eigvalsh(sigma)
        assert known.mu_1 * (1 - 1e-9) <= inverse.min() <= inverse.max() <= known.mu_2 * (1 + 1e-9)
        eigenvalues = np.linalg.eigvalsh(hessian)
        assert known.lambda_1 * (1 - 1e-9) <= eigenvalues[0] <= eigenvalues[-1] <= known.lambda_2 * (1 + 1e-9)
    noise = known.lambda_2 * known.mu_2**2 * known.eta_0**2
    assert known.q == pytest.approx(max(noise, 0.5))


def test_q_satisfies_the_recursion_of_the_proof():
    """phi_(t+1) <= (1 - c/t) phi_t + C/(2 t^2) stays below Q/t, also while c > t; the paper's Q does not."""
    for c in (1.2, 2.0, 7.5):
        noise = 3.0
        q = max(noise / (2 * (c - 1)), noise, 0.1)
        phi = 0.1
        for t in range(1, 2000):
            phi = max((1 - c / t) * phi, 0) + noise / (2 * t**2)
            assert phi <= q / (t + 1)
    paper = max(3.0 / (2 * (7.5 - 1)), 0.1)
    assert max((1 - 7.5) * 0.1, 0) + 3.0 / 2 > paper / 2


def test_benchmark_of_full_batches_reaches_its_tolerance():
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        runs = mm_benchmark.candidates(*mm_benchmark.synthetic(examples=300, inputs=20))
        for name in ("Newton-CG, line search", "mm"):
            outcome = runs[name]()
            assert outcome.gradient_norm <= mm_benchmark.TOLERANCE
            assert outcome.passes > outcome.steps > 2
        assert mm_benchmark.measure("small", {name: runs[name] for name in list(runs)[:1]}, 2)


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


def test_limits_of_the_benchmark_of_steps_belong_to_what_is_measured():
    for case in spfb_benchmark.CASES:
        assert set(case.limits) <= set(case.candidates)
    assert {"a batch of images", "a thousand labels"} <= {case.title for case in spfb_benchmark.CASES}


@pytest.mark.usefixtures("default_mode")
@pytest.mark.parametrize("case", spfb_benchmark.CASES, ids=lambda case: case.title)
def test_benchmark_of_steps_times_steps(case):
    """Every candidate makes a step that is finite, on a small problem."""
    small = dataclasses.replace(case, examples=min(case.examples, 7), inputs=5, labels=3)
    weights, inputs, labels = spfb_benchmark.problem(small)
    assert np.isfinite(spfb_benchmark.sgd_step(weights, inputs, labels)).all()
    for name, candidate in small.candidates.items():
        moved, state = jax.jit(candidate)(weights, inputs, labels)
        assert not state[0].spfb_info.spfb_nonfinite, name
        assert np.abs(moved - weights).max() > 0


def test_benchmark_of_low_rank_bounds_measures_what_exceeds_the_curvature():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rng = np.random.default_rng(0)
        inputs, weights = jnp.asarray(rng.normal(size=(12, 5))), jnp.asarray(rng.normal(size=(5, 3)))
        excess = low_rank_benchmark.excess_trace(weights, inputs, rank=2, method="frequent_directions")
        above = low_rank_benchmark.compressed(weights, inputs, rank=2, method="frequent_directions").dense()
        exact = low_rank_benchmark.compressed(weights, inputs, rank=15, method="frequent_directions").dense()
    np.testing.assert_allclose(excess, np.trace(above) - np.trace(exact), rtol=1e-6)
    assert excess > 0


def test_race_stops_every_clock_at_the_goal(monkeypatch):
    monkeypatch.setattr(kspfb_benchmark, "BATCH", 20)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rng = np.random.default_rng(0)
        inputs = jnp.asarray(np.c_[rng.normal(size=(80, 3)), np.ones(80)])
        labels = jnp.argmax(inputs[:, :3] + 0.3 * jnp.asarray(rng.normal(size=(80, 3))), axis=1)
        methods = {"SGD": kspfb_benchmark.sgd(40), "KSPFB": kspfb_benchmark.kspfb(60, relative_damping=0.01)}
        kspfb_benchmark.compile_all(methods, inputs, labels)
        outcomes = kspfb_benchmark.race(methods, inputs, labels, goal=0.4, seed=0)
    assert outcomes["SGD"].to_goal is None and outcomes["SGD"].objective > 0.4 and len(outcomes["SGD"].chunks) == 2
    arrived = outcomes["KSPFB"]
    assert arrived.objective <= 0.4 and arrived.steps_to_goal == 20 * len(arrived.chunks)
    assert arrived.to_goal == sum(arrived.chunks)


def test_cost_of_a_step_has_its_factorisation_spread():
    outcomes = {
        "SGD": kspfb_benchmark.Outcome([9.0, 1.0, 1.0], None, None, 1.0),
        "KSPFB": kspfb_benchmark.Outcome([52.0, 2.0, 2.0], None, None, 1.0),
    }
    plain, amortised = kspfb_benchmark.step_costs(outcomes, every=500)
    assert plain == 2.0
    np.testing.assert_allclose(amortised, 2.0 + (50 / 500) * 20)
