"""Tables and pictures of comparisons, from files with numbers that are known."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import report, reproduce

METRICS = """\
{"step": 0, "epoch": 0.0, "objective": 2.0, "test_error": 0.9}
{"step": 10, "epoch": 0.5, "objective": 1.0, "test_error": 0.5}
{"step": 20, "epoch": 1.0, "objective": %s, "test_error": 0.25}
"""
TIMING = """\
{"step": 0, "seconds": 0.0}
{"step": 10, "seconds": 0.1}
{"step": 20, "seconds": %s}
"""


def _run(folder: Path, last: str, seconds: float, ended="finished", dirty=False, metrics=METRICS, timing=TIMING):
    folder.mkdir(parents=True)
    text = metrics % last if "%s" in metrics else metrics
    (folder / "metrics.jsonl").write_text(text.replace("0.25}", "null}") if last == "null" else text)
    (folder / "timing.jsonl").write_text(timing % seconds if "%s" in timing else timing)
    (folder / "environment.json").write_text(json.dumps([{"commit": "0123456789abcdef", "dirty": dirty}]))
    (folder / "result.json").write_text(json.dumps({"ended": ended, "step": 20, "seconds": seconds, "metrics": {}}))


def _summary(folder: Path, runs: dict[str, list[str]], select="validation") -> report.Summary:
    setting = {"learning_rate": 0.5, "schedule": "cosine", "l2": 1e-3, "damping": 0.0}
    content = {
        "experiment": {
            "data_set": "kmnist",
            "batch": 1000,
            "select": select,
            "seeds": 3,
            "contenders": [
                {"label": label, "learning_rates": [0.5, 2.0] if label == "SPFB" else [0.1, 0.5, 2.0]} for label in runs
            ],
        },
        "l2": 1e-3,
        "least_objective": 0.25,
        "chosen": dict.fromkeys(runs, setting),
        "tuning_steps": dict.fromkeys(runs, 4),
        "runs": runs,
    }
    (folder / "summary.json").write_text(json.dumps(content))
    return report.read_summary(folder / "summary.json")


@pytest.fixture
def summary(tmp_path):
    """SGD ends at 0.5, in the median; SPFB below that; LSPFB was stopped after its first record; one diverged."""
    for seed, (last, seconds) in enumerate([("0.5", 0.2), ("0.75", 0.3), ("0.375", 0.4)]):
        _run(tmp_path / f"sgd{seed}", last, seconds)
    for seed in range(3):
        _run(tmp_path / f"spfb{seed}", "0.3125", 2.0)
    short = "\n".join(METRICS.splitlines()[:2]) + "\n", "\n".join(TIMING.splitlines()[:2]) + "\n"
    _run(tmp_path / "slow", "", 0.1, "budget", metrics=short[0], timing=short[1])
    _run(tmp_path / "wild", "null", 0.1, "diverged")
    runs = {
        "SGD": ["sgd0", "sgd1", "sgd2"],
        "SPFB": ["spfb0", "spfb1", "spfb2"],
        "LSPFB k=100, paper": ["slow"],
        "momentum SGD": ["wild"],
    }
    return _summary(tmp_path, runs)


def _rows(text: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells}


def test_table_says_who_reached_what_and_when(summary):
    rows = _rows(report.table(summary))
    assert {len(row) for row in rows.values()} == {15}
    usual = ["0.5, cosine", "0", "4"]
    assert rows["SGD"] == [
        *usual, "3", "1", "0.3", "epochs", "0.25", "0.25", "1", "0.4", "1", "0.4", "25.00%", "0",
    ]  # fmt: skip
    assert rows["SPFB"] == [
        "0.5*, cosine", "0", "4", "3", "1", "2", "epochs", "0.062", "0.062", "1", "2", "1", "2", "25.00%", "0",
    ]  # fmt: skip
    assert rows["LSPFB k=100, paper"] == [
        *usual, "1", "0.5", "0.1", "budget", "0.75", "0.75", "never", "never", "0.5", "0.1", "50.00%", "0",
    ]  # fmt: skip
    assert rows["momentum SGD"][6:9] == ["diverged", "nan", "0.75"]
    assert rows["momentum SGD"][-2:] == ["nan%", "1"]


def test_level_is_reached_by_who_is_within_a_thousandth_of_it(tmp_path):
    for name, last in (("a", "0.5"), ("b", "0.5004"), ("c", "0.5006")):
        _run(tmp_path / name, last, 0.2)
    rows = _rows(report.table(_summary(tmp_path, {"SGD": ["a"], "SPFB": ["b"], "Adam": ["c"]})))
    assert [rows[name][9] for name in ("SGD", "SPFB", "Adam")] == ["1", "1", "never"]


def test_level_is_reached_in_the_median_or_never(summary):
    sgd = summary.curves["SGD"]
    assert sgd.best() == 0.5
    assert sgd.first_below(1.0) == (0.5, 0.1)
    assert sgd.first_below(0.5) == (1.0, 0.4)
    assert sgd.first_below(0.4) is None
    assert sgd.first_below(0.8) == (1.0, 0.3)


def test_curves_of_different_lengths_are_compared_as_far_as_all_go(tmp_path):
    _run(tmp_path / "a", "0.5", 0.2)
    longer = METRICS.splitlines()[:2] + ['{"step": 30, "epoch": 1.5, "objective": 0.5, "test_error": 0.2}']
    times = TIMING.splitlines()[:2] + ['{"step": 30, "seconds": 0.3}']
    _run(tmp_path / "b", "", 0.2, metrics="\n".join(longer), timing="\n".join(times))
    curve = _summary(tmp_path, {"SGD": ["a", "b"]}).curves["SGD"]
    assert curve.common() == [0, 10, 20]
    np.testing.assert_allclose(curve.column("objective"), [[2, 1, 0.5], [2, 1, 0.75]])
    np.testing.assert_allclose(curve.column("seconds"), [[0, 0.1, 0.2], [0, 0.1, 0.2]])


def test_picture_has_a_row_of_four_panels_and_marks_how_curves_ended(summary, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(report, "save", lambda figure, output: seen.update(figure=figure, output=output))
    report.draw_summaries(
        [summary, summary], tmp_path / "a.png", ["SPFB", "SGD", "LSPFB k=100, paper", "momentum SGD", "Adam"]
    )
    figure = seen["figure"]
    assert len(figure.axes) == 8
    first = figure.axes[0]
    assert first.get_title(loc="left") == "KMNIST, batches of 1,000, l2 = 0.001"
    sgd = next(line for line in first.lines if line.get_color() == "black" and line.get_linestyle() == "-")
    np.testing.assert_allclose(sgd.get_xdata(), [0.5, 1.0])
    np.testing.assert_allclose(sgd.get_ydata(), [0.75, 0.25])
    bands = [band.get_paths()[0].get_extents() for band in first.collections]
    assert any(np.allclose((band.y0, band.y1), (0.125, 0.75)) for band in bands)
    markers = [line.get_marker() for line in first.lines]
    assert markers.count("s") == 2  # one in the panel, one for the legend
    (mark,) = [line for line in first.lines if line.get_marker() == "X" and len(line.get_xdata())]
    np.testing.assert_allclose([*mark.get_xdata(), *mark.get_ydata()], [0.5, 0.75])  # at the last number it had
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names[:3] == ["SPFB", "SGD", "LSPFB k=100, paper"] and "momentum SGD" in names and "Adam" not in names
    assert "ended by its budget of seconds" in names
    assert "chosen on validation rows" in figure.get_suptitle() and "revision 012345678" in figure.get_suptitle()


def test_picture_says_when_settings_were_chosen_on_test_rows_or_files_were_not_committed(tmp_path, monkeypatch):
    _run(tmp_path / "a", "0.5", 0.2, dirty=True)
    seen = {}
    monkeypatch.setattr(report, "save", lambda figure, output: seen.update(figure=figure))
    report.draw_summaries([_summary(tmp_path, {"SGD": ["a"]}, select="test")], tmp_path / "a.png")
    title = seen["figure"].get_suptitle()
    assert "chosen on TEST rows" in title
    assert "revision 012345678+ (+: with uncommitted changes)" in title


def test_picture_is_saved(summary, tmp_path):
    path = report.draw_summaries([summary], tmp_path / "made" / "curves.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_no_two_methods_of_a_picture_look_the_same():
    small = ("SGD", "SPFB, paper", "SPFB, damped", "SPFB, window")
    for labels in (reproduce.PAPER, reproduce.BEYOND, small):
        assert len({(report.LOOKS[label].color, str(report.LOOKS[label].style)) for label in labels}) == len(labels)
