"""From a model and a batch to logits and their linear map.

A model is a function `logits_fn(params, inputs)` from parameters and a batch of inputs to logits (b, n) or (..., n). At
given parameters and inputs it becomes a `BatchMap`: the logits, one row for each example (and position), are linear in
a displacement of the parameters. For any function that is its Jacobian, by `jvp` and `vjp`. For `linear_logits` it is
known to be a Kronecker product, which direct solvers make use of. A model is `linear_logits` if it computes the same
program, whatever it is wrapped in.
"""

from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Shaped

from qbound import checks, trees
from qbound.linalg.dense import HIGHEST, times
from qbound.models.base import BatchMap, FunctionPair, JacobianMap, linearised
from qbound.models.same_program import same_program
from qbound.records import record, static
from qbound.types import working_dtype

# Up to this many labels, products of residuals and inputs are narrow.
_FEW_LABELS = 128


def linear_logits(params: Any, inputs: ArrayLike) -> Float[Array, "*b n"]:
    """Multinomial logistic regression, `inputs @ weights + bias`, with its structure known to the solvers.

    Any function of parameters and inputs can be a model. With this one, `qbound.spfb` solves a batch of one in O(n d),
    and its direct solvers never form the Jacobian. `jax.jit`, a lambda or a partial around it change nothing of that.

    Args:
      params: weights (d, n), or a tree of weights (d, n) and a bias (n,): a pair, a dict.
      inputs: (b, d), or (..., d) for sequences.

    Returns:
      Logits (..., n), in float32 at least.

    Example:
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> params = {"weights": jnp.zeros((4, 3)), "bias": jnp.array([0.0, 1.0, 2.0])}
      >>> print(qbound.linear_logits(params, jnp.ones((1, 4))))
      [[0. 1. 2.]]
    """
    if not hasattr(inputs, "shape"):
        raise TypeError(f"inputs: expected one array of shape (b, d) or (..., d); got {type(inputs).__name__}")
    inputs = jnp.asarray(inputs)
    if jnp.iscomplexobj(inputs):
        raise TypeError(f"inputs: expected real numbers; got dtype {inputs.dtype}")
    weights, bias = _weights_and_bias(params)
    if inputs.ndim < 2 or inputs.shape[-1] != weights.shape[0]:
        raise ValueError(
            f"inputs: expected shape (..., {weights.shape[0]}) for weights of shape {weights.shape}, with an axis of "
            f"examples; got shape {inputs.shape}"
        )
    dtype = working_dtype(weights, *([inputs] if jnp.issubdtype(inputs.dtype, jnp.floating) else []))
    weights = weights.astype(dtype)
    is_narrow = weights.shape[1] <= min(weights.shape[0], _FEW_LABELS)
    logits = inputs.astype(dtype) @ (_labels_first(weights) if is_narrow else weights)
    return logits if bias is None else logits + bias.astype(dtype).reshape((1,) * (logits.ndim - 1) + (-1,))


@jax.custom_jvp
def _labels_first(weights: Float[Array, "d n"]) -> Float[Array, "d n"]:
    """The same weights, such that gradients by them are computed as U'X, (n, d), and then turned.

    On CPU that takes half the time of X'U, or less, where labels are few. The barrier stands between the product and
    the turning, which compilers would make one.
    """
    return weights


@_labels_first.defjvp
def _labels_first_jvp(primals, tangents):
    (weights,), (tangent,) = primals, tangents
    return weights, jax.lax.optimization_barrier(tangent.T).T


def _weights_and_bias(params):
    """The leaves with two axes and with one; there must be one of the first and at most one of the second."""
    leaves = jax.tree.leaves(params)
    weights = [leaf for leaf in leaves if len(leaf.shape) == 2]
    bias = [leaf for leaf in leaves if len(leaf.shape) == 1]
    if len(weights) != 1 or len(bias) > 1 or len(leaves) != len(weights) + len(bias):
        raise ValueError(
            "params: expected weights of shape (d, n), and at most one bias of shape (n,); got leaves of shapes "
            f"{[leaf.shape for leaf in leaves]}"
        )
    if bias and bias[0].shape[0] != weights[0].shape[1]:
        raise ValueError(
            f"params: expected a bias of shape ({weights[0].shape[1]},) for weights of shape {weights[0].shape}; "
            f"got {bias[0].shape}"
        )
    return weights[0], bias[0] if bias else None


