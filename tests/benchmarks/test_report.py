"""Tables and figures, from a fixed summary."""

import json
import math

import pytest

from experiments.benchmarks.suite import growth, report
from experiments.benchmarks.suite.contestants import CONTESTANTS
from experiments.errors import UserError
from tests.benchmarks.small import SUMMARY


def test_cells_compare_the_fastest_of_both_sides_in_the_same_turn():
    first, second, third, fourth = report.cells(SUMMARY)
    assert (first.ours.method, first.ours.seconds) == ("kspfb", 0.06)
    assert (first.peer.method, first.peer.seconds) == ("adam", 0.2)
    # Turns: 0.2/0.05, 0.2/0.1, 0.3/0.06.
    assert (first.low, first.ratio, first.high) == pytest.approx((2.0, 4.0, 5.0))
    assert (second.ours.method, second.peer.method) == ("estimator", "scikit_learn_lbfgs")
    assert second.ratio == pytest.approx(0.5)
    # No peer arrived in the 2.5 seconds that each had.
    assert third.peer is None and third.ratio is None and third.at_least == 2.5
    assert fourth.ours is None and fourth.peer is None and fourth.at_least is None


def test_turn_in_which_one_side_does_not_arrive_counts():
    problem = SUMMARY["problems"][0]
    for of, ended, expected in (
        ("kspfb", [0.05, None, 0.05], (0.0, 4.0, 6.0)),
        ("adam", [0.2, None, 0.3], (4.0, 5.0, math.inf)),
    ):
        finals = [
            {**entry, "seconds": [[value, None] for value in ended]} if entry["method"] == of else entry
            for entry in problem["finals"]
            if entry["method"] in ("kspfb", "adam")
        ]
        cell = report.cells({**SUMMARY, "problems": [{**problem, "finals": finals}]})[0]
        assert (cell.low, cell.ratio, cell.high) == pytest.approx(expected)


def test_what_peers_were_not_given_the_time_for_is_no_win_by_two():
    problem = SUMMARY["problems"][1]
    for limit, kind in ((2.5, "double"), (1.5, "ahead"), (1.05, "even")):
        methods = {name: {**one, "limit": limit} for name, one in problem["methods"].items()}
        cell = report.cells({**SUMMARY, "problems": [{**problem, "methods": methods}]})[0]
        assert report._kind(cell) == kind


@pytest.mark.parametrize(
    ("peer", "ours", "expected"), [(3.0, 2.0, 1.5), (0.0, 0.0, 1.0), (1.0, 0.0, math.inf), (1.0, math.inf, 0.0)]
)
def test_ratio_is_that_of_times_also_where_the_start_is_good_enough(peer, ours, expected):
    assert report._quotient(peer, ours) == expected


def test_ratio_table():
    assert report.ratio_table(SUMMARY).splitlines() == [
        "| data | l2 | 1e-1 | 1e-6 |",
        "|---|---|---|---|",
        "| digits | 1e-4 | 4.0 | **0.50** |",
        "| KMNIST | 1e-4 | > 2.5 | neither |",
    ]
    other = {**SUMMARY, "problems": [SUMMARY["problems"][0], {**SUMMARY["problems"][1], "l2": 1e-2}]}
    shown = report.tables(other)["ratios of one penalty"].splitlines()
    assert shown == report.ratio_table(SUMMARY).splitlines()[:3]


def test_cell_table():
    lines = report.cell_table(SUMMARY).splitlines()
    assert lines[2] == "| digits | 1e-4 | 1e-1 | KSPFB | 0.06 | 0.5 | optax Adam | 0.2 | 2 | 4.0 | 2 to 5 |"
    assert lines[4] == "| KMNIST | 1e-4 | 1e-1 | qbound LogisticRegression | 1 | 10 | - | - | - | > 2.5 |  |"


def test_count_table_counts_every_cell_once():
    lines = [line.strip("| ").split(" | ") for line in report.count_table(SUMMARY).splitlines()[2:]]
    assert lines == [
        ["digits", "2", "1", "0", "0", "1", "0"],
        ["KMNIST", "2", "1", "0", "0", "0", "1"],
        ["all", "4", "2", "0", "0", "1", "1"],
    ]


