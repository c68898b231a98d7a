"""A Kronecker product of a curvature of labels and one of inputs, for steps of both phases, and its exact core."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qbound.fitting.objective import Data, centred, contrasts, extended, hessian_of_loss, sample
from qbound.linalg.dense import add_to_diagonal, times
from qbound.linalg.nystrom import leading_eigenvectors
from qbound.models.inputs import Dense
from qbound.records import record
from qbound.types import Scalar

__all__ = [
    "Core",
    "InputFactor",
    "LabelFactor",
    "core_size",
    "input_factor",
    "label_factor",
    "make_core",
    "no_core",
    "solve",
]


# Columns whose second moment is so many times the typical one are made smaller: float32 would not see the others.
_LARGE = 100.0


# Columns of which all rows have so many times the squares of some have those of all.
_RARE = 1.5


# Of inputs, in units of the largest among some of the rows.
_LARGEST_SQUARE = 1e20


# The most rows of a core, and how many products with the Hessian it may cost; it is damped by so large a part of its
# mean eigenvalue. There is none with more labels than so many: it would have few inputs.
_CORE, _CORE_COST, _CORE_DAMPING, _CORE_LABELS = 1024, 10, 1e-6, 64


@record
class InputFactor:
    """S B S = U diag(values) U' + rest (I - UU'), with B the second moments of inputs and S = diag(scales), in float32.

    Without `vectors`, a diagonal; without `rest`, U is square.
    """

    scales: Float[Array, " e"]
    values: Float[Array, " r"]
    vectors: Float[Array, "e r"] | None
    rest: Float[Array, ""] | None = None

    def mean_value(self) -> Float[Array, ""]:
        """The mean eigenvalue, of all directions."""
        e, r = self.scales.size, self.values.size
        total = jnp.sum(self.values)
        return (total if self.rest is None else total + (e - r) * self.rest) / e


class LabelFactor(NamedTuple):
    """A = U diag(values) U'; without `vectors`, a diagonal."""

    values: Float[Array, " n"]
    vectors: Float[Array, "n n"] | None


def input_factor(data: Data, rows: Int[Array, " k"], inputs: int, rank: int | None = None) -> InputFactor:
    """From some of the rows; of so many eigenvectors if inputs are more than twice as many."""
    some_data = sample(data, rows, jnp.float32)
    x, w = extended(some_data.design, inputs), some_data.weights
    # Before products are taken, in which large columns would overflow. Written once: compilers would gather the rows
    # again for every use.
    largest = jnp.max(jnp.abs(x), axis=0)
    largest = jnp.where(largest > 0, largest, 1)
    root = jnp.sqrt(w)[:, None] * x / largest[None, :]
    root = jax.lax.optimization_barrier(root)
    moments = times(root.T, root)
    if rank is None and rows.size < data.labels.size:
        # Rare columns are missing among some of the rows, and steps along them would be far too long. Of the others,
        # to add what is a small part of a column could be more than the least eigenvalues.
        of_some, of_all = jnp.diag(moments), _squares(data, largest)
        moments = moments + jnp.diag(jnp.where(of_all > _RARE * of_some, of_all - of_some, 0))
    sizes = jnp.sqrt(jnp.diag(moments)) * largest
    # The geometric mean of those that are not 0; 1 if all are.
    some = sizes > 0
    logarithms = jnp.where(some, jnp.log(jnp.where(some, sizes, 1)), 0)
    typical = jnp.exp(jnp.sum(logarithms) / jnp.maximum(jnp.sum(some.astype(sizes.dtype)), 1))
    scales = 1 / jnp.sqrt(1 + (sizes / typical) ** 2 / _LARGE)
    # In units of the typical column, so that no square leaves the range of float32.
    unit = scales * (largest / typical)
    moments = unit[:, None] * moments * unit[None, :]
    if rank is None or inputs <= 2 * rank:
        values, vectors = jnp.linalg.eigh(moments, symmetrize_input=False)
        return InputFactor(scales, jnp.maximum(values, 0) * typical**2, vectors)
    values, vectors = leading_eigenvectors(moments, rank)
    rest = jnp.maximum(jnp.trace(moments) - jnp.sum(values), 0) / (inputs - rank)
    return InputFactor(scales, values * typical**2, vectors, rest * typical**2)


def _squares(data: Data, units: Float[Array, " e"]) -> Float[Array, " e"]:
    """The mean squares of inputs, in given units, of all rows."""
    w = data.weights.astype(jnp.float32)[:, None]
    assert isinstance(data.design, Dense)
    d = data.design.shape()[1]
    x = jnp.where(w > 0, data.design.x.astype(jnp.float32), 0) / units[None, :d]
    squares = jnp.sum(w * jnp.minimum(x**2, _LARGEST_SQUARE), axis=0)
    return squares if units.size == d else jnp.concatenate([squares, jnp.sum(w, axis=0)])


def label_factor(curvature: Float[Array, "..."]) -> LabelFactor:
    """Of a matrix (n, n), or of a diagonal (n,)."""
    if curvature.ndim == 1:
        return LabelFactor(curvature, None)
    values, vectors = jnp.linalg.eigh(curvature, symmetrize_input=False)
    return LabelFactor(jnp.maximum(values, 0), vectors)


