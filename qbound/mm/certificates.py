r"""What is known of the objective along a line of parameters, from the logits alone.

Along theta - eta s the logits are h - eta u with u = J s, because they are affine in the parameters. Everything here
then costs O(b n), without a pass over the data. With a = g's, c = s' l2 s, p_j the softmax of h_j, and for example j

    e_j = u_j - p_j.u_j      v_j = sum_k p_jk e_jk^2 = u_j'H_j u_j      r_j = max_k(-e_jk)

the objective falls by

    eta a - eta^2 c/2 - sum_j w_j R_j(eta),     R_j(eta) = log sum_k p_jk exp(-eta e_jk) >= 0

and two upper bounds of R_j certify a part of that: eta^2 u_j'M_j u_j / 2 with M_j the curvature of a global bound, and
v_j (exp(eta r_j) - eta r_j - 1)/r_j^2, which tends to the exact second-order term as eta r_j goes to 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from qbound.bounds.weights import local_factor
from qbound.mm.problem import Problem
from qbound.mm.search import increasing_root
from qbound.records import record

__all__ = ["Line", "certified_by_bound", "certified_locally", "make_line"]

# A certified decrease is reduced by so many units of rounding of eta a, to hold in floating point too.
_ROUNDING = 32
# The root that gives the longest certified step: at 1 % of the slope, the decrease is within 1e-4 of the best.
_ROOT_TOLERANCE, _ROOT_TRIALS = 1e-2, 30
# The line search: where the slope is so small a part of that at the start.
_SEARCH_TOLERANCE, _SEARCH_TRIALS = 1e-3, 30


@record
class Line:
    """The objective along theta - eta s."""

    problem: Problem
    log_p: Float[Array, "b n"]
    p: Float[Array, "b n"]
    e: Float[Array, "b n"]  # 0 where a label is removed
    removed: Bool[Array, "b n"]
    a: Float[Array, ""]
    c: Float[Array, ""]

    def decrease(self, eta: Float[Array, ""]) -> Float[Array, ""]:
        """Of the objective, from 0 to eta.

        Computed from R, whose terms are all positive, and not from two values of the objective: near the optimum their
        difference is smaller than their rounding errors.
        """
        x, near, tilted = self._at(eta)
        # log(1 + sum_k p_k (e^x_k - x_k - 1)), since sum_k p_k x_k = 0.
        remainder = jnp.log1p(jnp.sum(self.p * x**2 * local_factor(x), axis=1) / 2)
        far = jax.nn.logsumexp(tilted, axis=1)
        return eta * self.a - eta**2 * self.c / 2 - self.problem.mean(jnp.where(near, remainder, far))

    def slope(self, eta: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The derivative of the objective by eta, -a at 0, and its own derivative."""
        x, near, tilted = self._at(eta)
        # p_k (e^x_k - 1): its sum with e_k is of second order and keeps its digits, since p.e = 0.
        changes = self.p * jnp.expm1(x)
        total = 1 + jnp.sum(changes, axis=1)
        q = jnp.where(near[:, None], (self.p + changes) / total[:, None], jax.nn.softmax(tilted, axis=1))
        mean = jnp.where(near, jnp.sum(changes * self.e, axis=1) / total, jnp.sum(q * self.e, axis=1))
        square = jnp.sum(q * self.e**2, axis=1)
        first = -self.a + eta * self.c - self.problem.mean(mean)
        return first, self.c + self.problem.mean(square - mean**2)

    def _at(self, eta):
        """-eta e where that is small, 0 elsewhere; where it is small; and log p - eta e, which holds everywhere.

        A p that is too small for its dtype still counts once -eta e is large.
        """
        x = -eta * self.e
        near = jnp.max(x, axis=1) < 1
        small: Array = jnp.where(near[:, None], x, 0)  # pyright: ignore[reportAssignmentType]
        return small, near, self.log_p + x

    def search(self, first: Float[Array, ""]) -> Float[Array, ""]:
        """The eta at which the objective is least, by its slope, from a first guess."""
        high = jnp.where(self.c > 0, self.a / self.c, jnp.inf)  # the slope is at least eta c - a
        eta, _ = increasing_root(
            self.slope,
            jnp.minimum(first, high),
            low=jnp.zeros_like(first),
            high=high,
            tolerance=_SEARCH_TOLERANCE * self.a,
            max_trials=_SEARCH_TRIALS,
        )
        return eta

    def certified(self, eta: Float[Array, ""], excess: Float[Array, ""]) -> Float[Array, ""]:
        """Eta a less an upper bound of the rest; 0 if nothing is certified."""
        rounding = _ROUNDING * jnp.finfo(eta.dtype).eps * eta * self.a
        decrease = eta * self.a - eta**2 * self.c / 2 - excess - rounding
        return jnp.where(jnp.isfinite(decrease), jnp.maximum(decrease, 0), 0)


def make_line(problem: Problem, logits: Array, u: Array, a: Array, c: Array) -> Line:
    """From the logits and their displacement."""
    removed = logits == -jnp.inf
    log_p = jax.nn.log_softmax(logits, axis=1)
    p = jnp.exp(log_p)
    # Centred twice: what rounding leaves of a large constant in u is gone the second time.
    e = jnp.where(removed, 0, u)
    for _ in range(2):
        e = jnp.where(removed, 0, e - jnp.sum(p * e, axis=1, keepdims=True))
    return Line(problem=problem, log_p=log_p, p=p, e=e, removed=removed, a=a, c=c)


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

    The upper bound of the objective is convex in eta; its slope -a + c eta + sum_j w_j v_j (exp(eta r_j) - 1)/r_j is
    zero between log(1 + r a/V)/r with r the largest r_j and the Newton step a/V, V = sum_j w_j v_j + c.
    """
    v = jnp.sum(line.p * line.e**2, axis=1)
    r = jnp.max(jnp.where(line.removed, 0, -line.e), axis=1)
    r = jnp.where(line.problem.weights == 0, 0, r)
    mean, total = line.problem.mean, line.problem.mean(v) + line.c
    newton = line.a / total

    def slope(eta):
        x = eta * r
        # (e^x - 1)/x, 1 at 0.
        divisor: Array = jnp.where(x == 0, 1, x)  # pyright: ignore[reportAssignmentType]
        growth = jnp.where(x == 0, 1, jnp.expm1(x) / divisor)
        value = -line.a + eta * line.c + eta * mean(v * growth)
        value = jnp.where(jnp.max(x) > limit, jnp.inf, value)
        return jnp.asarray(value), line.c + mean(v * jnp.exp(x))

    # Beyond, a label whose p is too small for its dtype, and so missing from v, could matter.
    limit = -0.6 * jnp.log(jnp.finfo(v.dtype).tiny)
    largest = jnp.max(r)
    t = largest * newton
    lowest = jnp.where(t > 0, jnp.log1p(t) / jnp.where(largest > 0, largest, 1), newton)
    eta, _ = increasing_root(
        slope, lowest, low=lowest, high=newton, tolerance=_ROOT_TOLERANCE * line.a, max_trials=_ROOT_TRIALS
    )
    excess = eta**2 * mean(v * local_factor(eta * r)) / 2
    return eta, line.certified(eta, jnp.where(eta * largest > limit, jnp.inf, excess))
