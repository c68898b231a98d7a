"""LSPFB: Algorithm 4 of the paper, and its memory across steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qbound
from tests import reference
from tests.optimizers import problems
from tests.optimizers.problems import flat


def explicit(theta, features):
    return features @ theta


@functools.cache
def explicit_problem(t=5, b=6, n=3, d=4):
    rng = np.random.default_rng(0)
    return rng.normal(size=d), rng.normal(size=(t, b, n, d)), rng.integers(n, size=(t, b))


@pytest.mark.parametrize("batch", [1, 6])
def test_paper_equals_its_transcription(batch):
    theta, features, labels = explicit_problem()
    features, labels = features[:, :batch], labels[:, :batch]
    tx = qbound.lspfb(problems.paper_schedule(0.9), explicit, rank=2, method="paper", l2=0.1, order="given")
    iterates, _ = problems.train(tx, explicit, jnp.asarray(theta), jnp.asarray(features), jnp.asarray(labels))
    rates = [0.9 / (t + 1) for t in range(len(features))]
    np.testing.assert_allclose(iterates, reference.algorithm_4(theta, features, labels, rates, k=2, l2=0.1), rtol=1e-8)


@pytest.mark.parametrize("model", [qbound.linear_logits, problems.affine])
def test_full_rank_is_spfb(model):
    p = problems.linear()
    low = qbound.lspfb(1.0, model, rank=15, l2=1e-2)
    full = qbound.spfb(1.0, model, l2=1e-2, solver="dense")
    (a, _), (b, _) = (problems.first_update(tx, model, *p) for tx in (low, full))
    np.testing.assert_allclose(flat(a), flat(b), rtol=1e-8)


def test_a_network_takes_rows_by_vjp():
    p, params = problems.linear(b=5), problems.network_params()
    low = qbound.lspfb(1.0, problems.network, rank=10, damping=0.1)
    full = qbound.spfb(1.0, problems.network, damping=0.1, solver="dense")
    (a, _), (b, _) = (problems.first_update(tx, problems.network, params, *p[1:]) for tx in (low, full))
    np.testing.assert_allclose(flat(a), flat(b), rtol=1e-7)  # 5 examples of 3 labels: rank 10


def test_a_step_of_one_never_increases_the_objective_of_its_batch():
    p = problems.linear(b=40, scale=3.0)
    for method in ("frequent_directions", "paper"):
        tx = qbound.lspfb(1.0, qbound.linear_logits, rank=2, method=method, l2=1e-2)
        batches = jnp.stack([p.inputs] * 8), jnp.stack([p.labels] * 8)
        iterates, _ = problems.train(tx, qbound.linear_logits, p.params, *batches)
        values = [
            problems.loss(problems.affine, jax.tree.map(lambda leaf, i=i: leaf[i], iterates), p.inputs, p.labels)
            + 0.5e-2 * sum(np.sum(np.asarray(leaf[i]) ** 2) for leaf in jax.tree.leaves(iterates))
            for i in range(8)
        ]
        assert np.all(np.diff(values) < 1e-12)


def test_weights_are_those_of_a_repeated_batch():
    p = problems.linear(b=4)
    tx = qbound.lspfb(1.0, qbound.linear_logits, rank=12, l2=1e-2)
    weights = jnp.asarray([1.0, 0.0, 3.0, 1.0])
    weighted, _ = problems.first_update(tx, qbound.linear_logits, *p, weights)
    rows = np.array([0, 2, 2, 2, 3])
    repeated, _ = problems.first_update(tx, qbound.linear_logits, p.params, p.inputs[rows], p.labels[rows])
    np.testing.assert_allclose(flat(weighted), flat(repeated), rtol=1e-7)


def test_carried_sketch_bounds_the_discounted_mean_of_curvatures():
    """And not the curvature of the last batch."""
    decay, rank = 0.7, 3
    batches = [problems.linear(b=6, seed=seed, scale=1 + seed) for seed in (3, 1, 0)]
    params = batches[0].params
    tx = qbound.scale_by_lspfb(problems.affine, rank=rank, damping=1e-2, decay=decay)
    state, update = tx.init(params), jax.jit(tx.update)
    total, count = 0, 0
    for p in batches:
        _, state = update(params, state, params, inputs=p.inputs)
        last, _ = problems.affine_curvature(params, p.inputs)
        total, count = decay * total + last, decay * count + 1
    sketch = state.spfb_sketch
    np.testing.assert_allclose(sketch.sketch_batches, count)
    basis, scales, diagonal = (np.asarray(x) for x in sketch[:3])
    above = basis.T @ np.diag(scales) @ basis + np.diag(diagonal)
    assert np.linalg.eigvalsh(above - total)[0] > -1e-10
    # The sum is above the last term; the mean, which steps are made with, need not be.
    full = qbound.scale_by_lspfb(problems.affine, rank=15, damping=1e-2, decay=decay)
    state, update = full.init(params), jax.jit(full.update)
    for p in batches[::-1]:
        _, state = update(params, state, params, inputs=p.inputs)
    sketch = state.spfb_sketch
    mean = sketch.sketch_basis.T @ np.diag(sketch.sketch_scales / sketch.sketch_batches) @ sketch.sketch_basis
    assert np.linalg.eigvalsh(mean - problems.affine_curvature(params, batches[0].inputs)[0])[0] < -1e-3


def test_carried_sketch_removes_the_bias_of_small_batches():
    """The one-dimensional counterexample: optimum -0.234; batches of one from the paper's choice go to 0.733."""
    features = jnp.asarray([[[1.0], [0.0]], [[1.0], [0.0]], [[5.0], [0.0]]])
    labels = jnp.asarray([0, 0, 1])
    rows = np.random.default_rng(0).integers(3, size=6000)
    batches = features[rows][:, None], labels[rows][:, None]

    def schedule(step):
        return 1 / (1 + step.astype(jnp.float64) / 200)

    ends = {}
    for decay in (0.0, 0.99):
        tx = qbound.lspfb(schedule, explicit, rank=1, l2=0.1, decay=decay)
        iterates, _ = problems.train(tx, explicit, jnp.zeros(1), *batches)
        ends[decay] = float(np.mean(iterates[3000:]))
    np.testing.assert_allclose(ends[0.0], 0.733, atol=0.05)
    np.testing.assert_allclose(ends[0.99], -0.234, atol=0.05)


