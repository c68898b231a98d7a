"""The training loop takes the steps it should, and ends when it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import methods, train
from experiments.methods import Method
from experiments.train import Rows
from tests.reproduction.tiny import CLASSES, ROWS, WIDTH, a_run, tiny_problem


def test_batches_of_an_epoch_have_every_row_once_and_each_seed_its_own_order():
    first = train.batch_rows(10, 3, 0, range(0, 3))
    assert first.shape == (3, 3)
    assert len(set(first.ravel().tolist())) == 9
    np.testing.assert_array_equal(train.batch_rows(10, 3, 0, range(2, 5))[0], first[2])
    np.testing.assert_array_equal(train.batch_rows(10, 3, 0, range(2, 5))[1:], train.batch_rows(10, 3, 0, range(3, 5)))
    assert not np.array_equal(first, train.batch_rows(10, 3, 0, range(3, 6)))
    assert not np.array_equal(first, train.batch_rows(10, 3, 1, range(0, 3)))


def test_loop_takes_the_steps_of_a_plain_optax_loop():
    problem, run = tiny_problem(), a_run(method=Method("momentum"), schedule="inverse", epochs=1, chunk=13)
    *_, last = train.train(run, problem)
    assert (last.step, last.ended) == (13, "finished")
    w, trace = np.zeros((WIDTH, CLASSES)), 0.0
    for t, rows in enumerate(train.batch_rows(ROWS, 100, 0, range(13))):
        x, y = np.asarray(problem.train.inputs)[rows], np.asarray(problem.train.labels)[rows]
        p = np.exp(x @ w)
        p /= p.sum(axis=1, keepdims=True)
        gradient = x.T @ (p - np.eye(CLASSES)[y]) / 100 + run.l2 * w
        trace = gradient + methods.MOMENTUM * trace
        w = w - 0.1 / (1 + 10 * t / 13) * trace
    np.testing.assert_allclose(last.params, w, atol=1e-5)
    x, y = np.asarray(problem.train.inputs, float), np.asarray(problem.train.labels)
    h = x @ w
    expected = np.mean(np.log(np.exp(h).sum(axis=1)) - h[np.arange(ROWS), y]) + run.l2 / 2 * np.sum(w**2)
    assert last.metrics["objective"] == pytest.approx(expected, rel=1e-5)
    x, y = map(np.asarray, problem.held_out["test"])
    wrong = np.argmax(x @ w, axis=1) != y
    assert last.metrics["test_error"] == pytest.approx(np.mean(wrong), abs=1e-6)


def test_schedules_are_what_they_are_called():
    def rates(schedule):
        return methods._rate(methods.numbers(2.0, schedule, 10, 0.0, 0.0))(jnp.array([0.0, 5.0, 10.0, 20.0]))

    np.testing.assert_allclose(rates("constant"), 2)
    np.testing.assert_allclose(rates("inverse"), [2, 2 / 6, 2 / 11, 2 / 11], rtol=1e-6)
    np.testing.assert_allclose(rates("cosine"), [2, 1, 0, 0], atol=1e-6)


def test_step_with_the_exact_hessian_is_newton_s():
    problem = tiny_problem()
    x, y = problem.train
    w = jax.random.normal(jax.random.key(0), (WIDTH, CLASSES))
    setting = methods.numbers(1.0, "constant", 1, 0.1, 0.2)
    grads = jax.grad(train.loss)(w, problem.train)
    transform = methods.optimizer(Method("newton"), setting, WIDTH)
    updates, _ = jax.jit(transform.update)(grads, transform.init(w), w, inputs=x)
    hessian = jax.jit(jax.hessian(lambda v: train.loss(v.reshape(w.shape), Rows(x, y))))(w.ravel())
    expected = -np.linalg.solve(hessian + 0.3 * np.eye(w.size), (grads + 0.1 * w).ravel()).reshape(w.shape)
    assert np.linalg.norm(updates - expected) < 2e-3 * np.linalg.norm(expected)


def test_records_are_ever_further_apart():
    kept = [chunk for chunk in range(1, 1001) if train.due(chunk)]
    assert kept[:4] == [1, 2, 3, 4]
    assert len(kept) < 35
    assert max(b / a for a, b in zip(kept[4:], kept[5:], strict=False)) < 1.6


def test_run_ends_with_its_budget_or_when_its_numbers_do():
    problem = tiny_problem()
    *_, last = train.train(a_run(seconds=1e-9), problem)
    assert (last.step, last.ended) == (2, "budget")
    *_, last = train.train(a_run(method=Method("sgd"), learning_rate=1e30, schedule="constant"), problem)
    assert last.ended == "diverged"
    with pytest.raises(ValueError, match="batch: expected at most the 1300 training rows of tiny; got 2000"):
        next(train.train(a_run(batch=2000), problem))
