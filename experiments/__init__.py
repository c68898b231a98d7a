"""Experiments with the library: run as modules from the root of the project."""

import os

# Before NumPy or JAX start: more OpenBLAS threads than free cores make eigendecompositions many times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

try:
    from qbound import compiler
except ImportError:  # in the environment of a peer
    pass
else:
    compiler.repair_process()
