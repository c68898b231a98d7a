r"""The curvature of every array of parameters as a Kronecker product, made of random probes of it.

A sample G of an array, as a matrix of p rows and q columns, has a mean outer product C with itself, the block of the
curvature that belongs to the array. Of that the factors keep

.. math:: L = \mathbb{E}\,[G G^\top], \qquad R = \mathbb{E}\,[G^\top G]

and C is taken to be L (x) R / tr L: exact where C is a Kronecker product, an estimate otherwise, and **not an upper
bound**. L^(1/2) (x) R^(1/2) is one wherever the gradients of single examples are of rank one, as in a dense layer that
each example passes once: with g_j = a_j b_j' the sum of vec(g_j) vec(g_j)' is below (sum a_j a_j' |b_j|^2)^(1/2) (x)
(sum b_j b_j' |a_j|^2)^(1/2). Of K arrays, K times the blocks are a bound of the whole.

An axis that is too long for a matrix has a diagonal, and so have vectors.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import trees
from qbound.linalg.dense import HIGHEST
from qbound.types import working_dtype

FactorKind = Literal["estimate", "bound"]

# A curvature this many times smaller than that of the array with the largest one is taken for none.
FORGOTTEN = 1e-10


@dataclasses.dataclass(frozen=True)
class LeafAxes:
    """Which axes of an array of parameters are the rows of a matrix, and which its columns.

    Axes that are neither are stacked: there is a matrix for each of their places, as for layers that a scan goes
    through. Without columns, or without rows, the matrices are vectors and have a diagonal.

    Attributes:
      rows: axes that are merged to rows, such as those of a kernel and of input channels.
      columns: axes that are merged to columns.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def __post_init__(self):
        for name in ("rows", "columns"):
            axes = getattr(self, name)
            if not isinstance(axes, tuple) or not all(isinstance(axis, int) for axis in axes):
                raise TypeError(f"{name}: expected a tuple of axes such as (0,) or (0, 1, 2); got {axes!r}")


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """An array as a stack of k matrices of p rows and q columns."""

    shape: tuple[int, ...]
    order: tuple[int, ...]  # of the axes: stacked ones, rows, columns
    sizes: tuple[int, int, int]  # (k, p, q)
    is_vector: bool

    def to_matrices(self, leaf: Array) -> Float[Array, "k p q"]:
        """The array as matrices."""
        return jnp.transpose(leaf, self.order).reshape(self.sizes)

    def to_leaf(self, matrices: Float[Array, "k p q"]) -> Array:
        """The inverse."""
        back = [self.order.index(axis) for axis in range(len(self.shape))]
        return jnp.transpose(matrices.reshape([self.shape[axis] for axis in self.order]), back)


def leaf_layout(shape: tuple[int, ...], axes: LeafAxes | None) -> LeafLayout:
    """As the user says; by default all axes but the last are rows, and arrays with fewer than two are vectors."""
    places = range(len(shape))
    if axes is None:
        axes = LeafAxes(tuple(places)[:-1], tuple(places)[-1:]) if len(shape) > 1 else LeafAxes(tuple(places), ())
    rows, columns = (tuple(axis % max(len(shape), 1) for axis in given) for given in (axes.rows, axes.columns))
    given = (*axes.rows, *axes.columns)
    if any(not -len(shape) <= axis < len(shape) for axis in given) or len({*rows, *columns}) != len(given):
        raise ValueError(f"axes: expected different axes of an array of shape {shape}; got {axes}")
    is_vector = not rows or not columns
    if not rows:
        rows, columns = columns, ()
    stacked = tuple(axis for axis in places if axis not in (*rows, *columns))
    k, p, q = (math.prod(shape[axis] for axis in group) for group in (stacked, rows, columns))
    return LeafLayout(shape, (*stacked, *rows, *columns), (k, p, q), is_vector)


class LeafFactors(NamedTuple):
    """Of one array, as k matrices of p rows and q columns.

    Attributes:
      factor_rows: the sum of G G' over turns, with forgetting, (k, p, p); its diagonal (k, p) for a long axis.
      factor_columns: that of G'G.
      solve_rows: the damped inverse of L/tr L, or, for a bound, the eigenvectors of L; ones where it is a diagonal.
      solve_columns: that of R.
      solve_values: what to multiply by: in the eigenvectors of a bound (k, p, q), in an estimate (k, 1, 1).
    """

    factor_rows: Array
    factor_columns: Array
    solve_rows: Array
    solve_columns: Array
    solve_values: Array


def empty_leaf_factors(layout: LeafLayout, kind: FactorKind, longest: int, dtype: Any) -> LeafFactors:
    """Before the first probe."""
    k, p, q = layout.sizes

    def zeros(size, diagonal):
        return jnp.zeros((k, size) if diagonal or size > longest else (k, size, size), dtype)

    # A vector of a bound is a matrix of one column: that is of rank one, and has no diagonal.
    diagonal = layout.is_vector and kind == "estimate"
    values = jnp.zeros((k, p, q) if kind == "bound" else (k, 1, 1), dtype)
    return LeafFactors(zeros(p, diagonal), zeros(q, False), zeros(p, diagonal), zeros(q, False), values)


