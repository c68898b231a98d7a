"""Errors of the paper that concern the bound and SPFB, each shown by an example; docs/theory.md explains them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qbound
from tests import reference

# Two labels with features +1 and -1: log Z(theta) = log 2 cosh theta.
FEATURES = np.array([[1.0], [-1.0]])


def log_cosh_bound(sigma, theta):
    """log z + sigma theta^2/2 for the bound at 0, less log Z(theta)."""
    return np.log(2) + sigma * theta**2 / 2 - np.log(2 * np.cosh(theta))


def test_example_has_the_tight_curvature_one():
    sigma = float(qbound.partition_function_bound(np.zeros(1), FEATURES).curvature.dense()[0, 0])
    assert sigma == pytest.approx(1.0)
    assert log_cosh_bound(sigma, 1.0) >= 0


def test_algorithm_3_must_use_the_partition_function_of_the_example():
    """Line 5 of Algorithm 3 has alpha/z, and z moves only after the loop over labels: on a batch of one it stays 0+."""
    sigma = upsilon = 0.0
    z_j = reference.START
    for f in FEATURES[:, 0]:
        alpha = 1.0
        sigma += reference.beta_of(np.log(alpha / reference.START)) * (f - upsilon) ** 2
        upsilon += alpha / (z_j + alpha) * (f - upsilon)
        z_j += alpha
    assert sigma < 0.01
    assert log_cosh_bound(sigma, 1.0) < -0.4


def test_partition_functions_of_examples_multiply():
    """Line 17 of Algorithm 3 adds them; the joint log-likelihood needs the sum of their logarithms."""
    logits = np.array([[0.0, 1.0, 2.0], [1.0, -1.0, 0.5]])
    batch = jax.vmap(lambda h: qbound.log_partition_bound(h).pullback(jnp.eye(3), jnp.zeros(3)))(logits)
    log_z = [reference.log_sum_exp(h) for h in logits]
    np.testing.assert_allclose(batch.sum().value, np.sum(log_z), rtol=1e-14)
    np.testing.assert_allclose(batch.mean().value, np.mean(log_z), rtol=1e-14)
    assert abs(np.log(np.sum(np.exp(log_z))) - np.sum(log_z)) > 0.1


def test_lemma_must_use_the_sum_before_the_label():
    """The lemma on mu_1 and mu_2 has alpha_i/z_i with z_i including alpha_i: that curvature is too small."""
    sigma = reference.beta_of(np.log(1 / 2)) * 2.0**2
    assert sigma < 1
    assert log_cosh_bound(sigma, 0.1) < 0


def test_curvature_has_no_positive_lower_limit():
    """The paper's 1/mu_2 - lambda is no lower limit for |Sigma|, and the inverse reaches 1/lambda."""
    n, l2 = 2, 1e-3
    matrix = np.asarray(qbound.log_partition_bound(np.array([100.0, 0.0])).curvature.dense())
    claimed = (1 + 1 / n) * reference.beta_of(np.log(1 / n))
    assert claimed == pytest.approx(0.36, abs=0.01)
    assert np.linalg.norm(matrix, 2) == pytest.approx(0.01, abs=1e-3)
    assert np.linalg.eigvalsh(np.linalg.inv(matrix + l2 * np.eye(n)))[-1] == pytest.approx(1 / l2)


def test_curvature_exceeds_the_upper_limit_of_the_paper():
    """sqrt(n/2) is no upper limit for |M|; n/4 is."""
    n = 1000
    logits = jnp.zeros(n).at[0].set(9.0)
    largest = np.linalg.eigvalsh(jax.jit(lambda h: qbound.log_partition_bound(h).curvature.dense())(logits))[-1]
    assert largest > 2 * np.sqrt(n / 2)
    assert largest <= n / 4


