"""LSPFB, Algorithm 4 of [WC20]: SPFB with a low-rank bound in place of the full one."""

from collections.abc import Callable
from typing import Any

import optax
from jaxtyping import Array

from qbound import checks
from qbound.families.low_rank.bound import Method
from qbound.models.base import full_weights
from qbound.models.linear import logits_shape
from qbound.optimizers.base import (
    CurvatureTransform,
    check_some_damping,
    curvature_transform,
    given,
    is_narrow,
    keep_params_finite,
    parameter_dtype,
)
from qbound.optimizers.memory import SketchOptions, first_sketch
from qbound.optimizers.spfb import SpfbOptions, low_rank_curvature, spfb_direction, widened
from qbound.types import Order, Scalar


def scale_by_lspfb(
    logits_fn: Callable[[Any, Any], Array],
    *,
    rank: int,
    method: Method = "frequent_directions",
    damping: Scalar,
    decay: Scalar = 0.0,
    order: Order = "max_first",
    inputs_axes: Any = 0,
    block_size: int | None = None,
    adaptive_damping: Scalar | None = None,
) -> CurvatureTransform:
    r"""Solve with a low-rank bound of the curvature of the bound: the direction of LSPFB.

    .. math:: s = \big(V^\top S V + D + \text{damping}\; I\big)^{-1} g, \qquad
        V^\top S V + D \succeq \tfrac1b \sum_j J_j^\top M_j J_j

    V has `rank` rows, and D is diagonal. Memory grows with `rank` times the number of parameters: there is no matrix of
    all parameters by all, and none of all rows of the Jacobian. For `qbound.linear_logits` no row is formed at all; for
    any other model each example takes n - 1 `vjp`s, so that `qbound.scale_by_spfb` is cheaper where there are many
    labels.

    `update` takes `inputs`, `example_weights`, `curvature_inputs`, `curvature_weights` and `value` as that of
    `qbound.scale_by_spfb` does. The transform can be the `precondition` of `qbound.spfb`.

    Args:
      logits_fn: from parameters and inputs to logits (b, n) or (..., n). For explicit features f_x(y), (b, n, d), it is
        `lambda theta, features: features @ theta`.
      rank: of the bound. Above the number of parameters, with a warning, rows beyond it are zero.
      method: "frequent_directions", "exact" or "paper"; see `qbound.low_rank_bound`.
      damping: added to the curvature, above 0.
      decay: in [0, 1). 0 takes the curvature from the current batch, as the paper does, and the quadratic is an upper
        bound of the batch's objective wherever the logits are linear in the parameters. Above 0, a sketch of the
        curvatures of about 1/(1 - decay) batches is carried from step to step: small batches are then not biased, and
        the quadratic bounds the discounted **mean** of their curvatures, not that of the current batch. While the
        sketch fills, steps are shortened; `qbound.lspfb` also limits them from then on.
      order: of the labels in the bound; see `qbound.log_partition_bound`.
      inputs_axes: which arrays of `inputs` have an axis of examples (0) and which are shared by all of them (None).
      block_size: how many rows to take into the sketch at a time, about; larger ones are tighter and take more memory.
      adaptive_damping: first value of a further damping; see `qbound.scale_by_spfb`.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ScaleBySpfbState`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> transform = qbound.scale_by_lspfb(qbound.linear_logits, rank=5, damping=0.1)
      >>> inputs = jax.random.normal(jax.random.key(0), (100, 20))
      >>> weights, grads = jnp.zeros((20, 3)), jnp.ones((20, 3))
      >>> updates, state = transform.update(grads, transform.init(weights), weights, inputs=inputs)
      >>> updates.shape
      (20, 3)
    """
    options = dict(locals())
    checks.positive("damping", damping)
    return lspfb_direction(**options)


