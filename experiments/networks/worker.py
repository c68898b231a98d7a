"""A process that answers one request in an environment of its own: `worker REQUEST ANSWER`, two files of JSON."""

import importlib.metadata
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from experiments.networks.data import restore
from experiments.networks.train import Run, train
from experiments.networks.turns import take_turns

__all__ = ["answer", "main"]

SHOWN = ("jax", "jaxlib", "optax", "kfac-jax", "psgd-jax")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a run, or what steps cost; with the versions it was made with."""
    problem = restore(Path(request["rows"]))
    runs = {label: Run.from_json(content) for label, content in request["runs"].items()}
    if request["task"] == "train":
        (run,) = runs.values()
        return {"outcome": train(run, problem)._asdict(), "versions": _versions()}
    costs = take_turns(runs, problem, request["reference"], steps=request["steps"], turns=request["turns"])
    return {"costs": {label: cost._asdict() for label, cost in costs.items()}, "versions": _versions()}


def _versions() -> dict[str, str]:
    installed = {found.metadata["Name"].lower(): found.version for found in importlib.metadata.distributions()}
    return {name: installed[name] for name in SHOWN if name in installed}


def main() -> None:
    """Answer, or say in the answer what went wrong."""
    request, target = map(Path, sys.argv[1:])
    try:
        found = answer(json.loads(request.read_text()))
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    temporary = target.with_name(f"{target.name}.part")
    temporary.write_text(json.dumps(found))
    os.replace(temporary, target)


if __name__ == "__main__":
    main()
