"""The package as a whole: what it imports, what it promises, what it documents."""

import ast
import inspect
import re
import sys
import tomllib
from pathlib import Path

import pytest

import qbound
from qbound import compiler
from tests import processes

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "qbound").rglob("*.py"))

# A module may import those on lines above its own.
LAYERS = [
    {"qbound.types", "qbound.records", "qbound.canary"},
    {"qbound.checks", "qbound.compiler", "qbound.trees"},
    {"qbound.linalg"},
    {"qbound.models"},
    {"qbound.curvature"},
    {"qbound.quadratic"},
    {"qbound.families"},
    {"qbound.families.low_rank"},
    {"qbound.optimizers"},
    {"qbound.fitting"},
    {"qbound.mm"},
    {"qbound"},
    {"qbound.scikit_learn"},
    {"qbound.estimator"},
    {"qbound.__main__"},
]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from qbound import checks` imports a module; `from qbound.types import Order` a name.
            yield from (f"qbound.{a.name}" for a in node.names) if node.module == "qbound" else [node.module]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def layer(name):
    for candidate in (name, name.rpartition(".")[0]):
        matches = [i for i, modules in enumerate(LAYERS) if candidate in modules]
        if matches and candidate != "qbound" or name == "qbound":
            return matches[0]
    raise AssertionError(f"{name} belongs to no layer")


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_one_way(path):
    own = module_name(path)
    for name in imports(path):
        if name.startswith("qbound"):
            inside_one_subpackage = layer(name) == layer(own) and own.split(".")[1:2] == name.split(".")[1:2]
            assert layer(name) < layer(own) or inside_one_subpackage, f"{own} imports {name}"


def test_package_imports_only_what_it_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    assert declared == {"jax", "jaxlib", "optax", "chex", "jaxtyping", "numpy"}
    standard = set(sys.stdlib_module_names)
    for path in SOURCES:
        imported = {name.partition(".")[0] for name in imports(path)}
        # These are an extra, for the estimator.
        of_estimator = module_name(path).startswith(("qbound.estimator", "qbound.scikit_learn"))
        extra = {"sklearn", "scipy", "threadpoolctl"} if of_estimator else set()
        assert imported - standard <= declared | extra | {"qbound"}


def test_package_uses_nothing_private_of_jax():
    for path in SOURCES:
        assert "jax._src" not in path.read_text(encoding="utf-8")


def test_package_uses_nothing_private_of_scikit_learn():
    """So that it needs no upper limit."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sklearn"):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert not any(part.startswith("_") for part in parts), f"{path}: {parts}"


def test_importing_starts_no_backend():
    """With a platform that does not exist, anything that starts a backend fails."""
    imports = processes.run("-c", "import qbound", JAX_PLATFORMS="none_such")
    assert imports.returncode == 0, imports.stderr
    starts = processes.run("-c", "import jax.numpy as jnp; jnp.zeros(1)", JAX_PLATFORMS="none_such")
    assert starts.returncode != 0


@pytest.mark.parametrize("name", qbound.__all__)
def test_every_public_name_is_documented(name):
    documented = getattr(qbound, name)
    assert documented.__doc__
    if inspect.isfunction(documented):
        assert "Example:" in documented.__doc__, f"{name} has no example"
    assert f"`{name}" in (ROOT / "README.md").read_text(encoding="utf-8"), f"README does not mention {name}"


def test_default_mode_without_float64():
    """Most users never enable float64; some compiler bugs showed only without it. In a process of its own.

    Large sizes are for releases of jaxlib that were wrong there.
    """
    sizes = [] if compiler.is_known_to_be_wrong() else ["small"]
    script = Path(__file__).with_name("default_mode.py")
    result = processes.run(str(script), *sizes, JAX_ENABLE_X64="0", PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr


def test_one_update_is_read_in_few_files_with_few_returns():
    """A reader has to follow it. In a process of its own, without the type checks of the tests."""
    counted = processes.run(str(Path(__file__).with_name("hops.py")), PYTHONPATH=str(ROOT))
    assert counted.returncode == 0, counted.stderr
    lines = re.findall(r"^(\S+) +(\d+) files +(\d+) returns", counted.stdout, re.MULTILINE)
    found = {name: (int(files), int(returns)) for name, files, returns in lines}
    most = {"spfb": (10, 30), "kspfb": (10, 50), "lspfb": (18, 80), "mm.run": (12, 60)}
    most["layerwise_spfb"] = (12, 65)
    assert found.keys() == most.keys()
    for name, (files, returns) in most.items():
        assert found[name][0] <= files and found[name][1] <= returns, f"{name}: {found[name]}"
