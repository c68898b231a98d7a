"""KMNIST in batches of 100: where the curvature of a batch biases its own step, and what mends it.

Command: python -m experiments.run configs/kmnist_batch_100.py [--data-dir DIR]
Expected: with l2 = 0.0001, the objective above its least value of 0.5378, and the test error, at the end: SGD 1.5e-03
and 29.9%; SPFB, paper 1.4e+01 and 38.1%; SPFB, damped 3.6e+00 and 34.0%; SPFB, window 1.1e-01 and 31.3%.
Time: 5 minutes on 2 cores.
"""

from configs.common import small_batches
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return small_batches("kmnist", 100)