def test_steps_are_held_back_while_the_sketch_fills():
    p = problems.linear(b=2)
    tx = qbound.lspfb(1.0, problems.affine, rank=3, l2=1e-4, decay=0.9)
    _, state = problems.first_update(tx, problems.affine, *p)
    assert 0 < optax.tree.get(state, "spfb_step_length") < 0.1
    inputs, labels = jnp.stack([p.inputs] * 30), jnp.stack([p.labels] * 30)
    _, state = problems.train(tx, problems.affine, p.params, inputs, labels)
    assert optax.tree.get(state, "spfb_step_length") > 0.9


def test_a_batch_that_is_not_finite_does_not_enter_the_sketch():
    p = problems.linear(b=6)
    tx = qbound.scale_by_lspfb(problems.affine, rank=3, damping=1e-2, decay=0.9)
    update = jax.jit(tx.update)
    _, state = update(p.params, tx.init(p.params), p.params, inputs=p.inputs)
    updates, after = update(p.params, state, p.params, inputs=p.inputs.at[0, 0].set(jnp.inf))
    np.testing.assert_array_equal(flat(updates), 0)
    assert after.spfb_info.spfb_nonfinite and after.spfb_info.spfb_nonfinite_total == 1
    jax.tree.map(np.testing.assert_array_equal, after.spfb_sketch, state.spfb_sketch)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_preconditions_spfb(decay):
    """Columns of sizes 1e-2 to 1e2, where CG alone needs many steps."""
    p = problems.linear(b=90, d=20)
    inputs = p.inputs * jnp.logspace(-2, 2, 20)[None, :]
    low = qbound.scale_by_lspfb(qbound.linear_logits, rank=63, damping=1e-6, decay=decay)
    steps = {}
    for name, precondition in {"alone": None, "low rank": low}.items():
        tx = qbound.spfb(
            1.0, problems.affine, l2=1e-4, solver="cg", max_steps=300, tolerance=1e-9, precondition=precondition
        )
        _, state = problems.first_update(tx, problems.affine, p.params, inputs, p.labels)
        steps[name] = int(optax.tree.get(state, "spfb_steps"))
    assert optax.tree.get(state, "spfb_converged")
    assert 4 * steps["low rank"] < steps["alone"], steps


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rank": 0}, ValueError, r"rank: expected an integer > 0; got 0"),
        ({"rank": 1.5}, TypeError, r"rank: expected an integer > 0; got 1.5"),
        ({"method": "svd"}, ValueError, r"method: expected one of 'paper', .*; got 'svd'"),
        ({"decay": 1.0}, ValueError, r"decay: expected a number in \[0, 1\); got 1.0"),
        ({"decay": -0.5}, ValueError, r"decay: expected a number in \[0, 1\); got -0.5"),
        ({"block_size": 0}, ValueError, r"block_size: expected an integer > 0; got 0"),
        ({"l2": 0.0}, ValueError, r"damping: expected l2 \+ damping > 0"),
        ({"logits_fn": 3}, TypeError, r"logits_fn: expected a function; got 3"),
    ],
)
def test_errors_name_the_argument(options, error, words):
    arguments = {"learning_rate": 1.0, "logits_fn": problems.affine, "rank": 2, "l2": 0.1, **options}
    with pytest.raises(error, match=words):
        qbound.lspfb(**arguments)


