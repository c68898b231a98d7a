"""The paper's comparison on KMNIST, and what goes beyond it.

Command: python -m experiments.run configs/kmnist.py [--data-dir DIR]
Expected: with l2 = 0.0001, the objective above its least value of 0.5378, and the test error, at the end: SGD 8.3e-03
and 29.8%; SPFB 1.4e-02 and 30.6%; LSPFB k=10, paper 3.5e-01 and 42.7%; LSPFB k=10, tight 5.2e-02 and 30.6%; KSPFB
2.4e-04 and 30.0%; Adam 1.0e-03 and 30.0%.
Time: 14 minutes on 2 cores.
"""

from configs.common import images
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return images("kmnist")
