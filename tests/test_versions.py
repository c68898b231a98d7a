"""Which Pythons and which versions the tests are run with."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import interpreters, lowest

PYTHONS = [((3, 11, 7), "a"), ((3, 13, 0), "b"), ((3, 13, 2), "c"), ((3, 12, 1), "d")]


@pytest.mark.parametrize(
    ("which", "running", "expected"),
    [
        ("oldest", (3, 12), "a"),
        ("newest", (3, 11), "c"),
        ("newest", (3, 13), "c"),
        ("newer", (3, 11), "c"),
        ("newer", (3, 13), None),
    ],
)
def test_python_is_picked_by_its_version(monkeypatch, which, running, expected):
    monkeypatch.setattr(sys, "version_info", (*running, 0, "final", 0))
    assert interpreters.pick(which, PYTHONS) == expected
    assert interpreters.pick(which, []) is None


def test_python_that_runs_is_one_that_is_found():
    assert interpreters.version(sys.executable) == sys.version_info[:3]
    assert interpreters.version("/none/such") is None


def test_missing_python_is_said_plainly(tmp_path):
    """With an empty PATH and no pyenv."""
    command = [sys.executable, interpreters.__file__, "newest"]
    run = subprocess.run(
        command, env={"PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert run.stdout == ""
    assert run.stderr.startswith("NOT TESTED: no Python of at least 3.11")


def test_lowest_versions_are_those_declared():
    assert list(lowest.lowest(["jax>=0.9,!=0.10.*", "qbound[sklearn]", "scikit-learn>=1.7,<1.10"])) == [
        "jax==0.9",
        "scikit-learn==1.7",
    ]
    with pytest.raises(AssertionError, match="no lower limit"):
        list(lowest.lowest(["jax"]))


def test_every_requirement_has_a_lower_limit():
    """And the same one wherever it is named, else pip could not install the lowest."""
    printed = subprocess.run(
        [sys.executable, str(Path(lowest.__file__))], capture_output=True, text=True, check=True
    ).stdout.split()
    names = [constraint.partition("==")[0] for constraint in printed]
    assert len(names) == len(set(names))
    assert {"jax", "jaxlib", "optax", "numpy", "scikit-learn", "pytest", "hatchling"} <= set(names)
