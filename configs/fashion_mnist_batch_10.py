"""Fashion-MNIST in batches of 10: where the curvature of a batch biases its own step, and what mends it.

Command: python -m experiments.run configs/fashion_mnist_batch_10.py [--data-dir DIR]
"""

from configs.common import small_batches
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return small_batches("fashion_mnist", 10)
