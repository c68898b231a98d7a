"""Quadratic bounds on partition functions, in JAX."""

from qbound.bounds import (
    bohning_bound,
    local_bound,
    log_partition_bound,
    partition_function_bound,
    second_order_expansion,
)
from qbound.curvature import Curvature
from qbound.quadratic import QuadraticBound

__version__ = "0.1.0"

__all__ = [
    "Curvature",
    "QuadraticBound",
    "bohning_bound",
    "local_bound",
    "log_partition_bound",
    "partition_function_bound",
    "second_order_expansion",
]
