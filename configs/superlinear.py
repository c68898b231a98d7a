"""Full-batch convergence with and without the local certificate: table and picture of section 9 of docs/theory.md.

Command: python -m experiments.superlinear
Expected: a bound alone converges linearly; the certificate switch converges as Newton-CG does, at about its cost.
Time: under a minute on 2 cores.
"""

from experiments.superlinear import SuperlinearConfig


def config() -> SuperlinearConfig:
    """The settings of the picture."""
    return SuperlinearConfig(
        l2=1e-3, tolerance=1e-11, target=1e-5, max_steps=500, repeats=3, output="results/superlinear.png"
    )
