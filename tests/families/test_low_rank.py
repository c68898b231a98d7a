"""Low-rank bounds: they are bounds, they are what they say, and they take little memory."""

import functools
import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp

import qbound
from qbound.curvature import LowRank
from qbound.curvature.model import curvature_by_example
from qbound.families.low_rank import frequent_directions as fd
from qbound.families.low_rank import row_by_row
from qbound.families.low_rank.bound import METHODS, low_rank
from tests import reference
from tests.optimizers import problems

every_method = pytest.mark.parametrize("method", METHODS)
every_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])

# (examples, labels, parameters, rank): k = 1, k of the rank, more parameters than rows, d < k, one label.
SHAPES = [(6, 3, 5, 1), (2, 4, 9, 3), (5, 3, 2, 4), (3, 1, 4, 2)]


@functools.partial(jax.jit, static_argnames=("rank", "method", "order", "block_size"))
def parts(features, theta, rank, method="frequent_directions", order="descending", block_size=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        bound = qbound.low_rank_bound(features, theta, rank=rank, method=method, order=order, block_size=block_size)
    return bound.curvature.basis, bound.curvature.scales, bound.curvature.diagonal


low_rank_bound = jax.jit(qbound.low_rank_bound, static_argnames=("rank", "method"))


def matrix(basis, scales, diagonal):
    basis, scales, diagonal = (np.asarray(x, np.float64) for x in (basis, scales, diagonal))
    return basis.T @ np.diag(scales) @ basis + np.diag(diagonal)


def sigma_of(features, theta, order="descending"):
    return reference.batch_bound(theta, features, order)[1]


def random_problem(m, n, d, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(m, n, d)), rng.normal(size=d)


def assert_bound(above, below, dtype):
    gap = np.linalg.eigvalsh(above - below)
    assert gap[0] >= -30 * np.finfo(dtype).eps * max(np.linalg.norm(above, 2), np.linalg.norm(below, 2))


@st.composite
def degenerate_problems(draw):
    """Features with equal examples, equal labels, zeros, examples in the span of others, ties, and sizes far apart."""
    m, n, d, k = draw(st.sampled_from(SHAPES))
    numbers = st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.floats(-3, 3).map(lambda x: round(x, 3)))
    features = draw(hnp.arrays(np.float64, (m, n, d), elements=numbers))
    kind = draw(st.sampled_from(["as drawn", "equal examples", "equal labels", "zeros", "span", "sizes"]))
    if kind == "equal examples":
        features = features[np.zeros(m, int)]
    elif kind == "equal labels":
        features = features[:, np.zeros(n, int)]
    elif kind == "zeros":
        features[draw(st.integers(0, m - 1)) :] = 0
    elif kind == "span":
        features = np.concatenate([features[:1], np.arange(1, m)[:, None, None] * features[:1]])
    elif kind == "sizes":
        features = features * np.logspace(0, 3, m)[:, None, None]
    theta = draw(hnp.arrays(np.float64, d, elements=numbers))
    return features, theta / (1 if kind != "sizes" else 100), k


@every_dtype
@every_method
@hypothesis.settings(max_examples=40)
@hypothesis.given(degenerate_problems())
def test_low_rank_bound_lies_above_the_curvature(method, dtype, problem):
    features, theta, k = problem
    # What the library sees, so that rounding of the arguments does not count.
    features, theta = features.astype(dtype), theta.astype(dtype)
    # In the given order: logits that differ by rounding alone could be sorted in another one than by the reference.
    split = parts(features, theta, rank=k, method=method, order="given")
    sigma = sigma_of(features.astype(np.float64), theta.astype(np.float64), "given")
    assert split[0].shape == (k, len(theta)) and split[0].dtype == dtype
    assert min(split[1].min(), split[2].min()) >= 0
    # Logits differ in float32 by what rounding of a product leaves, and with them the curvature.
    slack = 0 if dtype == np.float64 else 1e-5 * (1 + np.abs(features @ theta).max()) * np.linalg.norm(sigma, 2)
    assert_bound(matrix(*split) + slack * np.eye(len(theta)), sigma, dtype)


@pytest.mark.parametrize("method", ["exact", "frequent_directions"])
def test_rounding_of_many_rows_is_allowed_for(method):
    """As many directions as parameters, so that nothing but rounding is between the bound and the curvature."""
    features, theta = (x.astype(np.float32) for x in random_problem(300, 5, 20))
    above = matrix(*parts(features, theta, rank=20, method=method, block_size=100))
    sigma = sigma_of(features.astype(np.float64), theta.astype(np.float64))
    assert np.linalg.eigvalsh(above - sigma)[0] > -2e-7 * np.linalg.norm(sigma, 2)
    np.testing.assert_allclose(above, sigma, atol=1e-4 * np.linalg.norm(sigma, 2))


