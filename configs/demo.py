"""The training of `make demo`: SGD against SPFB on scikit-learn's digits.

Command: python -m experiments.demo
Time: under a minute on 2 cores, most of it compilation.
"""

from experiments.demo import DemoConfig


def config() -> DemoConfig:
    """The settings of the demonstration."""
    return DemoConfig(
        train=1500,
        batch=100,
        epochs=20,
        l2=1e-3,
        half_life=5.0,
        sgd_rates=(0.1, 0.3, 1.0, 3.0, 10.0),
        window=1000,
        seed=0,
        output="results/demo.png",
    )
