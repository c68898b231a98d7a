"""Which jaxlib is at fault, what is done about it, and what users are told."""

import ast
import os
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qbound
from qbound import __main__ as report
from qbound import canary, compiler
from qbound.compiler import MiscompilationWarning, Verdict
from qbound.estimator import LogisticRegression
from tests import processes

FLAG = "--xla_cpu_experimental_ynn_fusion_type=-reduce"  # as users write it


@pytest.fixture
def machine(monkeypatch):
    """Pretends to be another machine with another jaxlib, whose programs are right with these options."""

    def pretend(version="0.12.0.1", *, system="linux", architecture="x86_64", backend="cpu", flags="", right_with=()):
        monkeypatch.setattr("jaxlib.version.__version__", version)
        monkeypatch.setattr("sys.platform", system)
        monkeypatch.setattr("platform.machine", lambda: architecture)
        monkeypatch.setattr("jax.default_backend", lambda: backend)
        # Not in the environment, which XLA may read here for the first time.
        monkeypatch.setattr(compiler, "_flags", lambda: flags)
        monkeypatch.setattr(canary, "product", lambda options=None: (options or {}) in right_with)
        monkeypatch.setattr(compiler, "_warned", [])
        forget()

    def forget():
        compiler.verdict.cache_clear()
        compiler._suspect.cache_clear()

    yield pretend
    monkeypatch.undo()
    forget()


REPAIR = {compiler.FLAG: ""}


@pytest.mark.parametrize("version", ["0.10.0", "0.10.1", "0.10.2", "0.11.0", "0.11.2", "0.12.0", "0.12.0.1"])
def test_releases_that_are_wrong_are_known(machine, version):
    machine(version)
    assert compiler.verdict() is Verdict.REPAIRABLE
    assert f"jaxlib {version} " in compiler.message()


@pytest.mark.parametrize(
    "situation",
    [
        {"version": "0.9.0"},
        {"version": "0.9.2"},
        {"architecture": "aarch64"},
        {"system": "darwin"},
        {"system": "win32"},
        {"version": "0.12.1", "right_with": [{}]},
        {"version": "0.13.0.dev20261101", "right_with": [{}]},
        {"flags": f"--xla_other=1 {FLAG}", "right_with": [{}]},
    ],
    ids=str,
)
def test_nothing_is_said_where_programs_are_right(machine, situation):
    machine(**situation)
    assert compiler.verdict() is Verdict.RIGHT
    assert compiler.message() == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiler.warn_if_wrong()


@pytest.mark.parametrize("version", ["0.12.0.2", "0.12.1", "1.0.0"])
def test_later_releases_are_asked(machine, version):
    machine(version, right_with=[REPAIR])
    assert compiler.verdict() is Verdict.REPAIRABLE
    machine(version, right_with=[])
    assert compiler.verdict() is Verdict.WRONG
    assert "jax==0.9.2" in compiler.message()


def test_later_release_without_the_option_is_wrong(machine, monkeypatch):
    machine("0.13.0")

    def product(options=None):
        if options:
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option")
        return False

    monkeypatch.setattr(canary, "product", product)
    assert compiler.verdict() is Verdict.WRONG


def test_flag_that_has_no_effect_is_reported(machine):
    machine(flags=FLAG, right_with=[REPAIR])
    assert "too late" in compiler.message()
    machine(right_with=[REPAIR])
    assert "too late" not in compiler.message()


def test_warning_names_the_release_and_the_line_that_helps(machine):
    machine("0.11.1")
    with pytest.warns(MiscompilationWarning, match=f"jaxlib 0.11.1 .* set XLA_FLAGS={FLAG} in"):
        compiler.warn_if_wrong()


def test_warning_comes_once_and_points_at_the_caller(machine, without_type_checks):
    machine()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(lambda h: qbound.log_partition_bound(h).value)(jnp.zeros(3))
        jax.jit(lambda h: qbound.log_partition_bound(h).value)(jnp.zeros(4))
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]