def test_hessian_of_the_objective_is_below_half_the_squared_radius():
    """lambda_2 = R^2/2 + l2 for inputs of length at most R, whatever the weights; nearly attained by two labels."""
    rng, l2 = np.random.default_rng(0), 0.1
    inputs = rng.normal(size=(20, 3))
    radius = np.linalg.norm(inputs, axis=1).max()
    for scale in (0.0, 0.1, 3.0):
        weights = scale * rng.normal(size=(4, 3))
        hessian = np.mean([np.kron(reference.hessian(weights @ x), np.outer(x, x)) for x in inputs], axis=0)
        eigenvalues = np.linalg.eigvalsh(hessian + l2 * np.eye(12))
        assert l2 - 1e-12 <= eigenvalues[0] <= eigenvalues[-1] <= radius**2 / 2 + l2
    assert np.linalg.eigvalsh(reference.hessian(np.zeros(2)))[-1] == pytest.approx(0.5)


def test_regulariser_of_the_sum_is_the_number_of_examples_times_that_of_the_mean():
    """J of Equation 2 is a sum over examples, L of the supplement a mean: the same step needs lambda and lambda/T."""
    rng = np.random.default_rng(0)
    features, theta, l2 = rng.normal(size=(7, 4, 3)), rng.normal(size=3), 0.3
    batch = jax.vmap(lambda f: qbound.log_partition_bound(f @ theta).pullback(f, theta))(features)
    total, mean = batch.sum(), batch.mean()
    step_of_sum = total.curvature.solve(total.grad + l2 * theta, l2)
    step_of_mean = mean.curvature.solve(mean.grad + l2 / 7 * theta, l2 / 7)
    np.testing.assert_allclose(step_of_mean, step_of_sum, rtol=1e-10)


def test_exponentials_overflow_and_logarithms_do_not():
    theta, features = np.array([800.0]), np.array([[1.0], [0.5], [-1.0]])
    with np.errstate(all="ignore"):
        z, mu, sigma = reference.algorithm_1_as_printed(theta, features)
    assert not np.isfinite(z)
    assert not np.isfinite(mu).all()
    assert not np.isfinite(sigma).all()
    bound = qbound.partition_function_bound(theta, features)
    np.testing.assert_allclose(bound.value, 800)
    np.testing.assert_allclose(bound.grad, 1)
    assert 0 < bound.curvature.dense()[0, 0] < 0.01


# Two labels with features (x, 0), three examples, l2 = 0.1.
INPUTS, OBSERVED = np.array([1.0, 1.0, 5.0]), np.array([0, 0, 1])
ONE_PARAMETER = np.stack([INPUTS, np.zeros(3)], axis=1)[:, :, None]


def _root(function, low=-5.0, high=5.0):
    """Of an increasing function, by bisection."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return low


def test_spfb_with_batches_of_one_converges_to_the_wrong_point():
    """Both factors of the step depend on the example, and the proof takes them to be independent."""

    def step(theta, examples):
        mu, sigma = reference.batch_bound(np.array([theta]), ONE_PARAMETER[examples], "max_first")
        g = mu[0] - np.mean([ONE_PARAMETER[j][OBSERVED[j]] for j in examples]) + 0.1 * theta
        return g / (sigma[0, 0] + 0.1)

    optimum = _root(lambda theta: step(theta, [0, 1, 2]))
    biased = _root(lambda theta: np.mean([step(theta, [j]) for j in range(3)]))
    assert optimum == pytest.approx(-0.234, abs=1e-3)
    assert biased == pytest.approx(0.733, abs=1e-3)

    @jax.jit
    def run(key):
        tx = qbound.spfb(lambda t: 1 / (1 + t.astype(float) / 20), lambda theta, f: f @ theta, l2=0.1, solver="dense")

        def one(carry, j):
            theta, state = carry
            f = jnp.asarray(ONE_PARAMETER)[j][None]
            grads = jax.grad(lambda theta: -jax.nn.log_softmax(f @ theta)[0, jnp.asarray(OBSERVED)[j]])(theta)
            updates, state = tx.update(grads, state, theta, inputs=f)
            return (theta + updates, state), theta + updates

        start = jnp.full(1, optimum)
        return jax.lax.scan(one, (start, tx.init(start)), jax.random.randint(key, 20_000, 0, 3))[1]

    iterates = run(jax.random.key(0))
    assert np.mean(iterates[10_000:]) == pytest.approx(biased, abs=0.02)
