"""The methods that are compared: what each is told, its learning rate over time, and its optax transform.

Learning rates and lengths of schedules are arguments of compiled programs, so that a grid of them is one program.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import qbound
from experiments.fields import Checked, Count, NotNegative, Part, Positive

__all__ = ["SCHEDULES", "Method", "Numbers", "Schedule", "evaluated", "learning_rate", "numbers", "transform"]

Name = Literal[
    "adamw", "nadamw", "muon", "schedule_free_adamw", "momentum", "layerwise_spfb", "spfb", "kfac", "psgd"
]  # fmt: skip
Schedule = Literal["cosine", "constant"]
Curvature = Literal["bound", "gauss_newton"]
LogitsFn = Callable[[Any, jax.Array], jax.Array]

SCHEDULES: tuple[Schedule, ...] = ("cosine", "constant")
WARM_UP = 0.1  # of all steps, before the cosine
FALL = 0.5  # of all steps, after the constant
# What each method is told beside its learning rate.
OPTIONS: dict[str, set[str]] = {
    "adamw": {"b2", "weight_decay"},
    "nadamw": {"b2", "weight_decay"},
    "muon": {"adam_ratio", "weight_decay"},
    "schedule_free_adamw": {"b1", "b2", "weight_decay"},
    "momentum": {"momentum", "l2"},
    "layerwise_spfb": {"damping", "momentum", "curvature", "l2", "weight_decay"},
    "spfb": {"damping", "max_steps", "l2"},
    "kfac": {"damping", "momentum", "l2"},
    "psgd": {"b1", "preconditioner_rate", "weight_decay"},
}


@dataclasses.dataclass(frozen=True)
class Method(Checked):
    """What a program is compiled for; None for what the method's package has.

    Attributes:
      name: of the method.
      b1: of schedule-free AdamW and PSGD.
      b2: of Adam.
      momentum: of momentum SGD, K-FAC and layerwise SPFB.
      damping: of curvatures.
      curvature: of layerwise SPFB.
      max_steps: iterations of CG in a step of SPFB.
      adam_ratio: learning rate of what Muon leaves to Adam, in units of its own.
      preconditioner_rate: of PSGD.
      weight_decay: apart from the gradient.
      l2: a penalty, as part of the loss that is minimised.
    """

    name: Name
    b1: Part | None = None
    b2: Part | None = None
    momentum: Part | None = None
    damping: Positive | None = None
    curvature: Curvature | None = None
    max_steps: Count | None = None
    adam_ratio: Positive | None = None
    preconditioner_rate: Positive | None = None
    weight_decay: NotNegative = 0.0
    l2: NotNegative = 0.0

    def __post_init__(self):
        super().__post_init__()
        told = {field.name for field in dataclasses.fields(self) if getattr(self, field.name) not in (None, 0.0)}
        if unknown := told - OPTIONS[self.name] - {"name"}:
            known = ", ".join(sorted(OPTIONS[self.name]))
            raise ValueError(f"{min(unknown)}: expected nothing for {self.name}, which takes {known}; got a value")

    @property
    def environment(self) -> str | None:
        """That of a peer with packages of its own."""
        return self.name if self.name in ("kfac", "psgd") else None


class Numbers(NamedTuple):
    """What a program is called with."""

    rate: Any
    schedule: Any  # its place among SCHEDULES
    steps: Any


def numbers(rate: float, schedule: Schedule, steps: int) -> Numbers:
    """As arrays, so that no program is compiled for one value."""
    return Numbers(jnp.float32(rate), jnp.int32(SCHEDULES.index(schedule)), jnp.float32(steps))


def learning_rate(setting: Numbers) -> Callable[[Any], jax.Array]:
    """Of step 0, 1, ...; never 0 before the last step, and 0 after it."""

    def at(step) -> jax.Array:
        t, end = jnp.asarray(step, jnp.float32), setting.steps
        warm_up = WARM_UP * end
        cosine = (1 + jnp.cos(jnp.pi * jnp.clip((t - warm_up) / (end - warm_up), 0, 1))) / 2
        shapes = jnp.stack([jnp.minimum((t + 1) / warm_up, cosine), jnp.clip((end - t) / (FALL * end), 0, 1)])
        return setting.rate * shapes[setting.schedule]

    return at


def transform(method: Method, rate: Callable, logits_fn: LogitsFn) -> optax.GradientTransformationExtraArgs:
    """Of gradients of the mean loss, without the penalty."""
    return optax.with_extra_args_support(_transform(method, rate, logits_fn))


def _transform(method: Method, rate: Callable, logits_fn: LogitsFn) -> optax.GradientTransformation:
    match method.name:
        case "adamw":
            return optax.adamw(rate, **_told(method, "b2", "weight_decay"))
        case "nadamw":
            return optax.nadamw(rate, **_told(method, "b2", "weight_decay"))
        case "schedule_free_adamw":
            options = _told(method, "b1", "b2", "weight_decay")
            return optax.contrib.schedule_free_adamw(rate, **options)  # pyright: ignore[reportArgumentType]: or schedule
        case "muon":
            return _muon(method, rate)
        case "momentum":
            momentum = optax.sgd(rate, momentum=method.momentum or 0.9)
            return optax.chain(optax.add_decayed_weights(method.l2), momentum)
        case "layerwise_spfb":
            return _layerwise_spfb(method, rate, logits_fn)
        case "spfb":
            return qbound.spfb(rate, logits_fn, l2=method.l2, **_told(method, "damping", "max_steps"))
        case "psgd":
            return _psgd(method, rate)
        case "kfac":
            raise ValueError("name: expected a method that is an optax transform; got 'kfac'")


def _told(method: Method, *names: str) -> dict[str, Any]:
    """Options by the names that their package has for them, without those it has a value for."""
    return {name: value for name in names if (value := getattr(method, name)) is not None}


def _layerwise_spfb(method: Method, rate: Callable, logits_fn: LogitsFn) -> optax.GradientTransformationExtraArgs:
    """The one place that says what qbound's method for networks is told."""
    options = _told(method, "l2", "weight_decay", "damping", "momentum", "curvature")
    return qbound.layerwise_spfb(rate, logits_fn, **options)


