"""Mistakes of users and circumstances of machines: one line that says what to do, and no traceback."""

import contextlib
import errno
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["UserError", "one_line_errors", "writing"]

ROOM = (errno.ENOSPC, errno.EDQUOT)


class UserError(ValueError):
    """Something the user can put right; its text is the whole message."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in what the system says of it: for a full disk it names none."""
    try:
        yield
    except OSError as error:
        what = "make room there" if error.errno in ROOM else "make that a folder that can be written to"
        raise UserError(f"{path}: {error.strerror or error}; {what}, or choose another for the results") from error


def one_line_errors(main: Callable[[], int]) -> int:
    """Run a command; the exit code is 2 for a user's mistake and 130 for Ctrl-C."""
    try:
        return main()
    except UserError as error:
        message, code = str(error), 2
    except KeyboardInterrupt:
        message, code = "interrupted; the same command goes on from here", 130
    print(f"error: {message}", file=sys.stderr)
    return code
