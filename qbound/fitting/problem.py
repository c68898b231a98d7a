r"""The objective of a full batch, and everything about it that does not change from step to step.

.. math:: L(\theta) = \sum_j w_j [\log Z_j(\theta) - t_j^\top h_j(\theta)] + \tfrac12 \sum_i \lambda_i \theta_i^2

with logits h_j affine in the parameters, t_j the probabilities of the labels, and weights w_j that sum to 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qbound import checks, compiler, trees
from qbound.fitting.results import Result
from qbound.models.base import BatchMap, full_weights, logits_shape, normalised, weighted_sum
from qbound.models.linear import KroneckerMap
from qbound.records import record
from qbound.types import Scalar, working_dtype

__all__ = ["Problem", "common_part", "make_problem"]


# How far a row of probabilities may be from a sum of 1.
_SUM_TOLERANCE = 1e-3


@record
class Problem:
    """Labels, weights and regulariser, and whether they make sense."""

    targets: Float[Array, "b n"]  # t_j
    weights: Float[Array, " b"]  # w_j, of sum 1
    l2: Any  # a number for each leaf of the parameters
    verdict: Int[Array, ""]  # a `Result`: UNFINISHED if nothing is wrong

    def mean(self, values: Float[Array, " b"]) -> Float[Array, ""]:
        """Over the examples."""
        return weighted_sum(self.weights, values)

    def value_and_gradient(
        self, linear_map: BatchMap, params: Any, logits: Float[Array, "b n"]
    ) -> tuple[Float[Array, ""], Any]:
        """L, and J'(w (p - t)) + l2 params."""
        t = self.targets
        # Measured from what was observed, logits lose no digits of the loss.
        h = logits - jnp.sum(jnp.where(t == 0, 0, t * logits), axis=1, keepdims=True)
        largest = jnp.max(h, axis=1, keepdims=True)
        exponentials = jnp.exp(h - largest)
        total = jnp.sum(exponentials, axis=1, keepdims=True)
        loss = self.mean((largest + jnp.log(total))[:, 0])
        d = exponentials / total - t
        # Rounding must not leave a part that is the same for all labels: no curvature but l2 would hold it back.
        d = d - t * jnp.sum(d, axis=1, keepdims=True)
        gradient = self.pull_back(linear_map, d)
        if isinstance(linear_map, KroneckerMap):
            # Of large inputs, rounding leaves such a part here too.
            gradient = jax.tree.map(jnp.subtract, gradient, common_part(gradient))
        return loss + self.penalty(params, params) / 2, self.damped(gradient, params)

    def pull_back(self, linear_map: BatchMap, rows: Float[Array, "b n"]) -> Any:
        """J'(w rows)."""
        w = self.weights[:, None]
        return linear_map.transpose(jnp.where(w == 0, 0, w * rows))

    def damped(self, product: Any, v: Any) -> Any:
        """`product` + l2 v."""
        return jax.tree.map(lambda x, c, v: x + c * v, product, self.l2, v)

    def penalty(self, a: Any, b: Any) -> Float[Array, ""]:
        """A' l2 b."""
        return trees.dot(a, jax.tree.map(jnp.multiply, self.l2, b))


def common_part(tree: Any) -> Any:
    """The mean over labels, the last axis, of parameters of `qbound.linear_logits`: no probability depends on it."""
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=-1, keepdims=True), tree)


def make_problem(logits_fn: Callable, params: Any, inputs: Any, labels: Any, weights: Any, l2: Any) -> Problem:
    """Check the shapes of what was given, and look for values out of range."""
    compiler.warn_if_wrong()
    checks.outside_shard_map(params=params, inputs=inputs, labels=labels, example_weights=weights, l2=l2)
    shape = logits_shape(logits_fn, params, inputs)
    dtype = working_dtype(*jax.tree.leaves(params))
    rows = full_weights("example_weights", weights, shape[:-1], dtype).reshape(-1)
    rows = normalised(rows)
    targets, fine = _targets(labels, shape, dtype)
    l2 = _of_every_leaf(l2, params)
    verdict = jnp.asarray(Result.UNFINISHED, jnp.int32)
    # The first of these is the one reported, so it is set last.
    for code, good in (
        (Result.BAD_LABELS, jnp.all(fine | (rows == 0))),
        (Result.BAD_WEIGHTS, jnp.all(jnp.isfinite(rows))),
        (Result.BAD_L2, _is_regulariser(l2)),
    ):
        verdict = jnp.where(good, verdict, jnp.int32(code))
    return Problem(targets=targets, weights=rows, l2=l2, verdict=verdict)


def _targets(labels, shape, dtype) -> tuple[Array, Array]:
    """Rows of probabilities, and which of them are right."""
    labels = checks.array("labels", labels)
    n = shape[-1]
    if jnp.issubdtype(labels.dtype, jnp.integer):
        if labels.shape != shape[:-1]:
            raise ValueError(
                f"labels: expected integers of shape {shape[:-1]} for logits of shape {shape}; got shape {labels.shape}"
            )
        # Labels of eight bits could not be compared with a larger n.
        labels = labels.reshape(-1).astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)
        return jax.nn.one_hot(labels, n, dtype=dtype), (labels >= 0) & (labels < n)
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        raise TypeError(f"labels: expected integers, or rows of probabilities as floats; got dtype {labels.dtype}")
    if labels.shape != shape:
        raise ValueError(
            f"labels: expected probabilities of shape {shape}, that of the logits; got floats of shape {labels.shape}"
        )
    rows = labels.reshape(-1, n).astype(dtype)
    total = jnp.sum(rows, axis=1)
    fine = jnp.all(rows >= 0, axis=1) & (jnp.abs(total - 1) <= _SUM_TOLERANCE)
    return rows / jnp.where(fine, total, 1)[:, None], fine


def _of_every_leaf(l2, params):
    """`l2`, a number or a tree of numbers for the first levels of `params`, as a number for each of its leaves."""
    try:
        full = jax.tree.broadcast(l2, params)
    except ValueError as error:
        raise ValueError(f"l2: expected a number, or a tree of numbers as params is one; got {l2!r}: {error}") from None

    def number(c: Scalar, leaf):
        if not checks.is_number(c) and jnp.shape(c) != ():
            raise ValueError(f"l2: expected a number for each leaf of params; got an array of shape {jnp.shape(c)}")
        return checks.real_array("l2", c).astype(leaf.dtype)

    return jax.tree.map(number, full, params)


def _is_regulariser(l2):
    numbers = jnp.stack(jax.tree.leaves(l2))
    return jnp.all(jnp.isfinite(numbers) & (numbers >= 0)) & jnp.any(numbers > 0)
