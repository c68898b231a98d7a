"""A Kronecker product of a curvature of labels and one of inputs, for steps of both phases, and its exact block."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qbound.curvature.kronecker import (
    InputFactor,
    LabelFactor,
    factorised_inputs,
    factorised_labels,
    solve_in_factors,
)
from qbound.fitting.objective import Data, centred, contrasts, extended, hessian_of_loss, sample
from qbound.linalg.dense import add_to_diagonal, times
from qbound.models.inputs import DenseInputs
from qbound.types import Scalar

# Columns whose second moment is this many times the typical one are made smaller: float32 would not see the others.
_LARGE = 100.0
# Where the squares of all rows are more than this many times those of some, they take their place.
_RARE = 1.5
# The largest square of an input, in units of the largest among some of the rows.
_LARGEST_SQUARE = 1e20
# An exact block has at most this many rows, and costs at most this many products with the Hessian,
_BLOCK_ROWS, _BLOCK_COST = 1024, 10
# unless there are more labels than this: it would have few inputs, and there is none.
_BLOCK_LABELS = 64
# It is damped by this part of its mean eigenvalue.
_BLOCK_DAMPING = 1e-6


def input_factor(data: Data, rows: Int[Array, " k"], inputs: int, rank: int | None = None) -> InputFactor:
    """The factor of some of the rows; of `rank` eigenvectors if inputs are more than twice as many."""
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
    found = factorised_inputs(moments, scales, rank)
    tail = None if found.tail_eigenvalue is None else found.tail_eigenvalue * typical**2
    return InputFactor(scales, found.values * typical**2, found.vectors, tail)


def _squares(data: Data, units: Float[Array, " e"]) -> Float[Array, " e"]:
    """The mean squares of inputs, in given units, of all rows."""
    w = data.weights.astype(jnp.float32)[:, None]
    assert isinstance(data.design, DenseInputs)
    d = data.design.shape()[1]
    x = jnp.where(w > 0, data.design.x.astype(jnp.float32), 0) / units[None, :d]
    squares = jnp.sum(w * jnp.minimum(x**2, _LARGEST_SQUARE), axis=0)
    return squares if units.size == d else jnp.concatenate([squares, jnp.sum(w, axis=0)])


def label_factor(curvature: Float[Array, "..."]) -> LabelFactor:
    """The factor of a matrix (n, n), or of a diagonal (n,), in float32."""
    return factorised_labels(curvature.astype(jnp.float32))


class ExactBlock(NamedTuple):
    """A factor F with F'F the inverse of the Hessian on leading eigenvectors of inputs, times contrasts of labels.

    As a factor, what it gives is positive, whatever rounding has done. And whether it is known.
    """

    factor: Float[Array, "c c"]
    known: Bool[Array, ""]


def block_size(examples: int, rows: int, labels: int, inputs: int, rank: int) -> int:
    """How many of the leading eigenvectors of inputs a block from some of the examples is on; 0 for none."""
    if labels > _BLOCK_LABELS:
        return 0
    # Operations: rows c^2 to form a matrix of c rows, 4 c^3 to invert it, 6 for each input and label of an example.
    budget = _BLOCK_COST * 6 * examples * labels * inputs
    c = min(_BLOCK_ROWS, math.isqrt(budget // (2 * rows)), round((budget / 8) ** (1 / 3)))
    return min(rank, c // (labels - 1))


def unknown_block(labels: int, size: int) -> ExactBlock | None:
    """A block on `size` eigenvectors of inputs that is not known yet; None for 0."""
    c = (labels - 1) * size
    return ExactBlock(*jax.device_put((np.zeros((c, c), np.float32), np.array(False)))) if size else None


def exact_block(
    data: Data,
    rows: Int[Array, " k"],
    inputs: InputFactor,
    l2: Float[Array, " e"],
    params: Float[Array, "n e"],
    size: int,
) -> ExactBlock | None:
    """The block of some of the rows, on `size` eigenvectors of inputs; None for 0.

    A Kronecker product takes the curvature of labels for the same whatever the inputs are. Where inputs are large and
    labels certain, the Hessian can be far smaller than that. Such directions are few, and lie here.
    """
    vectors, (n, e) = inputs.vectors, params.shape
    if size == 0 or vectors is None:
        return None
    leading = inputs.scales[:, None] * vectors[:, vectors.shape[1] - size :]
    some_data, params = sample(data, rows, jnp.float32), params.astype(jnp.float32)
    matrix = hessian_of_loss(some_data, params, lambda block: times(extended(block.design, e), leading), size)
    penalty = times(leading.T, l2.astype(jnp.float32)[:, None] * leading)
    matrix = matrix + jnp.kron(jnp.eye(n - 1, dtype=jnp.float32), penalty)
    damping = _BLOCK_DAMPING * jnp.mean(jnp.diag(matrix))
    lower = jnp.linalg.cholesky(add_to_diagonal(matrix, jnp.where(damping > 0, damping, 1)))
    factor = jax.scipy.linalg.solve_triangular(lower, jnp.eye(len(matrix), dtype=jnp.float32), lower=True)
    known = jnp.all(jnp.isfinite(factor))
    return ExactBlock(jnp.where(known, factor, jnp.zeros_like(factor)), known)


def kronecker_solve(
    labels: LabelFactor,
    inputs: InputFactor,
    g: Float[Array, "n e"],
    l2: Float[Array, ""],
    relative: Scalar,
    block: ExactBlock | None = None,
) -> Float[Array, "n e"]:
    """The solution (A (x) B + damping)^-1 g, where damping is l2, and a relative part in mean eigenvalues of A (x) B.

    With an exact `block` that is known, it is that of the block on its part of the space.
    """
    damping = l2.astype(jnp.float32) + relative * labels.mean_value() * inputs.mean_value()
    # Of size 1, since float32 has a smaller range than g may have.
    size = jnp.max(jnp.abs(g))
    size = jnp.where((size > 0) & jnp.isfinite(size), size, 1)
    on_leading = None if block is None else functools.partial(_with_block, block)
    s = solve_in_factors(labels, inputs, (g / size).astype(jnp.float32), damping, on_leading)
    return centred(size * s.astype(g.dtype))


def _with_block(block: ExactBlock, y: Float[Array, "n e"], z: Float[Array, "n e"]) -> Float[Array, "n e"]:
    """What was solved for z, on leading eigenvectors by a block that is known."""
    n = len(y)
    rest = y.shape[1] - len(block.factor) // (n - 1)
    q = contrasts(n, jnp.float32)
    leading = times(q.T, z[:, rest:])
    solved = times(block.factor.T, times(block.factor, leading.reshape(-1, 1)))
    leading = times(q, solved.reshape(leading.shape))
    return jnp.concatenate([y[:, :rest], jnp.where(block.known, leading, y[:, rest:])], axis=1)
