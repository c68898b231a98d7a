"""The methods that are compared, each a transform built from numbers that a compiled program takes as arguments.

A whole grid of learning rates, schedules, penalties and dampings is then one program.
"""

import dataclasses
import warnings
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import qbound
from experiments.fields import Checked, Count
from qbound import trees
from qbound.curvature.model import mean_curvature
from qbound.families.low_rank.bound import Method as Construction
from qbound.linalg.cg import iterate

__all__ = ["NAMES", "SCHEDULES", "Construction", "Method", "Numbers", "first_state", "numbers", "optimizer"]

Name = Literal["sgd", "momentum", "adam", "spfb", "lspfb", "kspfb", "newton"]
Schedule = Literal["constant", "inverse", "cosine"]

NAMES: tuple[Name, ...] = ("sgd", "momentum", "adam", "spfb", "lspfb", "kspfb", "newton")
SCHEDULES: tuple[Schedule, ...] = ("constant", "inverse", "cosine")
MOMENTUM = 0.9
CG_STEPS, CG_TOLERANCE = 10, 1e-3  # the defaults of qbound.spfb, for the same step with the exact Hessian


@dataclasses.dataclass(frozen=True)
class Method(Checked):
    """What a program is compiled for."""

    name: Name
    rank: Count | None = None  # of lspfb
    construction: Construction = "frequent_directions"  # of lspfb
    window: Count | None = None  # of spfb

    def __post_init__(self):
        super().__post_init__()
        if (self.rank is not None) != (self.name == "lspfb"):
            raise ValueError(f"rank: expected a number for lspfb and none for others; got {self.rank} for {self.name}")
        if self.window is not None and self.name != "spfb":
            raise ValueError(f"window: expected None for {self.name}; got {self.window}")


class Numbers(NamedTuple):
    """What a program is called with; scalars, or arrays of one."""

    learning_rate: Any
    schedule: Any  # its place among SCHEDULES
    steps: Any  # after which the schedule has run its course
    l2: Any
    damping: Any


def numbers(learning_rate: float, schedule: Schedule, steps: int, l2: float, damping: float) -> Numbers:
    """As arrays, so that no program is compiled for one value."""
    floats = (jnp.float32(x) for x in (steps, l2, damping))
    return Numbers(jnp.float32(learning_rate), jnp.int32(SCHEDULES.index(schedule)), *floats)


def _rate(setting: Numbers):
    """The learning rate eta of step t: eta_0, eta_0/(1 + 10 t/T), or eta_0 (1 + cos(pi t/T))/2."""

    def at(step):
        t = jnp.minimum(step / setting.steps, 1.0)
        shapes = jnp.stack([jnp.ones_like(t), 1 / (1 + 10 * t), (1 + jnp.cos(jnp.pi * t)) / 2])
        return setting.learning_rate * shapes[setting.schedule]

    return at


def optimizer(method: Method, setting: Numbers, width: int) -> optax.GradientTransformationExtraArgs:
    """For logistic regression on `width` inputs. Gradients are those of the mean loss, without the l2 term."""
    rate, model = _rate(setting), qbound.linear_logits
    damped = {"l2": setting.l2, "damping": setting.damping}
    match method.name:
        case "sgd":
            return _with_l2(setting, optax.sgd(rate))
        case "momentum":
            return _with_l2(setting, optax.sgd(rate, momentum=MOMENTUM))
        case "adam":
            return _with_l2(setting, optax.adam(rate))
        case "spfb":
            like = None if method.window is None else jax.ShapeDtypeStruct((width,), jnp.float32)
            return qbound.spfb(rate, model, window=method.window, inputs_like=like, **damped)
        case "lspfb":
            assert method.rank is not None
            return qbound.lspfb(rate, model, rank=method.rank, method=method.construction, **damped)
        case "kspfb":
            # The penalty is in the curvature; what is left to choose is the damping beside it, relative to its mean.
            return qbound.kspfb(rate, model, l2=setting.l2, relative_damping=setting.damping)
        case "newton":
            return optax.chain(_exact_hessian(setting), optax.scale_by_learning_rate(rate))


def first_state(method: Method, setting: Numbers, params: Any) -> Any:
    """The state before the first step, from parameters (width, classes)."""
    with warnings.catch_warnings():
        # The paper has k = 100 on Adult, which has fewer parameters than that.
        warnings.filterwarnings("ignore", message="rank: expected at most")
        return optimizer(method, setting, params.shape[0]).init(params)


def _with_l2(setting: Numbers, transform) -> optax.GradientTransformationExtraArgs:
    return optax.with_extra_args_support(optax.chain(optax.add_decayed_weights(setting.l2), transform))


def _exact_hessian(setting: Numbers) -> optax.GradientTransformationExtraArgs:
    """The direction of `qbound.spfb` with the exact Hessian of the batch in place of the curvature of the bound."""

    def update(updates, state, params=None, **extra):
        inputs = extra["inputs"]
        weights = jnp.ones(len(inputs), inputs.dtype)
        hessian = mean_curvature(qbound.linear_logits, params, inputs, weights, bound=qbound.second_order_expansion)
        c = setting.l2 + setting.damping
        gradient = jax.tree.map(lambda g, w: g + setting.l2 * w, updates, params)
        step, _ = iterate(
            lambda v: trees.add(hessian.mv(v), trees.scale(c, v)),
            gradient,
            max_steps=CG_STEPS,
            tolerance=CG_TOLERANCE,
        )
        return step, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