class Core(NamedTuple):
    """F with F'F the inverse of the Hessian on leading eigenvectors of inputs, times contrasts of labels.

    As a factor, what it gives is positive, whatever rounding has done. And whether it is known.
    """

    factor: Float[Array, "c c"]
    known: Bool[Array, ""]


def core_size(examples: int, rows: int, labels: int, inputs: int, rank: int) -> int:
    """On how many of the leading eigenvectors of inputs to have a core, from some of the examples; 0 for none."""
    if labels > _CORE_LABELS:
        return 0
    # Operations: rows c^2 to form a matrix of c rows, 4 c^3 to invert it, 6 for each input and label of an example.
    budget = _CORE_COST * 6 * examples * labels * inputs
    c = min(_CORE, math.isqrt(budget // (2 * rows)), round((budget / 8) ** (1 / 3)))
    return min(rank, c // (labels - 1))


def no_core(examples: int, rows: int, labels: int, inputs: InputFactor) -> Core | None:
    """One that is not known yet; None if there will be none."""
    size = (labels - 1) * core_size(examples, rows, labels, inputs.scales.size, inputs.values.size)
    return Core(*jax.device_put((np.zeros((size, size), np.float32), np.array(False)))) if size else None


def make_core(
    data: Data, rows: Int[Array, " k"], inputs: InputFactor, l2: Float[Array, " e"], params: Float[Array, "n e"]
) -> Core | None:
    """From some of the rows.

    A Kronecker product takes the curvature of labels for the same whatever the inputs are. Where inputs are large and
    labels certain, the Hessian can be far smaller than that. Such directions are few, and lie here.
    """
    vectors, (n, e) = inputs.vectors, params.shape
    rank = inputs.values.size
    size = core_size(data.labels.size, rows.size, n, e, rank)
    if size == 0 or vectors is None:
        return None
    leading = inputs.scales[:, None] * vectors[:, rank - size :]
    some_data, params = sample(data, rows, jnp.float32), params.astype(jnp.float32)
    matrix = hessian_of_loss(some_data, params, lambda block: times(extended(block.design, e), leading), size)
    penalty = times(leading.T, l2.astype(jnp.float32)[:, None] * leading)
    matrix = matrix + jnp.kron(jnp.eye(n - 1, dtype=jnp.float32), penalty)
    damping = _CORE_DAMPING * jnp.mean(jnp.diag(matrix))
    lower = jnp.linalg.cholesky(add_to_diagonal(matrix, jnp.where(damping > 0, damping, 1)))
    factor = jax.scipy.linalg.solve_triangular(lower, jnp.eye(len(matrix), dtype=jnp.float32), lower=True)
    known = jnp.all(jnp.isfinite(factor))
    return Core(jnp.where(known, factor, jnp.zeros_like(factor)), known)


def solve(
    labels: LabelFactor,
    inputs: InputFactor,
    g: Float[Array, "n e"],
    l2: Float[Array, ""],
    relative: Scalar,
    core: Core | None = None,
) -> Float[Array, "n e"]:
    """(A (x) B + damping)^-1 g, where damping is l2, and a relative part in mean eigenvalues of A (x) B.

    With a `core` that is known, that on its part of the space.
    """
    dtype, n = g.dtype, len(g)
    a = labels.values.astype(jnp.float32)[:, None]
    damping = l2.astype(jnp.float32) + relative * jnp.mean(a) * inputs.mean_value()
    # Of size 1, since float32 has a smaller range than g may have.
    size = jnp.max(jnp.abs(g))
    size = jnp.where((size > 0) & jnp.isfinite(size), size, 1)
    y = (g / size).astype(jnp.float32) * inputs.scales[None, :]
    u = None if labels.vectors is None else labels.vectors.astype(jnp.float32)

    def divided(y: Float[Array, "n r"], b: Float[Array, " r"]) -> Float[Array, "n r"]:
        return y / (a * b[None, :] + damping) if u is None else times(u, times(u.T, y) / (a * b[None, :] + damping))

    if inputs.vectors is None:
        y = divided(y, inputs.values)
    else:
        z = times(y, inputs.vectors)
        leading = divided(z, inputs.values)
        if core is not None:
            leading = _with_core(leading, z, core, n)
        if inputs.rest is None:
            y = times(leading, inputs.vectors.T)
        else:
            leading = leading - divided(z, jnp.full_like(inputs.values, inputs.rest))
            y = divided(y, jnp.full_like(inputs.scales, inputs.rest)) + times(leading, inputs.vectors.T)
    return centred(size * (y * inputs.scales[None, :]).astype(dtype))


def _with_core(y: Float[Array, "n e"], z: Float[Array, "n e"], core: Core, n: int) -> Float[Array, "n e"]:
    """What was solved for z, on leading eigenvectors by a core that is known."""
    rest = y.shape[1] - len(core.factor) // (n - 1)
    q = contrasts(n, jnp.float32)
    leading = times(q.T, z[:, rest:])
    solved = times(core.factor.T, times(core.factor, leading.reshape(-1, 1)))
    leading = times(q, solved.reshape(leading.shape))
    return jnp.concatenate([y[:, :rest], jnp.where(core.known, leading, y[:, rest:])], axis=1)
