"""A Kronecker product of a curvature of labels and one of inputs, for steps of both phases."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qbound.linear.design import Dense
from qbound.linear.objective import centred, extended
from qbound.records import record
from qbound.solve import times
from qbound.types import Scalar

__all__ = ["InputFactor", "LabelFactor", "input_factor", "label_factor", "solve"]

# Columns whose second moment is so many times the typical one are made smaller: float32 would not see the others.
_LARGE = 100.0


@record
class InputFactor:
    """S B S = U diag(values) U', with B the second moments of inputs and S = diag(scales), in float32.

    Without `vectors`, a diagonal.
    """

    scales: Float[Array, " e"]
    values: Float[Array, " e"]
    vectors: Float[Array, "e e"] | None


class LabelFactor(NamedTuple):
    """A = U diag(values) U'; without `vectors`, a diagonal."""

    values: Float[Array, " n"]
    vectors: Float[Array, "n n"] | None


def input_factor(design: Dense, weights: Float[Array, " b"], rows: Int[Array, " k"], inputs: int) -> InputFactor:
    """From some of the rows."""
    x = extended(Dense(design.x[rows].astype(jnp.float32)), inputs)
    w = weights[rows].astype(jnp.float32)
    total = jnp.sum(w)
    w = w / jnp.where(total > 0, total, 1)
    # Before products are taken, in which large columns would overflow.
    largest = jnp.max(jnp.where(w[:, None] > 0, jnp.abs(x), 0), axis=0)
    unit = x / jnp.where(largest > 0, largest, 1)[None, :]
    moments = jnp.sum(w[:, None] * unit**2, axis=0)
    sizes = jnp.sqrt(moments) * largest
    typical = jnp.median(sizes)
    typical = jnp.where(typical > 0, typical, jnp.mean(sizes))
    typical = jnp.where(typical > 0, typical, 1)
    scales = 1 / jnp.sqrt(1 + (sizes / typical) ** 2 / _LARGE)
    # In units of the typical column, so that no square leaves the range of float32.
    x = x * (scales / typical)[None, :]
    values, vectors = jnp.linalg.eigh(times((w[:, None] * x).T, x), symmetrize_input=False)
    return InputFactor(scales, jnp.maximum(values, 0) * typical**2, vectors)


def label_factor(curvature: Float[Array, "..."]) -> LabelFactor:
    """Of a matrix (n, n), or of a diagonal (n,)."""
    if curvature.ndim == 1:
        return LabelFactor(curvature, None)
    values, vectors = jnp.linalg.eigh(curvature, symmetrize_input=False)
    return LabelFactor(jnp.maximum(values, 0), vectors)


def solve(
    labels: LabelFactor, inputs: InputFactor, g: Float[Array, "n e"], l2: Float[Array, ""], relative: Scalar
) -> Float[Array, "n e"]:
    """(A (x) B + damping)^-1 g, where damping is l2, and a relative part in mean eigenvalues of A (x) B."""
    dtype = g.dtype
    a, b = labels.values.astype(jnp.float32)[:, None], inputs.values[None, :]
    damping = l2.astype(jnp.float32) + relative * jnp.mean(a) * jnp.mean(b)
    # Of size 1, since float32 has a smaller range than g may have.
    size = jnp.max(jnp.abs(g))
    size = jnp.where((size > 0) & jnp.isfinite(size), size, 1)
    y = (g / size).astype(jnp.float32) * inputs.scales[None, :]
    if inputs.vectors is not None:
        y = times(y, inputs.vectors)
    if labels.vectors is None:
        y = y / (a * b + damping)
    else:
        u = labels.vectors.astype(jnp.float32)
        y = times(u, times(u.T, y) / (a * b + damping))
    if inputs.vectors is not None:
        y = times(y, inputs.vectors.T)
    return centred(size * (y * inputs.scales[None, :]).astype(dtype))
