"""Transforms that solve with a curvature they keep, and that can precondition SPFB with it."""

from collections.abc import Callable
from typing import Any

import optax

__all__ = ["CurvatureTransform", "curvature_transform"]


class CurvatureTransform(optax.GradientTransformationExtraArgs):
    """An optax transform from gradients to solutions, with the solve apart from the update.

    Attributes:
      remember: from parameters to what is remembered of batches before the first: the part of the state that matters.
      prepare: from that, parameters, a damping to add, and the keyword arguments of `update`, to what is remembered
        once the batch has entered, and the function from a gradient to its solution: linear, symmetric, positive.
    """

    remember: Callable[[Any], Any]
    prepare: Callable[..., tuple[Any, Callable[[Any], Any]]]


def curvature_transform(init: Callable, update: Callable, remember: Callable, prepare: Callable) -> CurvatureTransform:
    """A transform made of its four functions."""
    transform = CurvatureTransform(init, update)
    transform.remember, transform.prepare = remember, prepare
    return transform
