"""Fast first progress: an epoch of steps on batches, with the Kronecker-factored curvature of the bound (KSPFB)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qbound.linear.design import Dense
from qbound.linear.factors import InputFactor, LabelFactor, label_factor, solve
from qbound.linear.objective import LABEL_LIMIT, Data, centred
from qbound.transforms.kronecker_factors import mean_label_curvature

__all__ = [
    "LABEL_EXAMPLES",
    "Iterate",
    "Memory",
    "epoch",
    "first_iterate",
    "label_curvature",
    "moved",
    "no_memory",
    "relative_damping",
    "residuals",
]

# The defaults of `qbound.kspfb`.
_MOMENTUM, _RELATIVE_DAMPING, _TYPICAL_BATCH, LABEL_EXAMPLES = 0.8, 2.0, 1000, 256


class Iterate(NamedTuple):
    """The parameters, and the mean of directions as a sum with forgetting and the weight of that sum."""

    params: Float[Array, "n e"]
    mean: Float[Array, "n e"]
    mean_weight: Float[Array, ""]


def first_iterate(params: Float[Array, "n e"]) -> Iterate:
    """In float32: this phase is for the first digits."""
    params = params.astype(jnp.float32)
    return Iterate(params, jnp.zeros_like(params), jnp.zeros((), jnp.float32))


class Memory(NamedTuple):
    """What variance reduction remembers: the derivatives by logits when each batch was last seen, and their gradient.

    Attributes:
      residuals: w (p - t), times the number of batches, for each of them.
      gradient: the mean over batches of what they give.
    """

    residuals: Float[Array, "t k n"]
    gradient: Float[Array, "n e"]


def no_memory(params: Float[Array, "n e"], batches: Int[Array, "t k"]) -> Memory:
    """Before any batch."""
    shape = (*batches.shape, len(params))
    return Memory(jnp.zeros(shape, jnp.float32), jnp.zeros(params.shape, jnp.float32))


@jax.jit
def epoch(
    data: Data,
    l2: Float[Array, " e"],
    inputs: InputFactor,
    iterate: Iterate,
    memory: Memory | None,
    batches: Int[Array, "t k"],
    order: Int[Array, " t"],
    rates: Float[Array, " t"],
    reduced: Float[Array, ""],
    curvature: Float[Array, "..."],
) -> tuple[Iterate, Memory | None]:
    """One step on every batch.

    Args:
      data: the examples.
      l2: for each input.
      inputs: the factor of inputs.
      iterate: where to start.
      memory: of the epoch before, on the same batches; to begin with, `no_memory`; None to have none.
      batches: the places of their examples; -1 for none.
      order: of the batches.
      rates: the learning rate of each step.
      reduced: 1 to reduce the variance of gradients by the memory, which is then of all batches (SAGA); 0 for plain
        ones, which enter the memory all the same.
      curvature: of labels, for steps with reduced variance; others have that of the bound.
    """
    count = len(batches)
    safe = label_curvature(_batch(data, batches[order[0], :LABEL_EXAMPLES]), iterate.params)
    labels = label_factor(jnp.where(reduced > 0, curvature.astype(jnp.float32), safe))
    relative = jnp.asarray(relative_damping(batches.shape[1]), jnp.float32)
    e = iterate.params.shape[1]

    def one(carry, of_step):
        iterate, memory = carry
        i, rate = of_step
        batch = _batch(data, batches[i])
        d = count * batch.weights[:, None] * residuals(batch, iterate.params)
        if memory is None:
            g = batch.pull_back_rows(d, e)
        else:
            change = batch.pull_back_rows(d - reduced * memory.residuals[i], e)
            g = change + reduced * memory.gradient
            memory = Memory(memory.residuals.at[i].set(d), memory.gradient + change / count)
        return (moved(iterate, g, l2, labels, inputs, rate, relative), memory), None

    return jax.lax.scan(one, (iterate, memory), (order, rates))[0]


def residuals(batch: Data, params: Float[Array, "n e"]) -> Float[Array, "b n"]:
    """The derivatives of losses by logits, p - t."""
    p = jax.nn.softmax(batch.logits(params), axis=1)
    return p - jax.nn.one_hot(batch.labels, p.shape[1], dtype=p.dtype)


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
    mean = _MOMENTUM * iterate.mean + solve(labels, inputs, g, jnp.max(l2), relative)
    weight = _MOMENTUM * iterate.mean_weight + 1
    return Iterate(iterate.params - rate / weight * mean, mean, weight)


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
    return mean_label_curvature(batch.logits(params), weights, "max_first")
