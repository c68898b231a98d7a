"""The two factors of KSPFB: running averages of a label curvature and of second moments of inputs.

For logits W x the curvature of a batch is mean_j M_j (x) x_j x_j'. In its place stands A (x) B with A = mean_j M_j and
B = mean_j x_j x_j', each averaged over batches: as if M_j and x_j were independent. That is no upper bound of the
curvature. With Böhning's A = 1/2 (I - 11'/n), the same for all examples, it is one: A (x) B = mean_j A (x) x_j x_j'.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qbound import trees
from qbound.curvature.kronecker import (
    BohningLabels,
    InputFactor,
    LabelFactor,
    SpectralLabels,
    eigenvectors,
    factorised_inputs,
)
from qbound.families.base import LogPartition
from qbound.linalg.dense import HIGHEST, times
from qbound.models.linear import MatrixLayout, is_linear_logits, linear_logits
from qbound.types import working_dtype

# Above this many labels the label curvature is Böhning's: an n x n eigendecomposition would dwarf the rest.
LABELS_LIMIT = 1000
# At most this many numbers of the n x n curvatures of single examples at a time.
CHUNK = 2**22
# At most this many numbers of inputs at a time, where they must be copied.
MOMENTS = 2**24
# With more inputs than this, no e x e matrices are made: in float32 one has 4 GiB.
INPUTS_LIMIT = 2**15


class KspfbInputs(NamedTuple):
    """The factor of inputs.

    Attributes:
      factor_inputs: the sum of B over batches, with forgetting.
      factor_input_batches: of how many batches it is.
      factor_of_inputs: their mean when last factorised, in scaled inputs; scales are 1 without relative damping.
    """

    factor_inputs: Float[Array, "e e"]
    factor_input_batches: Float[Array, ""]
    factor_of_inputs: InputFactor


class KspfbLabels(NamedTuple):
    """The factor of labels.

    Attributes:
      factor_labels: the sum of A over batches, with forgetting.
      factor_label_batches: of how many batches it is.
      factor_label_values: eigenvalues of their mean when last factorised.
      factor_label_vectors: its eigenvectors.
    """

    factor_labels: Float[Array, "n n"]
    factor_label_batches: Float[Array, ""]
    factor_label_values: Float[Array, " n"]
    factor_label_vectors: Float[Array, "n n"]


class KspfbFactors(NamedTuple):
    """Both; no factor of labels where it is Böhning's, which never changes."""

    kspfb_inputs: KspfbInputs
    kspfb_labels: KspfbLabels | None


def layout_of(params: Any, logits_fn: Callable, features_fn: Callable | None, output_axis: int | None) -> MatrixLayout:
    """How `params` is laid out: one array of weights, and at most one bias.

    Where neither `output_axis` nor a bias nor the model says which axis of the weights is that of the labels, the model
    is asked whether it takes inputs of the length of the other one.
    """
    leaves = jax.tree.leaves(params)
    weights = [leaf for leaf in leaves if leaf.ndim == 2]
    bias = [leaf for leaf in leaves if leaf.ndim == 1]
    if len(weights) != 1 or len(bias) > 1 or len(leaves) != len(weights) + len(bias):
        raise ValueError(
            "params: expected one array of weights, of shape (n, d) or (d, n), and at most one bias of shape (n,), for "
            f"n labels; got leaves of shapes {[leaf.shape for leaf in leaves]}. To train the last layer of a network, "
            "hand over that layer only"
        )
    shape = weights[0].shape
    if output_axis is None and _is_linear(logits_fn, params, features_fn, shape):
        output_axis = 1
    candidates = [axis for axis in (0, 1) if output_axis in (None, axis)]
    if bias:
        candidates = [axis for axis in candidates if shape[axis] == bias[0].shape[0]]
        if not candidates:
            where = "an axis" if output_axis is None else f"axis {output_axis}"
            raise ValueError(
                f"params: expected a bias as long as {where} of the weights of shape {shape}; got {bias[0].shape}"
            )
    if len(candidates) > 1 and shape[0] != shape[1] and features_fn is None:
        candidates = [axis for axis in candidates if _takes(logits_fn, params, shape[1 - axis], shape[axis])]
    if len(candidates) != 1:
        raise ValueError(
            f"output_axis: expected 0 or 1, the axis of labels of weights of shape {shape}, since neither a bias nor a "
            "model of (b, d) inputs, without features_fn, tells it; got None"
        )
    return MatrixLayout(*trees.shapes(params), candidates[0])


