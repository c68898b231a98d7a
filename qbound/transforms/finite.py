"""The last word of a complete optimizer: no update that would make parameters infinite or NaN.

Directions are finite, but what they are multiplied by may not be: a schedule may return NaN, and a learning rate far
above 2 makes parameters grow until their dtype has no number for them.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from qbound import trees
from qbound.types import working_dtype

__all__ = ["keep_params_finite", "runs_away", "stays_finite"]


def keep_params_finite(
    transform: optax.GradientTransformationExtraArgs, name: str
) -> optax.GradientTransformationExtraArgs:
    """`transform`, a chain, with updates of zero in place of those that would make a parameter infinite or NaN.

    They are counted where the first link of the chain counts those that it skips: in the fields `name`_nonfinite and
    `name`_nonfinite_total of its record `name`_info. The state is otherwise that of the chain: a schedule goes on.

    Args:
      transform: a chain whose first link has such a record in its state.
      name: "spfb" or "kspfb".
    """

    def update(updates, state, params=None, **extra) -> Any:
        updates, after = transform.update(updates, state, params, **extra)
        first, *rest = cast(tuple, after)
        fine = stays_finite(params, updates)
        updates = jax.tree.map(lambda leaf: jnp.where(fine, leaf, jnp.zeros_like(leaf)), updates)
        info = _skipped(getattr(first, f"{name}_info"), name, ~fine)
        return updates, (first._replace(**{f"{name}_info": info}), *rest)

    return optax.GradientTransformationExtraArgs(transform.init, update)


def stays_finite(params: Any, updates: Any) -> Bool[Array, ""]:
    """Whether `optax.apply_updates` leaves every parameter finite that is so.

    None may grow beyond half of the largest number of its dtype: then that holds however a compiler rounds the sum.
    One that is there already, such as the -inf or the least number that removes a label, may stay where it is.
    """

    def fine(p, u):
        p = jnp.asarray(p)
        dtype = working_dtype(p, u)
        # Compared, not converted: compilers take a conversion there and back for none.
        limit = jnp.asarray(jnp.finfo(p.dtype).max / 2, dtype)
        p, u = p.astype(dtype), u.astype(dtype)
        return jnp.all(jnp.abs(p + u) <= jnp.maximum(jnp.abs(p), limit))

    return jax.tree.reduce(jnp.logical_and, jax.tree.map(fine, params, updates), jnp.asarray(True))


def runs_away(params: Any, s: Any) -> Bool[Array, ""]:
    """Whether parameters are beyond the largest number whose square is finite, and so is the next step.

    With a rate that is too large each step is a multiple of the parameters, and there it can be stopped in time without
    knowing the rate. A gradient of that size alone may be solved for.
    """
    smaller = jnp.minimum(trees.largest(params), trees.largest(s))
    return smaller > float(jnp.finfo(smaller.dtype).max) ** 0.5


def _skipped(info: Any, name: str, skipped: Bool[Array, ""]) -> Any:
    """The record of an update, with what changes if it was skipped after all."""
    flag, total = f"{name}_nonfinite", f"{name}_nonfinite_total"
    # An update that the direction has skipped is counted already, whatever it was multiplied by.
    again = skipped & ~getattr(info, flag)
    changes = {flag: getattr(info, flag) | skipped, total: getattr(info, total) + again.astype(jnp.int32)}
    for field in (f"{name}_predicted_decrease", f"{name}_step_length"):
        if field in info._fields:
            changes[field] = jnp.where(skipped, 0, getattr(info, field))
    return info._replace(**changes)