def _repeated_rows(kind, m, d):
    rng = np.random.default_rng(0)
    if kind == "one":
        return np.tile(rng.normal(size=(1, 2, d)), (m, 1, 1))
    return np.tile(rng.normal(size=(2, 2, d)), (m // 2, 1, 1))


@every_method
@pytest.mark.parametrize(("kind", "m", "d", "k"), [("one", 30_000, 1, 1), ("one", 16_384, 3, 3), ("two", 16_384, 8, 3)])
def test_rounding_of_equal_rows_is_allowed_for(method, kind, m, d, k):
    """Equal rows are rounded in the same direction, so that what is lost grows with their number."""
    features, theta = _repeated_rows(kind, m, d).astype(np.float32), np.linspace(1, 2, d).astype(np.float32)
    bound = low_rank_bound(features, theta, rank=k, method=method)
    once = features[:2].astype(np.float64)
    grad, sigma = reference.batch_bound(theta.astype(np.float64), once)
    eps, size = np.finfo(np.float32).eps, np.abs(once).max()
    np.testing.assert_allclose(bound.grad, grad, atol=8 * eps * size)
    np.testing.assert_allclose(bound.value, np.mean([reference.log_sum_exp(f @ theta) for f in once]), rtol=8 * eps)
    above = matrix(bound.curvature.basis, bound.curvature.scales, bound.curvature.diagonal)
    # Logits, weights and factors of the rows are rounded, too, by a few units.
    assert np.linalg.eigvalsh(above - sigma)[0] >= -16 * eps * np.linalg.norm(sigma, 2)
    if method != "paper" or d == 1:
        assert np.linalg.norm(above - sigma, 2) < 6e-3 * np.linalg.norm(sigma, 2)


@every_method
@pytest.mark.parametrize("kind", ["one", "two"])
def test_more_directions_than_equal_rows_have_do_no_harm(method, kind):
    """What rounding leaves of a row across the span of the others is no direction of its own."""
    features, theta = _repeated_rows(kind, 2000, 15).astype(np.float32), np.linspace(1, 2, 15).astype(np.float32)
    curvature = low_rank_bound(features, theta, rank=10, method=method).curvature
    sigma = sigma_of(features[:2].astype(np.float64), theta.astype(np.float64))
    above = matrix(curvature.basis, curvature.scales, curvature.diagonal)
    # The paper's method bounds the cross terms of two rows, once.
    assert np.linalg.norm(above - sigma, 2) < 5e-3 * np.linalg.norm(sigma, 2)


@every_method
def test_chunks_of_rows_give_a_bound(method, monkeypatch):
    """Many rows are summed in chunks, of which the last is not full; at the rank of the curvature nothing is lost."""
    for module in (fd, row_by_row):
        monkeypatch.setattr(module, "LARGEST", 12)
    features, theta = random_problem(23, 4, 6)
    sigma = sigma_of(features, theta)
    # By programs of their own: compiled ones keep the size of chunks.
    for k in (2, 6):
        bound = jax.jit(lambda f, t, k=k: qbound.low_rank_bound(f, t, rank=k, method=method))(features, theta)
        above = np.asarray(bound.curvature.dense())
        assert_bound(above, sigma, np.float64)
        if k == 6 and method != "paper":
            np.testing.assert_allclose(above, sigma, atol=1e-11)
    curvature = jax.jit(functools.partial(of_model.__wrapped__, qbound.linear_logits, method=method, rank=3))
    p = problems.linear(b=17)
    expected, _ = problems.affine_curvature(p.params, p.inputs)
    assert_bound(curvature(p.params, p.inputs, jnp.ones(17)), expected, np.float64)


@every_method
@pytest.mark.parametrize("order", ["given", "max_first", "descending"])
def test_orders_are_those_of_the_full_bound(method, order):
    features, theta = random_problem(6, 4, 7)
    split = parts(features, theta, rank=30, method=method, order=order)
    sigma = sigma_of(features, theta, order)
    assert_bound(matrix(*split), sigma, np.float64)
    if method != "paper":
        np.testing.assert_allclose(matrix(*split), sigma, atol=1e-12)


@pytest.mark.parametrize("order", ["given", "descending"])
@pytest.mark.parametrize(("m", "n", "d", "k"), [(8, 4, 6, 3), (8, 3, 5, 1), (4, 3, 9, 20)])
def test_paper_equals_its_transcription(m, n, d, k, order):
    features, theta = random_problem(m, n, d, seed=k)
    basis, scales, diagonal = parts(features, theta, rank=k, method="paper", order=order)
    v, s, expected = reference.algorithm_3(reference.low_rank_rows(theta, features, order), min(k, d))
    np.testing.assert_allclose(diagonal, expected, rtol=1e-10)
    np.testing.assert_allclose(matrix(basis, scales, diagonal), matrix(v, s, expected), atol=1e-10)
    np.testing.assert_allclose(np.sort(scales)[-len(s) :], np.sort(s), atol=1e-10)


def test_dropping_the_cross_terms_is_no_bound():
    """Algorithm 4 of [JC12]: after the rows (1, 0) and (1, 1), diag(2, 1) stands for a matrix with off-diagonal 1."""
    rows = np.array([[1.0, 0.0], [1.0, 1.0]])
    dropped = matrix(*reference.algorithm_3(rows, 1, cross_terms=False))
    np.testing.assert_allclose(dropped, np.diag([2.0, 1.0]))
    assert np.linalg.eigvalsh(dropped - rows.T @ rows)[0] <= -0.99
    assert_bound(matrix(*reference.algorithm_3(rows, 1)), rows.T @ rows, np.float64)


def test_exact_equals_its_reference():
    features, theta = random_problem(8, 4, 6)
    basis, scales, diagonal = parts(features, theta, rank=3, method="exact", order="given")
    expected, expected_diagonal = reference.low_rank_exact(reference.low_rank_rows(theta, features), 3)
    np.testing.assert_allclose(diagonal, expected_diagonal, rtol=1e-9)
    np.testing.assert_allclose(matrix(basis, scales, 0 * diagonal), expected, atol=1e-11)


def test_frequent_directions_equal_their_reference():
    features, theta = random_problem(8, 4, 6)
    rows = reference.low_rank_rows(theta, features)
    rows = rows[np.arange(len(rows)) % 4 != 0]  # the first label of an example has none
    basis, scales, diagonal = parts(features, theta, rank=3, order="given", block_size=6)
    expected, delta = reference.frequent_directions(rows, 3, block=6)
    np.testing.assert_allclose(diagonal, np.full(6, delta), rtol=1e-9)
    np.testing.assert_allclose(matrix(basis, scales, 0 * diagonal), expected, atol=1e-11)
    np.testing.assert_allclose(basis @ basis.T, np.eye(3), atol=1e-12)


@every_dtype
@pytest.mark.parametrize("method", ["exact", "frequent_directions"])
def test_equal_to_the_curvature_at_its_rank(method, dtype):
    features, theta = random_problem(1, 5, 9)  # one example: rank n - 1
    features, theta = features.astype(dtype), theta.astype(dtype)
    split = parts(features, theta, rank=4, method=method)
    sigma = sigma_of(features.astype(float), theta.astype(float))
    np.testing.assert_allclose(matrix(*split), sigma, atol=50 * np.finfo(dtype).eps * np.linalg.norm(sigma, 2))
    paper = parts(features, theta, rank=4, method="paper")
    assert np.trace(matrix(*paper)) > 1.2 * np.trace(sigma)


@pytest.mark.parametrize(("k", "block"), [(1, None), (4, 3), (4, 40), (4, None), (12, None)])
def test_delta_is_within_its_limit(k, block):
    """(k + 1) Delta <= |A|^2 - |B|^2 and (k + 1 - j) Delta <= |A - A_j|^2; large blocks may exceed it by the slack."""
    features, theta = random_problem(150, 4, 30)
    features = features * np.logspace(0, -2, 30)
    _, scales, diagonal = parts(features, theta, rank=k, block_size=block)
    delta, values = float(diagonal[0]), np.linalg.eigvalsh(sigma_of(features, theta))[::-1]
    np.testing.assert_array_equal(diagonal, diagonal[0])
    assert delta > 0
    slack = fd.SLACK * (1 + 1e-9)
    assert (k + 1) * delta <= slack * (np.sum(values) - np.sum(scales))
    for j in range(k + 1):
        assert (k + 1 - j) * delta <= slack * np.sum(values[j:])


@every_method
def test_blocks_of_any_size_give_a_bound(method):
    features, theta = random_problem(7, 4, 6)
    sigma, results = sigma_of(features, theta), []
    for block_size in (1, 5, 9) if method == "frequent_directions" else (2, 1000):
        results.append(matrix(*parts(features, theta, rank=2, method=method, block_size=block_size)))
        assert_bound(results[-1], sigma, np.float64)
    if method != "frequent_directions":  # row by row, whatever the blocks
        np.testing.assert_allclose(results, np.broadcast_to(results[0], np.shape(results)), atol=1e-11)


def _spectrum(values, seed=0):
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(values), len(values))))
    return q @ np.diag(values) @ q.T


