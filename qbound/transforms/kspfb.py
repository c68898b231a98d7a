"""KSPFB: steps preconditioned by a Kronecker-factored curvature, at a few times the cost of a gradient."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from qbound import batches, checks, trees
from qbound.models import checked_logits
from qbound.transforms.kronecker_factors import (
    KspfbFactors,
    curvature_of,
    empty_factors,
    layout_of,
    with_inputs,
    with_labels,
)
from qbound.transforms.options import as_number, given, parameter_dtype
from qbound.transforms.preconditioner import CurvatureTransform, curvature_transform
from qbound.types import Order, Scalar

__all__ = ["KspfbInfo", "LabelCurvature", "ScaleByKspfbState", "kspfb", "scale_by_kspfb"]

LabelCurvature = Literal["bound", "bohning"]

# With fewer examples in a batch than this, gradients are too noisy for steps damped for larger ones.
TYPICAL_BATCH = 1000


class KspfbInfo(NamedTuple):
    """How the last update went; `optax.tree.get(state, "kspfb_nonfinite")` finds a field in any chain.

    Attributes:
      kspfb_damping: the damping there was, the relative one included.
      kspfb_predicted_decrease: of the objective, by the quadratic, which is no bound, for the direction alone.
      kspfb_nonfinite: whether the update was skipped, because gradient or factors were not finite.
      kspfb_nonfinite_total: how many updates were.
    """

    kspfb_damping: Float[Array, ""]
    kspfb_predicted_decrease: Float[Array, ""]
    kspfb_nonfinite: Bool[Array, ""]
    kspfb_nonfinite_total: Int[Array, ""]


class ScaleByKspfbState(NamedTuple):
    """State of `scale_by_kspfb`.

    Attributes:
      kspfb_info: how the last update went.
      kspfb_updates: how many there were.
      kspfb_factors: the two factors, and their eigenvectors.
    """

    kspfb_info: KspfbInfo
    kspfb_updates: Int[Array, ""]
    kspfb_factors: KspfbFactors


@dataclasses.dataclass(frozen=True)
class _Options:
    """The arguments of `kspfb` but for learning rate and momentum."""

    logits_fn: Callable
    l2: Scalar
    damping: Scalar
    relative_damping: Scalar
    features_fn: Callable | None
    decay: Scalar
    update_every: int
    label_curvature: LabelCurvature
    label_examples: int | None
    order: Order
    output_axis: int | None

    def __post_init__(self):
        checks.function("logits_fn", self.logits_fn)
        checks.nonnegative("relative_damping", self.relative_damping)
        if self.features_fn is not None:
            checks.function("features_fn", self.features_fn)
        checks.nonnegative("decay", self.decay)
        if checks.is_number(self.decay) and self.decay >= 1:
            raise ValueError(f"decay: expected a number in [0, 1); got {self.decay!r}")
        object.__setattr__(self, "update_every", checks.integer("update_every", self.update_every))
        checks.choice("label_curvature", self.label_curvature, ("bound", "bohning"))
        if self.label_examples is not None:
            object.__setattr__(self, "label_examples", checks.integer("label_examples", self.label_examples))
        checks.choice("order", self.order, ("descending", "max_first", "given"))
        if self.output_axis not in (None, 0, 1):
            raise ValueError(f"output_axis: expected 0, 1 or None; got {self.output_axis!r}")

    def is_scaled(self) -> bool:
        """Whether inputs are scaled: with relative damping, which would else be that of the largest columns."""
        return not (checks.is_number(self.relative_damping) and self.relative_damping == 0)

    def layout(self, params):
        return layout_of(params, self.logits_fn, self.features_fn, self.output_axis)


def scale_by_kspfb(
    logits_fn: Callable[[Any, Any], Array],
    *,
    damping: Scalar,
    relative_damping: Scalar = 0.0,
    features_fn: Callable[[Any, Any], Array] | None = None,
    decay: Scalar = 0.9,
    update_every: int = 500,
    label_curvature: LabelCurvature = "bound",
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
    `label_curvature="bohning"` and `decay=0, update_every=1` it is one of the objective of the batch.

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
      decay: of the running averages, in [0, 1): of A in every step, of B whenever it is updated.
      update_every: after how many steps B, whose eigenvectors cost as much as many gradients, is updated.
      label_curvature: "bound", or "bohning" for the fixed A = 1/2 (I - 11'/n), whose eigenvectors are known. Above
        1,000 labels it is that in any case.
      label_examples: from how many examples of a batch, evenly spaced, A is updated; None for all of them.
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
    return _direction(
        _Options(
            logits_fn=logits_fn,
            l2=0.0,
            damping=damping,
            relative_damping=relative_damping,
            features_fn=features_fn,
            decay=decay,
            update_every=update_every,
            label_curvature=label_curvature,
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
    momentum: float = 0.9,
    features_fn: Callable[[Any, Any], Array] | None = None,
    decay: Scalar = 0.9,
    update_every: int = 500,
    label_curvature: LabelCurvature = "bound",
    label_examples: int | None = 256,
    order: Order = "max_first",
    output_axis: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Kronecker-factored SPFB, for logistic regression and for the last layer of a network.

    .. math:: \theta \leftarrow \theta - \eta_t\, \operatorname{mean}_t
        \big[(A \otimes B + (l_2 + \text{damping}) I)^{-1} (\nabla L + l_2 \theta)\big]

    A step costs about two of SGD. It is made for many steps with a learning rate that decays to zero, and needs no
    tuning there: `qbound.kspfb(optax.cosine_decay_schedule(2.0, steps), qbound.linear_logits, l2=1e-4)`. The curvature
    is not an upper bound, and steps are not certified: for that there is `qbound.spfb`.

    Gradients are those of the **mean** loss without the l2 term, and `update` takes `inputs`, as `qbound.spfb` does.
    With `optax.inject_hyperparams`: `static_args=("logits_fn", "features_fn", "update_every", "label_examples",
    "output_axis", "momentum")`.

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
      label_curvature: "bound" or "bohning".
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
      0.17
    """
    numbers = {"l2": l2, "damping": damping, "relative_damping": relative_damping}
    for name, number in numbers.items():
        checks.nonnegative(name, number)
    if all(checks.is_number(number) and number == 0 for number in numbers.values()):
        raise ValueError(
            "damping: expected l2 + damping + relative_damping > 0, because the curvature is singular; got 0 for all"
        )
    if not checks.is_number(momentum) or not 0 <= momentum < 1:
        raise ValueError(f"momentum: expected a number in [0, 1); got {momentum!r}")
    direction = _direction(
        _Options(
            logits_fn=logits_fn,
            l2=l2,
            damping=damping,
            relative_damping=relative_damping,
            features_fn=features_fn,
            decay=decay,
            update_every=update_every,
            label_curvature=label_curvature,
            label_examples=label_examples,
            order=order,
            output_axis=output_axis,
        )
    )
    averaged = [optax.ema(momentum)] if momentum > 0 else []
    return optax.chain(direction, *averaged, optax.scale_by_learning_rate(learning_rate))


