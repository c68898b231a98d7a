"""What can be wrong with data: the files themselves, or the circumstances they are looked for in."""

from experiments.errors import UserError

__all__ = ["DataError", "RawFileError"]


class DataError(UserError):
    """A user's mistake, or a circumstance such as a full disk; its text is one line that says what to do."""


class RawFileError(ValueError):
    """A file that is not what was published: its text names the file, what was expected and what was found."""
