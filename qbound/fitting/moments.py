r"""Second moments of the inputs of a stream: a matrix where inputs are few, else a sketch and all squares.

The sketch is Nyström's, of a moving basis Q [FTU23]:

.. math:: B \approx K K^\top + \operatorname{diag}(d), \quad K K^\top = Y (Q^\top Y)^{-1} Y^\top, \quad Y = B Q

It is below B, and d is what it leaves of the diagonal. The squares are those of all rows, so that a column that comes
late has its curvature at once; the sketch is of some rows of each batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound.curvature.kronecker import InputFactor, factorised_inputs
from qbound.linalg.dense import times
from qbound.optimizers.kronecker_factors import input_scales

# How many directions a sketch has, from how many rows of each batch it is, and how often the first turns its basis.
_RANK, _ROWS, _TURNS = 32, 256, 2
# A sketch of some rows may be above the squares of all: this part of them is left.
_LEAST = 1e-3
# Columns are measured against a typical one, which has this part at least of what a typical square belongs to.
_TYPICAL = 0.01


class Sketch(NamedTuple):
    """Sums over what was seen.

    Attributes:
      squares: of w x^2.
      basis: Q.
      image: Y, the sum of w x x' Q.
    """

    squares: Float[Array, " e"]
    basis: Float[Array, "e r"]
    image: Float[Array, "e r"]


def no_sketch(inputs: int) -> Sketch:
    """The sketch before any example: its basis, 0, is made from the first batch."""
    zeros = jnp.zeros((inputs, min(_RANK, inputs)), jnp.float32)
    return Sketch(jnp.zeros(inputs, jnp.float32), zeros, zeros)


def with_rows(sketch: Sketch, x: Float[Array, "b e"], weights: Float[Array, " b"]) -> Sketch:
    """The sketch with a batch of rows in random order."""
    squares = sketch.squares + jnp.sum(weights[:, None] * x**2, axis=0)
    some, w = x[:_ROWS], weights[:_ROWS]
    total = jnp.sum(w)
    w = jnp.where(total > 0, jnp.sum(weights) / jnp.where(total > 0, total, 1), 0) * w

    def product(basis):
        return times(some.T, w[:, None] * times(some, basis))

    def first():
        scales = _scales(squares)
        basis = jax.random.normal(jax.random.key(0), sketch.basis.shape, jnp.float32)
        for _ in range(_TURNS):
            basis = jnp.linalg.qr(scales[:, None] * product(scales[:, None] * basis))[0]
        return scales[:, None] * basis

    is_first = ~jnp.any(sketch.basis != 0)
    basis = jax.lax.cond(is_first, first, lambda: sketch.basis)
    return Sketch(squares, basis, sketch.image + product(basis))


def turned(sketch: Sketch) -> Sketch:
    """The sketch with a basis of the directions found, whose moments it knows."""
    root = _root(sketch)
    scales = _scales(sketch.squares)
    basis = scales[:, None] * jnp.linalg.qr(scales[:, None] * root)[0]
    sound = jnp.all(jnp.isfinite(basis)) & jnp.any(root != 0)
    image = times(root, times(root.T, basis))
    return Sketch(sketch.squares, jnp.where(sound, basis, sketch.basis), jnp.where(sound, image, sketch.image))


def sketch_factor(sketch: Sketch, weight: Float[Array, ""]) -> InputFactor:
    """The factor of the mean moments, in scales in which what the sketch leaves is about 1 in every column.

    A column that is 0 almost everywhere has 1 too, where its own square would let it take steps of any length.
    """
    root = _root(sketch) * jax.lax.rsqrt(weight)
    squares = sketch.squares / weight
    left = jnp.maximum(squares - jnp.sum(root**2, axis=1), _LEAST * squares)
    scales = _scales(left)
    scaled = scales[:, None] * root
    values, vectors = jnp.linalg.eigh(times(scaled.T, scaled))
    # As many digits as eigenvalues of a product have.
    known = values > len(values) * jnp.finfo(values.dtype).eps * jnp.max(values)
    positive: Array = jnp.where(known, values, 1)  # pyright: ignore[reportAssignmentType]
    vectors = times(scaled, vectors) * jnp.where(known, jax.lax.rsqrt(positive), 0)[None, :]
    # Those that are not known have vectors of 0, and count as what is left.
    return InputFactor(scales, jnp.where(known, 1 + positive, 1), vectors, jnp.ones((), positive.dtype))


def matrix_factor(moments: Float[Array, "e e"]) -> InputFactor:
    """The factor of mean moments, in the scales of KSPFB."""
    scales = input_scales(jnp.diag(moments))
    return factorised_inputs(scales[:, None] * moments * scales[None, :], scales, None)


def _scales(squares: Float[Array, " e"]) -> Float[Array, " e"]:
    """The scales 1/sqrt(m_i + typical m).

    The typical one is the median, unless most columns are almost empty: it is no less than a part of the mean in which
    every column counts as much as it has. Of all columns alike, a mean would be tiny, and steps along the empty ones
    far too long.
    """
    largest = jnp.max(squares)
    m = squares / jnp.where(largest > 0, largest, 1)
    total = jnp.sum(m)
    mean = jnp.sum(m**2) / jnp.where(total > 0, total, 1)
    typical = jnp.minimum(mean, jnp.maximum(jnp.median(m), _TYPICAL * mean))
    return jnp.where(largest > 0, jax.lax.rsqrt(jnp.where(largest > 0, squares + typical * largest, 1)), 1)


def _root(sketch: Sketch) -> Float[Array, "e r"]:
    """The factor K of what the sketch knows."""
    q, y = sketch.basis, sketch.image
    products, grams = times(q.T, y), times(q.T, q)
    # As much as rounding may have taken: what is factorised is then positive definite.
    trace, gram = jnp.trace(products), jnp.trace(grams)
    known = (trace > 0) & (gram > 0)
    shift = jnp.sqrt(len(q)) * jnp.finfo(q.dtype).eps * trace / jnp.where(known, gram, 1)
    products = (products + products.T) / 2 + shift * grams
    products = jnp.where(known, products, jnp.eye(len(products), dtype=q.dtype))
    lower = jnp.linalg.cholesky(products)
    root = jax.scipy.linalg.solve_triangular(lower, (y + shift * q).T, lower=True).T
    # Without a sketch all is left to the squares.
    return jnp.where(known & jnp.all(jnp.isfinite(root)), root, 0)
