"""Exclusive prefix and suffix sums of one vector, fast on every backend.

On CPU, `jnp.cumsum` over 100,000 entries costs more than a softmax of them. Here the sums are taken inside short blocks
by a product with a triangular matrix of ones, then over the sums of the blocks in the same way: O(n) work, and
rounding errors that grow with log n instead of n.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

__all__ = ["prefix_sums", "suffix_sums"]

# Lengths of a block, from the best: whole SIMD registers on CPU, and few enough multiplications by zero. The first that
# divides the vector is taken, because filling up the last block copies everything twice; the first of all if none does.
BLOCKS = (32, 16, 20, 8, 24, 40, 28, 12)
# The largest vector summed as one block.
WHOLE = 128


def prefix_sums(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """y_i = sum of x_j over j < i."""
    return _blocked(x, reverse=False)


def suffix_sums(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """y_i = sum of x_j over j > i."""
    return _blocked(x, reverse=True)


def _blocked(x, *, reverse):
    (n,) = x.shape
    if n <= WHOLE:
        return _multiply(x, reverse=reverse)
    block = next((length for length in BLOCKS if n % length == 0), BLOCKS[0])
    rows = jnp.pad(x, (0, -n % block)).reshape(-1, block)
    others = _blocked(rows.sum(axis=1), reverse=reverse)
    return (_multiply(rows, reverse=reverse) + others[:, None]).reshape(-1)[:n]


def _multiply(x, *, reverse):
    """Sums along the last axis by a strictly triangular matrix of ones.

    HIGHEST: the default precision of accelerators would round every summand to bfloat16 or TF32.
    """
    size = x.shape[-1]
    ones = np.ones((size, size), dtype=bool)
    earlier = np.tril(ones, -1) if reverse else np.triu(ones, 1)
    return jnp.matmul(x, jnp.asarray(earlier, x.dtype), precision=jax.lax.Precision.HIGHEST)
