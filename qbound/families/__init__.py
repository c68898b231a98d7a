"""From logits to a quadratic that stands for their log-partition function: the second of the two seams."""

from qbound.families.classical import bohning_bound, local_bound, second_order_expansion
from qbound.families.softmax import log_partition_bound, partition_function_bound

__all__ = [
    "bohning_bound",
    "local_bound",
    "log_partition_bound",
    "partition_function_bound",
    "second_order_expansion",
]
