"""The softmax family: log sum_k exp(h_k), the bound of [JC12] and [WC20] on it, its loss, and its lines."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from qbound import checks
from qbound.curvature import Curvature, Dense
from qbound.families.base import (
    LineRows,
    LogPartition,
    curvature_weight,
    exponential_remainder,
    prepare,
)
from qbound.families.classical import bohning_bound, second_order_expansion
from qbound.families.ordered import (
    absorb_label,
    curvature_as_given,
    curvature_largest_first,
    descending_order,
    lead_order,
    no_labels,
    scanned_logits,
)
from qbound.linalg.dense import times
from qbound.quadratic import QuadraticBound
from qbound.records import record, static
from qbound.trees import weighted_sum
from qbound.types import Order, largest_exponent, working_dtype

# Up to this many labels the quadratics of the bound take one label at a time, for all examples at once.
_FEW_LABELS = 64


@dataclasses.dataclass(frozen=True)
class Softmax(LogPartition):
    """The function log sum_k exp(h_k), with the bound of [WC20] for an order of labels, or Böhning's in its place."""

    order: Order = "max_first"
    is_bohning: bool = False

    def bound(self, logits):
        return bohning_bound(logits) if self.is_bohning else log_partition_bound(logits, order=self.order)

    def expansion(self, logits):
        return second_order_expansion(logits)

    def loss(self, logits, targets, axis):
        """The cross entropy of each example, its derivative p - t by the logits, and p, the softmax along `axis`."""
        t = targets
        # Measured from what was observed, logits lose no digits of the loss.
        h = logits - jnp.sum(jnp.where(t == 0, 0, t * logits), axis=axis, keepdims=True)
        largest = jnp.max(h, axis=axis, keepdims=True)
        exponentials = jnp.exp(h - largest)
        total = jnp.sum(exponentials, axis=axis, keepdims=True)
        p = exponentials / total
        residual = p - t
        # Rounding must not leave a part that is the same for all labels: no curvature but l2 would hold it back.
        residual = residual - t * jnp.sum(residual, axis=axis, keepdims=True)
        return jnp.squeeze(largest + jnp.log(total), axis), residual, p

    def line(self, weights, logits, u):
        removed = logits == -jnp.inf
        # Both from the same exponentials, which cost more than the rest.
        shifted = logits - jnp.max(logits, axis=0, keepdims=True)
        exponentials = jnp.exp(shifted)
        total = jnp.sum(exponentials, axis=0, keepdims=True)
        log_p, p = shifted - jnp.log(total), exponentials / total
        # Centred twice: what rounding leaves of a large constant in u is gone the second time.
        e = jnp.where(removed, 0, u)
        for _ in range(2):
            e = jnp.where(removed, 0, e - jnp.sum(p * e, axis=0, keepdims=True))
        return SoftmaxLine(weights=weights, log_p=log_p, p=p, e=e, removed=removed, family=self)


def log_partition_bound(
    logits: ArrayLike, *, order: Order = "descending", log_prior: ArrayLike | None = None
) -> QuadraticBound:
    r"""Quadratic upper bound on the log-partition function of one logit vector, tangent at `logits`.

    .. math:: \log \sum_y h(y) e^{x_y} \le
        \log z + p^\top (x - \tilde x) + \tfrac12 (x - \tilde x)^\top M (x - \tilde x)

    Algorithm 1 and Theorem 1 of [WC20], after [JC12], with the labels for features: M = sum_i beta_i l_i l_i'. Pull it
    back through features to get the paper's bound on log Z(theta). The algorithm is carried out on logarithms, so that
    no logit is too large or too small, and M is not formed: a product costs O(n).

    Args:
      logits: the point of contact, shape (n,); -inf removes a label. bfloat16 and float16 are taken to float32.
      order: in which order the labels enter. It changes M, never the value or the gradient. "descending" logits give
        the smallest trace and need a sort; "max_first" takes the largest logit first and the rest as given, nearly as
        tight, with products by prefix sums; "given" is the paper's, with products by `lax.scan`.
      log_prior: log h(y) of [JC12], shape (n,), added to the logits wherever the bound is evaluated; -inf removes a
        label. A mask is `jnp.where(allowed, 0.0, -jnp.inf)`.

    Returns:
      A bound that holds globally: `value` log z, `grad` p, `curvature` M, `point` the logits. NaN or +inf among the
      logits gives NaN throughout. With every label removed, `value` is -inf, and gradient and curvature are zero.

    Example:
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> bound = qbound.log_partition_bound(jnp.array([2.0, 1.0, 0.0]))
      >>> print(f"{bound.value:.4f}")
      2.4076
      >>> x = jnp.array([-1.0, 3.0, 1.0])
      >>> print(f"{bound(x):.4f} >= {jnp.logaddexp.reduce(x):.4f}")
      4.5044 >= 3.1429
    """
    checks.choice("order", order, ("descending", "max_first", "given"))
    h = prepare(logits, log_prior)
    if order == "given":
        curvature: Curvature = curvature_as_given(h)
    elif order == "max_first":
        curvature = curvature_largest_first(h, lead_order(h.lead, h.point.size))
    else:
        curvature = curvature_largest_first(h, descending_order(h.logits))
    return QuadraticBound(value=h.value, grad=h.grad, curvature=curvature, point=h.point, majorizes="globally")


