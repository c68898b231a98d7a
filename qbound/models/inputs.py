"""The inputs of all examples, as what can be multiplied by parameters, whole or in blocks of rows."""

import abc
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qbound.linalg.dense import times
from qbound.records import record, static

# Long rows times few labels are faster as X V' than as V X'.
_SHORT, _MANY_LABELS = 64, 32
# How many entries a chunk of sparse inputs has.
_WIDTH = 16


def is_label(labels: Int[Array, " b"], n: int) -> Bool[Array, "n b"]:
    """Whether each of n labels is that of each example."""
    return jnp.arange(n, dtype=labels.dtype)[:, None] == labels[None, :]


class Design(abc.ABC):
    """A matrix X (b, d)."""

    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """The numbers (b, d) of examples and inputs."""

    @abc.abstractmethod
    def forward(self, v: Float[Array, "n d"]) -> Float[Array, "n b"]:
        """The product V X'."""

    @abc.abstractmethod
    def transpose(self, r: Float[Array, "n b"]) -> Float[Array, "n d"]:
        """The product R X."""

    @abc.abstractmethod
    def residuals(
        self,
        weights: Float[Array, " b"],
        others: Float[Array, "n b"],
        rest: Float[Array, " b"],
        labels: Int[Array, " b"],
    ) -> Float[Array, "n d"]:
        """The product R diag(w) X, with R the `others`, 0 at the label of each row, and minus the `rest` there."""

    @abc.abstractmethod
    def squared(self) -> "Design":
        """A matrix of the squares of its entries."""

    @abc.abstractmethod
    def block_size(self, rows: int, least_rows: int, inputs: int, few_blocks: int) -> int:
        """How many rows to take at a time: `rows` at most, but no fewer than `least_rows`.

        They have at most `inputs` numbers, unless all have no more than `few_blocks` times as many.
        """

    @abc.abstractmethod
    def block(self, start: Int[Array, ""], size: int) -> "Design":
        """The `size` rows from `start` on; b of them are all."""


@final
@record
class DenseInputs(Design):
    """A matrix X as an array."""

    x: Float[Array, "b d"]

    def shape(self):
        b, d = self.x.shape
        return b, d

    def forward(self, v):
        n, d = v.shape
        if d < _SHORT or n > _MANY_LABELS:
            return times(v, self.x.T)
        # Turned after the product, which compilers would turn into the one above.
        return jax.lax.optimization_barrier(times(self.x, v.T)).T

    def transpose(self, r):
        return times(r, self.x)

    def residuals(self, weights, others, rest, labels):
        weighted = weights[:, None] * self.x
        return times(others, weighted) - jax.ops.segment_sum(rest[:, None] * weighted, labels, len(others))

    def squared(self):
        return DenseInputs(self.x**2)

    def block_size(self, rows, least_rows, inputs, few_blocks):
        b, d = self.shape()
        cached = b if b * d <= few_blocks * inputs else inputs // d
        return min(b, max(least_rows, min(rows, cached)))

    def block(self, start, size):
        return self if size == len(self.x) else DenseInputs(jax.lax.dynamic_slice_in_dim(self.x, start, size))


@record
class Level:
    """Chunks: sums of rows `indices` of what is given, times `values`."""

    indices: Int[Array, "m w"]
    values: Float[Array, "m w"]

    def sums(self, matrix: Float[Array, "k n"]) -> Float[Array, "m n"]:
        """The sum of every chunk."""
        # One gather for each place in a chunk: together they would be an array of all entries times n.
        terms = (self.values[:, i, None] * matrix[self.indices[:, i]] for i in range(self.indices.shape[1]))
        return sum(terms, start=jnp.zeros((), matrix.dtype))  # pyright: ignore[reportReturnType]


@final
@record
class SparseInputs(Design):
    """A matrix X (b, d) by its entries, multiplied by gathers alone.

    A row of a product with a sparse matrix is a sum over the entries of a row, and rows have different lengths. Here
    every row is cut into chunks of a fixed width, filled up with zeros; the sums of chunks are summed again in the same
    way until each row has one. That is a few gathers of regular shape, on any device, where sums over ragged rows would
    be scattered one entry at a time. The transposed product has chunks of its own, made from columns.
    """

    by_row: tuple[Level, ...]
    by_column: tuple[Level, ...]
    rows: int = static()
    columns: int = static()

    @classmethod
    def from_csr(cls, matrix: Any, dtype: Any) -> "SparseInputs":
        """From a SciPy matrix or array in the format CSR, whose entries need not be in order."""
        transposed = matrix.T.tocsr()
        by_row, by_column = (_levels(part.indptr, part.indices, part.data, dtype) for part in (matrix, transposed))
        rows, columns = matrix.shape
        return cls(by_row, by_column, rows, columns)

    def shape(self):
        return self.rows, self.columns

    def forward(self, v):
        return _sum(self.by_row, v.T).T

    def transpose(self, r):
        return _sum(self.by_column, r.T).T

    def residuals(self, weights, others, rest, labels):
        rows = jnp.where(is_label(labels, len(others)), -rest[None, :], others)
        return self.transpose(weights[None, :] * rows)

    def squared(self):
        def first_squared(levels):
            first, *rest = levels
            return Level(first.indices, first.values**2), *rest

        return SparseInputs(first_squared(self.by_row), first_squared(self.by_column), self.rows, self.columns)

    def block_size(self, rows, least_rows, inputs, few_blocks):
        return self.rows

    def block(self, start, size):
        return self


def csr_without(matrix: Any, unused: np.ndarray) -> Any:
    """A SciPy matrix in the format CSR with zeros in some of its rows; a copy, unless there are none."""
    if not np.any(unused):
        return matrix
    matrix = matrix.copy()
    matrix.data[np.repeat(unused, np.diff(matrix.indptr))] = 0
    return matrix


def _sum(levels, matrix):
    for level in levels:
        # Each on its own: fused, a chunk of chunks would compute its parts anew for every entry.
        matrix = jax.lax.optimization_barrier(level.sums(matrix))
    return matrix


def _levels(indptr, indices, data, dtype) -> tuple[Level, ...]:
    """Chunks, chunks of chunks, and so on until every row has one."""
    counts, first = np.diff(indptr), np.asarray(indptr[:-1])
    levels = []
    while True:
        chunks = np.maximum(-(-counts // _WIDTH), 1)
        ends = np.cumsum(chunks)
        row = np.repeat(np.arange(len(counts)), chunks)
        offset = (np.arange(ends[-1]) - (ends - chunks)[row]) * _WIDTH
        inside = np.arange(_WIDTH) < (counts[row] - offset)[:, None]
        place = np.where(inside, (first[row] + offset)[:, None] + np.arange(_WIDTH), 0)
        if len(indices) == 0:
            indices, data = np.zeros(1, np.int32), np.zeros(1)
        levels.append(
            Level(
                jnp.asarray(np.where(inside, indices[place], 0).astype(np.int32)),
                jnp.asarray(np.where(inside, data[place], 0).astype(dtype)),
            )
        )
        if len(row) == len(counts):
            return tuple(levels)
        counts, first = chunks, ends - chunks
        indices, data = np.arange(len(row)), np.ones(len(row))
