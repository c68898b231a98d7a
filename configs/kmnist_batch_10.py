"""KMNIST in batches of 10: where the curvature of a batch biases its own step, and what mends it.

Command: python -m experiments.run configs/kmnist_batch_10.py [--data-dir DIR]
Expected: with l2 = 0.0001, the objective above its least value of 0.5378, and the test error, at the end: SGD 1.5e-03
and 29.9%; SPFB, paper 1.5e+00 and 58.4%; SPFB, damped 2.5e-01 and 34.1%; SPFB, window 3.7e-01 and 37.0%.
Time: 5 minutes on 2 cores.
"""

from configs.common import small_batches
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return small_batches("kmnist", 10)
