"""Exclusive prefix and suffix sums of one vector, fast on every backend.

On CPU, `jnp.cumsum` over 100,000 entries costs more than a softmax of them. Here the sums are taken inside short blocks
by a product with a triangular matrix of ones, then over the sums of the blocks in the same way: O(n) work, and
rounding errors that grow with log n instead of n.
"""

import abc
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qbound.records import record

__all__ = [
    "LabelOrder",
    "LeadOrder",
    "PairwiseOrder",
    "SortedOrder",
    "descending_order",
    "lead_order",
    "prefix_sums",
    "suffix_sums",
]


# Lengths of a block, from the best: whole SIMD registers on CPU, and few enough multiplications by zero. The first that
# divides the vector is taken, because filling up the last block copies everything twice; the first of all if none does.
BLOCKS = (32, 16, 20, 8, 24, 40, 28, 12)


# The largest vector summed as one block.
WHOLE = 128


def prefix_sums(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """y_i = sum of x_j over j < i."""
    return _blocked(x, reverse=False)


def suffix_sums(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """y_i = sum of x_j over j > i."""
    return _blocked(x, reverse=True)


def _blocked(x, *, reverse):
    (n,) = x.shape
    if n <= WHOLE:
        return _multiply(x, reverse=reverse)
    block = next((length for length in BLOCKS if n % length == 0), BLOCKS[0])
    rows = jnp.pad(x, (0, -n % block)).reshape(-1, block)
    others = _blocked(rows.sum(axis=1), reverse=reverse)
    return (_multiply(rows, reverse=reverse) + others[:, None]).reshape(-1)[:n]


def _multiply(x, *, reverse):
    """Sums along the last axis by a strictly triangular matrix of ones.

    HIGHEST: the default precision of accelerators would round every summand to bfloat16 or TF32.
    """
    size = x.shape[-1]
    ones = np.ones((size, size), dtype=bool)
    earlier = np.tril(ones, -1) if reverse else np.triu(ones, 1)
    return jnp.matmul(x, jnp.asarray(earlier, x.dtype), precision=jax.lax.Precision.HIGHEST)


# The order in which labels are taken, as sums over earlier and later labels.
#
# The bound is built one label at a time, so all it asks of an order is: for every label, the sum of something over the
# labels before it, or after it. Each class answers that with its label axis in the caller's order, so that no array is
# ever permuted where sums can be had without. What is summed is 0 at the first label, which callers treat apart.
#
# In every order of this module the label with the largest logit comes first. The order as given needs no class: there
# the labels are scanned as they are.


# Up to so many labels, comparing all pairs is faster than XLA's sort on CPU. With twice as many it is not, and its n^2
# comparisons take far more memory.
PAIRWISE_LIMIT = 16


# Up to so many, all are read to find one.
FEW = 128


class LabelOrder(abc.ABC):
    """An order of n labels."""

    @abc.abstractmethod
    def is_first(self) -> Bool[Array, " n"]:
        """True at the label that is taken first."""

    @abc.abstractmethod
    def first(self, x: Float[Array, " n"]) -> Float[Array, ""]:
        """The entry of `x` at the label that is taken first."""

    @abc.abstractmethod
    def earlier(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
        """For every label, the sum of `x` over the labels taken before it; `x` must be 0 at the first label."""

    @abc.abstractmethod
    def later(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
        """For every label, the sum of `x` over the labels taken after it; `x` must be 0 at the first label."""

    @abc.abstractmethod
    def positions(self) -> Int[Array, " n"]:
        """For every label, how many labels are taken before it."""

    @abc.abstractmethod
    def permutation(self) -> Int[Array, " n"]:
        """The labels in the order they are taken."""


@final
@record
class LeadOrder(LabelOrder):
    """One label first, the rest as given: prefix sums of the labels as they are, with the lead treated apart."""

    is_lead: Bool[Array, " n"]
    lead: Int[Array, ""]

    def is_first(self):
        return self.is_lead

    def first(self, x):
        # Of few labels, faster than to look it up for each of many examples.
        return jnp.sum(jnp.where(self.is_lead, x, 0)) if x.size <= FEW else x[self.lead]

    def earlier(self, x):
        return jnp.where(self.is_lead, 0, prefix_sums(x))

    def later(self, x):
        return jnp.where(self.is_lead, jnp.sum(x), suffix_sums(x))

    def positions(self):
        label = jnp.arange(self.is_lead.size)
        return jnp.where(self.is_lead, 0, jnp.where(label < self.lead, label + 1, label))

    def permutation(self):
        position = jnp.arange(self.is_lead.size)
        return jnp.where(position == 0, self.lead, jnp.where(position <= self.lead, position - 1, position))


@final
@record
class PairwiseOrder(LabelOrder):
    """Any order of few labels, by comparing all pairs of positions."""

    position: Int[Array, " n"]

    def is_first(self):
        return self.position == 0

    def first(self, x):
        return jnp.sum(jnp.where(self.is_first(), x, 0))

    def earlier(self, x):
        return jnp.sum(jnp.where(self._precedes(), x[:, None], 0), axis=0)

    def later(self, x):
        return jnp.sum(jnp.where(self._precedes(), x[None, :], 0), axis=1)

    def positions(self):
        return self.position

    def permutation(self):
        labels = jnp.arange(self.position.size)
        return jnp.zeros_like(labels).at[self.position].set(labels, unique_indices=True)

    def _precedes(self):
        return self.position[:, None] < self.position[None, :]


@final
@record
class SortedOrder(LabelOrder):
    """Any order of many labels, as a permutation and its inverse."""

    order: Int[Array, " n"]
    position: Int[Array, " n"]

    def is_first(self):
        return self.position == 0

    def first(self, x):
        return x[self.order[0]]

    def earlier(self, x):
        return prefix_sums(x[self.order])[self.position]

    def later(self, x):
        return suffix_sums(x[self.order])[self.position]

    def positions(self):
        return self.position

    def permutation(self):
        return self.order


def lead_order(lead: Int[Array, ""], size: int) -> LeadOrder:
    """Label `lead` first, the rest of `size` labels as given."""
    return LeadOrder(is_lead=jnp.arange(size) == lead, lead=lead)


def descending_order(logits: Float[Array, " n"]) -> LabelOrder:
    """From the largest logit to the smallest; equal ones as given."""
    labels = jnp.arange(logits.size)
    if logits.size <= PAIRWISE_LIMIT:
        above = logits[:, None] > logits[None, :]
        tied = (logits[:, None] == logits[None, :]) & (labels[:, None] < labels[None, :])
        return PairwiseOrder(position=jnp.sum(above | tied, axis=0))
    order = jnp.argsort(logits, descending=True, stable=True)
    return SortedOrder(order=order, position=jnp.zeros_like(labels).at[order].set(labels, unique_indices=True))
