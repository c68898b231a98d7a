"""Fashion-MNIST in batches of 10: where the curvature of a batch biases its own step, and what mends it.

Command: python -m experiments.run configs/fashion_mnist_batch_10.py [--data-dir DIR]
Expected: with l2 = 0.0001, the objective above its least value of 0.3811, and the test error, at the end: SGD 2.1e-03
and 15.4%; SPFB, paper 1.2e+00 and 43.1%; SPFB, damped 9.1e-01 and 20.0%; SPFB, window 4.2e-01 and 22.5%.
Time: 5 minutes on 2 cores.
"""

from configs.common import small_batches
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return small_batches("fashion_mnist", 10)
