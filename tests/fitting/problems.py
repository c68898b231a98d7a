"""One small problem, in NumPy and as the package takes it."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from qbound.fitting.objective import Data, LinearObjective, PassSizes
from qbound.models.inputs import DenseInputs
from tests import reference

# More than two of the smallest blocks, of 64 rows, and not a multiple of them.
B, N, D = 150, 4, 5
DEFAULTS = PassSizes()


class Problem(NamedTuple):
    """Examples, a penalty, parameters and a direction; `inputs` have a 1 at their end if there is an intercept."""

    x: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    l2: np.ndarray
    params: np.ndarray
    direction: np.ndarray

    def data(self, dtype=jnp.float64, sizes=DEFAULTS):
        arrays = jnp.asarray(self.labels), jnp.asarray(self.weights, dtype)
        return Data(DenseInputs(jnp.asarray(self.x, dtype)), *arrays, sizes)

    def arrays(self, dtype=jnp.float64, sizes=DEFAULTS):
        """As the functions of the package take them: data, l2, params."""
        return self.data(dtype, sizes), jnp.asarray(self.l2, dtype), jnp.asarray(self.params, dtype)

    def objective(self, dtype=jnp.float64, norm="largest", sizes=DEFAULTS):
        return LinearObjective(self.data(dtype, sizes), jnp.asarray(self.l2, dtype), norm)

    def logits(self):
        """At the parameters, and their displacement along the direction."""
        return self.inputs @ self.params.T, self.inputs @ self.direction.T


def problem(intercept=True, seed=0, b=B, n=N, d=D):
    """Some weights are 0, also in rows that the last block has in common with the one before."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(b, d)) * np.linspace(0.5, 2, d)
    truth = rng.normal(size=(n, d))
    labels = np.argmax(x @ truth.T + rng.gumbel(size=(b, n)), axis=1).astype(np.int32)
    weights = rng.uniform(0.2, 2, b)
    weights[rng.permutation(b)[: b // 5]] = 0
    weights[[0, b - 1, b - 30, b - 64]] = 0
    e = d + intercept
    l2 = np.full(e, 0.02)
    l2[d:] = 0
    params, direction = rng.normal(size=(2, n, e))
    inputs = reference.with_ones(x) if intercept else x
    return Problem(x, inputs, labels, weights / weights.sum(), l2, params, direction - direction.mean(0))
