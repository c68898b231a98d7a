"""The table of networks is of networks: it has every candidate, and says when a limit is exceeded."""

import dataclasses

import pytest

from experiments.benchmarks import networks
from experiments.networks.models import Network

SMALL = [
    (Network("perceptron", (5,)), 16, 3),
    (Network("convolutional", (2, 3, 4)), 16, 3),
    (Network("transformer", (1, 8, 2, 4)), 4, 256),
]


@pytest.fixture
def small(monkeypatch):
    """The same cases with networks of a moment."""
    cases = [
        dataclasses.replace(case, network=network, examples=6, width=width, classes=classes, limits={})
        for case, (network, width, classes) in zip(networks.CASES, SMALL, strict=True)
    ]
    monkeypatch.setattr(networks, "CASES", cases)
    return cases


def test_cases_have_limits_for_candidates():
    for case in networks.CASES:
        assert set(case.limits) <= {networks.RUNNING, *networks.candidates(case.network)}


def test_command_prints_a_row_for_each_candidate(small, capsys):
    assert networks.main(["--budget", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("SGD steps") == len(small)
    for name in ("SGD  ", "adam", "spfb, 5 iterations", "spfb, 10 iterations", networks.RUNNING):
        assert printed.count(f"  {name}") == len(small), name
    assert "every limit kept" in printed


def test_exceeded_limit_is_the_exit_code(small, monkeypatch, capsys):
    monkeypatch.setattr(networks, "CASES", [dataclasses.replace(small[0], limits={"adam": 1e-6})])
    assert networks.main(["--budget", "0"]) == 1
    assert "EXCEEDED" in capsys.readouterr().out
