"""Transforms that solve with a curvature they keep, and that can precondition SPFB with it."""

from collections.abc import Callable
from typing import Any

import optax

__all__ = ["CurvatureTransform", "curvature_transform"]


class CurvatureTransform(optax.GradientTransformationExtraArgs):
    """An optax transform from gradients to solutions, with the solve apart from the update.

    Attributes:
      prepare: from state, parameters, a damping to add, and the keyword arguments of `update`, to the state with the
        batch entered and the function from a gradient to its solution: linear, symmetric and positive definite.
    """

    prepare: Callable[..., tuple[Any, Callable[[Any], Any]]]


def curvature_transform(init: Callable, update: Callable, prepare: Callable) -> CurvatureTransform:
    """A transform made of its three functions."""
    transform = CurvatureTransform(init, update)
    transform.prepare = prepare
    return transform
