r"""The objective along a line of parameters: what certifies a step, and how long it should be.

Along theta - eta s the logits are h - eta u with u = J s, because they are affine in the parameters. Everything here
then costs O(b n), without a pass over the data. With a = g's, c = s' l2 s, p_j the softmax of h_j, and for example j

    e_j = u_j - p_j.u_j      v_j = sum_k p_jk e_jk^2 = u_j'H_j u_j      r_j = max_k(-e_jk)

the objective falls by

    eta a - eta^2 c/2 - sum_j w_j R_j(eta),     R_j(eta) = log sum_k p_jk exp(-eta e_jk) >= 0

and two upper bounds of R_j certify a part of that: eta^2 u_j'M_j u_j / 2 with M_j the curvature of a global bound, and
v_j (exp(eta r_j) - eta r_j - 1)/r_j^2, which tends to the exact second-order term as eta r_j goes to 0. R, v and r are
those of the softmax; another family has its own (`qbound.families.base.LineRows`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qbound.families.base import LogPartition, local_factor
from qbound.records import record
from qbound.trees import weighted_sum
from qbound.types import largest_exponent

# A certified decrease is reduced by this many units of rounding of eta a, so that it holds in floating point too.
_ROUNDING = 32
# The certified step ends where the slope of the upper bound is this part of the slope at the start. A rough end would
# stand in the way of fast convergence, and a trial costs O(b) only.
_ROOT_TOLERANCE = 1e-4
# The line search ends where the slope of the objective is this part of the slope at the start. A trial costs O(b n).
_SEARCH_TOLERANCE = 1e-2
_MAX_TRIALS = 30
# While no upper limit of a root is known, one trial is at most this many times the one before.
_GROWTH = 10.0
# Above this part of Newton's decrease the local certificate is taken without asking the global bound.
_ENOUGH = 0.5
# Above this part there is nothing left to search for along the line.
_NEAR = 0.97


@record
class Line:
    """The objective along theta - eta s."""

    rows: Any  # `LineRows`, or an object with its methods `remainder`, `moments` and `quadratic`
    weights: Float[Array, " b"]
    v: Float[Array, " b"]
    r: Float[Array, " b"]
    a: Float[Array, ""]
    c: Float[Array, ""]

    def newton_decrease(self) -> Float[Array, ""]:
        """a^2/(2 V), V = sum_j w_j v_j + c: by the second-order expansion; neither certificate exceeds it."""
        return self.a**2 / (2 * (weighted_sum(self.weights, self.v) + self.c))

    def decrease(self, eta: Float[Array, ""]) -> Float[Array, ""]:
        """The decrease of the objective from 0 to eta.

        Computed from R, whose terms are all positive, and not from two values of the objective: near the optimum their
        difference is smaller than their rounding errors.
        """
        return eta * self.a - eta**2 * self.c / 2 - self.rows.remainder(eta)

    def slope(self, eta: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The derivative of the objective by eta, -a at 0, and its own derivative."""
        mean, variance = self.rows.moments(eta)
        return -self.a + eta * self.c - mean, self.c + variance

    def search(self, first: Float[Array, ""]) -> Float[Array, ""]:
        """The eta at which the objective is least, by its slope, from a first guess."""
        high = jnp.where(self.c > 0, self.a / self.c, jnp.inf)  # the slope is at least eta c - a
        first, low = jnp.minimum(first, high), jnp.zeros_like(first)
        return increasing_root(self.slope, first, low=low, high=high, tolerance=_SEARCH_TOLERANCE * self.a)[0]

    def certified(self, eta: Float[Array, ""], excess: Float[Array, ""]) -> Float[Array, ""]:
        """The decrease eta a - eta^2 c/2 less an upper bound `excess` of R; 0 if nothing is certified."""
        rounding = _ROUNDING * jnp.finfo(eta.dtype).eps * eta * self.a
        decrease = eta * self.a - eta**2 * self.c / 2 - excess - rounding
        return jnp.where(jnp.isfinite(decrease), jnp.maximum(decrease, 0), 0)


def make_line(
    family: LogPartition,
    weights: Float[Array, " b"],
    logits: Float[Array, "n b"],
    u: Float[Array, "n b"],
    a: Float[Array, ""],
    c: Float[Array, ""],
) -> Line:
    """The line through logits, with their displacement u, labels first."""
    rows = family.line(weights, logits, u)
    return Line(rows=rows, weights=weights, v=rows.variances(), r=rows.radii(), a=a, c=c)


def certified_by_bound(line: Line, quadratic: Array, eta: Array) -> tuple[Array, Array]:
    """The step to `eta` times the minimum of a global bound, and the decrease it certifies.

    Args:
      line: along s.
      quadratic: sum_j w_j u_j'M_j u_j.
      eta: in (0, 2); the decrease is eta (1 - eta/2) a^2/(quadratic + c).
    """
    step = eta * line.a / (quadratic + line.c)
    return step, line.certified(step, step**2 * quadratic / 2)


