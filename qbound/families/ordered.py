"""M = sum_i beta_i l_i l_i', the curvature of the bound, made of logits and an order in which labels are taken.

The bound is built one label at a time. What it asks of an order is, for every label, the sum of something over the
labels before it, or after it. Where the largest logit comes first, everything is made of such sums; in other orders of
scans over labels.
"""

import abc
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qbound.curvature.base import Curvature, domain_of
from qbound.families.base import Logits, curvature_weight
from qbound.linalg.dense import safe_sqrt
from qbound.records import record
from qbound.types import Scalar

# Exclusive prefix and suffix sums of one vector, fast on every backend.
#
# On CPU, `jnp.cumsum` over 100,000 entries costs more than a softmax of them. Here the sums are taken inside short
# blocks by a product with a triangular matrix of ones, then over the sums of the blocks in the same way: O(n) work, and
# rounding errors that grow with log n instead of n.

# Lengths of a block, from the best: whole SIMD registers on CPU, and few enough multiplications by zero. The first that
# divides the vector is taken, because filling up the last block copies everything twice; the first of all if none does.
BLOCKS = (32, 16, 20, 8, 24, 40, 28, 12)

# The largest vector summed as one block.
WHOLE = 128


def prefix_sums(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """y_i = sum of x_j over j < i."""
    return _blocked(x, reverse=False)


def suffix_sums(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """y_i = sum of x_j over j > i."""
    return _blocked(x, reverse=True)


def _blocked(x, *, reverse):
    (n,) = x.shape
    if n <= WHOLE:
        return _multiply(x, reverse=reverse)
    block = next((length for length in BLOCKS if n % length == 0), BLOCKS[0])
    rows = jnp.pad(x, (0, -n % block)).reshape(-1, block)
    others = _blocked(rows.sum(axis=1), reverse=reverse)
    return (_multiply(rows, reverse=reverse) + others[:, None]).reshape(-1)[:n]


def _multiply(x, *, reverse):
    """Sums along the last axis by a strictly triangular matrix of ones.

    HIGHEST: the default precision of accelerators would round every summand to bfloat16 or TF32.
    """
    size = x.shape[-1]
    ones = np.ones((size, size), dtype=bool)
    earlier = np.tril(ones, -1) if reverse else np.triu(ones, 1)
    return jnp.matmul(x, jnp.asarray(earlier, x.dtype), precision=jax.lax.Precision.HIGHEST)


# The order in which labels are taken, as sums over earlier and later labels.
#
# The bound is built one label at a time, so all it asks of an order is: for every label, the sum of something over the
# labels before it, or after it. Each class answers that with its label axis in the caller's order, so that no array is
# ever permuted where sums can be had without. What is summed is 0 at the first label, which callers treat apart.
#
# In every order of this module the label with the largest logit comes first. The order as given needs no class: there
# the labels are scanned as they are.

# Up to this many labels, comparing all pairs is faster than XLA's sort on CPU. With twice as many it is not, and n^2
# comparisons take far more memory.
PAIRWISE_LIMIT = 16

# Up to this many, all are read to find one.
FEW = 128


class LabelOrder(abc.ABC):
    """An order of n labels."""

    @abc.abstractmethod
    def is_first(self) -> Bool[Array, " n"]:
        """True at the label that is taken first."""

    @abc.abstractmethod
    def first(self, x: Float[Array, " n"]) -> Float[Array, ""]:
        """The entry of `x` at the label that is taken first."""

    @abc.abstractmethod
    def earlier(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
        """For every label, the sum of `x` over the labels taken before it; `x` must be 0 at the first label."""

    @abc.abstractmethod
    def later(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
        """For every label, the sum of `x` over the labels taken after it; `x` must be 0 at the first label."""

    @abc.abstractmethod
    def positions(self) -> Int[Array, " n"]:
        """For every label, how many labels are taken before it."""

    @abc.abstractmethod
    def permutation(self) -> Int[Array, " n"]:
        """The labels in the order they are taken."""


@final
@record
class LeadOrder(LabelOrder):
    """One label first, the rest as given: prefix sums of the labels as they are, with the lead treated apart."""

    is_lead: Bool[Array, " n"]
    lead: Int[Array, ""]

    def is_first(self):
        return self.is_lead

    def first(self, x):
        # Of few labels, faster than to look it up for each of many examples.
        return jnp.sum(jnp.where(self.is_lead, x, 0)) if x.size <= FEW else x[self.lead]

    def earlier(self, x):
        return jnp.where(self.is_lead, 0, prefix_sums(x))

    def later(self, x):
        return jnp.where(self.is_lead, jnp.sum(x), suffix_sums(x))

    def positions(self):
        label = jnp.arange(self.is_lead.size)
        return jnp.where(self.is_lead, 0, jnp.where(label < self.lead, label + 1, label))

    def permutation(self):
        position = jnp.arange(self.is_lead.size)
        return jnp.where(position == 0, self.lead, jnp.where(position <= self.lead, position - 1, position))


@final
@record
class PairwiseOrder(LabelOrder):
    """Any order of few labels, by comparing all pairs of positions."""

    position: Int[Array, " n"]

    def is_first(self):
        return self.position == 0

    def first(self, x):
        return jnp.sum(jnp.where(self.is_first(), x, 0))

    def earlier(self, x):
        return jnp.sum(jnp.where(self._precedes(), x[:, None], 0), axis=0)

    def later(self, x):
        return jnp.sum(jnp.where(self._precedes(), x[None, :], 0), axis=1)

    def positions(self):
        return self.position

    def permutation(self):
        labels = jnp.arange(self.position.size)
        return jnp.zeros_like(labels).at[self.position].set(labels, unique_indices=True)

    def _precedes(self):
        return self.position[:, None] < self.position[None, :]


@final
@record
class SortedOrder(LabelOrder):
    """Any order of many labels, as a permutation and its inverse."""

    order: Int[Array, " n"]
    position: Int[Array, " n"]

    def is_first(self):
        return self.position == 0

    def first(self, x):
        return x[self.order[0]]

    def earlier(self, x):
        return prefix_sums(x[self.order])[self.position]

    def later(self, x):
        return suffix_sums(x[self.order])[self.position]

    def positions(self):
        return self.position

    def permutation(self):
        return self.order


def lead_order(lead: Int[Array, ""], size: int) -> LeadOrder:
    """Label `lead` first, the rest of `size` labels as given."""
    return LeadOrder(is_lead=jnp.arange(size) == lead, lead=lead)


def descending_order(logits: Float[Array, " n"]) -> LabelOrder:
    """From the largest logit to the smallest; equal ones as given."""
    labels = jnp.arange(logits.size)
    if logits.size <= PAIRWISE_LIMIT:
        above = logits[:, None] > logits[None, :]
        tied = (logits[:, None] == logits[None, :]) & (labels[:, None] < labels[None, :])
        return PairwiseOrder(position=jnp.sum(above | tied, axis=0))
    order = jnp.argsort(logits, descending=True, stable=True)
    return SortedOrder(order=order, position=jnp.zeros_like(labels).at[order].set(labels, unique_indices=True))


# M = sum_i beta_i l_i l_i' for labels taken in the order of the arrays, by recursions over labels.
#
# Label i enters with weight kappa_i into the running mean pi_i = pi_{i-1} + kappa_i (e_i - pi_{i-1}), and l_i = e_i -
# pi_{i-1}. So beta and kappa are all there is to know, and every operation is one or two scans: O(n) time, safe for
# any logits in any order. The label that is taken first has kappa 1 and beta 0; a removed label has both 0.


@final
@record
class Sequential(Curvature):
    """The curvature M by `lax.scan` over labels as given: the paper's Algorithm 1 with only the products kept."""

    beta: Float[Array, " n"]
    kappa: Float[Array, " n"]

    def domain(self):
        return domain_of(self.beta, 1)

    def _mv(self, v):
        return scan_product(self.beta, self.kappa, v)

    def _quadratic(self, v):
        return jnp.sum(self.beta * _deviations(self.kappa, v) ** 2)

    def _dense(self):
        return jax.vmap(self._mv)(jnp.eye(self.beta.size, dtype=self.beta.dtype))

    def _factor(self):
        identity = jnp.eye(self.beta.size, dtype=self.beta.dtype)
        rows = jax.vmap(lambda v: _deviations(self.kappa, v), out_axes=1)(identity)
        return safe_sqrt(self.beta)[:, None] * rows

    def _probe(self, signs):
        return _sum_of_rows(self.kappa, signs * safe_sqrt(self.beta))

    def _solve(self, g, damping):
        return scan_solve(self.beta, self.kappa, g, damping)


def scan_product(beta: Float[Array, " n"], kappa: Float[Array, " n"], u: Float[Array, " n"]) -> Float[Array, " n"]:
    """The product M u in two scans."""
    return _sum_of_rows(kappa, beta * _deviations(kappa, u))


def _sum_of_rows(kappa, q):
    """sum_i q_i l_i, in one scan."""

    def backward(a, label):
        q, k = label
        return (1 - k) * a - q, q + k * a

    _, total = jax.lax.scan(backward, jnp.zeros_like(q[0]), (q, kappa), reverse=True)
    return total


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
# In other orders Z can be far below the e_j that follow, and float32 overflows; `Sequential` serves those.


@final
@record
class LargestFirst(Curvature):
    """The curvature M for an `order` that starts with the largest logit; products and solves are O(n)."""

    weights: Float[Array, " n"]  # e: 1 for the first label, at most 1 for the others, 0 for removed ones
    inverse: Float[Array, " n"]  # 1/Z; 0 for the first label, which has none before it
    beta: Float[Array, " n"]
    order: LabelOrder

    def domain(self):
        return domain_of(self.beta, 1)

    def _mv(self, v):
        return self._sum_of_rows(self.beta * self._deviations(v))

    def _quadratic(self, v):
        return jnp.sum(self.beta * self._deviations(v) ** 2)

    def _dense(self):
        # Entries (j, k) with j before k are e_j c_k; the diagonal is beta_j + e_j^2 t_j.
        e, position = self.weights, self.order.positions()
        t = self.order.later(self.beta * self.inverse**2)
        c = e * t - self.beta * self.inverse
        outer = e[:, None] * c[None, :]
        off_diagonal = jnp.where(position[:, None] < position[None, :], outer, outer.T)
        diagonal = jnp.eye(e.size, dtype=bool)
        return jnp.where(diagonal, (self.beta + e**2 * t)[:, None], off_diagonal)

    def _factor(self):
        beta, position = self.beta, self.order.positions()
        before = position[None, :] < position[:, None]
        prefix_softmax = jnp.where(before, self.inverse[:, None] * self.weights[None, :], 0)
        identity = jnp.eye(beta.size, dtype=beta.dtype)
        return safe_sqrt(beta)[:, None] * (identity - prefix_softmax)

    def _probe(self, signs):
        return self._sum_of_rows(signs * safe_sqrt(self.beta))

    def _solve(self, g, damping):
        ratio = self.weights * self.inverse
        kappa = jnp.where(self.order.is_first(), 1, ratio / (1 + ratio))
        taken = self.order.permutation()
        return scan_solve(self.beta[taken], kappa[taken], g[taken], damping)[self.order.positions()]

    def _deviations(self, u):
        # M 1 = 0: measured from its first entry, u loses no digits to a constant it may contain.
        u = u - self.order.first(u)
        return u - self.inverse * self.order.earlier(self.weights * u)

    def _sum_of_rows(self, q):
        """sum_i q_i l_i."""
        return q - self.weights * self.order.later(self.inverse * q)


def no_labels(log_alphas: Array) -> tuple[Array, Array]:
    """The partition function of no labels, z = w e^m with w = 0; made of the logits, to be placed as they are."""
    return jnp.full_like(log_alphas[0], -jnp.inf), jnp.zeros_like(log_alphas[0])


def absorb_label(z: tuple[Array, Array], log_alpha: Array) -> tuple[tuple[Array, Array], Array, Array]:
    """One label enters a partition function z: z + alpha, beta(log(alpha/z)) and alpha/(z + alpha).

    z is carried as (m, w), z = w e^m with m the largest log alpha so far and w in [1, n]: log(alpha/z) is then as
    precise as a difference of two logits, however large they are and however far apart. A label with alpha = 0 leaves z
    as it is and has no weight, the first other label has alpha/z = inf, and neither makes a NaN, in values or
    derivatives. z does not depend on the choice of m, so m need not be differentiated.
    """
    m, w = z
    removed, first = log_alpha == -jnp.inf, w == 0
    log_alpha = jnp.where(removed, 0, log_alpha)
    new_m = jnp.where(first, log_alpha, jnp.maximum(m, log_alpha))
    new_m = jax.lax.stop_gradient(new_m)
    m, w = jnp.where(first, new_m, m), jnp.where(first, 1, w)
    rho = log_alpha - m - jnp.log(w)
    new_w = jnp.where(first, 0, w * jnp.exp(m - new_m)) + jnp.exp(log_alpha - new_m)
    zero = 0 * log_alpha  # NaN for a NaN, even in the first label
    beta = jnp.where(removed | first, zero, curvature_weight(rho))
    kappa = jnp.where(removed, zero, jnp.where(first, 1 + zero, jax.nn.sigmoid(rho)))
    return (jnp.where(removed, z[0], new_m), jnp.where(removed, z[1], new_w)), beta, kappa


def scanned_logits(h: Logits) -> Float[Array, " n"]:
    """For a scan: all NaN if any logit is NaN or +inf."""
    return jnp.where(jnp.isnan(h.value), jnp.nan, h.logits)


def curvature_as_given(h: Logits) -> Sequential:
    """M for the order given: Algorithm 1 with only what products need."""

    def label(z, log_alpha):
        z, beta, kappa = absorb_label(z, log_alpha)
        return z, (beta, kappa)

    log_alphas = scanned_logits(h)
    _, (beta, kappa) = jax.lax.scan(label, no_labels(log_alphas), log_alphas)
    return Sequential(beta=beta, kappa=kappa)


def curvature_largest_first(h: Logits, order: LabelOrder) -> LargestFirst:
    """The curvature M for an order that starts with the largest logit."""
    first = order.is_first()
    z = order.first(h.weights) + order.earlier(jnp.where(first, 0, h.weights))
    z = jnp.where(z == 0, 1, z)  # if all labels are removed
    rho = h.relative - jnp.log(z)
    apart = first | h.removed
    return LargestFirst(
        weights=h.weights,
        inverse=jnp.where(first, 0, 1 / z),
        beta=jnp.where(apart, 0 * h.grad, curvature_weight(rho)),  # NaN if any logit is, even for a single label
        order=order,
    )
