"""A process that runs methods in an environment of its own, one after the other, as it is told on its standard input.

A request is a line of JSON, and so is the answer. Data, and compiled programs, stay for the next request.
"""

import functools
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks.suite.problem import Problem, batch_size
from experiments.benchmarks.suite.race import Outcome, race


@functools.lru_cache(maxsize=1)
def _rows(folder: str) -> tuple[np.ndarray, np.ndarray, int]:
    path = Path(folder)
    return np.load(path / "inputs.npy"), np.load(path / "labels.npy"), int(np.load(path / "classes.npy"))


def perform(request: dict[str, Any]) -> Outcome:
    """What came of it; a method that fails is an outcome too."""
    module, function = request["function"].split(":")
    try:
        found = importlib.import_module(f"experiments.benchmarks.suite.methods.{module}")
        folder = request["folder"]
        problem = Problem(Path(folder).name, *_rows(folder), request["l2"], request["goal"], request["seconds"])
        return race(
            getattr(found, function),
            problem,
            in_epochs(problem, request["setting"]),
            request["seed"],
            request["spacing"],
        )
    except Exception as error:
        traceback.print_exc()
        return Outcome("failed", message=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def in_epochs(problem: Problem, setting: dict[str, Any]) -> dict[str, Any]:
    """A schedule of a number of steps on batches, in epochs of these data."""
    if "steps" not in setting:
        return setting
    others = {name: value for name, value in setting.items() if name != "steps"}
    return {**others, "epochs": setting["steps"] * batch_size(len(problem.labels)) / len(problem.labels)}


def main() -> None:
    """Answer requests until there are no more."""
    # What libraries print goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(perform(json.loads(line)).to_json(), allow_nan=False), file=answers, flush=True)


if __name__ == "__main__":
    main()
