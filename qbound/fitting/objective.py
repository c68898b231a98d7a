r"""The objective of a linear softmax model, and its derivatives, in blocks of rows.

.. math:: L(W) = \sum_j w_j [\log Z_j - h_{j y_j}] + \tfrac12 \sum_{ki} \lambda_i W_{ki}^2, \qquad h_j = W x_j

with weights w_j that sum to 1 and W (n, e): labels by inputs. With an intercept, e = d + 1 and the inputs have a 1 at
their end, which is never stored. What needs logits makes them, one block of rows at a time. Arrays of them have labels
first: sums over labels are then sums of long vectors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qbound.linalg.dense import times
from qbound.models.base import weighted_sum
from qbound.models.inputs import Dense, Design
from qbound.records import record

__all__ = [
    "Data",
    "Point",
    "centred",
    "contrasts",
    "diagonal",
    "evaluate",
    "extended",
    "fold",
    "hessian",
    "hessian_of_loss",
    "one_hot",
    "product",
    "sample",
]


# The most probabilities of all examples to hold; else every product makes them anew.
_HELD = 1 << 22


# The most logits of a block; and of one with many labels, so that the cache holds them, unless all are twice as many at
# most: a block must be long enough to be divided among cores.
_BLOCK, _CACHED = 1 << 22, 1 << 20


# Up to so many labels the mean label curvature is a matrix, beyond only its diagonal: to form and factorise it takes
# longer than the steps that it saves.
_MATRIX_LIMIT = 64


# It is estimated from so many examples, or up to twice as many: it only serves as a preconditioner.
_CURVATURE_ROWS = 2000


@record
class Data:
    """Examples."""

    design: Design
    labels: Int[Array, " b"]
    weights: Float[Array, " b"]  # of sum 1

    def logits(self, v: Float[Array, "n e"]) -> Float[Array, "n b"]:
        """V X'."""
        d = self.design.shape()[1]
        logits = self.design.forward(v[:, :d])
        return logits if v.shape[1] == d else logits + v[:, d, None]

    def pull_back(self, rows: Float[Array, "n b"], inputs: int) -> Float[Array, "n e"]:
        """R diag(w) X, for e inputs."""
        w = self.weights[None, :]
        rows = jnp.where(w == 0, 0, w * rows)
        product = self.design.transpose(rows)
        return product if inputs == product.shape[1] else jnp.concatenate([product, jnp.sum(rows, 1)[:, None]], axis=1)

    def pull_back_residuals(
        self, others: Float[Array, "n b"], rest: Float[Array, " b"], inputs: int
    ) -> Float[Array, "n e"]:
        """`pull_back` of rows that are 0 where the label of each example is, and shall be minus `rest` there."""
        w, labels = self.weights, self.labels
        product = self.design.residuals(w, others, rest, labels)
        if inputs == product.shape[1]:
            return product
        last = times(others, w) - jax.ops.segment_sum(w * rest, labels, len(others))
        return jnp.concatenate([product, last[:, None]], axis=1)


def sample(data: Data, rows: Int[Array, " k"], dtype: Any) -> Data:
    """Some of the rows of dense inputs, with weights that sum to 1 again; what has no weight is 0."""
    if not isinstance(data.design, Dense):
        raise TypeError(f"data: expected Dense inputs; got {type(data.design).__name__}")
    weights = data.weights[rows].astype(dtype)
    total = jnp.sum(weights)
    x = jnp.where(weights[:, None] > 0, data.design.x[rows].astype(dtype), 0)
    return Data(Dense(x), data.labels[rows], weights / jnp.where(total > 0, total, 1))


