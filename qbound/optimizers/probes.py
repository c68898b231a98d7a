r"""Random probes of the curvature of a model: its trace, and samples of it for every array of parameters.

With M_j = F_j'F_j the curvature of example j at its logits and J_j their Jacobian, signs e_j that are independent and
random give

.. math:: G = \sum_j \sqrt{w_j}\, J_j^\top F_j^\top e_j, \qquad
    \mathbb{E}\,[\operatorname{vec} G \operatorname{vec} G^\top] = \sum_j w_j J_j^\top M_j J_j

for one `vjp` of the model and O(n) work an example. The part of G for one array of parameters is a sample of its block,
whatever the model does with the array: once or many times, in a matrix product, a convolution, a lookup.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qbound import checks, trees
from qbound.curvature import Curvature
from qbound.families.softmax import Softmax
from qbound.models.base import axis_flags, example_count, full_weights, normalised
from qbound.models.linear import logits_in_rows, logits_shape
from qbound.types import Order, working_dtype

# Of a single vector of logits.
LabelCurvature = Callable[[Float[Array, " n"]], Curvature]

# Samples are of one in this many examples, and one in more where there are more rows of logits than LARGEST; but never
# of fewer rows than LEAST. Probes of many batches are averaged, so that what matters is their cost.
ONE_IN, LEAST, LARGEST = 8, 60, 2048


def curvature_trace(
    logits_fn: Callable[[Any, Any], Array],
    params: Any,
    inputs: Any,
    key: Array,
    *,
    example_weights: Any = None,
    probes: int = 1,
    order: Order = "max_first",
) -> Float[Array, ""]:
    r"""The trace of the curvature of the bound, by random probes: how wide a valley of the loss is.

    .. math:: \operatorname{tr} \tfrac1b \sum_j J_j^\top M_j J_j = \mathbb{E}\, |G|^2

    Unbiased, and differentiable in the parameters, so that a loss may contain it: a weight on it prefers wide valleys.
    One probe costs about one gradient, and its derivative two more. For a network the curvature is that of the bound on
    the linearised network.

    Args:
      logits_fn: from parameters and inputs to logits (b, n) or (..., n).
      params: where.
      inputs: a batch, as `logits_fn` takes it.
      key: of `jax.random`; a new one for every step of training.
      example_weights: of the batch, (b,) or for as many of the leading axes of the logits as it has.
      probes: how many to average, one after the other.
      order: of the labels in the bound; see `qbound.log_partition_bound`.

    Returns:
      An estimate of the trace, never negative.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> inputs = jax.random.normal(jax.random.key(0), (100, 3))
      >>> trace = qbound.curvature_trace(qbound.linear_logits, jnp.zeros((3, 4)), inputs, jax.random.key(1), probes=200)
      >>> exact = jnp.trace(qbound.log_partition_bound(jnp.zeros(4)).curvature.dense()) * (inputs**2).sum(1).mean()
      >>> print(f"{trace / exact:.1f}")
      1.0
    """
    checks.function("logits_fn", logits_fn)
    checks.choice("order", order, ("descending", "max_first", "given"))
    checks.integer("probes", probes)
    params = trees.widen(checks.float_tree("params", params))
    weights = normalised(row_weights(logits_fn, params, inputs, example_weights)).reshape(-1)
    curvature = label_curvature(Softmax(order))

    def one(key):
        g = probe(logits_fn, params, inputs, weights, curvature, key)
        return trees.dot(g, g)

    return one(key) if probes == 1 else jnp.mean(jax.lax.map(one, jax.random.split(key, probes)))


def label_curvature(family: Softmax, exact: bool = False) -> LabelCurvature:
    """Of the bound, or the exact Hessian."""
    return lambda h: (family.expansion(h) if exact else family.bound(h)).curvature


def row_weights(logits_fn: Callable, params: Any, inputs: Any, example_weights: Any) -> Float[Array, "..."]:
    """Weights of rows of logits, in the shape that those have, as they were given."""
    shape = logits_shape(logits_fn, params, inputs)[:-1]
    return full_weights("example_weights", example_weights, shape, working_dtype(*jax.tree.leaves(params)))


def probe(
    logits_fn: Callable, params: Any, inputs: Any, weights: Float[Array, " b"], curvature: LabelCurvature, key: Array
) -> Any:
    """G for every array of parameters, which must be float32 at least. `weights` are of the rows of logits."""
    logits, pull = jax.vjp(lambda params: logits_in_rows(logits_fn, params, inputs), params)
    v = jax.vmap(lambda h, e: curvature(h)._probe(e))(logits, random_signs(key, logits))
    # Squares of roots of vanishing weights would be zero; and a row without weight may be infinite.
    v = jnp.where(weights[:, None] == 0, 0, jnp.sqrt(weights)[:, None] * v)
    return pull(v)[0]


def random_signs(key: Array, like: Float[Array, "b n"]) -> Float[Array, "b n"]:
    """+1 or -1, as many as `like` has entries: 32 from each random number, which are the larger part of the cost."""
    b, n = like.shape
    bits = jax.random.bits(key, (b, -(-n // 32)), jnp.uint32)
    places = jnp.arange(32, dtype=jnp.uint32)
    bits = (bits[:, :, None] >> places[None, None, :]) & jnp.uint32(1)
    bits = bits.reshape(b, -1)[:, :n]
    # Of zeros that lie on devices as `like` does.
    return jnp.zeros_like(like) + (1 - 2 * bits.astype(like.dtype))


def some_examples(
    inputs: Any,
    weights: Float[Array, "..."],
    is_weighted: bool,
    axes: Any,
    wanted: int | None,
    turn: Int[Array, ""],
    least: int = LEAST,
) -> tuple[Any, Float[Array, "..."]]:
    """Some examples of a batch, others every turn, and the weights of their rows; all of them if that is as good.

    They are evenly spaced, so that every device has a part of them where a batch is spread over devices. With weights,
    those of weight 0, such as padding, are passed over: a part of the batch may have no others.
    """
    leaves, flags = jax.tree.leaves(inputs), axis_flags("inputs", inputs, axes)
    b = example_count("inputs", inputs, axes)
    apart = spacing(b, weights.size, wanted, least)
    # Examples cannot be counted off where they lie on several devices of an explicit mesh.
    if apart == 1 or len(weights) != b or any(map(_is_divided, leaves)):
        return inputs, weights
    size = b // apart
    if is_weighted:
        each = jnp.sum(weights.reshape(b, -1), axis=1)
        order, counted = jnp.argsort(each == 0), jnp.sum(each != 0, dtype=turn.dtype)
        chosen = order[(turn * size + jnp.arange(size, dtype=turn.dtype)) % jnp.maximum(counted, 1)]

        def some(leaf):
            return jnp.asarray(leaf)[chosen]

    else:

        def some(leaf):
            rows = jnp.asarray(leaf)[: size * apart].reshape(size, apart, *leaf.shape[1:])
            return jax.lax.dynamic_index_in_dim(rows, turn % apart, axis=1, keepdims=False)

    # Shared leaves are handed through as they are, Python values among them.
    parts = [some(leaf) if has_axis else leaf for leaf, has_axis in zip(leaves, flags, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(inputs), parts), some(weights)


def spacing(examples: int, rows: int, wanted: int | None, least: int = LEAST) -> int:
    """One in how many examples to take: `wanted` examples, or an eighth, LARGEST rows at most and `least` at least."""
    if wanted is not None:
        return max(1, examples // wanted)
    apart = min(max(ONE_IN, -(-rows // LARGEST)), rows // least)
    return max(1, min(apart, examples))


def _is_divided(leaf: Any) -> bool:
    """Whether the first axis is divided over devices of an explicit mesh."""
    return any(axis is not None for axis in jax.typeof(jnp.asarray(leaf)).sharding.spec[:1])
