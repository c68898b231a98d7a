"""Small softmax problems, and the method as jitted functions that are compiled once for all tests."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import qbound
from qbound import mm
from tests import reference


class Problem(NamedTuple):
    params: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray

    def cast(self, dtype):
        return Problem(jnp.asarray(self.params, dtype), jnp.asarray(self.inputs, dtype), jnp.asarray(self.labels))


def random(b=30, d=4, n=3, seed=0, start=1.0, scale=1.0):
    """Inputs of size `scale`, and parameters of size `start`. Every shape is compiled anew, so there should be few."""
    rng = np.random.default_rng(seed)
    inputs = scale * rng.normal(size=(b, d))
    return Problem(start * rng.normal(size=(d, n)), inputs, rng.integers(n, size=b))


def one_hot(labels, n):
    return np.eye(n)[np.asarray(labels)]


def objective(params, inputs, targets, l2, weights=None):
    """In NumPy and float64, of a linear model."""
    params, inputs = np.asarray(params, np.float64), np.asarray(inputs, np.float64)
    features = reference.linear_features(inputs, params.shape[1])
    return reference.mean_objective(params.ravel(), features, targets, l2, weights)


@functools.partial(jax.jit, static_argnames=("steps", "curvature", "search", "solver", "max_cg_steps", "order"))
def trajectory(
    params,
    inputs,
    labels,
    l2,
    eta=1.0,
    cg_tolerance=None,
    *,
    steps,
    curvature="auto",
    search=False,
    solver="cg",
    max_cg_steps=200,
    order="max_first",
):
    """All iterates, the first among them, and the info of every step."""
    options = {"curvature": curvature, "solver": solver, "max_cg_steps": max_cg_steps, "order": order}
    options |= {"l2": l2, "cg_tolerance": cg_tolerance, "eta": "search" if search else eta}
    first = mm.init(qbound.linear_logits, params, inputs, labels, l2=l2)

    def step(state, _):
        state, info = mm.step(qbound.linear_logits, state, inputs, labels, **options)
        return state, (state.params, info)

    _, (iterates, infos) = jax.lax.scan(step, first, None, length=steps)
    return jnp.concatenate([first.params[None], iterates]), infos
