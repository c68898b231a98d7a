"""The paper's comparison on Adult, 14 columns of ordinal codes, and what goes beyond it.

Command: python -m experiments.run configs/adult.py [--data-dir DIR]
Expected: with l2 = 0.001, the objective above its least value of 0.3462, and the test error, at the end: SGD 1.1e-06
and 15.8%; SPFB 2.2e-06 and 15.8%; LSPFB k=10, paper 8.0e-06 and 15.8%; LSPFB k=10, tight 1.7e-06 and 15.8%; KSPFB
1.8e-06 and 15.8%; Adam 5.6e-06 and 15.8%.
Time: 8 minutes on 2 cores.
"""

from configs.common import adult
from experiments.experiment import Experiment


def config() -> Experiment:
    """The settings of the comparison."""
    return adult("adult")
