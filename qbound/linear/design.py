"""The inputs of all examples, as what can be multiplied by parameters, whole or in blocks of rows."""

import abc
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qbound.records import record
from qbound.solve import times

__all__ = ["Dense", "Design"]

# The most numbers in the inputs of a block, so that both products with it find it in the cache. Inputs of no more than
# a few blocks are not cut for that: a block is a copy, and costs more than it gains. It has so many rows at least.
_BLOCK_INPUTS, _FEW_BLOCKS, _LEAST_ROWS = 3 << 19, 3, 128
# Long rows times few labels are faster as X V' than as V X'.
_SHORT, _MANY_LABELS = 64, 32


class Design(abc.ABC):
    """A matrix X (b, d)."""

    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """(b, d)."""

    @abc.abstractmethod
    def forward(self, v: Float[Array, "n d"]) -> Float[Array, "n b"]:
        """V X'."""

    @abc.abstractmethod
    def transpose(self, r: Float[Array, "n b"]) -> Float[Array, "n d"]:
        """R X."""

    @abc.abstractmethod
    def residuals(
        self,
        weights: Float[Array, " b"],
        others: Float[Array, "n b"],
        rest: Float[Array, " b"],
        labels: Int[Array, " b"],
    ) -> Float[Array, "n d"]:
        """R diag(w) X, with R the others, which are 0 at the label of each row, and minus the rest there."""

    @abc.abstractmethod
    def squared(self) -> "Design":
        """The squares of its entries."""

    @abc.abstractmethod
    def block_size(self, labels: int, most: int) -> int:
        """How many rows to take at a time, with so many labels and at most so many logits, about."""

    @abc.abstractmethod
    def block(self, start: Int[Array, ""], size: int) -> "Design":
        """`size` rows from `start` on; b of them are all."""


@final
@record
class Dense(Design):
    """X as an array."""

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
        return Dense(self.x**2)

    def block_size(self, labels, most):
        b, d = self.shape()
        rows = b if b * d <= _FEW_BLOCKS * _BLOCK_INPUTS else _BLOCK_INPUTS // d
        return min(b, max(_LEAST_ROWS, min(rows, most // labels)))

    def block(self, start, size):
        b, d = self.shape()
        return self if size == b else Dense(jax.lax.dynamic_slice(self.x, (start, jnp.zeros_like(start)), (size, d)))
