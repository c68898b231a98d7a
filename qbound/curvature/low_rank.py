"""A low-rank curvature with a diagonal: what the low-rank bounds of [WC20] are made of."""

from collections.abc import Callable
from typing import final

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import cho_factor, cho_solve
from jaxtyping import Array, Float

from qbound import checks
from qbound.curvature.base import Curvature
from qbound.linalg.dense import add_to_diagonal, safe_sqrt, times
from qbound.records import record, static
from qbound.types import Parameters, Scalar


@final
@record
class LowRank(Curvature):
    """C = V'S V + D. Products are O(k d), solves O(k^2 d + k^3); only `dense` and `factor` form d x d arrays.

    Nothing relies on the rows of the basis being orthogonal; those that belong to scales of 0 may be anything.
    """

    basis: Float[Array, "k d"]  # V, rows of length 1, orthogonal up to rounding: in float32 to about 1e-4
    scales: Float[Array, " k"]  # the diagonal of S
    diagonal: Float[Array, " d"]  # that of D
    parameters: tuple | None = static(default=None)  # structure, shapes and dtypes of its vectors; None: one array

    def domain(self):
        checks.unbatched("curvature", self.basis, 2)
        if self.parameters is None:
            return jax.ShapeDtypeStruct(self.diagonal.shape, self.diagonal.dtype)
        structure, leaves = self.parameters
        return structure.unflatten(leaves)

    def _mv(self, v):
        v, unravel = ravel_pytree(v)
        return unravel(self._product(v))

    def _quadratic(self, v):
        v, _ = ravel_pytree(v)
        return jnp.sum(self.scales * times(self.basis, v) ** 2) + jnp.sum(self.diagonal * v**2)

    def _dense(self):
        return times(self.basis.T * self.scales[None, :], self.basis) + jnp.diag(self.diagonal)

    def _factor(self):
        rows: Array = safe_sqrt(self.scales)[:, None] * self.basis
        return jnp.concatenate([rows, jnp.diag(safe_sqrt(self.diagonal))])

    def _solve(self, g, damping):
        return self.solver(damping)(g)

    def solver(self, damping: Scalar) -> Callable[[Parameters], Parameters]:
        """The function g -> (C + damping I)^-1 g, with what does not depend on g computed once.

        By Woodbury's identity in a form without S^-1, which does not exist while fewer than k directions were seen.
        With E = D + c I and B = S^(1/2) V E^(-1/2): s = E^(-1/2) (I - B'(I + BB')^-1 B) E^(-1/2) g. Where S is far
        above E, the difference leaves few digits of what lies in the span of V; the residual is solved for once more.
        """
        c = jnp.asarray(checks.positive("damping", damping), self.diagonal.dtype)
        root = jnp.sqrt(1 / (self.diagonal + c))
        b: Array = safe_sqrt(self.scales)[:, None] * self.basis * root[None, :]
        cholesky = cho_factor(add_to_diagonal(times(b, b.T), 1.0))

        def woodbury(g):
            y = root * g
            return root * (y - times(b.T, cho_solve(cholesky, times(b, y))))

        def solve(g):
            g, unravel = ravel_pytree(self._vector("g", g))
            s = woodbury(g)
            return unravel(s + woodbury(g - self._product(s) - c * s))

        return solve

    def _product(self, v):
        return times(self.basis.T, self.scales * times(self.basis, v)) + self.diagonal * v
