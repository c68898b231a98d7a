"""Each quadratic says truly where it majorizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qbound
from tests import reference, strategies

RADII = (0.0, 1e-3, 0.3, 2.0, 10.0)

ORDERS = ("descending", "max_first", "given")

make_bound = jax.jit(qbound.log_partition_bound, static_argnames="order")
make_bohning = jax.jit(qbound.bohning_bound)
make_local = jax.jit(qbound.local_bound)
make_expansion = jax.jit(qbound.second_order_expansion)
CONSTRUCTORS = {"bohning": make_bohning, "local": partial(make_local, radius=0.5), "expansion": make_expansion}
every_constructor = pytest.mark.parametrize("make", CONSTRUCTORS.values(), ids=CONSTRUCTORS.keys())


@jax.jit
def evaluate(bound, x):
    return bound(x)


@jax.jit
def evaluate_and_slope(bound, x):
    return jax.value_and_grad(lambda x: bound(x))(x)


@jax.jit
def dense(bound):
    return bound.curvature.dense()


def shortfall(bound, x):
    """How far the quadratic lies below the log-partition function at `x`, less what rounding explains."""
    exact = reference.log_sum_exp(x)
    upper = float(evaluate(bound, x))
    rounding = 1e-14 * (1 + abs(exact) + np.abs(x).max() + np.abs(bound.point).max() + abs(upper))
    return exact - upper - rounding


@given(strategies.logits_and_vector())
def test_bohning_bound_majorizes_globally(example):
    h, delta = example
    bound = make_bohning(h)
    assert bound.majorizes == "globally"
    assert bound.radius is None
    for step in (1e-3, 1.0, 100.0):
        assert shortfall(bound, h + step * delta) <= 0


@pytest.mark.parametrize("radius", RADII)
@given(strategies.logits_and_vector(), st.sampled_from(["spread", "rise"]))
def test_local_bound_majorizes_within_its_radius(radius, example, measure):
    """Both sizes of a displacement: its spread, and the smaller one, its rise above the mean."""
    h, delta = example
    bound = make_local(h, radius)
    assert bound.majorizes == "within radius"
    assert bound.radius == radius
    for sign in (1, -1):
        lowest = np.min(sign * delta) if measure == "spread" else reference.softmax(h) @ (sign * delta)
        size = np.max(sign * delta) - lowest
        if size > 1e-9:
            assert shortfall(bound, h + radius / size * sign * delta) <= 0


@pytest.mark.parametrize("radius", RADII)
def test_local_bound_holds_in_the_worst_direction(radius):
    """One label of vanishing probability rises by the radius: the third derivative is as large as it can be."""
    for rarity in (0.0, 2.0, 5.0, 10.0, 20.0):
        h = np.array([0.0, -rarity])
        p = reference.softmax(h)
        delta = np.array([0.0, radius / p[0]])
        assert delta.max() - p @ delta == pytest.approx(radius)
        assert shortfall(make_local(h, radius), h + delta) <= 0


LARGEST_RADII = [(np.float32, radius) for radius in (60, 80, 85, 88)]
LARGEST_RADII += [(np.float64, radius) for radius in (500, 700, 705, 709)]


@pytest.mark.parametrize(("dtype", "radius"), LARGEST_RADII)
def test_local_bound_counts_labels_too_rare_for_their_dtype(dtype, radius):
    """Their probabilities are 0 in the dtype, and e^r times as large at the radius."""
    tiny = -np.log(np.finfo(dtype).tiny)
    for rarity in (tiny - 2, tiny + 1, tiny + 10):
        h = np.zeros(5000, dtype)
        h[1:] = -rarity
        x = h + np.where(np.arange(5000) > 0, radius, 0).astype(dtype)
        exact = reference.log_sum_exp(x.astype(np.float64))
        assert float(evaluate(make_local(h, dtype(radius)), x)) >= exact - 1e-6


@pytest.mark.parametrize(("dtype", "radius"), [(np.float32, 89), (np.float32, 1e30), (np.float64, 710)])
def test_local_bound_is_bohnings_where_its_factor_would_overflow(dtype, radius):
    h = np.array([0.0, -1.0, -100.0, -np.inf], dtype)
    bound = make_local(h, dtype(radius))
    np.testing.assert_array_equal(bound.curvature.weights, make_bohning(h).curvature.weights)
    assert bound.radius == dtype(radius) and bound.majorizes == "within radius"
    assert np.isnan(make_local(h, dtype(np.nan)).curvature.weights).all()


@pytest.mark.parametrize("radius", [0.1, 0.3, 2.0])
def test_local_bound_fails_outside_its_radius(radius):
    h = np.array([0.0, -12.0])
    assert shortfall(make_local(h, radius), h + np.array([0.0, 2 * radius])) > 0


@pytest.mark.parametrize("radius", [1e-2, 1.0])
def test_local_factor_is_the_smallest_that_holds(radius):
    """With one percent less of it, the bound fails at its radius."""
    h = np.array([0.0, -30.0])
    bound, expansion = make_local(h, radius), make_expansion(h)
    x = h + np.array([0.0, radius])
    gap = reference.log_sum_exp(x) - float(expansion.value) - float(expansion.grad @ (x - h))
    assert 0.99 * float(bound.curvature.quadratic(x - h)) / 2 < gap


def test_second_order_expansion_is_not_a_bound_and_says_so():
    h = np.array([0.0, -2.0])
    expansion = make_expansion(h)
    assert expansion.majorizes == "no"
    assert shortfall(expansion, np.array([0.0, 1.0])) > 0.05


@given(strategies.logits())
def test_curvatures_equal_their_formulas(h):
    n = h.size
    np.testing.assert_allclose(dense(make_expansion(h)), reference.hessian(h), rtol=0, atol=1e-14)
    np.testing.assert_allclose(dense(make_bohning(h)), reference.bohning(n), rtol=0, atol=1e-14)
    factor = 2 * (np.exp(0.5) - 1.5) / 0.25
    np.testing.assert_allclose(dense(make_local(h, 0.5)), factor * reference.hessian(h), atol=1e-14)


@given(strategies.logits())
def test_hessian_is_below_every_bound(h):
    hessian = np.asarray(dense(make_expansion(h)))
    for bound in (make_bohning(h), make_local(h, 0.1), *(make_bound(h, order=order) for order in ORDERS)):
        assert np.linalg.eigvalsh(dense(bound) - hessian)[0] >= -1e-14 * h.size


@every_constructor
@given(strategies.logits())
def test_quadratic_is_tangent_at_its_point(make, h):
    bound = make(h)
    value, grad = evaluate_and_slope(bound, bound.point)
    assert value == bound.value
    np.testing.assert_allclose(value, reference.log_sum_exp(h), rtol=1e-14, atol=1e-13)
    np.testing.assert_allclose(grad, reference.softmax(h), rtol=1e-11, atol=1e-14)


@every_constructor
@given(strategies.logits_and_mask())
def test_removed_label_adds_nothing(make, example):
    h, kept = example
    bound = make(np.where(kept, h, -np.inf))
    by_prior = make(h, log_prior=np.where(kept, 0.0, -np.inf))
    matrix = np.asarray(dense(bound))
    exact = {make_expansion: reference.hessian(h[kept]), make_bohning: reference.bohning(kept.sum())}
    if make in exact:
        np.testing.assert_allclose(matrix[np.ix_(kept, kept)], exact[make], atol=1e-14)
    assert not np.any(matrix[~kept])
    np.testing.assert_array_equal(dense(by_prior), matrix)
    slope = jax.grad(evaluate, argnums=1)(bound, np.where(kept, h[::-1], -np.inf))
    assert np.isfinite(slope).all()


@every_constructor
def test_nan_and_empty_label_sets_are_seen(make):
    for bad in (np.nan, np.inf):
        bound = make(np.array([0.0, bad, 1.0]))
        assert not np.isfinite(bound.value)
        assert np.isnan(evaluate(bound, np.zeros(3)))
        assert np.isnan(bound.curvature.mv(np.arange(3.0))).any()
    empty = make(np.full(3, -np.inf))
    assert empty.value == -np.inf
    assert not np.any(empty.grad)
    assert not np.any(empty.curvature.dense())


@pytest.mark.parametrize("radius", [-1.0, float("nan"), float("inf")])
def test_radius_must_not_be_negative(radius):
    with pytest.raises(ValueError, match=f"radius: expected a finite number >= 0; got {radius}"):
        qbound.local_bound(jnp.zeros(3), radius)


def test_negative_radius_in_an_array_gives_nan():
    bound = make_local(np.zeros(3), np.float64(-1.0))
    assert np.isnan(evaluate(bound, np.ones(3) * np.arange(3)))


def test_low_precision_is_computed_in_float32():
    for make in CONSTRUCTORS.values():
        bound = make(jnp.zeros(3, jnp.bfloat16))
        assert bound.value.dtype == bound.grad.dtype == bound.curvature.dense().dtype == jnp.float32