def fold(
    data: Data, labels: int, function: Callable[[Any, Data, Array], Any], carry: Any, *, cached: bool = True
) -> Any:
    """`carry = function(carry, block, start)` for every block of rows; those seen before have a weight of 0.

    Blocks have no more logits than the cache where labels are many, unless that is not asked for.
    """
    b = data.design.shape()[0]
    is_cached = cached and labels > _MATRIX_LIMIT and b * labels > 2 * _CACHED
    size = data.design.block_size(labels, _CACHED if is_cached else _BLOCK)
    zero = jnp.zeros((), jnp.int32)
    if size == b:
        return function(carry, data, zero)

    def one(i, carry):
        # The last block goes back to rows of the one before, so that all have one size.
        first = (i * size).astype(jnp.int32)
        start = jnp.minimum(first, b - size)
        weights = jax.lax.dynamic_slice(data.weights, (start,), (size,))
        weights = jnp.where(jnp.arange(size, dtype=jnp.int32) < first - start, 0, weights)
        labels = jax.lax.dynamic_slice(data.labels, (start,), (size,))
        return function(carry, Data(data.design.block(start, size), labels, weights), start)

    return jax.lax.fori_loop(0, -(-b // size), one, carry)


class Point(NamedTuple):
    """The objective at some parameters.

    Attributes:
      params: W.
      objective: L.
      gradient: of L.
      size: the largest absolute entry of the gradient.
      label_curvature: the mean of diag(p) - pp', or its diagonal where there are many labels; of many examples, an
        estimate.
      probabilities: p of all examples; None where there are too many.
    """

    params: Float[Array, "n e"]
    objective: Float[Array, ""]
    gradient: Float[Array, "n e"]
    size: Float[Array, ""]
    label_curvature: Float[Array, "..."]
    probabilities: Float[Array, "n b"] | None = None


def evaluate(data: Data, l2: Float[Array, " e"], params: Float[Array, "n e"], *, hold: bool = False) -> Point:
    """One pass over the data; with `hold`, its probabilities are kept unless they are too many."""
    n, e = params.shape
    b = data.labels.size
    is_matrix, is_held = n <= _MATRIX_LIMIT, hold and n * b <= _HELD
    one_block = _few_labels if n <= _MATRIX_LIMIT else _many_labels
    apart = max(1, b // _CURVATURE_ROWS)

    def add(carry, block: Data, start):
        loss, gradient, curvature, held = carry
        more_loss, more_gradient, p = one_block(block, params)
        curvature += _label_curvature(p, block.weights, is_matrix, apart)
        if held is not None:
            held = p if p.shape == held.shape else jax.lax.dynamic_update_slice(held, p, (jnp.zeros_like(start), start))
        return loss + more_loss, gradient + more_gradient, curvature, held

    zero = jnp.zeros((), params.dtype)
    curvature = jnp.zeros((n, n) if is_matrix else (n,), params.dtype)
    held = jnp.zeros((n, b), params.dtype) if is_held else None
    loss, gradient, curvature, held = fold(data, n, add, (zero, jnp.zeros_like(params), curvature, held))
    gradient = centred(gradient) + l2[None, :] * params
    objective = loss + jnp.sum(l2[None, :] * params**2) / 2
    return Point(params, objective, gradient, jnp.max(jnp.abs(gradient)), curvature, held)


_OfBlock = tuple[Float[Array, ""], Float[Array, "n e"], Float[Array, "n b"]]


def _few_labels(block: Data, params: Float[Array, "n e"]) -> _OfBlock:
    """The loss of a block of rows, its gradient, and the probabilities."""
    n, e = params.shape
    t = one_hot(block.labels, n, params.dtype)
    h = block.logits(params)
    # Measured from what was observed, logits lose no digits of the loss.
    h = h - jnp.sum(t * h, axis=0, keepdims=True)
    largest = jnp.max(h, axis=0, keepdims=True)
    exponentials = jnp.exp(h - largest)
    total = jnp.sum(exponentials, axis=0, keepdims=True)
    p = exponentials / total
    loss = weighted_sum(block.weights, (largest + jnp.log(total))[0])
    d = p - t
    # Rounding must not leave a part that is the same for all labels: no curvature but l2 would hold it back.
    return loss, block.pull_back(d - t * jnp.sum(d, axis=0, keepdims=True), e), p


def _many_labels(block: Data, params: Float[Array, "n e"]) -> _OfBlock:
    """The same, in fewer operations on arrays of logits, which take most of the time where labels are many.

    What was observed has its own terms, one for each example, and sums over the other labels are a product.
    """
    n, e = params.shape
    h = block.logits(params)
    observed = jnp.take_along_axis(h, block.labels[None, :], axis=0)[0]
    largest = jnp.max(h, axis=0)
    own = jnp.exp(observed - largest)
    is_observed = jnp.arange(n, dtype=block.labels.dtype)[:, None] == block.labels[None, :]
    # Written once: compilers would take the exponentials again for every use.
    others = jax.lax.optimization_barrier(jnp.where(is_observed, 0, jnp.exp(h - largest[None, :])))
    rest = times(jnp.ones((1, n), h.dtype), others)[0]
    total = own + rest
    loss = weighted_sum(block.weights, largest - observed + jnp.log(total))
    scaled = Data(block.design, block.labels, jnp.where(block.weights == 0, 0, block.weights / total))
    p: Array = jnp.where(is_observed, own[None, :], others)  # pyright: ignore[reportAssignmentType]
    return loss, scaled.pull_back_residuals(others, rest, e), p / total[None, :]


def _label_curvature(
    p: Float[Array, "n b"], weights: Float[Array, " b"], is_matrix: bool, apart: int
) -> Float[Array, "..."]:
    """The sum of w (diag(p) - pp'), or of its diagonal; estimated from some examples, at so large a distance."""
    some, w = p[:, ::apart], weights[::apart]
    if apart > 1:
        # Of weight 0, they are as good as any others to guess from.
        total = jnp.sum(w)
        w = jnp.sum(weights) * jnp.where(total > 0, w / jnp.where(total > 0, total, 1), 1 / len(w))
    # Those of no weight may not be numbers.
    some = jnp.where(w[None, :] == 0, 0, some)
    weighted = w[None, :] * some
    if is_matrix:
        return jnp.diag(jnp.sum(weighted, axis=1)) - times(weighted, some.T)
    return jnp.sum(weighted * (1 - some), axis=1)


def one_hot(labels: Int[Array, " b"], n: int, dtype: Any) -> Float[Array, "n b"]:
    """1 at the label of each example."""
    return (jnp.arange(n, dtype=labels.dtype)[:, None] == labels[None, :]).astype(dtype)


def centred(v: Float[Array, "n e"]) -> Float[Array, "n e"]:
    """Without the part that is the same for all labels, on which no probability depends."""
    return v - jnp.mean(v, axis=0, keepdims=True)


def product(data: Data, l2: Float[Array, " e"], point: Point, v: Float[Array, "n e"]) -> Array:
    """The Hessian at a point times v; one pass over the data."""
    n, e = v.shape
    held = point.probabilities

    def add(total, block: Data, start):
        if held is not None:
            size = block.labels.size
            p = (
                held
                if size == held.shape[1]
                else jax.lax.dynamic_slice(held, (jnp.zeros_like(start), start), (n, size))
            )
            u = block.logits(v)
        else:
            # Logits and their displacements in one product, for one reading of the inputs.
            logits = block.logits(jnp.concatenate([point.params, v]))
            p, u = jax.nn.softmax(logits[:n], axis=0), logits[n:]
        return total + block.pull_back(p * (u - jnp.sum(p * u, axis=0, keepdims=True)), e)

    return centred(fold(data, n if held is not None else 2 * n, add, jnp.zeros_like(v))) + l2[None, :] * v


def diagonal(data: Data, l2: Float[Array, " e"], params: Float[Array, "n e"]) -> Float[Array, "n e"]:
    """Of the Hessian."""
    n, e = params.shape

    def add(total, block: Data, _):
        p = jax.nn.softmax(block.logits(params), axis=0)
        return total + Data(block.design.squared(), block.labels, block.weights).pull_back(p * (1 - p), e)

    return fold(data, n, add, jnp.zeros_like(params)) + l2[None, :]


def hessian(data: Data, l2: Float[Array, " e"], params: Float[Array, "n e"]) -> Float[Array, "k k"]:
    """The Hessian in coordinates Z (m, e), m = n - 1, of W = Q Z, whose columns span what sums to 0 over labels."""
    e = params.shape[1]
    matrix = hessian_of_loss(data, params, lambda block: extended(block.design, e), e)
    return matrix + jnp.diag(jnp.tile(l2, len(params) - 1))


def hessian_of_loss(
    data: Data, params: Float[Array, "n e"], coordinates: Callable[[Data], Float[Array, "b r"]], r: int
) -> Float[Array, "k k"]:
    """That of the loss, in coordinates Z (m, r) for which the logits of an example change by Q Z y.

    Args:
      data: the examples.
      params: W.
      coordinates: gives y for the examples of a block.
      r: how many there are.
    """
    n, m = len(params), len(params) - 1
    q = contrasts(n, params.dtype)
    # Every pair of labels once.
    first, second = np.triu_indices(m)
    pairs = len(first)
    places = np.zeros((m, m), np.int32)
    places[first, second] = places[second, first] = np.arange(pairs)
    products = q[:, first] * q[:, second]

    def add(total, block: Data, _):
        p = jax.nn.softmax(block.logits(params), axis=0)
        mean = times(q.T, p)
        w = block.weights[None, :]
        labels = jnp.where(w == 0, 0, w * (times(products.T, p) - mean[first] * mean[second]))
        y = coordinates(block)
        # One pair at a time: of all together, rows times pairs times r numbers would be written and read.
        return total + jax.lax.map(lambda weights: times((weights[:, None] * y).T, y), labels)

    total = fold(data, pairs, add, jnp.zeros((pairs, r, r), params.dtype), cached=False)
    return total[places].transpose(0, 2, 1, 3).reshape(m * r, m * r)


def extended(design: Design, inputs: int) -> Float[Array, "b e"]:
    """The inputs as an array, with a 1 at the end of each if there is an intercept."""
    if not isinstance(design, Dense):
        raise TypeError(f"design: expected Dense inputs; got {type(design).__name__}")
    x = design.x
    return x if inputs == x.shape[1] else jnp.concatenate([x, jnp.ones((len(x), 1), x.dtype)], axis=1)


def contrasts(n: int, dtype: Any) -> Float[Array, "n m"]:
    """Orthonormal columns that sum to 0."""
    k, row = np.arange(1, n), np.arange(n)[:, None]
    return jnp.asarray(((row < k) - k * (row == k)) / np.sqrt(k * (k + 1)), dtype)
