"""784-256-128-10 with ReLU on 60,000 images of KMNIST and of Fashion-MNIST, batches of 500, ten epochs.

Command: python -m experiments.networks perceptron [--peers] [--data-dir DIR]
Each method has 8 settings: four pairs of a learning rate and a variant, by two schedules. SPFB, whose steps cost as
much as a dozen of AdamW's, has a quarter of the steps.
Time, estimated: 20 minutes on 2 cores without peers, and an hour with them.
"""

from experiments.networks.comparison import Comparison, Contender
from experiments.networks.methods import SCHEDULES, Method

# Each of their runs is a process of its own, which compiles for itself.
PEERS = (0.25, 0.5, 1.0)


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
            Contender("AdamW", _adam("adamw"), (1e-3, 2e-3, 4e-3, 8e-3)),
            Contender("NadamW", _adam("nadamw"), (1e-3, 2e-3, 4e-3, 8e-3)),
            Contender("Muon", tuple(Method("muon", adam_ratio=ratio) for ratio in (0.05, 0.2)), (0.02, 0.05)),
            Contender("schedule-free AdamW", _adam("schedule_free_adamw"), (1e-3, 3e-3, 6e-3, 1.2e-2)),
            Contender("momentum SGD", (Method("momentum", momentum=0.9),), (0.05, 0.1, 0.2, 0.5)),
            Contender("layerwise SPFB", _layerwise("bound"), (0.5, 1.0)),
            Contender("layerwise Gauss-Newton", _layerwise("gauss_newton"), (0.5, 1.0)),
            Contender("SPFB", _damped("spfb", 1e-3, 1e-2, max_steps=5), (0.3, 1.0), lengths=(0.25,)),
            Contender("kfac-jax", _damped("kfac", 1e-2, 1e-1, momentum=0.9), (0.01, 0.03), lengths=PEERS),
            Contender("PSGD Kron", (Method("psgd", weight_decay=1e-4),), (1e-3, 3e-3, 1e-2, 3e-2), lengths=PEERS),
        ),
        schedules=SCHEDULES,
        lengths=(0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.35, 0.45, 0.55, 0.7, 1.0),
        tuned_at=(0.12, 0.45, 1.0),
        tuning_seed=0,
        seeds=(1, 2, 3),
    )


def _adam(name) -> tuple[Method, ...]:
    return (Method(name, b2=0.98, weight_decay=1e-4),)


def _layerwise(curvature) -> tuple[Method, ...]:
    return _damped("layerwise_spfb", 0.3, 1.0, curvature=curvature)


def _damped(name, *dampings, **options) -> tuple[Method, ...]:
    return tuple(Method(name, damping=damping, **options) for damping in dampings)
