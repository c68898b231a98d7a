"""The paper's comparison on KMNIST, and what goes beyond it.

Command: python -m experiments.run configs/kmnist.py [--data-dir DIR]
"""

from configs.common import images
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return images("kmnist")
