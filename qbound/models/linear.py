"""From a model and a batch to logits and their linear map.

A model is a function `logits_fn(params, inputs)` from parameters and a batch of inputs to logits (b, n) or (..., n). At
given parameters and inputs it becomes a `BatchMap`: the logits, one row for each example (and position), are linear in
a displacement of the parameters. For any function that is its Jacobian, by `jvp` and `vjp`. For `linear_logits` it is
known to be a Kronecker product, which direct solvers make use of: the structure is declared by choosing that function
and never guessed.
"""

from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from qbound.linalg.dense import HIGHEST, times
from qbound.models.base import BatchMap, FunctionPair, JacobianMap, _rows, linearised
from qbound.records import record
from qbound.types import working_dtype

__all__ = ["KroneckerMap", "is_linear_logits", "linear_logits", "linearise", "same_program"]


# Up to so many labels, products of residuals and inputs are narrow.
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
class KroneckerMap(BatchMap):
    """J v = X V + 1 c' for parameters V (d, n), and c (n,) where there is a bias: `linear_logits`."""

    map: FunctionPair
    inputs: Float[Array, "b d"]

    def rows(self, factors):
        def row(f, x):
            return ravel_pytree(self._tree(x[:, None] * f[None, :], f))[0]

        by_example = jax.vmap(jax.vmap(row, in_axes=(0, None)))(factors, self.inputs)
        return by_example.reshape(-1, by_example.shape[-1])

    def row_products(self, factors):
        b, r, n = factors.shape
        flat = factors.reshape(b * r, n)
        inputs = jnp.matmul(self.inputs, self.inputs.T, precision=HIGHEST) + self._has_bias()
        products = jnp.matmul(flat, flat.T, precision=HIGHEST).reshape(b, r, b, r)
        return (products * inputs[:, None, :, None]).reshape(b * r, b * r)

    def sandwich(self, factors):
        # sum_j M_j (x) x_j x_j', a row of labels at a time, so that the largest array but the result is (b, n, d).
        x = self.extended_inputs()
        labels = jnp.einsum("jrk,jrl->kjl", factors, factors, precision=HIGHEST)
        blocks = jax.lax.map(
            lambda m: jnp.einsum("jd,jel->del", x, x[:, :, None] * m[:, None, :], precision=HIGHEST), labels
        )
        matrix = jnp.moveaxis(blocks, 0, 1)
        p = matrix.shape[0] * matrix.shape[1]
        matrix = matrix.reshape(p, p)
        place = self.places()
        return matrix if place is None else matrix[place][:, place]

    def extended_inputs(self) -> Float[Array, "b e"]:
        """The inputs, with a 1 at the end of each if there is a bias: then the logits are X W for one matrix W."""
        x = self.inputs
        return jnp.concatenate([x, jnp.ones((x.shape[0], 1), x.dtype)], axis=1) if self._has_bias() else x

    def places(self) -> Int[Array, " p"] | None:
        """For each parameter, in the order of the leaves of the tree, its place in that matrix; None if the same."""
        if not self._has_bias():
            return None
        d, n = self.inputs.shape[1] + 1, self.shape()[1]
        place = jnp.arange(d * n).reshape(d, n)
        return ravel_pytree(self._tree(place[:-1], place[-1]))[0]

    def solve_one(self, curvature: Any, g: Any, damping: Array) -> Any:
        """(M (x) xx' + c I)^-1 g for a batch of one with label curvature M, in O(n + n d).

        With G the gradient as (d, n) and x the input, with a 1 at its end if there is a bias: along x the system is
        (|x|^2 M + c I) y = G'x, across it G is divided by c. What rounding leaves of G along x must not be divided by
        c, so it is taken out twice.
        """
        x = self.inputs[0]
        xx = jnp.sum(x * x) + self._has_bias()
        xx = jnp.where(xx == 0, 1, xx)  # x = 0: nothing but the damping is left, and G'x = 0

        def along(g):
            weights, bias = _weights_and_bias(g)
            return (times(x, weights) + (0 if bias is None else bias)) / xx

        def outer(u):
            return self._tree(x[:, None] * u[None, :], u)

        def across(g):
            return jax.tree.map(jnp.subtract, g, outer(along(g)))

        y = curvature.solve(along(g), damping / xx)
        return jax.tree.map(lambda a, b: a / damping + b, across(across(g)), outer(y / xx))

    def _has_bias(self) -> int:
        return len(jax.tree.leaves(self.domain())) - 1

    def _tree(self, weights, bias):
        return jax.tree.map(lambda leaf: weights if len(leaf.shape) == 2 else bias, self.domain())


def linearise(logits_fn: Callable, params: Any, inputs: Any) -> tuple[Float[Array, "b n"], BatchMap]:
    """The logits of a model, as rows, and the linear map of their displacements, in the dtype of `params`.

    Those must be float32 at least.
    """
    dtype = working_dtype(*jax.tree.leaves(params))
    logits, pair = linearised(lambda params: _rows(logits_fn(params, inputs)), params)
    logits = logits.astype(dtype)
    if is_linear_logits(logits_fn, params, inputs):
        inputs = jnp.asarray(inputs)
        return logits, KroneckerMap(pair, inputs.reshape(-1, inputs.shape[-1]).astype(dtype))
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


# Whether two functions are the same computation, whatever they are wrapped in.


# Primitives that do nothing but run the program they hold.
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")


def same_program(f: Callable, g: Callable, *arguments: Any) -> bool:
    """Whether both trace to the same operations on the same values, with `jax.jit` and `jax.checkpoint` seen through.

    Arguments are trees of arrays, traced ones too, or of `jax.ShapeDtypeStruct`. True is certain: an operation that
    holds a program of its own, such as a loop, and a constant array, count as different.
    """
    return _program(f, arguments) == _program(g, arguments)


def _program(function, arguments) -> tuple[list, list, Any]:
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    operations: list = []
    inputs = [("argument", k) for k in range(len(closed.jaxpr.invars))]
    outputs = _run(closed.jaxpr, closed.consts, inputs, operations)
    return operations, outputs, jax.tree.structure(result)


def _run(jaxpr, constants, inputs, operations) -> list:
    """The names of the outputs; the operations that make them are appended to `operations`."""
    names = dict(zip(jaxpr.constvars, map(_constant, constants), strict=True))
    names |= dict(zip(jaxpr.invars, inputs, strict=True))

    def name(value):
        return _constant(value.val) if isinstance(value, Literal) else names[value]

    for equation in jaxpr.eqns:
        inputs = [name(value) for value in equation.invars]
        if equation.primitive.name in _CALLS:
            inner = equation.params["jaxpr"]
            # A closed one holds its constants; an open one has none.
            outputs = _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs, operations)
        else:
            outputs = [("result", len(operations), k) for k in range(len(equation.outvars))]
            types = [str(variable.aval) for variable in equation.outvars]
            operations.append((equation.primitive, equation.params, inputs, types))
        names.update(zip(equation.outvars, outputs, strict=True))
    return [name(value) for value in jaxpr.outvars]


def _constant(value) -> tuple:
    """A name: the value if it is a number that is known, else one that nothing else has. A random key is no number."""
    is_key = jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)
    if np.ndim(value) == 0 and not is_key and not isinstance(value, Tracer):
        return "number", str(np.asarray(value).dtype), np.asarray(value).tobytes()
    return "array", object()