@final
@record
class MatrixLayout:
    """How a tree of weights (d, n) or (n, d), and at most one bias (n,), becomes one matrix W (n, e), labels by inputs.

    The bias is the last column: then e = d + 1, and inputs have a 1 at their end.
    """

    structure: Any = static()
    shapes: tuple = static()  # of the leaves, with their dtypes
    output_axis: int = static(default=1)  # of the weights, that of labels

    def domain(self) -> Any:
        """The tree, as shapes and dtypes."""
        return self.structure.unflatten(self.shapes)

    def has_bias(self) -> bool:
        """Whether there is a bias."""
        return any(len(leaf.shape) == 1 for leaf in self.shapes)

    def shape(self) -> tuple[int, int]:
        """(n, e)."""
        weights = next(leaf.shape for leaf in self.shapes if len(leaf.shape) == 2)
        n, d = weights if self.output_axis == 0 else weights[::-1]
        return n, d + self.has_bias()

    def with_ones(self, inputs: Float[Array, "b d"]) -> Float[Array, "b e"]:
        """Inputs with a 1 at the end of each if there is a bias: then the logits are W x."""
        if not self.has_bias():
            return inputs
        return jnp.concatenate([inputs, jnp.ones((len(inputs), 1), inputs.dtype)], axis=1)

    def to_matrix(self, tree: Any) -> Float[Array, "n e"]:
        """The matrix of a tree."""
        leaves = jax.tree.leaves(tree)
        weights = next(leaf for leaf in leaves if leaf.ndim == 2)
        matrix = weights if self.output_axis == 0 else weights.T
        bias = [leaf[:, None] for leaf in leaves if leaf.ndim == 1]
        return jnp.concatenate([matrix, *bias], axis=1) if bias else matrix

    def to_tree(self, matrix: Shaped[Array, "n e"]) -> Any:
        """The inverse of `to_matrix`, in the dtypes of the leaves."""
        weights = matrix[:, :-1] if self.has_bias() else matrix
        weights = weights if self.output_axis == 0 else weights.T
        parts = (weights if len(leaf.shape) == 2 else matrix[:, -1] for leaf in self.shapes)
        return self.structure.unflatten([x.astype(leaf.dtype) for x, leaf in zip(parts, self.shapes, strict=True)])

    def to_vectors(self, matrices: Float[Array, "k n e"]) -> Float[Array, "k p"]:
        """Each matrix as its tree, laid out as one vector."""
        return jax.vmap(lambda matrix: ravel_pytree(self.to_tree(matrix))[0])(matrices)

    def to_matrices(self, vectors: Float[Array, "k p"]) -> Float[Array, "k n e"]:
        """The inverse of `to_vectors`."""
        _, unravel = ravel_pytree(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.domain()))
        return jax.vmap(lambda vector: self.to_matrix(unravel(vector)))(vectors)


def layout_of_linear(params: Any) -> MatrixLayout:
    """That of the parameters of `linear_logits`."""
    _weights_and_bias(params)
    return MatrixLayout(*trees.shapes(params))


@final
@record
class KroneckerMap(BatchMap):
    """The map J v = X V' for parameters that are one matrix V (n, e): `linear_logits`."""

    map: FunctionPair
    inputs: Float[Array, "b e"]  # with a 1 at the end of each if there is a bias
    layout: MatrixLayout

    def rows(self, factors):
        by_example = factors[:, :, :, None] * self.inputs[:, None, None, :]
        return self.layout.to_vectors(by_example.reshape(-1, *by_example.shape[2:]))

    def row_products(self, factors):
        b, r, n = factors.shape
        flat = factors.reshape(b * r, n)
        inputs = times(self.inputs, self.inputs.T)
        products = times(flat, flat.T).reshape(b, r, b, r)
        return (products * inputs[:, None, :, None]).reshape(b * r, b * r)

    def sandwich(self, factors):
        # sum_j M_j (x) x_j x_j', a row of labels at a time, so that the largest array but the result is (b, n, e).
        x = self.inputs
        labels = jnp.einsum("jrk,jrl->kjl", factors, factors, precision=HIGHEST)
        blocks = jax.lax.map(
            lambda m: jnp.einsum("jd,jel->del", x, x[:, :, None] * m[:, None, :], precision=HIGHEST), labels
        )
        n, e = self.layout.shape()
        matrix = jnp.moveaxis(blocks, 0, 1).reshape(n * e, n * e)
        if not self.layout.has_bias():
            return matrix
        place = ravel_pytree(self.layout.to_tree(jnp.arange(e * n).reshape(e, n).T))[0].astype(jnp.int32)
        return matrix[place][:, place]

    def solve_one(self, curvature: Any, g: Any, damping: Array) -> Any:
        """(M (x) xx' + c I)^-1 g for a batch of one with label curvature M, in O(n + n d).

        With G the gradient as a matrix and x the input: along x the system is (|x|^2 M + c I) y = G x, across it G is
        divided by c. What rounding leaves of G along x must not be divided by c, so it is taken out twice.
        """
        x = self.inputs[0]
        xx = jnp.sum(x * x)
        xx = jnp.where(xx == 0, 1, xx)  # x = 0: nothing but the damping is left, and G x = 0

        def outer(u):
            return x[:, None] * u[None, :]

        # Inputs by labels, as the leaf of weights lies in memory.
        g = self.layout.to_matrix(g).T
        y = curvature.solve(times(x, g) / xx, damping / xx)
        for _ in range(2):
            g = g - outer(times(x, g) / xx)
        return self.layout.to_tree((g / damping + outer(y / xx)).T)


