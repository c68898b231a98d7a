"""Blocks of the rows R of a factor, R'R = Sigma: inner products and combinations of rows, which need not be formed.

Vectors of parameters come in stacks of k, laid out as suits the rows: a method that works on stacks asks the rows for
everything it does with them.
"""

import abc
from collections.abc import Callable
from typing import Any, TypeVar, final

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from qbound.curvature import Curvature, ModelCurvature, Pieces
from qbound.families.ordered import LargestFirst, Sequential
from qbound.linalg.dense import HIGHEST, safe_sqrt
from qbound.models.linear import KroneckerMap
from qbound.records import record

# This many rows are combined at a time.
PART = 128


class Rows(abc.ABC):
    """c rows of d parameters."""

    @abc.abstractmethod
    def products(self) -> Float[Array, "c c"]:
        """RR'."""

    @abc.abstractmethod
    def products_with(self, stack: Float[Array, "..."]) -> Float[Array, "c k"]:
        """RB', for a stack B of k vectors."""

    @abc.abstractmethod
    def combine(
        self, stack: Float[Array, "..."], of_stack: Float[Array, "k k"], of_rows: Float[Array, "c k"]
    ) -> Float[Array, "..."]:
        """The stack of k vectors P'B + Q'R, with P = `of_stack` and Q = `of_rows`."""


@final
@record
class DenseRows(Rows):
    """Rows as a matrix; stacks are (k, d)."""

    matrix: Float[Array, "c d"]

    def products(self):
        return jnp.matmul(self.matrix, self.matrix.T, precision=HIGHEST)

    def products_with(self, stack):
        return jnp.matmul(self.matrix, stack.T, precision=HIGHEST)

    def combine(self, stack, of_stack, of_rows):
        # In parts, because errors of a sum of many equal products grow with their number.
        total = jnp.matmul(of_stack.T, stack, precision=HIGHEST)
        for first in range(0, of_rows.shape[0], PART):
            last = first + PART
            total = total + jnp.matmul(of_rows[first:last].T, self.matrix[first:last], precision=HIGHEST)
        return total


@final
@record
class KroneckerRows(Rows):
    """Rows x_j (x) f for the rows f of factors F_j.

    Stacks are (k, n, e), so that every product is one of matrices as they lie in memory.
    """

    factors: Float[Array, "g r n"]
    inputs: Float[Array, "g e"]

    def products(self):
        g, r, n = self.factors.shape
        flat = self.factors.reshape(g * r, n)
        of_factors = jnp.matmul(flat, flat.T, precision=HIGHEST).reshape(g, r, g, r)
        of_inputs = jnp.matmul(self.inputs, self.inputs.T, precision=HIGHEST)
        return (of_factors * of_inputs[:, None, :, None]).reshape(g * r, g * r)

    def products_with(self, stack):
        (g, r, n), (k, _, e) = self.factors.shape, stack.shape
        of_inputs = _contract(self.inputs, stack.reshape(k * n, e), 1, 1).reshape(g, k, n)
        return _contract(self.factors, of_inputs, 2, 2, batched=True).reshape(g * r, k)

    def combine(self, stack, of_stack, of_rows):
        (g, r, n), (k, _, e) = self.factors.shape, stack.shape
        weights = _contract(of_rows.reshape(g, r, k), self.factors, 1, 1, batched=True)
        new = _contract(weights.reshape(g, k * n), self.inputs, 0, 0)
        return (_contract(of_stack, stack.reshape(k, n * e), 0, 0) + new.reshape(k, n * e)).reshape(k, n, e)


def _contract(a, b, axis_a, axis_b, batched=False):
    """Contract one axis of each, without moving any: the first axis of both is a batch if `batched`."""
    batch = ((0,), (0,)) if batched else ((), ())
    return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), batch), precision=HIGHEST)