def certified_locally(line: Line) -> tuple[Array, Array]:
    """The best step by the local certificate, and the decrease it certifies.

    The upper bound of the objective is convex in eta, and so is its slope -a + c eta + sum_j w_j v_j (exp(eta r_j) -
    1)/r_j. It is zero between log(1 + r a/V)/r with r the largest and with r the mean of all radii, that of c being 0;
    V = sum_j w_j v_j + c. From the right, Newton's method goes there without a detour.
    """
    v, r = line.v, line.r

    def mean(values):
        return weighted_sum(line.weights, values)

    total = mean(v) + line.c
    newton = line.a / total
    largest = jnp.max(r)
    limit = largest_exponent(v.dtype)

    def slope(eta):
        x = eta * r
        excess = jnp.expm1(x)
        # (e^x - 1)/x, 1 at 0.
        divisor: Array = jnp.where(x == 0, 1, x)  # pyright: ignore[reportAssignmentType]
        growth = jnp.where(x == 0, 1, excess / divisor)
        value = -line.a + eta * line.c + eta * mean(v * growth)
        value = jnp.where(eta * largest > limit, jnp.inf, value)
        return jnp.asarray(value), line.c + mean(v * (1 + excess))

    def with_one_radius(r):
        """log(1 + r a/V)/r, a/V at 0."""
        positive = r * newton > 0
        divisor: Array = jnp.where(positive, r, 1)  # pyright: ignore[reportAssignmentType]
        return jnp.where(positive, jnp.log1p(r * newton) / divisor, newton)

    # (exp(eta r) - 1)/r is convex in r, so the mean of the r_j, weighted by how much they count, gives too long a step.
    average = mean(v * r) / total
    low, high = with_one_radius(largest), with_one_radius(average)
    low = jnp.minimum(low, high)
    eta, _ = increasing_root(slope, high, low=low, high=high, tolerance=_ROOT_TOLERANCE * line.a)
    excess = eta**2 * mean(v * local_factor(eta * r)) / 2
    return eta, line.certified(eta, jnp.where(eta * largest > limit, jnp.inf, excess))


class _Trial(NamedTuple):
    trials: Int[Array, ""]
    x: Float[Array, ""]
    value: Float[Array, ""]
    low: Float[Array, ""]  # the function is not positive here
    high: Float[Array, ""]  # the function is not negative here
    next: Float[Array, ""]


def increasing_root(
    function: Callable[[Array], tuple[Array, Array]],
    first: Float[Array, ""],
    *,
    low: Float[Array, ""],
    high: Float[Array, ""],
    tolerance: Float[Array, ""],
    max_trials: int = _MAX_TRIALS,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """The root x > 0 of an increasing function, by Newton's method kept between known limits.

    Args:
      function: x -> f(x) and its slope; infinite or NaN counts as positive.
      first: the first trial.
      low: a number >= 0 at or below the root.
      high: a number at or above the root; inf if none is known.
      tolerance: the search ends where |f(x)| is at most this.
      max_trials: the most values of f to take.

    Returns:
      The last trial, and how many there were.
    """

    def trial(state: _Trial) -> _Trial:
        x = state.next
        value, slope = function(x)
        value = jnp.where(jnp.isnan(value), jnp.inf, value)
        low = jnp.where(value <= 0, x, state.low)
        high = jnp.where(value >= 0, x, state.high)
        newton = x - value / slope
        # The middle by ratio where both ends are above 0: a root may be many times smaller than its upper limit.
        middle = jnp.where(low > 0, jnp.sqrt(low) * jnp.sqrt(high), high / 2)
        middle = jnp.where(jnp.isfinite(high), middle, _GROWTH * x)
        inside = (newton > low) & (newton < high) & (newton <= _GROWTH * x)
        return _Trial(state.trials + 1, x, value, low, high, jnp.where(inside, newton, middle))

    def unfinished(state: _Trial):
        return (state.trials < max_trials) & ~(jnp.abs(state.value) <= tolerance)

    start = _Trial(jnp.zeros((), jnp.int32), first, jnp.full_like(first, jnp.inf), low, high, first)
    last = jax.lax.while_loop(unfinished, trial, start)
    return last.x, last.trials


class StepLength(NamedTuple):
    """How far to go along a direction.

    Attributes:
      length: what to multiply the direction by.
      certified: what the objective is certified to fall by.
      actual: what the objective falls by.
      local: whether the local certificate won.
    """

    length: Float[Array, ""]
    certified: Float[Array, ""]
    actual: Float[Array, ""]
    local: Bool[Array, ""]


def step_length(line: Line, *, is_local: bool, search: bool, eta: Float[Array, ""]) -> StepLength:
    """The length of a step: by the better of two certificates, or further by a line search.

    Args:
      line: along s.
      is_local: whether the local certificate may win.
      search: whether to look for the minimum along the line.
      eta: in (0, 2), how many times as far as its minimum the step by the global bound goes.
    """

    def by_bound():
        return *certified_by_bound(line, line.rows.quadratic(), eta), jnp.array(False)

    def by_both():
        bound_length, bound_certified, _ = by_bound()
        local = local_certified >= bound_certified
        return jnp.where(local, local_length, bound_length), jnp.maximum(local_certified, bound_certified), local

    if is_local:
        local_length, local_certified = certified_locally(line)
        # Nothing certifies more than Newton's decrease.
        part = local_certified / line.newton_decrease()
        alone = (local_length, local_certified, jnp.array(True))
        length, certified, local = jax.lax.cond(part > _ENOUGH, lambda: alone, by_both)
        # Close to Newton's step there is nothing left to search for.
        searched = jnp.array(search) & (part < _NEAR)
    else:
        length, certified, local = by_bound()
        searched = jnp.array(search)
    found = jax.lax.cond(searched, line.search, lambda length: length, length) if search else length

    # A search that rounding has led astray is not followed. In a loop, so that the decrease is compiled once.
    def astray(tried):
        trials, eta, actual = tried
        return (trials == 0) | ((trials == 1) & ~(actual >= certified) & (eta != length))

    def measured(tried):
        trials, _, _ = tried
        eta = jnp.where(trials == 0, found, length)
        return trials + 1, eta, line.decrease(eta)

    _, found, actual = jax.lax.while_loop(astray, measured, (jnp.zeros((), jnp.int32), found, jnp.zeros_like(found)))
    return StepLength(found, certified, actual, local)
