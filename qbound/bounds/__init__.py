"""From a log-partition function to a quadratic that stands for it."""

from qbound.bounds.classical import bohning_bound, local_bound, second_order_expansion
from qbound.bounds.softmax import log_partition_bound, partition_function_bound

__all__ = [
    "bohning_bound",
    "local_bound",
    "log_partition_bound",
    "partition_function_bound",
    "second_order_expansion",
]