# Where the rows of a curvature come from, a block at a time, so that no array has all of them.
#
# Rows are those of sum_j w_j J_j'M_j J_j: sqrt(w_j) F_j J_j with F_j'F_j = M_j. They come example by example and,
# within one, label by label in the order of the bound; the label taken first has none.

Carry = TypeVar("Carry")


class RowSource(abc.ABC):
    """The rows of a curvature, by examples."""

    @abc.abstractmethod
    def examples(self) -> Any:
        """What the rows of each example are made of: a tree of arrays with a leading axis of examples."""

    @abc.abstractmethod
    def factors(self, example: Any) -> tuple[Float[Array, "r n"], Any]:
        """The weighted factor of one example, and what else its rows are made of."""

    @abc.abstractmethod
    def rows(self, factors: Float[Array, "g r n"], places: Int[Array, " r"], others: Any) -> Rows:
        """Rows of g examples, for some of the rows of their factors, which are at `places` in them."""

    def to_stack(self, basis: Float[Array, "k d"]) -> Float[Array, "..."]:
        """Vectors, each laid out as the tree of parameters is, as a stack for the rows."""
        return basis

    def to_basis(self, stack: Float[Array, "..."]) -> Float[Array, "k d"]:
        """The inverse of `to_stack`."""
        return stack

    def dense_rows(self, rows: Rows) -> Float[Array, "c d"]:
        """Rows as a matrix, laid out as the tree of parameters is."""
        assert isinstance(rows, DenseRows)
        return rows.matrix


@final
@record
class _KroneckerSource(RowSource):
    """Of a linear model: rows are never formed."""

    logits: Curvature
    weights: Float[Array, " b"]
    map: KroneckerMap

    def examples(self):
        return self.logits, self.weights, self.map.inputs

    def factors(self, example):
        logits, weight, x = example
        return _weighted_factor(logits, weight), x

    def rows(self, factors, places, others):
        return KroneckerRows(factors, others)

    def to_stack(self, basis):
        return self.map.layout.to_matrices(basis)

    def to_basis(self, stack):
        return self.map.layout.to_vectors(stack)

    def dense_rows(self, rows):
        assert isinstance(rows, KroneckerRows)
        by_example = rows.factors[:, :, :, None] * rows.inputs[:, None, None, :]
        return self.map.layout.to_vectors(by_example.reshape(-1, *by_example.shape[2:]))


@final
@record
class FeatureSource(RowSource):
    """Of explicit features f_x(y)."""

    logits: Curvature
    weights: Float[Array, " b"]
    features: Float[Array, "b n d"]

    def examples(self):
        return self.logits, self.weights, self.features

    def factors(self, example):
        logits, weight, features = example
        return _weighted_factor(logits, weight), features

    def rows(self, factors, places, others):
        rows = jnp.matmul(factors, others, precision=HIGHEST)
        return DenseRows(rows.reshape(-1, rows.shape[-1]))


@final
@record
class _PieceSource(RowSource):
    """Of any model, each of the pieces an example: a row is one `vjp` of it."""

    curvature: Pieces

    def examples(self):
        return self.curvature.pieces

    def factors(self, example):
        piece = self.curvature.make(self.curvature.shared, example)
        assert isinstance(piece, ModelCurvature)
        factors = jax.vmap(_weighted_factor)(piece.logits, piece.weights)  # of each position of a sequence
        return factors.reshape(-1, factors.shape[-1]), piece.map

    def rows(self, factors, places, others):
        def row(linear_map, f, place):
            positions, n = linear_map.shape()
            position = place // max(1, n - 1)
            cotangent = jnp.where((jnp.arange(positions) == position)[:, None], f[None, :], 0)
            return ravel_pytree(linear_map.transpose(cotangent))[0]

        rows = jax.vmap(jax.vmap(row, in_axes=(None, 0, 0)), in_axes=(0, 0, None))(others, factors, places)
        return DenseRows(rows.reshape(-1, rows.shape[-1]))


