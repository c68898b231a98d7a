r"""Learn from examples that come in batches and are not kept.

The steps are those of the stochastic phase, with a learning rate that decays as the stream goes on, the curvature of
inputs from all that were seen, and parameters averaged over steps, late ones counting more:

.. math:: \bar W_t = (1 - c_t) \bar W_{t-1} + c_t W_t, \qquad c_t = \frac{9}{t + 8}
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qbound.linear.design import Dense
from qbound.linear.factors import InputFactor, label_factor
from qbound.linear.objective import Data, centred, extended
from qbound.linear.stochastic import (
    LABEL_EXAMPLES,
    Iterate,
    first_iterate,
    label_curvature,
    moved,
    relative_damping,
    residuals,
)
from qbound.solve import times
from qbound.transforms.kronecker_factors import input_scales

__all__ = ["Stream", "consume", "first_stream"]

# The learning rate: at first, after how many steps it begins to fall, and with which power of their number.
_FIRST_RATE, _FLAT_STEPS, _POWER = 2.0, 50.0, 0.75
# Of the mean label curvature.
_DECAY = 0.9
# Second moments of inputs are a matrix up to so many of them, and a diagonal beyond.
_MATRIX_LIMIT = 2000
# They are factorised anew when their weight is so many times what it was.
_GROWTH = 2.0


class Stream(NamedTuple):
    """What is kept of a stream.

    Attributes:
      iterate: the parameters of the steps.
      average: those to use.
      moments: sum of w x x', (e, e), or of w x^2, (e,), over what was seen.
      weight: of what was seen.
      factor: the moments as they were last factorised.
      factor_weight: their weight then.
      label_curvature: a running mean.
      steps: how many were taken.
    """

    iterate: Iterate
    average: Float[Array, "n e"]
    moments: Float[Array, "..."]
    weight: Float[Array, ""]
    factor: InputFactor
    factor_weight: Float[Array, ""]
    label_curvature: Float[Array, "..."]
    steps: Int[Array, ""]


def first_stream(params: Any) -> Stream:
    """Before any example, from given parameters (n, e)."""
    iterate = first_iterate(centred(jnp.asarray(params, jnp.float32)))
    n, e = iterate.params.shape
    is_matrix = e <= _MATRIX_LIMIT
    zero = jnp.zeros((), jnp.float32)
    zeros = jnp.zeros(e, jnp.float32)
    matrix = jnp.zeros((e, e), jnp.float32) if is_matrix else None
    empty = Data(Dense(jnp.zeros((1, e), jnp.float32)), jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.float32))
    curvature = jax.eval_shape(label_curvature, empty, iterate.params)
    return Stream(
        iterate=iterate,
        average=iterate.params,
        moments=zeros if matrix is None else matrix,
        weight=zero,
        factor=InputFactor(zeros, zeros, matrix),
        factor_weight=zero,
        label_curvature=jnp.zeros(curvature.shape, jnp.float32),
        steps=jnp.zeros((), jnp.int32),
    )


@jax.jit
def consume(stream: Stream, batch: Data, l2: Float[Array, " e"]) -> Stream:
    """One step on a batch of float32 inputs in random order; rows of weight 0 do not count."""
    n, e = stream.average.shape
    design = batch.design
    assert isinstance(design, Dense)
    x = extended(design, e)
    total = jnp.sum(batch.weights)
    weighted = batch.weights[:, None] * x
    more = times(weighted.T, x) if stream.moments.ndim == 2 else jnp.sum(weighted * x, axis=0)
    moments, weight = stream.moments + more, stream.weight + total
    due = weight >= _GROWTH * stream.factor_weight
    factor = jax.lax.cond(due, lambda: _factor(moments / weight), lambda: stream.factor)
    batch = Data(design, batch.labels, batch.weights / total)
    first = Data(Dense(design.x[:LABEL_EXAMPLES]), batch.labels[:LABEL_EXAMPLES], batch.weights[:LABEL_EXAMPLES])
    new = label_curvature(first, stream.iterate.params)
    curvature = jnp.where(stream.steps == 0, new, _DECAY * stream.label_curvature + (1 - _DECAY) * new)
    steps = stream.steps + 1
    t = steps.astype(jnp.float32)
    rate = _FIRST_RATE / (1 + t / _FLAT_STEPS) ** _POWER
    # Steps that have become short need less damping against the noise of gradients.
    relative = rate / _FIRST_RATE * jnp.asarray(relative_damping(len(x)), jnp.float32)
    gradient = batch.pull_back(residuals(batch, stream.iterate.params), e)
    iterate = moved(stream.iterate, gradient, l2, label_factor(curvature), factor, rate, relative)
    share = 9 / (t + 8)
    average = (1 - share) * stream.average + share * iterate.params
    factor_weight = jnp.where(due, weight, stream.factor_weight)
    entered = Stream(iterate, average, moments, weight, factor, factor_weight, curvature, steps)
    # Of examples without weight, or with numbers too large for float32, nothing can be learnt.
    sound = (total > 0) & jnp.all(jnp.isfinite(iterate.params)) & jnp.all(jnp.isfinite(more))
    return jax.tree.map(lambda new, old: jnp.where(sound, new, old), entered, stream)


def _factor(moments: Float[Array, "..."]) -> InputFactor:
    """In the scales of KSPFB."""
    diagonal = jnp.diag(moments) if moments.ndim == 2 else moments
    scales = input_scales(diagonal)
    if moments.ndim == 1:
        return InputFactor(scales, diagonal * scales**2, None)
    values, vectors = jnp.linalg.eigh(scales[:, None] * moments * scales[None, :], symmetrize_input=False)
    return InputFactor(scales, jnp.maximum(values, 0), vectors)
