"""What can be done with a bound: evaluate it, pull it back, add, average and scale it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import qbound
from tests import processes, reference, strategies

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(4, 5, 3))  # four examples, five labels, three parameters
THETA = RNG.normal(size=3)
X = RNG.normal(size=3)


def one_bound(features, theta=None, order="descending"):
    theta = THETA if theta is None else theta
    return qbound.log_partition_bound(features @ theta, order=order).pullback(features, theta)


def log_partition(features, theta):
    return reference.log_sum_exp(np.asarray(features @ theta))


# Evaluation

MAKERS = {
    **{f"local, {r:g}": lambda h, r=r: qbound.local_bound(h, np.float32(r)) for r in (0, 1, 85, 1e3)},
    "bohning": qbound.bohning_bound,
    **{o: lambda h, o=o: qbound.log_partition_bound(h, order=o) for o in ("descending", "max_first", "given")},
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_finite_points_of_any_size_are_no_nan(make):
    """Where squares overflow, a label whose weight is 0 adds nothing, and the rest may be infinite but not NaN."""
    sizes = [1e20, 1e10, 3e38, -3e38, -1e20, 0.0, -200.0]
    points = np.array([np.roll(sizes, shift)[:3] for shift in range(7)] + [[x, x, x] for x in sizes], np.float32)
    evaluate = jax.jit(lambda h, points: jax.vmap(make(h))(points))
    for h in ([1.0, 0.0, -3.0], [0.0, -200.0, -90.0], [0.0, -np.inf, 1e20], [-3e38, 3e38, 0.0]):
        assert not np.isnan(evaluate(np.array(h, np.float32), points)).any()
    # A shift that all logits share adds itself, and no square.
    np.testing.assert_allclose(evaluate(np.zeros(3, np.float32), points[7:12]), points[7:12, 0], rtol=1e-6)


def test_large_points_are_evaluated_as_small_ones_are():
    """A quadratic that does not overflow is right to rounding, whatever it is measured in."""
    h = np.array([0.0, -1e12, -2e12], np.float32)
    x = np.array([3e12, 1e12, -1e12], np.float32)
    bound = jax.jit(qbound.log_partition_bound)(h)
    delta = x.astype(float) - h
    grad, matrix = np.asarray(bound.grad, float), np.asarray(bound.curvature.dense(), float)
    expected = float(bound.value) + grad @ delta + delta @ matrix @ delta / 2
    np.testing.assert_allclose(bound(x), expected, rtol=1e-5)
    assert float(bound(x)) >= reference.log_sum_exp(x.astype(float))


# Pullback


@jax.jit
def pulled_quantities(features, theta, x):
    logits = qbound.log_partition_bound(features @ theta)
    pulled = logits.pullback(features, theta)
    unpointed = logits.pullback(features)
    return {
        "matrix": logits.curvature.dense(),
        "value": pulled.value,
        "grad": pulled.grad,
        "sigma": pulled.curvature.dense(),
        "factor": pulled.curvature.factor(),
        "mv": pulled.curvature.mv(x),
        "upper": pulled(x),
        "upper through logits": unpointed(x),
    }


@given(strategies.features_and_theta())
def test_pullback_equals_the_dense_product(example):
    features, theta = example
    x = np.cos(np.arange(theta.size))
    got = pulled_quantities(features, theta, x)
    sigma = features.T @ got["matrix"] @ features
    np.testing.assert_allclose(got["sigma"], sigma, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got["factor"].T @ got["factor"], sigma, rtol=1e-12, atol=1e-12)
    assert got["factor"].shape[1] == theta.size
    np.testing.assert_allclose(got["mv"], sigma @ x, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(got["grad"], features.T @ reference.softmax(features @ theta), rtol=1e-11, atol=1e-12)
    delta = x - theta
    upper = got["value"] + got["grad"] @ delta + delta @ sigma @ delta / 2
    np.testing.assert_allclose(got["upper"], upper, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got["upper through logits"], upper, rtol=1e-11, atol=1e-11)
    assert got["upper"] >= log_partition(features, x) - 1e-12 * (1 + abs(upper))


def test_pullback_keeps_value_and_certificate():
    logits = qbound.local_bound(FEATURES[0] @ THETA, 0.5)
    pulled = logits.pullback(FEATURES[0], THETA)
    assert pulled.value == logits.value
    assert pulled.majorizes == "within radius"
    assert pulled.radius == 0.5
    np.testing.assert_array_equal(pulled.point, THETA)


def test_pullback_without_point_has_none_and_evaluates_through_logits():
    pulled = qbound.log_partition_bound(FEATURES[0] @ THETA).pullback(FEATURES[0])
    assert pulled.point is None
    np.testing.assert_allclose(pulled(X), one_bound(FEATURES[0])(X), rtol=1e-13)
    scaled = 3.0 * pulled
    np.testing.assert_allclose(scaled(X), 3 * pulled(X), rtol=1e-13)


def test_pullback_of_a_jacobian_is_a_local_model_and_not_called_a_bound():
    def network(params):
        return jnp.tanh(params["W"] @ jnp.array([1.0, -2.0])) * params["scale"]

    params = {"W": jnp.asarray(RNG.normal(size=(5, 2))), "scale": jnp.asarray(2.0)}
    logits, forward = jax.linearize(network, params)
    transpose = jax.linear_transpose(forward, params)
    pulled = qbound.log_partition_bound(logits).pullback((forward, lambda u: transpose(u)[0]), params, affine=False)
    assert pulled.majorizes == "no"
    local = qbound.local_bound(logits, 0.5).pullback((forward, lambda u: transpose(u)[0]), params, affine=False)
    assert local.radius is None
    expected = jax.grad(lambda p: jax.nn.logsumexp(network(p)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), pulled.grad, expected)
    assert pulled(params) == pulled.value
    jacobian = np.hstack([np.asarray(j).reshape(5, -1) for j in jax.tree.leaves(jax.jacobian(network)(params))])
    sigma = jacobian.T @ qbound.log_partition_bound(logits).curvature.dense() @ jacobian
    np.testing.assert_allclose(pulled.curvature.dense(), sigma, rtol=1e-10, atol=1e-12)


def test_pullback_of_a_function_is_its_jacobian():
    """What the function closes over goes with the bound, out of `jit` and `vmap`."""
    inputs, weights = RNG.normal(size=(6, 3)), RNG.normal(size=(4, 3))

    @jax.jit
    @jax.vmap
    def by_function(x):
        return qbound.log_partition_bound(weights @ x + 1).pullback(lambda w: w @ x + 1, weights, affine=True)

    @jax.vmap
    def by_matrix(x):
        features = jnp.kron(jnp.eye(4), x[None, :])
        return qbound.log_partition_bound(weights @ x + 1).pullback(features, weights.reshape(-1))

    function, matrix = by_function(inputs).mean(), by_matrix(inputs).mean()
    assert function.majorizes == "globally"
    np.testing.assert_allclose(function.curvature.dense(), matrix.curvature.dense(), rtol=1e-11, atol=1e-13)
    other = RNG.normal(size=(4, 3))
    np.testing.assert_allclose(function(other), matrix(other.reshape(-1)), rtol=1e-12)


def test_pullback_of_a_function_is_not_called_a_bound_unless_declared_affine():
    bound = qbound.log_partition_bound(jnp.tanh(FEATURES[0] @ THETA))
    pulled = bound.pullback(lambda theta: jnp.tanh(FEATURES[0] @ theta), THETA)
    assert pulled.majorizes == "no"
    np.testing.assert_allclose(pulled.grad, jax.grad(lambda t: jax.nn.logsumexp(jnp.tanh(FEATURES[0] @ t)))(THETA))


def test_pullback_of_a_half_precision_function_is_computed_in_float32():
    weights, x = jnp.ones((3, 2), jnp.bfloat16), jnp.ones(2, jnp.bfloat16)
    pulled = qbound.log_partition_bound(weights @ x).pullback(lambda w: w @ x, weights)
    assert pulled.value.dtype == pulled.curvature.logits.beta.dtype == jnp.float32
    assert pulled.grad.dtype == pulled.curvature.mv(weights).dtype == pulled.curvature.dense().dtype == jnp.float32
    assert pulled.curvature.solve(weights, 0.1).dtype == pulled(weights).dtype == (2 * pulled).grad.dtype == jnp.float32
    np.testing.assert_allclose(pulled.grad, 1 / 3, rtol=1e-2)


def test_function_pair_equals_its_matrix_under_vmap():
    """Multinomial logistic regression: h = W x, Sigma = M (x) xx'."""
    inputs, weights = RNG.normal(size=(6, 3)), RNG.normal(size=(4, 3))
    v = RNG.normal(size=(4, 3))

    def by_functions(x):
        forward = jax.tree_util.Partial(lambda x, w: w @ x, x)
        transpose = jax.tree_util.Partial(lambda x, u: jnp.outer(u, x), x)
        return qbound.log_partition_bound(weights @ x).pullback((forward, transpose), weights)

    def by_matrix(x):
        features = jnp.kron(jnp.eye(4), x[None, :])
        return qbound.log_partition_bound(weights @ x).pullback(features, weights.reshape(-1))

    functions, matrix = jax.vmap(by_functions)(inputs).mean(), jax.vmap(by_matrix)(inputs).mean()
    np.testing.assert_allclose(functions.value, matrix.value, rtol=1e-13)
    np.testing.assert_allclose(functions.grad.reshape(-1), matrix.grad, rtol=1e-12)
    np.testing.assert_allclose(functions.curvature.dense(), matrix.curvature.dense(), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(functions.curvature.mv(v).reshape(-1), matrix.curvature.mv(v.reshape(-1)), rtol=1e-11)
    np.testing.assert_allclose(functions(v), matrix(v.reshape(-1)), rtol=1e-12)
    np.testing.assert_allclose(
        functions.curvature.solve(v, 0.1).reshape(-1), matrix.curvature.solve(v.reshape(-1), 0.1), rtol=1e-9
    )


def test_plain_functions_pull_back_inside_one_trace():
    features = FEATURES[0]
    pair = (lambda v: features @ v, lambda u: features.T @ u)
    got = jax.jit(lambda theta, x: qbound.log_partition_bound(features @ theta).pullback(pair, theta)(x))(THETA, X)
    np.testing.assert_allclose(got, one_bound(features)(X), rtol=1e-13)


def test_pullbacks_compose():
    inner = RNG.normal(size=(3, 2))
    z = RNG.normal(size=2)
    twice = qbound.log_partition_bound(FEATURES[0] @ inner @ z).pullback(FEATURES[0]).pullback(inner, z)
    once = qbound.log_partition_bound(FEATURES[0] @ inner @ z).pullback(FEATURES[0] @ inner, z)
    np.testing.assert_allclose(twice.curvature.dense(), once.curvature.dense(), rtol=1e-11)
    np.testing.assert_allclose(twice(z + 1), once(z + 1), rtol=1e-12)


def test_pullback_of_a_removed_label_ignores_its_features():
    features = FEATURES[0].copy()
    mask = jnp.array([0.0, -jnp.inf, 0.0, 0.0, -jnp.inf])
    bound = qbound.log_partition_bound(features @ THETA + mask).pullback(features, THETA)
    kept = np.isfinite(mask)
    np.testing.assert_allclose(bound(X), one_bound(features[kept])(X), rtol=1e-12)
    through_logits = qbound.log_partition_bound(features @ THETA + mask).pullback(features)
    np.testing.assert_allclose(through_logits(X), bound(X), rtol=1e-12)


def test_half_precision_features_are_computed_in_float32():
    features, theta = jnp.ones((3, 2), jnp.bfloat16), jnp.ones(2, jnp.bfloat16)
    bound = qbound.log_partition_bound(features @ theta).pullback(features, theta)
    assert bound.grad.dtype == bound.curvature.dense().dtype == bound.point.dtype == bound(theta).dtype == jnp.float32


# Sum, mean, scale


def test_sum_of_bounds_is_the_bound_of_the_sum():
    first, second = one_bound(FEATURES[0]), one_bound(FEATURES[1])
    total = first + second
    np.testing.assert_allclose(total(X), first(X) + second(X), rtol=1e-13)
    np.testing.assert_allclose(total.grad, first.grad + second.grad, rtol=1e-13)
    np.testing.assert_allclose(total.curvature.dense(), first.curvature.dense() + second.curvature.dense(), rtol=1e-13)
    assert total.majorizes == "globally"
    assert total(X) >= log_partition(FEATURES[0], X) + log_partition(FEATURES[1], X)
    np.testing.assert_allclose(sum([first, second])(X), total(X), rtol=1e-13)


def test_batched_sum_and_mean_equal_the_loop():
    batch = jax.vmap(one_bound)(FEATURES)
    loop = sum(one_bound(f) for f in FEATURES)
    total, mean = batch.sum(), batch.mean()
    for got, expected in ((total, loop), (mean, loop / 4), (mean, 0.25 * loop)):
        np.testing.assert_allclose(got.value, expected.value, rtol=1e-13)
        np.testing.assert_allclose(got.grad, expected.grad, rtol=1e-13)
        np.testing.assert_allclose(got.curvature.dense(), expected.curvature.dense(), rtol=1e-12)
        np.testing.assert_allclose(got.curvature.mv(X), expected.curvature.mv(X), rtol=1e-12)
        np.testing.assert_allclose(got.curvature.solve(X, 0.1), expected.curvature.solve(X, 0.1), rtol=1e-10)
        np.testing.assert_allclose(got(X), expected(X), rtol=1e-13)
        np.testing.assert_array_equal(got.point, THETA)
    assert mean(X) >= np.mean([log_partition(f, X) for f in FEATURES])


def test_duplicating_the_batch_changes_nothing():
    once, twice = jax.vmap(one_bound)(FEATURES).mean(), jax.vmap(one_bound)(np.tile(FEATURES, (2, 1, 1))).mean()
    np.testing.assert_allclose(twice.curvature.dense(), once.curvature.dense(), rtol=1e-12)
    np.testing.assert_allclose(twice(X), once(X), rtol=1e-13)


def test_weights_of_zero_remove_examples_and_weights_count_examples():
    batch = jax.vmap(one_bound)(FEATURES)
    weighted = batch.mean(weights=jnp.array([1.0, 0.0, 2.0, 0.0]))
    repeated = jax.vmap(one_bound)(FEATURES[np.array([0, 2, 2])]).mean()
    np.testing.assert_allclose(weighted(X), repeated(X), rtol=1e-13)
    np.testing.assert_allclose(weighted.curvature.dense(), repeated.curvature.dense(), rtol=1e-12)
    np.testing.assert_allclose(weighted.curvature.solve(X, 0.1), repeated.curvature.solve(X, 0.1), rtol=1e-9)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3])
