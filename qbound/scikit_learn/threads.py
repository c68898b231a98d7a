"""One thread for BLAS while fits run, whose factorisations are slower when its threads fight those of XLA for cores."""

import contextlib
import functools
import threading
from collections.abc import Iterator

from threadpoolctl import ThreadpoolController


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit BLAS, in a program whose threads fit at the same time, too: when no fit is left, it is as it was."""
    fit = object()
    try:
        _enter(fit)
        # Some libraries have a number of threads for each thread that calls them, and the keeper's is another.
        with _limit() if _has_more() else contextlib.nullcontext():
            yield
    finally:
        _leave(fit)


class _Keeper:
    """Holds the limit for all fits that overlap, from a thread of its own.

    Where the number of threads is one for the whole process, a fit that begins while another runs would find 1, and
    restore that. So it is saved once and restored once; by the same thread, because threadpoolctl ignores others than
    the one that has set it. And no Ctrl-C comes to that thread.
    """

    def __init__(self):
        self._held, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, name="qbound: BLAS", daemon=True)

    def start(self) -> None:
        """Return when the limit is set."""
        self._thread.start()
        self._held.wait()

    def stop(self) -> None:
        """Return when the limit is lifted; if that is interrupted, it is lifted all the same."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def _hold(self) -> None:
        try:
            with _limit():
                self._held.set()
                self._over.wait()
        finally:
            self._held.set()


_lock = threading.Lock()
_fits: set[object] = set()
_keeper: _Keeper | None = None


def _enter(fit: object) -> None:
    global _keeper
    with _lock:
        _fits.add(fit)
        if (_keeper is None or _keeper.is_over) and _has_more():
            # Known before it starts, so that an interruption leaves none that nobody stops.
            _keeper = _Keeper()
            _keeper.start()


def _leave(fit: object) -> None:
    """Also of a fit that an interruption kept from entering."""
    with _lock:
        _fits.discard(fit)
        if not _fits and _keeper is not None:
            _keeper.stop()


def _limit():
    return _libraries().limit(limits=1, user_api="blas")


def _has_more() -> bool:
    """Than one thread, as this thread sees it."""
    return any(library.num_threads != 1 for library in _libraries().lib_controllers)


@functools.cache
def _libraries() -> ThreadpoolController:
    """To look for them takes milliseconds: once."""
    return ThreadpoolController().select(user_api="blas")
