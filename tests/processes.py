"""Python in a process of its own: with other devices or dtypes, or where the failure may be a crash.

Run as a script, it prints the flags that the installed jaxlib needs, and with `quick` those that make it quick, too.
"""

import importlib.metadata
import os
import subprocess
import sys

from qbound import compiler

# An unknown flag ends the process, so each is for the releases that know it.
JAXLIB = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])

# Make XLA spend a third of the time on a small program, together with `jax_disable_most_optimizations`. Of code in one
# piece there is less than in many, and with two workers no core is free for other pieces.
QUICK_FLAGS = ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
if JAXLIB >= (0, 12):
    QUICK_FLAGS = []

# Without it, these releases get some sums of products wrong on CPU: see qbound/canary.py.
REPAIRING_FLAGS = [compiler.REMEDY] if compiler.is_known_to_be_wrong() else []


def environment(*, quick: bool = False, repaired: bool = True, devices: int = 1, **variables: str) -> dict[str, str]:
    """Programs are compiled as users have them, unless `quick`: then as in the rest of the suite.

    With `repaired` they are compiled right, by a flag where that is needed.
    """
    flags = [f"--xla_force_host_platform_device_count={devices}", *(REPAIRING_FLAGS if repaired else [])]
    if quick and not os.environ.get("OPTIMIZED"):
        flags += QUICK_FLAGS
        variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return {**os.environ, "XLA_FLAGS": " ".join(flags), **variables}


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    """To its end, in the environment of the options."""
    variables = environment(**options)
    return subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    print(*REPAIRING_FLAGS, *(QUICK_FLAGS if sys.argv[1:] == ["quick"] else []))
