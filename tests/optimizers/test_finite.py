"""Parameters stay finite whatever the rate and the data are, and what was skipped is reported."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import qbound
from qbound import trees
from qbound.curvature.model import solve_damped
from qbound.linalg.cg import conjugate_gradients
from qbound.linalg.dense import solve_dense
from qbound.optimizers import spfb as step
from qbound.optimizers.base import keep_params_finite, stays_finite
from tests.optimizers import problems
from tests.optimizers.problems import flat

OPTIMIZERS = {
    "dense": (qbound.spfb, {"solver": "dense"}),
    "cg": (qbound.spfb, {"solver": "cg", "adaptive_damping": 0.1}),
    "low rank": (qbound.lspfb, {"rank": 4}),
    "Kronecker": (qbound.kspfb, {"momentum": 0.0}),
}
PREFIX = {"dense": "spfb", "cg": "spfb", "low rank": "spfb", "Kronecker": "kspfb"}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
LIKE = jax.ShapeDtypeStruct((4,), jnp.float32)


def trained(name, rate, steps):
    """Every iterate in float32, and the last state."""
    make, options = OPTIMIZERS[name]
    tx = make(rate, problems.affine, l2=1e-2, **options)
    p = problems.linear(b=10, dtype=jnp.float32)
    inputs, labels = (jnp.broadcast_to(a, (steps, *a.shape)) for a in (p.inputs, p.labels))
    iterates, state = problems.train(tx, problems.affine, p.params, inputs, labels)
    return jax.vmap(lambda tree: ravel_pytree(tree)[0])(iterates), state


# The rate


@every_optimizer
def test_rate_that_is_not_a_number_leaves_the_parameters_and_is_counted_once(name):
    iterates, state = trained(name, lambda t: jnp.where(t == 2, jnp.nan, 0.5).astype(jnp.float32), 5)
    moved = np.abs(np.diff(iterates, axis=0)).max(axis=1) > 0
    np.testing.assert_array_equal(moved, [True, False, True, True])
    assert np.isfinite(iterates).all()
    assert not optax.tree.get(state, f"{PREFIX[name]}_nonfinite")
    assert optax.tree.get(state, f"{PREFIX[name]}_nonfinite_total") == 1


@pytest.mark.parametrize("name", ["dense", "cg", "low rank"])
def test_rate_far_too_large_never_makes_parameters_infinite(name):
    iterates, state = trained(name, 1e25, 10)
    assert np.isfinite(iterates).all()
    assert np.abs(iterates).max() > 1e20
    np.testing.assert_array_equal(iterates[-1], iterates[-2])
    assert optax.tree.get(state, "spfb_nonfinite")
    assert optax.tree.get(state, "spfb_nonfinite_total") > 5


def test_rate_of_kspfb_far_too_large_is_met_by_its_limit():
    iterates, state = trained("Kronecker", 1e25, 10)
    assert np.isfinite(iterates).all()
    assert optax.tree.get(state, "kspfb_nonfinite_total") == 0
    assert optax.tree.get(state, "kspfb_step_length") < 1e-20


@pytest.mark.parametrize(
    "make", [qbound.scale_by_spfb, functools.partial(qbound.scale_by_lspfb, rank=4), qbound.scale_by_kspfb]
)
def test_direction_alone_stops_parameters_that_run_away(make):
    """So that chains whose rate is far too large end at numbers that are huge, and finite."""
    chain = optax.chain(
        optax.add_decayed_weights(1e-2), make(problems.affine, damping=1e-2), optax.scale_by_learning_rate(100.0)
    )
    p = problems.linear(b=10, dtype=jnp.float32)
    inputs, labels = (jnp.broadcast_to(a, (40, *a.shape)) for a in (p.inputs, p.labels))
    iterates, _ = problems.train(chain, problems.affine, p.params, inputs, labels)
    iterates = jax.vmap(lambda tree: ravel_pytree(tree)[0])(iterates)
    assert np.isfinite(iterates).all()
    assert 1e18 < np.abs(iterates).max() < 1e30
    np.testing.assert_array_equal(iterates[-1], iterates[-2])


def test_skipped_update_has_no_length_and_no_decrease():
    p = problems.linear(b=10, dtype=jnp.float32)
    tx = qbound.spfb(jnp.nan, problems.affine, l2=1e-2)
    updates, (state, _) = problems.first_update(tx, problems.affine, p.params, p.inputs, p.labels)
    np.testing.assert_array_equal(flat(updates), 0 * flat(p.params))
    info = state.spfb_info
    assert info.spfb_nonfinite and info.spfb_nonfinite_total == 1
    assert info.spfb_step_length == info.spfb_predicted_decrease == 0
    assert info.spfb_converged, "the solution itself was fine"


def test_update_that_the_direction_skipped_is_not_counted_again():
    p = problems.linear(b=10, dtype=jnp.float32)
    tx = qbound.spfb(jnp.nan, problems.affine, l2=1e-2)
    _, state = problems.first_update(tx, problems.affine, p.params, p.inputs.at[0, 0].set(jnp.nan), p.labels)
    assert optax.tree.get(state, "spfb_nonfinite_total") == 1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_parameters_stay_within_half_of_their_largest_number(dtype):
    largest = float(jnp.finfo(dtype).max)
    check = jax.jit(stays_finite)

    def fine(params, *updates):
        return bool(check({"a": jnp.full(2, params, dtype)}, {"a": jnp.asarray(updates, dtype)}))

    assert fine(1.0, 1.0, -1.0)
    assert fine(0.4 * largest, 0.0, 0.05 * largest)
    assert not fine(0.4 * largest, 0.0, 0.2 * largest)
    assert not fine(-0.4 * largest, -0.2 * largest, 0.0)
    assert not fine(1.0, 1.0, np.nan)
    assert not fine(1.0, -np.inf, 1.0)
    # Labels that are removed, by either of the two numbers in use for it.
    for removed in (-np.inf, -largest):
        assert fine(removed, 0.0, 0.0)
        assert fine(removed, 1.0, 0.0)
        assert not fine(removed, np.nan, 0.0)


def test_parameters_of_another_dtype_than_updates_are_held_to_their_own():
    half, single = jnp.full(2, 3e4, jnp.float16), jnp.full(2, 1e4, jnp.float32)
    assert not stays_finite(half, single)
    assert stays_finite(half.astype(jnp.float32), single)
    assert stays_finite(half, -single)


def test_guard_keeps_the_state_of_its_chain():
    """The same structure, so that states of before can be loaded, and a schedule that goes on."""
    chain = optax.chain(
        qbound.scale_by_spfb(problems.affine, damping=0.1), optax.scale_by_schedule(lambda t: jnp.float32(jnp.nan))
    )
    tx = keep_params_finite(chain, "spfb")
    p = problems.linear(b=10, dtype=jnp.float32)
    assert jax.tree.structure(tx.init(p.params)) == jax.tree.structure(chain.init(p.params))
    _, state = problems.first_update(tx, problems.affine, p.params, p.inputs, p.labels)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(p.params))
    assert state[1].count == 1


# The data


@pytest.mark.parametrize(
    ("logits_fn", "options"),
    [
        (qbound.linear_logits, {}),
        (problems.affine, {}),
        (problems.affine, {"warm_start": True}),
        (problems.affine, {"microbatch_size": 5}),
        (problems.affine, {"window": 20, "inputs_like": LIKE}),
        (problems.affine, {"precondition": lambda g: g}),
        (qbound.linear_logits, {"solver": "dense"}),
        (problems.affine, {"solver": "woodbury"}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or ",".join(value),
)
def test_column_whose_products_overflow_is_reported(logits_fn, options):
    p = problems.linear(b=10, dtype=jnp.float32)
    params = jax.tree.map(jnp.zeros_like, p.params)
    tx = qbound.spfb(1.0, logits_fn, l2=1e-3, **({"solver": "cg"} | options))
    inputs = p.inputs.at[:, 3].multiply(1e20)
    updates, state = problems.first_update(tx, logits_fn, params, inputs, p.labels)
    np.testing.assert_array_equal(flat(updates), 0 * flat(params))
    assert optax.tree.get(state, "spfb_nonfinite")
    assert optax.tree.get(state, "spfb_nonfinite_total") == 1
    assert not optax.tree.get(state, "spfb_converged")
    assert optax.tree.get(state, "spfb_step_length") == 0


def test_preconditioner_that_returns_nan_is_reported():
    p = problems.linear(b=10)
    tx = qbound.spfb(1.0, problems.affine, l2=1e-2, precondition=lambda g: jax.tree.map(lambda x: x * jnp.nan, g))
    updates, state = problems.first_update(tx, problems.affine, p.params, p.inputs, p.labels)
    np.testing.assert_array_equal(flat(updates), 0 * flat(p.params))
    assert optax.tree.get(state, "spfb_nonfinite")


def test_batch_whose_products_overflow_does_not_stay_in_the_window():
    p = problems.linear(b=12, dtype=jnp.float32)
    tx = qbound.scale_by_spfb(problems.affine, damping=0.1, solver="cg", window=8, inputs_like=LIKE)
    # Small, so that only products with a vector of the size that solvers work with overflow.
    update, grads = jax.jit(tx.update), jax.tree.map(lambda leaf: 1e-10 * leaf, p.params)
    params = jax.tree.map(jnp.zeros_like, p.params)
    _, first = update(grads, tx.init(params), params, inputs=p.inputs[:3])
    _, state = update(grads, first, params, inputs=p.inputs[3:6].at[:, 3].multiply(1e20))
    assert state.spfb_info.spfb_nonfinite
    jax.tree.map(np.testing.assert_array_equal, state.spfb_window, first.spfb_window)
    updates, state = update(grads, state, params, inputs=p.inputs[3:6])
    assert not state.spfb_info.spfb_nonfinite
    assert np.abs(flat(updates)).max() > 0


@pytest.mark.parametrize(("error", "taken"), [(1.5, True), (2.5, False)])
def test_solution_that_raises_its_own_quadratic_is_not_taken(monkeypatch, error, taken):
    """As solvers find them where numbers are too large for a factorisation."""

    def wrong(*arguments, **options):
        found = solve_damped(*arguments, **options)
        vector, product = (trees.scale(jnp.asarray(error), part) for part in (found.vector, found.product))
        return found._replace(vector=vector, product=product)

    monkeypatch.setattr(step, "solve_damped", wrong)
    p = problems.linear(b=10)
    tx = qbound.spfb(0.1, problems.affine, l2=1e-2)
    updates, state = problems.first_update(tx, problems.affine, p.params, p.inputs, p.labels)
    assert (np.abs(flat(updates)).max() > 0) == taken
    assert optax.tree.get(state, "spfb_nonfinite") == (not taken)
    assert (optax.tree.get(state, "spfb_predicted_decrease") > 0) == taken


def test_loss_whose_square_overflows_does_not_end_the_adaptation():
    p = problems.linear(b=10, dtype=jnp.float32)
    tx = qbound.spfb(0.5, problems.affine, l2=1e-2, adaptive_damping=0.1)
    update = jax.jit(tx.update)
    params, state = p.params, tx.init(p.params)
    for value in (1.0, 1e30, 1.0, 0.9, 0.8):
        updates, state = update(p.params, state, params, inputs=p.inputs, value=jnp.float32(value))
        params = optax.apply_updates(params, updates)
    assert np.isfinite(state[0].spfb_adaptation.adaptation_sums).all()
    assert np.isfinite(optax.tree.get(state, "spfb_adaptive_damping"))


# The solvers


def _huge(v):
    """A product that overflows along the first parameter."""
    return jnp.asarray([1e30, 1, 2], jnp.float32) * (jnp.asarray([1e30, 1, 1], jnp.float32) * v)


def test_cg_does_not_go_on_after_a_curvature_that_overflows():
    """Its step would be of length zero, and so would all that follow."""
    solution = conjugate_gradients(lambda v: 1e38 * v, jnp.ones(9, jnp.float32), max_steps=5, tolerance=1e-6)
    np.testing.assert_array_equal(solution.vector, np.zeros(9))
    assert solution.residual == 1
    assert solution.steps == 1


def test_start_whose_product_overflows_is_forgotten():
    g, start = jnp.asarray([0.0, 1, 1], jnp.float32), jnp.ones(3, jnp.float32)
    solution = conjugate_gradients(_huge, g, max_steps=5, tolerance=1e-6, start=start)
    np.testing.assert_allclose(solution.vector, [0, 1, 0.5], rtol=1e-6)
    assert solution.residual < 1e-6


def test_dense_solver_returns_nan_for_a_matrix_that_overflows():
    matrix = jnp.asarray([[np.inf, 0], [0, 1]], jnp.float32)
    assert np.isnan(solve_dense(matrix, jnp.ones(2, jnp.float32), 0.1)).all()
