r"""What is known of labels that a batch of a stream lacks: how frequent they were, and the mean of their inputs.

Rows sorted by label make batches of one or two labels, and steps on them forget the others. So as much as the labels
of a batch are unlike those of all that was seen, its gradient is corrected by what class means say:

.. math:: g + \gamma \Bigl[ \sum_k \pi_k \nabla \ell_k(\mu_k) - \sum_k q_k \nabla \ell_k(m_k) \Bigr]

with frequencies pi and means mu of all that was seen, and q and m those of the batch. The bracket is 0 on average where
rows come in random order, and gamma is 0 there: the distance of q from pi beyond what chance makes.

Of a label that was never seen nothing is known, and a batch would make it as unlikely as it can. It is left out of the
model until it comes, unless batches are alike: then it is rare.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qbound.families.softmax import quadratics_by_label
from qbound.fitting.stochastic import LABEL_LIMIT, residuals
from qbound.linalg.dense import times

# The logit of a label that is left out.
ABSENT = -1e30
# At most this many logits of means at a time.
_LOGITS = 2**20


class Sums(NamedTuple):
    """Over examples, for each label: of weights, and of weighted inputs."""

    weights: Float[Array, " n"]
    inputs: Float[Array, "n e"]


class LabelMeans(NamedTuple):
    """The same as examples: one for each label, with its frequency as its weight."""

    frequencies: Float[Array, " n"]
    means: Float[Array, "n e"]


def label_means(sums: Sums) -> LabelMeans:
    """The means of sums that are not all 0."""
    total, some = jnp.sum(sums.weights), sums.weights > 0
    frequencies = sums.weights / jnp.where(total > 0, total, 1)
    return LabelMeans(frequencies, sums.inputs / jnp.where(some, sums.weights, 1)[:, None])


def unlikeness(before: Float[Array, " n"], batch: Float[Array, " n"], examples: Float[Array, ""]) -> Float[Array, ""]:
    """How far the label weights of a batch are from those before it, from 0 to 1; 0 before the first.

    Half the sum of differences of frequencies, less what chance makes of a batch with that many `examples`.
    """
    old, new = jnp.sum(before), jnp.sum(batch)
    known = (old > 0) & (new > 0)
    old, new = jnp.where(known, old, 1), jnp.where(known, new, 1)
    distance = jnp.sum(jnp.abs(batch / new - before / old)) / 2
    labels = jnp.sum(((before > 0) | (batch > 0)).astype(batch.dtype))
    chance = jnp.sqrt(labels / examples * (1 + new / old)) / 2
    return jnp.where(known, jnp.clip(distance - chance, 0, 1), 0)


def known_labels(before: Float[Array, " n"], now: Float[Array, " n"], gamma: Float[Array, ""]) -> Bool[Array, " n"]:
    """Which labels are in the model: all that were seen, and where batches are alike the others too."""
    seen = now > 0
    unclear = (gamma > 0) | (jnp.sum(before) == 0) | (jnp.sum(seen.astype(jnp.int32)) < 2)
    return seen | ~unclear


def gradient(
    of: LabelMeans, params: Float[Array, "n e"], known: Bool[Array, " n"], most_logits: int = _LOGITS
) -> Float[Array, "n e"]:
    """The gradient sum_k f_k (p(x_k) - e_k) x_k' of the loss of class means."""

    def of_some(labels, f, means):
        return times(residuals(_logits(means, params, known), labels) * f[None, :], means)

    return _sum_over_labels(of, of_some, jnp.zeros_like(params), most_logits)


def curvature_along(
    of: LabelMeans,
    params: Float[Array, "n e"],
    known: Bool[Array, " n"],
    direction: Float[Array, "n e"],
    most_logits: int = _LOGITS,
) -> Float[Array, ""]:
    """The curvature d'Bd along a direction d, with B that of the bound."""

    def of_some(labels, f, means):
        del labels
        return jnp.sum(f * bound_quadratics(_logits(means, params, known), times(direction, means.T)))

    return _sum_over_labels(of, of_some, jnp.zeros((), params.dtype), most_logits)


def bound_quadratics(h: Float[Array, "n b"], u: Float[Array, "n b"]) -> Float[Array, " b"]:
    """The quadratic u'Mu of each example, with M the curvature of the bound; with many labels, Böhning's."""
    if len(h) <= LABEL_LIMIT:
        return quadratics_by_label(h, u)
    return jnp.sum((u - jnp.mean(u, axis=0, keepdims=True)) ** 2, axis=0) / 2


def _logits(means: Float[Array, "k e"], params: Float[Array, "n e"], known: Bool[Array, " n"]) -> Float[Array, "n k"]:
    return jnp.where(known[:, None], times(params, means.T), ABSENT)


def _sum_over_labels(of: LabelMeans, of_some: Callable, zero: Array, most_logits: int) -> Array:
    """The sum of what `of_some` makes of labels, frequencies and means: few at a time, with n logits for each."""
    n, e = of.means.shape
    some = max(1, min(n, most_logits // n))
    if some == n:
        return of_some(jnp.arange(n), *of)
    padding = -n % some
    pieces = (
        jnp.arange(n + padding).reshape(-1, some),
        jnp.pad(of.frequencies, (0, padding)).reshape(-1, some),
        jnp.pad(of.means, ((0, padding), (0, 0))).reshape(-1, some, e),
    )
    return jax.lax.scan(lambda total, piece: (total + of_some(*piece), None), zero, pieces)[0]