def test_scaling_a_bound_scales_everything(scale):
    bound = one_bound(FEATURES[0])
    for scaled in (scale * bound, bound * scale, jax.jit(lambda b, s: b * s)(bound, scale)):
        np.testing.assert_allclose(scaled(X), scale * bound(X), rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(scaled.grad, scale * bound.grad, rtol=1e-13)
        np.testing.assert_allclose(scaled.curvature.dense(), scale * bound.curvature.dense(), rtol=1e-13)
        assert scaled.majorizes == "globally"


def test_sum_majorizes_where_its_weakest_term_does():
    logits = jnp.array([0.5, -1.0, 0.0])
    bound, bohning = qbound.log_partition_bound(logits), qbound.bohning_bound(logits)
    near, far = qbound.local_bound(logits, 0.3), qbound.local_bound(logits, 2.0)
    expansion = qbound.second_order_expansion(logits)
    assert (bound + bohning).majorizes == "globally"
    assert (bound + near).majorizes == (far + near).majorizes == "within radius"
    assert (bound + near).radius == (far + near).radius == 0.3
    assert (expansion + near).majorizes == (bound + expansion).majorizes == "no"
    assert (expansion + near).radius is None
    radii = jax.vmap(lambda r: qbound.local_bound(logits, r))(jnp.array([1.0, 0.2, 3.0]))
    assert radii.mean().radius == 0.2
    assert radii.mean().majorizes == "within radius"


def test_bounds_at_different_points_do_not_add_up():
    first, second = one_bound(FEATURES[0]), one_bound(FEATURES[1], THETA + 1)
    mixed = jax.vmap(one_bound)(FEATURES[:2], np.stack([THETA, THETA + 1]))
    for total in (first + second, mixed.mean(), mixed.sum()):
        assert np.isnan(total.value)
        assert np.isnan(total(X))
        assert np.isnan(total.grad).all()
        assert np.isnan(total.curvature.mv(X)).all()
        assert np.isnan(total.curvature.solve(X, 0.1)).all()


def test_weight_of_zero_removes_an_example_that_is_not_finite():
    """Padding: an example without labels has value -inf, one of NaN is NaN."""
    logits = jnp.array([[0.0, 1.0], [-jnp.inf, -jnp.inf], [jnp.nan, 0.0]])
    features = jnp.asarray(RNG.normal(size=(2, 3)))
    batch = jax.vmap(lambda h: qbound.log_partition_bound(h).pullback(features, jnp.zeros(3)))(logits)
    mean = batch.mean(weights=jnp.array([1.0, 0.0, 0.0]))
    alone = jax.tree.map(lambda leaf: leaf[0], batch)
    np.testing.assert_allclose(mean(X), alone(X), rtol=1e-13)
    np.testing.assert_allclose(mean.curvature.solve(X, 0.1), alone.curvature.solve(X, 0.1), rtol=1e-11)
    np.testing.assert_allclose(mean.curvature.mv(X), alone.curvature.mv(X), rtol=1e-12)
    empty = jax.tree.map(lambda leaf: leaf[1], batch)
    assert (0.0 * empty).value == 0


def test_points_with_removed_labels_are_equal():
    logits = jnp.array([0.0, -jnp.inf, 1.0])
    total = qbound.log_partition_bound(logits) + qbound.bohning_bound(logits)
    np.testing.assert_allclose(total(logits), 2 * jax.nn.logsumexp(logits), rtol=1e-14)


# Derivatives


@pytest.mark.parametrize(("order", "d"), [("descending", 2), ("max_first", 9), ("given", 9), ("local", 9)])
def test_derivatives_after_pullback_and_mean_are_finite(order, d):
    """Factors have roots of weights that are exactly 0; products, matrices and solves must not show it."""
    features = jnp.asarray(RNG.normal(size=(3, 4, d))).at[:, :, 1].set(0)
    features = features.at[:, 3].set(features[:, 2])
    mask = jnp.array([0.0, 0.0, 0.0, -jnp.inf])
    g = jnp.cos(jnp.arange(float(d)))

    def one(f, theta):
        logits = f @ theta + mask
        is_local = order == "local"
        bound = qbound.local_bound(logits, 1.0) if is_local else qbound.log_partition_bound(logits, order=order)
        return bound.pullback(f, theta)

    @jax.jit
    def everything(theta):
        mean = jax.vmap(one, in_axes=(0, None))(features, theta).mean()
        bounds = (one(features[0], theta), mean)
        return [(b.curvature.dense(), b.curvature.solve(g, 0.1), b.curvature.mv(g), b(g)) for b in bounds]

    theta = 1 + jnp.sin(jnp.arange(float(d)))
    _, forward = jax.jvp(everything, (theta,), (g,))
    outputs, pull = jax.vjp(everything, theta)
    cotangents = jax.tree.map(lambda leaf: jnp.sin(1 + jnp.arange(leaf.size)).reshape(leaf.shape), outputs)
    (reverse,) = pull(cotangents)
    assert np.isfinite(reverse).all()
    pairings = [jnp.sum(c * f) for c, f in zip(jax.tree.leaves(cotangents), jax.tree.leaves(forward), strict=True)]
    np.testing.assert_allclose(reverse @ g, sum(pairings), rtol=1e-8)
    above, below = everything(theta + 1e-6 * g), everything(theta - 1e-6 * g)
    for slope, a, b in zip(*map(jax.tree.leaves, (forward, above, below)), strict=True):
        np.testing.assert_allclose(slope, (a - b) / 2e-6, rtol=1e-5, atol=1e-6)


def test_hessian_of_a_dense_bound_is_its_curvature():
    bound = qbound.partition_function_bound(THETA, FEATURES[0])
    for point in (THETA, X):
        np.testing.assert_allclose(jax.hessian(bound)(point), bound.curvature.dense(), rtol=1e-11, atol=1e-13)


def test_mean_of_many_equal_bounds_is_one_of_them():
    """Rounding does not grow with their number, which is what a sum of equal numbers one by one would do."""

    @jax.jit
    def of(features):
        theta = jnp.array([1.0, 1.5, 2.0], jnp.float32)
        bound = jax.vmap(lambda f: one_bound(f, theta))(features).mean()
        return bound.value, bound.grad, bound.curvature.dense(), bound.curvature.mv(theta)

    features = np.random.default_rng(0).uniform(0.1, 1, size=(1, 2, 3)).astype(np.float32)
    for many, one in zip(of(np.tile(features, (30_000, 1, 1))), of(features), strict=True):
        np.testing.assert_allclose(many, one, rtol=0, atol=8 * np.finfo(np.float32).eps * np.abs(one).max())


# Sharding


def test_mean_of_a_batch_sharded_over_devices():
    """On an explicit mesh, in a process with two devices."""
    script = """
import jax, jax.numpy as jnp, numpy as np, qbound
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Explicit,))
features = np.random.default_rng(0).normal(size=(70, 5, 3)).astype(np.float32)
theta = np.ones(3, np.float32)
def mean(features, theta, order):
    one = lambda f: qbound.log_partition_bound(f @ theta, order=order).pullback(f, theta)
    bound = jax.vmap(one)(features).mean()
    return bound.value, bound.grad, bound.curvature.mv(theta)
for order in ("max_first", "descending", "given"):
    expected = mean(jnp.asarray(features), jnp.asarray(theta), order)
    with jax.set_mesh(mesh):
        placed = jax.device_put(features, NamedSharding(mesh, P("b")))
        got = jax.jit(mean, static_argnums=2)(placed, jnp.asarray(theta), order)
    for a, b in zip(got, expected):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)
"""
    result = processes.run("-c", script, quick=True, devices=2)
    assert result.returncode == 0, result.stderr


# Records


def test_bound_is_frozen_hashable_and_compared_by_identity():
    bound = one_bound(FEATURES[0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        bound.value = 0.0
    assert hash(bound) == hash(bound)
    assert bound == bound
    assert bound != one_bound(FEATURES[0])
    np.testing.assert_allclose(jax.jit(bound)(X), bound(X), rtol=1e-14)
    np.testing.assert_allclose(jax.vmap(bound)(jnp.stack([X, THETA])), [bound(X), bound(THETA)], rtol=1e-14)


def test_certificate_is_part_of_the_structure():
    logits = jnp.zeros(3)
    structures = {jax.tree.structure(make(logits)) for make in (qbound.bohning_bound, qbound.second_order_expansion)}
    assert len(structures) == 2


# Bad input


LOGIT_BOUND = qbound.log_partition_bound(FEATURES[0] @ THETA)


@pytest.mark.parametrize(
    ("features", "point", "error", "words"),
    [
        (FEATURES[0].T, None, ValueError, ["features", "5 labels", "(5, d)", "(3, 5)"]),
        (FEATURES[0][0], None, ValueError, ["features", "(n, d)", "(3,)"]),
        (FEATURES, None, ValueError, ["features", "(n, d)", "(4, 5, 3)", "vmap"]),
        (np.ones((5, 3), int), None, TypeError, ["features", "float", "int64"]),
        (np.ones((5, 0)), None, ValueError, ["features", "d >= 1", "(5, 0)"]),
        (FEATURES[0], np.zeros(4), ValueError, ["point", "(3,)", "(4,)"]),
        (FEATURES[0], {"theta": THETA}, ValueError, ["point", "structure", "theta"]),
        ((lambda v: v,), None, ValueError, ["features", "(forward, transpose)"]),
        ((lambda v: v[:2], lambda u: u), None, ValueError, ["features", "forward", "(5,)", "(2,)"]),
        ((lambda v: v, lambda u: u @ jnp.ones((4, 3))), None, ValueError, ["features", "transpose", "(5,)"]),
        ((lambda v: v["a"], lambda u: u), None, ValueError, ["features", "forward", "transpose returns"]),
        ((lambda v: v @ jnp.ones((5, 5)), lambda u: (u,)), None, ValueError, ["features", "jax.vjp", "[0]"]),
        (lambda v: v, None, ValueError, ["point", "linearise", "None"]),
        (lambda v: v[:2], np.zeros(5), ValueError, ["features", "function", "(5,)", "(2,)"]),
        ({"jacobian": FEATURES[0]}, None, TypeError, ["features", "(n, d)", "jacobian"]),
        (None, None, TypeError, ["features", "(n, d)", "None"]),
    ],
)
@pytest.mark.usefixtures("without_type_checks")
def test_mismatched_pullback_is_named(features, point, error, words):
    with pytest.raises(error) as caught:
        LOGIT_BOUND.pullback(features, point)
    for word in words:
        assert word in str(caught.value)


def test_bounds_without_points_cannot_be_added():
    unpointed = LOGIT_BOUND.pullback(FEATURES[0])
    for attempt in (lambda: unpointed + unpointed, lambda: one_bound(FEATURES[0]) + unpointed):
        with pytest.raises(ValueError, match="point: expected bounds with a point to add; got None"):
            attempt()
    batch = jax.vmap(lambda f: qbound.log_partition_bound(f @ THETA).pullback(f))(FEATURES)
    with pytest.raises(ValueError, match="pass point= to pullback"):
        batch.mean()


def test_bounds_of_different_spaces_cannot_be_added():
    with pytest.raises(ValueError, match=r"point of the second bound: expected .*\(3,\); got shape \(4,\)"):
        qbound.bohning_bound(jnp.zeros(3)) + qbound.bohning_bound(jnp.zeros(4))
    with pytest.raises(TypeError):
        qbound.bohning_bound(jnp.zeros(3)) + 1.0


def test_local_model_needs_its_point():
    with pytest.raises(ValueError, match="point: expected the parameters where the logits were linearised; got None"):
        LOGIT_BOUND.pullback(FEATURES[0], affine=False)


@pytest.mark.usefixtures("without_type_checks")
def test_numbers_must_be_numbers():
    with pytest.raises(ValueError, match=r"scale: expected a number; got an array of shape \(5,\)"):
        LOGIT_BOUND * jnp.ones(5)
    with pytest.raises(ValueError, match=r"radius: expected a number; got an array of shape \(3,\)"):
        qbound.local_bound(jnp.zeros(3), jnp.ones(3))
    with pytest.raises(TypeError, match="scale: expected a number; got 'two'"):
        LOGIT_BOUND * "two"
    with pytest.raises(TypeError, match="v: expected an array of real numbers; got dtype complex128"):
        LOGIT_BOUND.curvature.mv(jnp.ones(5, complex))


def test_scale_must_not_be_negative():
    for scale in (-1, -0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"scale: expected a finite number >= 0; got {scale}"):
            LOGIT_BOUND * scale
    assert np.isnan((LOGIT_BOUND * jnp.asarray(-1.0)).value)
    with pytest.raises(ValueError, match="divisor: expected a finite number > 0; got 0"):
        LOGIT_BOUND / 0


def test_batches_are_told_from_single_bounds():
    with pytest.raises(ValueError, match=r"bound: expected a batch made by vmap.*got shape \(\)"):
        LOGIT_BOUND.mean()
    with pytest.raises(ValueError, match=r"weights: expected an array of shape \(4,\); got shape \(3,\)"):
        jax.vmap(one_bound)(FEATURES).mean(weights=jnp.ones(3))
    batch = jax.vmap(qbound.log_partition_bound)(jnp.zeros((4, 5)))
    with pytest.raises(ValueError, match=r"one vector of logits.*\(4, 5\).*vmap"):
        batch.pullback(FEATURES)
    for attempt in (lambda: 2 * batch, lambda: batch + batch):
        with pytest.raises(ValueError, match=r"bound: expected one bound; got a batch of shape \(4,\)"):
            attempt()
    with pytest.raises(ValueError, match=r"b >= 1; got shape \(0,\)"):
        jax.vmap(qbound.log_partition_bound)(jnp.zeros((0, 5))).mean()


@pytest.mark.parametrize("make", [qbound.log_partition_bound, qbound.bohning_bound])
def test_batch_of_bounds_is_not_evaluated_as_one(make):
    logits = jnp.zeros((4, 4))
    with pytest.raises(ValueError, match=r"bound: expected one bound; got a batch of shape \(4,\).*jax\.vmap"):
        jax.vmap(make)(logits)(logits)


def test_repr_shows_shapes_and_not_numbers():
    text = repr(LOGIT_BOUND.pullback(np.ones((5, 1000)), np.ones(1000)))
    assert "Features(matrix=float64[5,1000])" in text
    assert "majorizes='globally'" in text
    assert len(text) < 1000
    assert "float64[3,5]" in repr(jax.vmap(qbound.log_partition_bound)(jnp.zeros((3, 5))))


def test_evaluation_at_the_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"x: expected an array of shape \(5,\); got shape \(4,\)"):
        LOGIT_BOUND(jnp.zeros(4))
    with pytest.raises(ValueError, match=r"x: expected a tree of structure"):
        LOGIT_BOUND({"x": jnp.zeros(5)})
    with pytest.raises(ValueError, match=r"x: expected an array of shape \(3,\); got shape \(5,\)"):
        LOGIT_BOUND.pullback(FEATURES[0])(jnp.zeros(5))


def test_negative_weights_give_nan():
    mean = jax.vmap(one_bound)(FEATURES).mean(weights=jnp.array([1.0, -1.0, 1.0, 1.0]))
    assert np.isnan(mean.value)
