"""The picture of `make demo`: ten labels, logits of standard deviation 2, one random line through them.

Command: python -m experiments.demo
Expected: results/demo.png. Along the line the bounds stay above the log-partition function; the second-order expansion
falls below it on one side. Which order is closest depends on the line; over all directions, that is by its trace,
the descending one is.
Time: 10 s on 2 cores, most of it compilation.
"""

from experiments.demo import DemoConfig


def config() -> DemoConfig:
    """The settings of the demonstration."""
    return DemoConfig(labels=10, logit_std=2.0, seed=0, reach=6.0, output="results/demo.png")
