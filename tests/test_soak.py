"""The soak finds nothing where all is right, and what is wrong where something is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qbound
from experiments import soak, soak_bounds, soak_rows
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
    h, x = np.float32([[2.0, -np.inf, 0.0]] * 4), np.float32([[5.0, 9.0, 0.0]] * 4)
    function = np.logaddexp(np.longdouble(5), 0)
    p = np.longdouble(1) / (1 + np.exp(np.longdouble(-2)))
    size = 2 + p * 3 + function  # the largest logit, the slope, and the bound
    found = function - size * eps * allowed * np.longdouble([0.9, 1.1, -100, 0])
    tally = soak_bounds._Tally("bound")
    tally.add(*soak_bounds._judge(h, x, found))
    assert (tally.checks, tally.violations) == (4, 1)
    assert tally.worst == pytest.approx(1.1 * allowed, rel=1e-4)


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
    [(["--checks", "0"], "expected an integer > 0; got 0"), (["--part", "none"], "invalid choice: 'none'")],
)
def test_soak_names_bad_arguments(arguments, expected, capsys):
    with pytest.raises(SystemExit, match="2"):
        soak.main(arguments)
    assert expected in capsys.readouterr().err