def _muon(method: Method, rate: Callable) -> optax.GradientTransformation:
    ratio = method.adam_ratio or 1.0
    return optax.contrib.muon(
        rate,
        weight_decay=method.weight_decay,
        adam_weight_decay=method.weight_decay,
        adam_learning_rate=lambda step: ratio * rate(step),
        muon_weight_dimension_numbers=muon_dimensions,
    )


def muon_dimensions(params: Any) -> Any:
    """Which axes of weights are inputs and outputs; None for what Adam gets: head, embeddings and vectors."""

    def of_leaf(path, leaf):
        if leaf.ndim < 2 or path[0].key in ("head", "embedding"):
            return None
        return optax.contrib.MuonDimensionNumbers(tuple(range(leaf.ndim - 1)), leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def _psgd(method: Method, rate: Callable) -> optax.GradientTransformation:
    """PSGD Kron; its package is in an environment of its own."""
    from psgd_jax.kron import kron  # pyright: ignore[reportMissingImports]

    options = _told(method, "b1", "weight_decay")
    if method.preconditioner_rate is not None:
        options["preconditioner_lr"] = method.preconditioner_rate
    rule = kron(rate, **options)
    # Its update refuses arguments that it does not know.
    return optax.GradientTransformation(
        rule.init, lambda updates, state, params=None: rule.update(updates, state, params)
    )


def evaluated(method: Method, params: Any, state: Any) -> Any:
    """The parameters that a method hands over; gradients may be taken elsewhere."""
    if method.name == "schedule_free_adamw":
        return optax.contrib.schedule_free_eval_params(state, params)
    return params
