"""What is carried from step to step, and what is reported."""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

__all__ = ["MMInfo", "MMState"]


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
