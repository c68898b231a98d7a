r"""Learn from examples that come in batches and are not kept.

The steps are those of the stochastic phase, with a learning rate that decays as the stream goes on, the curvature of
inputs from all that were seen, and parameters averaged over steps, late ones counting more:

.. math:: \bar W_t = (1 - c_t) \bar W_{t-1} + c_t W_t, \qquad c_t = \frac{9}{t + 8}

The factors of curvature are of other examples than the gradient, and may be far too small for these. So no step is
longer than the bound of its own batch allows: along W - eta s that changes by -eta g's + eta^2/2 s'Bs, with B its
curvature, and does not rise up to eta = 2 g's / s'Bs. Steps on a batch can thus not diverge, whatever the factors are.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qbound import compiler
from qbound.curvature.kronecker import InputFactor
from qbound.fitting import label_means
from qbound.fitting.factors import kronecker_solve, label_factor
from qbound.fitting.label_means import Sums, bound_quadratics
from qbound.fitting.moments import Sketch, matrix_factor, no_sketch, sketch_factor, turned, with_rows
from qbound.fitting.objective import Data, centred, extended, one_hot
from qbound.fitting.stochastic import Iterate, first_iterate, label_curvature, residuals
from qbound.linalg.dense import times
from qbound.models.inputs import DenseInputs
from qbound.optimizers.directions import MeanDirection, mean_direction
from qbound.optimizers.kspfb import LABEL_EXAMPLES, MOMENTUM, RELATIVE_DAMPING, batch_damping

# The learning rate: at first, after how many steps it begins to fall, and with which power of their number.
_FIRST_RATE, _FLAT_STEPS, _POWER = 2.0, 50.0, 0.75
# How much of the mean label curvature a step keeps.
_DECAY = 0.9
# Second moments are factorised anew, or their sketch is turned, when their weight is this many times what it was.
_GROWTH = 2.0
# The longest step, in units of that to the least value of the bound of its batch, with a matrix and with a sketch. With
# more columns than rows a batch tells less of the others.
_LIMIT, _SKETCH_LIMIT = 2.0, 1.0
# In a sketch what is not among its directions has a mean eigenvalue of 1, and needs less damping.
_SKETCH_DAMPING = 0.25


class Stream(NamedTuple):
    """What is kept of a stream.

    Attributes:
      iterate: the parameters of the steps.
      average: those to use.
      moments: sum of w x x', (e, e), or a sketch of it, over what was seen.
      weight: of what was seen.
      factor: the moments as they were last factorised.
      factor_weight: their weight then.
      label_curvature: a running mean.
      labels: sums over the examples of each label.
      steps: how many were taken.
    """

    iterate: Iterate
    average: Float[Array, "n e"]
    moments: Float[Array, "e e"] | Sketch
    weight: Float[Array, ""]
    factor: InputFactor
    factor_weight: Float[Array, ""]
    label_curvature: Float[Array, "..."]
    labels: Sums
    steps: Int[Array, ""]


def first_stream(params: Any, matrix_limit: int = 2000) -> Stream:
    """The state before any example, from given parameters (n, e).

    Second moments of inputs are a matrix up to `matrix_limit` of them, and a sketch beyond.
    """
    iterate = first_iterate(centred(jnp.asarray(params, jnp.float32)))
    n, e = iterate.params.shape
    zero, zeros = jnp.zeros((), jnp.float32), jnp.zeros(e, jnp.float32)
    if e <= matrix_limit:
        moments = jnp.zeros((e, e), jnp.float32)
        factor = InputFactor(zeros, zeros, moments)
    else:
        moments = no_sketch(e)
        r = moments.basis.shape[1]
        factor = InputFactor(zeros, jnp.zeros(r, jnp.float32), moments.basis, zero)
    empty = Data(DenseInputs(jnp.zeros((1, e), jnp.float32)), jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.float32))
    with compiler.compiled_here():
        curvature = jax.eval_shape(label_curvature, empty, iterate.params)
    return Stream(
        iterate=iterate,
        average=iterate.params,
        moments=moments,
        weight=zero,
        factor=factor,
        factor_weight=zero,
        label_curvature=jnp.zeros(curvature.shape, jnp.float32),
        labels=Sums(jnp.zeros(n, jnp.float32), jnp.zeros((n, e), jnp.float32)),
        steps=jnp.zeros((), jnp.int32),
    )


def rescaled(stream: Stream, unit: float) -> Stream:
    """The same stream, with all weights seen times `unit`: for batches whose weights are in another one."""

    def scaled(sums):
        return jax.tree.map(lambda a: a * jnp.asarray(unit, a.dtype), sums)

    m = stream.moments
    # What a sketch says does not depend on the length of its basis.
    moments = m._replace(squares=scaled(m.squares), image=scaled(m.image)) if isinstance(m, Sketch) else scaled(m)
    return stream._replace(
        moments=moments,
        weight=scaled(stream.weight),
        factor_weight=scaled(stream.factor_weight),
        labels=scaled(stream.labels),
    )


@compiler.jit
def consume(stream: Stream, batch: Data, l2: Float[Array, " e"]) -> Stream:
    """One step on a batch of float32 inputs in random order; rows of weight 0 do not count."""
    n, e = stream.average.shape
    design = batch.design
    assert isinstance(design, DenseInputs)
    x = extended(design, e)
    total = jnp.sum(batch.weights)
    weight = stream.weight + total
    due = weight >= _GROWTH * stream.factor_weight
    moments, factor = _with_inputs(stream, x, batch.weights, weight, due)
    t = one_hot(batch.labels, n, jnp.float32)
    of_batch = Sums(times(t, batch.weights), times(batch.weights[None, :] * t, x))
    labels = jax.tree.map(jnp.add, stream.labels, of_batch)
    examples = total**2 / jnp.sum(batch.weights**2)
    gamma = label_means.unlikeness(stream.labels.weights, of_batch.weights, examples)
    known = label_means.known_labels(stream.labels.weights, labels.weights, gamma)
    batch = dataclasses.replace(batch, weights=batch.weights / total)
    some = DenseInputs(design.x[:LABEL_EXAMPLES]), batch.labels[:LABEL_EXAMPLES], batch.weights[:LABEL_EXAMPLES]
    first = Data(*some, batch.sizes)
    new = label_curvature(first, stream.iterate.params)
    curvature = jnp.where(stream.steps == 0, new, _DECAY * stream.label_curvature + (1 - _DECAY) * new)
    steps = stream.steps + 1
    count = steps.astype(jnp.float32)
    rate = _FIRST_RATE / (1 + count / _FLAT_STEPS) ** _POWER
    # Steps that have become short need less damping against the noise of gradients.
    relative = rate / _FIRST_RATE * jnp.asarray(batch_damping(RELATIVE_DAMPING, len(x)), jnp.float32)
    if isinstance(moments, Sketch):
        relative = _SKETCH_DAMPING * relative
    longest = _SKETCH_LIMIT if isinstance(moments, Sketch) else _LIMIT
    means = label_means.label_means(labels), label_means.label_means(of_batch)
    task = _Task(batch, l2.astype(jnp.float32), *means, gamma, known)

    logits = jnp.where(known[:, None], batch.logits(stream.iterate.params), label_means.ABSENT)
    g = _gradient(task, stream.iterate.params, logits)
    s = _of_known(kronecker_solve(label_factor(curvature), factor, g, jnp.max(task.l2), relative), known)
    iterate = _step_within_bound(task, stream.iterate, logits, g, s, rate, longest)
    share = 9 / (count + 8)
    average = (1 - share) * stream.average + share * iterate.params
    factor_weight = jnp.where(due, weight, stream.factor_weight)
    entered = Stream(iterate, average, moments, weight, factor, factor_weight, curvature, labels, steps)
    # Of examples without weight, or with numbers too large for float32, nothing can be learnt.
    sound = (total > 0) & jax.tree.reduce(
        jnp.logical_and, jax.tree.map(lambda a: jnp.all(jnp.isfinite(a)), (iterate, moments, labels))
    )
    return jax.tree.map(lambda new, old: jnp.where(sound, new, old), entered, stream)


class _Task(NamedTuple):
    """What one step has to minimise: the objective of a batch, with what it lacks of labels."""

    batch: Data
    l2: Float[Array, " e"]
    of_all: label_means.LabelMeans
    of_batch: label_means.LabelMeans
    gamma: Float[Array, ""]
    known: Bool[Array, " n"]


def _with_inputs(stream: Stream, x, weights, weight, due) -> tuple[Any, InputFactor]:
    """The moments with those of a batch, and their factor."""
    if isinstance(stream.moments, Sketch):
        sketch = with_rows(stream.moments, x, weights)
        factor = sketch_factor(sketch, weight)
        return jax.lax.cond(due, turned, lambda sketch: sketch, sketch), factor
    moments = stream.moments + times((weights[:, None] * x).T, x)
    return moments, jax.lax.cond(due, lambda: matrix_factor(moments / weight), lambda: stream.factor)


def _gradient(task: _Task, params: Float[Array, "n e"], logits: Float[Array, "n b"]) -> Float[Array, "n e"]:
    g = task.batch.pull_back(residuals(logits, task.batch.labels), params.shape[1])

    def corrected(g):
        of_all, of_batch = (label_means.gradient(m, params, task.known) for m in (task.of_all, task.of_batch))
        return g + task.gamma * (of_all - of_batch)

    g = jax.lax.cond(task.gamma > 0, corrected, lambda g: g, g)
    return _of_known(g, task.known) + task.l2[None, :] * params


def _of_known(v: Float[Array, "n e"], known: Bool[Array, " n"]) -> Float[Array, "n e"]:
    """A direction for labels in the model, without what is the same for all of them; 0 for others."""
    keep = known.astype(v.dtype)[:, None]
    return keep * (v - jnp.sum(keep * v, axis=0, keepdims=True) / jnp.maximum(jnp.sum(keep), 1))


def _step_within_bound(
    task: _Task,
    iterate: Iterate,
    logits: Float[Array, "n b"],
    g: Float[Array, "n e"],
    s: Float[Array, "n e"],
    rate: Float[Array, ""],
    longest: float,
) -> Iterate:
    """The iterate after one step along the mean of directions, or along `s` if the objective would rise along that."""
    mean, directions = mean_direction(iterate.directions, s, MOMENTUM, False)
    assert directions is not None
    falls = jnp.sum(g * _of_known(mean, task.known)) > 0
    alone = s, MeanDirection(s, jnp.ones_like(directions.mean_direction_weight))
    mean, directions = jax.tree.map(lambda a, b: jnp.where(falls, a, b), (mean, directions), alone)
    # Of size 1, so that no square leaves the range of float32.
    d = _of_known(mean, task.known)
    largest = jnp.max(jnp.abs(d))
    size: Array = jnp.where(largest > 0, largest, 1)  # pyright: ignore[reportAssignmentType]
    unit = d / size
    slope = jnp.sum(g * unit)
    curvature = jnp.sum(task.batch.weights * bound_quadratics(logits, task.batch.logits(unit)))
    curvature += jnp.sum(task.l2[None, :] * unit**2)
    curvature += jax.lax.cond(
        task.gamma > 0,
        lambda: task.gamma * label_means.curvature_along(task.of_all, iterate.params, task.known, unit),
        lambda: jnp.zeros((), unit.dtype),
    )
    # Where there is no curvature there is no slope either.
    least = jnp.finfo(curvature.dtype).tiny
    limit = jnp.where(curvature > least, longest * jnp.maximum(slope, 0) / jnp.maximum(curvature, least), 0)
    return Iterate(iterate.params - jnp.minimum(rate * size, limit) * unit, directions)
