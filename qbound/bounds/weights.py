"""The scalar functions that set how curved a bound is, exact near the point where their formulas are 0/0."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["curvature_weight", "exponential_remainder", "largest_radius", "local_factor", "local_weight"]

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
