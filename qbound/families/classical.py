"""Quadratics with the exact Hessian or a fixed matrix for curvature, under the record of the bound."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from qbound import checks
from qbound.curvature import Centered
from qbound.families.base import Logits, largest_radius, local_weight, prepare
from qbound.quadratic import QuadraticBound
from qbound.types import Majorizes, Scalar


def bohning_bound(logits: ArrayLike, *, log_prior: ArrayLike | None = None) -> QuadraticBound:
    r"""Böhning's bound: the fixed curvature 1/2 (I - 11'/n) over the labels that are not removed.

    .. math:: \operatorname{diag}(p) - p p^\top \preceq \tfrac12 (I - \mathbf{1}\mathbf{1}^\top / n)

    [B92]; the same matrix at every point, so one factorisation could serve for all, but loose where the softmax is
    peaked.

    Args:
      logits: the point of contact, shape (n,); -inf removes a label.
      log_prior: log h(y), shape (n,); -inf removes a label.

    Returns:
      A bound that holds globally.

    Example:
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> print(qbound.bohning_bound(jnp.zeros(2)).curvature.dense())
      [[ 0.25 -0.25]
       [-0.25  0.25]]
    """
    h = prepare(logits, log_prior)
    return _quadratic(h, _bohning_weights(h), "globally")


def local_bound(logits: ArrayLike, radius: Scalar, *, log_prior: ArrayLike | None = None) -> QuadraticBound:
    r"""The exact Hessian times 2 (e^r - r - 1)/r^2: a bound for displacements of size at most r = `radius`.

    .. math:: \log Z(x + \delta) \le \log Z(x) + p^\top\delta + \frac{e^r - r - 1}{r^2}\,
        \delta^\top (\operatorname{diag}(p) - p p^\top) \delta \quad\text{where } \max\delta - p^\top\delta \le r

    The size of a displacement is max(delta) - p.delta, which is at most max(delta) - min(delta). The bound tends to
    the second-order expansion as the radius goes to 0, which makes it the one to use near an optimum; beyond its radius
    nothing is promised. It holds because the log-partition function is quasi-self-concordant.

    Args:
      logits: the point of contact, shape (n,); -inf removes a label.
      radius: r >= 0; NaN results for an array that is not. Beyond 88 (float32) or 709 (float64) the factor would
        overflow, and the curvature is that of `bohning_bound`, which holds at any radius.
      log_prior: log h(y), shape (n,); -inf removes a label.

    Returns:
      A bound that holds within its `radius`.

    Example:
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> bound = qbound.local_bound(jnp.array([1.0, 0.0, -1.0]), radius=0.5)
      >>> bound.majorizes
      'within radius'
    """
    h = prepare(logits, log_prior)
    radius = jnp.asarray(checks.nonnegative("radius", radius), h.value.dtype)
    usable = radius <= largest_radius(radius.dtype)
    local = local_weight(h.grad, h.log_grad, jnp.where(usable, radius, 0))
    at_any_radius = jnp.where(jnp.isnan(radius), jnp.nan, _bohning_weights(h))
    weights = jnp.where(usable, jnp.where(h.removed, 0, local), at_any_radius)
    return _quadratic(h, weights, "within radius", radius)


def second_order_expansion(logits: ArrayLike, *, log_prior: ArrayLike | None = None) -> QuadraticBound:
    r"""The second-order Taylor expansion of the log-partition function: the exact Hessian, and **not a bound**.

    .. math:: H = \operatorname{diag}(p) - p p^\top

    It lies below the log-partition function in about half of all directions. It is here because Newton's method is made
    of it, and as the limit of what a curvature can be.

    Args:
      logits: the point of contact, shape (n,); -inf removes a label.
      log_prior: log h(y), shape (n,); -inf removes a label.

    Returns:
      A quadratic with `majorizes` "no".

    Example:
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> expansion = qbound.second_order_expansion(jnp.array([1.0, 0.0]))
      >>> expansion.majorizes
      'no'
    """
    h = prepare(logits, log_prior)
    return _quadratic(h, h.grad, "no")


def _bohning_weights(h: Logits) -> Array:
    # 0 * grad passes a NaN on, which the fixed weights would otherwise hide.
    return jnp.where(h.removed, 0, 0.5 + 0 * h.grad)


def _quadratic(h: Logits, weights, majorizes: Majorizes, radius=None) -> QuadraticBound:
    return QuadraticBound(
        value=h.value,
        grad=h.grad,
        curvature=Centered(weights),
        point=h.point,
        radius=radius,
        majorizes=majorizes,
    )
