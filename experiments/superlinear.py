"""How fast the full-batch method is, with each curvature, length of step and certificate: on digits.

    python -m experiments.superlinear

Gradient norm against passes over the data and against time, in float64, all started at zero. A pass is one product with
the data and one with its transpose: a gradient, or an iteration of CG. The methods:

- the minimum of the bound (Equation 4 of the paper), over-relaxed, and with the exact line search;
- Böhning's bound;
- the certificate switch: the exact Hessian as soon as the local certificate beats the bound's, without a line search
  and with it (the defaults of `qbound.mm.run`);
- plain Newton-CG with a line search, which certifies nothing.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import qbound
from experiments.digits import digits
from experiments.fields import Checked, Count, NotNegative, Positive
from experiments.newton_cg import newton_cg
from experiments.plots import save, two_panels
from qbound import mm

__all__ = ["METHODS", "Curve", "SuperlinearConfig", "draw", "results", "table"]


@dataclasses.dataclass(frozen=True)
class SuperlinearConfig(Checked):
    """One picture."""

    l2: NotNegative
    tolerance: Positive
    target: Positive  # the gradient norm of the table
    max_steps: Count
    repeats: Count  # of every run, for the time
    output: str


class Curve(NamedTuple):
    """After every step, the first point included: gradient norm and passes; the certificates; and seconds in all."""

    norms: np.ndarray
    passes: np.ndarray
    certificates: np.ndarray
    seconds: float

    def first_below(self, target: float) -> int | None:
        """The number of steps to a gradient norm of `target`."""
        below = np.flatnonzero(self.norms <= target)
        return int(below[0]) if below.size else None


@dataclasses.dataclass(frozen=True)
class Method:
    """Options of `mm.run`, None for Newton-CG; and how the line is drawn."""

    options: dict[str, Any] | None
    color: str
    style: Any


METHODS = {
    "Böhning's bound": Method({"curvature": "bohning", "eta": 1.0}, "#999999", "-"),
    "bound, eta = 1": Method({"curvature": "bound", "eta": 1.0}, "#D55E00", "-"),
    "bound, eta = 1.9": Method({"curvature": "bound", "eta": 1.9}, "#E69F00", "--"),
    "bound, line search": Method({"curvature": "bound"}, "#CC79A7", "-."),
    "certificates, eta = 1": Method({"eta": 1.0}, "#56B4E9", "-"),
    "certificates, line search": Method({}, "#009E73", "-"),
    "Newton-CG, line search": Method(None, "black", ":"),
}


def _run(config: SuperlinearConfig, options, params, inputs, labels) -> Callable[[], tuple]:
    if options is None:

        def newton():
            found = newton_cg(params, inputs, labels, config.l2, config.tolerance, max_steps=config.max_steps)
            steps = int(found.steps)
            return found.first_norm, found.norms[:steps], found.passes[:steps], np.zeros(steps, int)

        return newton

    first = mm.init(qbound.linear_logits, params, inputs, labels, l2=config.l2).gradient_norm

    def majorise():
        _, info = mm.run(
            qbound.linear_logits,
            params,
            inputs,
            labels,
            l2=config.l2,
            tolerance=config.tolerance,
            max_steps=config.max_steps,
            throw=False,
            **options,
        )
        history = info.history
        return first, history.gradient_norm, history.passes, history.certificate

    return majorise


def results(config: SuperlinearConfig) -> dict[str, Curve]:
    """Every method, timed in turns."""
    with jax.enable_x64():
        data = digits(train=1797, seed=0)
        inputs = jnp.c_[data.inputs.astype(jnp.float64), jnp.ones(len(data.inputs))]
        params = jnp.zeros((inputs.shape[1], 10))
        runs = {name: _run(config, m.options, params, inputs, data.labels) for name, m in METHODS.items()}
        found = {}
        for name, one in runs.items():
            found[name] = one()  # compiles
            print(f"  {name:<28} {len(found[name][1])} steps", flush=True)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(config.repeats):
            for name, one in runs.items():
                start = time.perf_counter()
                jax.block_until_ready(one())
                seconds[name].append(time.perf_counter() - start)
        return {
            name: Curve(
                np.concatenate([[first], norms]),
                1 + np.concatenate([[0.0], np.cumsum(passes)]),
                np.asarray(certificates),
                float(np.median(seconds[name])),
            )
            for name, (first, norms, passes, certificates) in found.items()
        }


def table(config: SuperlinearConfig, found: dict[str, Curve]) -> str:
    """Steps, passes and milliseconds to the target, in Markdown."""
    rows = [
        f"| method | steps to {config.target:g} | passes | ms | gradient norm at the end |",
        "|---|---|---|---|---|",
    ]
    for name, curve in found.items():
        k = curve.first_below(config.target)
        cells = ["not reached", "", ""]
        if k is not None:
            part = curve.passes[k] / curve.passes[-1]
            cells = [f"{k}", f"{curve.passes[k]:.0f}", f"{1e3 * part * curve.seconds:.0f}"]
        end = f"{curve.norms[-1]:.1e} after {len(curve.norms) - 1} steps, {curve.passes[-1]:.0f} passes"
        rows.append(f"| {name} | {' | '.join(cells)} | {end} |")
    return "\n".join(rows)


def draw(config: SuperlinearConfig, found: dict[str, Curve]) -> Path:
    """Save the picture and return where."""
    figure, left, right = two_panels()
    for name, curve in found.items():
        look = {"color": METHODS[name].color, "linestyle": METHODS[name].style, "label": name}
        left.loglog(curve.passes, curve.norms, **look)
        right.semilogy(np.arange(len(curve.norms)), curve.norms, **look)
    for axis in (left, right):
        axis.set(ylabel="gradient norm", ylim=(config.tolerance / 3, None))
        axis.axhline(config.target, color="black", linewidth=0.5)
    left.set(xlabel="passes over the data", title="Cost")
    right.set(xlabel="steps", title="Rate: linear with a bound alone", xlim=(0, 40))
    right.legend(frameon=False, loc="lower right")
    return save(figure, config.output)


def main() -> None:
    """Print the table and draw the picture."""
    from configs.superlinear import config

    settings = config()
    print(f"digits, 1,797 x 65 x 10, l2 = {settings.l2:g}, float64:")
    found = results(settings)
    print(f"\n{table(settings, found)}")
    won = found["certificates, eta = 1"].certificates
    print(f"\nthe local certificate won {np.sum(won == mm.Certificate.LOCAL)} of {len(won)} steps from zero")
    print(f"Drawn to {draw(settings, found)}")


if __name__ == "__main__":
    main()
