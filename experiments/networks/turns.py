"""What a step costs on a noisy machine: candidates take turns on the same batches, each compared with the reference.

`experiments.benchmarks.timing` times functions on fixed arguments; here states go on from turn to turn, because some
methods renew their factors now and then.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from experiments.networks.data import Problem, batches
from experiments.networks.train import Run, ready_trainer
from experiments.train import batch_rows

__all__ = ["Cost", "take_turns"]


class Cost(NamedTuple):
    """Of a step: median seconds, and median and quartiles of its ratio to one of the reference in the same turn."""

    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float


def take_turns(runs: Mapping[str, Run], problem: Problem, reference: str, *, steps: int, turns: int) -> dict[str, Cost]:
    """`turns` of so many steps for each run; all runs must be of one network with one size of batch."""
    trainers = {label: ready_trainer(run, problem)[0] for label, run in runs.items()}
    names, seconds = list(runs), {label: [] for label in runs}
    which = batch_rows(len(problem.train.labels), runs[reference].batch, 0, range(steps * turns))
    for turn in range(turns):
        chunks = list(batches(problem.train, which[turn * steps : (turn + 1) * steps]))
        # Whoever goes first finds the batches where no one has read them: everyone in turn.
        first = turn % len(names)
        for label in names[first:] + names[:first]:
            trainer = trainers[label]
            began = time.perf_counter()
            for chunk in chunks:
                for inputs, labels in chunk:
                    trainer.step(inputs, labels)
            trainer.wait()
            seconds[label].append((time.perf_counter() - began) / steps)
    found = {}
    for label, values in seconds.items():
        ratios = np.percentile(np.divide(values, seconds[reference]), [50, 25, 75])
        found[label] = Cost(float(np.median(values)), *map(float, ratios))
    return found
