"""What the bound costs, in softmaxes of the same logits.

    python -m experiments.benchmarks.bound [--budget SECONDS]

Each table is one run in float32: candidates take turns, and ratios are medians with quartiles. `temporary` is the
memory the compiled program needs beside its arguments and results, in copies of the logits.
"""

import argparse
import functools
import sys

import jax

import qbound
from experiments.benchmarks.timing import compare
from qbound.types import Order

__all__ = ["dense_bound", "product"]

# The most softmaxes each may cost.
LIMITS = {"product, max_first": 20.0, "bound and dense M, descending": 15.0}


def softmax(logits, *_):
    """The unit of cost."""
    return jax.nn.softmax(logits)


def product(logits, vectors, *, order: Order):
    """M u for every row of logits, the bound built anew."""
    return jax.vmap(lambda h, u: qbound.log_partition_bound(h, order=order).curvature.mv(u))(logits, vectors)


def solution(logits, vectors, *, order: Order):
    """(M + 0.1 I)^-1 u for every row of logits, the bound built anew."""
    return jax.vmap(lambda h, u: qbound.log_partition_bound(h, order=order).curvature.solve(u, 0.1))(logits, vectors)


def dense_bound(logits, *_, order: Order):
    """Value, gradient and matrix for every row of logits."""

    def one(h):
        bound = qbound.log_partition_bound(h, order=order)
        return bound.value, bound.grad, bound.curvature.dense()

    return jax.vmap(one)(logits)


def cases() -> list[tuple[str, tuple[int, int], dict]]:
    """Title, shape of the logits, and what is timed on them."""

    def in_orders(prefix, function, *orders):
        return {f"{prefix}, {order}": functools.partial(function, order=order) for order in orders}

    return [
        ("many labels", (32, 100_000), {"softmax": softmax, **in_orders("product", product, "max_first")}),
        (
            "1,000 labels",
            (100, 1000),
            {
                "softmax": softmax,
                **in_orders("product", product, "max_first", "descending", "given"),
                **in_orders("solve", solution, "max_first"),
            },
        ),
        (
            "few labels",
            (1000, 10),
            {
                "softmax": softmax,
                **in_orders("bound and dense M", dense_bound, "descending", "max_first", "given"),
                **in_orders("product", product, "descending", "max_first", "given"),
                **in_orders("solve", solution, "max_first"),
            },
        ),
    ]


def main() -> int:
    """Print a table for each case; the exit code says whether every limit was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of measuring for each table")
    budget = parser.parse_args().budget
    kept = True
    for title, shape, candidates in cases():
        keys = jax.random.split(jax.random.key(0))
        arguments = tuple(3 * jax.random.normal(key, shape) for key in keys)
        print(f"\n{title}: logits {shape}", flush=True)
        print(f"  {'':<32}{'ms':>9}{'softmaxes':>11}{'quartiles':>16}{'compile s':>11}{'temporary':>11}{'limit':>8}")
        for name, t in compare(candidates, arguments, "softmax", budget).items():
            limit = LIMITS.get(name) if title != "1,000 labels" else None
            exceeded = limit is not None and t.ratio > limit
            kept = kept and not exceeded
            print(
                f"  {name:<32}{1e3 * t.seconds:>9.3f}{t.ratio:>11.2f}{f'{t.ratio_low:.2f} - {t.ratio_high:.2f}':>16}"
                f"{t.compile_seconds:>11.2f}{t.temporary_bytes / arguments[0].nbytes:>11.2f}"
                f"{'' if limit is None else f'{limit:g}':>8}{'  EXCEEDED' if exceeded else ''}",
                flush=True,
            )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
