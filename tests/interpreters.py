"""Print the path of a Python on this machine that the package runs on: on PATH, or one of pyenv's.

Run as a script, by any Python 3, with `oldest`, `newest`, or `newer`: the newest if it is newer than the one that runs.
If there is none, it prints nothing but a message, on stderr.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

LOWEST = (3, 11)

# A plain, final CPython that can make environments.
PROBE = """
import sys, sysconfig, venv, ensurepip
plain = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
if plain and sys.version_info.releaselevel == "final":
    print(*sys.version_info[:3])
"""


def candidates():
    """Paths that may be a Python 3, those on PATH first."""
    names = ["python3", *(f"python3.{minor}" for minor in range(LOWEST[1], 40))]
    yield from filter(None, map(shutil.which, names))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob("versions/3.*/bin/python")))


def version(path):
    """Of the interpreter, as three numbers; None if the package cannot be tested with it."""
    try:
        probe = subprocess.run([path, "-I", "-c", PROBE], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = tuple(map(int, probe.stdout.split())) if probe.returncode == 0 else ()
    return found if found[:2] >= LOWEST else None


def pick(which, found):
    """Of pairs of a version and a path, the path with the oldest or newest of 3.11, 3.12, ..., by its latest patch."""
    if which == "newer":
        found = [pair for pair in found if pair[0][:2] > sys.version_info[:2]]
    if not found:
        return None
    minor = (min if which == "oldest" else max)(number[:2] for number, _ in found)
    return max((pair for pair in found if pair[0][:2] == minor), key=lambda pair: pair[0])[1]


def main():
    which = sys.argv[1]
    versions = [(version(path), path) for path in dict.fromkeys(candidates())]
    path = pick(which, [pair for pair in versions if pair[0]])
    if path:
        print(path)
    else:
        wanted = "newer than" if which == "newer" else "of at least"
        major, minor = sys.version_info[:2] if which == "newer" else LOWEST
        print(f"NOT TESTED: no Python {wanted} {major}.{minor} on PATH or among those of pyenv", file=sys.stderr)


if __name__ == "__main__":
    main()
