"""`python -m qbound`: what a report of a bug needs."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import jax

import qbound
from qbound import canary, compiler

_PACKAGES = ("jax", "jaxlib", "optax", "chex", "jaxtyping", "numpy", "scipy", "scikit-learn")

# A program that is compiled wrongly may also run for ever.
_PATIENCE = 120


def main() -> None:
    """Print one fact on each line."""
    for name, fact in _facts():
        print(f"{name + ':':<14} {fact}", flush=True)


def _facts() -> Iterator[tuple[str, str]]:
    yield "qbound", qbound.__version__
    yield "Python", f"{platform.python_implementation()} {platform.python_version()}"
    yield "platform", platform.platform()
    for name in (*_PACKAGES, *_plugins()):
        yield name, _version(name)
    yield "devices", _devices()
    yield "float64", "on" if jax.config.jax_enable_x64 else "off"  # pyright: ignore[reportAttributeAccessIssue]
    for name in sorted(os.environ):
        if name.startswith(("JAX_", "XLA_")) or name.endswith("_NUM_THREADS"):
            yield name, os.environ[name]
    outcomes = {name: outcome_of(name) for name in canary.PROGRAMS}
    for name, outcome in outcomes.items():
        yield f"CPU, {name}", outcome
    yield "verdict", _verdict(outcomes)


def _plugins() -> list[str]:
    """JAX's packages for other devices."""
    names = {distribution.name.lower() for distribution in importlib.metadata.distributions() if distribution.name}
    return sorted(name for name in names if name.startswith(("jax-", "libtpu")))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    try:
        kinds = [f"{device.platform} ({device.device_kind})" for device in jax.devices()]
    except RuntimeError as error:
        return f"none: {error}"
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def outcome_of(program: str) -> str:
    """Of a program of the canary, in a process of its own, which may crash."""
    command = [sys.executable, "-c", f"import sys; from qbound import canary; sys.exit(not canary.{program}())"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return f"not finished after {_PATIENCE} s"
    if run.returncode == 0:
        return "right"
    if run.returncode < 0:
        return f"crashes (signal {-run.returncode})"
    return f"fails: {run.stderr.strip().splitlines()[-1]}" if run.stderr.strip() else "wrong"


def _verdict(outcomes: dict[str, str]) -> str:
    if all(outcome == "right" for outcome in outcomes.values()):
        return "programs for CPU are compiled right"
    return compiler.message() or "programs for CPU may be wrong, in a way that qbound does not know: please report this"


if __name__ == "__main__":
    main()
