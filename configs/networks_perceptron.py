"""784-256-128-10 with ReLU on 60,000 images of KMNIST and of Fashion-MNIST, batches of 500, ten epochs.

Command: python -m experiments.networks perceptron [--peers] [--data-dir DIR]
Each method has 12 settings: six pairs of a learning rate and a variant, by two schedules.
Time: an hour on 2 cores, without peers.
"""

from experiments.networks.comparison import Comparison, Contender
from experiments.networks.methods import SCHEDULES, Method


def config() -> Comparison:
    """The settings of the comparison."""
    return Comparison(
        name="perceptron",
        network="perceptron",
        sizes=(256, 128),
        data_sets=("kmnist", "fashion_mnist"),
        rows=60000,
        evaluated=60000,
        batches=(500,),
        steps=(1200,),
        measure="train_loss",
        contenders=(
            Contender("AdamW", _each("adamw", "b2", 0.98, 0.999), (1e-3, 3e-3, 1e-2)),
            Contender("NadamW", _each("nadamw", "b2", 0.98, 0.999), (1e-3, 3e-3, 1e-2)),
            Contender("Muon", _each("muon", "adam_ratio", 0.05, 0.2), (0.01, 0.02, 0.05)),
            Contender("schedule-free AdamW", _each("schedule_free_adamw", "b1", 0.9, 0.95), (1e-3, 3e-3, 1e-2)),
            Contender("momentum SGD", (Method("momentum", momentum=0.9),), (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)),
            Contender("layerwise SPFB", _layerwise("bound"), (0.25, 0.5, 1.0)),
            Contender("layerwise Gauss-Newton", _layerwise("gauss_newton"), (0.25, 0.5, 1.0)),
            Contender("SPFB", _damped("spfb", 1e-3, 1e-2, 1e-1, max_steps=5), (0.3, 1.0)),
            Contender("kfac-jax", _damped("kfac", 1e-2, 1e-1, momentum=0.9), (0.01, 0.03, 0.1)),
            Contender("PSGD Kron", _each("psgd", "preconditioner_rate", 0.1, 0.3), (2e-3, 6e-3, 2e-2)),
        ),
        schedules=SCHEDULES,
        lengths=(0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1.0),
        tuned_at=(0.1, 0.35, 1.0),
        tuning_seed=0,
        seeds=(1, 2, 3),
    )


def _each(name, option, *values) -> tuple[Method, ...]:
    return tuple(Method(name, weight_decay=1e-4, **{option: value}) for value in values)


def _layerwise(curvature) -> tuple[Method, ...]:
    return _damped("layerwise_spfb", 0.1, 0.3, curvature=curvature)


def _damped(name, *dampings, **options) -> tuple[Method, ...]:
    return tuple(Method(name, damping=damping, **options) for damping in dampings)
