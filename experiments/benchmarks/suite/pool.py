"""The environments of methods, and a process in each that runs them."""

import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.benchmarks.suite.contestants import ENVIRONMENTS
from experiments.benchmarks.suite.race import Outcome

__all__ = ["NOT_INSTALLED", "Pool"]

ROOT = Path(__file__).parents[3]
# Beyond the time a run may take: to compile, to warm up, and to look at checkpoints.
GRACE = 60.0
NOT_INSTALLED = "not installed"


class Pool:
    """Workers, started when they are first needed; environments are made then, too."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._workers: dict[str, subprocess.Popen] = {}
        self._missing: dict[str, str] = {}

    def run(self, environment: str, request: dict[str, Any]) -> Outcome:
        """The outcome of a request; that of a worker that died, hung or could not be installed says so."""
        try:
            worker = self._worker(environment)
        except _NotInstalled as error:
            return Outcome(NOT_INSTALLED, message=str(error))
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write((json.dumps(request) + "\n").encode())
            line = _line(worker.stdout.fileno(), 3 * request["seconds"] + GRACE)
        except (BrokenPipeError, EOFError):
            self.stop(environment)
            return Outcome("killed", message=f"the process died with exit code {worker.wait()}")
        except TimeoutError as error:
            self.stop(environment)
            return Outcome("killed", message=str(error))
        return Outcome.from_json(json.loads(line))

    def stop(self, environment: str | None = None) -> None:
        """One worker, or all: their programs, of which a process can hold a limited number, go with them."""
        for name in list(self._workers) if environment is None else [environment]:
            worker = self._workers.pop(name, None)
            if worker is not None:
                worker.kill()
                with worker:  # closes its pipes, and waits for it
                    pass

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """What is installed in environments, or why nothing is."""
        found = {}
        for name in sorted(names):
            try:
                found[name] = _versions(self._python(name))
            except _NotInstalled as error:
                found[name] = f"{NOT_INSTALLED}: {error}"
        return found

    def _worker(self, name: str) -> subprocess.Popen:
        worker = self._workers.get(name)
        if worker is None or worker.poll() is not None:
            threads = str(os.cpu_count()) if ENVIRONMENTS[name].blas_threads else "1"
            python = str(self._python(name))
            with (self._folder / f"{name}.log").open("ab") as log:
                self._workers[name] = worker = subprocess.Popen(
                    [python, "-m", "experiments.benchmarks.suite.worker"],
                    bufsize=0,  # else a pipe that broke would be written to again when it is closed
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=ROOT,
                    env={**self._environment(name), "OPENBLAS_NUM_THREADS": threads},
                )
        return worker

    @staticmethod
    def _environment(name: str) -> dict[str, str]:
        """Flags of the compiler are for the jaxlib that is installed here: another may not know them."""
        is_own = not ENVIRONMENTS[name].packages
        return {key: value for key, value in os.environ.items() if is_own or key != "XLA_FLAGS"}

    def _python(self, name: str) -> Path:
        """Of an environment, which is made if it is not there, or was made for other packages."""
        packages = ENVIRONMENTS[name].packages
        if not packages:
            return Path(sys.executable)
        if name in self._missing:
            raise _NotInstalled(self._missing[name])
        key = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:8]
        folder = ROOT / f".venv-bench-{name}"
        python, done = folder / "bin" / "python", folder / f"installed-{key}"
        if not done.exists():
            print(f"installing {' '.join(packages)} in {folder.name}", flush=True)
            try:
                _call([sys.executable, "-m", "venv", "--clear", str(folder)])
                _call([str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *packages])
            except _NotInstalled as error:
                print(f"  {error}", flush=True)
                self._missing[name] = str(error)
                raise
            done.touch()
        return python


class _NotInstalled(Exception):
    pass


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _NotInstalled(str(error)) from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
        raise _NotInstalled(f"{command[0]} {' '.join(command[1:4])}: {errors[-1][:300]}")


def _versions(python: Path) -> str:
    found = subprocess.run([str(python), "-m", "pip", "freeze"], capture_output=True, text=True)
    names = ("jax==", "jaxlib==", "optax==", "numpy==", "scikit-learn==", "cyanure==", "python-somax==", "kfac-jax==")
    return ", ".join(line for line in found.stdout.split() if line.startswith(names))


def _line(file: int, seconds: float) -> bytes:
    """The next line of a pipe, that no one has read from before."""
    deadline, parts = time.monotonic() + seconds, b""
    while not parts.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([file], [], [], left)[0]:
            raise TimeoutError(f"no answer in {seconds:.0f} s")
        part = os.read(file, 1 << 20)
        if not part:
            raise EOFError
        parts += part
    return parts
