r"""How long a step of KSPFB may be, and when its factors no longer fit the data.

The product of factors is no bound, and factors are old: along a step s they may have far less curvature than the batch
of that step. The bound of the batch's own objective tells, with B its curvature:

.. math:: r = \frac{s^\top B s}{g^\top s}

is 1 where a step of length 1 leads to the minimum along s. With learning rate eta, and with the share c that s has in
the mean of directions, a batch moves the parameters by eta c s. **This may not raise the bound of the batch, which is
so for eta c r of at most 2.** Longer steps are shortened, the directions of earlier batches are forgotten, and the
factors are made anew with the next batch.

To compute B s takes as long as a third of a step. So it is looked at when there is reason to: at first, while steps are
close to what is allowed, when g's is far above what it was, and every few steps in any case. What that may miss is
little: an example along which s is far too long has a large part in g's.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qbound.types import Scalar

__all__ = ["KspfbLimit", "limited", "no_limit_yet", "wants_factors"]

# While steps are well within what is allowed, one in so many is looked at.
LOOK_EVERY = 64
# A step whose g's is so many times the usual one is looked at.
JUMP = 2.0
# Of one step in the usual g's; and the most that counts of it, in times the usual, lest one outlier hide the next.
SHARE, OUTLIER = 0.1, 4.0


class KspfbLimit(NamedTuple):
    """What is known of the lengths of steps.

    Attributes:
      limit_ratio: r, when last looked at.
      limit_excess: how many times too long the last step was before it was shortened; 0 if it was not looked at.
      limit_slope: the usual g's.
      limit_look_at: the step to look at next.
      limit_look_wait: after how many steps from the last one.
      limit_factors_at: the first step at which factors may be made anew out of turn.
      limit_factors_wait: how many steps there must be before the next such one.
    """

    limit_ratio: Float[Array, ""]
    limit_excess: Float[Array, ""]
    limit_slope: Float[Array, ""]
    limit_look_at: Int[Array, ""]
    limit_look_wait: Int[Array, ""]
    limit_factors_at: Int[Array, ""]
    limit_factors_wait: Int[Array, ""]


def no_limit_yet(dtype) -> KspfbLimit:
    """Before the first step."""
    numbers = (jnp.zeros((), dtype) for _ in range(3))
    places = (jnp.asarray(start, jnp.int32) for start in (0, 1, 0, 1))
    return KspfbLimit(*numbers, *places)


def limited(
    limit: KspfbLimit,
    count: Int[Array, ""],
    rate: Float[Array, ""],
    share: Scalar,
    slope: Float[Array, ""],
    ratio: Callable[[], Float[Array, ""]],
) -> tuple[Float[Array, ""], Bool[Array, ""], KspfbLimit]:
    """What to multiply s by in step number `count`, whether to forget earlier directions, and the limit after it.

    `share` is that of s in the mean, `slope` is g's, and `ratio` computes r. If r is not finite, nor is the length.
    """
    usual = limit.limit_slope
    due = (count >= limit.limit_look_at) | ~(slope <= JUMP * usual)
    r = jax.lax.cond(due, ratio, lambda: limit.limit_ratio)
    excess = jnp.abs(rate) * share * r / 2
    forget = excess > 1
    # With earlier directions forgotten, s is all of the step.
    longest = jnp.abs(rate) * r / 2
    divisor: Array = jnp.where(forget, longest, 1)  # pyright: ignore[reportAssignmentType]
    length = jnp.where(jnp.isfinite(longest), 1 / divisor, jnp.nan)
    wait = jnp.where(excess > 0.5, 1, jnp.minimum(2 * limit.limit_look_wait, LOOK_EVERY))
    counted: Array = jnp.minimum(slope, OUTLIER * usual)
    counted = jnp.where(usual > 0, usual + SHARE * (counted - usual), slope)
    # A step that is skipped tells nothing.
    known = jnp.isfinite(length) & jnp.isfinite(slope)
    entered = limit._replace(
        limit_ratio=r,
        limit_excess=jnp.where(due, excess, 0),
        limit_slope=counted,
        limit_look_at=jnp.where(due, count + wait, limit.limit_look_at),
        limit_look_wait=jnp.where(due, wait, limit.limit_look_wait),
    )
    return length, forget & known, jax.tree.map(lambda new, old: jnp.where(known, new, old), entered, limit)


def wants_factors(limit: KspfbLimit, count: Int[Array, ""], every: int) -> tuple[Bool[Array, ""], KspfbLimit]:
    """Whether to make factors anew out of turn, and the limit then.

    That is so after a step that was too long. Between two such times there are 1, 2, 4, ... steps, at most `every`,
    since new factors may be no better, and cost many steps. With every turn this begins again.
    """
    wanted = (limit.limit_excess > 1) & (count >= limit.limit_factors_at)
    wait: Array = jnp.where(count % every == 0, 1, limit.limit_factors_wait)  # pyright: ignore[reportAssignmentType]
    return wanted, limit._replace(
        limit_factors_at=jnp.where(wanted, count + wait, limit.limit_factors_at),
        limit_factors_wait=jnp.where(wanted, jnp.minimum(2 * wait, every), wait),
    )
