"""Strict JAX, quick to compile, and property tests that draw the same examples every time."""

import gc
import os
import pathlib

import hypothesis
import jax
import jaxtyping
import pytest

from tests.processes import QUICK_FLAGS, REPAIRING_FLAGS

# The suite compiles thousands of small programs and runs each a few times, so the compiler is asked for little: else it
# would take more than half of the time. The README, tests/default_mode.py and the canary have programs as users have
# them, and `make unit OPTIMIZED=1` all of them.
flags = [os.environ.get("XLA_FLAGS", ""), *REPAIRING_FLAGS]
if not os.environ.get("OPTIMIZED"):
    jax.config.update("jax_disable_most_optimizations", True)
    flags += QUICK_FLAGS
os.environ["XLA_FLAGS"] = " ".join(flags)

# Tracing makes many objects and few cycles: looking for those at every turn is a tenth of the time.
gc.set_threshold(200_000, 20, 100)

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

hypothesis.settings.register_profile(
    "deterministic",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("deterministic")


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Every compiled program has maps of its own, and Linux allows a process 65,530 of them: then it is killed."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 45_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def without_type_checks():
    """Call the package as users do: its own errors, not those of the run-time type checker that tests switch on."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
