"""M = sum_i beta_i l_i l_i' for labels taken in the order of the arrays, by recursions over labels.

Label i enters with weight kappa_i into the running mean pi_i = pi_{i-1} + kappa_i (e_i - pi_{i-1}), and
l_i = e_i - pi_{i-1}. So beta and kappa are all there is to know, and every operation is one or two scans: O(n) time,
safe for any logits in any order. The label that is taken first has kappa 1 and beta 0; a removed label has both 0.
"""

from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import checks
from qbound.curvature.base import Curvature
from qbound.curvature.roots import safe_sqrt
from qbound.records import record
from qbound.types import Scalar

__all__ = ["Sequential", "scan_product", "scan_solve"]


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
