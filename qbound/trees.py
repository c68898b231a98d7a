"""Vectors that are trees of arrays: the few operations that solvers need.

Sums are taken leaf by leaf and in the widest float dtype of the tree; multiples keep the dtype of each leaf. All are
sums of elementwise products, so that leaves may be sharded in any way.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qbound.types import working_dtype


def dot(a: Any, b: Any) -> Float[Array, ""]:
    """The product a.b."""
    dtype = working_dtype(*jax.tree.leaves(a), *jax.tree.leaves(b))
    products = jax.tree.map(lambda a, b: jnp.sum(a.astype(dtype) * b.astype(dtype)), a, b)
    return jax.tree.reduce(jnp.add, products)


def add(a: Any, b: Any) -> Any:
    """The sum a + b."""
    return jax.tree.map(jnp.add, a, b)


def add_scaled(a: Any, c: Float[Array, ""], b: Any) -> Any:
    """The sum a + c b."""
    return jax.tree.map(lambda a, b: a + c.astype(b.dtype) * b, a, b)


def scale(c: Float[Array, ""], a: Any) -> Any:
    """The multiple c a."""
    return jax.tree.map(lambda a: c.astype(a.dtype) * a, a)


def zeros_like(a: Any) -> Any:
    """The zero vector, placed on devices as `a` is."""
    return jax.tree.map(jnp.zeros_like, a)


def widen(a: Any) -> Any:
    """Every leaf in float32 at least."""
    return jax.tree.map(lambda leaf: leaf.astype(working_dtype(leaf)), a)


def cast_like(a: Any, like: Any) -> Any:
    """Every leaf in the dtype of the same leaf of `like`."""
    return jax.tree.map(lambda a, like: a.astype(like.dtype), a, like)


def largest(a: Any) -> Float[Array, ""]:
    """The largest absolute value of all entries; NaN if there is one."""
    dtype = working_dtype(*jax.tree.leaves(a))
    leaves = jax.tree.map(lambda leaf: jnp.max(jnp.abs(leaf), initial=0).astype(dtype), a)
    return jax.tree.reduce(jnp.maximum, leaves)


def norm(a: Any) -> Float[Array, ""]:
    """The Euclidean length, also where squares of entries would overflow or vanish."""
    unit = largest(a)
    unit = jnp.where((unit > 0) & jnp.isfinite(unit), unit, 1)
    scaled = scale(1 / unit, a)
    return unit * jnp.sqrt(dot(scaled, scaled))


def all_finite(a: Any) -> Bool[Array, ""]:
    """Whether there is no NaN and no infinity."""
    finite = jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)), a)
    return jax.tree.reduce(jnp.logical_and, finite, jnp.asarray(True))


def shapes(a: Any) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """The structure, and the shape and dtype of each leaf: hashable, for the static fields of records."""
    leaves, structure = jax.tree.flatten(a)
    return structure, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)


def size(a: Any) -> int:
    """The number of entries."""
    return sum(leaf.size for leaf in jax.tree.leaves(a))


def weighted(weights: Float[Array, " b"], a: Any) -> Any:
    """w_j a_j along the first axis of every leaf. A weight of 0 removes its term, even one that is infinite."""

    def leaf(x: Array) -> Array:
        w = weights.reshape(-1, *(1,) * (x.ndim - 1)).astype(x.dtype)
        return jnp.asarray(jnp.where(w == 0, 0, w * x))

    return jax.tree.map(leaf, a)


def weighted_sum(weights: Float[Array, " b"], values: Float[Array, " b"]) -> Float[Array, ""]:
    """sum_j w_j values_j, without the terms of weight 0."""
    return jnp.sum(weighted(weights, values))