def _is_linear(logits_fn, params, features_fn, shape) -> bool:
    """Whether the model is `qbound.linear_logits`; one that takes other inputs than rows of features is not."""
    rows = jax.ShapeDtypeStruct((1, shape[0]), working_dtype(*jax.tree.leaves(params)))
    if logits_fn is not linear_logits and (features_fn is not None or not _takes(logits_fn, params, *shape)):
        return False
    return is_linear_logits(logits_fn, params, rows)


def _takes(logits_fn, params, inputs, labels) -> bool:
    dtype = working_dtype(*jax.tree.leaves(params))
    try:
        logits = jax.eval_shape(logits_fn, params, jax.ShapeDtypeStruct((1, inputs), dtype))
    except Exception:  # whatever a model raises for inputs that do not fit
        return False
    return getattr(logits, "shape", None) == (1, labels)


def empty_factors(layout: MatrixLayout, bohning: bool, input_rank: int | None, dtype) -> KspfbFactors:
    """Before the first batch. Few inputs have all their eigenvectors, whatever the rank."""
    n, e = layout.shape()
    if e > INPUTS_LIMIT:
        raise ValueError(
            f"params: expected weights for at most {INPUTS_LIMIT:,} inputs, because the factor of inputs is a matrix; "
            f"got {e:,} inputs, a matrix of {e * e * jnp.dtype(dtype).itemsize / 2**30:,.0f} GiB. qbound.spfb has no "
            "such matrix; or map the inputs to fewer features"
        )

    def zeros(*shape):
        return jnp.zeros(shape, dtype)

    r = e if input_rank is None or e <= 2 * input_rank else input_rank
    inputs = KspfbInputs(
        zeros(e, e), zeros(), InputFactor(zeros(e), zeros(r), zeros(e, r), None if r == e else zeros())
    )
    if bohning or n > LABELS_LIMIT:
        return KspfbFactors(inputs, None)
    return KspfbFactors(inputs, KspfbLabels(zeros(n, n), zeros(), zeros(n), zeros(n, n)))


def updated_labels(
    labels: KspfbLabels,
    decay: Float[Array, ""],
    logits: Float[Array, "b n"],
    weights: Float[Array, " b"],
    family: LogPartition,
) -> KspfbLabels:
    """With the label curvature of a batch; as it was if that is not finite."""
    new = mean_label_curvature(logits, weights, family)
    finite = jnp.all(jnp.isfinite(new))
    total, count = decay * labels.factor_labels + new, decay * labels.factor_label_batches + 1
    updated = KspfbLabels(total, count, *eigenvectors(jnp.where(finite, total / count, 0)))
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, labels)


def updated_inputs(
    inputs: KspfbInputs,
    decay: Float[Array, ""],
    x: Array,
    weights: Float[Array, " b"] | None,
    has_bias: bool,
    scaled: bool,
) -> KspfbInputs:
    """With the second moments of the inputs of a batch; as it was if they are not finite, or all 0."""
    new = second_moments(x, weights, has_bias, decay.dtype)
    # Of inputs that are all 0 nothing can be learnt, and steps would be divided by the damping alone.
    finite = jnp.all(jnp.isfinite(new)) & (jnp.trace(new) > 0)
    total, count = decay * inputs.factor_inputs + new, decay * inputs.factor_input_batches + 1
    mean = jnp.where(finite, total / count, 0)
    scales = input_scales(jnp.diag(mean)) if scaled else jnp.ones_like(mean[0])
    old = inputs.factor_of_inputs
    rank = None if old.tail_eigenvalue is None else old.values.size
    factor = factorised_inputs(scales[:, None] * mean * scales[None, :], scales, rank)
    finite = finite & trees.all_finite(factor)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), KspfbInputs(total, count, factor), inputs)


