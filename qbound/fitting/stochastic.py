"""Fast first progress: an epoch of steps of KSPFB on batches, in arrays that have labels first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qbound import compiler
from qbound.curvature.kronecker import InputFactor, LabelFactor
from qbound.families.softmax import Softmax
from qbound.fitting.factors import kronecker_solve, label_factor
from qbound.fitting.objective import Data, centred, one_hot
from qbound.models.inputs import DenseInputs
from qbound.optimizers.directions import MeanDirection, mean_direction, no_directions_yet
from qbound.optimizers.kronecker_factors import mean_label_curvature
from qbound.optimizers.kspfb import LABEL_EXAMPLES, MOMENTUM, RELATIVE_DAMPING, batch_damping

# Up to this many labels the mean curvature of the bound is a matrix.
LABEL_LIMIT = 500


class Iterate(NamedTuple):
    """The parameters, and the directions so far."""

    params: Float[Array, "n e"]
    directions: MeanDirection


def first_iterate(params: Float[Array, "n e"]) -> Iterate:
    """The iterate at the start, in float32: this phase is for the first digits."""
    params = params.astype(jnp.float32)
    directions = no_directions_yet(params, MOMENTUM)
    assert directions is not None
    return Iterate(params, directions)


@compiler.jit
def epoch(
    data: Data,
    l2: Float[Array, " e"],
    inputs: InputFactor,
    iterate: Iterate,
    batches: Int[Array, "t k"],
    rates: Float[Array, " t"],
) -> Iterate:
    """Take one step on every batch.

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
    relative = jnp.asarray(batch_damping(RELATIVE_DAMPING, batches.shape[1]), jnp.float32)
    e = iterate.params.shape[1]

    def one(iterate, of_step):
        rows, rate = of_step
        batch = _batch(data, rows)
        g = count * batch.pull_back(residuals(batch.logits(iterate.params), batch.labels), e)
        return kspfb_step(iterate, g, l2, labels, inputs, rate, relative), None

    return jax.lax.scan(one, iterate, (batches, rates))[0]


def residuals(logits: Float[Array, "n b"], labels: Int[Array, " b"]) -> Float[Array, "n b"]:
    """The derivatives of losses by logits, p - t."""
    p = jax.nn.softmax(logits, axis=0)
    return p - one_hot(labels, len(p), p.dtype)


def kspfb_step(
    iterate: Iterate,
    gradient: Float[Array, "n e"],
    l2: Float[Array, " e"],
    labels: LabelFactor,
    inputs: InputFactor,
    rate: Float[Array, ""],
    relative: Float[Array, ""],
) -> Iterate:
    """The iterate after one step, for the gradient of the mean loss without its penalty."""
    l2 = l2.astype(jnp.float32)
    g = centred(gradient) + l2[None, :] * iterate.params
    s = kronecker_solve(labels, inputs, g, jnp.max(l2), relative)
    mean, directions = mean_direction(iterate.directions, s, MOMENTUM, False)
    assert directions is not None
    return Iterate(iterate.params - rate * mean, directions)


def _batch(data: Data, rows) -> Data:
    assert isinstance(data.design, DenseInputs)
    weights = jnp.where(rows < 0, 0, data.weights[rows]).astype(jnp.float32)
    return Data(DenseInputs(data.design.x[rows].astype(jnp.float32)), data.labels[rows], weights, data.sizes)


def label_curvature(batch: Data, params: Float[Array, "n e"]) -> Float[Array, "..."]:
    """The mean curvature of the bound; with many labels the diagonal of Böhning's, on what sums to 0 over labels."""
    n = len(params)
    if n > LABEL_LIMIT:
        return jnp.full(n, 0.5, params.dtype)
    total = jnp.sum(batch.weights)
    even = jnp.full_like(batch.weights, 1 / len(batch.weights))
    weights = jnp.where(total > 0, batch.weights / jnp.where(total > 0, total, 1), even)
    return mean_label_curvature(batch.logits(params).T, weights, Softmax())
