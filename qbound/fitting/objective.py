r"""The objective of a linear softmax model, its derivatives, and its line along a direction, in blocks of rows.

.. math:: L(W) = \sum_j w_j [\log Z_j - h_{j y_j}] + \tfrac12 \sum_{ki} \lambda_i W_{ki}^2, \qquad h_j = W x_j

with weights w_j that sum to 1 and W (n, e): labels by inputs. With an intercept, e = d + 1 and the inputs have a 1 at
their end, which is never stored. What needs logits makes them, one block of rows at a time. Arrays of them have labels
first: sums over labels are then sums of long vectors.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qbound import trees
from qbound.families.base import LineRows
from qbound.families.softmax import Softmax
from qbound.fitting.line import Line, make_line
from qbound.linalg.dense import times
from qbound.models.inputs import DenseInputs, Design, is_label
from qbound.records import record, static

_SOFTMAX = Softmax()

# How the size of a gradient is measured: by its largest absolute entry, or by its Euclidean length.
Norm = Literal["largest", "euclidean"]


@dataclasses.dataclass(frozen=True)
class PassSizes:
    """What a pass over the data holds, and into which blocks of rows it is cut. The defaults are good untuned.

    Attributes:
      held: probabilities, or the logits of a line, of all examples are held up to this many; else they are made anew
        when needed.
      block_logits: a block has at most this many logits,
      cached_logits: and with many labels at most this many, so that the cache holds them; unless all blocks together
        have no more than twice as many, since a block must be long enough to be divided among cores.
      block_inputs: a block has at most this many numbers in its inputs, so that both products with it find them in the
        cache,
      few_blocks: unless there would be no more blocks than this: a block is a copy, and costs more than it gains.
      least_rows: and it has this many rows at least.
      few_labels: up to this many labels the mean label curvature is a matrix. Beyond, it takes longer to form and
        factorise than the steps that it saves, and only its diagonal is kept.
      curvature_rows: the label curvature is estimated from this many examples, or up to twice as many: it only serves
        as a preconditioner.
    """

    held: int = 1 << 22
    block_logits: int = 1 << 22
    cached_logits: int = 1 << 20
    block_inputs: int = 3 << 19
    few_blocks: int = 3
    least_rows: int = 128
    few_labels: int = 64
    curvature_rows: int = 2000

    def block_size(self, design: Design, labels: int, *, cached: bool) -> int:
        """How many rows to take at a time; with `cached`, no more than the cache holds where labels are many."""
        is_cached = cached and labels > self.few_labels and design.shape()[0] * labels > 2 * self.cached_logits
        rows = (self.cached_logits if is_cached else self.block_logits) // labels
        return design.block_size(rows, self.least_rows, self.block_inputs, self.few_blocks)


@record
class Data:
    """Examples: their inputs, labels and weights; and how passes over them go."""

    design: Design
    labels: Int[Array, " b"]
    weights: Float[Array, " b"]  # they sum to 1
    sizes: PassSizes = static(default=PassSizes())

    def logits(self, v: Float[Array, "n e"]) -> Float[Array, "n b"]:
        """The logits V X'."""
        d = self.design.shape()[1]
        logits = self.design.forward(v[:, :d])
        return logits if v.shape[1] == d else logits + v[:, d, None]

    def pull_back(self, rows: Float[Array, "n b"], inputs: int) -> Float[Array, "n e"]:
        """The product R diag(w) X, for e inputs."""
        rows = self.weighted(rows)
        product = self.design.transpose(rows)
        return product if inputs == product.shape[1] else jnp.concatenate([product, jnp.sum(rows, 1)[:, None]], axis=1)

    def pull_back_residuals(
        self, others: Float[Array, "n b"], rest: Float[Array, " b"], inputs: int
    ) -> Float[Array, "n e"]:
        """As `pull_back`, of rows given by `others`, which are 0 at the label of each example, and -`rest` there."""
        w, labels = self.weights, self.labels
        product = self.design.residuals(w, others, rest, labels)
        if inputs == product.shape[1]:
            return product
        last = times(others, w) - jax.ops.segment_sum(w * rest, labels, len(others))
        return jnp.concatenate([product, last[:, None]], axis=1)

    def weighted(self, rows: Float[Array, "n b"]) -> Float[Array, "n b"]:
        """The product R diag(w); 0 for examples of weight 0, even where R is infinite."""
        w = self.weights[None, :]
        return jnp.where(w == 0, 0, w * rows)