def _direction(options: _Options) -> CurvatureTransform:
    def init(params) -> Any:
        params = trees.widen(checks.float_tree("params", params))
        dtype = parameter_dtype(params)
        if not jax.tree.leaves(params):  # optax.tree.map_params asks for a state without parameters
            params = jnp.zeros((1, 1), dtype)
            layout = layout_of(params, options.logits_fn, None, 1)
        else:
            layout = options.layout(params)
        zero = jnp.zeros((), dtype)
        info = KspfbInfo(zero, zero, jnp.array(False), jnp.zeros((), jnp.int32))
        factors = empty_factors(layout, options.label_curvature == "bohning", dtype)
        return ScaleByKspfbState(info, jnp.zeros((), jnp.int32), factors)

    def prepare(state, params, damping, *, inputs=None, example_weights=None):
        inputs = given("inputs", inputs, "the batch that the gradient is of, as logits_fn takes it")
        layout = options.layout(params)
        factors, rows = _entered(options, layout, state, params, inputs, example_weights)
        total = damping + as_number(checks.nonnegative("damping", options.damping), params)
        curvature = curvature_of(factors, layout)
        if options.is_scaled():
            share = as_number(checks.nonnegative("relative_damping", options.relative_damping), params)
            mean = jnp.mean(factors.factor_input_values) * curvature.labels.mean_value()
            total = total + share * max(1.0, TYPICAL_BATCH / rows) * mean
        known = (total > 0) & (factors.factor_input_batches > 0)
        total: Array = jnp.where(known, total, jnp.nan)  # pyright: ignore[reportAssignmentType]
        scales = factors.factor_scales[:, None]

        def solve(g):
            if not options.is_scaled():
                return curvature.solve(g, total)
            s = curvature.solve(layout.to_tree(scales * layout.to_matrix(g)), total)
            return layout.to_tree(scales * layout.to_matrix(s))

        info = state.kspfb_info._replace(kspfb_damping=total)
        return ScaleByKspfbState(info, state.kspfb_updates + 1, factors), solve

    def update(updates, state, params=None, *, inputs=None, example_weights=None, **ignored) -> Any:
        del ignored
        if params is None:
            raise ValueError("params: expected the parameters; got None. Call update(grads, state, params, inputs=...)")
        params = trees.widen(checks.float_tree("params", params))
        updates = jax.tree.map(jnp.asarray, updates)
        l2 = as_number(checks.nonnegative("l2", options.l2), params)
        g = trees.add_scaled(checks.matching_tree("updates", updates, params), l2, params)
        state, solve = prepare(state, params, l2, inputs=inputs, example_weights=example_weights)
        s = solve(g)
        finite = trees.all_finite(trees.cast_like(s, updates))
        s = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), s)
        before = state.kspfb_info
        info = KspfbInfo(
            kspfb_damping=before.kspfb_damping,
            kspfb_predicted_decrease=jnp.where(finite, trees.dot(g, s) / 2, 0),
            kspfb_nonfinite=~finite,
            kspfb_nonfinite_total=before.kspfb_nonfinite_total + (~finite).astype(jnp.int32),
        )
        return trees.cast_like(s, updates), state._replace(kspfb_info=info)

    return curvature_transform(init, update, prepare)


