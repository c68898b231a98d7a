"""The library in JAX's default mode, float32 throughout, against the reference in NumPy. Run as a script.

With `own`: programs that the package compiles. With `users`: programs that its callers compile. Else both. `small`:
those of both that take seconds, at sizes where no compiler has been at fault. Where it is, programs of users give one
warning, and those below are right all the same; tests/fusions.py looks for the fault in their fusions.
"""

import sys
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse

import qbound
from qbound import compiler
from qbound.estimator import LogisticRegression
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


def check_bounds(rng):
    """In every order, and the classical ones."""
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
    h, v = 3 * rng.normal(size=7), rng.normal(size=7)
    hessian = reference.hessian(h)
    local = 2 * (np.exp(0.5) - 1.5) / 0.25
    for bound, expected in (
        (qbound.bohning_bound, reference.bohning(7)),
        (lambda h: qbound.local_bound(h, 0.5), local * hessian),
        (qbound.second_order_expansion, hessian),
    ):
        product, quadratic = jax.jit(lambda h, v, f=bound: (f(h).curvature.mv(v), f(h).curvature.quadratic(v)))(
            h.astype(np.float32), v.astype(np.float32)
        )
        np.testing.assert_allclose(product, expected @ v, atol=1e-5)
        np.testing.assert_allclose(quadratic, v @ expected @ v, rtol=1e-5)


def check_batch(rng):
    features, theta = rng.normal(size=(20, 6, 4)), rng.normal(size=4)
    value, dense, solution, upper = batch_step(features, theta, theta)
    parts = [reference.algorithm_1(theta, f[reference.descending(f @ theta)]) for f in features]
    log_z, mu, sigma = (np.mean([part[i] for part in parts], axis=0) for i in range(3))
    np.testing.assert_allclose(value, log_z, rtol=1e-6)
    np.testing.assert_allclose(dense, sigma, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(solution, np.linalg.solve(sigma + 0.1 * np.eye(4), theta), rtol=1e-4)
    np.testing.assert_allclose(upper, log_z + mu.sum() + sigma.sum() / 2, rtol=1e-5)


def check_low_rank(rng):
    """The bound itself, and Algorithm 4."""
    features, theta = rng.normal(size=(300, 6, 50)), rng.normal(size=50)
    bound = jax.jit(partial(qbound.low_rank_bound, rank=8))(features.astype(np.float32), theta.astype(np.float32))
    mu, sigma = reference.batch_bound(theta, features, "descending")
    np.testing.assert_allclose(bound.value, np.mean([reference.log_sum_exp(f @ theta) for f in features]), rtol=1e-6)
    np.testing.assert_allclose(bound.grad, mu, atol=1e-5)
    above = np.linalg.eigvalsh(np.asarray(bound.curvature.dense(), np.float64) - sigma)
    assert -1e-5 < above[0] < above[-1] < np.trace(sigma)

    theta, features, labels = rng.normal(size=4), rng.normal(size=(5, 6, 3, 4)), rng.integers(3, size=(5, 6))
    tx = qbound.lspfb(0.5, lambda t, f: f @ t, rank=2, method="paper", l2=0.1, order="given")
    found, state, update = jnp.asarray(theta, jnp.float32), tx.init(jnp.asarray(theta, jnp.float32)), jax.jit(tx.update)
    for f, y in zip(features.astype(np.float32), labels, strict=True):
        grads = jax.grad(lambda t, f, y: optax.softmax_cross_entropy_with_integer_labels(f @ t, y).mean())(found, f, y)
        updates, state = update(grads, state, found, inputs=f)
        found = optax.apply_updates(found, updates)
    np.testing.assert_allclose(found, reference.algorithm_4(theta, features, labels, [0.5] * 5, 2, 0.1)[-1], atol=1e-3)


class Large:
    """Logistic regression with the shapes of images, at which faults of compilers have shown."""

    def __init__(self, rng, b=5000, d=784, n=10):
        self.inputs = (rng.random((b, d)) * (rng.random((b, d)) < 0.2)).astype(np.float32)
        scores = self.inputs @ rng.normal(size=(d, n))
        self.labels = np.argmax(scores + 2 * rng.gumbel(size=(b, n)), axis=1)
        self.targets = np.eye(n)[self.labels]
        self.x = reference.with_ones(self.inputs.astype(np.float64))

    def probabilities(self, weights, x=None):
        h = (self.x if x is None else x) @ weights
        p = np.exp(h - h.max(axis=1, keepdims=True))
        return p / p.sum(axis=1, keepdims=True)

    def objective(self, weights, l2, penalised=...):
        """For weights (d + 1, n): the mean loss and the penalty; and the gradient."""
        p = self.probabilities(weights)
        gradient = self.x.T @ (p - self.targets) / len(p)
        gradient[penalised] += l2 * weights[penalised]
        return -np.mean(np.log(np.sum(p * self.targets, axis=1))) + l2 / 2 * np.sum(weights[penalised] ** 2), gradient


def check_large_bound(rng):
    """At 0, where a product that is fused with a sum has gone wrong, and elsewhere."""
    large = Large(rng)
    x, v = large.x.astype(np.float32), rng.normal(size=(785, 10)).astype(np.float32) / 20

    def sums(weights, x, v):
        def one(h, u):
            bound = qbound.log_partition_bound(h)
            return bound.value, bound.grad, bound.curvature.mv(u), bound.curvature.quadratic(u), bound(h + u)

        value, grad, product, quadratic, upper = jax.vmap(one)(x @ weights, x @ v)
        return value.mean(), x.T @ grad, x.T @ product, quadratic.sum(), upper.max()

    for weights, found in (
        (np.full((785, 10), 0.5), jax.jit(lambda x, v: sums(jnp.full((785, 10), 0.5), x, v))(x, v)),
        (v[:, ::-1].astype(float), jax.jit(sums)(v[:, ::-1], x, v)),
    ):
        h, u = large.x @ weights, large.x @ v.astype(np.float64)
        log_z, p, m = zip(*(reference.logit_bound(row, reference.descending(row)) for row in h), strict=True)
        products = np.einsum("bij,bj->bi", m, u)
        upper = np.array(log_z) + np.sum(p * u, axis=1) + np.sum(u * products, axis=1) / 2
        expected = np.mean(log_z), large.x.T @ p, large.x.T @ products, np.sum(u * products), np.max(upper)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.max(np.abs(b)))


