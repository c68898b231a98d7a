"""The training loss of the perceptron after two epochs of Fashion-MNIST, for learning rates from 0.0001 to 10.

First weights are 0.1, 1 and 10 times those of He; nothing is tuned.

Command: python -m experiments.networks rates [--peers] [--data-dir DIR]
Time: half an hour on 2 cores, without peers.
"""

from experiments.networks.methods import Method
from experiments.networks.rates import Entrant, Rates


def config() -> Rates:
    """The settings of the picture."""
    return Rates(
        name="rates",
        network="perceptron",
        sizes=(256, 128),
        data_set="fashion_mnist",
        rows=60000,
        evaluated=20000,
        batch=500,
        steps=240,
        schedule="constant",
        entrants=(
            Entrant("AdamW", Method("adamw", weight_decay=1e-4)),
            Entrant("NadamW", Method("nadamw", weight_decay=1e-4)),
            Entrant("Muon", Method("muon", adam_ratio=0.15)),
            Entrant("schedule-free AdamW", Method("schedule_free_adamw", weight_decay=1e-4)),
            Entrant("momentum SGD", Method("momentum", momentum=0.9)),
            Entrant("layerwise SPFB", Method("layerwise_spfb", curvature="bound")),
            Entrant("layerwise Gauss-Newton", Method("layerwise_spfb", curvature="gauss_newton")),
            Entrant("SPFB", Method("spfb", max_steps=5, damping=1e-2)),
            Entrant("kfac-jax", Method("kfac", momentum=0.9, damping=1e-2)),
            Entrant("PSGD Kron", Method("psgd")),
        ),
        learning_rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0),
        scales=(0.1, 1.0, 10.0),
    )
