"""The paper's comparison on Fashion-MNIST, and what goes beyond it.

Command: python -m experiments.run configs/fashion_mnist.py [--data-dir DIR]
"""

from configs.common import images
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return images("fashion_mnist")
