"""KSPFB: steps preconditioned by a Kronecker-factored curvature, at a few times the cost of a gradient."""

from collections.abc import Callable
from typing import Any

import optax
from jaxtyping import Array

from qbound import checks
from qbound.transforms.finite import keep_params_finite
from qbound.transforms.kspfb_step import KspfbOptions, LabelCurvature, kspfb_direction
from qbound.transforms.preconditioner import CurvatureTransform
from qbound.types import Order, Scalar

__all__ = ["kspfb", "scale_by_kspfb"]


def scale_by_kspfb(
    logits_fn: Callable[[Any, Any], Array],
    *,
    damping: Scalar = 1e-3,
    relative_damping: Scalar = 0.0,
    features_fn: Callable[[Any, Any], Array] | None = None,
    decay: Scalar = 0.9,
    update_every: int = 500,
    input_rank: int | None = None,
    label_curvature: LabelCurvature = "bound",
    label_every: int = 4,
    label_examples: int | None = 256,
    order: Order = "max_first",
    output_axis: int | None = None,
) -> CurvatureTransform:
    r"""Solve with a Kronecker-factored curvature: the direction of KSPFB.

    .. math:: s = (A \otimes B + \text{damping}\; I)^{-1} g, \qquad
        A = \overline{M_j}, \quad B = \overline{x_j x_j^\top}

    M_j is the curvature of `qbound.log_partition_bound` at the logits of example j, x_j are its features, and bars are
    running averages. For logits that are linear in the parameters the curvature of the bound is the mean of M_j (x)
    x_j x_j'; here the mean of products is replaced by the product of means. **That is not an upper bound.** With
    `label_curvature="bohning"`, `decay=0, update_every=1`, `input_rank=None` it is one of the objective of the batch.

    For logistic regression, and for the linear last layer of a network: parameters are one array of weights, (n, d) or
    (d, n), and at most one bias (n,), which appends a 1 to the features. `update` takes `inputs`, and
    `example_weights`, as that of `qbound.scale_by_spfb` does. The transform can be the `precondition` of `qbound.spfb`.

    Args:
      logits_fn: from parameters and inputs to logits (b, n) or (..., n).
      damping: added to the curvature, above 0. The system is solved exactly, in the eigenvectors of both factors.
      relative_damping: a further damping, in mean eigenvalues of A (x) B, and times 1000/b for batches of b < 1000.
        Above 0, all damping is that of inputs divided by sqrt(m + median m), with m the second moment of each, so that
        columns of large numbers do not set the damping of the others.
      features_fn: from parameters and inputs to what the weights are applied to, (b, d) or (..., d); by default the
        inputs themselves.
      decay: of the running averages, in [0, 1), whenever they are updated.
      update_every: after how many steps B, whose eigenvectors cost as much as many gradients, is updated.
      input_rank: how many eigenvectors of B to have, about the leading ones; the other directions share the mean of
        their eigenvalues. None for all, as have inputs of at most twice that number.
      label_curvature: "bound", or "bohning" for the fixed A = 1/2 (I - 11'/n), whose eigenvectors are known. Above
        1,000 labels it is that in any case.
      label_every: after how many steps A is updated.
      label_examples: from how many examples of a batch, at random places, A is updated; None for all.
      order: of the labels in the bound; see `qbound.log_partition_bound`.
      output_axis: which axis of the weights is that of labels, if their shapes do not tell.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ScaleByKspfbState`, which holds two d x d matrices.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> transform = qbound.scale_by_kspfb(qbound.linear_logits, damping=0.1)
      >>> inputs = jax.random.normal(jax.random.key(0), (100, 20))
      >>> weights, grads = jnp.zeros((20, 3)), jnp.ones((20, 3))
      >>> updates, state = transform.update(grads, transform.init(weights), weights, inputs=inputs)
      >>> updates.shape
      (20, 3)
    """
    checks.positive("damping", damping)
    return kspfb_direction(
        KspfbOptions(
            learning_rate=None,
            logits_fn=logits_fn,
            l2=0.0,
            damping=damping,
            relative_damping=relative_damping,
            momentum=0.0,
            features_fn=features_fn,
            decay=decay,
            update_every=update_every,
            input_rank=input_rank,
            label_curvature=label_curvature,
            label_every=label_every,
            label_examples=label_examples,
            order=order,
            output_axis=output_axis,
        )
    )


