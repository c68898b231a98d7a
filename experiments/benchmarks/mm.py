"""Full-batch runs to a gradient norm of 1e-5, against Newton-CG with a line search on the same operator.

    python -m experiments.benchmarks.mm [--repeats N]

Float32, both started at zero. Runs take turns, each is compared with the run of Newton-CG before it, and compile time
is apart. A pass over the data is one product with it and one with its transpose. The limits are for the defaults of
`qbound.mm.run`.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import qbound
from experiments.digits import digits
from experiments.newton_cg import newton_cg
from qbound import mm

__all__ = ["CASES", "LIMIT", "Outcome", "candidates", "measure"]

L2, TOLERANCE = 1e-4, 1e-5
# Passes and seconds, in those of Newton-CG.
LIMIT = 1.3


def all_digits() -> tuple[jax.Array, jax.Array]:
    """1,797 x 65, with a 1 at the end of every row."""
    data = digits(train=1797, seed=0)
    return jnp.c_[data.inputs, jnp.ones(len(data.inputs))], data.labels


def synthetic(examples: int = 60_000, inputs: int = 785, labels: int = 10) -> tuple[jax.Array, jax.Array]:
    """Of the size of Fashion-MNIST: normal inputs whose sizes fall as 1/sqrt(k), labels drawn from a model."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (examples, inputs)) / jnp.sqrt(1 + jnp.arange(inputs))
    x = x.at[:, -1].set(1.0)
    weights = 2 * jax.random.normal(keys[1], (inputs, labels))
    return x, jax.random.categorical(keys[2], x @ weights)


# What is measured, and in how many turns for each of `--repeats`: short runs are noisy.
CASES = {"digits, 1,797 x 65 x 10": (all_digits, 10), "synthetic, 60,000 x 785 x 10": (synthetic, 1)}


class Outcome(NamedTuple):
    """Of one run."""

    steps: int
    passes: float
    gradient_norm: float


def candidates(inputs: jax.Array, labels: jax.Array) -> dict[str, Callable[[], Outcome]]:
    """What is timed: Newton-CG first."""
    params = jnp.zeros((inputs.shape[1], 10))

    def newton() -> Outcome:
        found = newton_cg(params, inputs, labels, L2, TOLERANCE)
        return Outcome(int(found.steps), 1 + float(jnp.sum(found.passes)), float(found.gradient_norm))

    def majorise(**options) -> Callable[[], Outcome]:
        def one() -> Outcome:
            _, info = mm.run(
                qbound.linear_logits, params, inputs, labels, l2=L2, tolerance=TOLERANCE, throw=False, **options
            )
            return Outcome(int(info.steps), float(info.passes), float(info.gradient_norm))

        return one

    return {
        "Newton-CG, line search": newton,
        "mm": majorise(),
        "mm, no line search": majorise(eta=1.0),
        "mm, Newton directions": majorise(curvature="hessian"),
    }


def measure(title: str, runs: dict[str, Callable[[], Outcome]], repeats: int) -> bool:
    """Print a table; whether every limit was kept."""
    print(f"\n{title}, l2 = {L2:g}, to a gradient norm of {TOLERANCE:g}", flush=True)
    print(
        f"  {'':<24}{'steps':>6}{'passes':>9}{'ratio':>7}{'s':>9}{'ratio':>7}{'quartiles':>14}{'compile s':>11}"
        f"{'limit':>7}"
    )
    outcomes, first, seconds = {}, {}, {name: [] for name in runs}
    for name, one in runs.items():
        start = time.perf_counter()
        outcomes[name] = one()
        first[name] = time.perf_counter() - start
    for _ in range(repeats):
        for name, one in runs.items():
            start = time.perf_counter()
            one()
            seconds[name].append(time.perf_counter() - start)
    reference = next(iter(runs))
    kept = True
    for name, outcome in outcomes.items():
        passes = outcome.passes / outcomes[reference].passes
        low, ratio, high = np.percentile(np.divide(seconds[name], seconds[reference]), [25, 50, 75])
        exceeded = name == "mm" and max(passes, ratio) > LIMIT or outcome.gradient_norm > TOLERANCE
        kept = kept and not exceeded
        median = float(np.median(seconds[name]))
        print(
            f"  {name:<24}{outcome.steps:>6}{outcome.passes:>9.1f}{passes:>7.2f}{median:>9.3f}{ratio:>7.2f}"
            f"{f'{low:.2f} - {high:.2f}':>14}{first[name] - median:>11.2f}{LIMIT if name == 'mm' else '':>7}"
            f"{'  EXCEEDED' if exceeded else ''}",
            flush=True,
        )
    return kept


def main() -> int:
    """Print a table for each case; the exit code says whether every limit was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of every candidate")
    repeats = parser.parse_args().repeats
    kept = [measure(title, candidates(*data()), turns * repeats) for title, (data, turns) in CASES.items()]
    print("\nevery limit kept" if all(kept) else "\nLIMIT EXCEEDED")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
