"""Two convolutions and two dense layers on 20,000 images of KMNIST and of Fashion-MNIST, batches of 500, ten epochs.

3 x 3 x 16, ReLU, 2 x 2 largest, 3 x 3 x 32, ReLU, 2 x 2 largest, 1568-64 ReLU, 10.

Command: python -m experiments.networks convolutional [--peers] [--data-dir DIR]
Each method has 8 settings: four pairs of a learning rate and a variant, by two schedules. A step of SPFB takes as long
as some fifty of AdamW, because CG is a loop in one program: it has a twentieth of the steps.
Time: 5 hours on 2 cores, without peers.
"""

from experiments.networks.comparison import Comparison, Contender
from experiments.networks.methods import SCHEDULES, Method


def config() -> Comparison:
    """The settings of the comparison."""
    return Comparison(
        name="convolutional",
        network="convolutional",
        sizes=(16, 32, 64),
        data_sets=("kmnist", "fashion_mnist"),
        rows=20000,
        evaluated=20000,
        batches=(500,),
        steps=(400,),
        measure="train_loss",
        contenders=(
            Contender("AdamW", _adam("adamw"), (1e-3, 2e-3, 5e-3, 1e-2)),
            Contender("NadamW", _adam("nadamw"), (1e-3, 2e-3, 5e-3, 1e-2)),
            Contender("Muon", (_muon(0.05), _muon(0.2)), (0.01, 0.03)),
            Contender("schedule-free AdamW", _adam("schedule_free_adamw"), (2e-3, 5e-3, 1e-2, 2e-2)),
            Contender("momentum SGD", (Method("momentum", momentum=0.9),), (0.02, 0.05, 0.1, 0.2)),
            Contender("layerwise SPFB", _layerwise("bound"), (0.5, 1.0)),
            Contender("layerwise Gauss-Newton", _layerwise("gauss_newton"), (0.5, 1.0)),
            Contender("SPFB", _damped("spfb", 1e-3, 1e-2, max_steps=5), (0.3, 1.0), lengths=(0.05,)),
            Contender("kfac-jax", _damped("kfac", 1e-2, 1e-1, momentum=0.9), (0.01, 0.03)),
            Contender("PSGD Kron", (Method("psgd", weight_decay=1e-4),), (1e-3, 3e-3, 1e-2, 3e-2)),
        ),
        schedules=SCHEDULES,
        lengths=(0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1.0),
        tuned_at=(0.25, 1.0),
        tuning_seed=0,
        seeds=(1, 2, 3),
        turns=3,
    )


def _adam(name) -> tuple[Method, ...]:
    return (Method(name, weight_decay=1e-4),)


def _muon(ratio: float) -> Method:
    return Method("muon", adam_ratio=ratio, weight_decay=1e-4)


def _layerwise(curvature) -> tuple[Method, ...]:
    return _damped("layerwise_spfb", 0.1, 0.3, curvature=curvature)


def _damped(name, *dampings, **options) -> tuple[Method, ...]:
    return tuple(Method(name, damping=damping, **options) for damping in dampings)