def kspfb(
    learning_rate: optax.ScalarOrSchedule,
    logits_fn: Callable[[Any, Any], Array],
    *,
    l2: Scalar = 0.0,
    damping: Scalar = 0.0,
    relative_damping: Scalar = 2.0,
    momentum: Scalar = 0.8,
    features_fn: Callable[[Any, Any], Array] | None = None,
    decay: Scalar = 0.9,
    update_every: int = 500,
    input_rank: int | None = 128,
    label_curvature: LabelCurvature = "bound",
    label_every: int = 4,
    label_examples: int | None = 256,
    order: Order = "max_first",
    output_axis: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Kronecker-factored SPFB, for logistic regression and for the last layer of a network.

    .. math:: \theta \leftarrow \theta - \eta_t\, \operatorname{mean}_t
        \big[(A \otimes B + (l_2 + \text{damping}) I)^{-1} (\nabla L + l_2 \theta)\big]

    A step costs about two of SGD with 1,000 examples and 10 labels. It is made for many steps with a learning rate that
    decays to zero, and needs no tuning there: `qbound.kspfb(optax.cosine_decay_schedule(2.0, steps),
    qbound.linear_logits, l2=1e-4)`. The curvature is not an upper bound, and steps are not certified: for that there is
    `qbound.spfb`. But a batch never moves the parameters to where the bound of its own objective is higher: a step that
    would is shortened, and the factors are made anew.

    Gradients are those of the **mean** loss without the l2 term, and `update` takes `inputs`, as `qbound.spfb` does.
    With `optax.inject_hyperparams`: `static_args=("logits_fn", "features_fn", "update_every", "input_rank",
    "label_every", "label_examples", "output_axis")`.

    Args:
      learning_rate: eta, a number or an optax schedule; best one that decays from 2 to 0.
      logits_fn: the model; see `scale_by_kspfb`, as for every option below but momentum.
      l2: weight of the regulariser l2/2 |theta|^2: added to the curvature and, times theta, to the gradient.
      damping: added to the curvature alone.
      relative_damping: a further damping in mean eigenvalues. One of the three must be above 0.
      momentum: of the mean of directions, debiased; 0 takes each as it is.
      features_fn: what the weights are applied to; by default the inputs.
      decay: of the running averages.
      update_every: after how many steps the factor of inputs is updated.
      input_rank: how many eigenvectors of the factor of inputs to have, None for all. With a relative damping of 2
        those that the damping does not drown are few.
      label_curvature: "bound" or "bohning".
      label_every: after how many steps the factor of labels is updated.
      label_examples: from how many examples of a batch the factor of labels is updated.
      order: of the labels.
      output_axis: which axis of the weights is that of labels.

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
      >>> tx = qbound.kspfb(optax.cosine_decay_schedule(2.0, 50), qbound.linear_logits, l2=1e-3)
      >>> params = {"weights": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> for _ in range(50):
      ...     updates, state = update(jax.grad(loss)(params), state, params, inputs=x)
      ...     params = optax.apply_updates(params, updates)
      >>> print(f"{loss(params):.2f}")
      0.19
    """
    numbers = {"l2": l2, "damping": damping, "relative_damping": relative_damping}
    for name, number in numbers.items():
        checks.nonnegative(name, number)
    if all(checks.is_number(number) and number == 0 for number in numbers.values()):
        raise ValueError(
            "damping: expected l2 + damping + relative_damping > 0, because the curvature is singular; got 0 for all"
        )
    direction = kspfb_direction(
        KspfbOptions(
            learning_rate=learning_rate,
            logits_fn=logits_fn,
            l2=l2,
            damping=damping,
            relative_damping=relative_damping,
            momentum=momentum,
            features_fn=features_fn,
            decay=decay,
            update_every=update_every,
            input_rank=input_rank,
            label_curvature=label_curvature,
            label_every=label_every,
            label_examples=label_examples,
            order=order,
            output_axis=output_axis,
        )
    )
    return keep_params_finite(optax.chain(direction, optax.scale_by_learning_rate(learning_rate)), "kspfb")
