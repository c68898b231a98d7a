"""One process at a time in a folder."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from experiments.errors import UserError, writing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["alone_in", "locked"]

# What systems say of a lock where the file system has none.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a folder of results, and refuse it to all others meanwhile: two that write there damage each other's files.

    Raises:
      UserError: another process, or another thread, is there.
    """

    def refuse(owner: str) -> None:
        raise UserError(
            f"{folder}: expected to be alone there; found that {owner} writes to it. Wait until that has ended, or "
            "choose another folder for the results"
        )

    with contextlib.ExitStack() as stack:
        with writing(folder):
            stack.enter_context(locked(folder / ".lock", refuse))
        yield


@contextlib.contextmanager
def locked(path: Path, busy: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a file; the system opens it when its process ends, however it ends.

    If another holds it, `busy` is told who that is; when it returns, the lock is waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8") as file:
        if _is_taken(file, path, wait=False):
            busy(_owner(file))
            _is_taken(file, path, wait=True)
        with contextlib.suppress(OSError):  # for the other's message alone: a full disk keeps nobody from a lock
            file.seek(0)
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
        yield


def _is_taken(file: IO[str], path: Path, wait: bool) -> bool:
    """Take a lock, or say that another has it."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "no file locks")
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"note: {path.parent} cannot be locked here: start nothing else that writes there", file=sys.stderr)
    return False


def _owner(file: IO[str]) -> str:
    text = file.read(20).strip()
    return f"process {text}" if text.isdecimal() else "another process"
