"""The transformer with 256 sequences to a batch, 16,384 positions, 240 steps: see networks_transformer.

Command: python -m experiments.networks transformer_large
Each method has 4 settings: two learning rates, by two schedules, from the best of the smaller batches up.
Time, estimated: an hour on 2 cores.
"""

import dataclasses

from configs import networks_transformer
from experiments.networks.comparison import Comparison, Contender
from experiments.networks.methods import Method


def config() -> Comparison:
    """The settings of the comparison."""
    return dataclasses.replace(
        networks_transformer.config(),
        name="transformer_large",
        batches=(256,),
        contenders=(
            Contender("AdamW", (Method("adamw", b2=0.98, weight_decay=0.1),), (8e-3, 1.6e-2)),
            Contender("Muon", (Method("muon", adam_ratio=0.15, weight_decay=0.1),), (0.02, 0.04)),
            Contender("layerwise SPFB", (Method("layerwise_spfb", curvature="bound"),), (1.0, 2.0)),
        ),
        seeds=(1, 2),
        turn_steps=20,
    )
