"""SGD, SPFB and KSPFB on scikit-learn's digits: a comparison that needs no download.

Command: python -m experiments.run configs/digits.py
Expected: SGD ends 0.002 above the least objective, SPFB 0.02, SPFB with a window 0.0001, KSPFB 0.0008.
Time: half a minute on 2 cores.
"""

from experiments.experiment import Contender, Experiment
from experiments.methods import Method


def config() -> Experiment:
    """The settings of the comparison."""
    usual = {"epochs": 30, "chunk": 5}
    return Experiment(
        name="digits",
        data_set="digits",
        batch=100,
        contenders=(
            Contender("SGD", Method("sgd"), (0.1, 0.3, 1.0, 3.0), **usual),
            Contender("SPFB", Method("spfb"), (1.0, 2.0), dampings=(0.0, 1e-2), **usual),
            Contender("SPFB, window", Method("spfb", window=1000), (1.0, 2.0), dampings=(0.0, 1e-2), **usual),
            Contender("KSPFB", Method("kspfb"), (1.0, 2.0), dampings=(1.0, 2.0), **usual),
        ),
        schedules=("inverse", "cosine"),
        l2=(1e-3, 1e-2),
        tuning_share=1 / 6,
        tuning_seconds=10.0,
        seconds=20.0,
        seeds=5,
    )