def check_large_transforms(rng):
    """One update from 0: it solves the system of the reference."""
    large = Large(rng)
    gradient = large.objective(np.zeros((785, 10)), 0.0)[1]

    def update(tx, x):
        def one(grads, x):
            weights = jnp.zeros((785, 10))
            return tx.update(grads, tx.init(weights), weights, inputs=x)[0]

        return np.asarray(jax.jit(one)(gradient.astype(np.float32), x.astype(np.float32)), np.float64)

    def solution(x):
        """At 0 the curvature of every example is the same: the Kronecker product is no approximation."""
        values, vectors = np.linalg.eigh(x.T @ x / len(x))
        labels, rotation = np.linalg.eigh(reference.logit_bound(np.zeros(10))[2])
        return vectors @ (vectors.T @ gradient @ rotation / (np.outer(values, labels) + 0.05)) @ rotation.T

    expected = solution(large.x)
    kspfb = update(qbound.scale_by_kspfb(qbound.linear_logits, damping=0.05), large.x)
    spfb = update(
        qbound.scale_by_spfb(qbound.linear_logits, damping=0.05, solver="cg", max_steps=100, tolerance=1e-4), large.x
    )
    for found in (kspfb, spfb):
        np.testing.assert_allclose(found, expected, atol=1e-3 * np.max(np.abs(expected)))
    # Of low rank it has more curvature, and takes a shorter step.
    few = large.x[:200]
    full, low = (
        np.sum(gradient * s)
        for s in (solution(few), update(qbound.scale_by_lspfb(qbound.linear_logits, rank=16, damping=0.05), few))
    )
    assert full / 10 < low < full, (low, full)


def check_large_mm(rng):
    large = Large(rng)
    found, info = qbound.mm.run(
        qbound.linear_logits, np.zeros((785, 10), np.float32), large.x.astype(np.float32), large.labels, l2=0.01
    )
    objective, gradient = large.objective(np.asarray(found, np.float64), 0.01)
    np.testing.assert_allclose(info.objective, objective, rtol=1e-5)
    assert np.max(np.abs(gradient)) < 1e-4


def check_estimator(rng):
    """Its fits have no gradient, by the reference, from dense inputs and sparse ones, and by all solvers."""
    large = Large(rng)

    def measured(model):
        weights = np.concatenate([model.coef_, model.intercept_[:, None]], axis=1).T.astype(np.float64)
        np.testing.assert_allclose(
            model.predict_proba(large.inputs[:500]), large.probabilities(weights, large.x[:500]), atol=1e-5
        )
        return large.objective(weights, 0.01, slice(-1))

    for solver, inputs in (
        ("auto", large.inputs),
        ("mm", large.inputs),
        ("auto", scipy.sparse.csr_array(large.inputs)),
    ):
        model = LogisticRegression(l2=0.01, tol=1e-4, solver=solver, random_state=0).fit(inputs, large.labels)
        assert model.coef_.dtype == np.float32
        assert model.converged_
        least, gradient = measured(model)
        assert np.max(np.abs(gradient)) < 2e-4, solver
    for start in 5 * list(range(0, 5000, 1000)):
        part = slice(start, start + 1000)
        model.partial_fit(large.inputs[part], large.labels[part])
    fresh = LogisticRegression(l2=0.01, random_state=0)
    for start in 5 * list(range(0, 5000, 1000)):
        part = slice(start, start + 1000)
        fresh.partial_fit(large.inputs[part], large.labels[part], classes=np.arange(10))
    for streamed in (model, fresh):
        assert measured(streamed)[0] < 1.1 * least


PARTS = {
    "own": [check_mm, check_large_mm, check_estimator],
    "users": [check_bounds, check_batch, check_spfb, check_low_rank, check_large_bound, check_large_transforms],
    "small": [check_mm, check_bounds, check_batch, check_spfb],
}


def main():
    faulty = compiler.verdict() is not compiler.Verdict.RIGHT
    print(f"Python {sys.version.split()[0]}, jax {jax.__version__}; programs of users are {compiler.verdict().value}")
    for part in sys.argv[1:] or ("own", "users"):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always", compiler.MiscompilationWarning)
            for check in PARTS[part]:
                check(np.random.default_rng(0))
                print(f"  {check.__name__}: right", flush=True)
        given = [warning for warning in given if warning.category is compiler.MiscompilationWarning]
        assert len(given) == (faulty and part != "own"), f"{part}: {len(given)} warnings of the compiler"


if __name__ == "__main__":
    main()
