"""Two convolutions and two dense layers on 20,000 images of KMNIST and of Fashion-MNIST, batches of 500, ten epochs.

3 x 3 x 16, ReLU, 2 x 2 largest, 3 x 3 x 32, ReLU, 2 x 2 largest, 1568-64 ReLU, 10.

Command: python -m experiments.networks convolutional [--peers] [--data-dir DIR]
Each method has 6 settings: three learning rates, by two schedules. SPFB, whose steps cost as much as ten of AdamW's,
has a tenth of the steps.
Time, estimated: 1.5 hours on 2 cores, without peers.
"""

from experiments.networks.comparison import Comparison, Contender
from experiments.networks.methods import SCHEDULES, Method

# Each of their runs is a process of its own, which compiles for itself.
PEERS = (0.5, 1.0)


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
            Contender("AdamW", _adam("adamw"), (2e-3, 4e-3, 8e-3)),
            Contender("Muon", (Method("muon", adam_ratio=0.2, weight_decay=1e-4),), (0.01, 0.02, 0.04)),
            Contender("schedule-free AdamW", _adam("schedule_free_adamw"), (3e-3, 6e-3, 1.2e-2)),
            Contender("layerwise SPFB", _layerwise("bound"), (0.5, 0.7, 1.0)),
            Contender("layerwise Gauss-Newton", _layerwise("gauss_newton"), (0.5, 0.7, 1.0)),
            Contender("NadamW", _adam("nadamw"), (2e-3, 4e-3, 8e-3)),
            Contender("SPFB", (Method("spfb", damping=1e-2, max_steps=5),), (0.1, 0.3, 1.0), lengths=(0.1,)),
            Contender("kfac-jax", (Method("kfac", damping=1e-2, momentum=0.9),), (0.01, 0.03, 0.1), lengths=PEERS),
            Contender("PSGD Kron", (Method("psgd", weight_decay=1e-4),), (2e-3, 6e-3, 2e-2), lengths=PEERS),
        ),
        schedules=SCHEDULES,
        lengths=(0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.7, 1.0),
        tuned_at=(0.3, 1.0),
        tuning_seed=0,
        seeds=(1, 2, 3),
        turns=3,
    )


def _adam(name) -> tuple[Method, ...]:
    return (Method(name, b2=0.98, weight_decay=1e-4),)


def _layerwise(curvature) -> tuple[Method, ...]:
    return (Method("layerwise_spfb", curvature=curvature),)
