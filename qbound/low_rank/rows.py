"""Blocks of the rows R of a factor, R'R = Sigma: inner products and combinations of rows, which need not be formed.

Vectors of parameters come in stacks of k, laid out as suits the rows: a method that works on stacks asks the rows for
everything it does with them.
"""

import abc
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound.records import record
from qbound.solve import HIGHEST

__all__ = ["DenseRows", "KroneckerRows", "Rows"]

# So many rows are combined at a time.
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
