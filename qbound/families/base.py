"""The seam between logits and all that is made of them: log-partition functions, and logits made ready for bounds."""

import abc
import math
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from qbound import checks, compiler
from qbound.quadratic import QuadraticBound
from qbound.records import record
from qbound.trees import weighted_sum
from qbound.types import working_dtype


class LogPartition(abc.ABC):
    """A family of log-partition functions log Z(h): what methods are made of, above logits h and below nothing else.

    Quadratics are of one vector of logits; `jax.vmap` makes batches. Losses and lines are of all examples at once.
    """

    @abc.abstractmethod
    def bound(self, logits: Float[Array, " n"]) -> QuadraticBound:
        """A quadratic that is nowhere below log Z."""

    @abc.abstractmethod
    def expansion(self, logits: Float[Array, " n"]) -> QuadraticBound:
        """The second-order expansion of log Z, whose curvature is the exact Hessian."""

    @abc.abstractmethod
    def loss(
        self, logits: Float[Array, "..."], targets: Float[Array, "..."], axis: int
    ) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
        """The loss, log Z less the logits of the targets, for each example; its derivative; the gradient of log Z."""

    @abc.abstractmethod
    def line(self, weights: Float[Array, " b"], logits: Float[Array, "n b"], u: Float[Array, "n b"]) -> "LineRows":
        """What becomes of log Z along h - eta u, for examples with these weights; labels come first."""


class LineRows(abc.ABC):
    r"""What log Z of examples is along a line of logits, h_j - eta u_j, beyond its tangent.

    With p_j the gradient of log Z at h_j, and e_j = u_j - p_j.u_j,

        log Z_j(h_j - eta u_j) = log Z_j(h_j) - eta p_j.u_j + R_j(eta),      R_j >= 0
    """

    weights: Float[Array, " b"]

    @abc.abstractmethod
    def variances(self) -> Float[Array, " b"]:
        """v_j = u_j'H_j u_j with H_j the Hessian: R_j is about eta^2 v_j/2."""

    @abc.abstractmethod
    def radii(self) -> Float[Array, " b"]:
        """r_j, for which R_j(eta) <= v_j (exp(eta r_j) - eta r_j - 1)/r_j^2; 0 for examples that do not count."""

    @abc.abstractmethod
    def quadratics(self) -> Float[Array, " b"]:
        """u_j'M_j u_j with M_j the curvature of the bound: R_j(eta) <= eta^2 u_j'M_j u_j/2."""

    def quadratic(self) -> Float[Array, ""]:
        """sum_j w_j u_j'M_j u_j."""
        return weighted_sum(self.weights, self.quadratics())

    @abc.abstractmethod
    def remainder(self, eta: Float[Array, ""]) -> Float[Array, ""]:
        """sum_j w_j R_j(eta)."""

    @abc.abstractmethod
    def moments(self, eta: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The mean and the variance of e_j under the model at eta, summed over examples with their weights."""


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
