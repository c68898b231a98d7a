"""Which jaxlib compiles wrong programs for CPU, the programs of this package compiled right, and a warning for others.

From 0.10 on, on Linux x86-64, XLA gives fusions to a library named YNN and gets some of them wrong: `qbound.canary` has
the shortest examples. An option of the compiler keeps that library out of one program, a flag out of a whole process.
"""

import concurrent.futures
import contextlib
import contextvars
import enum
import functools
import inspect
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
from jax.core import Tracer

from qbound import canary

FLAG = "xla_cpu_experimental_ynn_fusion_type"
REMEDY = f"--{FLAG}=-reduce"
_OPTIONS = {FLAG: ""}

# Tried: 0.10.0, 0.10.2, 0.11.0, 0.12.0 and 0.12.0.1, and all are wrong. Later ones are asked.
_FIRST_WRONG, _LAST_WRONG = (0, 10), (0, 12, 0, 1)


class MiscompilationWarning(RuntimeWarning):
    """The installed jaxlib compiles some programs wrongly."""


class Verdict(enum.Enum):
    """On the programs that this process compiles for CPU."""

    RIGHT = "right"
    REPAIRABLE = "wrong, unless compiled with an option"
    WRONG = "wrong"


@functools.cache
def verdict() -> Verdict:
    """On this process: XLA reads its flags once, so it does not change."""
    if not _suspect():
        return Verdict.RIGHT
    if is_known_to_be_wrong() and FLAG not in _flags():
        return Verdict.REPAIRABLE
    # A flag may come too late or have a value of no use, and a later release may be right.
    if _apart(canary.product):
        return Verdict.RIGHT
    return Verdict.REPAIRABLE if _apart(_is_repaired) else Verdict.WRONG


def is_known_to_be_wrong() -> bool:
    """Whether the installed release is at fault without the flag, and knows it: an unknown flag ends the process."""
    return _suspect() and _version() <= _LAST_WRONG


def repair_process() -> None:
    """Add the flag to the environment where it is needed: for commands, before their first computation.

    What is imported into the programs of others leaves their environment alone.
    """
    if is_known_to_be_wrong() and FLAG not in _flags():
        os.environ["XLA_FLAGS"] = f"{_flags()} {REMEDY}".strip()
        verdict.cache_clear()


def message() -> str:
    """What is wrong, and what helps; nothing if all is right."""
    if verdict() is Verdict.RIGHT:
        return ""
    fault = (
        f"jaxlib {jaxlib.version.__version__} compiles some programs for this CPU wrongly: sums and maxima of products "
        f"can be garbage, or crash (github.com/jax-ml/jax/issues/39103). "
    )
    if verdict() is Verdict.WRONG:
        return f"{fault}No remedy is known. Install a release that is right: pip install 'jax==0.9.2' 'jaxlib==0.9.2'."
    late = f"XLA_FLAGS names {FLAG}, but was set too late, or to a value that leaves the fault in. "
    return (
        f"{fault}{late if FLAG in _flags() else ''}Programs that qbound compiles itself are right. For your own, set "
        f"XLA_FLAGS={REMEDY} in the environment before the first computation."
    )


def warn_if_wrong() -> None:
    """Warn, once, if what is computed now for the default device may be wrong.

    A warning that is made an error is raised every time.
    """
    if _warned or not _suspect() or _is_own.get() or default_platform() != "cpu":
        return
    if verdict() is not Verdict.RIGHT:
        warnings.warn(message(), MiscompilationWarning, stacklevel=_level_of_caller(inspect.stack(0)))
        _warned.append(True)


_warned: list[bool] = []

_is_own: contextvars.ContextVar[bool] = contextvars.ContextVar("is_own", default=False)


@contextlib.contextmanager
def compiled_here() -> Iterator[None]:
    """What is traced inside is compiled right, or not at all, and gives no reason to warn."""
    token = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(token)


class Program:
    """What `jax.jit` makes of a function, compiled right on CPU."""

    def __init__(self, function: Callable, **options: Any):
        functools.update_wrapper(self, function)
        self.plain = jax.jit(function, **options)
        self._repaired = jax.jit(function, compiler_options=_OPTIONS, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _can_be_repaired((args, kwargs)):
            with compiled_here():
                return self._repaired(*args, **kwargs)
        # JAX may have traced the function before, so that nothing inside it would warn.
        warn_if_wrong()
        return self.plain(*args, **kwargs)


def jit(function: Callable, **options: Any) -> Program:
    """As `jax.jit`, for the programs of this package."""
    return Program(function, **options)


def _can_be_repaired(arguments) -> bool:
    """Whether the program is for CPU, wrong, and not part of another: who compiles that one chooses its options."""
    if not _suspect():
        return False
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    if any(isinstance(array, Tracer) for array in arrays):
        return False
    where = next(iter(arrays[0].devices())).platform if arrays else default_platform()
    if where != "cpu" or verdict() is not Verdict.REPAIRABLE:
        return False
    # In a program, new arrays are traced as well. This one is made without a transfer, which may be forbidden.
    return not isinstance(jax.lax.iota(jnp.int32, 1), Tracer)


@functools.cache
def _suspect() -> bool:
    """Whether this machine and release can be at fault."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return sys.platform == "linux" and is_x86 and _version() >= _FIRST_WRONG


def _version() -> tuple[int, ...]:
    """The numbers of "0.12.0.1" and of "0.13.0.dev20261101"."""
    found = re.match(r"\d+(\.\d+)*", jaxlib.version.__version__)
    return tuple(map(int, found[0].split("."))) if found else ()


def _flags() -> str:
    return os.environ.get("XLA_FLAGS", "")


def default_platform() -> str:
    """Where programs run that are not told where: "cpu", "gpu", "tpu"."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _apart(function: Callable[[], bool]) -> bool:
    """In a thread of its own, where no trace, mesh or dtype of the caller is in force."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _is_repaired() -> bool:
    try:
        return canary.product(_OPTIONS)
    except jax.errors.JaxRuntimeError:  # a release that does not know the option
        return False


def _level_of_caller(stack: list[inspect.FrameInfo]) -> int:
    """Of the line that called this package, or one through which it was called."""
    between = ("qbound", "jax", "jaxtyping", "optax", "contextlib")
    for level, at in enumerate(stack, start=1):
        if at.frame.f_globals.get("__name__", "").partition(".")[0] not in between:
            return level
    return 1
