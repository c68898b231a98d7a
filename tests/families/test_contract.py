"""Every family of log-partition functions keeps one contract: its parts agree with log Z, and with one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.families.base import LogPartition
from qbound.families.softmax import Softmax, quadratics_by_label
from tests import reference

B, N = 7, 5
RNG = np.random.default_rng(0)
LOGITS, U = 2 * RNG.normal(size=(B, N)), 1.5 * RNG.normal(size=(B, N))
LOGITS[0, 3] = -np.inf
WEIGHTS = RNG.uniform(0.1, 1, size=B)
WEIGHTS[2] = 0
ETAS = [0.05, 0.4, 1.5, 4.0]

# A family, and log Z of one vector of logits.
FAMILIES = {
    "softmax, max_first": (Softmax(), reference.log_sum_exp),
    "softmax, descending": (Softmax("descending"), reference.log_sum_exp),
    "softmax, given": (Softmax("given"), reference.log_sum_exp),
    "softmax, Böhning's": (Softmax(is_bohning=True), reference.log_sum_exp),
}
every_family = pytest.mark.parametrize(("family", "log_z"), FAMILIES.values(), ids=FAMILIES)


def line_of(family: LogPartition):
    return family.line(jnp.asarray(WEIGHTS), jnp.asarray(LOGITS.T), jnp.asarray(U.T))


@jax.jit
def measured(line):
    """At each eta: the remainder, its slope by the mean, and how fast that changes."""
    remainders = [line.remainder(jnp.asarray(eta)) for eta in ETAS]
    moments = [line.moments(jnp.asarray(eta)) for eta in ETAS]
    return line.variances(), line.radii(), line.quadratic(), jnp.array(remainders), jnp.array(moments)


def gradients(log_z, h):
    """Of log Z by differences, 0 where a label is removed."""
    return np.array([0 if h[k] == -np.inf else (log_z(h + 1e-6 * e) - log_z(h - 1e-6 * e)) / 2e-6 for k, e in UNITS])


UNITS = list(enumerate(np.eye(N)))


@every_family
def test_bound_touches_log_z_and_lies_above_it_and_the_expansion_is_as_curved(family, log_z):
    h = jnp.asarray(LOGITS[1])
    bound, expansion = jax.jit(family.bound)(h), jax.jit(family.expansion)(h)
    assert bound.majorizes == "globally" and expansion.majorizes == "no"
    for quadratic in (bound, expansion):
        np.testing.assert_allclose(quadratic.value, log_z(LOGITS[1]), rtol=1e-12)
        np.testing.assert_allclose(quadratic.grad, gradients(log_z, LOGITS[1]), atol=1e-8)
    points = np.concatenate([LOGITS[1] + s * RNG.normal(size=(50, N)) for s in (0.1, 1, 10)])
    above = np.asarray(jax.jit(jax.vmap(bound))(jnp.asarray(points)))
    assert np.all(above >= np.array([log_z(x) - 1e-12 for x in points]))
    u = U[1]
    second = (log_z(LOGITS[1] + 1e-4 * u) - 2 * log_z(LOGITS[1]) + log_z(LOGITS[1] - 1e-4 * u)) / 1e-8
    np.testing.assert_allclose(expansion.curvature.quadratic(jnp.asarray(u)), second, rtol=1e-6)


@every_family
@pytest.mark.parametrize("axis", [0, 1])
def test_loss_is_log_z_less_the_targets_and_has_its_derivative(family, log_z, axis):
    targets = RNG.dirichlet(np.ones(N), size=B)
    targets[0, 3] = 0
    targets[0] /= targets[0].sum()
    logits, t = (a if axis == 1 else a.T for a in (LOGITS, targets))
    loss, residual, mean = jax.jit(family.loss, static_argnums=2)(jnp.asarray(logits), jnp.asarray(t), axis)
    residual, mean = (np.asarray(a if axis == 1 else a.T) for a in (residual, mean))
    for j in range(B):
        finite = np.isfinite(LOGITS[j])
        expected = log_z(LOGITS[j]) - targets[j, finite] @ LOGITS[j, finite]
        np.testing.assert_allclose(loss[j], expected, rtol=1e-12)
        np.testing.assert_allclose(mean[j], gradients(log_z, LOGITS[j]), atol=1e-8)
        np.testing.assert_allclose(residual[j], mean[j] - targets[j], atol=1e-12)


@every_family
def test_line_is_what_is_left_of_log_z_along_it(family, log_z):
    variances, radii, quadratic, remainders, moments = measured(line_of(family))
    kept = np.where(np.isfinite(LOGITS), U, 0)
    means = [gradients(log_z, h) @ u for h, u in zip(LOGITS, kept, strict=True)]
    curvatures = jax.vmap(lambda h, u: family.bound(h).curvature.quadratic(u))(jnp.asarray(LOGITS), jnp.asarray(kept))
    np.testing.assert_allclose(quadratic, WEIGHTS @ np.asarray(curvatures), rtol=1e-9)
    for eta, remainder, (mean, variance) in zip(ETAS, remainders, moments, strict=True):

        def left(eta):
            changed = [log_z(h - eta * u) - log_z(h) for h, u in zip(LOGITS, kept, strict=True)]
            return np.array(changed) + eta * np.array(means)

        each = left(eta)
        np.testing.assert_allclose(remainder, WEIGHTS @ each, rtol=1e-7)
        slope = WEIGHTS @ (left(eta + 1e-5) - left(eta - 1e-5)) / 2e-5
        np.testing.assert_allclose(-mean, slope, rtol=1e-6)
        second = WEIGHTS @ (left(eta + 1e-3) - 2 * each + left(eta - 1e-3)) / 1e-6
        np.testing.assert_allclose(variance, second, rtol=1e-4)
        # What certifies steps: two upper bounds of every example's remainder.
        r = np.where(WEIGHTS == 0, 1, np.asarray(radii))
        local = np.asarray(variances) * (np.exp(eta * r) - eta * r - 1) / r**2
        counts = WEIGHTS > 0
        assert np.all(each[counts] <= local[counts] + 1e-9)
        assert remainder <= eta**2 * quadratic / 2 + 1e-9


def test_kernel_for_few_labels_equals_the_bound_of_each_example():
    h, u = np.where(np.isfinite(LOGITS), LOGITS, -30.0), U
    expected = [Softmax().bound(jnp.asarray(a)).curvature.quadratic(jnp.asarray(b)) for a, b in zip(h, u, strict=True)]
    np.testing.assert_allclose(jax.jit(quadratics_by_label)(jnp.asarray(h.T), jnp.asarray(u.T)), expected, rtol=1e-10)


def test_label_of_no_probability_is_not_a_removed_one():
    """Its logit is finite, though its distance from the largest is not."""
    logits, u = jnp.asarray([2e38, -2e38, 0.0], jnp.float32), jnp.asarray([1.0, 2.0, 4.0], jnp.float32)
    line = Softmax(is_bohning=True).line(jnp.ones(1, jnp.float32), logits[:, None], u[:, None])
    expected = np.asarray(u) @ reference.bohning(3) @ np.asarray(u)
    np.testing.assert_allclose(line.quadratic(), expected, rtol=1e-6)
