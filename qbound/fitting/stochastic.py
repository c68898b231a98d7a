"""Fast first progress: an epoch of steps on batches, with the Kronecker-factored curvature of the bound (KSPFB)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qbound import compiler
from qbound.fitting.factors import InputFactor, LabelFactor, label_factor, solve
from qbound.fitting.objective import Data, centred, one_hot
from qbound.models.inputs import Dense
from qbound.optimizers.kronecker_factors import mean_label_curvature

__all__ = [
    "Iterate",
    "LABEL_EXAMPLES",
    "LABEL_LIMIT",
    "epoch",
    "first_iterate",
    "label_curvature",
    "moved",
    "relative_damping",
    "residuals",
    "with_direction",
]


# The defaults of `qbound.kspfb`.
_MOMENTUM, _RELATIVE_DAMPING, _TYPICAL_BATCH, LABEL_EXAMPLES = 0.8, 2.0, 1000, 256


# Up to so many labels the mean curvature of the bound is a matrix.
LABEL_LIMIT = 500


class Iterate(NamedTuple):
    """The parameters, and the mean of directions as a sum with forgetting and the weight of that sum."""

    params: Float[Array, "n e"]
    mean: Float[Array, "n e"]
    mean_weight: Float[Array, ""]


def first_iterate(params: Float[Array, "n e"]) -> Iterate:
    """In float32: this phase is for the first digits."""
    params = params.astype(jnp.float32)
    return Iterate(params, jnp.zeros_like(params), jnp.zeros((), jnp.float32))


@compiler.jit
def epoch(
    data: Data,
    l2: Float[Array, " e"],
    inputs: InputFactor,
    iterate: Iterate,
    batches: Int[Array, "t k"],
    rates: Float[Array, " t"],
) -> Iterate:
    """One step on every batch.

    Args:
      data: the examples.
      l2: for each input.
      inputs: the factor of inputs.
      iterate: where to start.
      batches: the places of their examples; -1 for none.
      rates: the learning rate of each step.
    """
    count = len(batches)
    labels = label_factor(label_curvature(_batch(data, batches[0, :LABEL_EXAMPLES]), iterate.params))
    relative = jnp.asarray(relative_damping(batches.shape[1]), jnp.float32)
    e = iterate.params.shape[1]

    def one(iterate, of_step):
        rows, rate = of_step
        batch = _batch(data, rows)
        g = count * batch.pull_back(residuals(batch, iterate.params), e)
        return moved(iterate, g, l2, labels, inputs, rate, relative), None

    return jax.lax.scan(one, iterate, (batches, rates))[0]


def residuals(batch: Data, params: Float[Array, "n e"]) -> Float[Array, "n b"]:
    """The derivatives of losses by logits, p - t."""
    p = jax.nn.softmax(batch.logits(params), axis=0)
    return p - one_hot(batch.labels, len(p), p.dtype)


def moved(
    iterate: Iterate,
    gradient: Float[Array, "n e"],
    l2: Float[Array, " e"],
    labels: LabelFactor,
    inputs: InputFactor,
    rate: Float[Array, ""],
    relative: Float[Array, ""],
) -> Iterate:
    """After one step, for the gradient of the mean loss without its penalty."""
    l2 = l2.astype(jnp.float32)
    g = centred(gradient) + l2[None, :] * iterate.params
    mean, weight = with_direction(iterate, solve(labels, inputs, g, jnp.max(l2), relative))
    return Iterate(iterate.params - rate / weight * mean, mean, weight)


def with_direction(iterate: Iterate, s: Float[Array, "n e"]) -> tuple[Float[Array, "n e"], Float[Array, ""]]:
    """The sum of directions with one more, and its weight."""
    return _MOMENTUM * iterate.mean + s, _MOMENTUM * iterate.mean_weight + 1


def relative_damping(examples: int) -> float:
    """Of a batch: small ones have noisy gradients."""
    return _RELATIVE_DAMPING * max(1.0, _TYPICAL_BATCH / examples)


def _batch(data: Data, rows) -> Data:
    assert isinstance(data.design, Dense)
    weights = jnp.where(rows < 0, 0, data.weights[rows]).astype(jnp.float32)
    return Data(Dense(data.design.x[rows].astype(jnp.float32)), data.labels[rows], weights)


def label_curvature(batch: Data, params: Float[Array, "n e"]) -> Float[Array, "..."]:
    """The mean curvature of the bound; with many labels the diagonal of Böhning's, on what sums to 0 over labels."""
    n = len(params)
    if n > LABEL_LIMIT:
        return jnp.full(n, 0.5, params.dtype)
    total = jnp.sum(batch.weights)
    even = jnp.full_like(batch.weights, 1 / len(batch.weights))
    weights = jnp.where(total > 0, batch.weights / jnp.where(total > 0, total, 1), even)
    return mean_label_curvature(batch.logits(params).T, weights, "max_first")