def lspfb(
    learning_rate: optax.ScalarOrSchedule,
    logits_fn: Callable[[Any, Any], Array],
    *,
    rank: int,
    method: Method = "frequent_directions",
    l2: Scalar = 0.0,
    damping: Scalar = 0.0,
    decay: Scalar = 0.0,
    order: Order = "max_first",
    inputs_axes: Any = 0,
    block_size: int | None = None,
    limit_steps: bool = True,
    adaptive_damping: Scalar | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LSPFB, the low-rank stochastic partition function bound method: Algorithm 4 of [WC20].

    .. math:: \theta \leftarrow \theta - \eta_t\,
        \big(V_t^\top S_t V_t + D_t + (l_2 + \text{damping}) I\big)^{-1} (\nabla L + l_2 \theta)

    Without `decay` the quadratic lies above that of `qbound.spfb`, so a learning rate of 1 is as safe, and steps are
    shorter: how much, docs/theory.md says for each method and rank. It takes gradients of the **mean** loss without the
    l2 term, and `inputs` in `update`, as `qbound.spfb` does. With batches of less than a few hundred, use `decay`.

    With `optax.inject_hyperparams`: `static_args=("logits_fn", "rank", "inputs_axes", "block_size")`.

    Args:
      learning_rate: eta, a number or an optax schedule.
      logits_fn: the model; see `scale_by_lspfb`, as for every option below.
      rank: of the bound.
      method: "frequent_directions", "exact" or "paper".
      l2: weight of the regulariser l2/2 |theta|^2: added to the curvature and, times theta, to the gradient.
      damping: added to the curvature alone. One of `l2` and `damping` must be above 0.
      decay: of the sketch carried from batch to batch; 0 carries none.
      order: of the labels.
      inputs_axes: which arrays of `inputs` have an axis of examples.
      block_size: how many rows to take at a time.
      limit_steps: with `decay`, keep the learning rate below the length at which steps would, on average over the
        batches before, make the bound of a batch's own objective rise.
      adaptive_damping: first value of an adaptive damping.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import qbound
      >>> x = jax.random.normal(jax.random.key(0), (500, 4))
      >>> y = jnp.argmax(x[:, :3], axis=1)
      >>> def loss(params):
      ...     logits = qbound.linear_logits(params, x)
      ...     return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
      >>> tx = qbound.lspfb(1.0, qbound.linear_logits, rank=4, l2=1e-3)
      >>> params = {"weights": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}
      >>> state = tx.init(params)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params, inputs=x)
      ...     params = optax.apply_updates(params, updates)
      >>> print(f"{loss(params):.2f}")
      0.35
    """
    options = dict(locals())
    check_some_damping(l2, damping)
    rate = learning_rate if options.pop("limit_steps") else None
    direction = lspfb_direction(**{**options, "learning_rate": rate})
    return keep_params_finite(optax.chain(direction, optax.scale_by_learning_rate(learning_rate)), "spfb")


def lspfb_direction(*, rank, method, decay, block_size, **options_of_spfb) -> CurvatureTransform:
    """That of SPFB with a low-rank bound, and with its solve apart."""
    sketch = SketchOptions(rank=rank, method=method, decay=decay, block_size=block_size)
    options = SpfbOptions(sketch=sketch, **options_of_spfb)
    transform = spfb_direction(options)

    def remember(params):
        return first_sketch(sketch, params)

    def prepare(carried, params, damping, *, inputs=None, example_weights=None):
        inputs = given("inputs", inputs, "the batch that the gradient is of, as logits_fn takes it")
        model = widened(options.logits_fn) if is_narrow(params) else options.logits_fn
        shape = logits_shape(model, params, inputs)[:-1]
        weights = full_weights("example_weights", example_weights, shape, parameter_dtype(params))
        curvature, carried = low_rank_curvature(options, model, carried, params, inputs, weights)
        return carried, curvature.solver(damping + checks.nonnegative("damping", options.damping))

    return curvature_transform(transform.init, transform.update, remember, prepare)
