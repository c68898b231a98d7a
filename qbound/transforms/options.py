"""What the transforms are told when they are built, and what they are given in every update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from qbound import batches, checks, trees
from qbound.bounds import log_partition_bound
from qbound.curvature import Curvature
from qbound.models import linear_logits
from qbound.transforms.preconditioner import CurvatureTransform
from qbound.transforms.sketch import SketchOptions
from qbound.transforms.solvers import SOLVERS, Solver
from qbound.types import Order, Scalar, working_dtype

__all__ = [
    "SpfbOptions",
    "as_number",
    "check_some_damping",
    "checked_params",
    "given",
    "is_narrow",
    "parameter_dtype",
    "widen_floats",
]


@dataclasses.dataclass(frozen=True)
class SpfbOptions:
    """The arguments of `qbound.spfb` and, with `sketch`, of `qbound.lspfb`: Python values an update closes over.

    A `learning_rate` of None, as for `qbound.scale_by_spfb`, is 1 and unknown: steps are not limited.
    """

    learning_rate: optax.ScalarOrSchedule | None
    logits_fn: Callable[[Any, Any], Array]
    l2: Scalar
    damping: Scalar
    solver: Solver
    order: Order
    max_steps: int
    tolerance: Scalar
    window: int | None
    inputs_like: Any
    inputs_axes: Any
    precondition: CurvatureTransform | Callable[[Any], Any] | None
    warm_start: bool
    microbatch_size: int | None
    adaptive_damping: Scalar | None
    sketch: SketchOptions | None = None

    def __post_init__(self):
        checks.function("logits_fn", self.logits_fn)
        checks.choice("solver", self.solver, SOLVERS)
        checks.choice("order", self.order, ("descending", "max_first", "given"))
        object.__setattr__(self, "max_steps", checks.integer("max_steps", self.max_steps))
        checks.nonnegative("tolerance", self.tolerance)
        if self.window is not None:
            object.__setattr__(self, "window", checks.integer("window", self.window))
        if (self.window is None) != (self.inputs_like is None):
            raise ValueError(
                "inputs_like: expected one example's inputs, or their shapes, together with window and not without it; "
                f"got window={self.window!r} and {'no' if self.inputs_like is None else 'an'} inputs_like"
            )
        if self.precondition is not None:
            if not isinstance(self.precondition, CurvatureTransform) and not callable(self.precondition):
                raise TypeError(
                    "precondition: expected a function, or a transform made by scale_by_kspfb or scale_by_lspfb; got "
                    f"{self.precondition!r}"
                )
            if self.solver in ("dense", "woodbury"):
                raise ValueError(f'precondition: expected None with solver={self.solver!r}, because only "cg" uses it')
        if self.microbatch_size is not None:
            object.__setattr__(self, "microbatch_size", checks.integer("microbatch_size", self.microbatch_size))
            if self.solver == "woodbury":
                raise ValueError('microbatch_size: expected None with solver="woodbury", which needs the whole batch')
        if self.adaptive_damping is not None:
            checks.positive("adaptive_damping", self.adaptive_damping)

    def curvature(self, params: Any, inputs: Any, weights: Array) -> Curvature:
        """Of the bound at `params`, the mean over a batch."""
        return batches.mean_curvature(
            self.logits_fn,
            params,
            inputs,
            weights,
            bound=functools.partial(log_partition_bound, order=self.order),
            axes=self.inputs_axes,
            microbatch_size=self.microbatch_size,
        )

    def sketched_curvature(self, params: Any, inputs: Any, weights: Array) -> Curvature:
        """The same, in the form that low-rank methods take rows from."""
        return batches.curvature_by_example(
            self.logits_fn,
            params,
            inputs,
            weights,
            bound=functools.partial(log_partition_bound, order=self.order),
            axes=self.inputs_axes,
        )

    def widened(self) -> "SpfbOptions":
        """With a model that is handed its inputs in float32 at least, as it is its parameters."""

        def model(params, inputs):
            return self.logits_fn(params, jax.tree.map(widen_floats, inputs))

        known = self.logits_fn is linear_logits
        return self if known else dataclasses.replace(self, logits_fn=model)

    def weights(self, name: str, weights: Any, params: Any, inputs: Any) -> Array:
        """One for each row of logits."""
        shape = batches.logits_shape(self.logits_fn, params, inputs)
        return batches.full_weights(name, weights, shape[:-1], parameter_dtype(params))


def check_some_damping(l2: Scalar, damping: Scalar) -> None:
    """Raise if both are known to be 0."""
    checks.nonnegative("l2", l2)
    checks.nonnegative("damping", damping)
    if checks.is_number(l2) and checks.is_number(damping) and l2 + damping == 0:
        raise ValueError(
            "damping: expected l2 + damping > 0, because the curvature is singular; got l2=0 and damping=0"
        )


def is_narrow(params: Any) -> bool:
    """Whether any of the parameters is in less than float32."""
    return any(jnp.asarray(leaf).dtype.itemsize < 4 for leaf in jax.tree.leaves(params))


def widen_floats(leaf: Any) -> Any:
    """A float array in float32 at least; anything else as it is."""
    narrow = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(working_dtype(leaf)) if narrow else leaf


def given(name: str, value: Any, expected: str) -> Any:
    """An argument of `update` that must not be None."""
    if value is None:
        raise ValueError(f"{name}: expected {expected}; got None. Call update(grads, state, params, {name}=...)")
    return value


def checked_params(params: Any) -> Any:
    """In float32 at least."""

    def is_masked(leaf):
        return isinstance(leaf, optax.MaskedNode)

    leaves = jax.tree.leaves(params, is_leaf=is_masked)
    if any(map(is_masked, leaves)):
        raise ValueError(
            "params: expected every array that logits_fn needs; got parameters that optax.masked or optax.partition "
            "has hidden. To train a part of them, hand over that part only: logits_fn(trainable, inputs), with the "
            "frozen part inside inputs (inputs_axes marks it as shared)"
        )
    return trees.widen(checks.float_tree("params", params))


def parameter_dtype(params: Any) -> Any:
    """In which curvature and solution are computed."""
    return working_dtype(*jax.tree.leaves(params))


def as_number(number: Scalar, params: Any) -> Array:
    """A scalar in that dtype."""
    return jnp.asarray(number, parameter_dtype(params))
