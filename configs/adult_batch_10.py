"""Adult in batches of 10: where the curvature of a batch biases its own step, and what mends it.

Command: python -m experiments.run configs/adult_batch_10.py [--data-dir DIR]
Expected: with l2 = 0.0001, the objective above its least value of 0.3438, and the test error, at the end: SGD 2.3e-06
and 15.8%; SPFB, paper 5.6e-02 and 17.7%; SPFB, damped 1.8e-03 and 15.9%; SPFB, window 3.4e-04 and 15.7%.
Time: 2 minutes on 2 cores.
"""

from configs.common import small_batches
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return small_batches("adult", 10)
