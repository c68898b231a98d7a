"""The quadratic bound of [JC12] and [WC20] on a log-partition function."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from qbound import checks, compiler
from qbound.curvature import Curvature, Dense
from qbound.families.ordered import LargestFirst, Sequential
from qbound.families.orders import LabelOrder, descending_order, lead_order
from qbound.linalg.dense import times
from qbound.quadratic import QuadraticBound
from qbound.records import record
from qbound.types import Order, working_dtype

__all__ = [
    "Logits",
    "curvature_weight",
    "exponential_remainder",
    "largest_radius",
    "local_factor",
    "local_weight",
    "log_partition_bound",
    "partition_function_bound",
    "prepare",
]


# The scalar functions that set how curved a bound is, exact near the point where their formulas are 0/0.


# tanh(y)/y = sum_k T_k y^(2k), to y^10: at |y| = 1/16 the next term is 1e-17.
_TANH_SERIES = (1, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925)


_TANH_LIMIT = 1 / 16


# 2 (e^r - r - 1)/r^2 = sum_k 2 r^k/(k + 2)!, to r^12: at r = 1/2 the next term is 2e-16.
_LOCAL_SERIES = tuple(2 / math.factorial(k + 2) for k in range(13))


_LOCAL_LIMIT = 1 / 2


def curvature_weight(rho: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """beta(rho) = tanh(rho/2)/(2 rho), 1/4 at 0 and 0 at both infinities; line 4 of Algorithm 1 [WC20].

    Near 0 by its series, because the derivative of the formula cancels there.
    """
    y = rho / 2
    small, infinite = jnp.abs(y) < _TANH_LIMIT, jnp.isinf(y)
    series = _polynomial(_TANH_SERIES, jnp.where(small, y, 0) ** 2, _TANH_LIMIT**2)
    y = jnp.where(small | infinite, 1, y)
    return jnp.where(small, series, jnp.where(infinite, 0, jnp.tanh(y) / y)) / 4


def local_factor(radius: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """2 (e^r - r - 1)/r^2: what to multiply the Hessian of log-sum-exp by for a bound as far as r from its point.

    1 at r = 0; finite up to `largest_radius`, not far beyond. Below 0 it is the same function.
    """
    small = jnp.abs(radius) < _LOCAL_LIMIT
    r = jnp.where(small, 1, radius)
    series = _polynomial(_LOCAL_SERIES, jnp.where(small, radius, 0), _LOCAL_LIMIT)
    # Divided before it is doubled, which could overflow.
    return jnp.where(small, series, (jnp.expm1(r) - r) / r * (2 / r))


def largest_radius(dtype: Any) -> float:
    """Up to which `local_factor` is finite: 88 in float32, 709 in float64."""
    return float(math.floor(math.log(jnp.finfo(dtype).max)))


def local_weight(
    p: Float[Array, "*shape"], log_p: Float[Array, "*shape"], radius: Float[Array, ""]
) -> Float[Array, "*shape"]:
    """`local_factor` times p, for radii up to `largest_radius`.

    A p that is too small for its dtype counts once the factor is large: the product is then taken on logarithms.
    """
    info = jnp.finfo(p.dtype)
    vanishing = p < info.tiny / info.eps
    factor = local_factor(radius)
    on_logarithms = jnp.exp(jnp.where(vanishing, log_p, 0) + jnp.log(factor))
    return jnp.where(vanishing, on_logarithms, p * factor)


def exponential_remainder(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """e^x - x - 1, at small x without the cancellation of its first two terms; x is finite."""
    small = jnp.abs(x) < _LOCAL_LIMIT
    around_zero = jnp.where(small, x, 0)
    series = _polynomial(_LOCAL_SERIES, around_zero, _LOCAL_LIMIT)
    return jnp.where(small, around_zero**2 * series / 2, jnp.exp(x) - 1 - x)


def _polynomial(coefficients, x, largest: float):
    """A series for |x| <= `largest`, to as many terms as the dtype of x can tell."""
    eps = float(jnp.finfo(x.dtype).eps)
    coefficients = [c for k, c in enumerate(coefficients) if abs(c) * largest**k > eps / 8]
    result = jnp.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


# Logits made ready for a bound: log-sum-exp and softmax, with labels that may be removed.


@record
class Logits:
    """What every bound needs to know about one vector of logits h = point + log_prior.

    NaN or +inf anywhere makes `value`, `grad` and the curvature made of `relative` NaN. With every label removed
    `value` is -inf and everything else zero.
    """

    point: Float[Array, " n"]  # the logits as they were given, at least float32
    logits: Float[Array, " n"]  # h
    lead: Int[Array, ""]  # the label with the largest logit, the first of them when several are equal
    relative: Float[Array, " n"]  # h - max h; 0 where removed
    removed: Bool[Array, " n"]  # h = -inf
    weights: Float[Array, " n"]  # exp(h - max h); 0 where removed
    value: Float[Array, ""]  # log-sum-exp of h
    grad: Float[Array, " n"]  # softmax of h
    log_grad: Float[Array, " n"]  # its logarithm, also where `grad` is too small for its dtype; 0 where removed


def prepare(logits: ArrayLike, log_prior: ArrayLike | None = None) -> Logits:
    """Check the arguments of a bound and shift its logits by the largest, so that no exponential overflows."""
    compiler.warn_if_wrong()
    point = checks.float_array("logits", logits, ["n"])
    point = point.astype(working_dtype(point))
    h = point
    if log_prior is not None:
        h = h + checks.matching("log_prior", checks.float_array("log_prior", log_prior, ["n"]), point)
    # The largest logit is differentiated like any other: weights and value then depend on differences of logits only
    # and the largest weight is 1, whatever the derivative.
    lead = jnp.argmax(h)
    largest = h[lead]
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    removed = h == -jnp.inf
    relative = jnp.where(removed, 0, h - largest)
    weights = jnp.where(removed, 0, jnp.exp(relative))
    total = jnp.sum(weights)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    return Logits(
        point=point,
        logits=h,
        lead=lead,
        relative=relative,
        removed=removed,
        weights=weights,
        value=jnp.where(empty, -jnp.inf, largest + jnp.log(total)),
        grad=weights / total,
        log_grad=jnp.where(removed, 0, relative - jnp.log(total)),
    )


# The quadratic bound of [JC12] and [WC20] on a log-partition function.


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
