"""Layerwise SPFB: a bound for every array of parameters of a network, from nothing but its logits."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from qbound import checks, trees
from qbound.families.softmax import Softmax
from qbound.models.base import normalised
from qbound.models.linear import logits_in_rows
from qbound.optimizers.base import (
    as_number,
    check_update,
    checked_params,
    given,
    if_due,
    is_narrow,
    keep_params_finite,
    known_to_be_zero,
    parameter_dtype,
    rate_at,
    regularised,
    runs_away,
)
from qbound.optimizers.damping import SpfbAdaptation, adapted, first_adaptation, remember
from qbound.optimizers.directions import MeanDirection, descent, mean_direction, no_directions_yet
from qbound.optimizers.layer_factors import (
    FactorKind,
    LayerFactors,
    LeafAxes,
    LeafLayout,
    direction,
    empty_layer_factors,
    leaf_layout,
    ready,
    with_pending,
)
from qbound.optimizers.lengths import (
    FIRST,
    LEAST_ROWS,
    UpdateLength,
    length_of_update,
    no_length_yet,
    nonlinearity,
    ray_along,
    trusted_share,
)
from qbound.optimizers.probes import LEAST, label_curvature, probe, row_weights, some_examples
from qbound.optimizers.spfb import widened
from qbound.types import Order, Scalar

ProbedCurvature = Literal["bound", "gauss_newton"]


class LayerwiseInfo(NamedTuple):
    """How the last update went; `optax.tree.get(state, "layerwise_step_length")` finds a field in any chain.

    Attributes:
      layerwise_damping: of every block, in its mean eigenvalues.
      layerwise_curvature: q, that of the bound along the mean direction.
      layerwise_nonlinearity: epsilon, by what share of their move the logits of the network were elsewhere than the
        linearised network puts them, at the length before shortening; above 1/2 it was shortened to 1/(2 epsilon).
      layerwise_predicted_decrease: of the objective, by that bound, for a learning rate of 1.
      layerwise_step_length: what the mean direction was multiplied by, before the learning rate; 0 if the update was
        skipped.
      layerwise_nonfinite: whether the update was skipped, because a number was not finite: of the gradient, the logits
        or, in `qbound.layerwise_spfb`, the parameters that it leads to.
      layerwise_nonfinite_total: how many updates were.
    """

    layerwise_damping: Float[Array, ""]
    layerwise_curvature: Float[Array, ""]
    layerwise_nonlinearity: Float[Array, ""]
    layerwise_predicted_decrease: Float[Array, ""]
    layerwise_step_length: Float[Array, ""]
    layerwise_nonfinite: Bool[Array, ""]
    layerwise_nonfinite_total: Int[Array, ""]


class ScaleByLayerwiseSpfbState(NamedTuple):
    """State of `scale_by_layerwise_spfb`.

    Attributes:
      layerwise_info: how the last update went.
      layerwise_updates: how many there were.
      layerwise_factors: of the curvature of every array.
      layerwise_length: what batches have certified.
      layerwise_directions: for the mean of directions; None without momentum.
      layerwise_adaptation: of the damping; None without `adaptive_damping`.
    """

    layerwise_info: LayerwiseInfo
    layerwise_updates: Int[Array, ""]
    layerwise_factors: LayerFactors
    layerwise_length: UpdateLength
    layerwise_directions: MeanDirection | None = None
    layerwise_adaptation: SpfbAdaptation | None = None


def scale_by_layerwise_spfb(
    logits_fn: Callable[[Any, Any], Array],
    *,
    damping: Scalar = 0.3,
    momentum: Scalar = 0.7,
    factors: FactorKind = "estimate",
    curvature: ProbedCurvature = "bound",
    decay: Scalar = 0.85,
    probe_examples: int | None = None,
    update_every: int = 5,
    solve_every: int = 50,
    longest_axis: int = 2048,
    axes: Any = None,
    order: Order = "max_first",
    inputs_axes: Any = 0,
    adaptive_damping: Scalar | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Solve with a bound of the curvature of every array of parameters: the direction of layerwise SPFB.

    .. math:: u = \operatorname{mean}_t\, \big[(L \otimes R/\operatorname{tr} L + \lambda I)^{-1} g\big], \qquad
        s = \frac{\operatorname{mean}_t (g^\top u/\sqrt{q})}{\sqrt q}\, u

    L = E GG' and R = E G'G are made of random probes G of the curvature of the bound on the log-partition function, one
    `vjp` of `logits_fn` an update: for any model, with no tags or hooks, and with weights that are tied or used twice.
    q is the curvature of the bound along u, for one `jvp`: so the length of the update is that which the bound of
    recent batches certifies as the best, and no longer than 4 times that of its own batch. All of it is about the
    linearised network; it is not a bound of the network. So a forward pass looks where the update leads, at a learning
    rate of 1, and shortens it where the network is not near the linearised one. The first ten are shortened, too.

    `update` takes `inputs` and `example_weights` as that of `qbound.scale_by_spfb` does, and ignores what it does not
    know. Gradients, or logits, that are not finite give an update of zero and are reported in the state.

    Args:
      logits_fn: from parameters and inputs to logits (b, n) or (..., n). What it closes over is a constant.
      damping: lambda, in mean eigenvalues of each block, above 0.
      momentum: of the mean of directions, debiased; 0 takes each as it is.
      factors: "estimate" takes L (x) R / tr L for a block. "bound" takes K L^(1/2) (x) R^(1/2) for K arrays, which is
        a bound of the curvature of the linearised network where every array is a dense layer that each example passes
        once, up to the noise of the probes; its steps are more cautious, and eigenvectors cost more than inverses.
      curvature: what to probe: that of the "bound", or "gauss_newton", the matrix with the exact Hessian in its place.
      decay: of the sums L and R, from turn to turn.
      probe_examples: how many examples of a batch to take probes and lengths from, about; None for an eighth, or what
        has 2,048 rows of logits in large batches, and no fewer than 60 rows for probes and 250 for lengths, with those
        without weight.
      update_every: after how many updates the probes since the last time enter L and R; in each of the first ten, too.
      solve_every: after how many updates L and R are inverted; after 1, 2, 4, 8, ... of them, too.
      longest_axis: of a matrix; a longer axis has a diagonal.
      axes: which axes of arrays are rows, columns or stacked: a tree of `qbound.LeafAxes` or None with the structure of
        the parameters, or a function from parameters to one. By default all axes but the last are merged to rows, as
        for kernels of convolutions with channels last.
      order: of the labels in the bound; see `qbound.log_partition_bound`.
      inputs_axes: which arrays of `inputs` have an axis of examples (0) and which are shared by all of them (None).
      adaptive_damping: first value of a further damping; see `qbound.scale_by_spfb`. Needs `value` in `update`.
      seed: of the random signs.

    Returns:
      An `optax.GradientTransformationExtraArgs` with state `ScaleByLayerwiseSpfbState`: for a matrix of p rows and q
      columns it holds 2 p^2 + 2 q^2 + 2 p q numbers.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import qbound
      >>> def network(params, x):
      ...     return jnp.tanh(x @ params["first"]) @ params["last"]
      >>> transform = qbound.scale_by_layerwise_spfb(network)
      >>> params = {"first": jnp.ones((20, 5)), "last": jnp.ones((5, 3))}
      >>> inputs = jax.random.normal(jax.random.key(0), (100, 20))
      >>> updates, state = transform.update(params, transform.init(params), params, inputs=inputs)
      >>> updates["first"].shape
      (20, 5)
    """
    options = dict(locals())
    checks.positive("damping", damping)
    return layerwise_direction(LayerwiseOptions(**options))