def with_probe(factors: LeafFactors, g: Float[Array, "k p q"], decay: Array) -> LeafFactors:
    """After another turn."""

    def moment(old, pattern, diagonal):
        if old.ndim == 2:
            return decay * old + jnp.sum(g * g, axis=diagonal)
        return decay * old + jnp.einsum(pattern, g, g, precision=HIGHEST)

    return factors._replace(
        factor_rows=moment(factors.factor_rows, "kpq,krq->kpr", 2),
        factor_columns=moment(factors.factor_columns, "kpq,kpr->kqr", 1),
    )


def mean_curvature_of(factors: LeafFactors, turns: Array) -> Float[Array, " k"]:
    """The mean eigenvalue of each block: its trace over the number of entries."""
    rows, columns = factors.factor_rows, factors.factor_columns
    return _trace(columns) / turns / max(1, rows.shape[1] * columns.shape[1])


def factorised(
    factors: LeafFactors, turns: Array, damping: Array, l2: Array, least: Array, kind: FactorKind, blocks: int
) -> LeafFactors:
    """Made ready to solve with, for a damping in mean eigenvalues of each block, and l2.

    A block with no more curvature than `least` has no solution but that of l2 alone, or zero without l2.
    """
    mean = mean_curvature_of(factors, turns)
    total = damping + l2 / jnp.where(mean > 0, mean, 1)
    known = (mean > least) & (total < 1e12)
    alone = jnp.where(l2 > 0, 1 / jnp.where(l2 > 0, l2, 1), 0)
    total = jnp.where(known, total, 1)
    make = _bound if kind == "bound" else _estimate
    rows, columns, values = make(factors, jnp.where(known, mean, 1), total, turns, blocks)
    known = known[:, None, None]
    return factors._replace(
        solve_rows=_where(known, rows, _identity_like(rows)),
        solve_columns=_where(known, columns, _identity_like(columns)),
        solve_values=jnp.where(known, values, alone),
    )


def solved(factors: LeafFactors, g: Float[Array, "k p q"], kind: FactorKind) -> Float[Array, "k p q"]:
    """The solution for a gradient."""
    rows, columns, values = factors.solve_rows, factors.solve_columns, factors.solve_values
    if kind == "estimate":
        return values * _by_columns(columns, _by_rows(rows, g))
    inside = _by_columns(columns, _by_rows(jnp.swapaxes(rows, 1, 2) if rows.ndim == 3 else rows, g))
    return _by_columns(jnp.swapaxes(columns, 1, 2) if columns.ndim == 3 else columns, _by_rows(rows, values * inside))


def _estimate(factors, mean, damping, turns, blocks):
    """(L/tr L)^-1 and R^-1, each damped; together they are damped by `damping` mean eigenvalues, or a little more."""
    del turns, blocks
    rows, columns = factors.factor_rows, factors.factor_columns
    # A side of one entry has no directions of its own to damp.
    of_rows, of_columns = jnp.sqrt(damping), jnp.sqrt(damping)
    if columns.shape[1] == 1:
        of_rows, of_columns = damping, 0 * damping
    elif rows.shape[1] == 1:
        of_rows, of_columns = 0 * damping, damping
    return _inverse(rows, of_rows), _inverse(columns, of_columns), 1 / mean[:, None, None]


def _inverse(factor, damping):
    """Of a factor in units of its mean eigenvalue."""
    size = factor.shape[1]
    mean = _trace(factor) / size
    mean = jnp.asarray(jnp.where(mean > 0, mean, 1))
    if factor.ndim == 2:
        return 1 / (factor / mean[:, None] + damping[:, None])
    identity = jnp.eye(size, dtype=factor.dtype)[None]
    matrix = factor / mean[:, None, None] + damping[:, None, None] * identity
    lower = jnp.linalg.cholesky(matrix)
    half = jax.lax.linalg.triangular_solve(lower, jnp.broadcast_to(identity, lower.shape), left_side=True, lower=True)
    return jnp.einsum("kqp,kqr->kpr", half, half, precision=HIGHEST)


def _bound(factors, mean, damping, turns, blocks):
    """Eigenvectors of L and R, and the damped inverse of K L^(1/2) (x) R^(1/2) in them."""
    (left, rows), (right, columns) = _eigen(factors.factor_rows), _eigen(factors.factor_columns)
    roots = jnp.sqrt(left / turns)[:, :, None] * jnp.sqrt(right / turns)[:, None, :]
    return rows, columns, 1 / (blocks * roots + (damping * mean)[:, None, None])


def _eigen(factor):
    """Eigenvalues, not below zero, and eigenvectors; a diagonal has itself, and ones for the vectors."""
    if factor.ndim == 2:
        return factor, jnp.ones_like(factor)
    values, vectors = jnp.linalg.eigh(factor)
    return jnp.maximum(values, 0), vectors


def _trace(factor: Array) -> Array:
    return jnp.sum(factor, axis=1) if factor.ndim == 2 else jnp.trace(factor, axis1=1, axis2=2)


