"""How far to go along a direction: by the better of two certificates, or further by a line search."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qbound.mm.certificates import Line, certified_by_bound, certified_locally

__all__ = ["StepLength", "step_length"]

# The bound is not asked where the local certificate gives so large a part of Newton's decrease, and no search is made
# where it gives nearly all.
_ENOUGH, _NEAR = 0.5, 0.97


class StepLength(NamedTuple):
    """A length, what the objective is certified to fall by, what it falls by, and whether the local bound certified."""

    length: Float[Array, ""]
    certified: Float[Array, ""]
    actual: Float[Array, ""]
    local: Bool[Array, ""]


def step_length(
    line: Line, quadratic: Callable[[], Float[Array, ""]], *, is_local: bool, search: bool, eta: Float[Array, ""]
) -> StepLength:
    """The length of a step.

    Args:
      line: along s.
      quadratic: computes sum_j w_j u_j'M_j u_j, with M_j the curvature of a global bound; called where it is needed.
      is_local: whether the local certificate may win.
      search: whether to look for the minimum along the line.
      eta: in (0, 2), the step by the global bound in those to its minimum.
    """

    def by_bound():
        return *certified_by_bound(line, quadratic(), eta), jnp.array(False)

    def by_both():
        bound_length, bound_certified, _ = by_bound()
        local = local_certified >= bound_certified
        return jnp.where(local, local_length, bound_length), jnp.maximum(local_certified, bound_certified), local

    if is_local:
        local_length, local_certified = certified_locally(line)
        # Nothing certifies more than Newton's decrease; from a half of it on, the bound is not asked.
        part = local_certified / line.newton_decrease()
        alone = (local_length, local_certified, jnp.array(True))
        length, certified, local = jax.lax.cond(part > _ENOUGH, lambda: alone, by_both)
        # Close to Newton's step there is nothing left to search for.
        searched = jnp.array(search) & (part < _NEAR)
    else:
        length, certified, local = by_bound()
        searched = jnp.array(search)
    found = jax.lax.cond(searched, line.search, lambda length: length, length) if search else length

    # A search that rounding has led astray is not followed. In a loop, so that the decrease is compiled once.
    def astray(tried):
        trials, eta, actual = tried
        return (trials == 0) | ((trials == 1) & ~(actual >= certified) & (eta != length))

    def measured(tried):
        trials, _, _ = tried
        eta = jnp.where(trials == 0, found, length)
        return trials + 1, eta, line.decrease(eta)

    _, found, actual = jax.lax.while_loop(astray, measured, (jnp.zeros((), jnp.int32), found, jnp.zeros_like(found)))
    return StepLength(found, certified, actual, local)
