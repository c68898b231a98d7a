"""What the order of the labels does to the curvature, and how large it can get.

    python -m experiments.label_order

Prints the tables of docs/theory.md. Computed in float64; about half a minute on 2 cores.
"""

import jax
import jax.numpy as jnp
import numpy as np

import qbound

__all__ = ["largest_eigenvalues", "mean_traces"]


def mean_traces(labels: int = 10, logit_std: float = 3.0, draws: int = 10_000, seed: int = 0) -> dict[str, float]:
    """Mean trace of each curvature over random logits, averaged over as many `draws`."""
    logits = logit_std * jax.random.normal(jax.random.key(seed), (draws, labels))
    makers = {
        "bound, descending": lambda h: qbound.log_partition_bound(h, order="descending"),
        "bound, max first": lambda h: qbound.log_partition_bound(h, order="max_first"),
        "bound, as given": lambda h: qbound.log_partition_bound(h, order="given"),
        "bound, ascending": lambda h: qbound.log_partition_bound(jnp.sort(h), order="given"),
        "Böhning": qbound.bohning_bound,
        "exact Hessian": qbound.second_order_expansion,
    }
    return {
        name: float(jnp.mean(jax.jit(jax.vmap(lambda h, make=make: jnp.trace(make(h).curvature.dense())))(logits)))
        for name, make in makers.items()
    }


def largest_eigenvalues(labels: int) -> tuple[float, float]:
    """The largest eigenvalue of M over logits (t, 0, ..., 0), and the t where it is attained."""

    @jax.jit
    def top(t):
        logits = jnp.zeros(labels).at[0].set(t)
        return jnp.linalg.eigvalsh(qbound.log_partition_bound(logits).curvature.dense())[-1]

    best, step = 0.0, (2 * np.log(labels) + 2) / 11
    for _ in range(4):  # a grid, refined about its best point
        grid = np.maximum(best + step * np.arange(-11, 12), 0)
        best, step = float(max(grid, key=top)), step / 6
    return float(top(best)), best


def main() -> None:
    """Print both tables."""
    jax.config.update("jax_enable_x64", True)
    print("Mean trace, 10 labels, logits of standard deviation 3")
    for name, trace in mean_traces().items():
        print(f"  {name:<18} {trace:.2f}")
    print("Largest eigenvalue over logits (t, 0, ..., 0), descending")
    for labels in (2, 10, 100, 1000):
        value, t = largest_eigenvalues(labels)
        print(f"  n = {labels:<5} {value:7.2f} at t = {t:.2f}; Böhning 0.50; limit n/4 = {labels / 4:g}", flush=True)


if __name__ == "__main__":
    main()
