"""Whether two functions are the same computation, whatever they are wrapped in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

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
