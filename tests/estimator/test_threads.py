"""BLAS has one thread while fits run, and as many as before when they are over, whichever ends first."""

import contextlib
import queue
import threading

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

import qbound.estimator as estimator_module
from qbound.estimator import LogisticRegression
from qbound.scikit_learn import threads
from qbound.scikit_learn.threads import one_thread

MANY = 2


def libraries():
    return ThreadpoolController().select(user_api="blas").lib_controllers


def counts():
    """Of threads, for every BLAS there is."""
    return {library.num_threads for library in libraries()}


def set_counts(numbers):
    """In a thread that ends: threadpoolctl lets a living one keep others from setting them."""

    def run():
        for library, number in zip(libraries(), numbers, strict=True):
            library.set_num_threads(number)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.fixture(autouse=True)
def many_threads():
    """Whatever the environment says."""
    before = [library.num_threads for library in libraries()]
    if not before:
        pytest.skip("this threadpoolctl does not know the BLAS of this NumPy")
    set_counts([MANY] * len(before))
    assert counts() == {MANY}
    yield
    set_counts(before)


class Worker:
    """A thread that enters and leaves the limit when it is told to."""

    def __init__(self):
        self.orders, self.answers = queue.Queue(), queue.Queue()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        stack = contextlib.ExitStack()
        while (order := self.orders.get()) is not None:
            if order == "enter":
                stack.enter_context(one_thread())
            elif order == "leave":
                stack.close()
            self.answers.put(threads._has_more())

    def tell(self, order):
        self.orders.put(order)
        return self.answers.get(timeout=30)

    def end(self):
        self.orders.put(None)
        self.thread.join()


@pytest.fixture
def workers():
    found = [Worker() for _ in range(4)]
    yield found
    for worker in found:
        worker.end()


@pytest.mark.parametrize("last", [0, 1], ids=["first in, last out", "first in, first out"])
def test_last_fit_to_end_restores_the_threads_of_blas(workers, last):
    for worker in workers[:2]:
        worker.tell("enter")
        assert counts() == {1}
    workers[1 - last].tell("leave")
    assert counts() == {1}
    workers[last].tell("leave")
    assert counts() == {MANY}


def test_any_order_of_fits_restores_the_threads_of_blas(workers):
    rng = np.random.default_rng(0)
    inside = [False] * len(workers)
    for _ in range(200):
        i = rng.integers(len(workers))
        workers[i].tell("leave" if inside[i] else "enter")
        inside[i] = not inside[i]
        assert counts() == ({1} if any(inside) else {MANY})
    for worker in workers:
        worker.tell("leave")
    assert counts() == {MANY}


def test_fits_in_threads_leave_blas_as_it_was():
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(40, estimator_module._FACTORISED)), np.arange(40) % 3
    seen = []

    class Watching(LogisticRegression):
        def _penalty(self, *arguments):
            seen.append(threads._has_more())
            return super()._penalty(*arguments)

    def work(rows):
        for _ in range(3):
            LogisticRegression(max_iter=2, tol=0.1).fit(inputs[:rows], labels[:rows])
            Watching().partial_fit(inputs[:rows], labels[:rows], classes=[0, 1, 2])

    work(40)  # compiles
    assert seen and not any(seen)
    fits = [threading.Thread(target=work, args=(36 + i % 5,)) for i in range(6)]
    for fit in fits:
        fit.start()
    for fit in fits:
        fit.join()
    assert counts() == {MANY}


def test_few_columns_leave_blas_alone():
    seen = []

    class Watching(LogisticRegression):
        def _penalty(self, *arguments):
            seen.append(threads._has_more())
            return super()._penalty(*arguments)

    Watching().partial_fit(np.eye(4), [0, 1, 0, 1], classes=[0, 1])
    assert seen and all(seen)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_in_a_fit_restores_the_threads_of_blas(error):
    with pytest.raises(error), one_thread():
        assert counts() == {1}
        raise error
    assert counts() == {MANY}


def test_fit_within_a_fit_restores_the_threads_of_blas():
    with one_thread():
        with one_thread():
            assert counts() == {1}
        assert counts() == {1}
    assert counts() == {MANY}


@pytest.mark.parametrize("where", ["start", "stop"])
def test_interrupted_limit_is_lifted(monkeypatch, where):
    """Ctrl-C while the limit is being set, or lifted."""
    real = getattr(threads._Keeper, where)

    def interrupted(keeper):
        real(keeper)
        raise KeyboardInterrupt

    monkeypatch.setattr(threads._Keeper, where, interrupted)
    with pytest.raises(KeyboardInterrupt), one_thread():
        pass
    monkeypatch.undo()
    assert counts() == {MANY}
    with one_thread():
        assert counts() == {1}
    assert counts() == {MANY}


class FakeLibrary:
    """With a number of threads for the process, or one for each thread of it."""

    def __init__(self, own):
        self.numbers, self.own = {}, own

    def key(self):
        return threading.get_ident() if self.own else None

    @property
    def num_threads(self):
        return self.numbers.get(self.key(), 5)

    @num_threads.setter
    def num_threads(self, number):
        self.numbers[self.key()] = number


class FakeController:
    def __init__(self, *libraries):
        self.lib_controllers = libraries

    @contextlib.contextmanager
    def limit(self, limits, user_api):
        before = [library.num_threads for library in self.lib_controllers]
        for library in self.lib_controllers:
            library.num_threads = limits
        yield
        for library, number in zip(self.lib_controllers, before, strict=True):
            library.num_threads = number


def test_libraries_that_count_for_each_thread_are_limited_in_each(monkeypatch, workers):
    shared, own = FakeLibrary(own=False), FakeLibrary(own=True)
    controller = FakeController(shared, own)
    monkeypatch.setattr(threads, "_libraries", lambda: controller)
    first, second = workers[:2]
    assert not first.tell("enter") and not second.tell("enter")
    assert first.tell("look") is False and own.num_threads == 5
    assert first.tell("leave") is True, "its own number is as it was"
    assert shared.num_threads == 1 and second.tell("look") is False
    assert second.tell("leave") is True and shared.num_threads == 5
