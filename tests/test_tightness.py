"""How tight a bound is agrees with dense linear algebra."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from experiments import tightness
from experiments.digits import digits
from tests import reference


@pytest.fixture(scope="module")
def found():
    """The experiment on digits at 4 x 4 pixels: 17 x 10 parameters, batches of 40."""
    settings = importlib.import_module("configs.tightness").config()
    settings = dataclasses.replace(settings, batch=40, training_steps=2, ranks=(1, 10), rank_of_orders=10)
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        data = digits(train=120, seed=0)
        pooled = np.asarray(data.inputs).reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(-1, 16)
        inputs = jnp.asarray(np.c_[pooled, np.ones(120)], jnp.float32)
        weights = tightness.trained(settings, inputs, data.labels)
        return settings, inputs, data.labels, weights, tightness.results(settings, weights, inputs, data.labels)


@pytest.fixture
def default_mode():
    """Experiments run in JAX's own mode: float32, and its promotion of dtypes and ranks."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _dense(weights, inputs, order):
    """Sigma by its definition."""
    permutation = {"given": lambda h: None, "max_first": reference.max_first, "descending": reference.descending}[order]
    x = np.asarray(inputs[:40], float)
    logits = np.asarray(inputs[:40] @ weights, float)
    terms = [
        np.kron(np.outer(a, a), reference.logit_bound(h, permutation(h))[2]) for a, h in zip(x, logits, strict=True)
    ]
    return np.mean(terms, axis=0)


def _gradient(weights, inputs, labels, l2):
    x, w = np.asarray(inputs[:40], float), np.asarray(weights, float)
    residuals = np.array([reference.softmax(h) for h in x @ w]) - np.eye(10)[np.asarray(labels[:40])]
    return (x.T @ residuals / 40 + l2 * w).ravel()


@pytest.mark.usefixtures("default_mode")
def test_tightness_is_that_of_dense_matrices(found):
    settings, inputs, labels, weights, outcome = found
    sigma = _dense(weights, inputs, settings.order)
    assert outcome.trace == pytest.approx(np.trace(sigma), rel=1e-5)
    eye, last = np.eye(len(sigma)), 2 * [len(sigma) - 1]
    bounds = {
        method: {
            k: tightness.bound_of(weights, inputs[:40], rank=k, method=method, order=settings.order)
            for k in settings.ranks
        }
        for method in tightness.METHODS
    } | tightness.references(tightness.exact_of(weights, inputs[:40], settings.order), settings.ranks)
    assert list(bounds) == list(outcome.methods)
    for name, by_rank in bounds.items():
        assert list(by_rank) == list(outcome.methods[name])
        for k, bound in by_rank.items():
            row = outcome.methods[name][k]
            low = bound.basis.T @ np.diag(bound.scales) @ bound.basis + np.diag(bound.diagonal)
            assert np.linalg.eigvalsh(low - sigma)[0] > -1e-5 * np.trace(sigma)
            assert row.excess_trace == pytest.approx(np.trace(low - sigma), rel=1e-4)
            for c, eigenvalue, share in zip(settings.l2, row.eigenvalues, row.shares, strict=True):
                exact = scipy.linalg.eigh(low + c * eye, sigma + c * eye, eigvals_only=True, subset_by_index=last)[0]
                assert eigenvalue == pytest.approx(exact, rel=1e-3)
                g = _gradient(weights, inputs, labels, c)
                part = g @ np.linalg.solve(low + c * eye, g) / (g @ np.linalg.solve(sigma + c * eye, g))
                assert share == pytest.approx(part, rel=1e-3)


def test_frequent_directions_are_the_tightest_and_eigenvectors_their_limit(found):
    _, _, _, _, outcome = found
    tight, ideal = outcome.methods["frequent_directions"], outcome.methods[tightness.EIGENVECTORS]
    identity = outcome.methods[tightness.IDENTITY][0]
    assert (
        tight[10].excess_trace < outcome.methods["exact"][10].excess_trace < outcome.methods["paper"][10].excess_trace
    )
    assert tight[10].shares > outcome.methods["exact"][10].shares > outcome.methods["paper"][10].shares
    for k in (1, 10):
        assert ideal[k].excess_trace < min(tight[k].excess_trace, identity.excess_trace)
        assert all(np.array(ideal[k].shares) > np.array(tight[k].shares))
        for by_rank in (tight, ideal):
            assert 0 < by_rank[k].shares[0] < 1 < by_rank[k].eigenvalues[1] < by_rank[k].eigenvalues[0]
    # Nine directions are of about the same curvature: the mean image, for each label but one.
    assert tight[1].excess_trace > 0.9 * identity.excess_trace
    assert tight[10].excess_trace < 0.4 * identity.excess_trace
    assert all(np.array(tight[10].shares) > 1.5 * np.array(identity.shares))


@pytest.mark.usefixtures("default_mode")
def test_orders_are_compared_by_what_they_predict(found):
    settings, inputs, labels, weights, outcome = found
    for order, row in outcome.orders.items():
        assert row.trace == pytest.approx(np.trace(_dense(weights, inputs, order)), rel=1e-5)
    traces = [outcome.orders[order].trace for order in ("descending", "max_first", "given")]
    assert traces == sorted(traces)
    row = outcome.methods["frequent_directions"][10]
    assert outcome.orders[settings.order].excess_trace == pytest.approx(row.excess_trace)
    sigma = _dense(weights, inputs, settings.order)
    for c, decrease, share in zip(settings.l2, outcome.orders[settings.order].decreases, row.shares, strict=True):
        g = _gradient(weights, inputs, labels, c)
        full = g @ np.linalg.solve(sigma + c * np.eye(len(sigma)), g) / 2
        assert decrease / full == pytest.approx(share, rel=1e-3)


def test_tables_and_picture_show_every_method(found, tmp_path):
    settings, _, _, _, outcome = found
    lines = tightness.table(settings, outcome).splitlines()
    assert len(lines) == 2 + 3 * 2 + 1 + 2
    assert len({line.count("|") for line in lines}) == 1
    lines = tightness.order_table(settings, outcome).splitlines()
    assert len(lines) == 2 + 3
    assert len({line.count("|") for line in lines}) == 1
    settings = dataclasses.replace(settings, output=str(tmp_path / "made" / "tightness.png"))
    assert tightness.draw(settings, outcome).read_bytes().startswith(b"\x89PNG")
