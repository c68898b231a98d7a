"""SPFB with small batches: where the curvature should come from.

    python -m experiments.small_batches

The digits 0, 1 and 2 at 4 x 4 pixels, 51 parameters, learning rate 1/(1 + t/200), started at zero. For each size of
batch and each source of the curvature: how far the mean of the last half of the iterates ends above the least
objective, relative to it, and the worst objective on the way. Medians over seeds. The sources:

- the same batch, as in the paper: safe, but gradient and curvature depend on each other, and every step is biased;
- the batch before: no bias, but directions it does not cover have no curvature but l2;
- a running average of the curvatures of the batches;
- a window of recent examples, the current batch among them: `window=`, with steps limited as `qbound.spfb` does.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qbound
from experiments.digits import cross_entropy, objective, optimum, pooled_digits
from experiments.fields import Checked, Count, Positive, Share
from experiments.plots import save, two_panels
from qbound.curvature.model import mean_curvature

__all__ = ["SOURCES", "SmallBatchesConfig", "draw", "results", "run", "table", "window_source"]


@dataclasses.dataclass(frozen=True)
class SmallBatchesConfig(Checked):
    """One table."""

    batches: tuple[Count, ...]
    steps: Count
    l2: Positive
    window: Count
    average_weight: Share  # of the current batch in the running average
    seeds: Count
    output: str


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the curvature comes from, and how its line is drawn."""

    start: Callable[[SmallBatchesConfig, Any], Any]  # the state, from the first parameters
    step: Callable  # config, gradient, state, parameters, inputs, time -> parameters, state
    color: str
    style: Any
    marker: str


def _rate(step):
    return 1 / (1 + step / 200)


def _transform(config, **options):
    return qbound.spfb(_rate, qbound.linear_logits, l2=config.l2, solver="dense", **options)


def _optax_source(options: Callable[[SmallBatchesConfig], dict], *look) -> Source:
    """A source that is an option of the transform."""

    def step(config, grads, state, params, x, t):
        updates, state = _transform(config, **options(config)).update(grads, state, params, inputs=x)
        return optax.apply_updates(params, updates), state

    return Source(lambda config, params: _transform(config, **options(config)).init(params), step, *look)


def _batch_before(config, grads, state, params, x, t):
    """Curvature of the last batch, of the current one in the first step."""
    inner, before = state
    before = jnp.where(t == 0, x, before[: len(x)])
    updates, inner = _transform(config).update(grads, inner, params, curvature_inputs=before)
    return optax.apply_updates(params, updates), (inner, jnp.zeros_like(state[1]).at[: len(x)].set(x))


def _average(config, grads, state, params, x, t):
    """(1 - w) average + w current, as matrices, started with the first batch."""
    current = mean_curvature(
        qbound.linear_logits,
        params,
        x,
        jnp.ones(len(x)),
        bound=functools.partial(qbound.log_partition_bound, order="max_first"),
    ).dense()
    average = jnp.where(t == 0, current, state + config.average_weight * (current - state))
    g = (grads + config.l2 * params).ravel()
    s = jnp.linalg.solve(average + config.l2 * jnp.eye(g.size), g).reshape(params.shape)
    return params - _rate(t) * s, average


def window_source(**options) -> Source:
    """A window of recent examples."""
    like = jax.ShapeDtypeStruct((17,), jnp.float32)
    return _optax_source(lambda config: {"window": config.window, "inputs_like": like, **options}, "#009E73", "-", "o")


SOURCES = {
    "the same batch (the paper)": _optax_source(lambda config: {}, "#D55E00", "--", "s"),
    "the batch before": Source(
        lambda config, params: (_transform(config).init(params), jnp.zeros((max(config.batches), params.shape[0]))),
        _batch_before, "#CC79A7", ":", "v",
    ),
    "running average": Source(
        lambda config, params: jnp.zeros((params.size, params.size)), _average, "#E69F00", "-.", "^"
    ),
    "window of recent examples": window_source(),
}  # fmt: skip


def run(config: SmallBatchesConfig, source: str, batch: int) -> tuple[jax.Array, jax.Array]:
    """For each seed: the objective after every step, and that of the mean of the last half of the iterates."""
    inputs, labels = pooled_digits()
    method = SOURCES[source]
    params = jnp.zeros((inputs.shape[1], 3))

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None))
    def train(key, inputs, labels):
        def step(carry, t):
            params, state = carry
            rows = jax.random.randint(jax.random.fold_in(key, t), (batch,), 0, len(inputs))
            x, y = inputs[rows], labels[rows]
            grads = jax.grad(cross_entropy)(params, x, y)
            params, state = method.step(config, grads, state, params, x, t)
            return (params, state), (objective(params, inputs, labels, config.l2), params)

        _, (values, iterates) = jax.lax.scan(step, (params, method.start(config, params)), jnp.arange(config.steps))
        return values, objective(jnp.mean(iterates[config.steps // 2 :], axis=0), inputs, labels, config.l2)

    return train(jax.random.split(jax.random.key(0), config.seeds), inputs, labels)


def results(config: SmallBatchesConfig) -> dict[str, dict[int, tuple[float, float]]]:
    """Relative excess and worst objective, for each source and size of batch."""
    inputs, labels = pooled_digits()
    least = objective(optimum(jnp.zeros((inputs.shape[1], 3)), inputs, labels, config.l2), inputs, labels, config.l2)
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for source in SOURCES:
        found[source] = {}
        for batch in config.batches:
            values, last = run(config, source, batch)
            excess, worst = float(jnp.median(last) / least - 1), float(jnp.median(jnp.max(values, axis=1)))
            found[source][batch] = excess, worst
            print(f"  {source:<28} batch {batch:>4}  excess {excess:.1e}, worst {worst:.3g}", flush=True)
    return found


def table(found: dict[str, dict[int, tuple[float, float]]]) -> str:
    """One row for each source, in Markdown."""
    batches = list(next(iter(found.values())))
    rows = ["| curvature from | " + " | ".join(f"batch {b}" for b in batches) + " |", "|---" * (len(batches) + 1) + "|"]
    for source, cells in found.items():
        text = (f"{excess:.1e}, worst {worst:.2g}" if worst < 100 else f"{excess:.1e}, worst {worst:,.0f}"
                for excess, worst in cells.values())  # fmt: skip
        rows.append(f"| {source} | " + " | ".join(text) + " |")
    return "\n".join(rows)


def draw(config: SmallBatchesConfig, found: dict[str, dict[int, tuple[float, float]]]) -> Path:
    """Save the picture and return where."""
    figure, left, right = two_panels()
    for name, cells in found.items():
        source = SOURCES[name]
        for axis, column in ((left, 0), (right, 1)):
            values = [cell[column] for cell in cells.values()]
            axis.loglog(
                list(cells), values, color=source.color, linestyle=source.style, marker=source.marker, label=name
            )
    right.axhline(np.log(3), color="black", linewidth=1, label="at the start")
    left.set(xlabel="batch size", ylabel="relative excess of the objective at the end", title="Bias and noise")
    right.set(xlabel="batch size", ylabel="worst objective on the way", title="Safety")
    right.legend(frameon=False)
    return save(figure, config.output)


def main() -> None:
    """Print the table and draw the picture."""
    from configs.small_batches import config

    settings = config()
    print(f"{settings.steps} steps, l2 = {settings.l2:g}, {settings.seeds} seeds:")
    found = results(settings)
    print(f"\n{table(found)}")
    print(f"\nDrawn to {draw(settings, found)}")


if __name__ == "__main__":
    main()
