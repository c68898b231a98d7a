"""The bound is a bound, on every kind of logits, in every order, by every path."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import qbound
from tests import reference, strategies

ORDERS = ("descending", "max_first", "given")
DTYPES = (jnp.float32, jnp.float64)
every_order = pytest.mark.parametrize("order", ORDERS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@partial(jax.jit, static_argnames="order")
def make(h, order, log_prior=None):
    return qbound.log_partition_bound(h, order=order, log_prior=log_prior)


algorithm_1 = jax.jit(qbound.partition_function_bound)


@jax.jit
def evaluate(bound, x):
    return bound(x)


@jax.jit
def evaluate_and_slope(bound, x):
    return jax.value_and_grad(lambda x: bound(x))(x)


@jax.jit
def product(bound, v):
    return bound.curvature.mv(v)


@jax.jit
def solution(bound, g, damping):
    return bound.curvature.solve(g, damping)


@jax.jit
def dense(bound):
    return bound.curvature.dense()


@jax.jit
def factor(bound):
    return bound.curvature.factor()


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


# The bound


@every_order
@given(strategies.logits_and_vector())
def test_bound_majorizes_log_partition(order, example):
    h, delta = example
    bound = make(h, order)
    assert bound.majorizes == "globally"
    for step in (1e-3, 1.0, 100.0):
        x = h + step * delta
        upper, exact = evaluate(bound, x), reference.log_sum_exp(x)
        rounding = 1e-14 * (1 + abs(exact) + np.abs(x).max() + np.abs(h).max() + abs(upper))
        assert upper >= exact - rounding


@every_order
@given(strategies.logits_and_vector(bound=4))
def test_bound_majorizes_log_partition_in_float32(order, example):
    h, delta = (a.astype(np.float32) for a in example)
    x = h + delta
    upper, exact = evaluate(make(h, order), x), reference.log_sum_exp(x.astype(np.float64))
    assert upper.dtype == jnp.float32
    assert float(upper) >= exact - 1e-6 * (1 + np.abs(x).max() + np.abs(h).max())


@every_order
@given(strategies.logits())
def test_bound_is_tangent_at_expansion_point(order, h):
    bound = make(h, order)
    value, grad = evaluate_and_slope(bound, bound.point)
    assert value == bound.value
    np.testing.assert_array_equal(bound.point, h)
    np.testing.assert_allclose(bound.value, reference.log_sum_exp(h), rtol=1e-14, atol=1e-13)
    np.testing.assert_allclose(bound.grad, reference.softmax(h), rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(grad, bound.grad, rtol=1e-14, atol=1e-14)


@every_order
@given(strategies.logits())
def test_curvature_equals_the_paper(order, h):
    _, _, expected = reference.logit_bound(h, reference.PERMUTATIONS[order](h))
    np.testing.assert_allclose(dense(make(h, order)), expected, rtol=1e-9, atol=1e-13)


@every_order
@given(strategies.logits())
def test_curvature_is_psd(order, h):
    matrix = np.asarray(dense(make(h, order)))
    np.testing.assert_allclose(matrix, matrix.T, rtol=0, atol=1e-14)
    assert np.linalg.eigvalsh(matrix)[0] >= -1e-13 * (1 + np.abs(matrix).max())


@every_order
@given(strategies.logits())
def test_curvature_annihilates_constants(order, h):
    bound, ones = make(h, order), np.ones(h.size)
    np.testing.assert_allclose(product(bound, 1e3 * ones), 0 * ones, atol=1e-10)
    np.testing.assert_allclose(dense(bound) @ ones, 0 * ones, atol=1e-13)


@every_order
@pytest.mark.parametrize("n", [5, 70, 300])
def test_constant_in_a_vector_costs_no_digits(n, order):
    rng = np.random.default_rng(n)
    h = rng.normal(size=n).astype(np.float32)
    v = (np.round(64 * rng.normal(size=n)) / 64).astype(np.float32)  # v + 8192 is exact in float32
    bound = make(h, order)
    np.testing.assert_allclose(product(bound, v + np.float32(8192)), product(bound, v), rtol=0, atol=5e-6)


@every_order
@given(strategies.logits())
def test_curvature_is_below_its_eigenvalue_limit(order, h):
    n = h.size
    limit = n / 4 * (np.eye(n) - np.ones((n, n)) / n)
    assert np.linalg.eigvalsh(limit - dense(make(h, order)))[0] >= -1e-13 * n


# What the order changes, and what it does not


@given(strategies.logits())
def test_label_order_leaves_value_and_grad_unchanged(h):
    bounds = [make(h, order) for order in ORDERS]
    for bound in bounds[1:]:
        assert bound.value == bounds[0].value
        np.testing.assert_array_equal(bound.grad, bounds[0].grad)


@given(strategies.ordinary_logits().filter(lambda h: np.unique(h).size == h.size))
def test_descending_bound_is_equivariant_to_permutations_of_labels(h):
    permutation = np.random.default_rng(0).permutation(h.size)
    bound, permuted = make(h, "descending"), make(h[permutation], "descending")
    np.testing.assert_allclose(permuted.grad, bound.grad[permutation], rtol=1e-13)
    np.testing.assert_allclose(permuted.value, bound.value, rtol=1e-13, atol=1e-13)
    expected = np.asarray(dense(bound))[np.ix_(permutation, permutation)]
    np.testing.assert_allclose(dense(permuted), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("order", ["max_first", "given"])
def test_labels_after_the_first_are_taken_as_given(order):
    h = np.array([3.0, 0.5, 2.0, 1.0])
    swapped = np.array([0, 2, 1, 3])
    expected = np.asarray(dense(make(h, order)))[np.ix_(swapped, swapped)]
    assert not np.allclose(dense(make(h[swapped], order)), expected)


@every_order
@given(strategies.ordinary_logits())
def test_adding_a_constant_to_all_logits_moves_only_the_value(order, h):
    h = np.round(h, 2) + 64.0 - 64.0  # so that h + 64 is exact and keeps ties and order
    bound, shifted = make(h, order), make(h + 64.0, order)
    np.testing.assert_allclose(shifted.value, bound.value + 64, rtol=1e-14)
    np.testing.assert_allclose(shifted.grad, bound.grad, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(dense(shifted), dense(bound), rtol=1e-12, atol=1e-13)


def test_descending_order_has_the_smallest_trace():
    traces = {order: [] for order in (*ORDERS, "ascending")}
    for h in 3 * np.random.default_rng(0).normal(size=(50, 10)):
        for order in ORDERS:
            traces[order].append(jnp.trace(dense(make(h, order))))
        traces["ascending"].append(jnp.trace(dense(make(np.sort(h), "given"))))
    mean = {order: np.mean(values) for order, values in traces.items()}
    assert mean["descending"] < mean["max_first"] < mean["given"] < mean["ascending"]


# Fast paths against the scan


@every_dtype
@every_order
@given(strategies.logits_and_vector())
def test_every_path_equals_the_scan_over_labels(order, dtype, example):
    h, v = (a.astype(dtype) for a in example)
    taken = reference.PERMUTATIONS[order](h)
    place = np.argsort(taken)
    bound, by_scan = make(h, order), make(h[taken], "given")
    tolerance = (16 + h.size) * eps(dtype)
    scale = 1 + np.abs(v).max()
    # In NumPy: JAX would compile a program for every index and every shape.
    matrix, matrix_by_scan = np.asarray(dense(bound)), np.asarray(dense(by_scan))
    hv, hv_by_scan = np.asarray(product(bound, v)), np.asarray(product(by_scan, v[taken]))
    np.testing.assert_allclose(matrix, matrix_by_scan[np.ix_(place, place)], rtol=0, atol=tolerance)
    np.testing.assert_allclose(hv, hv_by_scan[place], rtol=0, atol=tolerance * scale)
    np.testing.assert_allclose(hv, matrix @ v, rtol=0, atol=tolerance * scale * h.size)
    x = h + v
    np.testing.assert_allclose(evaluate(bound, x), evaluate(by_scan, x[taken]), rtol=tolerance, atol=tolerance * scale)


@every_order
@given(strategies.logits())
def test_product_agrees_in_float32_with_float64(order, h):
    h = h.astype(np.float32)
    v = np.random.default_rng(0).normal(size=h.size).astype(np.float32)
    exact = product(make(h.astype(np.float64), order), v.astype(np.float64))
    np.testing.assert_allclose(product(make(h, order), v), exact, rtol=0, atol=2e-6 * (1 + np.abs(exact).max()))


@every_order
@pytest.mark.parametrize("damping", [1e-8, 1e-3, 1.0, 10.0])
@given(strategies.logits_and_vector())
def test_solve_leaves_no_residual(damping, order, example):
    h, g = example
    bound = make(h, order)
    s = np.asarray(solution(bound, g, damping))
    # A backward error: what is left, against the size of the terms that cancel.
    residual = np.asarray(product(bound, s)) + damping * s - g
    assert np.abs(residual).max() <= 1e-14 * h.size * (np.abs(g).max() + np.abs(s).max() * (1 + damping)) + 1e-290


@every_order
@given(strategies.logits_and_vector())
def test_solve_in_float32_agrees_with_float64(order, example):
    h, g = (a.astype(np.float32) for a in example)
    exact = solution(make(h.astype(np.float64), order), g.astype(np.float64), 0.1)
    np.testing.assert_allclose(solution(make(h, order), g, 0.1), exact, rtol=0, atol=2e-5 * (1 + np.abs(g).max()))


@every_order
@given(strategies.logits())
def test_factor_squares_to_the_matrix(order, h):
    bound = make(h, order)
    rows = factor(bound)
    np.testing.assert_allclose(rows.T @ rows, dense(bound), rtol=0, atol=1e-14 * h.size)


# Removed labels


@every_order
@pytest.mark.parametrize("how", ["logits", "log_prior", "both"])
@given(strategies.logits_and_mask())
def test_removed_label_adds_nothing(how, order, example):
    h, kept = example
    log_prior = np.where(kept, 0.5, -np.inf) if how != "logits" else np.full(h.size, 0.5)
    masked = np.where(kept, h, -np.inf) if how != "log_prior" else h
    bound = make(masked, order, log_prior)
    log_z, p, expected = reference.logit_bound(h[kept] + 0.5, reference.PERMUTATIONS[order](h[kept] + 0.5))
    np.testing.assert_allclose(bound.value, log_z, rtol=1e-13, atol=1e-13)
    # In NumPy: JAX would compile a program for every number of labels kept.
    operations = (bound.grad, dense(bound), product(bound, h), factor(bound), solution(bound, h, 0.5))
    grad, matrix, hv, rows, s = map(np.asarray, operations)
    np.testing.assert_allclose(grad[kept], p, rtol=0, atol=1e-13)
    np.testing.assert_allclose(matrix[np.ix_(kept, kept)], expected, rtol=1e-9, atol=1e-13)
    for removed in (grad[~kept], matrix[~kept], matrix[:, ~kept], hv[~kept], rows[~kept]):
        assert not np.any(removed)
    np.testing.assert_allclose(s[~kept], h[~kept] / 0.5)
    # Where the label is evaluated does not matter either, not even at -inf.
    x = h[::-1]
    delta = (x - h)[kept]
    upper = log_z + p @ delta + delta @ expected @ delta / 2
    np.testing.assert_allclose(evaluate(bound, x), upper, rtol=1e-10, atol=1e-12)
    if how != "log_prior":
        np.testing.assert_allclose(evaluate(bound, np.where(kept, x, -np.inf)), upper, rtol=1e-10, atol=1e-12)


@partial(jax.jit, static_argnames="order")
def derivatives(logits, log_prior, order):
    """Of everything a bound is asked for, along one direction and, in reverse, from one cotangent.

    Neither has a zero entry, so a single NaN among the partial derivatives would show.
    """

    def everything(logits):
        bound = qbound.log_partition_bound(logits, order=order, log_prior=log_prior)
        return {
            "value": bound.value,
            "grad": bound.grad,
            "mv": bound.curvature.mv(_wave(logits)),
            "dense": bound.curvature.dense(),
            "call": bound(jax.lax.stop_gradient(bound.point) + _wave(logits)),
        }

    _, forward = jax.jvp(everything, (logits,), (_wave(logits),))
    outputs, pull = jax.vjp(everything, logits)
    (reverse,) = pull(jax.tree.map(_wave, outputs))
    return forward | {"reverse": reverse}


def _wave(like):
    return jnp.cos(jnp.arange(like.size, dtype=like.dtype)).reshape(like.shape)


@every_order
@pytest.mark.parametrize("how", ["logits", "log_prior"])
@given(strategies.logits_and_mask())
def test_removed_label_gives_no_nan_in_derivatives(how, order, example):
    h, kept = example
    masked = np.where(kept, h, -np.inf) if how == "logits" else h
    log_prior = np.where(kept, 0.0, -np.inf) if how == "log_prior" else np.zeros(h.size)
    result = jax.tree.map(np.asarray, derivatives(masked, log_prior, order))
    for name, derivative in result.items():
        assert np.isfinite(derivative).all(), name
    assert not np.any(result["reverse"][~kept])


@every_order
def test_derivatives_of_kept_labels_do_not_see_removed_ones(order):
    h = np.array([0.5, 2.0, -1.0, 1.0, 0.0])
    kept = np.array([True, False, True, True, False])

    def matrix(h):
        return qbound.log_partition_bound(h, order=order).curvature.dense()

    jacobian = jax.jit(jax.jacrev(matrix))
    with_removed, alone = jacobian(np.where(kept, h, -np.inf)), jacobian(h[kept])
    np.testing.assert_allclose(with_removed[np.ix_(kept, kept, kept)], alone, rtol=1e-12, atol=1e-15)


@every_order
def test_removing_every_label_gives_minus_infinity(order):
    for bound in (
        make(np.full(3, -np.inf), order),
        make(np.zeros(3), order, np.full(3, -np.inf)),
    ):
        assert bound.value == -np.inf
        assert not np.any(bound.grad)
        assert not np.any(dense(bound))
        assert evaluate(bound, np.ones(3)) == -np.inf
        np.testing.assert_allclose(solution(bound, np.ones(3), 2.0), 0.5)
    slope = jax.jit(jax.grad(lambda h: qbound.log_partition_bound(h, order=order).value))(np.full(3, -np.inf))
    assert not np.any(slope)


@every_order
@given(strategies.ordinary_logits((3, 50)))
def test_log_prior_is_added_to_the_logits(order, h):
    prior = np.sin(np.arange(h.size))
    bound, expected = make(h, order, prior), make(h + prior, order)
    assert bound.value == expected.value
    np.testing.assert_array_equal(bound.point, h)
    np.testing.assert_array_equal(dense(bound), dense(expected))
    x = h[::-1]
    np.testing.assert_allclose(evaluate(bound, x), evaluate(expected, x + prior), rtol=1e-12)


# Extremes


@every_dtype
@every_order
@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_logits_of_any_size_keep_their_digits(n, order, dtype):
    rng = np.random.default_rng(n)
    for h in (1e4 * rng.choice([-1.0, 1.0], size=n), 1e4 * rng.uniform(-1, 1, size=n), 1e-8 * rng.normal(size=n)):
        h = h.astype(dtype)
        _, p, matrix = reference.logit_bound(h, reference.PERMUTATIONS[order](h))
        bound = make(h, order)
        assert bound.value.dtype == bound.grad.dtype == dense(bound).dtype == dtype
        np.testing.assert_allclose(bound.value, reference.log_sum_exp(h.astype(np.float64)), rtol=4 * eps(dtype))
        np.testing.assert_allclose(bound.grad, p, rtol=0, atol=4 * eps(dtype) + 1e-12)
        np.testing.assert_allclose(dense(bound), matrix, rtol=0, atol=8 * eps(dtype) + 1e-12)


@every_order
def test_one_label_has_no_curvature(order):
    bound = make(np.array([3.0]), order)
    assert bound.value == 3
    assert bound.grad == 1
    assert dense(bound) == 0
    assert evaluate(bound, np.array([-5.0])) == -5


@every_order
def test_two_equal_labels_have_the_exact_hessian(order):
    np.testing.assert_allclose(dense(make(np.zeros(2), order)), [[0.25, -0.25], [-0.25, 0.25]])


@every_order
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype, order):
    h = jnp.array([1.0, -2.0, 3.0, 0.5], dtype)
    bound, expected = make(h, order), make(h.astype(jnp.float32), order)
    assert bound.value.dtype == bound.grad.dtype == dense(bound).dtype == evaluate(bound, h).dtype == jnp.float32
    # Two programs, so that they may differ in the last digit of float32.
    np.testing.assert_allclose(dense(bound), dense(expected), rtol=5e-7)
    assert evaluate(bound, h) == bound.value


@every_order
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_in_gives_nan_out(bad, order):
    for n, position in ((1, 0), (3, 0), (3, 1), (3, 2), (20, 7)):
        h = np.linspace(-1, 1, n)
        h[position] = bad
        bound = make(h, order)
        assert not np.isfinite(bound.value)
        assert np.isnan(bound.grad).all()
        assert np.isnan(dense(bound)).all()
        assert np.isnan(product(bound, np.arange(float(n)))).all()
        assert np.isnan(solution(bound, np.arange(float(n)), 1.0)).any()
        assert np.isnan(evaluate(bound, np.zeros(n)))


# Derivatives with respect to the logits


@every_order
@pytest.mark.parametrize("n", [1, 2, 5, 20])
def test_derivatives_equal_finite_differences(n, order):
    rng = np.random.default_rng(0)
    h, v = 2 * rng.normal(size=n), rng.normal(size=n)

    @jax.jit
    def everything(h):
        bound = qbound.log_partition_bound(h, order=order)
        return bound.value, bound.grad, bound.curvature.mv(v), bound.curvature.dense()

    direction = rng.normal(size=n)
    _, tangents = jax.jvp(everything, (h,), (direction,))
    above, below = everything(h + 1e-6 * direction), everything(h - 1e-6 * direction)
    for tangent, a, b in zip(tangents, above, below, strict=True):
        np.testing.assert_allclose(tangent, (a - b) / 2e-6, rtol=1e-6, atol=1e-8)


@every_dtype
@every_order
@given(strategies.logits(sizes=(1, 3, 50)))
def test_derivatives_are_finite(order, dtype, h):
    for name, derivative in derivatives(h.astype(dtype), np.zeros(h.size, dtype), order).items():
        assert derivative.dtype == dtype
        assert np.isfinite(derivative).all(), name


def test_derivative_of_value_is_grad_and_its_derivative_the_hessian():
    h = jnp.array([0.3, -1.0, 2.0])

    def value(h):
        return qbound.log_partition_bound(h).value

    np.testing.assert_allclose(jax.jit(jax.grad(value))(h), make(h, "descending").grad, rtol=1e-14)
    np.testing.assert_allclose(jax.jit(jax.hessian(value))(h), reference.hessian(np.asarray(h)), atol=1e-14)


# Transformations


@every_order
@pytest.mark.parametrize("n", [3, 20])
def test_jit_vmap_and_scan_give_what_the_plain_call_gives(n, order):
    batch = np.random.default_rng(0).normal(size=(4, n))

    def one(h):
        bound = qbound.log_partition_bound(h, order=order)
        v = h[::-1]
        curvature = bound.curvature
        return bound.value, bound.grad, curvature.mv(v), curvature.solve(v, 0.1), curvature.dense(), bound(v)

    # A single row: without jit every call compiles its loops anew.
    plain = one(jnp.asarray(batch[0]))
    jitted_one = jax.jit(one)
    jitted = [np.stack(leaves) for leaves in zip(*(jitted_one(h) for h in batch), strict=True)]
    mapped = jax.jit(jax.vmap(one))(batch)
    scanned = jax.jit(lambda batch: jax.lax.scan(lambda carry, h: (carry, one(h)), None, batch)[1])(batch)
    for a, b in zip(plain, jitted, strict=True):
        np.testing.assert_allclose(a, b[0], rtol=1e-13, atol=1e-14)
    for other in (mapped, scanned):
        for a, b in zip(jitted, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-14)


@every_order
def test_bounds_pass_through_transformations_as_pytrees(order):
    batch = np.random.default_rng(0).normal(size=(4, 5))
    bounds = jax.jit(jax.vmap(partial(qbound.log_partition_bound, order=order)))(batch)
    values = jax.jit(jax.vmap(lambda bound, x: bound(x)))(bounds, batch + 1)
    np.testing.assert_allclose(values, bounds.value + 1, rtol=1e-14)
    one = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[2]), bounds)
    expected = one(batch[3])
    np.testing.assert_allclose(jax.jit(one)(batch[3]), expected, rtol=1e-14)
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(batch)[3], expected, rtol=1e-14)


# Memory


@every_order
@pytest.mark.parametrize("operation", ["mv", "solve", "call"])
@pytest.mark.parametrize(("b", "n"), [(1, 20_000), (1000, 40)])
def test_no_operation_forms_a_matrix(b, n, operation, order):
    @jax.vmap
    def run(h, v):
        bound = qbound.log_partition_bound(h, order=order)
        if operation == "call":
            return bound(v)
        return bound.curvature.mv(v) if operation == "mv" else bound.curvature.solve(v, 0.1)

    vectors = jax.ShapeDtypeStruct((b, n), jnp.float32)
    memory = jax.jit(run).lower(vectors, vectors).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 20 * 4 * b * n  # matrices would take n, 40 at least


# Against Algorithm 1 in parameter space


@given(strategies.features_and_theta())
def test_algorithm_1_equals_the_paper(example):
    features, theta = example
    bound = algorithm_1(theta, features)
    log_z, mu, sigma = reference.algorithm_1(theta, features)
    z_printed, mu_printed, sigma_printed = reference.algorithm_1_as_printed(theta, features)
    np.testing.assert_allclose(bound.value, log_z, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(bound.value, np.log(z_printed), rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(bound.grad, mu, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(bound.grad, mu_printed, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(bound.curvature.dense(), sigma, rtol=1e-12, atol=1e-13)
    # The first label adds (z -> 0+) about 1/900 of its square: log(alpha/z) is large, not infinite.
    first = np.outer(features[0], features[0]) * reference.beta_of(theta @ features[0] - np.log(reference.START))
    np.testing.assert_allclose(bound.curvature.dense() + first, sigma_printed, rtol=1e-9, atol=1e-12)


@jax.jit
def pull_back(features, theta, x):
    bound = qbound.log_partition_bound(features @ theta, order="given").pullback(features, theta)
    return bound.value, bound.grad, bound.curvature.dense(), bound(x)


@given(strategies.features_and_theta())
def test_pullback_equals_algorithm_1_in_parameter_space(example):
    features, theta = example
    expected = algorithm_1(theta, features)
    value, grad, matrix, upper = pull_back(features, theta, -theta)
    np.testing.assert_allclose(value, expected.value, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(grad, expected.grad, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(matrix, expected.curvature.dense(), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(upper, evaluate(expected, -theta), rtol=1e-11, atol=1e-11)


def test_algorithm_1_takes_a_log_prior():
    rng = np.random.default_rng(0)
    features, theta = rng.normal(size=(5, 3)), rng.normal(size=3)
    log_prior = np.array([-np.inf, 0.3, -1.0, -np.inf, 2.0])
    bound = qbound.partition_function_bound(theta, features, log_prior=log_prior)
    log_z, mu, sigma = reference.algorithm_1(theta, features, log_prior)
    np.testing.assert_allclose(bound.value, log_z, rtol=1e-14)
    np.testing.assert_allclose(bound.grad, mu, rtol=1e-13)
    np.testing.assert_allclose(bound.curvature.dense(), sigma, rtol=1e-13)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"logits": jnp.zeros((2, 3))}, ValueError, ["logits", "(n,)", "(2, 3)", "vmap"]),
        ({"logits": jnp.zeros(())}, ValueError, ["logits", "(n,)", "()"]),
        ({"logits": jnp.zeros(0)}, ValueError, ["logits", "n >= 1", "(0,)"]),
        ({"logits": jnp.zeros(3, jnp.int32)}, TypeError, ["logits", "float", "int32"]),
        ({"logits": jnp.zeros(3, complex)}, TypeError, ["logits", "float", "complex128"]),
        ({"logits": jnp.zeros(3), "order": "ascending"}, ValueError, ["order", "'max_first'", "'ascending'"]),
        ({"logits": jnp.zeros(3), "log_prior": jnp.zeros(2)}, ValueError, ["log_prior", "(3,)", "(2,)"]),
        ({"logits": jnp.zeros(3), "log_prior": jnp.zeros(3, bool)}, TypeError, ["log_prior", "float", "bool"]),
    ],
)
@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("traced", [False, True])
def test_bad_arguments_are_named(arguments, error, words, traced):
    arguments = dict(arguments)
    order = arguments.pop("order", "descending")
    call = partial(qbound.log_partition_bound, order=order)
    if traced:
        call = jax.jit(call)
    with pytest.raises(error) as caught:
        call(**arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("theta", "features", "error", "words"),
    [
        (jnp.zeros(2), jnp.zeros((3, 4)), ValueError, ["theta", "(4,)", "(2,)"]),
        (jnp.zeros(4), jnp.zeros(4), ValueError, ["features", "(n, d)", "(4,)"]),
        (jnp.zeros(4), jnp.zeros((0, 4)), ValueError, ["features", "n >= 1", "(0, 4)"]),
        (jnp.zeros(4), jnp.zeros((3, 4), jnp.int32), TypeError, ["features", "int32"]),
    ],
)
def test_bad_arguments_of_algorithm_1_are_named(theta, features, error, words):
    with pytest.raises(error) as caught:
        qbound.partition_function_bound(theta, features)
    for word in words:
        assert word in str(caught.value)
