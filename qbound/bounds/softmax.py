"""The quadratic bound of [JC12] and [WC20] on a log-partition function."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from qbound import checks
from qbound.bounds.logits import Logits, prepare
from qbound.bounds.weights import curvature_weight
from qbound.curvature import Curvature, Dense, LargestFirst, Sequential
from qbound.orders import LabelOrder, descending_order, lead_order
from qbound.quadratic import QuadraticBound
from qbound.solve import times
from qbound.types import Order, working_dtype

__all__ = ["log_partition_bound", "partition_function_bound"]


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
        curvature: Curvature = _by_scan(h)
    elif order == "max_first":
        curvature = _by_prefix_sums(h, lead_order(h.lead, h.point.size))
    else:
        curvature = _by_prefix_sums(h, descending_order(h.logits))
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
        z, beta, kappa = _take(z, log_alpha)
        l = f - mu
        sigma = sigma + beta * jnp.outer(l, l)
        mu = mu + kappa * l
        return (z, mu, sigma), None

    d = theta.size
    # z -> 0+ in the paper; exactly 0 here, and then Sigma has no z I.
    log_alphas = _log_alphas(h)
    start = _nothing(log_alphas), jnp.zeros_like(theta), jnp.zeros((d, d), theta.dtype)
    (_, mu, sigma), _ = jax.lax.scan(label, start, (log_alphas, features))
    return QuadraticBound(value=h.value, grad=mu, curvature=Dense(sigma), point=theta, majorizes="globally")


def _nothing(log_alphas: Array) -> tuple[Array, Array]:
    """The partition function of no labels, z = w e^m with w = 0; made of the logits, to be placed as they are."""
    return jnp.full_like(log_alphas[0], -jnp.inf), jnp.zeros_like(log_alphas[0])


def _take(z: tuple[Array, Array], log_alpha: Array) -> tuple[tuple[Array, Array], Array, Array]:
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


def _log_alphas(h: Logits):
    """For a scan: all NaN if any logit is NaN or +inf."""
    return jnp.where(jnp.isnan(h.value), jnp.nan, h.logits)


def _by_scan(h: Logits) -> Sequential:
    """M for the order given: Algorithm 1 with only what products need."""

    def label(z, log_alpha):
        z, beta, kappa = _take(z, log_alpha)
        return z, (beta, kappa)

    log_alphas = _log_alphas(h)
    _, (beta, kappa) = jax.lax.scan(label, _nothing(log_alphas), log_alphas)
    return Sequential(beta=beta, kappa=kappa)


def _by_prefix_sums(h: Logits, order: LabelOrder) -> LargestFirst:
    """M for an order that starts with the largest logit."""
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
