"""Low-rank bounds that take in one row at a time: Algorithm 3 of [WC20], and what it should have been.

Both move what does not fit into k directions to the diagonal: c vv' <= diag(c |v_i| sum_j |v_j|), Lemma 1 of [WC20].
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound.curvature.roots import safe_sqrt
from qbound.solve import times

__all__ = ["Split", "append_exactly", "append_paper"]


class Split(NamedTuple):
    """V'S V + D."""

    basis: Float[Array, "k d"]  # V
    scales: Float[Array, " k"]  # the diagonal of S
    diagonal: Float[Array, " d"]  # that of D


def append_paper(split: Split, r: Float[Array, " d"]) -> Split:
    """Lines 6 to 13 of Algorithm 3: the row is split into a in the span of V, and g across it, and rr' with it.

    The cross terms ag' + ga' are bounded by |a||g| I, and of the k + 1 directions the least goes to the diagonal. Where
    g is 0 but for rounding it is no direction: the row lies in the span.
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
    across = gg > (10 * jnp.finfo(g.dtype).eps) ** 2 * rr
    replace = across & (s[least] < gg)
    d = d + jnp.where(replace, jnp.maximum(s[least], 0) * _spread(v[least]), _spread(g))
    s = s.at[least].set(jnp.where(replace, gg, s[least]))
    v = v.at[least].set(jnp.where(replace, g / jnp.where(across, norm_g, 1), v[least]))
    return Split(v, jnp.maximum(s, 0), d)


def append_exactly(split: Split, r: Float[Array, " d"]) -> Split:
    """The k + 1 rows S^(1/2) V and r in their exact principal directions, of which the least goes to the diagonal.

    Nothing is split, so no cross terms have to be bounded. Any orthogonal combination of rows keeps their sum of
    squares, so that eigenvectors need not be exact; that they are orthogonal only up to rounding is allowed for.
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
    return Split(
        rows[1:] / safe_sqrt(jnp.where(s > 0, s, 1))[:, None],
        s,
        d + _spread(rows[0]) + jnp.finfo(s.dtype).eps / 4 * jnp.max(s),
    )


def _spread(v: Array) -> Array:
    """The diagonal of a matrix above vv'."""
    return jnp.abs(v) * jnp.sum(jnp.abs(v))
