"""Peers with packages of their own: an environment for each, .venv-bench-NAME, and a process in it for each request."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.errors import writing

__all__ = ["PACKAGES", "Failed", "Peers"]

ROOT = Path(__file__).parents[2]
# What qbound itself needs, so that all methods run by the same code.
OURS = ("jaxtyping>=0.3.7", "chex>=0.1.90")
PACKAGES = {
    "kfac": ("kfac-jax==0.0.8", "jax==0.9.1", "jaxlib==0.9.1", "optax>=0.2.6", *OURS),
    # It does not declare that it needs flax.
    "psgd": ("psgd-jax==0.2.9", "jax==0.9.2", "jaxlib==0.9.2", "optax==0.2.6", "flax>=0.12", *OURS),
}
INSTALL_SECONDS, RUN_SECONDS = 900, 3 * 3600


class Failed(Exception):
    """A method that cannot be run, in one line."""


class Peers:
    """Environments are made when they are first needed; requests, answers and what was printed are in `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder.absolute()
        self._missing: dict[str, str] = {}

    def call(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request, by a process that ends with it."""
        python = self._python(name)
        question, answer, log = (self._folder / f"{name}.{end}" for end in ("request", "answer", "log"))
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            question.write_text(json.dumps(request))
            answer.unlink(missing_ok=True)
        # Flags of the compiler are for the jaxlib that is installed here: another may not know them.
        variables = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        command = [str(python), "-m", "experiments.networks.worker", str(question), str(answer)]
        try:
            with log.open("ab") as file:
                done = subprocess.run(
                    command, stdout=file, stderr=file, cwd=ROOT, env=variables, timeout=RUN_SECONDS, check=False
                )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"no answer in {RUN_SECONDS} s") from error
        if not answer.exists():
            raise Failed(f"the process ended with exit code {done.returncode}; see {log}")
        found = json.loads(answer.read_text())
        if "error" in found:
            raise Failed(found["error"])
        return found

    def _python(self, name: str) -> Path:
        """Of an environment, which is made if it is not there, or was made for other packages."""
        if name in self._missing:
            raise Failed(self._missing[name])
        packages = PACKAGES[name]
        key = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:8]
        folder = ROOT / f".venv-bench-networks-{name}"
        python, done = folder / "bin" / "python", folder / f"installed-{key}"
        if not done.exists():
            print(f"installing {' '.join(packages)} in {folder.name}", flush=True)
            try:
                _call([sys.executable, "-m", "venv", "--clear", str(folder)])
                _call([str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *packages])
            except Failed as error:
                self._missing[name] = f"not installed: {error}"
                raise Failed(self._missing[name]) from error
            done.touch()
        return python


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(str(error)) from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
        raise Failed(" ".join(errors[-1].split())[:300])
