"""The convergence theorem of the paper, corrected: its constants on real data, and what the method does.

    python -m experiments.theory

SPFB with batches of one and learning rates eta_0/t on the digits 0, 1 and 2 at 4 x 4 pixels, every input scaled to
length 1. With curvature from another example than the gradient, the expected excess of the objective is at most Q/t;
with curvature from the same one, as in the paper, it stops falling. And the smallest example of that: three points in
one dimension. docs/theory.md has the proof.
"""

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qbound
from experiments.digits import cross_entropy, objective, pooled_digits
from experiments.fields import Above1, Checked, Count, Positive
from experiments.plots import save, two_panels
from qbound import mm

__all__ = ["Constants", "Outcome", "TheoryConfig", "constants", "counterexample", "draw", "simulate", "slope", "table"]

INDEPENDENT, SAME = "another example", "the same example (the paper)"


@dataclasses.dataclass(frozen=True)
class TheoryConfig(Checked):
    """One table and one picture."""

    l2: tuple[Positive, ...]
    c: Above1  # 2 mu_1 lambda_1 eta_0
    steps: Count
    seeds: Count
    counterexample_steps: Count
    output: str


@dataclasses.dataclass(frozen=True)
class Constants:
    """What the theorem is made of; for inputs of length at most R, n labels, any order and any logits."""

    mu_1: float  # (Sigma + l2 I)^-1 is above it
    mu_2: float  # and below this
    lambda_1: float  # the Hessian of the objective is above it
    lambda_2: float  # and below this
    eta_0: float
    second_moment: float  # sigma^2: of the gradient of one example, the most along the iterates
    first_excess: float  # phi_1: of the objective at the start

    @property
    def c(self) -> float:
        """2 mu_1 lambda_1 eta_0."""
        return 2 * self.mu_1 * self.lambda_1 * self.eta_0

    @property
    def q(self) -> float:
        """max{C/(2(c - 1)), C, phi_1}, C = lambda_2 mu_2^2 eta_0^2 sigma^2."""
        noise = self.lambda_2 * self.mu_2**2 * self.eta_0**2 * self.second_moment
        return max(noise / (2 * (self.c - 1)), noise, self.first_excess)


def constants(radius: float, n: int, l2: float, c: float, second_moment: float, first_excess: float) -> Constants:
    """Those of logistic regression, with the learning rate that gives `c`."""
    mu_1, lambda_1 = 1 / (n * radius**2 / 4 + l2), l2
    return Constants(
        mu_1=mu_1,
        mu_2=1 / l2,
        lambda_1=lambda_1,
        lambda_2=radius**2 / 2 + l2,
        eta_0=c / (2 * mu_1 * lambda_1),
        second_moment=second_moment,
        first_excess=first_excess,
    )


def unit_digits() -> tuple[np.ndarray, np.ndarray]:
    """Inputs of length 1, so that R = 1, and labels."""
    inputs, labels = (np.asarray(x) for x in pooled_digits())
    inputs = inputs.astype(np.float64)
    return inputs / np.linalg.norm(inputs, axis=1, keepdims=True), labels


class Outcome(NamedTuple):
    """Means over seeds, before every step: excess of the objective, and second moment of an example's gradient."""

    excess: np.ndarray
    second_moment: np.ndarray


@functools.partial(jax.jit, static_argnames=("n", "source", "steps", "seeds"))
def _paths(inputs, labels, l2, eta_0, *, n, source, steps, seeds):
    """For every seed, before every step: the objective, and the mean over examples of |gradient|^2."""
    tx = qbound.spfb(lambda t: eta_0 / (t + 1.0), qbound.linear_logits, l2=l2, solver="woodbury")
    targets = jax.nn.one_hot(labels, n, dtype=inputs.dtype)

    def second_moment(params):
        d = jax.nn.softmax(inputs @ params) - targets
        lengths = jnp.mean(jnp.sum(inputs**2, axis=1) * jnp.sum(d**2, axis=1))
        mean = inputs.T @ d / len(inputs)
        return lengths + 2 * l2 * jnp.sum(params * mean) + l2**2 * jnp.sum(params**2)

    def path(key):
        def step(carry, t):
            params, state = carry
            rows = jax.random.randint(jax.random.fold_in(key, t), (2, 1), 0, len(inputs))
            x, y = inputs[rows[0]], labels[rows[0]]
            grads = jax.grad(cross_entropy)(params, x, y)
            curvature_inputs = inputs[rows[1]] if source == INDEPENDENT else x
            updates, state = tx.update(grads, state, params, curvature_inputs=curvature_inputs)
            now = objective(params, inputs, labels, l2), second_moment(params)
            return (optax.apply_updates(params, updates), state), now

        start = jnp.zeros((inputs.shape[1], n), inputs.dtype)
        return jax.lax.scan(step, (start, tx.init(start)), jnp.arange(steps))[1]

    return jax.vmap(path)(jax.random.split(jax.random.key(0), seeds))


def simulate(config: TheoryConfig, data: tuple, l2: float, source: str) -> tuple[Outcome, Constants]:
    """The method on `data`, inputs and labels, and the constants of the theorem along its iterates."""
    with jax.enable_x64():
        inputs, labels = jnp.asarray(data[0], jnp.float64), jnp.asarray(data[1])
        n, radius = int(labels.max()) + 1, float(jnp.linalg.norm(inputs, axis=1).max())
        known = functools.partial(constants, radius, n, l2, config.c)
        start = jnp.zeros((inputs.shape[1], n))
        _, info = mm.run(qbound.linear_logits, start, inputs, labels, l2=l2, tolerance=1e-10)
        sizes = {"n": n, "steps": config.steps, "seeds": config.seeds}
        paths = _paths(inputs, labels, l2, known(0.0, 0.0).eta_0, source=source, **sizes)
        values, moments = (np.asarray(x).mean(axis=0) for x in paths)
        outcome = Outcome(values - float(info.objective), moments)
    return outcome, known(float(moments.max()), float(outcome.excess[0]))


