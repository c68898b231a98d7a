"""What all tests of experiments have in common."""

import jax
import pytest

from experiments import experiment, robustness
from tests.reproduction.tiny import tiny_data


@pytest.fixture(autouse=True)
def default_mode():
    """Experiments run in JAX's own mode: float32, and its promotion of dtypes and ranks."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def tiny(monkeypatch):
    """Every data set is a tiny one."""
    for module in (experiment, robustness):
        monkeypatch.setattr(module, "load", tiny_data)
