"""One run of one method: what it reaches when, judged in float64, until it has gone far enough."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.benchmarks.suite.objective import objective
from experiments.benchmarks.suite.problem import Method, Problem, Ready

__all__ = ["Outcome", "race", "time_to"]

# A method has diverged where the objective is this many times that at the start.
DIVERGED = 1e3


class Outcome(NamedTuple):
    """How a run ended, and its trace.

    Attributes:
      ended: "reached" the goal, "finished" by itself, "limit" of its time, "diverged"; "failed" with an error,
        "killed" because it did not come back, or "not installed".
      compile_seconds: apart from all others.
      trace: seconds, passes over the data and the objective, of every checkpoint that was looked at.
      message: of what failed.
      limit: the seconds it could take.
    """

    ended: str
    compile_seconds: float = 0.0
    trace: list[tuple[float, float, float]] = []
    message: str = ""
    limit: float = math.inf

    def to_json(self) -> dict[str, Any]:
        """Without numbers that JSON does not know: an objective that is not finite is null."""
        trace = [[*head, value if math.isfinite(value) else None] for *head, value in self.trace]
        return {**self._asdict(), "trace": trace, "limit": self.limit if math.isfinite(self.limit) else None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Outcome":
        """What `to_json` gave."""
        trace = [(a, b, math.nan if value is None else value) for a, b, value in content["trace"]]
        limit = math.inf if content["limit"] is None else content["limit"]
        return cls(**{**{name: content[name] for name in cls._fields}, "trace": trace, "limit": limit})


def race(
    method: Method,
    problem: Problem,
    setting: Mapping[str, Any],
    seed: int,
    spacing: float = 1.05,
    evaluate: Callable[[np.ndarray, np.ndarray, np.ndarray, float], float] = objective,
) -> Outcome:
    """Run it, until the goal or the limit of its time is reached, or it has diverged.

    Args:
      method: a generator of checkpoints.
      problem: what it is to minimise.
      setting: the numbers that are tuned.
      seed: of its batches.
      spacing: a checkpoint is looked at if it comes this many times as late as the last that was.
      evaluate: from parameters, inputs, labels and l2 to the objective.
    """
    inputs = problem.inputs.astype(np.float64)
    start = math.log(problem.classes)
    compile_seconds, trace, latest, looked = 0.0, [], None, 0.0
    ended = "finished"

    def look(checkpoint) -> float:
        value = evaluate(np.asarray(checkpoint.params), inputs, problem.labels, problem.l2)
        trace.append((float(checkpoint.seconds), float(checkpoint.passes), value))
        return value

    run = method(problem, setting, seed)
    for item in run:
        if isinstance(item, Ready):
            compile_seconds = item.compile_seconds
            continue
        latest = item
        if not (item.whole or item.seconds >= looked * spacing or item.seconds > problem.seconds):
            continue
        looked, latest = item.seconds, None
        value = look(item)
        if not value < DIVERGED * start:
            ended = "diverged"
        elif value <= problem.goal:
            ended = "reached"
        elif item.seconds > problem.seconds:
            ended = "limit"
        else:
            continue
        break
    if latest is not None:
        value = look(latest)
        ended = "reached" if value <= problem.goal else ended if value < DIVERGED * start else "diverged"
    run.close()
    return Outcome(ended, compile_seconds, trace, limit=problem.seconds)


def time_to(outcome: Outcome, value: float) -> tuple[float, float]:
    """Seconds and passes to an objective; infinite if it was not reached, or not in the time a run may take.

    The first that reaches it counts, also of whole fits: the least time of several would be a lucky one.
    """
    reached = ((seconds, passes) for seconds, passes, found in outcome.trace if found <= value)
    seconds, passes = next(reached, (math.inf, math.inf))
    return (seconds, passes) if seconds <= outcome.limit else (math.inf, math.inf)
