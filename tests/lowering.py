"""Programs as other devices would get them: lowered by `jax.export`, which needs no such device, and searched."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from qbound import compiler

__all__ = ["PLATFORMS", "faults", "jitted_programs", "module_faults", "uses_of_jit"]

PLATFORMS = ("cuda", "tpu")

# Names of primitives that call the host while a program runs.
_CALLS_HOST = re.compile(r"callback|outside_call|infeed|outfeed|debug_print")
# Custom calls, by their targets, that call Python, move arrays to the host, or have kernels for CPUs alone.
_TARGETS = re.compile(r"custom_call\s*@([\w.$]+)|call_target_name\s*=\s*\"([^\"]+)\"")
_HOST_TARGET = re.compile(r"callback|host|hybrid|lapack|cpu", re.IGNORECASE)
_TRANSFERS = re.compile(r"stablehlo\.(send|recv|infeed|outfeed)\b")


def faults(
    function: Callable, *arguments: Any, platforms: tuple[str, ...] = PLATFORMS, may_round: bool = False
) -> list[str]:
    """What keeps a function from running on these platforms, by itself and in full precision.

    JAX raises where a primitive has no rule for one of them, or becomes a custom call that is not known to be stable.

    Args:
      function: to be jitted.
      *arguments: their shapes will do.
      platforms: which ones.
      may_round: whether factors of products may be rounded, to bfloat16 or TF32, as is the default of devices.
    """
    jitted = jax.jit(function)
    closed = jitted.trace(*arguments).jaxpr
    equations = list(_equations(closed.jaxpr))
    found = {name for name in (equation.primitive.name for equation in equations) if _CALLS_HOST.search(name)}
    found |= {f"effect {effect}" for effect in closed.effects}
    if found:
        return sorted(found)  # JAX cannot lower them for a device that is not here
    rounded = 0 if may_round else sum(map(_is_rounded, equations))
    module = export.export(jitted, platforms=platforms)(*arguments).mlir_module()
    return module_faults(module) + ([f"{rounded} products that may be rounded"] if rounded else [])


def module_faults(module: str) -> list[str]:
    """What in a program that has been lowered, as text in StableHLO, needs the host."""
    targets = {by_name or by_attribute for by_name, by_attribute in _TARGETS.findall(module)}
    on_host = {target for target in targets if _HOST_TARGET.search(target)}
    return sorted(on_host | {f"stablehlo.{operation}" for operation in _TRANSFERS.findall(module)})


def jitted_programs(package: ModuleType) -> dict[str, Callable]:
    """All jitted functions of a package, by module and name; each once, where it was made."""
    found: dict[int, tuple[str, Callable]] = {}
    for module in _modules(package):
        for name, value in vars(module).items():
            if _is_program(value) and (_is_of(value, module) or id(value) not in found):
                found[id(value)] = f"{module.__name__}.{name}", value
    return dict(found.values())


def uses_of_jit(package: ModuleType) -> dict[str, int]:
    """How often each module of a package that does so mentions `jit`, or the `jit` of a module, in its code."""
    counts = {}
    for module in _modules(package):
        nodes = ast.walk(ast.parse(inspect.getsource(module)))
        names = [getattr(node, "attr", getattr(node, "id", None)) for node in nodes]
        counts[module.__name__] = names.count("jit")
    return {name: count for name, count in counts.items() if count}


def _is_program(value: Any) -> bool:
    """Whether a value is what `jax.jit` returns, or `qbound.compiler.jit`."""
    return isinstance(value, (compiler.Program, type(jax.jit(lambda: None))))


def _is_of(program: Any, module: ModuleType) -> bool:
    return program.__wrapped__.__module__ == module.__name__


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    yield package
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not info.name.endswith("__main__"):  # a script, which may run when it is imported
            yield importlib.import_module(info.name)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All of a program, also in loops, branches and functions with derivatives of their own."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _is_rounded(equation: Any) -> bool:
    """Whether a device may round the factors of a product of floats."""
    if equation.primitive.name != "dot_general" or not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
        return False
    precision = equation.params["precision"]
    return precision is None or any(part != jax.lax.Precision.HIGHEST for part in precision)
