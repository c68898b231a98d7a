"""The objective after two epochs against the learning rate, for learning rates from 0.001 to 100.

Command: python -m experiments.robustness [--data-dir DIR]
Expected: SPFB and LSPFB are safe for all rates up to 1; the exact Hessian breaks down at 1 on images.
Time: 4 minutes on 2 cores.
"""

from experiments.methods import Method
from experiments.robustness import Entrant, Robustness


def config() -> Robustness:
    """The settings of the picture."""
    return Robustness(
        data_sets=("adult", "kmnist", "fashion_mnist"),
        entrants=(
            Entrant("SGD", Method("sgd"), 10),
            Entrant("Adam", Method("adam"), 10),
            Entrant("SPFB", Method("spfb"), 10),
            Entrant("LSPFB k=10", Method("lspfb", rank=10), 10),
            Entrant("exact Hessian", Method("newton"), 10),
        ),
        learning_rates=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
        l2=1e-4,
        batch=1000,
        epochs=2,
        seconds=20.0,
    )
