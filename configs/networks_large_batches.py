"""Steps and seconds of the perceptron on Fashion-MNIST to a training loss of 0.3, with batches of 125 to 16,000.

Command: python -m experiments.networks large_batches [--data-dir DIR]
Each method has 8 settings: four pairs of a learning rate and a variant, by two schedules. The steps of the longest runs
are about twice what AdamW needs.
Time, estimated: half an hour on 2 cores.
"""

from experiments.networks.comparison import Comparison, Contender
from experiments.networks.methods import SCHEDULES, Method


def config() -> Comparison:
    """The settings of the comparison."""
    return Comparison(
        name="large_batches",
        network="perceptron",
        sizes=(256, 128),
        data_sets=("fashion_mnist",),
        rows=60000,
        evaluated=60000,
        batches=(125, 500, 1000, 4000, 16000),
        steps=(1600, 700, 450, 300, 240),
        measure="train_loss",
        level=0.3,
        contenders=(
            Contender("AdamW", (Method("adamw", weight_decay=1e-4),), (1e-3, 3e-3, 6e-3, 1.2e-2)),
            Contender("Muon", tuple(Method("muon", adam_ratio=ratio) for ratio in (0.05, 0.2)), (0.02, 0.05)),
            Contender("momentum SGD", (Method("momentum", momentum=0.9),), (0.05, 0.1, 0.2, 0.5)),
            Contender("layerwise SPFB", _layerwise("bound"), (0.5, 1.0)),
            Contender("layerwise Gauss-Newton", _layerwise("gauss_newton"), (0.5, 1.0)),
        ),
        schedules=SCHEDULES,
        lengths=(0.04, 0.05, 0.06, 0.07, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.35, 0.5, 0.7, 0.85, 1.0),
        tuned_at=(0.08, 0.35, 0.85, 1.0),
        tuning_seed=0,
        seeds=(1, 2, 3),
        turns=5,
    )


def _layerwise(curvature) -> tuple[Method, ...]:
    return _damped("layerwise_spfb", 0.3, 1.0, curvature=curvature)


def _damped(name, *dampings, **options) -> tuple[Method, ...]:
    return tuple(Method(name, damping=damping, **options) for damping in dampings)
