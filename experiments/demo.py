"""Train a softmax classifier on scikit-learn's digits with SGD and with SPFB, and draw both.

    python -m experiments.demo

SGD runs at each learning rate of a grid, and the one with the lowest objective at the end is shown. SPFB runs once, at
a learning rate of 1: with the curvature of each batch, as in the paper, and with that of a window of recent examples.
Seconds are of training alone: compiling, and the evaluation after each epoch, are not counted.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qbound
from experiments.digits import Digits, cross_entropy, digits, objective, optimum
from experiments.fields import Checked, Count, NotNegative, Positive, Seed
from experiments.plots import save, two_panels

__all__ = ["Curve", "DemoConfig", "draw", "run", "table", "train"]


@dataclasses.dataclass(frozen=True)
class DemoConfig(Checked):
    """One comparison."""

    train: Count  # examples; the rest is for the test
    batch: Count
    epochs: Count
    l2: NotNegative
    half_life: Positive  # epochs after which the learning rate of every method is half of what it was at the start
    sgd_rates: tuple[Positive, ...]
    window: Count
    seed: Seed
    output: str


@dataclasses.dataclass(frozen=True)
class Curve:
    """Of one run: after each epoch, and before the first."""

    seconds: np.ndarray
    objective: np.ndarray
    test_error: np.ndarray


def train(config: DemoConfig, data: Digits, tx: optax.GradientTransformationExtraArgs, name: str) -> Curve:
    """Epochs of batches without repetition, one jitted call each."""
    params = {"weights": jnp.zeros((64, 10)), "bias": jnp.zeros(10)}
    state = tx.init(params)

    @jax.jit
    def epoch(params, state, data, key):
        order = jax.random.permutation(key, config.train)
        order = order[: config.train // config.batch * config.batch].reshape(-1, config.batch)

        def step(carry, rows):
            params, state = carry
            x, y = data.inputs[rows], data.labels[rows]
            grads = jax.grad(cross_entropy)(params, x, y)
            updates, state = tx.update(grads, state, params, inputs=x)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), order)[0]

    @jax.jit
    def evaluate(params, data):
        wrong = jnp.argmax(qbound.linear_logits(params, data.test_inputs), axis=1) != data.test_labels
        return objective(params, data.inputs, data.labels, config.l2), jnp.mean(wrong)

    keys = jax.random.split(jax.random.key(config.seed), config.epochs)
    jax.block_until_ready(epoch(params, state, data, keys[0]))  # compiles
    seconds, results = [0.0], [evaluate(params, data)]
    for i, key in enumerate(keys):
        start = time.perf_counter()
        params, state = jax.block_until_ready(epoch(params, state, data, key))
        seconds.append(seconds[-1] + time.perf_counter() - start)
        results.append(evaluate(params, data))
        bar = "#" * (20 * (i + 1) // config.epochs)
        print(f"\r  {name:<30} [{bar:<20}] epoch {i + 1:>3}  objective {results[-1][0]:.4f}", end="", flush=True)
    print()
    return Curve(np.array(seconds), *(np.array(column) for column in zip(*results, strict=True)))


def run(config: DemoConfig) -> tuple[dict[str, Curve], float]:
    """The curve of every method, and the least objective there is."""
    data = digits(config.train, config.seed)
    steps = config.half_life * (config.train // config.batch)

    def decayed(rate: float) -> Callable:
        return lambda step: rate / (1 + step / steps)

    print(f"{config.train} digits, batches of {config.batch}, l2 = {config.l2:g}:")
    sgd = {}
    for rate in config.sgd_rates:
        tx = optax.chain(optax.add_decayed_weights(config.l2), optax.sgd(decayed(rate)))
        sgd[rate] = train(config, data, optax.with_extra_args_support(tx), f"SGD, learning rate {rate:g}")
    best = min(sgd, key=lambda rate: np.nan_to_num(sgd[rate].objective[-1], nan=np.inf))
    like = jax.ShapeDtypeStruct((64,), jnp.float32)
    paper = qbound.spfb(decayed(1.0), qbound.linear_logits, l2=config.l2)
    window = qbound.spfb(decayed(1.0), qbound.linear_logits, l2=config.l2, window=config.window, inputs_like=like)
    curves = {
        f"SGD, best of {len(sgd)} rates ({best:g})": sgd[best],
        "SPFB": train(config, data, paper, "SPFB"),
        f"SPFB, window of {config.window}": train(config, data, window, f"SPFB, window of {config.window}"),
    }
    params = {"weights": jnp.zeros((64, 10)), "bias": jnp.zeros(10)}
    params = optimum(params, data.inputs, data.labels, config.l2)
    return curves, float(objective(params, data.inputs, data.labels, config.l2))


def table(config: DemoConfig, curves: dict[str, Curve], least: float) -> str:
    """Objective above its least value after some epochs, time, and test error, one row for each method."""
    epochs = sorted({1, 2, 5, 10, config.epochs} & set(range(config.epochs + 1)))
    width = max(map(len, curves))
    rows = [
        f"{'objective above its least after epoch':>{width + 10 * len(epochs)}}",
        f"{'':<{width}}" + "".join(f"{epoch:>10}" for epoch in epochs) + f"{'ms/epoch':>10}{'test error':>12}",
    ]
    for name, curve in curves.items():
        excess = "".join(f"{curve.objective[epoch] - least:>10.4f}" for epoch in epochs)
        milliseconds = 1e3 * curve.seconds[-1] / config.epochs
        rows.append(f"{name:<{width}}{excess}{milliseconds:>10.1f}{100 * curve.test_error[-1]:>10.1f} %")
    return "\n".join(rows)


def draw(config: DemoConfig, curves: dict[str, Curve], least: float) -> Path:
    """Save the picture and return where."""
    from matplotlib.ticker import MaxNLocator

    figure, left, right = two_panels(sharey=True)
    styles = [("#D55E00", "--"), ("#0072B2", "-."), ("#009E73", "-")]
    for (name, curve), (color, style) in zip(curves.items(), styles, strict=True):
        excess = np.maximum(curve.objective - least, 1e-6)
        left.semilogy(range(len(excess)), excess, color=color, linestyle=style, label=name)
        right.loglog(1e3 * curve.seconds[1:], excess[1:], color=color, linestyle=style, label=name)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set(xlabel="epochs", ylabel="objective above its least value", title="Against epochs")
    right.set(xlabel="milliseconds of training", title="Against time")
    left.legend(frameon=False)
    return save(figure, config.output)


def main() -> None:
    """Run the demonstration."""
    from configs.demo import config

    settings = config()
    curves, least = run(settings)
    print(f"\n{table(settings, curves, least)}")
    print(f"\nDrawn to {draw(settings, curves, least)}")


if __name__ == "__main__":
    main()
