"""How far a reader has to jump: the files that one traced update visits, and how often it returns to one it has left.

    python tests/hops.py

Every call of a Python function of the package counts, in the order in which a trace makes them. Modules of words that
all others use, such as checks and types, do not.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import qbound

PACKAGE = f"{Path(qbound.__file__).parent}/"
WORDS = tuple(PACKAGE + name for name in ("checks.py", "compiler.py", "records.py", "trees.py", "types.py"))


class Hops(NamedTuple):
    """Files in the order of their first visit, and returns to those that were left."""

    files: list[str]
    returns: int


def count(function: Callable[[], Any]) -> Hops:
    """Of all that a function calls."""
    calls: list[str] = []

    def note(frame, event, _):
        # Called for every function of JAX, too: no more than these comparisons.
        if event == "call" and (name := frame.f_code.co_filename).startswith(PACKAGE) and name not in WORDS:
            calls.append(name.removeprefix(PACKAGE))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    entered = [name for k, name in enumerate(calls) if k == 0 or name != calls[k - 1]]
    files = list(dict.fromkeys(entered))
    return Hops(files, len(entered) - len(files))


def updates() -> dict[str, Callable[[], Any]]:
    """Traces of an update of each optimizer, and of a full-batch run."""
    inputs, labels = jnp.ones((64, 20)), jnp.zeros(64, jnp.int32)
    weights = jnp.zeros((20, 5))

    def update(transform):
        arguments = weights, transform.init(weights), weights
        return lambda: jax.jit(lambda g, s, p, x: transform.update(g, s, p, inputs=x)).lower(*arguments, inputs)

    def run(weights, inputs, labels):
        return qbound.mm.run(qbound.linear_logits, weights, inputs, labels, l2=1e-3, throw=False)

    return {
        "spfb": update(qbound.spfb(1.0, qbound.linear_logits, l2=1e-3, solver="cg")),
        "kspfb": update(qbound.kspfb(1.0, qbound.linear_logits, l2=1e-3)),
        "lspfb": update(qbound.lspfb(1.0, qbound.linear_logits, rank=4, l2=1e-3)),
        "layerwise_spfb": update(qbound.layerwise_spfb(1.0, qbound.linear_logits, l2=1e-3)),
        "mm.run": lambda: jax.jit(run).lower(weights, inputs, labels),
    }


if __name__ == "__main__":
    for name, trace in updates().items():
        found = count(trace)
        print(f"{name:7} {len(found.files):3} files {found.returns:4} returns   {' '.join(found.files)}")
