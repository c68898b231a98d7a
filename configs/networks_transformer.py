"""A decoder of 2 layers, width 96, 4 heads on the source of Python's standard library, 240 steps.

Sequences of 64 bytes, 32 of them to a batch: 2,048 positions. The measure is the loss on 1,024 sequences of the last
twentieth of the text, which none is trained on. networks_transformer_large has larger batches.

Command: python -m experiments.networks transformer [--peers]
Each method has 8 settings: four pairs of a learning rate and a variant, by two schedules.
Time, estimated: 40 minutes on 2 cores, without peers.
"""

from experiments.networks.comparison import Comparison, Contender
from experiments.networks.methods import SCHEDULES, Method

# Each of their runs is a process of its own, which compiles for itself.
PEERS = (0.5, 1.0)


def config() -> Comparison:
    """The settings of the comparison."""
    return Comparison(
        name="transformer",
        network="transformer",
        sizes=(2, 96, 4, 64),
        data_sets=("stdlib",),
        rows=1_000_000,
        evaluated=1024,
        batches=(32,),
        steps=(240,),
        measure="test_loss",
        contenders=(
            Contender("AdamW", _adam("adamw"), (2e-3, 4e-3, 8e-3, 1.6e-2)),
            Contender("NadamW", _adam("nadamw"), (2e-3, 4e-3, 8e-3, 1.6e-2)),
            Contender("Muon", (_muon(0.15), _muon(0.5)), (0.01, 0.03)),
            Contender("schedule-free AdamW", _adam("schedule_free_adamw"), (4e-3, 8e-3, 1.6e-2, 3.2e-2)),
            Contender("momentum SGD", (Method("momentum", momentum=0.9),), (0.1, 0.2, 0.5, 1.0)),
            Contender("layerwise SPFB", _layerwise("bound"), (1.0, 2.0)),
            Contender("layerwise Gauss-Newton", _layerwise("gauss_newton"), (1.0, 2.0)),
            Contender("SPFB", _damped("spfb", 1e-3, 1e-2, max_steps=5), (0.3, 1.0), lengths=(0.25,)),
            Contender("kfac-jax", _damped("kfac", 1e-2, 1e-1, momentum=0.9), (0.01, 0.03), lengths=PEERS),
            Contender("PSGD Kron", (Method("psgd", weight_decay=0.1),), (1e-3, 3e-3, 1e-2, 3e-2), lengths=PEERS),
        ),
        schedules=SCHEDULES,
        lengths=(0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.85, 1.0),
        tuned_at=(0.4, 1.0),
        tuning_seed=0,
        seeds=(1, 2, 3),
        turns=3,
    )


def _adam(name) -> tuple[Method, ...]:
    return (Method(name, b2=0.98, weight_decay=0.1),)


def _muon(ratio: float) -> Method:
    return Method("muon", adam_ratio=ratio, weight_decay=0.1)


def _layerwise(curvature) -> tuple[Method, ...]:
    return _damped("layerwise_spfb", 0.3, 1.0, curvature=curvature)


def _damped(name, *dampings, **options) -> tuple[Method, ...]:
    return tuple(Method(name, damping=damping, **options) for damping in dampings)