@every_dtype
def test_large_blocks_are_certified(dtype):
    """What the Cholesky factorisation decides is true: the residual of the shrunk rows is at most delta."""
    k, m, decided = 4, 100, set()
    shrink = jax.jit(lambda gram: fd._by_iteration(gram, k, k + 10))
    spectra = [np.logspace(0, -e, m) for e in (0.1, 1, 3, 8)]
    spectra += [np.r_[np.ones(k), np.full(m - k, 0.1)], np.r_[np.ones(k), np.zeros(m - k)], np.ones(m)]
    for values in spectra:
        gram = _spectrum(values).astype(dtype)
        shrunk, holds = shrink(gram)
        u, theta, sigma, delta = (np.asarray(x, np.float64) for x in shrunk)
        decided.add(bool(holds))
        if holds:
            h = np.eye(m) - u @ np.diag(1 - np.sqrt(np.minimum(sigma / theta, 1))) @ u.T
            residual = np.linalg.eigvalsh(h @ gram @ h)
            assert residual[-1] <= delta + 20 * np.finfo(dtype).eps
            assert sigma <= np.sort(values)[-k - 1] + 20 * np.finfo(dtype).eps
        # Whatever it decided, what is used has the limit.
        used = float(fd._shrink(jnp.asarray(gram), k).delta)
        assert used <= fd.SLACK * np.sort(values)[-k - 1] + 20 * np.finfo(dtype).eps
    assert decided == {True, False}


