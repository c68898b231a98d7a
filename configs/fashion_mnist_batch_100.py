"""Fashion-MNIST in batches of 100: where the curvature of a batch biases its own step, and what mends it.

Command: python -m experiments.run configs/fashion_mnist_batch_100.py [--data-dir DIR]
Expected: with l2 = 0.0001, the objective above its least value of 0.3811, and the test error, at the end: SGD 1.2e-02
and 15.5%; SPFB, paper 9.3e-02 and 16.2%; SPFB, damped 1.3e-02 and 15.5%; SPFB, window 6.3e-02 and 16.2%.
Time: 5 minutes on 2 cores.
"""

from configs.common import small_batches
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return small_batches("fashion_mnist", 100)
