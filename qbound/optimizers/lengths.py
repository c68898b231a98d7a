r"""How long an update of a network should be: the bound along it, averaged over batches.

Along an update u the logits of the linearised network move by J_j u, and with a = g'u the objective of a batch falls by
at least

.. math:: \eta a - \frac{\eta^2}{2} q, \qquad
    q = \sum_j w_j \min\big(u_j^\top M_j u_j,\; \varphi(\hat\eta r_j)\, u_j^\top H_j u_j\big) + l_2 |u|^2,
    \quad u_j = J_j u

for every length eta up to eta^: M is the curvature of the bound, H the exact Hessian, and phi(r) = 2 (e^r - r - 1)/r^2
makes it a bound for displacements of size r, tighter than M where there are many labels. So a/q is the length that one
batch certifies as the best. That follows the noise of the batch. What is averaged is therefore the length in the metric
of the bound,

.. math:: \ell = a / \sqrt q

which does not depend on the scale of u, and the step is eta u with eta sqrt(q) = rate mean(l). Both q are those of the
length that they go with, eta^ = eta. It is no longer than a few times the length that its own batch certifies.

All of that is about the linearised network. Whether the network is near that is measured at the end of the step: with
d_j = -eta u_j what its logits should move by, and m_j what they do, the step is shortened to

.. math:: \eta \min(1, 1/(2 \epsilon)), \qquad
    \epsilon^2 = \sum_j w_j |m_j - d_j|^2 / \sum_j w_j |d_j|^2

where the mean over labels, which a softmax does not see, is taken off. The share of d that is wrong grows with eta.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import trees
from qbound.families.base import LogPartition, largest_radius, local_factor
from qbound.models.linear import logits_in_rows
from qbound.trees import weighted_sum

# Of the latest batch in the mean; and the first updates, which are shortened, since factors are of few probes.
NEW, FIRST = 0.3, 10
# Of how many rows of logits to take the bound, at least: of fewer, too many would miss those that have curvature.
LEAST_ROWS = 250
# Beyond a rate of 2 the bound would rise, on average over batches.
LARGEST_RATE = 2.0
# A step may be so many times as long as its own batch certifies, times the rate: where that has next to nothing to
# lose, the mean over batches is not its length. And what a batch certifies counts up to so many times what the last one
# did: once most examples are fitted, its curvature is that of a few, and rows that are looked at may miss them.
LARGEST_SHARE, LARGEST_GROWTH = 4.0, 1.5
# Of what logits should move by, the share that may be wrong; and the least share of a step that is kept.
TRUSTED, LEAST_SHARE = 0.5, 1e-3
# Differences of so many units in the last place of the logits are rounding. Labels so far below the largest logit are
# removed, as by -1e9 or the least number there is: next to their rounding nothing else would count.
ROUNDING, REMOVED = 64, 1e5
# Lengths are found by halving a logarithm: within a factor of 1.02 where curvatures differ by SMALL, and else closer.
HALVINGS, SMALL, FAR = 10, 1e-10, 1e30


class UpdateLength(NamedTuple):
    """What earlier batches certified.

    Attributes:
      length_mean: the mean of a/sqrt(q).
      length_own: a/q of the last batch, as it counted.
      length_looks: how many batches it is of.
    """

    length_mean: Float[Array, ""]
    length_own: Float[Array, ""]
    length_looks: Float[Array, ""]


def no_length_yet(dtype: Any) -> UpdateLength:
    """Before the first batch."""
    return UpdateLength(jnp.zeros((), dtype), jnp.zeros((), dtype), jnp.zeros((), dtype))


def length_of_update(
    earlier: UpdateLength, a: Float[Array, ""], curved: Any, rate: Array
) -> tuple[Float[Array, ""], Float[Array, ""], UpdateLength]:
    """The length for a learning rate of 1, the curvature q along the update, and what is known after it.

    `a` is not below 0, and `curved` is from a length eta^ to q, which grows with it. Without descent or curvature along
    u the length is 0.
    """
    most = curved(jnp.full_like(a, FAR))
    # What this batch certifies: the minimum of a bound that holds as far as that.
    own = _longest(curved, jnp.maximum(a, 0), most, power=1.0)
    own = jnp.where(earlier.length_own > 0, jnp.minimum(own, LARGEST_GROWTH * earlier.length_own), own)
    share = jnp.maximum(NEW, 1 / (earlier.length_looks + 1))
    mean = (1 - share) * earlier.length_mean + share * own * jnp.sqrt(curved(own))
    # As long in the metric of the bound as the mean, times a rate that is no larger than the largest.
    far = jnp.minimum(jnp.abs(rate), LARGEST_RATE)
    eta = jnp.minimum(_longest(curved, far * mean, most, power=0.5), far * LARGEST_SHARE * own)
    held_back = jnp.minimum((earlier.length_looks + 1) / FIRST, 1)
    positive: Array = jnp.where(rate == 0, 1, jnp.abs(rate))  # pyright: ignore[reportAssignmentType]
    eta, q = held_back * eta / positive, curved(eta)
    known = jnp.isfinite(a) & jnp.isfinite(most)
    counts = known & (most > 0)
    after = UpdateLength(
        jnp.where(counts, mean, earlier.length_mean),
        jnp.where(counts & (own > 0), own, earlier.length_own),
        earlier.length_looks + counts.astype(earlier.length_looks.dtype),
    )
    wrong = jnp.where(known, 0, jnp.nan).astype(eta.dtype)
    return eta + wrong, q + wrong, after


def _longest(curved: Any, target: Array, most: Array, power: float) -> Array:
    """The eta with eta q(eta)^power = `target`, from below: so far q(eta) holds. 0 without any curvature."""
    positive: Array = jnp.where(most > 0, most, 1)  # pyright: ignore[reportAssignmentType]
    least = jnp.maximum(curved(jnp.zeros_like(target)), SMALL * positive)

    def halve(_, ends):
        low, high = ends
        middle = jnp.sqrt(low) * jnp.sqrt(high)
        is_far = middle * curved(middle) ** power > target
        return jnp.where(is_far, low, middle), jnp.where(is_far, middle, high)

    low, _ = jax.lax.fori_loop(0, HALVINGS, halve, (target / positive**power, target / least**power))
    return jnp.asarray(jnp.where(most > 0, low, 0))


# A model along an update.


class Ray(NamedTuple):
    """The rows of logits h_j - eta u_j of the linearised network.

    Attributes:
      logits: h_j.
      moves: u_j, in units of `unit`, so that no square of them overflows.
      unit: the largest entry of the update.
      weights: of the rows; their sum is 1.
      curved: from eta^ to q.
    """

    logits: Float[Array, "b n"]
    moves: Float[Array, "b n"]
    unit: Float[Array, ""]
    weights: Float[Array, " b"]
    curved: Callable[[Array], Array]


def ray_along(
    family: LogPartition, logits_fn: Any, params: Any, inputs: Any, weights: Float[Array, " b"], u: Any, l2: Array
) -> Ray:
    """Along the update u, for one `jvp` of the model. `weights` are of the rows of logits and sum to 1."""
    # In units of the largest entry of u, whose square may be too large a number.
    unit = trees.largest(u)
    unit = jnp.where(unit > 0, unit, 1)
    u = trees.scale(1 / unit, u)
    logits, moves = jax.jvp(lambda params: logits_in_rows(logits_fn, params, inputs), (params,), (u,))
    moves = jnp.asarray(jnp.where(weights[:, None] == 0, 0, moves))
    line = family.line(weights, logits.T, moves.T)
    globally, locally, radii = line.quadratics(), line.variances(), line.radii()
    plain = l2 * trees.dot(u, u)

    def curved(eta):
        # Some rows do not move, and their radius of 0 times infinity would be NaN.
        radius = jnp.minimum(eta * unit, float(jnp.finfo(radii.dtype).max)) * radii
        largest = largest_radius(radii.dtype)
        # Beyond the largest the factor would overflow, and there is the global bound.
        factor = local_factor(jnp.clip(radius, 0, largest))
        each = jnp.where(radius > largest, globally, jnp.minimum(globally, factor * locally))
        return unit**2 * (weighted_sum(weights, each) + plain)

    return Ray(logits, moves, unit, weights, curved)


def nonlinearity(ray: Ray, logits: Float[Array, "b n"], eta: Float[Array, ""], eps: float) -> Float[Array, ""]:
    """epsilon: how wrong the linearised network is at the length eta, where the network has these logits.

    0 for no step, and where the difference is rounding, for logits that are exact up to `eps` of their size; infinite
    where logits are not finite.
    """
    expected = -eta * ray.unit * ray.moves
    difference, largest_logit = logits - ray.logits - expected, jnp.max(ray.logits, axis=1, keepdims=True)
    counted = (ray.weights[:, None] > 0) & (ray.logits > largest_logit - REMOVED)
    expected, difference = (_centred(x, counted) for x in (expected, difference))
    difference = jnp.sign(difference) * jnp.maximum(jnp.abs(difference) - ROUNDING * eps * jnp.abs(ray.logits), 0)
    difference = jnp.where(counted, difference, 0)
    # In units of the largest move, for squares that do not overflow.
    largest = jnp.max(jnp.abs(expected))
    unit = jnp.where(largest > 0, largest, 1)
    wrong, moved = (jnp.sqrt(jnp.sum(ray.weights[:, None] * (x / unit) ** 2)) for x in (difference, expected))
    epsilon = wrong / jnp.where(moved > 0, moved, 1)
    return jnp.where(largest > 0, jnp.where(jnp.isfinite(epsilon), epsilon, jnp.inf), 0)


def trusted_share(epsilon: Float[Array, ""]) -> Float[Array, ""]:
    """What to shorten a step to, for which the linearised network is wrong by `epsilon`."""
    return jnp.maximum(TRUSTED / jnp.maximum(epsilon, TRUSTED), LEAST_SHARE)


def _centred(x: Float[Array, "b n"], counted: Array) -> Float[Array, "b n"]:
    """Without the mean over the labels of a row that count; 0 for those that do not."""
    x, labels = jnp.where(counted, x, 0), jnp.sum(counted, axis=1, keepdims=True, dtype=x.dtype)
    return jnp.asarray(jnp.where(counted, x - jnp.sum(x, axis=1, keepdims=True) / jnp.maximum(labels, 1), 0))
