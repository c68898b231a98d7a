"""Types shared by every module, and the letters that name array axes.

Axes in annotations, the same throughout the package:

  b  examples of a batch
  n  labels
  d  features of one label, or parameters laid out as one vector
  r  rows of a factor

A function takes one example; `jax.vmap` makes batches.
"""

from typing import Any, Literal

import chex
import jax.numpy as jnp
from jaxtyping import ArrayLike, Float, PyTree

__all__ = ["Majorizes", "Order", "Parameters", "Scalar", "working_dtype"]

# In which order the labels enter the bound; see `qbound.log_partition_bound`.
Order = Literal["descending", "max_first", "given"]

# Where a quadratic lies above the function it stands for.
Majorizes = Literal["globally", "within radius", "no"]

# What a bound is a function of: one array, or any tree of arrays.
Parameters = PyTree[Float[ArrayLike, "..."]]

# A Python number or an array without axes.
Scalar = chex.Numeric


def working_dtype(*arrays: Any) -> jnp.dtype:
    """The widest float dtype among `arrays`, and float32 at least: narrower ones hold logits, but not their sums."""
    return max((jnp.dtype(jnp.float32), *(array.dtype for array in arrays)), key=lambda dtype: jnp.finfo(dtype).bits)
