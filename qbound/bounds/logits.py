"""Logits made ready for a bound: log-sum-exp and softmax, with labels that may be removed."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from qbound import checks, compiler
from qbound.records import record
from qbound.types import working_dtype

__all__ = ["Logits", "prepare"]


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
