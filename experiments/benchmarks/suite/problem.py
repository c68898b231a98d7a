"""What a method is given, and what it gives back.

This module and those of the peers run in environments that hold a peer and little else: NumPy is all they share.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Checkpoint", "Method", "Problem", "Ready", "batch_size", "blocks", "penalty_of_coefficients", "to_params"]


class Problem(NamedTuple):
    """Minimise the mean log loss + l2/2 |W|^2 over all of W (d, n), from zero; logits are X W.

    Attributes:
      name: of the data set.
      inputs: X (b, d) in float32, rows in random order; the last column is 1.
      labels: (b,) in int32, from 0 to n - 1.
      classes: n.
      l2: the penalty.
      goal: an objective so close to the least that a method may stop; for those that cannot be stopped from outside.
      seconds: how long a run may take.
    """

    name: str
    inputs: np.ndarray
    labels: np.ndarray
    classes: int
    l2: float
    goal: float
    seconds: float


class Ready(NamedTuple):
    """The first thing a method yields: everything is compiled, and how long that took."""

    compile_seconds: float


class Checkpoint(NamedTuple):
    """The parameters W after some seconds of the method's own clock, and some passes over the data.

    A pass is one product with X and one with its transpose. The clock stands still while a checkpoint is looked at. A
    `whole` fit has a clock of its own, which started at zero.
    """

    seconds: float
    passes: float
    params: Any
    whole: bool = False


# A method yields Ready, then checkpoints, and is closed when it has gone far enough. The other arguments are the
# numbers that are tuned, and a seed.
Method = Callable[[Problem, Mapping[str, Any], int], Generator[Ready | Checkpoint, None, None]]


def penalty_of_coefficients(problem: Problem) -> float:
    """For models that have one vector w for two classes, W = [-w/2, w/2]: l2/2 |W|^2 = l2/4 |w|^2."""
    return problem.l2 / 2 if problem.classes == 2 else problem.l2


def to_params(coefficients: np.ndarray) -> np.ndarray:
    """W (d, n) of coefficients (n, d), or of one vector (1, d) for two classes."""
    w = np.asarray(coefficients)
    return np.concatenate([-w, w]).T / 2 if len(w) == 1 else w.T


def batch_size(examples: int) -> int:
    """The same for all stochastic methods: 1,000, and fewer of few examples."""
    return max(1, min(1000, examples // 16))


def blocks(examples: int, seed: int) -> Iterator[np.ndarray]:
    """For every epoch the batches as places of their first rows, in random order.

    Rows are in random order already, so a batch is a slice and nothing is gathered. The rest that fills no batch is at
    the start in some epochs and at the end in others.
    """
    size = batch_size(examples)
    starts = np.arange(examples // size, dtype=np.int32) * size
    generator = np.random.default_rng(seed)
    while True:
        yield generator.permutation(starts) + generator.integers(examples % size + 1, dtype=np.int32)
