"""The comparison on Adult with a column for each category: 108 of them.

Command: python -m experiments.run configs/adult_one_hot.py [--data-dir DIR]
"""

from configs.common import adult
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return adult("adult_one_hot")
