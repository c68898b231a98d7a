"""Is the installed jaxlib one that compiles correctly? In a process of its own: the failure may be a crash."""

import importlib.metadata
from pathlib import Path

import pytest

from tests import processes

CANARY = Path(__file__).with_name("canary.py")


def verdict(program: str, returncode: int, version: str) -> str | None:
    """What is wrong with jaxlib, and what to do about it; None if nothing is."""
    if returncode == 0:
        return None
    what = f"crashes (signal {-returncode}) on" if returncode < 0 else "miscompiles"
    return (
        f"jaxlib {version} {what} the program {program!r} of tests/canary.py on this machine, so no result computed "
        f"with it can be trusted. Install a release that passes: pip install 'jax==0.9.2' 'jaxlib==0.9.2'."
    )


@pytest.mark.parametrize("program", ["product", "gather"])
def test_jaxlib_compiles_correctly(program):
    returncode = processes.run(str(CANARY), program, JAX_ENABLE_X64="0").returncode
    problem = verdict(program, returncode, importlib.metadata.version("jaxlib"))
    if problem:
        pytest.fail(problem)


def test_verdict_names_the_version_and_the_remedy():
    assert verdict("product", 0, "0.9.2") is None
    for returncode, word in ((1, "miscompiles"), (-11, "crashes (signal 11)")):
        message = verdict("gather", returncode, "0.10.2")
        assert message is not None
        for expected in ("jaxlib 0.10.2", word, "'gather'", "jax==0.9.2"):
            assert expected in message
