"""Levenberg and Marquardt's rule: which steps make the damping grow or shrink, and by how much."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.optimizers.damping import adapted, first_adaptation, remember

INITIAL = 0.01
_adapted, _remember = jax.jit(adapted), jax.jit(remember)


def first():
    return first_adaptation({"a": jnp.zeros(2)}, INITIAL, jnp.float64)


def after(ratios, rate=1.0, state=None):
    """The state after steps that kept these parts of their promise.

    Every step is one of length `rate` along (1, 0), for which the quadratic predicts a decrease of `rate` - `rate`^2/4.
    """
    state, params, value = first() if state is None else state, {"a": jnp.zeros(2)}, jnp.asarray(5.0)
    predicted = rate - rate**2 / 4
    for ratio in ratios:
        s = {"a": jnp.array([1.0, 0.0])}
        state = _remember(state, params, value, s, jnp.asarray(1.0), jnp.asarray(0.5))
        params = {"a": params["a"] - rate * s["a"]}
        value = value - ratio * predicted
        state = _adapted(state, params, value, INITIAL)
    return state


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize(("ratio", "factor"), [(-1.0, 2), (0.2, 2), (0.3, 1), (0.7, 1), (0.8, 1 / 1.5), (3.0, 1 / 1.5)])
def test_damping_grows_below_a_quarter_of_the_promise_and_shrinks_above_three_quarters(ratio, factor, rate):
    """Whatever the learning rate: what counts is where the parameters went."""
    for steps in (1, 3):
        state = after(steps * [ratio], rate)
        np.testing.assert_allclose(state.spfb_adaptive_damping, INITIAL * factor**steps)
        np.testing.assert_allclose(state.spfb_reduction_ratio, ratio)


def test_step_that_was_never_taken_is_not_judged():
    state = _remember(first(), {"a": jnp.zeros(2)}, jnp.asarray(5.0), {"a": jnp.zeros(2)}, jnp.zeros(()), jnp.zeros(()))
    same = _adapted(state, {"a": jnp.zeros(2)}, jnp.asarray(9.0), INITIAL)
    assert (same.spfb_adaptive_damping, same.spfb_reduction_ratio) == (INITIAL, 1)


def test_step_uphill_is_not_judged():
    """What follows in a chain may turn a step around: then the quadratic predicts no decrease to compare with."""
    state = after([2.0], rate=-1.0)
    assert (state.spfb_adaptive_damping, state.spfb_reduction_ratio) == (INITIAL, 1)


def test_damping_stays_within_a_million_times_its_first_value():
    np.testing.assert_allclose(after(25 * [-1.0]).spfb_adaptive_damping, 1e6 * INITIAL)
    np.testing.assert_allclose(after(40 * [1.0]).spfb_adaptive_damping, 1e-6 * INITIAL)


def test_decreases_are_averaged_over_about_ten_steps():
    """A single loss that stands out changes nothing; after some ten steps the old ones are forgotten."""
    np.testing.assert_allclose(after(30 * [1.0] + [-3.0]).spfb_reduction_ratio, 1 - 4 / 10, atol=0.05)
    settled = after(30 * [0.5])
    assert settled.spfb_adaptive_damping == INITIAL
    once = after(30 * [0.5] + [-3.0])
    assert once.spfb_adaptive_damping == INITIAL
    np.testing.assert_allclose(once.spfb_reduction_ratio, 0.5 - 3.5 / 10, atol=0.05)


def test_verdict_needs_a_distance_of_two_standard_errors():
    """Ratios of 0.5 and -0.3 in turn, of mean 0.1 and deviation 0.4, whose mean over ten has an error of 0.13."""
    assert after(20 * [0.5, -0.3]).spfb_adaptive_damping == INITIAL
    # Of deviation 0.1 there is no doubt.
    assert after(20 * [0.2, 0.0]).spfb_adaptive_damping > 1e3 * INITIAL


def test_loss_that_is_not_finite_makes_the_damping_grow_and_what_was_before_forgotten():
    good = after(5 * [1.0])
    params = {"a": good.adaptation_params["a"] - jnp.array([1.0, 0.0])}
    for value in (jnp.nan, jnp.inf):
        state = _remember(good, good.adaptation_params, *good[2:3], good.adaptation_step, *good[5:7])
        state = _adapted(state, params, jnp.asarray(value), INITIAL)
        np.testing.assert_allclose(state.spfb_adaptive_damping, 2 * good.spfb_adaptive_damping)
        assert state.spfb_reduction_ratio == 0
        np.testing.assert_array_equal(state.adaptation_sums, 0)
