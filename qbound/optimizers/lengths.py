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

which does not depend on the scale of u, and the step is eta u with eta = rate mean(l)/sqrt(q).
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
NEW, FIRST = 0.1, 10
# Beyond a rate of 2 the bound would rise, on average over batches.
LARGEST_RATE = 2.0


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

    `curved` is from a length eta^ to q, and from 0 to the least that q can be. No update, no length: where there is no
    curvature along u, or the mean has no descent to tell of, it is 0.
    """
    least = curved(jnp.zeros_like(a))
    root = _root(least)
    # The first batch has nothing but its own word.
    mean = jnp.where(earlier.length_looks > 0, earlier.length_mean, a / root)
    q = curved(jnp.minimum(jnp.abs(rate), LARGEST_RATE) * jnp.maximum(mean, 0) / root)
    root = _root(q)
    new = jnp.maximum(NEW, 1 / (earlier.length_looks + 1))
    mean = (1 - new) * earlier.length_mean + new * a / root
    held_back = jnp.minimum(LARGEST_RATE / jnp.maximum(jnp.abs(rate), LARGEST_RATE), 1)
    held_back = held_back * jnp.minimum((earlier.length_looks + 1) / FIRST, 1)
    eta = jnp.where(q > 0, held_back * jnp.maximum(mean, 0) / root, 0)
    known = jnp.isfinite(a) & jnp.isfinite(q)
    after = UpdateLength(jnp.where(q > 0, mean, earlier.length_mean), earlier.length_looks + (q > 0).astype(a.dtype))
    after = jax.tree.map(lambda new, old: jnp.where(known, new, old).astype(old.dtype), after, earlier)
    return jnp.where(known, eta, jnp.nan), q, after


def _root(q: Array) -> Array:
    """To divide by: 1 where q is 0."""
    positive: Array = jnp.where(q > 0, q, 1)  # pyright: ignore[reportAssignmentType]
    return jnp.sqrt(positive)


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
        radius = jnp.clip(eta * unit * radii, 0, largest_radius(radii.dtype))
        each = jnp.minimum(globally, local_factor(radius) * locally)
        return unit**2 * (weighted_sum(weights, each) + plain)

    return curved
