"""M = sum_i beta_i l_i l_i', the curvature of the bound, by prefix sums or by recursions over labels."""

from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import checks
from qbound.curvature.base import Curvature
from qbound.families.orders import LabelOrder
from qbound.linalg.dense import safe_sqrt
from qbound.records import record
from qbound.types import Scalar

__all__ = ["LargestFirst", "Sequential", "scan_product", "scan_solve"]


# M = sum_i beta_i l_i l_i' for labels taken in the order of the arrays, by recursions over labels.
#
# Label i enters with weight kappa_i into the running mean pi_i = pi_{i-1} + kappa_i (e_i - pi_{i-1}), and l_i = e_i -
# pi_{i-1}. So beta and kappa are all there is to know, and every operation is one or two scans: O(n) time, safe for
# any logits in any order. The label that is taken first has kappa 1 and beta 0; a removed label has both 0.


@final
@record
class Sequential(Curvature):
    """M by `lax.scan` over labels as given: the paper's Algorithm 1 with nothing but the products kept."""

    beta: Float[Array, " n"]
    kappa: Float[Array, " n"]

    def domain(self):
        array = checks.unbatched("curvature", self.beta, 1)
        return jax.ShapeDtypeStruct(array.shape[-1:], array.dtype)

    def mv(self, v):
        return scan_product(self.beta, self.kappa, self._vector("v", v))

    def quadratic(self, v):
        return jnp.sum(self.beta * _deviations(self.kappa, self._vector("v", v)) ** 2)

    def dense(self):
        identity = self._identity()
        return jax.vmap(lambda v: scan_product(self.beta, self.kappa, v))(identity)

    def factor(self):
        identity = self._identity()
        rows = jax.vmap(lambda v: _deviations(self.kappa, v), out_axes=1)(identity)
        return safe_sqrt(self.beta)[:, None] * rows

    def solve(self, g, damping):
        return scan_solve(self.beta, self.kappa, self._vector("g", g), checks.positive("damping", damping))

    def _identity(self):
        beta = checks.unbatched("curvature", self.beta, 1)
        return jnp.eye(beta.size, dtype=beta.dtype)


def scan_product(beta: Float[Array, " n"], kappa: Float[Array, " n"], u: Float[Array, " n"]) -> Float[Array, " n"]:
    """M u in two scans."""
    q = beta * _deviations(kappa, u)

    def backward(a, label):
        q, k = label
        return (1 - k) * a - q, q + k * a

    _, product = jax.lax.scan(backward, jnp.zeros_like(u[0]), (q, kappa), reverse=True)
    return product


def _deviations(kappa, u):
    """l_i.u for every i: u_i less the mean, under the prefix softmax, of the entries before it."""
    # M 1 = 0: measured from the entry of the first label that is not removed, the one with kappa = 1, u loses no
    # digits to a constant it may contain.
    u = u - u[jnp.argmax(kappa)]

    def forward(s, label):
        u, k = label
        return s + k * (u - s), u - s

    _, deviations = jax.lax.scan(forward, jnp.zeros_like(u[0]), (u, kappa))
    return deviations


def scan_solve(
    beta: Float[Array, " n"], kappa: Float[Array, " n"], g: Float[Array, " n"], damping: Scalar
) -> Float[Array, " n"]:
    r"""(M + c I)^-1 g in two scans, by dynamic programming over the running mean.

    The solution minimises c/2 |x|^2 - g.x + 1/2 sum_i beta_i (x_i - s_{i-1})^2, where s_i is the running mean of x.
    Given s_{i-1}, the labels from i on contribute a quadratic P s^2/2 - b s (up to a constant) once they have been
    minimised over. The backward scan carries (P, b) and leaves for each label the rule x_i = (R_i - B_i s_{i-1})/A_i;
    the forward scan applies the rules. P is written as a sum of nonnegative terms, so that nothing cancels.
    """
    c = jnp.asarray(damping, g.dtype)

    def backward(carry, label):
        p, b = carry
        g, beta, k = label
        k_bar = 1 - k
        a_i = c + beta + k**2 * p
        b_i = k * k_bar * p - beta
        r_i = g + k * b
        carry = (c * (beta + k_bar**2 * p) + beta * p) / a_i, k_bar * b - b_i * r_i / a_i
        return carry, (a_i, b_i, r_i)

    def forward(s, label):
        a_i, b_i, r_i, k = label
        x = (r_i - b_i * s) / a_i
        return s + k * (x - s), x

    zero = jnp.zeros_like(g[0])
    _, (a, b, r) = jax.lax.scan(backward, (zero, zero), (g, beta, kappa), reverse=True)
    _, solution = jax.lax.scan(forward, zero, (a, b, r, kappa))
    return solution


# M = sum_i beta_i l_i l_i' for orders in which the largest logit comes first, by prefix sums.
#
# Divide all exp(h_i) by the largest of them and call the results e_i. Every sum Z of them over the labels before some
# label is then at least 1 and at most n, so the prefix softmax is e_j / Z, plain sums neither overflow nor vanish, and
# no scan is needed:
#
#   s_i = sum_{j before i} e_j u_j / Z_i,    q_i = beta_i (u_i - s_i),    (M u)_j = q_j - e_j sum_{i after j} q_i / Z_i.
#
# In other orders Z can be far below the e_j that follow, and float32 overflows; `sequential` serves those.


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
