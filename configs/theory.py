"""The convergence theorem of the paper, corrected: the table and the picture of section 10 of docs/theory.md.

Command: python -m experiments.theory
Expected: with curvature from another example than the gradient, the mean excess stays below Q/t and falls as 1/t; with
that of the same one, it stops falling.
Time: some minutes on 2 cores.
"""

from experiments.theory import TheoryConfig


def config() -> TheoryConfig:
    """The settings of the table."""
    return TheoryConfig(
        l2=(0.5, 0.1),
        c=2.0,
        steps=60_000,
        seeds=20,
        counterexample_steps=20_000,
        output="results/theory.png",
    )
