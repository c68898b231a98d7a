"""What a step costs for small networks, in steps of plain SGD on the same batch.

    python -m experiments.benchmarks.networks [--budget SECONDS]

Each table is one run in float32: candidates take turns, and ratios are medians with quartiles. A step computes the
gradient and changes the parameters. CG takes exactly as many iterations as it may. `temporary` is memory beside
arguments and results, in that of the step of SGD. Layerwise SPFB renews its factors now and then: its turns, and those
of SGD beside it, are of 50 steps that go on from the last turn.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qbound
from experiments.benchmarks.timing import Timing, compare
from experiments.networks.models import Network
from experiments.networks.train import loss

__all__ = ["CASES", "RUNNING", "Case", "candidates", "measure", "problem", "running"]

# What is timed by steps that go on, and how many of them are a turn: as many as from one solution to the next.
RUNNING, TURN = "layerwise_spfb, running", 50


@dataclasses.dataclass(frozen=True)
class Case:
    """A network, its batch, and the most steps of SGD that a candidate may cost: about twice what was measured."""

    title: str
    network: Network
    examples: int
    width: int  # of inputs: pixels, or positions
    classes: int  # of labels: of images, or bytes
    limits: dict[str, float]


CASES = [
    Case(
        "a perceptron",
        Network("perceptron", (256, 128)),
        500, 784, 10,
        {"spfb, 5 iterations": 16.0, "spfb, 10 iterations": 28.0, RUNNING: 7.0},
    ),
    Case(
        "a convolutional network",
        Network("convolutional", (16, 32, 64)),
        500, 784, 10,
        # Sixty and over a hundred, with convolutions in the order that JAX gives them: qbound/linalg/convolutions.py.
        {"spfb, 5 iterations": 11.0, "spfb, 10 iterations": 18.0, RUNNING: 3.0},
    ),
    Case(
        "a transformer",
        Network("transformer", (2, 96, 4, 64)),
        32, 64, 256,
        {"spfb, 5 iterations": 14.0, "spfb, 10 iterations": 24.0, RUNNING: 3.0},
    ),
]  # fmt: skip


def candidates(network: Network) -> dict[str, Callable]:
    """What is timed on every network by steps from the same state."""

    def sgd_step(params, inputs, labels):
        """The unit of cost."""
        grads = jax.grad(functools.partial(loss, network))(params, inputs, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    def step(params, inputs, labels, *, tx: Any):
        """With the state made anew."""
        tx = optax.with_extra_args_support(tx)
        return _step(params, tx.init(params), inputs, labels, network=network, tx=tx)

    def spfb(iterations):
        return qbound.spfb(0.1, network.logits, l2=1e-4, solver="cg", max_steps=iterations, tolerance=0.0)

    transforms = {
        "adam": optax.adam(1e-3),
        "spfb, 5 iterations": spfb(5),
        "spfb, 10 iterations": spfb(10),
    }
    return {"SGD": sgd_step, **{name: functools.partial(step, tx=tx) for name, tx in transforms.items()}}


def _step(params, state, inputs, labels, *, network: Network, tx: optax.GradientTransformationExtraArgs):
    grads = jax.grad(functools.partial(loss, network))(params, inputs, labels)
    updates, state = tx.update(grads, state, params, inputs=inputs)
    return optax.apply_updates(params, updates), state


def running(case: Case, budget: float) -> Timing:
    """Of layerwise SPFB, by turns of steps, in steps of SGD that are taken by turns beside it."""
    params, inputs, labels = problem(case)
    transforms = {"SGD": optax.sgd(1e-2), RUNNING: qbound.layerwise_spfb(0.5, case.network.logits)}
    steps, states, seconds, compile_seconds = {}, {}, {name: [] for name in transforms}, {}
    for name, tx in transforms.items():
        rule = functools.partial(_step, network=case.network, tx=optax.with_extra_args_support(tx))
        began = time.perf_counter()
        states[name] = jax.tree.map(jnp.copy, (params, tx.init(params)))
        steps[name] = jax.jit(rule, donate_argnums=(0, 1)).lower(*states[name], inputs, labels).compile()
        compile_seconds[name] = time.perf_counter() - began
    stop = time.perf_counter() + budget
    # The first turn has more renewals than later ones, and is thrown away.
    while time.perf_counter() < stop or len(seconds["SGD"]) < 4:
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(TURN):
                states[name] = step(*states[name], inputs, labels)
            jax.block_until_ready(states[name])
            seconds[name].append((time.perf_counter() - began) / TURN)
    low, ratio, high = np.percentile(np.divide(seconds[RUNNING], seconds["SGD"])[1:], [25, 50, 75])
    memory = steps[RUNNING].memory_analysis()
    return Timing(
        compile_seconds=compile_seconds[RUNNING],
        seconds=float(np.median(seconds[RUNNING][1:])),
        ratio=float(ratio),
        ratio_low=float(low),
        ratio_high=float(high),
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes,
    )


def problem(case: Case) -> tuple[Any, jax.Array, jax.Array]:
    """Parameters, inputs and labels of a case, drawn at random."""
    keys = jax.random.split(jax.random.key(0))
    params = case.network.first_params(0, case.width, case.classes)
    shape = (case.examples, case.width)
    if case.network.positions:
        inputs, labels = (jax.random.randint(key, shape, 0, case.classes) for key in keys)
    else:
        inputs = jax.random.normal(keys[0], shape, jnp.float32)
        labels = jax.random.randint(keys[1], shape[:1], 0, case.classes)
    return params, inputs, labels


def measure(case: Case, budget: float) -> dict[str, Timing]:
    """Time all candidates of a case, and print the table."""
    params, inputs, labels = problem(case)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"\n{case.title}: a batch of {' x '.join(map(str, inputs.shape))}, {numbers:,} parameters", flush=True)
    print(f"  {'':<24}{'ms':>10}{'SGD steps':>11}{'quartiles':>18}{'compile s':>11}{'temporary':>11}{'limit':>8}")
    timings = compare(candidates(case.network), (params, inputs, labels), "SGD", budget)
    timings[RUNNING] = running(case, budget)
    for name, t in timings.items():
        limit = case.limits.get(name)
        print(
            f"  {name:<24}{1e3 * t.seconds:>10.3f}{t.ratio:>11.2f}{f'{t.ratio_low:.2f} - {t.ratio_high:.2f}':>18}"
            f"{t.compile_seconds:>11.2f}{t.temporary_bytes / timings['SGD'].temporary_bytes:>11.2f}"
            f"{'' if limit is None else f'{limit:g}':>8}{'  EXCEEDED' if limit and t.ratio > limit else ''}",
            flush=True,
        )
    return timings


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each network; the exit code says whether every limit was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of measuring for each part of a table")
    budget = parser.parse_args(arguments).budget
    kept = True
    for case in CASES:
        timings = measure(case, budget)
        kept = kept and all(timings[name].ratio <= limit for name, limit in case.limits.items())
    print("every limit kept" if kept else "LIMIT EXCEEDED")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
