"""Types shared by every module, and the letters that name array axes.

Axes in annotations, the same throughout the package:

  b  examples of a batch
  n  labels
  d  features of one label, or parameters laid out as one vector
  r  rows of a factor

A function takes one example; `jax.vmap` makes batches.
"""

import math
from typing import Any, Literal

import chex
import jax.numpy as jnp
from jaxtyping import ArrayLike, Float, PyTree

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


def largest_exponent(dtype: Any) -> float:
    """The exponent beyond which a label whose p is too small for its dtype, and missing from sums, could matter."""
    return -0.6 * math.log(jnp.finfo(dtype).tiny)