def _entered(options, layout, state, params, inputs, example_weights) -> tuple[KspfbFactors, int]:
    """The factors with a batch entered, and how many rows it has."""
    dtype = state.kspfb_factors.factor_inputs.dtype
    logits = checked_logits(options.logits_fn(params, inputs))
    e, n = jax.eval_shape(layout.to_matrix, layout.domain()).shape
    if logits.shape[-1] != n:
        raise ValueError(
            f"params: expected weights with an axis of {logits.shape[-1]} labels, as logits_fn returns; got {n} along "
            f"axis {layout.output_axis} (see output_axis)"
        )
    features = inputs if options.features_fn is None else options.features_fn(params, inputs)
    expected = (*logits.shape[:-1], e - layout.has_bias())
    if getattr(features, "shape", None) != expected:
        given_by = "inputs" if options.features_fn is None else "features_fn"
        got = getattr(features, "shape", type(features).__name__)
        hint = " (features_fn says what the weights are applied to)" if options.features_fn is None else ""
        raise ValueError(f"{given_by}: expected features of shape {expected}; got {got}{hint}")
    weights = batches.full_weights("example_weights", example_weights, logits.shape[:-1], dtype)
    weights = batches.normalised(weights).reshape(-1)
    x, logits = (jnp.asarray(leaf).reshape(weights.size, -1).astype(dtype) for leaf in (features, logits))
    decay = jnp.asarray(checks.nonnegative("decay", options.decay), dtype)
    decay = jnp.where(decay < 1, decay, jnp.nan)

    def with_moments(factors):
        ones = [jnp.ones((weights.size, 1), dtype)] if layout.has_bias() else []
        return with_inputs(factors, decay, jnp.concatenate([x, *ones], axis=1), weights, options.is_scaled())

    factors = state.kspfb_factors
    due = (state.kspfb_updates % options.update_every == 0) | (factors.factor_input_batches == 0)
    factors = jax.lax.cond(due, with_moments, lambda factors: factors, factors)
    if options.label_examples is not None and weights.size > options.label_examples:
        some = jnp.arange(options.label_examples) * weights.size // options.label_examples
        return with_labels(factors, decay, logits[some], batches.normalised(weights[some]), options.order), weights.size
    return with_labels(factors, decay, logits, weights, options.order), weights.size
