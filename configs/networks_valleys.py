"""Test error of the perceptron on 10,000 images, against the weight of the trace of the curvature in its loss, and SAM.

784-256-128-10 with ReLU, batches of 250, twenty epochs of AdamW, five seeds.

Command: python -m experiments.networks valleys [--data-dir DIR]
Time, estimated: 12 minutes on 2 cores.
"""

from experiments.networks.valleys import Valleys


def config() -> Valleys:
    """The settings of the experiment."""
    return Valleys(
        name="valleys",
        network="perceptron",
        sizes=(256, 128),
        data_sets=("kmnist", "fashion_mnist"),
        rows=10000,
        evaluated=10000,
        batch=250,
        steps=800,
        schedule="cosine",
        learning_rate=2e-3,
        weight_decay=1e-4,
        weights=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
        radii=(0.02, 0.05, 0.1, 0.2, 0.5),
    )
