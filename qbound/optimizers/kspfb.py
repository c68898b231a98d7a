"""KSPFB: steps preconditioned by a Kronecker-factored curvature, at a few times the cost of a gradient."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from qbound import checks, trees
from qbound.curvature.kronecker import solve_in_factors
from qbound.families.softmax import Softmax
from qbound.linalg.dense import times
from qbound.models.base import full_weights, normalised
from qbound.models.linear import MatrixLayout, checked_logits
from qbound.optimizers.base import (
    CurvatureTransform,
    as_number,
    check_update,
    curvature_transform,
    given,
    if_due,
    keep_params_finite,
    parameter_dtype,
    rate_at,
    regularised,
    runs_away,
)
from qbound.optimizers.directions import MeanDirection, mean_direction, no_directions_yet, share_of_next
from qbound.optimizers.kronecker_factors import (
    KspfbFactors,
    empty_factors,
    label_factor,
    layout_of,
    updated_inputs,
    updated_labels,
)
from qbound.types import Order, Scalar

LabelCurvature = Literal["bound", "bohning"]

# Defaults of `kspfb` that the first phase of a fit has, too.
MOMENTUM, RELATIVE_DAMPING, LABEL_EXAMPLES = 0.8, 2.0, 256
# With fewer examples in a batch than this, gradients are too noisy for steps damped for larger ones.
TYPICAL_BATCH = 1000


class KspfbInfo(NamedTuple):
    """How the last update went; `optax.tree.get(state, "kspfb_nonfinite")` finds a field in any chain.

    Attributes:
      kspfb_damping: the damping there was, the relative one included.
      kspfb_predicted_decrease: of the objective, by the quadratic, which is no bound, for the direction alone.
      kspfb_step_length: what the direction was multiplied by, before momentum and learning rate: less than 1 where
        the bound of the batch allows no more, 0 if the update was skipped.
      kspfb_nonfinite: whether the update was skipped, because a number was not finite: of the gradient, the factors,
        the curvature or, in `qbound.kspfb`, the parameters that it leads to.
      kspfb_nonfinite_total: how many updates were.
    """

    kspfb_damping: Float[Array, ""]
    kspfb_predicted_decrease: Float[Array, ""]
    kspfb_step_length: Float[Array, ""]
    kspfb_nonfinite: Bool[Array, ""]
    kspfb_nonfinite_total: Int[Array, ""]


class KspfbLimit(NamedTuple):
    """What is known of the lengths of steps.

    Attributes:
      limit_ratio: r, when last looked at.
      limit_excess: how many times too long the last step was before it was shortened; 0 if it was not looked at.
      limit_slope: the usual g's.
      limit_look_at: the step to look at next.
      limit_look_wait: after how many steps from the last one.
      limit_factors_at: the first step at which factors may be made anew out of turn.
      limit_factors_wait: how many steps there must be before the next such one.
    """

    limit_ratio: Float[Array, ""]
    limit_excess: Float[Array, ""]
    limit_slope: Float[Array, ""]
    limit_look_at: Int[Array, ""]
    limit_look_wait: Int[Array, ""]
    limit_factors_at: Int[Array, ""]
    limit_factors_wait: Int[Array, ""]


class ScaleByKspfbState(NamedTuple):
    """State of `scale_by_kspfb`.

    Attributes:
      kspfb_info: how the last update went.
      kspfb_updates: how many there were.
      kspfb_factors: the two factors, and their eigenvectors.
      kspfb_limit: what limits the step; None in `scale_by_kspfb`, which knows no learning rate.
      kspfb_directions: for the mean of directions; None without momentum.
    """

    kspfb_info: KspfbInfo
    kspfb_updates: Int[Array, ""]
    kspfb_factors: KspfbFactors
    kspfb_limit: KspfbLimit | None = None
    kspfb_directions: MeanDirection | None = None


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
    label_examples: int | None = LABEL_EXAMPLES,
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
    options = dict(locals())
    checks.positive("damping", damping)
    return kspfb_direction(KspfbOptions(**options))


def kspfb(
    learning_rate: optax.ScalarOrSchedule,
    logits_fn: Callable[[Any, Any], Array],
    *,
    l2: Scalar = 0.0,
    damping: Scalar = 0.0,
    relative_damping: Scalar = RELATIVE_DAMPING,
    momentum: Scalar = MOMENTUM,
    features_fn: Callable[[Any, Any], Array] | None = None,
    decay: Scalar = 0.9,
    update_every: int = 500,
    input_rank: int | None = 128,
    label_curvature: LabelCurvature = "bound",
    label_every: int = 4,
    label_examples: int | None = LABEL_EXAMPLES,
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
    options = dict(locals())
    numbers = [checks.nonnegative(name, options[name]) for name in ("l2", "damping", "relative_damping")]
    if all(checks.is_number(number) and number == 0 for number in numbers):
        raise ValueError(
            "damping: expected l2 + damping + relative_damping > 0, because the curvature is singular; got 0 for all"
        )
    direction = kspfb_direction(KspfbOptions(**options))
    return keep_params_finite(optax.chain(direction, optax.scale_by_learning_rate(learning_rate)), "kspfb")


# What an update is told.


@dataclasses.dataclass(frozen=True)
class KspfbOptions:
    """The arguments of `kspfb`. With a `learning_rate` of None, as for `scale_by_kspfb`, steps are not limited."""

    logits_fn: Callable
    damping: Scalar
    relative_damping: Scalar
    features_fn: Callable | None
    decay: Scalar
    update_every: int
    input_rank: int | None
    label_curvature: LabelCurvature
    label_every: int
    label_examples: int | None
    order: Order
    output_axis: int | None
    learning_rate: optax.ScalarOrSchedule | None = None
    l2: Scalar = 0.0
    momentum: Scalar = 0.0

    def __post_init__(self):
        checks.function("logits_fn", self.logits_fn)
        checks.nonnegative("relative_damping", self.relative_damping)
        checks.fraction("momentum", self.momentum)
        if self.features_fn is not None:
            checks.function("features_fn", self.features_fn)
        checks.fraction("decay", self.decay)
        checks.choice("label_curvature", self.label_curvature, ("bound", "bohning"))
        checks.choice("order", self.order, ("descending", "max_first", "given"))
        if self.output_axis not in (None, 0, 1):
            raise ValueError(f"output_axis: expected 0, 1 or None; got {self.output_axis!r}")
        for name in ("update_every", "input_rank", "label_every", "label_examples"):
            number = getattr(self, name)
            if number is not None or name.endswith("every"):
                object.__setattr__(self, name, checks.integer(name, number))

    @property
    def family(self) -> Softmax:
        """Whose bound the curvature is of."""
        return Softmax(self.order)

    @property
    def is_scaled(self) -> bool:
        """Whether inputs are scaled: with relative damping, which would else be that of the largest columns."""
        return not (checks.is_number(self.relative_damping) and self.relative_damping == 0)

    def layout(self, params: Any) -> MatrixLayout:
        """Of the parameters."""
        if not jax.tree.leaves(params):  # optax.tree.map_params asks for a state without parameters
            return layout_of(jnp.zeros((1, 1), parameter_dtype(params)), self.logits_fn, None, 1)
        return layout_of(params, self.logits_fn, self.features_fn, self.output_axis)


class BatchRows(NamedTuple):
    """The rows of a batch: what the weights are applied to, the logits, and weights that sum to 1; None if all equal.

    Features are in the dtype they came in.
    """

    features: Array
    logits: Float[Array, "b n"]
    weights: Float[Array, " b"] | None


# One update.


def kspfb_direction(options: KspfbOptions) -> CurvatureTransform:
    """The transform from gradients to s, (A (x) B + (l2 + damping) I) s = gradient + l2 params."""

    def remember(params) -> tuple[Array, KspfbFactors]:
        bohning = options.label_curvature == "bohning"
        factors = empty_factors(options.layout(params), bohning, options.input_rank, parameter_dtype(params))
        return jnp.zeros((), jnp.int32), factors

    def init(params) -> Any:
        params = trees.widen(checks.float_tree("params", params))
        dtype = parameter_dtype(params)
        # Each array its own, so that the state can be donated.
        info = KspfbInfo(
            kspfb_damping=jnp.zeros((), dtype),
            kspfb_predicted_decrease=jnp.zeros((), dtype),
            kspfb_step_length=jnp.ones((), dtype),
            kspfb_nonfinite=jnp.array(False),
            kspfb_nonfinite_total=jnp.zeros((), jnp.int32),
        )
        limit = None if options.learning_rate is None else no_limit_yet(dtype)
        return ScaleByKspfbState(info, *remember(params), limit, no_directions_yet(params, options.momentum))

    def prepare(memory, params, damping, *, inputs=None, example_weights=None):
        layout = options.layout(params)
        batch = _checked_batch(options, layout, params, inputs, example_weights)
        factors = _updated_factors(options, layout, memory, batch, False)
        solve, _ = _solver(options, layout, factors, len(batch.logits), params, damping)
        return (memory[0] + 1, factors), solve

    def update(updates, state, params=None, *, inputs=None, example_weights=None, **ignored) -> Any:
        del ignored
        check_update(params, updates=updates, inputs=inputs, example_weights=example_weights)
        params = trees.widen(checks.float_tree("params", params))
        updates = jax.tree.map(jnp.asarray, updates)
        # 1. The gradient of the objective, which has the l2 term, and the factors, also those of this batch.
        g, l2 = regularised(updates, params, options.l2)
        layout, count, limit = options.layout(params), state.kspfb_updates, state.kspfb_limit
        batch = _checked_batch(options, layout, params, inputs, example_weights)
        out_of_turn = False
        if limit is not None:
            out_of_turn, limit = wants_factors(limit, count, options.update_every)
        factors = _updated_factors(options, layout, (count, state.kspfb_factors), batch, out_of_turn)
        solve, damping = _solver(options, layout, factors, len(batch.logits), params, l2)
        # 2. The solution, no longer than the bound of this batch allows.
        s = solve(g)
        length, forget = jnp.ones_like(damping), False
        if limit is not None:
            found = limited(
                limit,
                count,
                rate_at(options.learning_rate, count, params),
                share_of_next(state.kspfb_directions, options.momentum),
                trees.dot(g, s),
                lambda: _ratio(options, layout, batch, g, s, l2),
            )
            length, forget, limit = jax.lax.stop_gradient(found)
        # 3. The step, unless a number went wrong, and the mean of steps.
        finite = jnp.isfinite(length) & trees.all_finite(trees.cast_like(s, updates))
        if options.learning_rate is None:
            finite = finite & ~runs_away(params, s)
        length = jnp.where(finite, length, 0)
        step = jax.tree.map(lambda leaf: jnp.where(finite, length.astype(leaf.dtype) * leaf, 0), s)
        mean, directions = mean_direction(state.kspfb_directions, step, options.momentum, forget)
        info = KspfbInfo(
            kspfb_damping=damping,
            kspfb_predicted_decrease=jnp.where(finite, (1 - length / 2) * trees.dot(g, step), 0),
            kspfb_step_length=length,
            kspfb_nonfinite=~finite,
            kspfb_nonfinite_total=state.kspfb_info.kspfb_nonfinite_total + (~finite).astype(jnp.int32),
        )
        return trees.cast_like(mean, updates), ScaleByKspfbState(info, count + 1, factors, limit, directions)

    return curvature_transform(init, update, remember, prepare)


def _solver(
    options, layout: MatrixLayout, factors: KspfbFactors, examples: int, params, damping
) -> tuple[Callable[[Any], Any], Array]:
    """The solve with both factors, and its damping; NaN before both factors are known."""
    labels, inputs = label_factor(factors.kspfb_labels, layout, damping.dtype), factors.kspfb_inputs
    total = damping + as_number(checks.nonnegative("damping", options.damping), params)
    if options.is_scaled:
        share = as_number(checks.nonnegative("relative_damping", options.relative_damping), params)
        mean = inputs.factor_of_inputs.mean_value() * labels.mean_value()
        total = total + batch_damping(share, examples) * mean
    known = (total > 0) & (inputs.factor_input_batches > 0)
    if factors.kspfb_labels is not None:
        known = known & (factors.kspfb_labels.factor_label_batches > 0)
    total = jnp.asarray(jnp.where(known, total, jnp.nan))

    def solve(g):
        return layout.to_tree(solve_in_factors(labels, inputs.factor_of_inputs, layout.to_matrix(g), total))

    return solve, total


def batch_damping(relative: Any, examples: int) -> Any:
    """The relative damping for a batch: small ones have noisy gradients."""
    return relative * max(1.0, TYPICAL_BATCH / examples)


def _updated_factors(options, layout, memory, batch: BatchRows, out_of_turn) -> KspfbFactors:
    """The factors with a batch, if it is their turn, or out of turn."""
    count, (inputs, labels) = memory
    decay = jnp.asarray(checks.fraction("decay", options.decay), batch.logits.dtype)

    def is_due(every, batches):
        return (count % every == 0) | (batches == 0) | out_of_turn

    def with_inputs(old):
        return updated_inputs(old, decay, batch.features, batch.weights, layout.has_bias(), options.is_scaled)

    inputs = if_due(is_due(options.update_every, inputs.factor_input_batches), with_inputs, inputs)
    if labels is None:
        return KspfbFactors(inputs, None)

    def with_labels(old):
        return updated_labels(old, decay, *_some_rows(options, batch), options.family)

    due = is_due(options.label_every, labels.factor_label_batches)
    return KspfbFactors(inputs, jax.lax.cond(due, with_labels, lambda old: old, labels))


def _checked_batch(options, layout, params, inputs, example_weights) -> BatchRows:
    """The rows of a batch, if they fit the parameters."""
    inputs = given("inputs", inputs, "the batch that the gradient is of, as logits_fn takes it")
    dtype = parameter_dtype(params)
    logits = checked_logits(options.logits_fn(params, inputs))
    n, e = layout.shape()
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
    weights = None
    if example_weights is not None:
        weights = full_weights("example_weights", example_weights, logits.shape[:-1], dtype)
        weights = normalised(weights).reshape(-1)
    logits = logits.reshape(-1, n).astype(dtype)
    return BatchRows(jnp.asarray(features).reshape(len(logits), -1), logits, weights)


def _some_rows(options, batch: BatchRows) -> tuple[Float[Array, "b n"], Float[Array, " b"]]:
    """The logits of some examples, and their weights."""
    rows, weights = len(batch.logits), batch.weights
    if options.label_examples is None or rows <= options.label_examples:
        return batch.logits, jnp.full(rows, 1 / rows, batch.logits.dtype) if weights is None else weights
    # At random places: evenly spaced rows of sequences could all be at the same position.
    some = np.random.default_rng(0).permutation(rows)
    if weights is None:
        some = some[: options.label_examples]
        return batch.logits[some], jnp.full(len(some), 1 / len(some), batch.logits.dtype)
    # Those of weight 0, such as padding, last.
    some = jnp.asarray(some)[jnp.argsort(weights[some] == 0)][: options.label_examples]
    return batch.logits[some], normalised(weights[some])


# How long a step of KSPFB may be, and when its factors no longer fit the data.
#
# The product of factors is no bound, and factors are old: along a step s they may have far less curvature than the
# batch of that step. The bound of the batch's own objective tells, with B its curvature:
#
# .. math:: r = \frac{s^\top B s}{g^\top s}
#
# is 1 where a step of length 1 leads to the minimum along s. With learning rate eta, and with the share c that s has
# in the mean of directions, a batch moves the parameters by eta c s. **This may not raise the bound of the batch,
# which is so for eta c r of at most 2.** Longer steps are shortened, the directions of earlier batches are forgotten,
# and the factors are made anew with the next batch.
#
# To compute B s takes as long as a third of a step. So it is looked at when there is reason to: at first, while steps
# are close to what is allowed, when g's is far above what it was, and every few steps in any case. What that may miss
# is little: an example along which s is far too long has a large part in g's.

# While steps are well within what is allowed, one in this many is looked at.
LOOK_EVERY = 64

# A step whose g's is this many times the usual one is looked at.
JUMP = 2.0

# Of one step in the usual g's; and the most that counts of it, in times the usual, lest one outlier hide the next.
SHARE, OUTLIER = 0.1, 4.0


def no_limit_yet(dtype) -> KspfbLimit:
    """Before the first step."""
    numbers = (jnp.zeros((), dtype) for _ in range(3))
    places = (jnp.asarray(start, jnp.int32) for start in (0, 1, 0, 1))
    return KspfbLimit(*numbers, *places)


def limited(
    limit: KspfbLimit,
    count: Int[Array, ""],
    rate: Float[Array, ""],
    share: Scalar,
    slope: Float[Array, ""],
    ratio: Callable[[], Float[Array, ""]],
) -> tuple[Float[Array, ""], Bool[Array, ""], KspfbLimit]:
    """What to multiply s by in step number `count`, whether to forget earlier directions, and the limit after it.

    `share` is that of s in the mean, `slope` is g's, and `ratio` computes r. If r is not finite, nor is the length.
    """
    usual = limit.limit_slope
    due = (count >= limit.limit_look_at) | ~(slope <= JUMP * usual)
    r = jax.lax.cond(due, ratio, lambda: limit.limit_ratio)
    excess = jnp.abs(rate) * share * r / 2
    forget = excess > 1
    # With earlier directions forgotten, s is all of the step.
    longest = jnp.abs(rate) * r / 2
    divisor: Array = jnp.where(forget, longest, 1)  # pyright: ignore[reportAssignmentType]
    length = jnp.where(jnp.isfinite(longest), 1 / divisor, jnp.nan)
    wait = jnp.where(excess > 0.5, 1, jnp.minimum(2 * limit.limit_look_wait, LOOK_EVERY))
    counted: Array = jnp.minimum(slope, OUTLIER * usual)
    counted = jnp.where(usual > 0, usual + SHARE * (counted - usual), slope)
    # A step that is skipped tells nothing.
    known = jnp.isfinite(length) & jnp.isfinite(slope)
    entered = limit._replace(
        limit_ratio=r,
        limit_excess=jnp.where(due, excess, 0),
        limit_slope=counted,
        limit_look_at=jnp.where(due, count + wait, limit.limit_look_at),
        limit_look_wait=jnp.where(due, wait, limit.limit_look_wait),
    )
    return length, forget & known, jax.tree.map(lambda new, old: jnp.where(known, new, old), entered, limit)


def wants_factors(limit: KspfbLimit, count: Int[Array, ""], every: int) -> tuple[Bool[Array, ""], KspfbLimit]:
    """Whether to make factors anew out of turn, and the limit then.

    That is so after a step that was too long. Between two such times there are 1, 2, 4, ... steps, at most `every`,
    since new factors may be no better, and cost many steps. With every turn this begins again.
    """
    wanted = (limit.limit_excess > 1) & (count >= limit.limit_factors_at)
    wait: Array = jnp.where(count % every == 0, 1, limit.limit_factors_wait)  # pyright: ignore[reportAssignmentType]
    return wanted, limit._replace(
        limit_factors_at=jnp.where(wanted, count + wait, limit.limit_factors_at),
        limit_factors_wait=jnp.where(wanted, jnp.minimum(2 * wait, every), wait),
    )


def _ratio(options, layout, batch: BatchRows, g, s, l2) -> Float[Array, ""]:
    """The ratio s'Bs / g's, with B the curvature of the bound of this batch, and l2."""
    # In units of the largest entry of s, whose square may be too large a number.
    unit = trees.largest(s)
    unit = jnp.where(unit > 0, unit, 1)
    s = trees.scale(1 / unit, s)
    matrix, slope = layout.to_matrix(s), trees.dot(g, s)
    d = batch.features.shape[1]
    along = times(batch.features.astype(matrix.dtype), matrix[:, :d].T)
    along = along + matrix[None, :, d] if layout.has_bias() else along
    each = jax.vmap(lambda h, u: options.family.bound(h).curvature._quadratic(u))(batch.logits, along)
    mean = jnp.mean(each) if batch.weights is None else trees.weighted_sum(batch.weights, each)
    # Where there is no gradient there is no step, and a slope below 0 is an error of rounding beyond repair.
    ratio = unit * (mean + l2 * trees.dot(s, s)) / jnp.asarray(jnp.where(slope == 0, 1, slope))
    return ratio + jnp.asarray(jnp.where(slope < 0, jnp.nan, 0), ratio.dtype)
