"""The paper's comparison on Adult, 14 columns of ordinal codes, and what goes beyond it.

Command: python -m experiments.run configs/adult.py [--data-dir DIR]
"""

from configs.common import adult
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return adult("adult")
