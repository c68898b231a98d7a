"""The soak finds nothing where all is right, and what is wrong where something is."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qbound
from experiments import soak, soak_bounds, soak_rows, soak_streams
from qbound.curvature import Scaled


@pytest.fixture(autouse=True)
def default_mode():
    """As a command: in float32, and with JAX's own promotion of dtypes and ranks."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]


def test_soak_of_bounds_has_every_bound_and_no_violation(capsys):
    assert soak.main(["--part", "bounds", "--checks", "400"]) == 0
    printed = capsys.readouterr()
    _, _, *rows = _cells(printed.out)
    names = {name for _, name, *_ in rows}
    for bound in ("log_partition_bound", "bohning_bound", "local_bound", "partition_function_bound", "low_rank_bound"):
        assert any(name.startswith(bound) for name in names), bound
    assert {part for part, *_ in rows} == {"bounds"}
    assert {violations for _, _, _, violations, *_ in rows} == {"0"}
    total = sum(int(checks.replace(",", "")) for _, _, checks, *_ in rows)
    assert 400 <= total < 500
    assert printed.out.endswith(f"{total:,} checks, 0 violations\n")
    assert printed.err.startswith("bounds, ")


def _lower(bound):
    return dataclasses.replace(bound, curvature=Scaled(bound.curvature, jnp.float32(0.9)))


def _not_a_number(bound):
    return dataclasses.replace(bound, grad=jnp.nan * bound.grad)


def _higher(bound):
    return dataclasses.replace(bound, value=bound.value * (1 + 1e-4))


@pytest.mark.parametrize("broken", [_lower, _not_a_number, _higher])
def test_soak_reports_a_bound_that_is_none(broken, monkeypatch, capsys):
    """With too little curvature it is below, NaN is nowhere above, and a bound must touch."""
    right = qbound.bohning_bound
    monkeypatch.setattr(qbound, "bohning_bound", lambda h: broken(right(h)))
    monkeypatch.setattr(soak_bounds, "SHARES", {"global": 1.0})
    assert soak.main(["--part", "bounds", "--checks", "2000"]) == 1
    violations = {name: int(count.replace(",", "")) for _, name, _, count, *_ in _cells(capsys.readouterr().out)[2:]}
    assert violations.pop("bohning_bound") > 0
    assert set(violations.values()) == {0}


def test_allowance_is_in_units_of_rounding_of_all_terms():
    eps, allowed = np.finfo(np.float32).eps, soak_bounds.ALLOWANCE
    h, x = np.array([[2.0, -np.inf, 0.0]] * 4, np.float32), np.array([[5.0, 9.0, 0.0]] * 4, np.float32)
    function = np.logaddexp(np.longdouble(5), 0)
    p = np.longdouble(1) / (1 + np.exp(np.longdouble(-2)))
    size = 2 + p * 3 + function  # the largest logit, the slope, and the bound
    found = function - size * eps * allowed * np.array([0.9, 1.1, -100, 0], np.longdouble)
    tally = soak_bounds._Tally("bound")
    tally.add(*soak_bounds._judge(h, x, found))
    assert (tally.checks, tally.violations) == (4, 1)
    assert tally.worst == pytest.approx(1.1 * allowed, rel=1e-4)


def _few(monkeypatch, **transforms):
    monkeypatch.setattr(soak_streams, "TRANSFORMS", transforms)
    streams = {name: soak_streams.STREAMS[name] for name in ("plain", "small at first")}
    monkeypatch.setattr(soak_streams, "STREAMS", streams)
    monkeypatch.setattr(soak_streams, "RATES", (0.1, 100.0))


def test_soak_of_streams_has_every_rate_and_no_violation(monkeypatch, capsys):
    _few(monkeypatch, kspfb=soak_streams.TRANSFORMS["kspfb"])
    assert soak.main(["--part", "streams", "--steps", "100"]) == 0
    printed = capsys.readouterr()
    # Two rates, and the documented one, on two streams.
    ((part, name, checks, violations, worst, allowance),) = _cells(printed.out)[2:]
    assert (part, name, checks, violations, allowance) == ("streams", "kspfb", "6", "0", "3")
    assert 0.5 < float(worst) < 3
    assert printed.out.endswith("6 checks, 0 violations\n")


def test_soak_reports_transforms_that_rise_or_are_not_finite(monkeypatch, capsys):
    def multiplied_by(factor) -> Any:
        def make(rate):
            def update(updates, state, params=None, **ignored) -> Any:
                del params, ignored
                return jax.tree.map(lambda g: factor * rate(0) * g, updates), state

            return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)

        return make

    ascent, lost = multiplied_by(1.0), multiplied_by(jnp.nan)
    _few(monkeypatch, ascent=soak_streams.Entrant(ascent, 0.1, 20), lost=soak_streams.Entrant(lost, None, 20))
    assert soak.main(["--part", "streams", "--steps", "100"]) == 1
    printed = capsys.readouterr().out
    ascended, without = _cells(printed)[2:]
    # At the documented rate alone it counts that the objective rises.
    assert ascended[3] == "2" and "ascent, plain, rate 0.1: " in printed and "ascent, plain, rate 100" not in printed
    assert without[3:] == ["4", "", ""] and "lost, plain, rate 0.1: parameters that are not finite\n" in printed


@pytest.mark.parametrize("name", soak_streams.STREAMS)
def test_streams_are_what_they_are_called(name):
    x, y = soak_streams.STREAMS[name](20, 40, np.random.default_rng(0))
    assert x.shape == (20, 40, soak_streams.INPUTS) and y.shape == (20, 40)
    assert x.dtype == np.float32 and set(np.unique(y)) == set(range(soak_streams.LABELS))
    sizes = np.sqrt(np.mean(x**2, axis=(1, 2)))
    claims = {
        "plain": np.ptp(sizes) < 0.3,
        "sorted by size": np.all(np.diff(np.sum(x.reshape(-1, x.shape[2]) ** 2, axis=1)) >= -1e-3),
        "sorted by label": np.all(np.diff(y.reshape(-1)) >= 0),
        "heavy-tailed": sizes.max() > 5 * np.median(sizes),
        "small at first": sizes[0] < 0.03 * sizes[1:].min(),
        "rescaled": sizes[10:].min() > 20 * sizes[:10].max(),
        "constant": np.ptp(x, axis=(0, 1)).max() == 0,
        "sparse": np.mean(x[..., -1] != 0) < 0.05 and not x[0].any() and x[1].any(),
    }
    assert claims[name]


def test_every_part_adds_to_the_table_and_to_the_exit_code(monkeypatch, capsys):
    def part(violations):
        return lambda checks, show: [soak_rows.Row("what", checks, violations, 1.5, 2.0)]

    monkeypatch.setattr(soak, "PARTS", {"good": part(0), "bad": part(3)})
    assert soak.main(["--checks", "7"]) == 1
    printed = capsys.readouterr().out
    assert _cells(printed)[2:] == [["good", "what", "7", "0", "1.5", "2"], ["bad", "what", "7", "3", "1.5", "2"]]
    assert printed.endswith("14 checks, 3 violations\n")
    assert soak.main(["--part", "good"]) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--checks", "0"], "expected an integer > 0; got 0"),
        (["--steps", "15"], "expected a multiple of 10; got 15"),
        (["--part", "none"], "invalid choice: 'none'"),
    ],
)
def test_soak_names_bad_arguments(arguments, expected, capsys):
    with pytest.raises(SystemExit, match="2"):
        soak.main(arguments)
    assert expected in capsys.readouterr().err