def second_moments(
    x: Array, weights: Float[Array, " b"] | None, has_bias: bool, dtype: Any, at_a_time: int = MOMENTS
) -> Float[Array, "e e"]:
    """sum_j w_j x_j x_j', the mean without weights; with a bias, of inputs with a 1 at their end.

    Rows with `at_a_time` numbers are taken together where a copy of all could be too large: with weights, or in another
    dtype.
    """
    b, d = x.shape
    rows = max(1, at_a_time // d)

    def of_rows(x, w):
        x = x.astype(dtype)
        if w is None:
            return times(x.T, x) / b, jnp.sum(x, axis=0) / b
        # A weight of 0 removes its example, even one that is infinite.
        known: Array = jnp.where(w[:, None] == 0, 0, x)  # pyright: ignore[reportAssignmentType]
        weighted = w[:, None] * known
        return times(weighted.T, known), jnp.sum(weighted, axis=0)

    def add(i, sums):
        piece = [None if a is None else jax.lax.dynamic_slice_in_dim(a, i * rows, rows) for a in (x, weights)]
        return jax.tree.map(jnp.add, sums, of_rows(*piece))

    if b <= rows or (weights is None and x.dtype == dtype):
        squares, means = of_rows(x, weights)
    else:
        whole = b // rows * rows
        # The first sums, of what is left over, may be of no row at all.
        first = of_rows(x[whole:], None if weights is None else weights[whole:])
        squares, means = jax.lax.fori_loop(0, b // rows, add, first)
    if not has_bias:
        return squares
    one = jnp.ones((1, 1), dtype) if weights is None else jnp.sum(weights)[None, None]
    return jnp.block([[squares, means[:, None]], [means[None, :], one]])


def input_scales(moments: Float[Array, " e"]) -> Float[Array, " e"]:
    """1/sqrt(m_i + median m): columns of large numbers are made small, and rare columns are not made large."""
    typical = jnp.median(moments)
    typical = jnp.where(typical > 0, typical, jnp.mean(moments))
    return jax.lax.rsqrt(jnp.where(typical > 0, moments + typical, 1))


def mean_label_curvature(
    logits: Float[Array, "b n"], weights: Float[Array, " b"], family: LogPartition
) -> Float[Array, "n n"]:
    """sum_j w_j M_j, with the matrices of few examples at a time."""
    b, n = logits.shape
    chunk = max(1, min(b, CHUNK // (n * n)))
    padding = -b % chunk
    logits = jnp.pad(logits, [(0, padding), (0, 0)]).reshape(-1, chunk, n)
    weights = jnp.pad(weights, (0, padding)).reshape(-1, chunk)

    def add(total, piece):
        h, w = piece
        curvatures = jax.vmap(lambda h: family.bound(h).curvature._dense())(h)
        curvatures = jnp.where(w[:, None, None] == 0, 0, curvatures)
        return total + jnp.einsum("j,jkl->kl", w, curvatures, precision=HIGHEST), None

    return jax.lax.scan(add, jnp.zeros((n, n), logits.dtype), (logits, weights))[0]


def label_factor(labels: KspfbLabels | None, layout: MatrixLayout, dtype: Any) -> LabelFactor:
    """A as it was last factorised."""
    if labels is None:
        return BohningLabels(layout.shape()[0], dtype)
    return SpectralLabels(labels.factor_label_values, labels.factor_label_vectors)
