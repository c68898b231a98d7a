"""The line along a direction: its logits are held if they are few, and made anew in blocks if not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound.families.softmax import curvature_weight, log_partition_bound
from qbound.fitting.line import Line, Rows, make_line, make_rows
from qbound.fitting.objective import Data, fold
from qbound.models.base import weighted_sum
from qbound.records import record

__all__ = ["bound_quadratic", "line_along", "quadratics"]


# The most logits of all examples to hold.
_HELD = 1 << 22


# Up to so many labels they are taken one by one.
_FEW_LABELS = 64


@record
class BlockRows:
    """The rows of a line, made anew, block by block, whenever they are asked."""

    data: Data
    params: Float[Array, "n e"]
    direction: Float[Array, "n e"]

    def sums(self, function: Callable[[Rows], Any], zeros: Any) -> Any:
        """The sum over blocks of a function of their rows."""

        def add(total, block, _):
            return jax.tree.map(jnp.add, total, function(make_rows(block.weights, *self.logits(block))))

        return fold(self.data, 2 * len(self.params), add, zeros)

    def logits(self, block: Data) -> tuple[Float[Array, "n b"], Float[Array, "n b"]]:
        """Of one block, and their displacement."""
        n = len(self.params)
        both = block.logits(jnp.concatenate([self.params, self.direction]))
        return both[:n], both[n:]

    def remainder(self, eta: Float[Array, ""]) -> Float[Array, ""]:
        return self.sums(lambda rows: rows.remainder(eta), jnp.zeros_like(eta))

    def moments(self, eta: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        return self.sums(lambda rows: rows.moments(eta), (jnp.zeros_like(eta), jnp.zeros_like(eta)))


def line_along(
    data: Data, params: Float[Array, "n e"], direction: Float[Array, "n e"], a: Float[Array, ""], c: Float[Array, ""]
) -> Line:
    """The line along W - eta s, with a = g's and c = s' l2 s; half a pass over the data, as is every sum of it."""
    rows = BlockRows(data, params, direction)
    b = data.design.shape()[0]
    if b * len(params) <= _HELD:
        return make_line(data.weights, *rows.logits(data), a, c)

    def enter(carry, block, start):
        v, r = carry
        here = make_rows(block.weights, *rows.logits(block))
        # Rows of weight 0 in a block may have been entered by the one before.
        keep = block.weights > 0
        return tuple(
            jax.lax.dynamic_update_slice(
                old, jnp.where(keep, new, jax.lax.dynamic_slice(old, (start,), (len(new),))), (start,)
            )
            for old, new in ((v, here.variances()), (r, here.radii()))
        )

    zeros = jnp.zeros(b, params.dtype)
    v, r = fold(data, 2 * len(params), enter, (zeros, zeros))
    return Line(rows=rows, weights=data.weights, v=v, r=r, a=a, c=c)


def bound_quadratic(line: Line) -> Float[Array, ""]:
    """sum_j w_j u_j'M_j u_j, with M_j the curvature of the global bound and u_j the displacement of logits."""

    def total(rows: Rows):
        # M_j depends on logits only up to a constant, and vanishes on constants: u_j and e_j give the same.
        of_all = quadratics if len(rows.p) <= _FEW_LABELS else jax.vmap(_quadratic, in_axes=1)
        return weighted_sum(rows.weights, of_all(rows.log_p, rows.e))

    rows = line.rows
    return total(rows) if isinstance(rows, Rows) else rows.sums(total, jnp.zeros_like(line.a))


def _quadratic(h: Float[Array, " n"], u: Float[Array, " n"]) -> Float[Array, ""]:
    """That of one example."""
    return log_partition_bound(h, order="max_first").curvature.quadratic(u)


def quadratics(h: Float[Array, "n b"], u: Float[Array, "n b"]) -> Float[Array, " b"]:
    """Those of all: u'Mu = sum_i beta_i (u_i - s_i)^2, with s_i the mean of u over the labels before i.

    The largest logit comes first, the others as given. A label at a time, for all examples at once: faster, and faster
    to compile, where labels are few.
    """
    first = jnp.argmax(h, axis=0).astype(jnp.int32)
    places = first[None, :]

    def add(carry, label):
        log_z, s, total = carry
        i, h, u = label
        is_other = (i != first).astype(h.dtype)
        rho, step = is_other * (h - log_z), is_other * (u - s)
        total = total + curvature_weight(rho) * step**2
        log_z = jnp.where(i == first, log_z, jnp.logaddexp(log_z, h))
        return (log_z, s + jax.nn.sigmoid(rho) * step, total), None

    start = tuple(jnp.take_along_axis(x, places, axis=0)[0] for x in (h, u))
    labels = jnp.arange(len(h), dtype=jnp.int32)
    return jax.lax.scan(add, (*start, jnp.zeros_like(start[0])), (labels, h, u))[0][2]