def test_rank_above_the_number_of_parameters_warns_once_and_works():
    p = problems.linear()
    tx = qbound.lspfb(1.0, qbound.linear_logits, rank=100, l2=1e-2, decay=0.5)
    with pytest.warns(UserWarning, match=r"rank: expected at most 15, the number of parameters; got 100") as caught:
        state = tx.init(p.params)
    assert len(caught) == 1
    assert optax.tree.get(state, "sketch_basis").shape == (100, 15)
    updates, state = jax.jit(tx.update)(p.params, state, p.params, inputs=p.inputs)
    np.testing.assert_array_equal(optax.tree.get(state, "sketch_basis")[15:], 0)
    assert np.isfinite(flat(updates)).all()


def test_curvature_of_the_callers_choice_is_not_carried():
    p = problems.linear()
    other = problems.linear(seed=7)
    tx = qbound.scale_by_lspfb(problems.affine, rank=15, damping=1e-2)
    chosen, _ = jax.jit(tx.update)(p.params, tx.init(p.params), p.params, curvature_inputs=other.inputs)
    expected, _ = jax.jit(tx.update)(p.params, tx.init(p.params), p.params, inputs=other.inputs)
    np.testing.assert_allclose(flat(chosen), flat(expected))
    carried = qbound.scale_by_lspfb(problems.affine, rank=15, damping=1e-2, decay=0.5)
    with pytest.raises(ValueError, match=r"curvature_inputs: expected None with decay="):
        carried.update(p.params, carried.init(p.params), p.params, curvature_inputs=other.inputs)


def test_as_a_preconditioner_its_own_damping_is_added():
    p = problems.linear()

    @jax.jit
    def solution(own, damping):
        tx = qbound.scale_by_lspfb(problems.affine, rank=15, damping=own)
        _, solve = tx.prepare(tx.remember(p.params), p.params, damping, inputs=p.inputs)
        return solve(p.params)

    np.testing.assert_allclose(flat(solution(0.5, 0.1)), flat(solution(0.2, 0.4)), rtol=1e-8)


@pytest.mark.parametrize("limited", [True, False])
def test_steps_with_a_memory_are_limited_unless_that_is_declined(limited):
    tx = qbound.lspfb(1.0, problems.affine, rank=4, l2=0.1, decay=0.9, limit_steps=limited)
    state = tx.init(problems.linear().params)
    assert (optax.tree.get(state, "spfb_limit") is not None) == limited


def test_parameters_may_have_different_dtypes():
    """Everything is computed in the widest of them."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12, 4)))
    params = {"bias": jnp.zeros(3, jnp.float32), "weights": jnp.ones((4, 3))}
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
    tx = qbound.scale_by_lspfb(qbound.linear_logits, rank=3, damping=0.1)
    with jax.numpy_dtype_promotion("standard"):
        mixed, expected = (jax.jit(tx.update)(p, tx.init(p), p, inputs=x)[0] for p in (params, wide))
    for name, leaf in params.items():
        assert mixed[name].dtype == leaf.dtype
        np.testing.assert_allclose(mixed[name], expected[name], rtol=1e-5, atol=1e-6)
