"""The paper's comparison on Fashion-MNIST, and what goes beyond it.

Command: python -m experiments.run configs/fashion_mnist.py [--data-dir DIR]
Expected: with l2 = 0.0001, the objective above its least value of 0.3811, and the test error, at the end: SGD 2.8e-02
and 15.7%; SPFB 3.9e-02 and 15.9%; LSPFB k=10, paper 9.4e-01 and 34.9%; LSPFB k=10, tight 7.1e-02 and 16.7%; KSPFB
1.5e-03 and 15.5%; Adam 8.2e-04 and 15.4%.
Time: 14 minutes on 2 cores.
"""

from configs.common import images
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return images("fashion_mnist")
