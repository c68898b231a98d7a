"""Python in a process of its own: with other devices or dtypes, or where the failure may be a crash."""

import os
import subprocess
import sys

# Makes XLA spend half the time on a small program, together with `jax_disable_most_optimizations`.
QUICK_FLAG = "--xla_cpu_use_fusion_emitters=false"


def run(*arguments: str, quick: bool = False, devices: int = 1, **variables: str) -> subprocess.CompletedProcess:
    """Programs are compiled as users have them, unless `quick`: then as in the rest of the suite."""
    flags = [f"--xla_force_host_platform_device_count={devices}"]
    if quick and not os.environ.get("OPTIMIZED"):
        flags.append(QUICK_FLAG)
        variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags), **variables}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
