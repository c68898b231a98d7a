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
length that they go with, eta^ = eta.
"""

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
# Beyond a rate of 2 the bound would rise, on average over batches.
LARGEST_RATE = 2.0
# Lengths are found by halving a logarithm: within a factor of 1.02 where curvatures differ by SMALL, and else closer.
HALVINGS, SMALL, FAR = 10, 1e-10, 1e30


class UpdateLength(NamedTuple):
    """What earlier batches certified.

    Attributes:
      length_mean: the mean of a/sqrt(q).
      length_looks: how many batches it is of.
    """

    length_mean: Float[Array, ""]
    length_looks: Float[Array, ""]


def no_length_yet(dtype: Any) -> UpdateLength:
    """Before the first batch."""
    return UpdateLength(jnp.zeros((), dtype), jnp.zeros((), dtype))


def length_of_update(
    earlier: UpdateLength, a: Float[Array, ""], curved: Any, rate: Array
) -> tuple[Float[Array, ""], Float[Array, ""], UpdateLength]:
    """The length for a learning rate of 1, the curvature q along the update, and what is known after it.

    `curved` is from a length eta^ to q, which grows with it. No update, no length: where there is no curvature along u,
    or the mean has no descent to tell of, it is 0.
    """
    most = curved(jnp.full_like(a, FAR))
    # What this batch certifies: the minimum of a bound that holds as far as that.
    own = _longest(curved, jnp.abs(a), most, power=1.0)
    new = jnp.sign(a) * own * jnp.sqrt(curved(own))
    share = jnp.maximum(NEW, 1 / (earlier.length_looks + 1))
    mean = (1 - share) * earlier.length_mean + share * new
    # As long in the metric of the bound as the mean, times a rate that is no larger than the largest.
    far = jnp.minimum(jnp.abs(rate), LARGEST_RATE)
    eta = _longest(curved, far * jnp.maximum(mean, 0), most, power=0.5)
    held_back = jnp.minimum((earlier.length_looks + 1) / FIRST, 1)
    positive: Array = jnp.where(rate == 0, 1, jnp.abs(rate))  # pyright: ignore[reportAssignmentType]
    eta, q = held_back * eta / positive, curved(eta)
    known = jnp.isfinite(a) & jnp.isfinite(most)
    counts = known & (most > 0)
    after = UpdateLength(
        jnp.where(counts, mean, earlier.length_mean), earlier.length_looks + counts.astype(earlier.length_looks.dtype)
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


def curvature_along(
    family: LogPartition, logits_fn: Any, params: Any, inputs: Any, weights: Float[Array, " b"], u: Any, l2: Array
) -> Any:
    """The function from eta^ to q, for one `jvp` of the model. `weights` are of the rows of logits and sum to 1."""
    # In units of the largest entry of u, whose square may be too large a number.
    unit = trees.largest(u)
    unit = jnp.where(unit > 0, unit, 1)
    u = trees.scale(1 / unit, u)
    logits, along = jax.jvp(lambda params: logits_in_rows(logits_fn, params, inputs), (params,), (u,))
    along = jnp.asarray(jnp.where(weights[:, None] == 0, 0, along))
    line = family.line(weights, logits.T, along.T)
    globally, locally, radii = line.quadratics(), line.variances(), line.radii()
    plain = l2 * trees.dot(u, u)

    def curved(eta):
        radius, largest = eta * unit * radii, largest_radius(radii.dtype)
        # Beyond the largest the factor would overflow, and there is the global bound.
        factor = local_factor(jnp.clip(radius, 0, largest))
        each = jnp.where(radius > largest, globally, jnp.minimum(globally, factor * locally))
        return unit**2 * (weighted_sum(weights, each) + plain)

    return curved
