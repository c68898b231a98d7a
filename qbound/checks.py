"""What callers can get wrong and a trace can see: names, shapes and types.

Every message names the argument, what was expected and what was given. Values are not looked at: a traced array
has none.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound.types import Scalar

__all__ = ["choice", "float_array", "matching", "nonnegative", "positive"]


def choice(name: str, value: object, options: Sequence[str]) -> None:
    """Raise unless `value` is one of `options`."""
    if value not in options:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, options))}; got {value!r}")


def float_array(name: str, array: object, axes: Sequence[str]) -> Float[Array, "..."]:
    """`array` as a float array with one axis of at least one entry for each name in `axes`."""
    array = jnp.asarray(array)
    expected = f"an array of shape ({', '.join(axes)}{',' if len(axes) == 1 else ''})"
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}: expected {expected} of a float dtype; got dtype {array.dtype}")
    if array.ndim != len(axes):
        hint = "; use jax.vmap for batches" if array.ndim > len(axes) else ""
        raise ValueError(f"{name}: expected {expected}; got shape {array.shape}{hint}")
    for axis, size in zip(axes, array.shape, strict=True):
        if size == 0:
            raise ValueError(f"{name}: expected {axis} >= 1 in {expected}; got shape {array.shape}")
    return array


def matching(name: str, array: object, like: Float[Array, "..."]) -> Float[Array, "..."]:
    """`array` in the dtype of `like`, which must have the same shape."""
    array = jnp.asarray(array)
    if array.shape != like.shape:
        raise ValueError(f"{name}: expected an array of shape {like.shape}; got shape {array.shape}")
    return array.astype(like.dtype)


def positive(name: str, number: Scalar) -> Scalar:
    """`number`, which must be above zero: an error for a Python number, NaN for an array that is not."""
    if isinstance(number, (int, float)) and not 0 < number < math.inf:
        raise ValueError(f"{name}: expected a finite number > 0; got {number!r}")
    return number if isinstance(number, (int, float)) else jnp.where(number > 0, number, jnp.nan)


def nonnegative(name: str, number: Scalar) -> Scalar:
    """`number`, which must not be below zero: an error for a Python number, NaN for an array that is."""
    if isinstance(number, (int, float)) and not 0 <= number < math.inf:
        raise ValueError(f"{name}: expected a finite number >= 0; got {number!r}")
    return number if isinstance(number, (int, float)) else jnp.where(number >= 0, number, jnp.nan)