def row_source(curvature: Curvature) -> RowSource:
    """The rows of the curvature of a model, as `qbound.curvature.model.curvature_by_example` returns it."""
    if isinstance(curvature, Pieces):
        return _PieceSource(curvature)
    assert isinstance(curvature, ModelCurvature) and isinstance(curvature.map, KroneckerMap)
    return _KroneckerSource(curvature.logits, curvature.weights, curvature.map)


def scan_rows(
    source: RowSource,
    block: int,
    step: Callable[[Carry, Rows], Carry],
    start: Carry,
    merge: Callable[[Carry, Carry], Carry],
    largest: int,
) -> Carry:
    """`carry = step(carry, rows)` over all rows, about `block` at a time.

    Blocks are of as many whole examples as fit, or of parts of one. Rows of zeros fill up the last ones.

    Every step rounds all that is in the carry, so many of them in a row would add up to more than the rows do. Beyond
    about `largest` rows they are taken in chunks: each starts from nothing, zeros in the shape of `start`, and is
    merged with those before it.
    """
    examples = source.examples()
    count = jax.tree.leaves(examples)[0].shape[0]
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), examples)
    per_example = jax.eval_shape(source.factors, one)[0].shape[0]
    chunks = -(-count // max(1, largest // per_example))
    if chunks <= 1:
        return _scan_examples(source, (count, per_example), block, step, start, jnp.asarray(0), count)
    length = -(-count // chunks)
    empty = jax.tree.map(jnp.zeros_like, start)

    def of_chunk(carry, begin):
        chunk = _scan_examples(source, (count, per_example), block, step, empty, begin, length)
        return merge(carry, chunk), None

    return jax.lax.scan(of_chunk, start, length * jnp.arange(chunks))[0]


def _scan_examples(source, shape, block, step, start, begin: Int[Array, ""], length: int):
    """Over the rows of the examples from `begin` on, `length` of them or as many as there are."""
    examples = source.examples()
    count, per_example = shape
    group = max(1, min(block // per_example, length))
    part = min(per_example, block)
    parts = -(-per_example // part)
    groups = -(-length // group)

    def of_group(carry, number):
        # The last group may overlap with the one before, and with what comes after: that is left out.
        intended = begin + number * group
        first = jnp.minimum(intended, count - group)
        chosen = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, group), examples)
        index = first + jnp.arange(group)
        is_new = (index >= intended) & (index < begin + length)
        factors, others = jax.vmap(source.factors)(chosen)
        factors: Array = jnp.where(is_new[:, None, None], factors, 0)
        if parts == 1:
            return step(carry, source.rows(factors, jnp.arange(per_example), others)), None
        g, _, n = factors.shape
        padded = jnp.pad(factors, [(0, 0), (0, parts * part - per_example), (0, 0)])
        by_part = jnp.moveaxis(padded.reshape(g, parts, part, n), 1, 0)
        places = jnp.minimum(jnp.arange(parts * part), per_example - 1).reshape(parts, part)

        def of_part(carry, chosen):
            factors, places = chosen
            return step(carry, source.rows(factors, places, others)), None

        return jax.lax.scan(of_part, carry, (by_part, places))[0], None

    return jax.lax.scan(of_group, start, jnp.arange(groups))[0]


def _weighted_factor(logits: Curvature, weight: Array) -> Array:
    """sqrt(w) F in the order in which the bound took the labels, without the row of the first, which is zero."""
    factor = logits.factor()
    if isinstance(logits, LargestFirst):
        factor = factor[logits.order.permutation()]
    if isinstance(logits, (LargestFirst, Sequential)) and factor.shape[0] > 1:
        factor = factor[1:]
    # A weight of 0 removes its example, even one whose logits are infinite; its inputs must be finite.
    weighted: Array = jnp.where(weight == 0, 0, safe_sqrt(weight) * factor)
    return weighted
