"""What all optimizers are made with: checks of arguments, the guard of parameters, and transforms that precondition."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from qbound import checks, compiler, trees
from qbound.types import Scalar, working_dtype

# What the transforms are told when they are built, and what they are given in every update.


def check_some_damping(l2: Scalar, damping: Scalar) -> None:
    """Raise if both are known to be 0."""
    checks.nonnegative("l2", l2)
    checks.nonnegative("damping", damping)
    if checks.is_number(l2) and checks.is_number(damping) and l2 + damping == 0:
        raise ValueError(
            "damping: expected l2 + damping > 0, because the curvature is singular; got l2=0 and damping=0"
        )


def is_narrow(params: Any) -> bool:
    """Whether any of the parameters is in less than float32."""
    return any(jnp.asarray(leaf).dtype.itemsize < 4 for leaf in jax.tree.leaves(params))


def widen_floats(leaf: Any) -> Any:
    """A float array in float32 at least; anything else as it is."""
    narrow = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(working_dtype(leaf)) if narrow else leaf


def given(name: str, value: Any, expected: str) -> Any:
    """An argument of `update` that must not be None."""
    if value is None:
        raise ValueError(f"{name}: expected {expected}; got None. Call update(grads, state, params, {name}=...)")
    return value


def check_update(params: Any, **given: Any) -> None:
    """What every update begins with: whether parameters were given, and whether its batch is seen as a whole."""
    if params is None:
        raise ValueError("params: expected the parameters; got None. Call update(grads, state, params, inputs=...)")
    if not jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode)):
        raise ValueError(f"params: expected at least one array; got {params!r}")
    compiler.warn_if_wrong()
    checks.outside_shard_map(params=params, **given)


def regularised(updates: Any, params: Any, l2: Scalar) -> tuple[Any, Array]:
    """The gradient of the objective, which has the l2 term, and l2; for parameters in float32 at least."""
    updates, number = checks.matching_tree("updates", updates, params), as_number(checks.nonnegative("l2", l2), params)
    return updates if known_to_be_zero(l2) else trees.add_scaled(updates, number, params), number


def known_to_be_zero(number: Scalar) -> bool:
    """Whether an option is known to be 0, so that what it is a factor of need not be computed."""
    return checks.is_number(number) and bool(number == 0)


def checked_params(params: Any) -> Any:
    """In float32 at least."""

    def is_masked(leaf):
        return isinstance(leaf, optax.MaskedNode)

    leaves = jax.tree.leaves(params, is_leaf=is_masked)
    if any(map(is_masked, leaves)):
        raise ValueError(
            "params: expected every array that logits_fn needs; got parameters that optax.masked or optax.partition "
            "has hidden. To train a part of them, hand over that part only: logits_fn(trainable, inputs), with the "
            "frozen part inside inputs (inputs_axes marks it as shared)"
        )
    return trees.widen(checks.float_tree("params", params))


def parameter_dtype(params: Any) -> Any:
    """In which curvature and solution are computed."""
    return working_dtype(*jax.tree.leaves(params))


def as_number(number: Scalar, params: Any) -> Array:
    """A scalar in that dtype."""
    return jnp.asarray(number, parameter_dtype(params))


def rate_at(rate: Any, count: Int[Array, ""], params: Any) -> Array:
    """A learning rate, a number or a schedule, at a step."""
    return as_number(rate(count) if callable(rate) else rate, params)  # pyright: ignore[reportArgumentType]


def if_due(due: Array, function: Callable, carry: Any) -> Any:
    """`function(carry)` if due, else `carry`: as a loop of at most one turn, which copies nothing if it has none.

    A conditional would copy what it passes on, here two matrices at every step.
    """
    return jax.lax.while_loop(lambda of: of[0], lambda of: (jnp.zeros_like(due), function(of[1])), (due, carry))[1]


# Transforms that solve with a curvature they keep, and that can precondition SPFB with it.


class CurvatureTransform(optax.GradientTransformationExtraArgs):
    """An optax transform from gradients to solutions, with the solve apart from the update.

    Attributes:
      remember: from parameters to what is remembered of batches before the first: the part of the state that matters.
      prepare: from that, parameters, a damping to add, and the keyword arguments of `update`, to what is remembered
        once the batch has entered, and the function from a gradient to its solution: linear, symmetric, positive.
    """

    remember: Callable[[Any], Any]
    prepare: Callable[..., tuple[Any, Callable[[Any], Any]]]


def curvature_transform(init: Callable, update: Callable, remember: Callable, prepare: Callable) -> CurvatureTransform:
    """A transform made of its four functions."""
    transform = CurvatureTransform(init, update)
    transform.remember, transform.prepare = remember, prepare
    return transform


# The last word of a complete optimizer: no update that would make parameters infinite or NaN.
#
# Directions are finite, but what they are multiplied by may not be: a schedule may return NaN, and a learning rate far
# above 2 makes parameters grow until their dtype has no number for them.


def keep_params_finite(
    transform: optax.GradientTransformationExtraArgs, name: str
) -> optax.GradientTransformationExtraArgs:
    """`transform`, a chain, with updates of zero in place of those that would make a parameter infinite or NaN.

    What its first link has skipped is zero as well, whatever the others, such as a weight decay, add to it.

    They are counted where the first link of the chain counts those that it skips: in the fields `name`_nonfinite and
    `name`_nonfinite_total of its record `name`_info. The state is otherwise that of the chain: a schedule goes on.

    Args:
      transform: a chain whose first link has such a record in its state.
      name: "spfb", "kspfb" or "layerwise".
    """

    def update(updates, state, params=None, **extra) -> Any:
        updates, after = transform.update(updates, state, params, **extra)
        first, *rest = cast(tuple, after)
        fine, info = stays_finite(params, updates), getattr(first, f"{name}_info")
        # Of an update that was skipped nothing remains, weight decay neither.
        made = fine & ~getattr(info, f"{name}_nonfinite")
        updates = jax.tree.map(lambda leaf: jnp.where(made, leaf, jnp.zeros_like(leaf)), updates)
        info = _skipped(info, name, ~fine)
        return updates, (first._replace(**{f"{name}_info": info}), *rest)

    return optax.GradientTransformationExtraArgs(transform.init, update)


def stays_finite(params: Any, updates: Any) -> Bool[Array, ""]:
    """Whether `optax.apply_updates` leaves every parameter finite that is so.

    None may grow beyond half of the largest number of its dtype: then that holds however a compiler rounds the sum.
    One that is there already, such as the -inf or the least number that removes a label, may stay where it is.
    """

    def fine(p, u):
        p = jnp.asarray(p)
        dtype = working_dtype(p, u)
        # Compared, not converted: compilers take a conversion there and back for none.
        limit = jnp.asarray(jnp.finfo(p.dtype).max / 2, dtype)
        p, u = p.astype(dtype), u.astype(dtype)
        return jnp.all(jnp.abs(p + u) <= jnp.maximum(jnp.abs(p), limit))

    return jax.tree.reduce(jnp.logical_and, jax.tree.map(fine, params, updates), jnp.asarray(True))


def runs_away(params: Any, s: Any) -> Bool[Array, ""]:
    """Whether parameters are beyond the largest number whose square is finite, and so is the next step.

    With a rate that is too large each step is a multiple of the parameters, and there it can be stopped in time without
    knowing the rate. A gradient of that size alone may be solved for.
    """
    smaller = jnp.minimum(trees.largest(params), trees.largest(s))
    return smaller > float(jnp.finfo(smaller.dtype).max) ** 0.5


def _skipped(info: Any, name: str, skipped: Bool[Array, ""]) -> Any:
    """The record of an update, with what changes if it was skipped after all."""
    flag, total = f"{name}_nonfinite", f"{name}_nonfinite_total"
    # An update that the direction has skipped is counted already, whatever it was multiplied by.
    again = skipped & ~getattr(info, flag)
    changes = {flag: getattr(info, flag) | skipped, total: getattr(info, total) + again.astype(jnp.int32)}
    for field in (f"{name}_predicted_decrease", f"{name}_step_length"):
        if field in info._fields:
            changes[field] = jnp.where(skipped, 0, getattr(info, field))
    return info._replace(**changes)
