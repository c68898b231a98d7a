"""The table of streams is of streams: random and sorted, of every kind of data, below the zero model."""

import numpy as np
import pytest
import scipy.sparse

from experiments.benchmarks import streams

SMALL = {
    "dense": lambda: streams.dense(400, 30),
    "zipf": lambda: streams.zipf(400, 30),
    "tfidf": lambda: streams.tfidf(400, 300),
}


@pytest.mark.parametrize("kind", SMALL)
def test_data_are_what_they_are_called(kind):
    x, labels = SMALL[kind]()
    assert x.dtype == np.float32 and len(labels) == 400 and len(set(labels)) in (4, 20)
    assert scipy.sparse.issparse(x) == (kind == "tfidf")
    if kind == "dense":
        np.testing.assert_allclose([x.mean(), x.var()], [2, 1], atol=0.05)
    else:
        used = np.asarray((x != 0).mean(axis=0)).ravel()
        assert used[0] > 5 * used[-1]


def test_command_prints_a_row_for_each_order(monkeypatch, capsys):
    monkeypatch.setattr(streams, "DATA", {"small": SMALL["zipf"]})
    monkeypatch.setattr(streams, "PART", 100)
    streams.main(["--penalty", "20"])
    _, _, *rows = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:3] for row in cells] == [["small", "random", "1.39"], ["small", "by label", "1.39"]]
    for *_, last, excess in cells:
        assert 0.1 < float(last) < 1.39
        assert -0.1 < float(excess.split(" %")[0]) < 20
