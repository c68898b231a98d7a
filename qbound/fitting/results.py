"""How a run ended, what is carried from step to step, and what is reported."""

import enum
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int


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
        """The result in words."""
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


class Phase(enum.IntEnum):
    """Which phase of a fit an entry of its history belongs to."""

    START = 0
    STOCHASTIC = 1
    QUASI_NEWTON = 2
    NEWTON = 3


class NotConverged(RuntimeError):
    """A run that ended without reaching its tolerance; what it found is kept.

    Attributes:
      result: how it ended.
      params: the best parameters seen.
      info: the `MMInfo` of the run, or the `FitInfo` of the fit.
    """

    def __init__(self, result: Result, params: Any, info: Any, caller: str = "mm.run"):
        super().__init__(
            f"{caller}: {result.message}. Gradient norm {float(info.gradient_norm):.3g} after {int(info.steps)} steps. "
            "The parameters are in the attribute `params` of this error; throw=False returns them"
        )
        self.result = result
        self.params = params
        self.info = info


def raise_unless_converged(params: Any, info: Any, caller: str) -> None:
    """Raise `ValueError` for bad values and `NotConverged` for a run that did not reach its tolerance."""
    result = Result(int(info.result))
    if result.bad_input or result == Result.NOT_AFFINE:
        raise ValueError(result.message)
    if result != Result.CONVERGED:
        raise NotConverged(result, params, info, caller)


class MMState(NamedTuple):
    """What the next step needs.

    Attributes:
      params: the parameters, the best so far.
      logits: theirs, one row for each example.
      objective: the mean loss and the regulariser.
      gradient: of the objective.
      gradient_norm: its Euclidean length.
      newton: whether the next direction is Newton's, with `curvature="auto"`: at first, and when the local certificate
        has won.
      first_norm: the gradient norm at the start.
      least_norm: the least gradient norm so far; with Newton's steps, give or take a tenth.
      steps_since: steps since then.
      steps: steps taken.
      result: UNFINISHED, or a `Result` that says why there can be no further step.
    """

    params: Any
    logits: Float[Array, "b n"]
    objective: Float[Array, ""]
    gradient: Any
    gradient_norm: Float[Array, ""]
    newton: Bool[Array, ""]
    first_norm: Float[Array, ""]
    least_norm: Float[Array, ""]
    steps_since: Int[Array, ""]
    steps: Int[Array, ""]
    result: Int[Array, ""]


class MMInfo(NamedTuple):
    """How a step went, or a run: then sums and last values, and the steps in `history`.

    Attributes:
      objective: at the new parameters, as computed: logits of size |h| leave it no more digits than |h| has.
      gradient_norm: there.
      certificate: which one won, a `Certificate`; NONE if no step was taken. Of a run: that of its last step.
      certified_decrease: of the objective, at least; of a run: by all steps.
      actual_decrease: of the objective; of a run: by all steps.
      step_length: what the direction was multiplied by; 0 if no step was taken.
      cg_steps: iterations of CG; 0 for a direct solver. Of a run: of all steps.
      passes: over the data, one for a product with it and one with its transpose. A gradient counts as 1, and so does
        an iteration of CG; a step whose rounding matters, half a pass more. Of a run: and of the first gradient.
      steps: taken so far.
      result: a `Result`.
      history: of a run, the infos of its steps, with an axis of steps; None for a step. Of a run inside `jax.jit` it
        has `max_steps` rows, zeros from `steps` on.
    """

    objective: Float[Array, "..."]
    gradient_norm: Float[Array, "..."]
    certificate: Int[Array, "..."]
    certified_decrease: Float[Array, "..."]
    actual_decrease: Float[Array, "..."]
    step_length: Float[Array, "..."]
    cg_steps: Int[Array, "..."]
    passes: Float[Array, "..."]
    steps: Int[Array, "..."]
    result: Int[Array, "..."]
    history: Any = None


class FitInfo(NamedTuple):
    """How a fit went: the fields of `MMInfo`, and two more. Numbers are those of NumPy.

    In `history` an entry is the end of the stochastic phase, a few quasi-Newton steps, or one certified step.

    Attributes:
      objective: at the parameters found.
      gradient_norm: the Euclidean length of the gradient there.
      certificate: of the last entry, a `Certificate`; NONE where nothing is certified.
      certified_decrease: what the objective was certified to fall by, by all certified steps.
      actual_decrease: what it fell by.
      step_length: what the last direction was multiplied by; 0 for an entry of several steps.
      cg_steps: iterations of CG, of all steps.
      passes: over the data, as `MMInfo` counts them.
      steps: steps and epochs taken.
      result: a `Result`.
      history: the same for every entry, with an axis of entries; sums are those of the entry alone.
      phase: of the last entry, a `Phase`.
      seconds: since the start of the fit; NaN for an entry of a compiled run, which has no clock.
    """

    objective: Any
    gradient_norm: Any
    certificate: Any = Certificate.NONE
    certified_decrease: Any = 0.0
    actual_decrease: Any = 0.0
    step_length: Any = 0.0
    cg_steps: Any = 0
    passes: Any = 1.0
    steps: Any = 0
    result: Any = Result.UNFINISHED
    history: Any = None
    phase: Any = Phase.START
    seconds: Any = 0.0