@functools.partial(jax.jit, static_argnames=("model", "method", "rank", "block_size"))
def of_model(model, params, inputs, weights, method, rank=3, block_size=None):
    bound = functools.partial(qbound.log_partition_bound, order="max_first")
    curvature = curvature_by_example(model, params, inputs, weights, bound=bound)
    return low_rank(curvature, rank=rank, method=method, block_size=block_size).dense()


@every_method
def test_linear_models_and_any_models_have_the_same_rows(method):
    p = problems.linear(b=7)
    weights = jnp.asarray([1.0, 2, 0, 1, 0.5, 1, 1])
    known, unknown = (
        of_model(model, p.params, p.inputs, weights, method) for model in (qbound.linear_logits, problems.affine)
    )
    np.testing.assert_allclose(known, unknown, atol=1e-10)
    repeated = np.repeat(np.arange(7), [2, 4, 0, 2, 1, 2, 2])
    expected, _ = problems.affine_curvature(p.params, p.inputs[repeated])
    assert_bound(known, expected, np.float64)


@pytest.mark.parametrize("block_size", [1, 4, None])
def test_sequences_and_networks_have_rows_by_vjp(block_size):
    p = problems.linear(b=6)
    sequences = p.inputs.reshape(2, 3, 4)
    weights = jnp.ones((2, 3))
    for model in (qbound.linear_logits, lambda params, x: x @ params["weights"] + params["bias"][None, None, :]):
        full = of_model(model, p.params, sequences, weights, "frequent_directions", rank=15, block_size=block_size)
        expected, _ = problems.affine_curvature(p.params, p.inputs)
        np.testing.assert_allclose(full, expected, atol=1e-10)


def test_value_and_gradient_are_those_of_the_mean_and_it_majorizes():
    features, theta = random_problem(20, 4, 6)
    bound = jax.jit(functools.partial(qbound.low_rank_bound, rank=2))(jnp.asarray(features), jnp.asarray(theta))
    np.testing.assert_allclose(bound.value, np.mean([reference.log_sum_exp(f @ theta) for f in features]))
    np.testing.assert_allclose(bound.grad, reference.batch_bound(theta, features)[0], atol=1e-12)
    assert bound.majorizes == "globally"
    for x in np.random.default_rng(1).normal(size=(20, 6)) * 4:
        assert bound(jnp.asarray(x)) >= np.mean([reference.log_sum_exp(f @ x) for f in features])
    np.testing.assert_allclose(bound(jnp.asarray(theta)), bound.value)


def test_without_jit_it_is_the_same():
    features, theta = random_problem(4, 3, 5)
    for method in METHODS:
        bound = qbound.low_rank_bound(jnp.asarray(features), jnp.asarray(theta), rank=2, method=method)
        np.testing.assert_allclose(
            bound.curvature.dense(), matrix(*parts(features, theta, rank=2, method=method)), atol=1e-12
        )