def test_warning_that_is_an_error_is_raised_every_time(machine):
    machine()
    for size in (3, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(MiscompilationWarning, match=FLAG):
                jax.jit(lambda h: qbound.log_partition_bound(h).value)(jnp.zeros(size))


@pytest.mark.parametrize(
    ("situation", "before", "after"),
    [
        ({}, "", FLAG),
        ({}, "--xla_other=1", f"--xla_other=1 {FLAG}"),
        ({}, "--xla_cpu_experimental_ynn_fusion_type=", "--xla_cpu_experimental_ynn_fusion_type="),
        ({"version": "0.9.2"}, "", ""),
        ({"architecture": "aarch64"}, "", ""),
        ({"version": "0.13.0"}, "", ""),
    ],
    ids=str,
)
def test_repaired_process_has_the_flag_where_it_is_known(machine, monkeypatch, situation, before, after):
    machine(flags=before, **situation)
    monkeypatch.setattr(os, "environ", {"XLA_FLAGS": before})
    compiler.repair_process()
    assert os.environ["XLA_FLAGS"] == after


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_other_devices_are_left_alone(machine, backend):
    machine(backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiler.warn_if_wrong()
    with jax.default_device(jax.devices("cpu")[0]), pytest.warns(MiscompilationWarning):
        compiler.warn_if_wrong()


X, Y, W = np.eye(4)[:, :3], np.array([0, 1, 2, 0]), np.zeros((3, 3))


def update(tx):
    state = tx.init(W)
    return tx.update(jnp.ones_like(W), state, jnp.asarray(W), inputs=X)[0]


COMPILED_BY_USERS = {
    "log_partition_bound": lambda: qbound.log_partition_bound(jnp.zeros(3)),
    "partition_function_bound": lambda: qbound.partition_function_bound(jnp.zeros(3), jnp.eye(3)),
    "bohning_bound": lambda: qbound.bohning_bound(jnp.zeros(3)),
    "local_bound": lambda: qbound.local_bound(jnp.zeros(3), 1.0),
    "second_order_expansion": lambda: qbound.second_order_expansion(jnp.zeros(3)),
    "low_rank_bound": lambda: qbound.low_rank_bound(np.ones((2, 3, 4)), np.zeros(4), rank=2),
    "spfb": lambda: update(qbound.spfb(1.0, qbound.linear_logits, l2=0.1)),
    "lspfb": lambda: update(qbound.lspfb(1.0, qbound.linear_logits, l2=0.1, rank=2)),
    "kspfb": lambda: update(qbound.kspfb(1.0, qbound.linear_logits, l2=0.1)),
    "mm.init": lambda: qbound.mm.init(qbound.linear_logits, W, X, Y, l2=0.1),
}


@pytest.mark.parametrize("name", COMPILED_BY_USERS)
def test_programs_of_users_warn(machine, name):
    machine()
    with pytest.warns(MiscompilationWarning):
        jax.eval_shape(COMPILED_BY_USERS[name])


COMPILED_HERE = {
    "mm.run": lambda: qbound.mm.run(qbound.linear_logits, W, X, Y, l2=0.1),
    "fit": lambda: LogisticRegression().fit(X, Y),
    "partial_fit": lambda: LogisticRegression().partial_fit(X, Y, classes=[0, 1, 2]),
}


@pytest.mark.parametrize("name", COMPILED_HERE)
def test_programs_of_the_package_do_not_warn(machine, name):
    machine(right_with=[REPAIR])
    jax.clear_caches()  # so that everything is traced here
    with warnings.catch_warnings():
        warnings.simplefilter("error", MiscompilationWarning)
        COMPILED_HERE[name]()


def test_run_inside_a_program_of_the_user_warns(machine):
    machine(right_with=[REPAIR])
    run = jax.jit(lambda w: qbound.mm.run(qbound.linear_logits, w, X, Y, l2=0.1, throw=False)[0])
    with pytest.warns(MiscompilationWarning):
        run(W)


class Recorder:
    """Stands in for `jax.jit`, and says which options of the compiler a call had."""

    def __init__(self, function, compiler_options=None, **options):
        self.compiler_options = compiler_options

    def __call__(self, *args):
        return self.compiler_options


@pytest.mark.parametrize(
    ("situation", "options"),
    [
        ({}, REPAIR),
        ({"version": "0.9.2"}, None),
        ({"architecture": "aarch64"}, None),
        ({"flags": FLAG, "right_with": [{}]}, None),
        ({"flags": FLAG, "right_with": [REPAIR]}, REPAIR),
    ],
    ids=str,
)
def test_option_is_for_programs_that_need_it(machine, monkeypatch, situation, options):
    machine(**situation)
    monkeypatch.setattr(jax, "jit", Recorder)
    program = compiler.jit(lambda x: x)
    assert program(np.ones(3)) == options
    assert program(jnp.ones(3)) == options
    assert program(3.0) == options


def test_option_depends_on_where_arrays_are(machine, monkeypatch):
    """On a machine with a GPU, too, a CPU may compute."""
    machine(backend="gpu", right_with=[REPAIR])
    on_cpu = jnp.ones(3)
    monkeypatch.setattr(jax, "jit", Recorder)
    program = compiler.jit(lambda x: x)
    assert program(np.ones(3)) is None
    assert program(on_cpu) == REPAIR


def test_program_in_a_program_has_no_options(machine):
    """JAX allows them for the outermost alone."""
    machine()
    program = compiler.jit(lambda x: x + 1)
    with_options = program(jnp.ones(3))
    with pytest.warns(MiscompilationWarning):
        outer = jax.jit(lambda x: program(x))(jnp.ones(3))
    np.testing.assert_array_equal(outer, with_options)
    np.testing.assert_array_equal(jax.jit(lambda x: program(np.ones(3)) + 0 * x)(jnp.ones(3)), with_options)
    np.testing.assert_array_equal(jax.vmap(program)(jnp.ones(3)), with_options)
    assert jax.grad(lambda x: program(x))(1.0) == 1


def test_program_transfers_nothing(machine):
    """Users forbid transfers to find those that they did not mean."""
    machine()
    program, x = compiler.jit(lambda x: 2 * x), jnp.ones(3)
    with jax.transfer_guard("disallow"):
        program(x)


def test_program_that_nothing_repairs_warns(machine, monkeypatch):
    machine("0.13.0")
    monkeypatch.setattr(jax, "jit", Recorder)
    with pytest.warns(MiscompilationWarning, match="No remedy is known"):
        assert compiler.jit(lambda x: x)(np.ones(3)) is None


def test_program_looks_like_its_function():
    def function(x):
        """Add one."""
        return x + 1

    program = compiler.jit(function)
    assert (program.__name__, program.__doc__, program.__wrapped__) == ("function", "Add one.", function)


def test_package_compiles_through_one_place():
    """Else a program would be compiled wrong."""
    root = Path(qbound.__file__).parent
    for path in root.rglob("*.py"):
        if path.name in ("compiler.py", "canary.py"):
            continue
        names = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        assert "jax.jit" not in names, path
        assert "from jax import jit" not in path.read_text(), path


def test_canary_is_right_with_the_flags_of_the_tests():
    for name, program in canary.PROGRAMS.items():
        assert program(), name


# In a process of its own, without the flag.
SCRIPT = """
import os, sys, warnings
import jax, jax.numpy as jnp, numpy as np
import qbound
from qbound import canary, compiler

if sys.argv[1] == "late":
    jnp.zeros(1) + 1
    os.environ["XLA_FLAGS"] = sys.argv[2]
x = np.ones((5000, 16), np.float32)

def largest(x):
    qbound.log_partition_bound(x[0])
    return jnp.max(x @ jnp.ones((16, 2), x.dtype), axis=1)

program = compiler.jit(largest)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert np.all(np.asarray(program(x)) == 16), "a program of the package"
    assert not caught, caught
    result = jax.jit(lambda x: program(x))(x)
assert np.all(np.asarray(result) == 16) == (not caught), "warned if and only if wrong"
if caught and sys.argv[1] == "late":
    assert "too late" in str(caught[0].message)
print(len(caught))
"""


@pytest.mark.parametrize("when", ["never", "late", "in time"])
def test_flag_in_a_fresh_process(when):
    """Whatever jaxlib is installed: programs of the package are right, and who compiles a wrong one is warned."""
    run = processes.run("-c", SCRIPT, when, FLAG, repaired=when == "in time", JAX_ENABLE_X64="0")
    assert run.returncode == 0, run.stderr
    if when == "in time":
        assert run.stdout == "0\n"


@pytest.mark.skipif(not compiler.is_known_to_be_wrong(), reason="this jaxlib is right")
def test_expressions_of_the_package_do_not_meet_the_fault():
    script = Path(__file__).with_name("fusions.py")
    run = processes.run(str(script), repaired=False, JAX_ENABLE_X64="0", PYTHONPATH=str(script.parent.parent))
    assert run.returncode == 0, run.stderr


def test_report_has_what_is_needed(capsys):
    report.main()
    printed = capsys.readouterr().out
    for expected in (qbound.__version__, jax.__version__, "numpy:", "devices:", "1 x cpu", "XLA_FLAGS:", "gather:"):
        assert expected in printed
    assert printed.splitlines()[-1].endswith("programs for CPU are compiled right")


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("lambda: False", "wrong"),
        ("lambda: __import__('os').kill(__import__('os').getpid(), 11)", "crashes (signal 11)"),
        ("lambda: 1 / 0", "fails: ZeroDivisionError: division by zero"),
    ],
)
def test_report_tells_how_the_canary_died(monkeypatch, tmp_path, program, outcome):
    """Put in the place of the canary by a module that Python imports at its start."""
    (tmp_path / "sitecustomize.py").write_text(f"from qbound import canary\ncanary.product = {program}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(qbound.__file__).parent.parent)]))
    assert report.outcome_of("product") == outcome


@pytest.mark.parametrize(
    ("version", "last"), [("0.12.0", f"set XLA_FLAGS={FLAG} in the environment"), ("0.9.2", "please report this")]
)
def test_report_ends_with_the_remedy(monkeypatch, capsys, machine, version, last):
    machine(version)
    monkeypatch.setattr(report, "outcome_of", lambda program: "wrong")
    report.main()
    assert last in capsys.readouterr().out.splitlines()[-1]


def test_report_on_a_machine_without_devices(monkeypatch, capsys):
    """A plugin that does not start is what many reports are about."""

    def devices():
        raise RuntimeError("no backend")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(report, "outcome_of", lambda program: "right")
    report.main()
    assert "none: no backend" in capsys.readouterr().out