def test_method_table_keeps_divergences_failures_and_who_could_not_be_installed():
    lines = {line.split(" | ")[0].strip("| "): line for line in report.method_table(SUMMARY).splitlines()[2:]}
    assert len(lines) == len(CONTESTANTS)
    assert lines["optax Adam"] == "| optax Adam | 1 of 4 | 0 | 1 | 0 | 1.5 |"
    assert lines["KSPFB"] == "| KSPFB | 1 of 4 | 1 | 0 | 0 | 1.5 |"
    assert lines["somax EGN, corrected"] == "| somax EGN, corrected | 0 of 4 | 0 | 0 | 1 | 1.5 |"
    assert lines["cyanure"].startswith("| cyanure | not installed: pip install cyanure: no wheel |")
    assert lines["kfac-jax"].startswith("| kfac-jax | not run |")


def test_estimator_table_has_the_best_solver_of_scikit_learn():
    assert report.estimator_table(SUMMARY).splitlines()[2:] == ["| digits | 1e-4 | 0.1 / 0.4: 4 | 0.2 / 0.3: 1.5 |"]


def test_failures_are_listed_with_where_they_happened():
    assert report.failure_list(SUMMARY).splitlines() == [
        "- somax EGN, corrected: no answer in 150 s (KMNIST 1e-4)",
    ]


def test_machine_list_has_versions_and_changes():
    text = report.machine_list({**SUMMARY, "environment": {**SUMMARY["environment"], "dirty": True}})
    assert "- commit: abc, with changes" in text
    assert "- machine: EPYC, cpu, 2 cores, Linux" in text
    assert "- jax: jax==0.9.2" in text


def test_page_keeps_what_is_written_around_its_tables(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- ratios -->\nold\n<!-- end of ratios -->\nafter\n")
    report.fill(page, {"ratios": "| new |", "counts": "| nowhere |"})
    report.fill(page, {"ratios": "| newer |"})
    assert page.read_text() == "before\n<!-- ratios -->\n| newer |\n<!-- end of ratios -->\nafter\n"


def test_figures_are_drawn(tmp_path):
    for draw in (report.draw_profile, report.draw_curves):
        assert draw(SUMMARY, str(tmp_path / "figure.png")).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="l2: expected a penalty of the summary; got 0.5"):
        report.draw_curves(SUMMARY, str(tmp_path / "figure.png"), l2=0.5)
    assert set(report.LOOKS) == set(CONTESTANTS)
    assert len(set(report.LOOKS.values())) == len(CONTESTANTS)


def test_growth_is_measured_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "SWEEPS", {"labels": (2,), "examples": (8, 16)})
    monkeypatch.setattr(growth, "BASE", {"labels": 3, "inputs": 4, "examples": 16})
    # All methods with the fewest numbers, and with more of them only those that are soon compiled.
    ours = [name for name in growth.METHODS if "SPFB" in name]
    monkeypatch.setattr(growth, "MOST_NUMBERS", dict.fromkeys(ours, 8 * 4 * 3))
    found = json.loads(json.dumps(growth.sweep(0.0)))
    assert [row["size"] for row in found["examples"]] == [8, 16]
    for row in found["labels"] + found["examples"]:
        assert row["SGD"] == [1.0, 1.0, 1.0]
        measured = [name for name in growth.METHODS if row["size"] == 8 or name not in ours]
        assert list(row) == ["size", "sgd_seconds", *measured]
        assert all(0 < row[name][1] <= row[name][0] <= row[name][2] for name in measured)
    lines = growth.table(found).splitlines()
    assert lines[2].startswith("| 2 labels | ")
    assert [line.endswith("| - | - | - |") for line in lines[2:]] == [True, False, True]
    assert growth.draw(found, str(tmp_path / "growth.png")).read_bytes().startswith(b"\x89PNG")
