"""Where the curvature of small batches should come from: the table and the picture of section 8 of docs/theory.md.

Command: python -m experiments.small_batches
Expected: with the curvature of the same batch, the objective ends far above its least value; with that of another batch
it leaps on the way; with a window it does neither.
Time: minutes on 2 cores.
"""

from experiments.small_batches import SmallBatchesConfig


def config() -> SmallBatchesConfig:
    """The settings of the table."""
    return SmallBatchesConfig(
        batches=(1, 3, 10, 30, 100, 300),
        steps=4000,
        l2=1e-4,
        window=1000,
        average_weight=0.01,
        seeds=3,
        output="results/small_batches.png",
    )