def sample(data: Data, rows: Int[Array, " k"], dtype: Any) -> Data:
    """Some of the rows of dense inputs, with weights that sum to 1 again; inputs of weight 0 become 0."""
    if not isinstance(data.design, DenseInputs):
        raise TypeError(f"data: expected DenseInputs; got {type(data.design).__name__}")
    weights = data.weights[rows].astype(dtype)
    total = jnp.sum(weights)
    x = jnp.where(weights[:, None] > 0, data.design.x[rows].astype(dtype), 0)
    return Data(DenseInputs(x), data.labels[rows], weights / jnp.where(total > 0, total, 1), data.sizes)


def fold(
    data: Data, labels: int, function: Callable[[Any, Data, Array], Any], carry: Any, *, cached: bool = True
) -> Any:
    """`carry = function(carry, block, start)` for every block of rows; rows of a block seen before have weight 0.

    With `cached`, blocks of many labels have no more logits than the cache holds.
    """
    b = data.design.shape()[0]
    size = data.sizes.block_size(data.design, labels, cached=cached)
    zero = jnp.zeros((), jnp.int32)
    if size == b:
        return function(carry, data, zero)

    def one(i, carry):
        # The last block goes back to rows of the one before, so that all have one size.
        first = (i * size).astype(jnp.int32)
        start = jnp.minimum(first, b - size)
        weights = jax.lax.dynamic_slice_in_dim(data.weights, start, size)
        weights = jnp.where(jnp.arange(size, dtype=jnp.int32) < first - start, 0, weights)
        labels = jax.lax.dynamic_slice_in_dim(data.labels, start, size)
        return function(carry, Data(data.design.block(start, size), labels, weights, data.sizes), start)

    return jax.lax.fori_loop(0, -(-b // size), one, carry)


class LinearPoint(NamedTuple):
    """The objective at some parameters.

    Attributes:
      params: W.
      objective: L.
      gradient: the gradient of L.
      gradient_norm: its size, in the norm of the objective.
      label_curvature: the mean of diag(p) - pp', or its diagonal where there are many labels; of many examples, an
        estimate.
      probabilities: p of all examples; None where there are too many.
    """

    params: Float[Array, "n e"]
    objective: Float[Array, ""]
    gradient: Float[Array, "n e"]
    gradient_norm: Float[Array, ""]
    label_curvature: Float[Array, "..."]
    probabilities: Float[Array, "n b"] | None = None


@record
class LinearObjective:
    """The objective L for given data and l2, and how the size of its gradient is measured."""

    data: Data
    l2: Float[Array, " e"]
    norm: Norm = static(default="largest")

    def evaluate(self, params: Float[Array, "n e"], *, hold: bool = False) -> LinearPoint:
        """One pass over the data; with `hold`, its probabilities are kept unless they are too many."""
        data, (n, _), b = self.data, params.shape, self.data.labels.size
        is_matrix, is_held = n <= data.sizes.few_labels, hold and n * b <= data.sizes.held
        one_block = _few_labels if n <= data.sizes.few_labels else _many_labels
        stride = max(1, b // data.sizes.curvature_rows)

        def add(carry, block: Data, start):
            loss, gradient, curvature, held = carry
            more_loss, more_gradient, p = one_block(block, params)
            curvature += _label_curvature(p, block.weights, is_matrix, stride)
            if held is not None:
                held = p if p.shape == held.shape else jax.lax.dynamic_update_slice_in_dim(held, p, start, axis=1)
            return loss + more_loss, gradient + more_gradient, curvature, held

        zero = jnp.zeros((), params.dtype)
        curvature = jnp.zeros((n, n) if is_matrix else (n,), params.dtype)
        held = jnp.zeros((n, b), params.dtype) if is_held else None
        loss, gradient, curvature, held = fold(data, n, add, (zero, jnp.zeros_like(params), curvature, held))
        gradient = centred(gradient) + self.l2[None, :] * params
        objective = loss + jnp.sum(self.l2[None, :] * params**2) / 2
        size = jnp.max(jnp.abs(gradient)) if self.norm == "largest" else trees.norm(gradient)
        return LinearPoint(params, objective, gradient, size, curvature, held)

    def hessian_product(self, point: LinearPoint, v: Float[Array, "n e"]) -> Float[Array, "n e"]:
        """The Hessian at a point times v; one pass over the data."""
        (n, e), held = v.shape, point.probabilities

        def add(total, block: Data, start):
            if held is None:
                # Logits and their displacements in one product, for one reading of the inputs.
                logits = block.logits(jnp.concatenate([point.params, v]))
                p, u = jax.nn.softmax(logits[:n], axis=0), logits[n:]
            else:
                size = block.labels.size
                p = held if size == held.shape[1] else jax.lax.dynamic_slice_in_dim(held, start, size, axis=1)
                u = block.logits(v)
            return total + block.pull_back(p * (u - jnp.sum(p * u, axis=0, keepdims=True)), e)

        labels = 2 * n if held is None else n
        return centred(fold(self.data, labels, add, jnp.zeros_like(v))) + self.l2[None, :] * v

    def hessian_diagonal(self, params: Float[Array, "n e"]) -> Float[Array, "n e"]:
        """The diagonal of the Hessian."""
        n, e = params.shape

        def add(total, block: Data, _):
            p = jax.nn.softmax(block.logits(params), axis=0)
            return total + dataclasses.replace(block, design=block.design.squared()).pull_back(p * (1 - p), e)

        return fold(self.data, n, add, jnp.zeros_like(params)) + self.l2[None, :]

    def hessian(self, params: Float[Array, "n e"]) -> Float[Array, "k k"]:
        """The Hessian in coordinates Z (m, e), m = n - 1, of W = Q Z, whose columns span what sums to 0 over labels."""
        e = params.shape[1]
        matrix = hessian_of_loss(self.data, params, lambda block: extended(block.design, e), e)
        return matrix + jnp.diag(jnp.tile(self.l2, len(params) - 1))

    def line(self, point: LinearPoint, direction: Float[Array, "n e"]) -> Line:
        """The line along W - eta s from a point."""
        slope, penalty = jnp.sum(point.gradient * direction), jnp.sum(self.l2[None, :] * direction**2)
        return line_along(self.data, point.params, direction, slope, penalty)


def line_along(
    data: Data, params: Float[Array, "n e"], direction: Float[Array, "n e"], a: Float[Array, ""], c: Float[Array, ""]
) -> Line:
    """The line along W - eta s, with a = g's and c = s' l2 s; half a pass over the data, as is every sum of it."""
    rows = BlockRows(data, params, direction)
    b = data.design.shape()[0]
    if b * len(params) <= data.sizes.held:
        return make_line(_SOFTMAX, data.weights, *rows.logits(data), a, c)

    def enter(carry, block, start):
        here = _SOFTMAX.line(block.weights, *rows.logits(block))

        def entered(old, new):
            # Rows of weight 0 in a block may have been entered by the one before.
            kept = jax.lax.dynamic_slice_in_dim(old, start, len(new))
            new = jnp.asarray(jnp.where(block.weights > 0, new, kept))
            return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=0)

        return jax.tree.map(entered, carry, (here.variances(), here.radii()))

    zeros = jnp.zeros(b, params.dtype)
    v, r = fold(data, 2 * len(params), enter, (zeros, zeros))
    return Line(rows=rows, weights=data.weights, v=v, r=r, a=a, c=c)


@record
class BlockRows:
    """The rows of a line, made anew, block by block, whenever they are asked."""

    data: Data
    params: Float[Array, "n e"]
    direction: Float[Array, "n e"]

    def sums(self, function: Callable[[LineRows], Any], zeros: Any) -> Any:
        """The sum over blocks of a function of their rows."""

        def add(total, block, _):
            return jax.tree.map(jnp.add, total, function(_SOFTMAX.line(block.weights, *self.logits(block))))

        return fold(self.data, 2 * len(self.params), add, zeros)

    def logits(self, block: Data) -> tuple[Float[Array, "n b"], Float[Array, "n b"]]:
        """The logits of one block, and their displacement."""
        n = len(self.params)
        both = block.logits(jnp.concatenate([self.params, self.direction]))
        return both[:n], both[n:]

    def remainder(self, eta: Float[Array, ""]) -> Float[Array, ""]:
        return self.sums(lambda rows: rows.remainder(eta), jnp.zeros_like(eta))

    def moments(self, eta: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        return self.sums(lambda rows: rows.moments(eta), (jnp.zeros_like(eta), jnp.zeros_like(eta)))

    def quadratic(self) -> Float[Array, ""]:
        return self.sums(lambda rows: rows.quadratic(), jnp.zeros((), self.params.dtype))


_OfBlock = tuple[Float[Array, ""], Float[Array, "n e"], Float[Array, "n b"]]


def _few_labels(block: Data, params: Float[Array, "n e"]) -> _OfBlock:
    """The loss of a block of rows, its gradient, and the probabilities."""
    n, e = params.shape
    loss, residual, p = _SOFTMAX.loss(block.logits(params), one_hot(block.labels, n, params.dtype), axis=0)
    return trees.weighted_sum(block.weights, loss), block.pull_back(residual, e), p


def _many_labels(block: Data, params: Float[Array, "n e"]) -> _OfBlock:
    """A kernel for many labels: the same in fewer operations on arrays of logits, which take most of the time.

    What was observed has its own terms, one for each example, and sums over the other labels are a product.
    """
    n, e = params.shape
    h = block.logits(params)
    observed = jnp.take_along_axis(h, block.labels[None, :], axis=0)[0]
    largest = jnp.max(h, axis=0)
    own = jnp.exp(observed - largest)
    is_observed = is_label(block.labels, n)
    # Written once: compilers would take the exponentials again for every use.
    others = jax.lax.optimization_barrier(jnp.where(is_observed, 0, jnp.exp(h - largest[None, :])))
    rest = times(jnp.ones((1, n), h.dtype), others)[0]
    total = own + rest
    loss = trees.weighted_sum(block.weights, largest - observed + jnp.log(total))
    scaled = dataclasses.replace(block, weights=jnp.where(block.weights == 0, 0, block.weights / total))
    p: Array = jnp.where(is_observed, own[None, :], others)  # pyright: ignore[reportAssignmentType]
    return loss, scaled.pull_back_residuals(others, rest, e), p / total[None, :]


def _label_curvature(
    p: Float[Array, "n b"], weights: Float[Array, " b"], is_matrix: bool, stride: int
) -> Float[Array, "..."]:
    """The sum of w (diag(p) - pp'), or of its diagonal; estimated from every example at a distance of `stride`."""
    some, w = p[:, ::stride], weights[::stride]
    if stride > 1:
        # Of weight 0, they are as good as any others to guess from.
        total = jnp.sum(w)
        w = jnp.sum(weights) * jnp.where(total > 0, w / jnp.where(total > 0, total, 1), 1 / len(w))
    # The probabilities of examples without weight may not be numbers.
    some = jnp.where(w[None, :] == 0, 0, some)
    weighted = w[None, :] * some
    if is_matrix:
        return jnp.diag(jnp.sum(weighted, axis=1)) - times(weighted, some.T)
    return jnp.sum(weighted * (1 - some), axis=1)


def one_hot(labels: Int[Array, " b"], n: int, dtype: Any) -> Float[Array, "n b"]:
    """Columns with a 1 at the label of each example, and 0 elsewhere."""
    return is_label(labels, n).astype(dtype)


def centred(v: Float[Array, "n e"]) -> Float[Array, "n e"]:
    """A matrix without the part that is the same for all labels, on which no probability depends."""
    return v - jnp.mean(v, axis=0, keepdims=True)


def hessian_of_loss(
    data: Data, params: Float[Array, "n e"], coordinates: Callable[[Data], Float[Array, "b r"]], r: int
) -> Float[Array, "k k"]:
    """The Hessian of the loss in coordinates Z (m, r) for which the logits of an example change by Q Z y.

    Args:
      data: the examples.
      params: W.
      coordinates: gives y for the examples of a block.
      r: how many coordinates there are.
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
        labels = block.weighted(times(products.T, p) - mean[first] * mean[second])
        y = coordinates(block)
        # One pair at a time: of all together, rows times pairs times r numbers would be written and read.
        return total + jax.lax.map(lambda weights: times((weights[:, None] * y).T, y), labels)

    total = fold(data, pairs, add, jnp.zeros((pairs, r, r), params.dtype), cached=False)
    return total[places].transpose(0, 2, 1, 3).reshape(m * r, m * r)


def extended(design: Design, inputs: int) -> Float[Array, "b e"]:
    """The inputs as an array, with a 1 at the end of each if there is an intercept."""
    if not isinstance(design, DenseInputs):
        raise TypeError(f"design: expected DenseInputs; got {type(design).__name__}")
    x = design.x
    return x if inputs == x.shape[1] else jnp.concatenate([x, jnp.ones((len(x), 1), x.dtype)], axis=1)


def contrasts(n: int, dtype: Any) -> Float[Array, "n m"]:
    """Orthonormal columns that sum to 0."""
    k, row = np.arange(1, n), np.arange(n)[:, None]
    return jnp.asarray(((row < k) - k * (row == k)) / np.sqrt(k * (k + 1)), dtype)
