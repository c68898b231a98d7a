"""Timing on a noisy machine: candidates take turns, and each turn is compared with the reference of the same turn."""

import dataclasses
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

__all__ = ["Timing", "compare"]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Of one candidate: seconds to compile, median seconds of a call, and quartiles of its ratio to the reference."""

    compile_seconds: float
    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    temporary_bytes: int
    peak_bytes: int  # with arguments and results


def compare(candidates: Mapping[str, Callable], arguments: tuple, reference: str, budget: float) -> dict[str, Timing]:
    """Time jitted `candidates` on the same `arguments`, in turns, for about `budget` seconds and at least 5 turns."""
    compiled, compile_seconds = {}, {}
    for name, candidate in candidates.items():
        start = time.perf_counter()
        compiled[name] = jax.jit(candidate).lower(*arguments).compile()
        compile_seconds[name] = time.perf_counter() - start
        for _ in range(2):
            jax.block_until_ready(compiled[name](*arguments))
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    stop = time.perf_counter() + budget
    while time.perf_counter() < stop or len(seconds[reference]) < 5:
        for name, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            seconds[name].append(time.perf_counter() - start)
    result = {}
    for name, values in seconds.items():
        low, ratio, high = np.percentile(np.divide(values, seconds[reference]), [25, 50, 75])
        memory = compiled[name].memory_analysis()
        result[name] = Timing(
            compile_seconds=compile_seconds[name],
            seconds=float(np.median(values)),
            ratio=float(ratio),
            ratio_low=float(low),
            ratio_high=float(high),
            temporary_bytes=memory.temp_size_in_bytes,
            peak_bytes=memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes,
        )
    return result
