"""Mistakes of users and circumstances of machines: one line that says what to do, and no traceback."""

import sys
from collections.abc import Callable

__all__ = ["UserError", "one_line_errors"]


class UserError(ValueError):
    """Something the user can put right; its text is the whole message."""


def one_line_errors(main: Callable[[], int]) -> int:
    """Run a command; the exit code is 2 for a user's mistake and 130 for Ctrl-C."""
    try:
        return main()
    except UserError as error:
        message, code = str(error), 2
    except KeyboardInterrupt:
        message, code = "interrupted; the same command goes on from here", 130
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror}. Make room there, or choose another folder for results by output=DIR"
        code = 2
    print(f"error: {message}", file=sys.stderr)
    return code
