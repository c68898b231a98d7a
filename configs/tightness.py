"""How tight the low-rank bounds are on a batch of images, with 7,850 parameters.

Command: python -m experiments.tightness [--data-dir DIR]
Data: Fashion-MNIST, downloaded unless DIR or QBOUND_DATA_DIR names a folder that has it.
Expected: with l2 = 1e-4, a step of frequent directions keeps 1.7 % of the decrease that the full bound predicts at
k = 10 and 7.6 % at k = 100, eigenvectors 2.3 % and 11 %; gradient descent keeps 0.5 %. Below k = 9 there is little to
gain: the mean image, for each label but one, makes nine directions of about the same curvature. The paper's bound is
looser than gradient descent at every k.
Time: 4 minutes on 2 cores, most of it for the bounds row by row and for the eigenvalues.
"""

from experiments.tightness import TightnessConfig


def config() -> TightnessConfig:
    """The settings of the tables."""
    return TightnessConfig(
        data_set="fashion_mnist",
        batch=1000,
        training_steps=10,
        training_l2=1e-4,
        ranks=(1, 5, 10, 50, 100),
        order="max_first",
        rank_of_orders=10,
        l2=(1e-4, 1e-2),
        output="results/tightness.png",
    )
