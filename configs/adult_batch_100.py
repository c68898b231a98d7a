"""Adult in batches of 100: where the curvature of a batch biases its own step, and what mends it.

Command: python -m experiments.run configs/adult_batch_100.py [--data-dir DIR]
Expected: with l2 = 0.001, the objective above its least value of 0.3462, and the test error, at the end: SGD 2.7e-06
and 15.8%; SPFB, paper 1.8e-04 and 15.8%; SPFB, damped 1.2e-03 and 15.9%; SPFB, window 4.9e-05 and 15.8%.
Time: 1 minutes on 2 cores.
"""

from configs.common import small_batches
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return small_batches("adult", 100)
