"""M = sum_i beta_i l_i l_i' for orders in which the largest logit comes first, by prefix sums.

Divide all exp(h_i) by the largest of them and call the results e_i. Every sum Z of them over the labels before some
label is then at least 1 and at most n, so the prefix softmax is e_j / Z, plain sums neither overflow nor vanish, and
no scan is needed:

  s_i = sum_{j before i} e_j u_j / Z_i,    q_i = beta_i (u_i - s_i),    (M u)_j = q_j - e_j sum_{i after j} q_i / Z_i.

In other orders Z can be far below the e_j that follow, and float32 overflows; `sequential` serves those.
"""

from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import checks
from qbound.curvature.base import Curvature
from qbound.curvature.roots import safe_sqrt
from qbound.curvature.sequential import scan_solve
from qbound.orders import LabelOrder
from qbound.records import record

__all__ = ["LargestFirst"]


@final
@record
class LargestFirst(Curvature):
    """M for an `order` that starts with the largest logit. `mv` and `solve` are O(n), `dense` and `factor` O(n^2)."""

    weights: Float[Array, " n"]  # e: 1 for the first label, at most 1 for the others, 0 for removed ones
    inverse: Float[Array, " n"]  # 1/Z; 0 for the first label, which has none before it
    beta: Float[Array, " n"]
    order: LabelOrder

    def domain(self):
        array = checks.unbatched("curvature", self.beta, 1)
        return jax.ShapeDtypeStruct(array.shape[-1:], array.dtype)

    def mv(self, v):
        q = self.beta * self._deviations(self._vector("v", v))
        return q - self.weights * self.order.later(self.inverse * q)

    def quadratic(self, v):
        return jnp.sum(self.beta * self._deviations(self._vector("v", v)) ** 2)

    def dense(self):
        # Entries (j, k) with j before k are e_j c_k; the diagonal is beta_j + e_j^2 t_j.
        e, position = checks.unbatched("curvature", self.weights, 1), self.order.positions()
        t = self.order.later(self.beta * self.inverse**2)
        c = e * t - self.beta * self.inverse
        outer = e[:, None] * c[None, :]
        off_diagonal = jnp.where(position[:, None] < position[None, :], outer, outer.T)
        diagonal = jnp.eye(e.size, dtype=bool)
        return jnp.where(diagonal, (self.beta + e**2 * t)[:, None], off_diagonal)

    def factor(self):
        beta, position = checks.unbatched("curvature", self.beta, 1), self.order.positions()
        before = position[None, :] < position[:, None]
        prefix_softmax = jnp.where(before, self.inverse[:, None] * self.weights[None, :], 0)
        identity = jnp.eye(beta.size, dtype=beta.dtype)
        return safe_sqrt(beta)[:, None] * (identity - prefix_softmax)

    def solve(self, g, damping):
        g, damping = self._vector("g", g), checks.positive("damping", damping)
        ratio = self.weights * self.inverse
        kappa = jnp.where(self.order.is_first(), 1, ratio / (1 + ratio))
        taken = self.order.permutation()
        return scan_solve(self.beta[taken], kappa[taken], g[taken], damping)[self.order.positions()]

    def _deviations(self, u):
        # M 1 = 0: measured from its first entry, u loses no digits to a constant it may contain.
        u = u - self.order.first(u)
        return u - self.inverse * self.order.earlier(self.weights * u)
