"""How a run ended, and the error that says so."""

import enum
from typing import Any

__all__ = ["Certificate", "NotConverged", "Result"]


class Result(enum.IntEnum):
    """How a run ended; `MMInfo.result` is one of these numbers, and `message` says what it means."""

    CONVERGED = 0
    STEP_LIMIT = 1
    STALLED = 2
    NOT_AFFINE = 3
    NOT_FINITE = 4
    BAD_LABELS = 5
    BAD_WEIGHTS = 6
    BAD_L2 = 7
    BAD_OPTION = 8
    UNFINISHED = 9

    @property
    def message(self) -> str:
        """In words."""
        return _MESSAGES[self]

    @property
    def bad_input(self) -> bool:
        """Whether nothing could be done with what was given; the parameters are then those of the start."""
        return self in (
            Result.NOT_FINITE,
            Result.BAD_LABELS,
            Result.BAD_WEIGHTS,
            Result.BAD_L2,
            Result.BAD_OPTION,
        )


_MESSAGES = {
    Result.CONVERGED: "the gradient norm is within tolerance",
    Result.STEP_LIMIT: (
        "the gradient norm is above tolerance after max_steps steps; if CG took many, inputs of similar sizes or a "
        "preconditioner help"
    ),
    Result.STALLED: (
        "the gradient norm is above tolerance and no longer falls: the rounding errors of the dtype leave no more; a "
        "wider dtype, inputs scaled to similar sizes or a larger tolerance help"
    ),
    Result.NOT_AFFINE: (
        "logits_fn: expected logits that are affine in the parameters; got logits that differ from their "
        "linearisation. For other models there is qbound.spfb; an affine one may compute with too little precision"
    ),
    Result.NOT_FINITE: (
        "params, inputs: expected finite numbers; got an objective or a gradient at the start that is not finite: a "
        "NaN or an infinity among params or inputs, or an observed label removed by a logit of -inf"
    ),
    Result.BAD_LABELS: (
        "labels: expected integers from 0 to n - 1, or rows of n nonnegative probabilities that sum to 1; got others"
    ),
    Result.BAD_WEIGHTS: "example_weights: expected finite numbers >= 0, not all 0; got others",
    Result.BAD_L2: (
        "l2: expected a finite number > 0, or such numbers >= 0 for the leaves of params, not all 0; got others. "
        "Without a regulariser the optimum need not exist; where it does, a very small l2 finds it"
    ),
    Result.BAD_OPTION: "eta, tolerance, cg_tolerance: expected eta in (0, 2) and tolerances >= 0; got others",
    Result.UNFINISHED: "more steps can be taken",
}


class Certificate(enum.IntEnum):
    """What vouches for a step; `MMInfo.certificate` is one of these numbers."""

    NONE = 0
    BOUND = 1
    LOCAL = 2


class NotConverged(RuntimeError):
    """A run that ended without reaching its tolerance; what it found is kept.

    Attributes:
      result: how it ended.
      params: the best parameters seen.
      info: the `MMInfo` of the run.
    """

    def __init__(self, result: Result, params: Any, info: Any):
        super().__init__(
            f"mm.run: {result.message}. Gradient norm {float(info.gradient_norm):.3g} after {int(info.steps)} steps. "
            "The parameters are in the attribute `params` of this error; throw=False returns them"
        )
        self.result = result
        self.params = params
        self.info = info
