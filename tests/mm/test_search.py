"""The root of an increasing function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.fitting.line import increasing_root

FUNCTIONS = {
    "line": (lambda x: 3 * x - 6.0, 2.0),
    "exponential": (lambda x: jnp.expm1(x) - 1e6, np.log1p(1e6)),
    "flat, then steep": (lambda x: x**9 - 1e-9, 0.1),
    "steep, then flat": (lambda x: jnp.tanh(50 * (x - 0.7)) + 0.1, 0.7 - np.arctanh(0.1) / 50),
    "overflows above": (lambda x: jnp.exp(jnp.exp(x)) - 1e4, np.log(np.log(1e4))),
    "far away": (lambda x: x - 1e7, 1e7),
    "near zero": (lambda x: x - 1e-7, 1e-7),
}


@pytest.mark.parametrize("known", [True, False], ids=["upper limit", "no upper limit"])
@pytest.mark.parametrize("first", [1e-3, 1.0, 60.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_root_is_found(name, first, known):
    function, root = FUNCTIONS[name]

    @jax.jit
    def solve(first, high):
        value_and_slope = jax.value_and_grad(function)
        return increasing_root(
            value_and_slope,
            first,
            low=jnp.zeros(()),
            high=high,
            tolerance=1e-9 * jnp.abs(function(0.0)),
            max_trials=100,
        )

    first = min(first, 2 * root) if known else first
    x, trials = solve(jnp.asarray(first), jnp.asarray(2 * root if known else np.inf))
    assert x == pytest.approx(root, rel=1e-6)
    assert 0 < trials < 100


def test_search_ends_at_its_limit():
    x, trials = increasing_root(
        lambda x: (x - 2.0, jnp.ones_like(x) * 100),
        jnp.asarray(1.0),
        low=jnp.zeros(()),
        high=jnp.asarray(np.inf),
        tolerance=jnp.asarray(0.0),
        max_trials=7,
    )
    assert trials == 7
    assert 1 < x < 2


def test_first_guess_that_is_right_takes_one_trial():
    x, trials = increasing_root(
        lambda x: (x - 2.0, jnp.ones_like(x)),
        jnp.asarray(2.0),
        low=jnp.zeros(()),
        high=jnp.asarray(np.inf),
        tolerance=jnp.asarray(1e-6),
        max_trials=7,
    )
    assert (x, trials) == (2.0, 1)


def test_trials_stay_between_what_is_known_to_lie_below_and_above():
    """Where the function is flat, Newton's step would leave that range by far."""
    tried = []

    def function(x):
        tried.append(float(x))
        return jnp.tanh(50 * (x - 0.7)) + 0.1, 50 / jnp.cosh(50 * (x - 0.7)) ** 2

    with jax.disable_jit():
        x, _ = increasing_root(
            function,
            jnp.asarray(60.0),
            low=jnp.asarray(0.1),
            high=jnp.asarray(90.0),
            tolerance=jnp.asarray(1e-9),
            max_trials=100,
        )
    assert x == pytest.approx(0.7 - np.arctanh(0.1) / 50, rel=1e-6)
    assert len(tried) > 3
    low, high = 0.1, 90.0
    for trial in tried:
        assert low <= trial <= high
        low, high = (trial, high) if trial < x else (low, trial)
