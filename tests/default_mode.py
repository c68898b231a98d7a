"""The library in JAX's default mode, float32 throughout, against the reference in NumPy. Run as a script."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qbound
from tests import reference

assert not jax.config.jax_enable_x64


@partial(jax.jit, static_argnames="order")
def one_bound(h, v, order):
    bound = qbound.log_partition_bound(h, order=order)
    curvature = bound.curvature
    return bound.value, bound.grad, curvature.dense(), curvature.mv(v), curvature.solve(v, 0.1)


@jax.jit
def batch_step(features, theta, g):
    batch = jax.vmap(lambda f: qbound.log_partition_bound(f @ theta).pullback(f, theta))(features).mean()
    return batch.value, batch.curvature.dense(), batch.curvature.solve(g, 0.1), batch(theta + 1)


@partial(jax.jit, static_argnames=("solver", "logits_fn"))
def spfb_steps(theta, features, labels, solver, logits_fn):
    """Algorithm 2 over the leading axis of the features, all iterates and the last state."""
    tx = qbound.spfb(lambda t: 0.9 / (t + 1), logits_fn, l2=0.05, solver=solver, max_steps=50, tolerance=1e-6)

    def step(carry, batch):
        theta, state = carry
        f, y = batch
        grads = jax.grad(lambda t: optax.softmax_cross_entropy_with_integer_labels(logits_fn(t, f), y).mean())(theta)
        updates, state = tx.update(grads, state, theta, inputs=f)
        theta = optax.apply_updates(theta, updates)
        return (theta, state), theta

    (_, state), iterates = jax.lax.scan(step, (theta, tx.init(theta)), (features, labels))
    return iterates, state


def check_spfb(rng):
    """Every solver, for explicit features and for logistic regression."""
    theta, inputs = rng.normal(size=12), rng.normal(size=(6, 9, 4))
    labels = rng.integers(3, size=(6, 9))
    features = np.stack([reference.linear_features(x, 3) for x in inputs])
    rates = [0.9 / (t + 1) for t in range(6)]
    expected = reference.algorithm_2(theta, zip(features, labels, strict=True), rates, 0.05, "max_first")[1:]
    for solver in ("dense", "woodbury", "cg"):
        explicit, _ = spfb_steps(theta.astype(np.float32), features, labels, solver, lambda t, f: f @ t)
        linear, state = spfb_steps(theta.reshape(4, 3).astype(np.float32), inputs, labels, solver, qbound.linear_logits)
        np.testing.assert_allclose(explicit, expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(linear.reshape(6, 12), expected, rtol=1e-3, atol=1e-3)
        assert linear.dtype == jnp.float32
        assert optax.tree.get(state, "spfb_residual") < 1e-4


def check_mm(rng):
    """Both solvers find the optimum of the reference, which takes many steps to the minimum of the bound."""
    inputs, labels = rng.normal(size=(40, 4)), rng.integers(3, size=40)
    features = reference.linear_features(inputs, 3)
    expected = reference.majorise_minimise(np.zeros(12), features, np.eye(3)[labels], 0.1, 60)[-1]
    for solver in ("cg", "dense"):
        found, info = qbound.mm.run(
            qbound.linear_logits, np.zeros((4, 3), np.float32), inputs.astype(np.float32), labels, l2=0.1, solver=solver
        )
        assert found.dtype == info.objective.dtype == jnp.float32
        assert (info.history.actual_decrease >= info.history.certified_decrease).all()
        np.testing.assert_allclose(found.ravel(), expected, atol=1e-4)


def main():
    rng = np.random.default_rng(0)
    for n in (3, 300):
        for order, permutation in reference.PERMUTATIONS.items():
            h, v = (3 * rng.normal(size=n)).astype(np.float32), rng.normal(size=n).astype(np.float32)
            value, grad, dense, product, solution = one_bound(h, v, order)
            log_z, p, m = reference.logit_bound(h, permutation(h))
            assert {a.dtype for a in (value, grad, dense, product, solution)} == {jnp.dtype(jnp.float32)}
            np.testing.assert_allclose(value, log_z, rtol=1e-6)
            np.testing.assert_allclose(grad, p, atol=1e-6)
            np.testing.assert_allclose(dense, m, atol=2e-6)
            np.testing.assert_allclose(product, m @ v, atol=1e-5)
            np.testing.assert_allclose(solution, np.linalg.solve(m + 0.1 * np.eye(n), v), atol=2e-4)

    features, theta = rng.normal(size=(20, 6, 4)), rng.normal(size=4)
    value, dense, solution, upper = batch_step(features, theta, theta)
    parts = [reference.algorithm_1(theta, f[reference.descending(f @ theta)]) for f in features]
    log_z, mu, sigma = (np.mean([part[i] for part in parts], axis=0) for i in range(3))
    np.testing.assert_allclose(value, log_z, rtol=1e-6)
    np.testing.assert_allclose(dense, sigma, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(solution, np.linalg.solve(sigma + 0.1 * np.eye(4), theta), rtol=1e-4)
    np.testing.assert_allclose(upper, log_z + mu.sum() + sigma.sum() / 2, rtol=1e-5)

    check_spfb(rng)
    check_mm(rng)


if __name__ == "__main__":
    main()