def checked_logits(logits: Any) -> Any:
    """What a model returned, or its shape and dtype, unless it cannot be logits."""
    shape, dtype = getattr(logits, "shape", None), getattr(logits, "dtype", None)
    if shape is None or dtype is None or len(shape) < 2 or 0 in shape or not jnp.issubdtype(dtype, jnp.floating):
        got = f"{dtype} of shape {shape}" if shape is not None else f"{logits!r}"
        raise ValueError(
            "logits_fn: expected it to return float logits of shape (examples, labels) or (..., labels), with at least "
            f"one example; got {got}"
        )
    if shape[-1] == 1:
        raise ValueError(
            f"logits_fn: expected logits of at least two labels; got shape {shape}. The softmax of one label is always "
            "1: for a binary model with one logit h, return the logits (0, h)"
        )
    # Of what a model closes over nothing else is known.
    checks.outside_shard_map(logits_fn=logits)
    return logits


def logits_shape(logits_fn: Callable, params: Any, inputs: Any) -> tuple[int, ...]:
    """The shape (..., n) of the logits of a batch, without computing them."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(inputs)):
        return checked_logits(jax.eval_shape(logits_fn, params, inputs)).shape
    # Closed over, so that a flag among the inputs stays a Python value.
    return checked_logits(jax.eval_shape(lambda params: logits_fn(params, inputs), params)).shape


def _rows(logits):
    return checked_logits(logits).reshape(-1, logits.shape[-1])


def logits_in_rows(logits_fn: Callable, params: Any, inputs: Any) -> Float[Array, "b n"]:
    """The logits of a model, as rows, in the dtype of `params`, as `linearise` returns them."""
    return _rows(logits_fn(params, inputs)).astype(working_dtype(*jax.tree.leaves(params)))


def linearise(logits_fn: Callable, params: Any, inputs: Any) -> tuple[Float[Array, "b n"], BatchMap]:
    """The logits of a model, as rows, and the linear map of their displacements, in the dtype of `params`.

    Those must be float32 at least.
    """
    dtype = working_dtype(*jax.tree.leaves(params))
    logits, pair = linearised(lambda params: _rows(logits_fn(params, inputs)), params)
    logits = logits.astype(dtype)
    if is_linear_logits(logits_fn, params, inputs):
        inputs, layout = jnp.asarray(inputs), layout_of_linear(params)
        return logits, KroneckerMap(pair, layout.with_ones(inputs.reshape(-1, inputs.shape[-1]).astype(dtype)), layout)
    return logits, JacobianMap(pair)


def is_linear_logits(logits_fn: Callable, params: Any, inputs: Any) -> bool:
    """Whether a model is `linear_logits`, by that name or any other: with `jax.jit`, a lambda or a partial around it.

    What counts is the program for the logits and their derivatives. It costs a trace of the model, and that only for
    parameters and inputs that `linear_logits` takes.
    """
    if logits_fn is linear_logits:
        return True
    try:
        jax.eval_shape(linear_logits, params, inputs)
    except (TypeError, ValueError):
        return False

    def with_derivative(function):
        return lambda params, v, inputs: jax.jvp(lambda params: function(params, inputs), (params,), (v,))

    return same_program(with_derivative(logits_fn), with_derivative(linear_logits), params, params, inputs)