def layerwise_spfb(
    learning_rate: optax.ScalarOrSchedule,
    logits_fn: Callable[[Any, Any], Array],
    *,
    l2: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    weight_decay_mask: Any = None,
    damping: Scalar = 0.3,
    momentum: Scalar = 0.7,
    factors: FactorKind = "estimate",
    curvature: ProbedCurvature = "bound",
    decay: Scalar = 0.85,
    probe_examples: int | None = None,
    update_every: int = 5,
    solve_every: int = 50,
    longest_axis: int = 2048,
    axes: Any = None,
    order: Order = "max_first",
    inputs_axes: Any = 0,
    adaptive_damping: Scalar | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Layerwise SPFB, for networks: a bound for each array of parameters, which [WC20] asks for at its end.

    .. math:: \theta \leftarrow \theta - \eta_t\, \big(s + w\, \theta\big)

    with the direction s of `scale_by_layerwise_spfb` and a weight decay w. The learning rate is in units of the bound:
    at 1 an update goes to where the bound of recent batches is least along it, on the linearised network.
    Rates above 2, where that bound would rise, count as 2. Best is a rate of 1 that decays to 0 over the last half of
    training.

    Gradients are those of the **mean** loss of the batch, without the l2 term, and `update` takes `inputs`, as
    `qbound.spfb` does. With `optax.inject_hyperparams`: `static_args=("logits_fn", "weight_decay_mask",
    "probe_examples", "update_every", "solve_every", "longest_axis", "axes", "inputs_axes", "seed")`.

    Args:
      learning_rate: eta, a number or an optax schedule.
      logits_fn: the model; see `scale_by_layerwise_spfb`, as for every option below but those of penalties.
      l2: weight of the regulariser l2/2 |theta|^2: added to the curvature and, times theta, to the gradient.
      weight_decay: decoupled, as that of `optax.adamw`: times the learning rate, so that 1e-4 is a usual value.
      weight_decay_mask: which arrays decay, as `mask` of `optax.adamw`.
      damping: in mean eigenvalues of each block.
      momentum: of the mean of directions.
      factors: "estimate" or "bound".
      curvature: "bound" or "gauss_newton".
      decay: of the factors.
      probe_examples: how many examples of a batch to take probes and lengths from.
      update_every: after how many updates probes enter the factors.
      solve_every: after how many updates factors are inverted.
      longest_axis: of a matrix.
      axes: which axes of arrays are rows, columns or stacked.
      order: of the labels.
      inputs_axes: which arrays of `inputs` have an axis of examples.
      adaptive_damping: first value of an adaptive damping.
      seed: of the random signs.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import qbound
      >>> x = jax.random.normal(jax.random.key(0), (500, 4))
      >>> y = jnp.argmax(x[:, :3] * x[:, 1:], axis=1)
      >>> def network(params, x):
      ...     return jnp.tanh(x @ params["first"]) @ params["last"]
      >>> def loss(params):
      ...     return optax.softmax_cross_entropy_with_integer_labels(network(params, x), y).mean()
      >>> keys = jax.random.split(jax.random.key(1))
      >>> params = {"first": jax.random.normal(keys[0], (4, 50)), "last": jax.random.normal(keys[1], (50, 3)) / 7}
      >>> tx = qbound.layerwise_spfb(1.0, network)
      >>> state, update = tx.init(params), jax.jit(tx.update)
      >>> for _ in range(50):
      ...     updates, state = update(jax.grad(loss)(params), state, params, inputs=x)
      ...     params = optax.apply_updates(params, updates)
      >>> bool(loss(params) < 0.9)
      True
    """
    options = dict(locals())
    checks.positive("damping", damping)
    checks.nonnegative("weight_decay", weight_decay)
    mask = options.pop("weight_decay_mask")
    options.pop("weight_decay")
    decayed = []
    if not known_to_be_zero(weight_decay):
        decayed = [optax.add_decayed_weights(weight_decay, mask)]  # pyright: ignore[reportArgumentType]
    chain = (layerwise_direction(LayerwiseOptions(**options)), *decayed, optax.scale_by_learning_rate(learning_rate))
    return keep_params_finite(optax.chain(*chain), "layerwise")


# What an update is told.


@dataclasses.dataclass(frozen=True)
class LayerwiseOptions:
    """The arguments of `layerwise_spfb` but for weight decay. A `learning_rate` of None is 1 and unknown."""

    logits_fn: Callable[[Any, Any], Array]
    damping: Scalar
    momentum: Scalar
    factors: FactorKind
    curvature: ProbedCurvature
    decay: Scalar
    probe_examples: int | None
    update_every: int
    solve_every: int
    longest_axis: int
    axes: Any
    order: Order
    inputs_axes: Any
    adaptive_damping: Scalar | None
    seed: int
    learning_rate: optax.ScalarOrSchedule | None = None
    l2: Scalar = 0.0

    def __post_init__(self):
        checks.function("logits_fn", self.logits_fn)
        checks.nonnegative("l2", self.l2)
        checks.fraction("momentum", self.momentum)
        checks.fraction("decay", self.decay)
        checks.choice("factors", self.factors, ("estimate", "bound"))
        checks.choice("curvature", self.curvature, ("bound", "gauss_newton"))
        checks.choice("order", self.order, ("descending", "max_first", "given"))
        for name in ("probe_examples", "update_every", "solve_every", "longest_axis"):
            number = getattr(self, name)
            if number is not None or name != "probe_examples":
                object.__setattr__(self, name, checks.integer(name, number))
        if not isinstance(self.seed, numbers.Integral):
            raise TypeError(f"seed: expected an integer; got {self.seed!r}")
        if self.adaptive_damping is not None:
            checks.positive("adaptive_damping", self.adaptive_damping)

    @property
    def family(self) -> Softmax:
        """Whose bound the curvature is of."""
        return Softmax(self.order)

    def layouts(self, params: Any) -> list[LeafLayout]:
        """Of every array, in the order of the leaves."""
        leaves, structure = jax.tree.flatten(params)
        axes = self.axes(params) if callable(self.axes) else self.axes

        given = [None] * len(leaves)
        if axes is not None and leaves:
            try:
                given = structure.flatten_up_to(axes)
            except ValueError as error:
                raise ValueError(
                    f"axes: expected qbound.LeafAxes or None for each array of {structure}; got {axes!r}: {error}"
                ) from None
        for each in given:
            if each is not None and not isinstance(each, LeafAxes):
                raise TypeError(f"axes: expected qbound.LeafAxes or None for every array; got {each!r}")
        return [leaf_layout(leaf.shape, each) for leaf, each in zip(leaves, given, strict=True)]


# One update.


def layerwise_direction(options: LayerwiseOptions) -> optax.GradientTransformationExtraArgs:
    """The transform from gradients to directions."""

    def init(params) -> Any:
        params = checked_params(params)
        dtype = parameter_dtype(params)
        damping, curvature, epsilon, decrease = (jnp.zeros((), dtype) for _ in range(4))
        adaptive = options.adaptive_damping
        return ScaleByLayerwiseSpfbState(
            LayerwiseInfo(
                damping,
                curvature,
                epsilon,
                decrease,
                jnp.ones((), dtype),
                jnp.array(False),
                jnp.zeros((), jnp.int32),
            ),
            jnp.zeros((), jnp.int32),
            empty_layer_factors(params, options.layouts(params), options.factors, options.longest_axis),
            no_length_yet(dtype),
            no_directions_yet(params, options.momentum),
            None if adaptive is None else first_adaptation(params, adaptive, dtype),
        )

    def update(updates, state, params=None, *, inputs=None, example_weights=None, value=None, **ignored) -> Any:
        del ignored
        check_update(params, updates=updates, inputs=inputs, example_weights=example_weights, value=value)
        model = widened(options.logits_fn) if is_narrow(params) else options.logits_fn
        params, updates = checked_params(params), jax.tree.map(jnp.asarray, updates)
        count, layouts = state.layerwise_updates, options.layouts(params)
        # Factors of t probes change as fast as 1/t: they are inverted after 1, 2, 4, 8, ... of them, too.
        due = (
            (count % options.solve_every == 0)
            | (((count + 1) & count) == 0)
            | (state.layerwise_factors.layer_turns == 0)
        )
        # 1. The gradient of the objective, which has the l2 term, and the damping.
        g, l2 = regularised(updates, params, options.l2)
        damping = as_number(checks.positive("damping", options.damping), params)
        adaptation, objective = state.layerwise_adaptation, jnp.zeros_like(damping)
        if adaptation is not None:
            loss = as_number(given("value", value, "the loss, because of adaptive_damping"), params)
            objective = loss + l2 / 2 * trees.dot(params, params)
            judged, before = adapted(adaptation, params, objective, options.adaptive_damping), adaptation
            # It changes no sooner than it has an effect.
            used = jnp.asarray(jnp.where(due, judged.spfb_adaptive_damping, before.spfb_adaptive_damping))
            adaptation, damping = judged._replace(spfb_adaptive_damping=used), damping + used
        # 2. A probe of the curvature, the factors, and the solution.
        inputs = given("inputs", inputs, "the batch that the gradient is of, as logits_fn takes it")
        every, is_weighted = row_weights(model, params, inputs, example_weights), example_weights is not None

        def some(least):
            """Examples with no fewer rows of logits than `least`, others every time, and the weights of the rows."""
            wanted, axes = options.probe_examples, options.inputs_axes
            part, weights = some_examples(inputs, every, is_weighted, axes, wanted, count, least)
            return part, normalised(weights).reshape(-1)

        key = jax.random.fold_in(jax.random.key(options.seed), count)
        sampled = label_curvature(options.family, options.curvature == "gauss_newton")
        sample = probe(model, params, *some(LEAST), sampled, key)
        decay = as_number(checks.fraction("decay", options.decay), params)
        # An option that is an array and out of its range is NaN.
        known = jnp.isfinite(damping) & jnp.isfinite(l2) & jnp.isfinite(decay)
        factors = _updated_factors(
            options, layouts, state.layerwise_factors, sample, count, damping, l2, decay, known, due & known
        )
        s = direction(factors, layouts, g, options.factors)
        # 3. The mean of directions, unless a number went wrong: then g's is not finite.
        alone, earlier = trees.dot(g, s), state.layerwise_directions
        sound = jnp.isfinite(alone) & trees.all_finite(sample) & known
        s, alone = jax.tree.map(lambda leaf: jnp.where(sound, leaf, 0), (s, alone))
        slope, turns_back = descent(earlier, alone, g, options.momentum)
        u, directions = mean_direction(earlier, s, options.momentum, turns_back)
        # 4. As long as the bound of recent batches allows, and where it leads the network is near the linearised one.
        rate = jnp.ones_like(damping)
        if options.learning_rate is not None:
            rate = rate_at(options.learning_rate, count, params)
        part, weights = some(LEAST_ROWS)
        ray = ray_along(options.family, model, params, part, weights, u, l2)
        eta, q, length = length_of_update(state.layerwise_length, slope, ray.curved, rate)
        after = trees.add_scaled(params, -rate * eta, u)
        eps = float(jnp.finfo(jax.eval_shape(model, params, part).dtype).eps)
        epsilon = nonlinearity(ray, logits_in_rows(model, after, part), rate * eta, eps)
        eta = trusted_share(epsilon) * eta
        sound = sound & (eta * ray.unit <= _largest_number(updates))
        if options.learning_rate is None:
            sound = sound & ~runs_away(params, trees.scale(eta, u))
        eta = jnp.where(sound, eta, 0)
        step = trees.scale(eta, u)
        # 5. What the next update needs, and what readers want.
        length, directions = (
            jax.tree.map(lambda new, old: jnp.where(sound, new, old), new, old)
            for new, old in ((length, state.layerwise_length), (directions, earlier))
        )
        slope, q, epsilon = (jnp.where(sound, x, 0) for x in (slope, q, epsilon))
        info = LayerwiseInfo(
            layerwise_damping=damping,
            layerwise_curvature=q,
            layerwise_nonlinearity=epsilon,
            layerwise_predicted_decrease=eta * slope - eta**2 * q / 2,
            layerwise_step_length=eta,
            layerwise_nonfinite=~sound,
            layerwise_nonfinite_total=state.layerwise_info.layerwise_nonfinite_total + (~sound).astype(jnp.int32),
        )
        if adaptation is not None:
            adaptation = remember(adaptation, params, objective, step, eta * slope, eta**2 * q)
        state = ScaleByLayerwiseSpfbState(info, count + 1, factors, length, directions, adaptation)
        return trees.cast_like(step, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _largest_number(updates: Any) -> float:
    """That every dtype among them has."""
    return min((float(jnp.finfo(leaf.dtype).max) for leaf in jax.tree.leaves(updates)), default=jnp.inf)


def _updated_factors(
    options, layouts, factors: LayerFactors, sample, count, damping, l2, decay, known, due
) -> LayerFactors:
    """With a probe, which enters when it is time, and made ready to solve with when it is time for that.

    A probe that is not finite is left out. Products and inverses are conditional, models are not: convolutions are
    many times slower inside of a loop or a conditional on CPUs.
    """
    finite = trees.all_finite(sample)
    pending = jax.tree.map(lambda old, new: jnp.where(finite, old + new, old), factors.layer_pending, sample)
    waiting = factors.layer_pending_count + finite.astype(factors.layer_pending_count.dtype)
    factors = factors._replace(layer_pending=pending, layer_pending_count=waiting)
    none_yet = factors.layer_turns == 0
    enters = ((count % options.update_every == 0) | (count < FIRST) | none_yet) & (waiting > 0) & known

    def turn(old):
        old = if_due(enters, lambda old: with_pending(old, layouts, decay), old)
        return if_due(due, lambda old: ready(old, damping, l2, options.factors), old)

    # One inside of the other: a second loop would copy what the first hands on, at every update.
    return if_due(enters | due, turn, factors)
