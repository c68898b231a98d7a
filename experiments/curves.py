"""Draw the log-partition function along a line, with every quadratic that stands for it.

    python -m experiments.curves

Logits h + t u, with u a random direction of length 1: left, the functions of t; right, how far each lies above the
log-partition function. The gaps are printed as a table, with the traces of the curvatures.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import qbound
from experiments.fields import Checked, Count, NotNegative, Positive, Seed
from experiments.plots import save, two_panels

__all__ = ["CURVES", "CurvesConfig", "draw", "gap_table", "gaps", "traces"]


@dataclasses.dataclass(frozen=True)
class CurvesConfig(Checked):
    """One picture."""

    labels: Count
    logit_std: NotNegative
    seed: Seed
    reach: Positive  # the line is drawn for t in [-reach, reach]
    output: str


@dataclasses.dataclass(frozen=True)
class Curve:
    """A quadratic and how it is drawn: colours that the colour-blind can tell apart, and a dash for print."""

    make: Callable[[jax.Array], qbound.QuadraticBound]
    color: str
    style: Any  # of a Matplotlib line


CURVES = {
    "bound, descending": Curve(lambda h: qbound.log_partition_bound(h, order="descending"), "#0072B2", "-"),
    "bound, max first": Curve(lambda h: qbound.log_partition_bound(h, order="max_first"), "#009E73", "--"),
    "bound, as given": Curve(lambda h: qbound.log_partition_bound(h, order="given"), "#E69F00", "-."),
    "Böhning": Curve(qbound.bohning_bound, "#D55E00", (0, (4, 1, 1, 1, 1, 1))),
    "second-order expansion": Curve(qbound.second_order_expansion, "#CC79A7", ":"),
}


def gaps(config: CurvesConfig, t: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The log-partition function at each t, and how far each quadratic lies above it."""
    logits, direction = _line(config)
    line = logits[None, :] + jnp.outer(jnp.asarray(t, logits.dtype), direction)
    exact = jax.nn.logsumexp(line, axis=1)

    @functools.partial(jax.jit, static_argnames="make")
    def evaluate(logits, line, make):
        return jax.vmap(make(logits))(line)

    above = {name: np.asarray(evaluate(logits, line, curve.make) - exact) for name, curve in CURVES.items()}
    return np.asarray(exact), above


def traces(config: CurvesConfig) -> dict[str, float]:
    """The trace of each curvature: the quadratic form summed over all directions."""
    logits, _ = _line(config)
    return {name: float(jnp.trace(curve.make(logits).curvature.dense())) for name, curve in CURVES.items()}


def _line(config):
    key_logits, key_direction = jax.random.split(jax.random.key(config.seed))
    logits = config.logit_std * jax.random.normal(key_logits, (config.labels,), jnp.float32)
    direction = jax.random.normal(key_direction, (config.labels,), jnp.float32)
    return logits, direction / jnp.linalg.norm(direction)


def gap_table(config: CurvesConfig) -> str:
    """Gaps at a few points of the line, and the trace, one row for each quadratic."""
    t = config.reach * np.array([-1, -0.5, -0.25, 0, 0.25, 0.5, 1])
    _, above = gaps(config, t)
    width = max(map(len, CURVES))
    header = f"{'t':<{width}}" + "".join(f"{x:>10.3g}" for x in t) + f"{'trace':>10}"
    rows = [
        f"{name:<{width}}" + "".join(f"{x:>10.4f}" for x in [*above[name], trace])
        for name, trace in traces(config).items()
    ]
    return "\n".join([header, *rows])


def draw(config: CurvesConfig) -> Path:
    """Save the picture and return where."""
    t = np.linspace(-config.reach, config.reach, 401)
    exact, above = gaps(config, t)
    figure, left, right = two_panels()
    left.plot(t, exact, color="black", linewidth=2.5, label="log-partition function")
    right.axhline(0, color="black", linewidth=2.5)
    for name, curve in CURVES.items():
        left.plot(t, exact + above[name], color=curve.color, linestyle=curve.style, label=name)
        right.plot(t, above[name], color=curve.color, linestyle=curve.style, label=name)
    left.set(xlabel="t", ylabel="value", title=f"{config.labels} labels, logits h + t u")
    right.set(xlabel="t", ylabel="value less log-partition function", title="Gap: a bound is never below zero")
    left.legend(frameon=False)
    return save(figure, config.output)


def main() -> None:
    """Draw the picture and print the table."""
    from configs.curves import config

    settings = config()
    print(
        f"Quadratics along logits h + t u, |u| = 1, {settings.labels} labels: value less log-partition function at t,"
    )
    print("and the trace of the curvature, which adds up all directions.\n")
    print(gap_table(settings))
    print("\nA bound is never below zero. The second-order expansion is no bound.")
    print(f"Drawn to {draw(settings)}")


if __name__ == "__main__":
    main()
