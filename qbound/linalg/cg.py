"""Conjugate gradients on trees, for symmetric positive definite operators given by their products.

Written here, not taken from a library, for four reasons, each with a test: it starts from r = g without a product by
zero (which some compilers get wrong); a breakdown stops it with the best solution so far and never makes a NaN; vectors
may be sharded; and it reports the residual of the solution it returns, computed anew, not the one carried along, which
drifts away from the truth in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qbound import checks, trees
from qbound.linalg.convolutions import fast_in_loops
from qbound.types import Scalar


class Solution(NamedTuple):
    """What a solver of B s = g found.

    Attributes:
      vector: s.
      product: B s, computed from `vector`.
      steps: iterations taken; 0 for direct solvers.
      residual: |g - B s| / |g|, and 0 if both are 0. NaN if anything was.
    """

    vector: Any
    product: Any
    steps: Int[Array, ""]
    residual: Float[Array, ""]


class _State(NamedTuple):
    step: Int[Array, ""]
    s: Any
    r: Any
    p: Any
    rz: Float[Array, ""]  # r.z of the step before, z the preconditioned residual; inf to begin with
    rr: Float[Array, ""]
    sound: Bool[Array, ""]  # no breakdown so far


def conjugate_gradients(
    product: Callable[[Any], Any],
    g: Any,
    *,
    max_steps: int,
    tolerance: Scalar,
    precondition: Callable[[Any], Any] | None = None,
    start: Any | None = None,
) -> Solution:
    r"""Solve B s = g by preconditioned conjugate gradients [HS52].

    It stops when the residual carried along is at most `tolerance` |g|, after `max_steps`, or at a breakdown: a
    direction p with p'Bp or a preconditioned product r'z that is not a positive number. From zero, every iterate has
    s'Bs = g's up to rounding, so that a truncated solution still minimises the quadratic along itself.

    Args:
      product: v -> B v, linear, symmetric, positive definite.
      g: the right-hand side, a tree of float arrays.
      max_steps: the most products to spend on the iteration. One more finds the residual, and another one the first
        residual if there is a `start`.
      tolerance: of the relative residual.
      precondition: r -> z, about B^-1 r; linear, symmetric, positive definite.
      start: a first guess. It is scaled to the best of its multiples, so that it is never worse than zero.

    Returns:
      A `Solution`.
    """
    size, g, start = _unit(g, start)
    # Not in `iterate`: models of runs and fits are affine, and convolutions rare in them.
    product = fast_in_loops(product, g)
    s, steps = _iterate(product, g, max_steps, tolerance, precondition, start)
    unit = checked_solution(product, g, s, steps)
    return unit._replace(vector=trees.scale(size, unit.vector), product=trees.scale(size, unit.product))


def iterate(
    product: Callable[[Any], Any],
    g: Any,
    *,
    max_steps: int,
    tolerance: Scalar,
    precondition: Callable[[Any], Any] | None = None,
    start: Any | None = None,
) -> tuple[Any, Int[Array, ""]]:
    """As `conjugate_gradients`, without the product that checks its solution.

    Returns:
      s, and the steps taken.
    """
    size, g, start = _unit(g, start)
    s, steps = _iterate(product, g, max_steps, tolerance, precondition, start)
    return trees.scale(size, s), steps


def _unit(g, start):
    """The largest entry of g, and both vectors divided by it.

    The iteration works with squares: with a largest entry of 1 they neither overflow nor vanish.
    """
    size = trees.largest(g)
    size = jnp.where((size > 0) & jnp.isfinite(size), size, 1)
    return size, trees.scale(1 / size, g), None if start is None else trees.scale(1 / size, start)


def _iterate(product, g, max_steps, tolerance, precondition, start):
    gg = trees.dot(g, g)
    limit = jnp.asarray(tolerance, gg.dtype) ** 2 * gg
    s, r, rr = trees.zeros_like(g), g, gg
    if start is not None:
        s, r = _best_multiple(product, g, start)
        rr = trees.dot(r, r)

    def unfinished(state: _State):
        return (state.step < max_steps) & (state.rr > limit) & state.sound

    def step(state: _State) -> _State:
        # The preconditioner comes first, so that a program holds it once, and not after the last step.
        if precondition is None:
            z, rz = state.r, state.rr
        else:
            z = checks.matching_tree("precondition", precondition(state.r), state.r)
            rz = trees.dot(state.r, z)
        p = trees.add_scaled(z, rz / state.rz, state.p)
        q = product(p)
        pq = trees.dot(p, q)
        alpha = rz / pq
        sound = (pq > 0) & jnp.isfinite(pq) & jnp.isfinite(alpha) & (rz > 0)
        s = trees.add_scaled(state.s, alpha, p)
        r = trees.add_scaled(state.r, -alpha, q)
        # A step that broke down is not taken.
        s = jax.tree.map(lambda new, old: jnp.where(sound, new, old), s, state.s)
        return _State(state.step + 1, s, r, p, rz, trees.dot(r, r), sound)

    nowhere = trees.zeros_like(g)
    first = _State(jnp.zeros((), jnp.int32), s, r, nowhere, jnp.full_like(rr, jnp.inf), rr, jnp.array(True))
    last = jax.lax.while_loop(unfinished, step, first)
    return last.s, last.step


def checked_solution(product: Callable[[Any], Any], g: Any, s: Any, steps: Int[Array, ""]) -> Solution:
    """`s` with its product and its residual, computed from itself."""
    bs = product(s)
    rr, gg = (trees.dot(v, v) for v in (jax.tree.map(jnp.subtract, g, bs), g))
    residual = jnp.sqrt(rr / jnp.where(gg == 0, 1, gg))
    return Solution(s, bs, steps, residual)


def _best_multiple(product, g, start):
    """The multiple c of `start` that minimises the quadratic, and its residual; zero where there is none."""
    b_start = product(start)
    curvature = trees.dot(start, b_start)
    c = trees.dot(g, start) / curvature
    c = jnp.where((curvature > 0) & jnp.isfinite(c), c, 0)
    residual = trees.add_scaled(g, -c, b_start)
    return trees.scale(c, start), jax.tree.map(lambda r, g: jnp.where(c == 0, g, r), residual, g)