def slope(excess: np.ndarray) -> float:
    """Of log(excess) against log(t), over the last tenfold of steps."""
    t = np.arange(1, len(excess) + 1)
    last = t >= len(excess) / 10
    return float(np.polyfit(np.log(t[last]), np.log(excess[last]), 1)[0])


def counterexample(steps: int, source: str) -> tuple[np.ndarray, float]:
    """The path of theta on three points in one dimension, from the optimum on, and the optimum.

    Two labels with features (x, 0), x = 1, 1, 5 with labels 1, 1, 2, l2 = 0.1, learning rates 1/(1 + t/20).
    """
    with jax.enable_x64():
        features = jnp.asarray([[[1.0], [0.0]], [[1.0], [0.0]], [[5.0], [0.0]]])
        labels = jnp.array([0, 0, 1])

        def logits(theta, f):
            return f @ theta

        optimum, _ = mm.run(logits, jnp.zeros(1), features, labels, l2=0.1, tolerance=1e-12)
        tx = qbound.spfb(lambda t: 1 / (1 + t / 20), logits, l2=0.1, solver="dense")

        def step(carry, rows):
            theta, state = carry
            f, y = features[rows[:1]], labels[rows[:1]]
            grads = jax.grad(lambda theta: optax.softmax_cross_entropy_with_integer_labels(logits(theta, f), y).mean())(
                theta
            )
            curvature_inputs = features[rows[1:]] if source == INDEPENDENT else f
            updates, state = tx.update(grads, state, theta, curvature_inputs=curvature_inputs)
            return (theta + updates, state), (theta + updates)[0]

        rows = jax.random.randint(jax.random.key(0), (steps, 2), 0, 3)
        _, path = jax.lax.scan(step, (optimum, tx.init(optimum)), rows)
        return np.asarray(path), float(optimum[0])


def table(found: dict[float, dict[str, tuple[Outcome, Constants]]]) -> str:
    """The constants and what was measured, in Markdown."""
    rows = [
        "| l2 | mu_1 | mu_2 | lambda_2 | eta_0 | sigma^2 | Q | t | Q/t | E[L - L*], another example | slope | "
        "the same example | slope |",
        "|---" * 13 + "|",
    ]
    for l2, sources in found.items():
        (independent, k), (same, _) = sources[INDEPENDENT], sources[SAME]
        t = len(independent.excess)
        rows.append(
            f"| {l2:g} | {k.mu_1:.3g} | {k.mu_2:.3g} | {k.lambda_2:.3g} | {k.eta_0:.3g} | {k.second_moment:.3g} | "
            f"{k.q:.3g} | {t:,} | {k.q / t:.2e} | {independent.excess[-1]:.2e} | {slope(independent.excess):.2f} | "
            f"{same.excess[-1]:.2e} | {slope(same.excess):.2f} |"
        )
    return "\n".join(rows)


def draw(
    config: TheoryConfig,
    found: dict[float, dict[str, tuple[Outcome, Constants]]],
    paths: dict[str, np.ndarray],
    optimum: float,
) -> Path:
    """Save the picture and return where."""
    figure, left, right = two_panels()
    l2 = config.l2[0]
    looks = {INDEPENDENT: ("#009E73", "-"), SAME: ("#D55E00", "--")}
    for source, (outcome, known) in found[l2].items():
        t = np.arange(1, len(outcome.excess) + 1)
        color, style = looks[source]
        left.loglog(t, outcome.excess, color=color, linestyle=style, label=f"curvature from {source}")
        if source == INDEPENDENT:
            left.loglog(t, known.q / t, color="black", label=f"Q/t, Q = {known.q:.3g}")
    left.set(xlabel="t", ylabel="mean excess of the objective", title=f"Digits, l2 = {l2:g}, {config.seeds} seeds")
    left.legend(frameon=False, loc="lower left")
    for source, path in paths.items():
        color, style = looks[source]
        right.semilogx(np.arange(1, len(path) + 1), path, color=color, linestyle=style, linewidth=0.8, label=source)
    right.axhline(optimum, color="black", linewidth=1, label=f"optimum, {optimum:.3f}")
    right.set(xlabel="t", ylabel="theta", ylim=(-2.5, 1.5), title="Three points in one dimension")
    right.legend(frameon=False)
    return save(figure, config.output)


def main() -> None:
    """Print the table and draw the picture."""
    from configs.theory import config

    settings = config()
    found: dict[float, dict[str, tuple[Outcome, Constants]]] = {}
    for l2 in settings.l2:
        found[l2] = {}
        for source in (INDEPENDENT, SAME):
            found[l2][source] = simulate(settings, unit_digits(), l2, source)
            outcome, known = found[l2][source]
            below = bool(np.all(outcome.excess <= known.q / np.arange(1, len(outcome.excess) + 1)))
            print(
                f"  l2 = {l2:g}, curvature from {source}: excess {outcome.excess[-1]:.2e} after {settings.steps} "
                f"steps, {'below' if below else 'NOT below'} Q/t throughout",
                flush=True,
            )
    print(f"\n{table(found)}\n")
    paths = {}
    optimum = 0.0
    for source in (INDEPENDENT, SAME):
        paths[source], optimum = counterexample(settings.counterexample_steps, source)
        tail = paths[source][len(paths[source]) // 2 :]
        print(f"three points, curvature from {source}: mean of the last half {tail.mean():.3f}, optimum {optimum:.3f}")
    print(f"Drawn to {draw(settings, found, paths, optimum)}")


if __name__ == "__main__":
    main()
