"""What a step of SPFB costs, in steps of plain SGD on the same batch.

    python -m experiments.benchmarks.spfb [--budget SECONDS]

Each table is one run in float32: candidates take turns, and ratios are medians with quartiles. A step computes the
gradient and changes the parameters of a linear model. CG takes exactly 5 steps. `peak` is the memory of arguments,
results and temporaries, in that of the step of SGD.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import qbound
from experiments.benchmarks.timing import Timing, compare

__all__ = ["CASES", "Case", "sgd_step", "spfb_step"]


def linear(weights, inputs):
    """A model of which nothing is known."""
    return inputs @ weights


def loss(weights, inputs, labels, logits_fn):
    return optax.softmax_cross_entropy_with_integer_labels(logits_fn(weights, inputs), labels).mean()


def sgd_step(weights, inputs, labels):
    """The unit of cost."""
    return weights - 0.1 * jax.grad(loss)(weights, inputs, labels, linear)


def spfb_step(weights, inputs, labels, *, logits_fn, **options):
    """One step, with the state made anew."""
    tx = qbound.spfb(1.0, logits_fn, l2=1e-4, **options)
    grads = jax.grad(loss)(weights, inputs, labels, logits_fn)
    updates, state = tx.update(grads, tx.init(weights), weights, inputs=inputs)
    return optax.apply_updates(weights, updates), state


def _spfb(logits_fn=linear, **options) -> Callable:
    return functools.partial(spfb_step, logits_fn=logits_fn, **options)


CG = {"solver": "cg", "max_steps": 5, "tolerance": 0.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape, what is timed on it, and the most steps of SGD that a candidate may cost."""

    title: str
    examples: int
    inputs: int
    labels: int
    candidates: dict[str, Callable]
    limits: dict[str, float]


CASES = [
    Case(
        "a batch of images",
        1000, 785, 10,
        {
            "cg": _spfb(**CG),
            "cg, descending order": _spfb(**CG, order="descending"),
            "cg, in pieces of 250": _spfb(**CG, microbatch_size=250),
        },
        {"cg": 7.0},
    ),
    Case("a thousand labels", 1000, 785, 1000, {"cg": _spfb(**CG)}, {}),
    Case(
        "a batch of one",
        1, 785, 10,
        {"linear_logits": _spfb(qbound.linear_logits), "woodbury": _spfb(solver="woodbury"), "cg": _spfb(**CG)},
        {"linear_logits": 4.0},
    ),
]  # fmt: skip
# The cost at a thousand labels may be this many times that at ten.
LABELS_LIMIT = 1.5
# The dense solver costs at least this many times as much as CG, and the peak memory of CG is at most this many times
# that of SGD.
DENSE_LIMIT, MEMORY_LIMIT = 200.0, 4.0


def problem(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights, inputs and labels of a case."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights = 0.01 * jax.random.normal(keys[0], (case.inputs, case.labels), jnp.float32)
    inputs = jax.random.normal(keys[1], (case.examples, case.inputs), jnp.float32)
    return weights, inputs, jax.random.randint(keys[2], (case.examples,), 0, case.labels)


def measure(case: Case, budget: float) -> dict[str, Timing]:
    """Time all candidates of a case, and print the table."""
    print(f"\n{case.title}: {case.examples} examples, {case.inputs} inputs, {case.labels} labels", flush=True)
    print(f"  {'':<24}{'ms':>10}{'SGD steps':>11}{'quartiles':>18}{'compile s':>11}{'peak':>8}{'limit':>8}")
    timings = compare({"SGD": sgd_step, **case.candidates}, problem(case), "SGD", budget)
    for name, t in timings.items():
        limit = case.limits.get(name)
        print(
            f"  {name:<24}{1e3 * t.seconds:>10.3f}{t.ratio:>11.2f}{f'{t.ratio_low:.2f} - {t.ratio_high:.2f}':>18}"
            f"{t.compile_seconds:>11.2f}{t.peak_bytes / timings['SGD'].peak_bytes:>8.2f}"
            f"{'' if limit is None else f'{limit:g}':>8}{'  EXCEEDED' if limit and t.ratio > limit else ''}",
            flush=True,
        )
    return timings


def main() -> int:
    """Print a table for each case; the exit code says whether every limit was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of measuring for each table")
    budget = parser.parse_args().budget
    timings = {case.title: measure(case, budget) for case in CASES}
    images, labels = timings["a batch of images"], timings["a thousand labels"]

    dense = {
        "CG": _spfb(**CG),
        "dense": _spfb(solver="dense"),
        "dense, linear_logits": _spfb(qbound.linear_logits, solver="dense"),
    }
    print("\nagainst the dense solver, a batch of images: 7,850 parameters", flush=True)
    direct = compare(dense, problem(CASES[0]), "CG", 0.0)
    for name, t in direct.items():
        print(f"  {name:<24}{1e3 * t.seconds:>10.3f} ms, {t.ratio:.0f} times CG", flush=True)

    growth = labels["cg"].ratio / images["cg"].ratio
    memory = images["cg"].peak_bytes / images["SGD"].peak_bytes
    checks = [
        *(
            t[name].ratio <= limit
            for case in CASES
            for t in [timings[case.title]]
            for name, limit in case.limits.items()
        ),
        growth <= LABELS_LIMIT,
        memory <= MEMORY_LIMIT,
        min(direct[name].ratio for name in direct if name != "CG") >= DENSE_LIMIT,
    ]
    print(f"\ncg, a thousand labels against ten: {growth:.2f} times the SGD steps (limit {LABELS_LIMIT:g})")
    print(f"cg, peak memory: {memory:.2f} times that of SGD (limit {MEMORY_LIMIT:g})")
    print("every limit kept" if all(checks) else "LIMIT EXCEEDED")
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
