"""Sums of many numbers whose rounding does not grow with how many they are.

XLA is free to add one after the other, and matrix products do: the sum of 30,000 equal numbers in float32 is then off
by a thousand units of rounding. Here it is off by a few, whatever the backend.

Where the leading axis is divided over the devices of an explicit mesh it cannot be cut further, and is summed as XLA
does.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound.solve import HIGHEST, gram

__all__ = ["gram_of_many", "sum_of_many"]

# So many numbers are added one after the other.
BLOCK = 32


def sum_of_many(x: Float[Array, "b ..."]) -> Float[Array, "..."]:
    """The sum over the leading axis: blocks of it, then halves of these, so that errors grow with the logarithm."""
    count = x.shape[0]
    if _is_divided(x):
        return jnp.sum(x, axis=0)
    if count > BLOCK:
        whole = count // BLOCK * BLOCK
        blocks = jnp.sum(x[:whole].reshape(-1, BLOCK, *x.shape[1:]), axis=1)
        x = blocks if whole == count else jnp.concatenate([blocks, jnp.sum(x[whole:], axis=0, keepdims=True)])
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        # Explicit additions: two reductions in a row would be made one again by the compiler.
        pairs = x[:half] + x[half : 2 * half]
        x = pairs if x.shape[0] == 2 * half else jnp.concatenate([pairs, x[-1:]])
    return jnp.sum(x, axis=0)


def gram_of_many(rows: Float[Array, "r d"]) -> Float[Array, "d d"]:
    """R'R, for more rows than columns: the sum of those of parts, which are not larger than R together."""
    count, d = rows.shape
    part = max(BLOCK, d)
    whole = count // part * part
    if whole <= part or _is_divided(rows):
        return gram(rows)
    parts = rows[:whole].reshape(-1, part, d)
    products = jnp.einsum("prd,pre->pde", parts, parts, precision=HIGHEST)
    return sum_of_many(products) + gram(rows[whole:])


def _is_divided(x: Array) -> bool:
    """Whether the leading axis lies on several devices of an explicit mesh."""
    return any(axis is not None for axis in jax.typeof(x).sharding.spec[:1])
