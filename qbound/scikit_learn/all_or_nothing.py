"""Methods that change an estimator completely or not at all."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

__all__ = ["all_or_nothing"]

Estimator = TypeVar("Estimator")
Arguments = ParamSpec("Arguments")


def all_or_nothing(
    method: Callable[Concatenate[Estimator, Arguments], Estimator],
) -> Callable[Concatenate[Estimator, Arguments], Estimator]:
    """Let a method that returns its estimator work on a copy, whose attributes are taken over when it is done.

    An error, or Ctrl-C, leaves the estimator as it was: with the model of its last fit, whole, or without one. While
    the method runs, other threads predict with that model, too.
    """

    @functools.wraps(method)
    def whole(self: Estimator, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Estimator:
        copy = object.__new__(type(self))
        copy.__dict__ = self.__dict__.copy()
        method(copy, *args, **kwargs)
        # One statement, which no signal divides.
        self.__dict__ = copy.__dict__
        return self

    return whole
