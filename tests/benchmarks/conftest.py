"""Benchmarks run in JAX's own mode, as the tests of experiments do."""

from tests.reproduction.conftest import default_mode

__all__ = ["default_mode"]
