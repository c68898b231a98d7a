"""Convolutions inside of loops, as fast as outside of them on CPUs.

XLA has a fast routine for convolutions on CPUs. It takes one order of axes: examples first and channels last, and in
kernels channels last, those of inputs before those of outputs. XLA itself brings other convolutions into that order,
but none inside of a loop or of a conditional (jax-ml/jax#12868): those it computes number by number, 5 to 60 times
slower. A product with a Jacobian has some of them in any model, because derivatives of convolutions are convolutions in
other orders. So here the program of a product is written anew, with all of its convolutions in the order of the routine
and their axes turned before and after. Numbers are the same, up to rounding.

To unroll the loop of CG makes products as fast. But then they go on after convergence, the program takes two to five
times as long to compile, and its memory may grow with the steps (twice as much for 10, with `reduce_window`). Without
convolutions, too, unrolling is no gain: none for a perceptron, and for a transformer 15 % of the time of a step, for
two to three times that of compiling.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array

from qbound import compiler


def fast_in_loops(function: Callable[[Any], Any], point: Any) -> Callable[[Any], Any]:
    """The same function, for trees with the shapes and dtypes of `point`, with convolutions that are fast in loops.

    It is traced here, once. On devices other than CPUs it is the function itself.
    """
    if compiler.default_platform() != "cpu":
        return function
    program, image = jax.make_jaxpr(function, return_shape=True)(point)
    try:
        ordered = in_order(program)
    except Exception:  # JAX promises nothing of how programs are written: then they are slow, and right
        ordered = program
    run, structure = jaxpr_as_fun(ordered), jax.tree.structure(image)
    return lambda v: structure.unflatten(run(*jax.tree.leaves(v)))


def in_order(program: Any) -> Any:
    """A jaxpr, closed or open, with all of its convolutions in order; the same object if they are."""
    jaxpr = getattr(program, "jaxpr", program)
    equations = [new for equation in jaxpr.eqns for new in _in_order(equation)]
    if len(equations) == len(jaxpr.eqns) and all(map(operator.is_, equations, jaxpr.eqns)):
        return program
    ordered = jaxpr.replace(eqns=equations)
    return ordered if jaxpr is program else program.replace(jaxpr=ordered)


def _in_order(equation) -> list:
    """The equations that take the place of one."""
    params = equation.params
    if equation.primitive is not jax.lax.conv_general_dilated_p:
        ordered = {name: _held_in_order(value) for name, value in params.items()}
        is_same = all(ordered[name] is params[name] for name in params)
        return [equation if is_same else equation.replace(params=ordered)]
    # On a mesh with explicit axes, where the sharding of the result may be named, it stays as it is.
    if params["dimension_numbers"] == _orders(params) or params.get("out_sharding") is not None:
        return [equation]
    shapes = [jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype) for operand in equation.invars]
    inner = jax.make_jaxpr(functools.partial(_convolve, params))(*shapes).jaxpr
    outer = dict(zip((*inner.invars, *inner.outvars), (*equation.invars, *equation.outvars), strict=True))
    return [
        new.replace(
            invars=[outer.get(variable, variable) for variable in new.invars],
            outvars=[outer.get(variable, variable) for variable in new.outvars],
        )
        for new in inner.eqns
    ]


def _held_in_order(value):
    """A parameter of an equation: the programs that it is, such as the body of a loop, or holds, are put in order."""
    if hasattr(value, "eqns"):
        return in_order(value)
    if isinstance(value, tuple) and any(hasattr(item, "eqns") for item in value):
        items = tuple(_held_in_order(item) for item in value)
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    return value


def _orders(params) -> jax.lax.ConvDimensionNumbers:
    """Which axes are those of examples and channels, and of channels of outputs and of inputs, in the fast order."""
    axes = len(params["dimension_numbers"].lhs_spec)
    images, kernels = (0, axes - 1, *range(1, axes - 1)), (axes - 1, axes - 2, *range(axes - 2))
    return jax.lax.ConvDimensionNumbers(images, kernels, images)


def _convolve(params: dict[str, Any], images: Array, kernel: Array) -> Array:
    """The convolution with the parameters of its equation."""
    there, here = params["dimension_numbers"], _orders(params)
    result = jax.lax.conv_general_dilated_p.bind(
        jax.lax.transpose(images, _turn(there.lhs_spec, here.lhs_spec)),
        jax.lax.transpose(kernel, _turn(there.rhs_spec, here.rhs_spec)),
        **{**params, "dimension_numbers": here},
    )
    return jax.lax.transpose(result, _turn(here.out_spec, there.out_spec))


def _turn(there, here) -> tuple[int, ...]:
    """The permutation of axes that takes an array from one order to another."""
    return tuple(int(there[k]) for k in np.argsort(here))