def _identity_like(factor: Array) -> Array:
    return jnp.ones_like(factor) if factor.ndim == 2 else jnp.broadcast_to(
        jnp.eye(factor.shape[1], dtype=factor.dtype)[None], factor.shape
    )  # fmt: skip


def _where(known: Array, x: Array, y: Array) -> Array:
    return jnp.where(known if x.ndim == 3 else known[:, :, 0], x, y)


def _by_rows(factor: Array, g: Float[Array, "k p q"]) -> Float[Array, "k p q"]:
    return factor[:, :, None] * g if factor.ndim == 2 else jnp.einsum("kpr,krq->kpq", factor, g, precision=HIGHEST)


def _by_columns(factor: Array, g: Float[Array, "k p q"]) -> Float[Array, "k p q"]:
    return g * factor[:, None, :] if factor.ndim == 2 else jnp.einsum("kpq,kqr->kpr", g, factor, precision=HIGHEST)


# All arrays of a tree of parameters.


class LayerFactors(NamedTuple):
    """The factors of every array, and what has not entered them yet.

    Attributes:
      layer_factors: of each array, in the order of the leaves.
      layer_turns: of how many turns they are, with forgetting.
      layer_pending: the sum of probes since the last turn. Their signs are independent, so that its outer product with
        itself has for mean the sum of theirs: one product for many batches.
      layer_pending_count: of how many.
    """

    layer_factors: tuple[LeafFactors, ...]
    layer_turns: Float[Array, ""]
    layer_pending: Any
    layer_pending_count: Float[Array, ""]


def empty_layer_factors(params: Any, layouts: list[LeafLayout], kind: FactorKind, longest: int) -> LayerFactors:
    """Before the first probe. `params` in float32 at least."""
    leaves = jax.tree.leaves(params)
    dtype = working_dtype(*leaves)
    # optax.tree.map_params asks for a state without parameters, in whose place any others may be.
    none: Any = jnp.zeros((), dtype)
    return LayerFactors(
        none
        if not leaves
        else tuple(
            empty_leaf_factors(layout, kind, longest, leaf.dtype) for layout, leaf in zip(layouts, leaves, strict=True)
        ),
        jnp.zeros((), dtype),
        trees.zeros_like(params),
        jnp.zeros((), dtype),
    )


def with_pending(factors: LayerFactors, layouts: list[LeafLayout], decay: Array) -> LayerFactors:
    """After a turn, in which the probes that were pending have entered, if their products are finite."""
    if not layouts:
        return factors
    unit = 1 / jnp.sqrt(jnp.maximum(factors.layer_pending_count, 1))
    pending = jax.tree.leaves(factors.layer_pending)
    entered = tuple(
        with_probe(old, unit.astype(g.dtype) * layout.to_matrices(g), decay.astype(g.dtype)) if g.size else old
        for old, layout, g in zip(factors.layer_factors, layouts, pending, strict=True)
    )
    # Products of numbers that are finite may not be so.
    finite = trees.all_finite(entered)
    before = factors.layer_factors, factors.layer_turns
    after = entered, decay * factors.layer_turns + 1
    kept, turns = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
    none_pending = trees.zeros_like(factors.layer_pending), jnp.zeros_like(factors.layer_pending_count)
    return LayerFactors(kept, turns, none_pending[0], none_pending[1])


def ready(factors: LayerFactors, damping: Array, l2: Array, kind: FactorKind) -> LayerFactors:
    """With all arrays made ready to solve with."""
    if not jax.tree.leaves(factors.layer_pending):
        return factors
    some = [leaf for leaf in factors.layer_factors if leaf.factor_rows.size and leaf.factor_columns.size]
    turns = jnp.maximum(factors.layer_turns, 1e-30)
    means = [mean_curvature_of(leaf, turns.astype(leaf.factor_rows.dtype)) for leaf in some]
    largest = jnp.max(jnp.stack([jnp.max(mean).astype(damping.dtype) for mean in means])) if means else damping
    blocks = sum(len(mean) for mean in means)

    def one(leaf):
        if not (leaf.factor_rows.size and leaf.factor_columns.size):
            return leaf
        turned, damped, plain, least = (
            x.astype(leaf.factor_rows.dtype) for x in (turns, damping, l2, FORGOTTEN * largest)
        )
        return factorised(leaf, turned, damped, plain, least, kind, blocks)

    return factors._replace(layer_factors=tuple(one(leaf) for leaf in factors.layer_factors))


def direction(factors: LayerFactors, layouts: list[LeafLayout], g: Any, kind: FactorKind) -> Any:
    """The solution for the gradient of all arrays, each with its own block."""
    leaves, structure = jax.tree.flatten(g)
    if not leaves:
        return g
    each = zip(factors.layer_factors, layouts, leaves, strict=True)
    return structure.unflatten(
        [
            layout.to_leaf(solved(leaf, layout.to_matrices(x), kind)) if x.size else x
            for leaf, layout, x in each
        ]
    )  # fmt: skip
