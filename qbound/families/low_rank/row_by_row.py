"""Low-rank bounds that take in one row at a time: Algorithm 3 of [WC20], and what it should have been.

Both move what does not fit into k directions to the diagonal: c vv' <= diag(c |v_i| sum_j |v_j|), Lemma 1 of [WC20].

Every row rounds all that was summed before it, and rounds it in the same direction when rows repeat. So every row adds
one unit of rounding of the largest scale to the diagonal, which is rounded up; the most that was ever lost is two
thirds of that.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound.linalg.dense import safe_sqrt, times

# So many rows in one go: the allowance is then at most 1.6 % of the largest scale in float32. What is lost where chunks
# of rows are merged is more than that, unless k is at least the rank.
LARGEST = 2**17


class Split(NamedTuple):
    """The curvature V'S V + D."""

    basis: Float[Array, "k d"]  # V
    scales: Float[Array, " k"]  # the diagonal of S
    diagonal: Float[Array, " d"]  # that of D


def append_paper(split: Split, r: Float[Array, " d"]) -> Split:
    """Lines 6 to 13 of Algorithm 3: the row is split into a in the span of V, and g across it, and rr' with it.

    The cross terms ag' + ga' are bounded by |a||g| I, and of the k + 1 directions the least goes to the diagonal. A
    short g is no direction, because rounding would turn it into the span, and a V that is not orthonormal makes all
    later rows worse. It goes to the diagonal, where |g|^2 adds little to the |a||g| that is there already.
    """
    v, s, d = split
    p = times(v, r)
    g = r - times(p, v)
    again = times(v, g)  # what rounding left of g in the span
    p, g = p + again, g - times(again, v)
    s, q = jnp.linalg.eigh(jnp.diag(s) + p[:, None] * p[None, :])
    v = times(q.T, v)
    gg, rr = jnp.sum(g * g), jnp.sum(r * r)
    norm_g = safe_sqrt(gg)
    d = d + norm_g * safe_sqrt(jnp.sum(p * p))
    least = jnp.argmin(s)
    across = gg > jnp.finfo(g.dtype).eps * rr
    replace = across & (s[least] < gg)
    d = d + jnp.where(replace, jnp.maximum(s[least], 0) * _spread(v[least]), _spread(g))
    s = s.at[least].set(jnp.where(replace, gg, s[least]))
    v = v.at[least].set(jnp.where(replace, g / jnp.where(across, norm_g, 1), v[least]))
    s = jnp.maximum(s, 0)
    return Split(v, s, _above(d, s))


def append_exactly(split: Split, r: Float[Array, " d"]) -> Split:
    """The k + 1 rows S^(1/2) V and r in their exact principal directions, of which the least goes to the diagonal.

    Nothing is split, so no cross terms have to be bounded. Any orthogonal combination of rows keeps their sum of
    squares, so that eigenvectors need not be exact.
    """
    v, s, d = split
    root = safe_sqrt(s)
    mixed = root * times(v, r)
    rr = jnp.sum(r * r)
    upper = jnp.concatenate([jnp.diag(s), mixed[:, None]], axis=1)
    lower = jnp.concatenate([mixed, rr[None]])[None, :]
    _, q = jnp.linalg.eigh(jnp.concatenate([upper, lower]))
    rows = times(q.T[:, :-1] * root[None, :], v) + q.T[:, -1:] * r[None, :]
    s = jnp.sum(rows[1:] ** 2, axis=1)
    return Split(rows[1:] / safe_sqrt(jnp.where(s > 0, s, 1))[:, None], s, _above(d + _spread(rows[0]), s))


def merge(append: Callable[[Split, Array], Split], split: Split, other: Split) -> Split:
    """Both together: the directions of `other` are rows, its diagonal is added."""
    rows = safe_sqrt(other.scales)[:, None] * other.basis
    v, s, d = jax.lax.scan(lambda split, r: (append(split, r), None), split, rows)[0]
    return Split(v, s, _above(d + other.diagonal, s))


def _above(d: Array, s: Array) -> Array:
    """The diagonal with an allowance for the rounding of one step, of its own and of the scales."""
    eps = jnp.finfo(d.dtype).eps
    return (1 + eps) * d + eps * jnp.max(s)


def _spread(v: Array) -> Array:
    """The diagonal of a matrix above vv'."""
    return jnp.abs(v) * jnp.sum(jnp.abs(v))
