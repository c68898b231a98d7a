"""SPFB, Algorithm 2 of [WC20]: gradient steps preconditioned by the curvature of the bound."""

from collections.abc import Callable
from typing import Any

import optax
from jaxtyping import Array

from qbound import checks
from qbound.transforms.finite import keep_params_finite
from qbound.transforms.options import SpfbOptions, check_some_damping
from qbound.transforms.preconditioner import CurvatureTransform
from qbound.transforms.solvers import Solver
from qbound.transforms.step import spfb_direction
from qbound.types import Order, Scalar

__all__ = ["scale_by_spfb", "spfb"]


def scale_by_spfb(
    logits_fn: Callable[[Any, Any], Array],
    *,
    damping: Scalar,
    solver: Solver = "auto",
    order: Order = "max_first",
    max_steps: int = 10,
    tolerance: Scalar = 1e-3,
    window: int | None = None,
    inputs_like: Any = None,
    inputs_axes: Any = 0,
    precondition: CurvatureTransform | Callable[[Any], Any] | None = None,
    warm_start: bool = False,
    microbatch_size: int | None = None,
    adaptive_damping: Scalar | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Solve with the curvature of the bound on the log-partition function: the direction of SPFB.

    .. math:: s = \Big(\tfrac1b \sum_j J_j^\top M_j J_j + \text{damping}\; I\Big)^{-1} g

    M_j is the curvature of `qbound.log_partition_bound` at the logits of example j, and J_j their Jacobian, used by
    `jvp` and `vjp` of one linearisation a step. Where `logits_fn` is linear in the parameters, the quadratic bounds the
    loss of the batch from above; for a network it bounds the loss of the linearised network and is a local model.

    The transform's `update` takes, by keyword:

    - `inputs`: the batch that the gradient is of, as `logits_fn` takes it: any tree of arrays, with examples along
      their first axis;
    - `example_weights`: of the batch, (b,) or for as many of the leading axes of the logits as it has; 0 removes an
      example, whose inputs must be finite all the same. The gradient must be of the loss with the same weights;
    - `curvature_inputs`, `curvature_weights`: another batch to take the curvature from, such as the caller's buffer;
    - `value`: the loss that the gradient is of, for `adaptive_damping` only.

    Anything else is ignored. Gradients, or logits, that are not finite give an update of zero and are reported in the
    state (`SpfbInfo`).

    Args:
      logits_fn: from parameters and inputs to logits (b, n) or (..., n); -inf removes a label. Any function, a network
        among them; `qbound.linear_logits` has its structure known to the solvers. What it closes over is a constant.
      damping: added to the curvature, above 0: without it the curvature is singular.
      solver: "dense" (Cholesky in parameter space), "woodbury" (in the space of examples and labels, with a closed form
        for one example of `qbound.linear_logits`), "cg" (matrix-free, in the memory of a few gradients), or "auto",
        chosen by the cost model of `qbound.transforms.solvers`.
      order: of the labels in the bound; see `qbound.log_partition_bound`.
      max_steps: the most iterations of CG. Each costs about two gradients.
      tolerance: relative residual at which CG stops.
      window: keep the inputs of so many recent examples in the state and take the curvature from them, the current
        batch included; None takes it from the current batch, as the paper does. With batches of less than a few hundred
        that biases every step, and the window does not: see docs/theory.md. While it fills, steps are shortened;
        `qbound.spfb` also limits them from then on.
      inputs_like: with `window`, one example's inputs, or the `jax.ShapeDtypeStruct`s of them: `inputs` without its
        first axis.
      inputs_axes: which arrays of `inputs` have an axis of examples (0) and which are shared by all of them (None), as
        `in_axes` of `jax.vmap`. Needed only for shared arrays together with `window` or `microbatch_size`.
      precondition: for CG: a function g -> s, about the solution, linear, symmetric and positive definite; or a
        transform, `qbound.scale_by_kspfb(...)` or `qbound.scale_by_lspfb(...)`, whose solve it is, with the damping of
        both added, and whose state is kept in that of this one.
      warm_start: start CG from the last solution. It pays where successive gradients are alike: large batches, windows.
      microbatch_size: take products in pieces of so many examples, one after another: the same curvature in the memory
        of one piece, for one more evaluation of the logits a product. Not with "woodbury".
      adaptive_damping: first value of a further damping that grows where the loss falls by less than a quarter of what
        the quadratic predicts, and shrinks where it falls by more than three quarters. Needs `value`. Losses are
        compared from one update to the next, so it is meant for batches large enough to compare.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ScaleBySpfbState`. Curvature and solution are in float32 at
      least, whatever the dtype of the parameters; updates have the dtype of the gradients.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import qbound
      >>> transform = qbound.scale_by_spfb(lambda theta, f: f @ theta, damping=0.1)  # explicit features f (b, n, d)
      >>> features = jax.random.normal(jax.random.key(0), (20, 3, 4))
      >>> theta, grads = jnp.zeros(4), jnp.ones(4)
      >>> state = transform.init(theta)
      >>> updates, state = transform.update(grads, state, theta, inputs=features)
      >>> updates.shape, bool(optax.tree.get(state, "spfb_converged"))
      ((4,), True)
    """
    checks.positive("damping", damping)
    return spfb_direction(
        SpfbOptions(
            learning_rate=None,
            logits_fn=logits_fn,
            l2=0.0,
            damping=damping,
            solver=solver,
            order=order,
            max_steps=max_steps,
            tolerance=tolerance,
            window=window,
            inputs_like=inputs_like,
            inputs_axes=inputs_axes,
            precondition=precondition,
            warm_start=warm_start,
            microbatch_size=microbatch_size,
            adaptive_damping=adaptive_damping,
        )
    )


def spfb(
    learning_rate: optax.ScalarOrSchedule,
    logits_fn: Callable[[Any, Any], Array],
    *,
    l2: Scalar = 0.0,
    damping: Scalar = 0.0,
    solver: Solver = "auto",
    order: Order = "max_first",
    max_steps: int = 10,
    tolerance: Scalar = 1e-3,
    window: int | None = None,
    inputs_like: Any = None,
    inputs_axes: Any = 0,
    limit_steps: bool = True,
    precondition: CurvatureTransform | Callable[[Any], Any] | None = None,
    warm_start: bool = False,
    microbatch_size: int | None = None,
    adaptive_damping: Scalar | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SPFB, the stochastic partition function bound method: Algorithm 2 of [WC20].

    .. math:: \theta \leftarrow \theta - \eta_t\,
        \Big(\tfrac1b \sum_j \Sigma_j + (l_2 + \text{damping}) I\Big)^{-1} (\nabla L + l_2 \theta)

    A second-order method for the mean loss of a softmax model, safe at a learning rate of 1: the step then leads to the
    minimum of an upper bound of the batch's objective. The paper has eta_t = eta_0/t, here
    `lambda step: eta_0 / (step + 1)`. With batches of less than a few hundred, use `window`.

    Gradients are those of the **mean** loss of the batch, without the l2 term, which is added here as `optax.adamw`
    adds its decay: `grads = jax.grad(lambda p: cross_entropy(logits_fn(p, x), y).mean())(params)`.

    In an optax loop it is a change of one line, and one more argument to `update`:
    `tx.update(grads, state, params, inputs=x)`. With `optax.inject_hyperparams`, name what is not a number to change:

    `optax.inject_hyperparams(qbound.spfb, static_args=("logits_fn", "max_steps", "window", "inputs_like",
    "inputs_axes", "precondition", "microbatch_size"))(learning_rate=1.0, logits_fn=logits_fn, l2=1e-4)`

    Inside `optax.MultiSteps` the gradient is the mean over the mini-batches and the curvature that of the last of them,
    or of a window into which every last one enters. The solve is made, and dropped, in every mini-step.

    Args:
      learning_rate: eta, a number or an optax schedule.
      logits_fn: the model; see `scale_by_spfb`, as for every option below.
      l2: weight of the regulariser l2/2 |theta|^2 of the objective: added to the curvature and, times theta, to the
        gradient.
      damping: added to the curvature alone. One of `l2` and `damping` must be above 0.
      solver: "auto", "dense", "woodbury" or "cg".
      order: of the labels.
      max_steps: the most iterations of CG.
      tolerance: relative residual at which CG stops.
      window: take the curvature from so many recent examples. Recommended for batches below a few hundred.
      inputs_like: with `window`, one example's inputs, or their shapes.
      inputs_axes: which arrays of `inputs` have an axis of examples.
      limit_steps: with `window`, keep the learning rate below the length at which steps would, on average over the
        batches before, make the bound of a batch's own objective rise: small batches are then safe at a learning rate
        of 1. It takes effect where batches are small beside the number of parameters, and biases nothing.
      precondition: for CG.
      warm_start: start CG from the last solution.
      microbatch_size: take products in pieces of so many examples.
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
      >>> tx = qbound.spfb(1.0, qbound.linear_logits, l2=1e-3)
      >>> params = {"weights": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}
      >>> state = tx.init(params)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params, inputs=x)
      ...     params = optax.apply_updates(params, updates)
      >>> print(f"{loss(params):.2f}")
      0.29
    """
    check_some_damping(l2, damping)
    direction = spfb_direction(
        SpfbOptions(
            learning_rate=learning_rate if limit_steps else None,
            logits_fn=logits_fn,
            l2=l2,
            damping=damping,
            solver=solver,
            order=order,
            max_steps=max_steps,
            tolerance=tolerance,
            window=window,
            inputs_like=inputs_like,
            inputs_axes=inputs_axes,
            precondition=precondition,
            warm_start=warm_start,
            microbatch_size=microbatch_size,
            adaptive_damping=adaptive_damping,
        )
    )
    return keep_params_finite(optax.chain(direction, optax.scale_by_learning_rate(learning_rate)), "spfb")