def partition_function_bound(
    theta: ArrayLike, features: ArrayLike, *, log_prior: ArrayLike | None = None
) -> QuadraticBound:
    r"""Algorithm 1 of [WC20] as printed, on logarithms: the bound on log Z(theta) in parameter space.

    .. math:: \log \sum_y h(y) e^{\theta^\top f(y)} \le
        \log z + \mu^\top (\theta - \tilde\theta) + \tfrac12 (\theta - \tilde\theta)^\top \Sigma (\theta - \tilde\theta)

    This is the definition that everything else is checked against. It takes O(n d^2) time and forms Sigma, in the order
    given; `log_partition_bound(features @ theta, order="given").pullback(features, theta)` is the same bound.

    Args:
      theta: the point of contact, shape (d,).
      features: f(y), shape (n, d).
      log_prior: log h(y) of [JC12], shape (n,); -inf removes a label.

    Returns:
      A bound that holds globally, with a dense curvature.

    Example:
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> features = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
      >>> bound = qbound.partition_function_bound(jnp.array([0.5, -0.5]), features)
      >>> print(f"{bound.grad[0]:.3f} {bound.grad[1]:.3f}")
      0.814 0.494
    """
    features = checks.float_array("features", features, ["n", "d"])
    features = features.astype(working_dtype(features))
    theta = checks.matching("theta", checks.float_array("theta", theta, ["d"]), features[0])
    h = prepare(times(features, theta), log_prior)

    def label(carry, inputs):
        z, mu, sigma = carry
        log_alpha, f = inputs
        z, beta, kappa = absorb_label(z, log_alpha)
        l = f - mu
        sigma = sigma + beta * jnp.outer(l, l)
        mu = mu + kappa * l
        return (z, mu, sigma), None

    d = theta.size
    # z -> 0+ in the paper; exactly 0 here, and then Sigma has no z I.
    log_alphas = scanned_logits(h)
    start = no_labels(log_alphas), jnp.zeros_like(theta), jnp.zeros((d, d), theta.dtype)
    (_, mu, sigma), _ = jax.lax.scan(label, start, (log_alphas, features))
    return QuadraticBound(value=h.value, grad=mu, curvature=Dense(sigma), point=theta, majorizes="globally")


@record
class SoftmaxLine(LineRows):
    """Softmax logits of examples, and how they change along the line.

    Labels come first: sums over labels are then sums of long vectors, on any processor, and not of many short ones.
    """

    weights: Float[Array, " b"]
    log_p: Float[Array, "n b"]
    p: Float[Array, "n b"]
    e: Float[Array, "n b"]  # 0 where a label is removed
    removed: Bool[Array, "n b"]
    family: Softmax = static()

    def variances(self):
        return jnp.sum(self.p * self.e**2, axis=0)

    def radii(self):
        r = jnp.max(jnp.where(self.removed, 0, -self.e), axis=0)
        return jnp.where(self.weights == 0, 0, r)

    def quadratics(self):
        # M depends on logits only up to a constant, and vanishes on constants: u and e give the same.
        if self.family == Softmax("max_first") and len(self.p) <= _FEW_LABELS:
            return quadratics_by_label(self.log_p, self.e)
        one = lambda h, u: self.family.bound(h).curvature._quadratic(u)  # noqa: E731
        # A label of no probability is not one that is removed.
        h = jnp.where(self.removed, self.log_p, jnp.maximum(self.log_p, jnp.finfo(self.log_p.dtype).min))
        return jax.vmap(one, in_axes=1)(h, self.e)

    def remainder(self, eta):
        x = -eta * self.e
        largest = jnp.max(x, axis=0)
        is_near = largest < largest_exponent(x.dtype)
        # log(1 + sum_k p_k (e^x_k - x_k - 1)), since sum_k p_k x_k = 0.
        near = jnp.log1p(jnp.sum(self.p * exponential_remainder(jnp.where(is_near[None, :], x, 0)), axis=0))

        def everywhere():
            # On logarithms: a p that is too small for its dtype counts once x is large.
            return jnp.where(is_near, near, jax.nn.logsumexp(self.log_p + x, axis=0))

        return weighted_sum(self.weights, jax.lax.cond(jnp.all(is_near), lambda: near, everywhere))

    def moments(self, eta):
        q = jax.nn.softmax(self.log_p - eta * self.e, axis=0)
        mean = jnp.sum(q * self.e, axis=0)
        square = jnp.sum(q * self.e**2, axis=0)
        return weighted_sum(self.weights, mean), weighted_sum(self.weights, square - mean**2)


def quadratics_by_label(h: Float[Array, "n b"], u: Float[Array, "n b"]) -> Float[Array, " b"]:
    """The form u'Mu = sum_i beta_i (u_i - s_i)^2 of every example, with s_i the mean of u over the labels before i.

    A kernel for few labels: the largest logit comes first, the others as given, one label at a time for all examples
    at once. It is faster than `vmap`, and faster to compile.
    """
    first = jnp.argmax(h, axis=0).astype(jnp.int32)
    places = first[None, :]

    def add(carry, label):
        log_z, s, total = carry
        i, h, u = label
        is_other = (i != first).astype(h.dtype)
        rho, step = is_other * (h - log_z), is_other * (u - s)
        total = total + curvature_weight(rho) * step**2
        log_z = jnp.where(i == first, log_z, jnp.logaddexp(log_z, h))
        return (log_z, s + jax.nn.sigmoid(rho) * step, total), None

    start = tuple(jnp.take_along_axis(x, places, axis=0)[0] for x in (h, u))
    labels = jnp.arange(len(h), dtype=jnp.int32)
    return jax.lax.scan(add, (*start, jnp.zeros_like(start[0])), (labels, h, u))[0][2]
