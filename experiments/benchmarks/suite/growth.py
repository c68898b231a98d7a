"""What a step costs, in steps of SGD on the same batch, as labels, inputs and examples grow.

    python -m experiments.benchmarks.suite.growth [--budget SECONDS] [--output FILE]

Float32, a linear model: `inputs @ weights` for the unit, plain SGD, and for Adam, as one writes it, and
`qbound.linear_logits`, whose gradient is faster on CPU, for ours; with it SGD is a column of its own. A measurement is
a compiled loop of 8 steps that starts after the first, in which KSPFB factorises the second moments of inputs. SPFB
has exactly 5 iterations of CG.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

import qbound
from experiments.benchmarks.timing import Timing, compare
from experiments.errors import one_line_errors
from experiments.plots import panels, save
from experiments.runs import write_json

__all__ = ["BASE", "LIMITS", "METHODS", "SWEEPS", "costs", "draw", "table"]

STEPS, L2 = 8, 1e-4
BASE = {"labels": 10, "inputs": 785, "examples": 1000}
SWEEPS = {"labels": (2, 10, 100, 1000, 10_000), "inputs": (10, 100, 785, 3000), "examples": (10, 100, 1000, 10_000)}
# Steps of SGD that a step may cost with the shape of images.
LIMITS = {"SPFB, 5 CG": 6.0, "KSPFB": 3.0}


def plain(weights, inputs):
    """The model as one writes it."""
    return inputs @ weights


class Candidate(NamedTuple):
    """An optimizer and the model it is for."""

    make: Callable[[], optax.GradientTransformationExtraArgs]
    model: Callable


METHODS: Mapping[str, Candidate] = {
    "SGD": Candidate(lambda: optax.with_extra_args_support(optax.sgd(0.1)), plain),
    "SGD, linear_logits": Candidate(lambda: optax.with_extra_args_support(optax.sgd(0.1)), qbound.linear_logits),
    "Adam": Candidate(lambda: optax.with_extra_args_support(optax.adam(0.01)), plain),
    "SPFB, 5 CG": Candidate(
        lambda: qbound.spfb(1.0, qbound.linear_logits, l2=L2, solver="cg", max_steps=5, tolerance=0.0),
        qbound.linear_logits,
    ),
    "KSPFB": Candidate(lambda: qbound.kspfb(2.0, qbound.linear_logits, l2=L2), qbound.linear_logits),
    "LSPFB, k = 10": Candidate(lambda: qbound.lspfb(1.0, qbound.linear_logits, rank=10, l2=L2), qbound.linear_logits),
}
# Examples times parameters that LSPFB, at hundreds of steps of SGD a step, is measured with at most.
MOST_NUMBERS = {"LSPFB, k = 10": 4e7}


def steps(weights, state, x, y, *, transform: optax.GradientTransformationExtraArgs, model: Callable, count: int):
    """So many, on one batch."""

    def loss(weights):
        return optax.softmax_cross_entropy_with_integer_labels(model(weights, x), y).mean()

    def step(carry, _):
        weights, state = carry
        updates, state = transform.update(jax.grad(loss)(weights), state, weights, inputs=x)
        return (optax.apply_updates(weights, updates), state), None

    return jax.lax.scan(step, (weights, state), None, length=count)[0]


def costs(shape: Mapping[str, int], budget: float, names: Collection[str] = tuple(METHODS)) -> dict[str, Timing]:
    """The time of `STEPS` steps of each method, and its ratio to that of SGD, which must be among them."""
    keys = jax.random.split(jax.random.key(0), 3)
    examples, inputs, labels = shape["examples"], shape["inputs"], shape["labels"]
    weights = 0.01 * jax.random.normal(keys[0], (inputs, labels))
    x = jax.random.normal(keys[1], (examples, inputs))
    y = jax.random.randint(keys[2], (examples,), 0, labels)
    candidates, states = {}, {}
    for name in names:
        make, model = METHODS[name]
        if examples * inputs * labels > MOST_NUMBERS.get(name, math.inf):
            continue
        loop = functools.partial(steps, transform=make(), model=model)
        first = jax.jit(functools.partial(loop, count=1))
        states[name] = jax.block_until_ready(first(weights, loop.keywords["transform"].init(weights), x, y))
        candidates[name] = functools.partial(_from_state, name=name, loop=functools.partial(loop, count=STEPS))
    return compare(candidates, (states, x, y), "SGD", budget)


def _from_state(states, x, y, *, name: str, loop: Callable):
    return loop(*states[name], x, y)


def sweep(budget: float) -> dict[str, list[dict[str, Any]]]:
    """Ratios along each sweep."""
    found: dict[str, list[dict[str, Any]]] = {}
    for axis, sizes in SWEEPS.items():
        for size in sizes:
            timings = costs({**BASE, axis: size}, budget)
            ratios = {name: [t.ratio, t.ratio_low, t.ratio_high] for name, t in timings.items()}
            found.setdefault(axis, []).append({"size": size, "sgd_seconds": timings["SGD"].seconds / STEPS, **ratios})
            shown = ", ".join(f"{name} {ratio[0]:.1f}" for name, ratio in ratios.items() if name != "SGD")
            print(f"{size:,} {axis}: SGD {1e3 * timings['SGD'].seconds / STEPS:.3f} ms; {shown}", flush=True)
    return found


def table(found: Mapping[str, list[dict[str, Any]]]) -> str:
    """Steps of SGD, with the quartiles."""
    names = [name for name in METHODS if name != "SGD"]
    lines = [f"| | SGD, ms | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for axis, rows in found.items():
        for row in rows:
            texts = [f"{row[n][0]:.1f} ({row[n][1]:.1f} to {row[n][2]:.1f})" if n in row else "-" for n in names]
            lines.append(f"| {row['size']:,} {axis} | {1e3 * row['sgd_seconds']:.2g} | {' | '.join(texts)} |")
    return "\n".join(lines)


def draw(found: Mapping[str, list[dict[str, Any]]], output: str) -> Path:
    """A panel for each sweep."""
    figure, axes = panels(1, len(found), height=3.4)
    colors = ("#999999", "#000000", "#D55E00", "#CC79A7", "#0072B2")
    looks = dict(zip((name for name in METHODS if name != "SGD"), colors, strict=True))
    for ax, (axis, rows) in zip(axes[0], found.items(), strict=True):
        for name, color in looks.items():
            points = [(row["size"], row[name][0]) for row in rows if name in row]
            ax.plot(*zip(*points, strict=True), marker="o", color=color, label=name)
        fixed = ", ".join(f"{size:,} {other}" for other, size in BASE.items() if other != axis)
        ax.set(xscale="log", yscale="log", xlabel=axis, title=fixed)
        ax.grid(alpha=0.3, which="both")
    axes[0, 0].set_ylabel("steps of SGD")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return save(figure, output)


def main() -> int:
    """The exit code says whether every limit was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of measuring for each shape")
    parser.add_argument("--output", default="results/bench/growth.json")
    arguments = parser.parse_args()
    found = sweep(arguments.budget)
    path = Path(arguments.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    base = next(row for row in found["labels"] if row["size"] == BASE["labels"])
    kept = True
    for name, limit in LIMITS.items():
        kept = kept and base[name][0] <= limit
        print(f"a step of {name}: {base[name][0]:.2f} steps of SGD (limit {limit:g})")
    print("every limit kept" if kept else "LIMIT EXCEEDED")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
