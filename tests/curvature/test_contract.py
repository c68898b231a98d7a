"""Every curvature keeps one contract: what its operations say about the operator agrees."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qbound
from qbound.curvature import Batch, Centered, Curvature, Dense, LowRank, Scaled, Sum
from qbound.curvature.model import mean_curvature

RNG = np.random.default_rng(0)
LOGITS = 2 * RNG.normal(size=6)
FEATURES = RNG.normal(size=(6, 4))
WIDE_FEATURES = RNG.normal(size=(6, 9))


def _psd(d, rank):
    rows = RNG.normal(size=(rank, d))
    return rows.T @ rows


def _chain(order="descending", dtype=jnp.float64, n=6):
    logits = np.resize(LOGITS, n) + 0.1 * np.arange(n)
    return qbound.log_partition_bound(jnp.asarray(logits, dtype), order=order).curvature


def _pair(weights):
    """h = W x for a matrix W and a fixed x, as a map from {"W": W}."""
    x = jnp.asarray(weights)
    forward = jax.tree_util.Partial(lambda x, params: params["W"] @ x, x)
    transpose = jax.tree_util.Partial(lambda x, u: {"W": jnp.outer(u, x)}, x)
    return forward, transpose


def _pulled(features, dtype=jnp.float64, order="max_first"):
    features = features if isinstance(features, tuple) else jnp.asarray(features, dtype)
    return qbound.log_partition_bound(jnp.asarray(LOGITS, dtype), order=order).pullback(features).curvature


def _batch(dtype=jnp.float64):
    logits, features = jnp.asarray(RNG.normal(size=(3, 5)), dtype), jnp.asarray(RNG.normal(size=(3, 5, 4)), dtype)
    terms = jax.vmap(lambda h, f: qbound.log_partition_bound(h).pullback(f).curvature)(logits, features)
    return Batch(terms, jnp.asarray([0.5, 0.0, 2.0], dtype))


def _network(params, x):
    return jnp.tanh(x @ params["first"]) @ params["last"] + params["bias"][None, :]


def _model(dtype, *, b, n=4, d=3, hidden=None, microbatch_size=None):
    rng = np.random.default_rng(b)
    weights = {"weights": rng.normal(size=(d, n)), "bias": rng.normal(size=n)}
    network = {"first": rng.normal(size=(d, hidden or 1)), "last": rng.normal(size=(hidden or 1, n)), **weights}
    params = {name: network[name] for name in ("first", "last", "bias")} if hidden else weights
    return mean_curvature(
        _network if hidden else qbound.linear_logits,
        jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params),
        jnp.asarray(rng.normal(size=(b, d)), dtype),
        jnp.asarray([0.5, 0.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0][:b], dtype),
        bound=functools.partial(qbound.log_partition_bound, order="max_first"),
        microbatch_size=microbatch_size,
    )


def _low_rank(dtype, shapes):
    rng, d = np.random.default_rng(2), 8
    basis, _ = np.linalg.qr(rng.normal(size=(d, 3)))
    arrays = (jnp.asarray(x, dtype) for x in (basis.T, [3.0, 0.5, 0.0], rng.uniform(0, 0.1, size=d)))
    if shapes is None:
        return LowRank(*arrays)
    tree = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    leaves, structure = jax.tree.flatten(tree)
    return LowRank(*arrays, parameters=(structure, tuple(leaves)))


CURVATURES: dict[str, Callable[..., Curvature]] = {
    "dense": lambda dtype: Dense(jnp.asarray(_psd(5, 3), dtype)),
    "centered": lambda dtype: Centered(jnp.asarray([0.5, 0.0, 2.0, 1.0], dtype)),
    "centered, no weight": lambda dtype: Centered(jnp.zeros(3, dtype)),
    "sequential": lambda dtype: _chain("given", dtype),
    "sequential, one label": lambda dtype: _chain("given", dtype, n=1),
    "largest first, lead": lambda dtype: _chain("max_first", dtype),
    "largest first, many": lambda dtype: _chain("max_first", dtype, n=300),
    "largest first, pairwise": lambda dtype: _chain("descending", dtype),
    "largest first, sorted": lambda dtype: _chain("descending", dtype, n=100),
    "pullback, fewer parameters than labels": lambda dtype: _pulled(FEATURES, dtype),
    "pullback, more parameters than labels": lambda dtype: _pulled(WIDE_FEATURES, dtype),
    "pullback, functions of one number": lambda dtype: _pulled(_pair(jnp.asarray([0.7], dtype)), dtype),
    "pullback, functions of many numbers": lambda dtype: _pulled(_pair(jnp.asarray([0.7, -1.0, 0.3], dtype)), dtype),
    "scaled": lambda dtype: Scaled(_chain(dtype=dtype), jnp.asarray(2.5, dtype)),
    "scaled by zero": lambda dtype: Scaled(_chain(dtype=dtype), jnp.asarray(0.0, dtype)),
    "sum": lambda dtype: Sum((_chain(dtype=dtype), Centered(jnp.ones(6, dtype)), Dense(jnp.eye(6, dtype=dtype)))),
    "batch": _batch,
    "model, linear": functools.partial(_model, b=2, n=3, d=7),
    "model, linear, one example": functools.partial(_model, b=1),
    "model, network": functools.partial(_model, b=11, hidden=2),
    "model, network, fewer rows than parameters": functools.partial(_model, b=2, hidden=5),
    "low rank": lambda dtype: _low_rank(dtype, None),
    "low rank, of a tree": lambda dtype: _low_rank(dtype, {"b": (2,), "a": (3, 2)}),
    "model in pieces, network": functools.partial(_model, b=11, hidden=2, microbatch_size=4),
}
every_curvature = pytest.mark.parametrize("name", CURVATURES)
every_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])


@functools.cache
def build(name, dtype):
    return jax.jit(lambda: CURVATURES[name](dtype))()


def _vector(curvature, dtype, seed=0):
    """A vector of the space of `curvature`, laid out flat and as a tree; in NumPy, which compiles nothing."""
    leaves, structure = jax.tree.flatten(curvature.domain())
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(dtype)}
    ends = np.cumsum([leaf.size for leaf in leaves])
    flat = np.random.default_rng(seed).normal(size=ends[-1]).astype(dtype)
    parts = zip(leaves, np.split(flat, ends[:-1]), strict=True)
    return flat, jax.tree.unflatten(structure, [jnp.asarray(part.reshape(leaf.shape)) for leaf, part in parts])


def _flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@jax.jit
def _operations(curvature, v, damping):
    return curvature.mv(v), curvature.quadratic(v), curvature.dense(), curvature.factor(), curvature.solve(v, damping)


@functools.cache
def operations(name, dtype, seed=0):
    """A vector, and every operation on it, compiled as one."""
    curvature = build(name, dtype)
    flat, v = _vector(curvature, dtype, seed)
    return flat, v, *jax.tree.map(np.asarray, _operations(curvature, v, jnp.asarray(0.1, dtype)))


def test_every_curvature_of_the_package_is_here():
    covered = {type(build(name, jnp.float64)) for name in CURVATURES}
    assert covered == {subclass for subclass in Curvature.__subclasses__()}


@every_dtype
@every_curvature
def test_product_equals_the_dense_product(name, dtype):
    flat, v, product, _, matrix, _, _ = operations(name, dtype)
    assert jax.tree.structure(product) == jax.tree.structure(v)
    assert _flat(product).dtype == matrix.dtype == dtype
    tolerance = 60 * jnp.finfo(dtype).eps * (1 + np.abs(matrix).max())
    np.testing.assert_allclose(_flat(product), matrix @ flat, rtol=0, atol=tolerance)


@every_dtype
@every_curvature
def test_quadratic_form_equals_the_dense_one_and_is_not_negative(name, dtype):
    for seed in range(3):
        flat, _, _, form, matrix, _, _ = operations(name, dtype, seed)
        assert form.dtype == dtype
        assert form >= 0
        np.testing.assert_allclose(form, flat @ matrix @ flat, rtol=1e3 * jnp.finfo(dtype).eps)


@every_dtype
@every_curvature
def test_factor_squares_to_the_matrix(name, dtype):
    *_, matrix, rows, _ = operations(name, dtype)
    assert rows.dtype == dtype
    tolerance = 60 * jnp.finfo(dtype).eps * (1 + np.abs(matrix).max())
    np.testing.assert_allclose(rows.T @ rows, matrix, rtol=0, atol=tolerance)
    np.testing.assert_allclose(matrix, matrix.T, rtol=0, atol=tolerance)


@every_dtype
@every_curvature
def test_probe_equals_the_rows_of_the_factor_with_signs(name, dtype):
    curvature = build(name, dtype)
    *_, matrix, rows, _ = operations(name, dtype)
    signs = np.random.default_rng(3).choice([-1.0, 1.0], size=len(rows)).astype(dtype)
    probe = jax.jit(lambda c, signs: c.probe(signs))(curvature, signs)
    assert probe.dtype == dtype
    np.testing.assert_allclose(probe, signs @ rows, rtol=0, atol=60 * jnp.finfo(dtype).eps * (1 + np.abs(rows).max()))


@every_curvature
@pytest.mark.parametrize("damping", [1e-3, 2.0])
def test_solve_equals_the_dense_solve(damping, name):
    curvature = build(name, jnp.float64)
    flat, g, *_, matrix, _, _ = operations(name, jnp.float64)
    matrix = np.asarray(matrix)
    expected = np.linalg.solve(matrix + damping * np.eye(len(matrix)), flat)
    solution = _operations(curvature, g, damping)[-1]
    assert jax.tree.structure(solution) == jax.tree.structure(g)
    np.testing.assert_allclose(_flat(solution), expected, rtol=1e-9, atol=1e-9)


@every_curvature
def test_solve_in_float32_leaves_a_small_residual(name):
    flat, *_, matrix, _, solution = operations(name, jnp.float32)
    solution = _flat(solution)
    assert solution.dtype == jnp.float32
    residual = matrix @ solution + np.float32(0.1) * solution - flat
    assert np.abs(residual).max() < 1e-4


@every_curvature
def test_damping_must_be_positive(name):
    curvature = build(name, jnp.float64)
    _, g = _vector(curvature, jnp.float64)
    for damping in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=rf"damping: expected a finite number > 0; got {damping}"):
            curvature.solve(g, damping)
    # An array has no value while traced: a wrong one is seen in the result.
    assert np.isnan(_flat(_operations(curvature, g, jnp.asarray(-1.0))[-1])).all()


# One of each: without jit, every operation on a new shape is a program of its own.
@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "centered",
        "sequential",
        "largest first, lead",
        "largest first, pairwise",
        "largest first, sorted",
        "pullback, fewer parameters than labels",
        "pullback, more parameters than labels",
        "pullback, functions of many numbers",
        "scaled",
        "sum",
        "batch",
        "low rank",
        "model, linear",
        "model, network",
        "model in pieces, network",
    ],
)
def test_operations_are_the_same_under_jit(name):
    curvature = build(name, jnp.float64)
    _, v = _vector(curvature, jnp.float64)

    eager = curvature.mv(v), curvature.quadratic(v), curvature.dense(), curvature.solve(v, 0.1)
    _, _, *compiled, _, solution = operations(name, jnp.float64)
    for a, b in zip(eager, (*compiled, solution), strict=True):
        np.testing.assert_allclose(_flat(a), _flat(b), rtol=1e-9, atol=1e-11)


@every_curvature
def test_curvature_is_a_pytree_that_keeps_its_structure(name):
    curvature = build(name, jnp.float64)
    leaves, structure = jax.tree.flatten(curvature)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is type(curvature)
    assert jax.tree.structure(again) == structure
    assert all(isinstance(path[0], jax.tree_util.GetAttrKey) for path, _ in jax.tree_util.tree_leaves_with_path(again))


@every_curvature
@pytest.mark.parametrize("operation", ["mv", "quadratic", "solve"])
def test_vectors_of_the_wrong_shape_are_named(operation, name):
    curvature = build(name, jnp.float64)
    argument, extra = ("g", (1.0,)) if operation == "solve" else ("v", ())
    call = getattr(curvature, operation)
    with pytest.raises(ValueError, match=r"[gv]: expected .*; got .*"):
        call(jnp.ones(17), *extra)
    with pytest.raises(ValueError, match=r"[gv]: expected a tree of structure"):
        call((jnp.ones(6),), *extra)
    shapes = {leaf.shape for leaf in jax.tree.leaves(curvature.domain())}
    wrong = jax.tree.map(lambda leaf: jnp.ones(leaf.shape[::-1] + (1,)), curvature.domain())
    with pytest.raises(ValueError, match=rf"{argument}|v: expected an array of shape") as caught:
        call(wrong, *extra)
    assert any(str(shape) in str(caught.value) for shape in shapes)


@every_curvature
@pytest.mark.parametrize("operation", ["mv", "quadratic", "dense", "factor", "probe", "solve"])
def test_batches_of_curvatures_are_not_taken_for_one(operation, name):
    """Broadcasting would otherwise give plausible and wrong numbers."""
    curvature = build(name, jnp.float64)
    if not jax.tree.leaves(curvature):
        return
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), curvature)
    vectors = jax.tree.map(lambda leaf: jnp.ones((2, *leaf.shape)), curvature.domain())
    arguments = {"mv": (vectors,), "quadratic": (vectors,), "solve": (vectors, 0.1), "probe": (jnp.ones(6),)}
    arguments = arguments.get(operation, ())
    with pytest.raises((ValueError, TypeError)):
        getattr(batch, operation)(*arguments)


@pytest.mark.parametrize("name", ["dense", "centered", "sequential", "largest first, lead", "largest first, pairwise"])
def test_batches_are_told_to_use_vmap(name):
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), build(name, jnp.float64))
    for call in (lambda: batch.mv(jnp.ones((2, 6))), batch.dense, batch.factor):
        with pytest.raises(
            ValueError, match=r"curvature: expected one curvature; got a batch of shape \(2,\).*jax\.vmap"
        ):
            call()


@pytest.mark.parametrize(
    ("damping", "error", "words"),
    [
        (jnp.ones(6), ValueError, r"damping: expected a number; got an array of shape \(6,\)"),
        ("0.1", TypeError, r"damping: expected a number; got '0.1'"),
    ],
)
@pytest.mark.usefixtures("without_type_checks")
def test_damping_must_be_a_number(damping, error, words):
    with pytest.raises(error, match=words):
        build("sequential", jnp.float64).solve(jnp.ones(6), damping)


def test_curvatures_are_immutable():
    with pytest.raises(AttributeError):
        _chain().beta = jnp.zeros(6)


@pytest.mark.parametrize("transposed", [False, True])
def test_pullback_makes_no_array_larger_than_it_must(transposed):
    """With many labels and few parameters, nothing is quadratic in the labels; and the other way round."""
    n, d = (8, 20_000) if transposed else (20_000, 8)

    def run(h, features, g):
        curvature = qbound.log_partition_bound(h, order="max_first").pullback(features).curvature
        dense = jnp.zeros(()) if transposed else curvature.dense()
        return curvature.mv(g), curvature.factor(), curvature.solve(g, 0.1), dense

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n,), (n, d), (d,))]
    memory = jax.jit(run).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 20 * 4 * n * d