def test_methods_are_ordered_on_real_images():
    """Excess trace on handwritten digits, 65 x 10 parameters: paper > exact > frequent directions, by factors."""
    from sklearn.datasets import load_digits

    images = load_digits().data[:60] / 16
    inputs = jnp.asarray(np.c_[images, np.ones(60)])
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(65, 10)) / 4)
    logits = np.asarray(inputs @ weights)
    labels = [np.trace(reference.logit_bound(h, reference.max_first(h))[2]) for h in logits]
    exact_trace = np.mean(np.array(labels) * np.sum(np.asarray(inputs) ** 2, axis=1))
    excess = {
        method: float(np.trace(of_model(qbound.linear_logits, weights, inputs, jnp.ones(60), method, rank=10)))
        - exact_trace
        for method in METHODS
    }
    assert 0 < 1.5 * excess["frequent_directions"] < excess["exact"] < excess["paper"] / 2


def test_woodbury_equals_the_dense_solve_with_zeros_among_the_scales():
    features, theta = random_problem(1, 3, 8)
    for dtype, tolerance in ((np.float32, 2e-4), (np.float64, 1e-11)):
        curvature = LowRank(*parts(jnp.asarray(features, dtype), jnp.asarray(theta, dtype), rank=6))
        solve = jax.jit(LowRank.solve)
        assert np.sum(np.asarray(curvature.scales) < 1e-5) == 4  # of rank 2
        g = np.random.default_rng(0).normal(size=8)
        for damping in (1e-4, 1e-1, 10.0):
            above = matrix(curvature.basis, curvature.scales, curvature.diagonal)
            expected = np.linalg.solve(above + damping * np.eye(8), g)
            found = solve(curvature, jnp.asarray(g, dtype), jnp.asarray(damping, dtype))
            np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("method", METHODS)
def test_memory_is_that_of_the_basis(method):
    """No array of all parameters squared, and none of all rows by all parameters."""
    b, d, n, k = 500, 400, 10, 4

    def run(weights, inputs):
        bound = functools.partial(qbound.log_partition_bound, order="max_first")
        curvature = curvature_by_example(qbound.linear_logits, weights, inputs, jnp.ones(b, jnp.float32), bound=bound)
        return low_rank(curvature, rank=k, method=method).basis

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((d, n), (b, d))]
    memory = jax.jit(run).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    in_bases = memory.temp_size_in_bytes / (4 * k * d * n)
    assert in_bases < 40 < b * n / k / 10


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rank": 0}, ValueError, r"rank: expected an integer > 0; got 0"),
        ({"rank": 2.0}, TypeError, r"rank: expected an integer > 0; got 2.0"),
        ({"rank": 2, "method": "svd"}, ValueError, r"method: expected one of 'paper', 'exact', .*; got 'svd'"),
        ({"rank": 2, "order": "ascending"}, ValueError, r"order: expected one of"),
        ({"rank": 2, "block_size": 0}, ValueError, r"block_size: expected an integer > 0; got 0"),
        ({"rank": 2, "theta": jnp.ones(3)}, ValueError, r"theta: expected an array of shape \(5,\); got shape \(3,\)"),
        (
            {"rank": 2, "features": jnp.ones((3, 5))},
            ValueError,
            r"features: expected .*\(m, n, d\); got shape \(3, 5\)",
        ),
    ],
)
def test_errors_name_the_argument(options, error, words):
    features, theta = random_problem(2, 3, 5)
    arguments = {"features": jnp.asarray(features), "theta": jnp.asarray(theta), **options}
    with pytest.raises(error, match=words):
        qbound.low_rank_bound(**arguments)


def test_rank_above_the_number_of_parameters_warns_and_pads():
    features, theta = random_problem(4, 3, 2)
    with pytest.warns(UserWarning, match=r"rank: expected at most 2, the number of parameters; got 4"):
        bound = qbound.low_rank_bound(jnp.asarray(features), jnp.asarray(theta), rank=4)
    assert bound.curvature.basis.shape == (4, 2)
    np.testing.assert_array_equal(bound.curvature.basis[2:], 0)
    np.testing.assert_array_equal(bound.curvature.scales[2:], 0)
    np.testing.assert_allclose(bound.curvature.dense(), sigma_of(features, theta), atol=1e-12)


def test_logits_that_are_not_finite_give_nan():
    features, theta = random_problem(4, 3, 5)
    features[1, 1, 1] = np.nan
    for method in METHODS:
        assert np.isnan(parts(features, theta, rank=2, method=method)[2]).all()
