"""Every public entry, and every program that the package compiles, lowered for GPUs and TPUs.

Nothing is compiled or computed, so that sizes can be those of real data where they decide which program is made.
"""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import qbound
from qbound import compiler, mm
from qbound.fitting.factors import block_size, unknown_block
from qbound.fitting.objective import Data, LinearObjective
from qbound.fitting.quasi_newton import empty_memory
from qbound.fitting.step import MMOptions
from qbound.fitting.stochastic import first_iterate
from qbound.fitting.stream import first_stream
from qbound.fitting.stream import rescaled as rescaled_stream
from qbound.models.inputs import DenseInputs, SparseInputs
from tests.lowering import PLATFORMS, faults, jitted_programs, module_faults, uses_of_jit

pytestmark = pytest.mark.usefixtures("without_type_checks")
ORDERS = ("descending", "max_first", "given")
PROGRAMS = jitted_programs(qbound)
# Modules that know, and try, what compilers for CPUs do wrong.
FOR_CPUS = ("qbound.compiler", "qbound.canary")
# A function, and its arguments, of which shapes will do.
Program = tuple[Callable, tuple]
Sizes = tuple[int, int, int]


def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


# Bounds.


def uses(bound: qbound.QuadraticBound, x: Any, v: Any) -> Any:
    """All that a bound can be asked, at a point x and for a vector v."""
    c = bound.curvature
    return bound.value, bound.grad, bound(x), c.mv(v), c.quadratic(v), c.dense(), c.factor(), c.solve(v, 0.1)


def alone(make: Callable, *arguments: Any) -> Program:
    """A bound at one vector, and derivatives of what its curvature gives."""

    def function(x, *others):
        def number(x):
            c = make(x, *others).curvature
            return c.quadratic(x) + jnp.sum(c.solve(x, 0.1)) + jnp.sum(c.mv(x))

        return uses(make(x, *others), x + 1, x), jax.grad(number)(x)

    return function, arguments


def of_batch(make: Callable, parameters: int) -> Program:
    """The mean of bounds that are pulled back through features, and their sum."""

    def function(theta, features, weights):
        def one(f):
            return make(jnp.matmul(f, theta, precision="highest")).pullback(f, theta)

        batch = jax.vmap(one)(features)
        return uses(batch.mean(weights), theta + 1, theta), batch.sum()(theta + 1)

    return function, (shape(parameters), shape(200, 10, parameters), shape(200))


def of_sum() -> Program:
    """A sum of bounds of different kinds."""

    def function(h):
        total = qbound.log_partition_bound(h) + 2 * qbound.bohning_bound(h) / 3
        return uses(total, h + 1, h)

    return function, (shape(10),)


def by_functions() -> Program:
    """The same, through a function of a matrix of parameters."""

    def function(weights, inputs):
        def one(x):
            def logits(w):
                return jnp.matmul(w, x, precision="highest")

            return qbound.log_partition_bound(logits(weights)).pullback(logits, weights, affine=True)

        return uses(jax.vmap(one)(inputs).mean(), weights + 1, weights)

    return function, (shape(10, 7), shape(200, 7))


def of_low_rank(**options: Any) -> Program:
    def function(features, theta):
        return uses(qbound.low_rank_bound(features, theta, **options), theta + 1, theta)

    return function, (shape(1000, 10, 50), shape(50))


in_order = {order: functools.partial(qbound.log_partition_bound, order=order) for order in ORDERS}
BOUNDS: dict[str, Callable[[], Program]] = {
    f"log_partition_bound, {order}": functools.partial(alone, bound, shape(1000)) for order, bound in in_order.items()
}
BOUNDS |= {
    f"log_partition_bound, {order}, of a batch": functools.partial(of_batch, bound, 5)
    for order, bound in in_order.items()
}
BOUNDS |= {
    "log_partition_bound, of a batch, many parameters": lambda: of_batch(in_order["max_first"], 3000),
    "log_partition_bound, pulled back by functions": by_functions,
    "log_partition_bound, in a sum": of_sum,
    "log_partition_bound, few labels and a prior": lambda: alone(
        lambda h, prior: qbound.log_partition_bound(h, log_prior=prior), shape(10), shape(10)
    ),
    "partition_function_bound": lambda: alone(qbound.partition_function_bound, shape(5), shape(10, 5)),
    "bohning_bound": lambda: alone(qbound.bohning_bound, shape(10)),
    "local_bound": lambda: alone(qbound.local_bound, shape(10), shape()),
    "second_order_expansion": lambda: alone(qbound.second_order_expansion, shape(10)),
    "low_rank_bound": lambda: of_low_rank(rank=4),
    "low_rank_bound, large blocks": lambda: of_low_rank(rank=20, order="max_first", block_size=300),
    "low_rank_bound, small blocks": lambda: of_low_rank(rank=9, order="given", block_size=4),
    "low_rank_bound, exact": lambda: of_low_rank(rank=4, method="exact"),
    "low_rank_bound, paper": lambda: of_low_rank(rank=4, method="paper", order="given", block_size=100),
}


# Transforms.


def update(model: Callable, params: Any, x: Any, make: Callable, *given: str, **options: Any) -> Program:
    """One update of a transform, with the arguments `given` beside the inputs."""
    tx = make(model, **options) if make.__name__.startswith("scale_by") else make(_schedule, model, **options)

    def function(grads, state, params, inputs, others):
        return tx.update(grads, state, params, inputs=inputs, **others)

    others = {"example_weights": shape(x.shape[0]), "value": shape()}
    return function, (params, jax.eval_shape(tx.init, params), params, x, {name: others[name] for name in given})


def _schedule(step):
    return 1 / (1 + step.astype(jnp.float32))


def network(params, x):
    """Two layers, in full precision."""
    hidden = jax.nn.relu(jnp.matmul(x, params["first"], precision="highest"))
    return jnp.matmul(hidden, params["last"], precision="highest")


def of_trace() -> Program:
    """The trace of the curvature of a network, and its derivative."""

    def function(params, x, key):
        return jax.value_and_grad(qbound.curvature_trace, argnums=1)(network, params, x, key, probes=2)

    key = jax.eval_shape(lambda: jax.random.key(0))
    return function, ({"first": shape(20, 16), "last": shape(16, 10)}, ROWS, key)


def halved(g):
    return jax.tree.map(lambda leaf: leaf / 2, g)


ROWS, ROW = shape(100, 20), shape(20)
LINEAR = {"weights": shape(20, 10), "bias": shape(10)}
on_linear = functools.partial(update, qbound.linear_logits, LINEAR, ROWS)
on_network = functools.partial(update, network, {"first": shape(20, 16), "last": shape(16, 10)}, ROWS)
# On TPUs the eigenvectors of more than 256 inputs are found by another program.
on_many_inputs = functools.partial(update, qbound.linear_logits, shape(300, 10), shape(1000, 300))
TRANSFORMS: dict[str, Callable[[], Program]] = {
    f"spfb, {solver}, {name}": functools.partial(on, qbound.spfb, l2=0.1, solver=solver)
    for solver in ("dense", "woodbury", "cg")
    for name, on in (("linear", on_linear), ("network", on_network))
}
TRANSFORMS |= {
    "lspfb, linear": lambda: on_linear(qbound.lspfb, l2=0.1, rank=4),
    "lspfb, network": lambda: on_network(qbound.lspfb, l2=0.1, rank=4),
    "lspfb, exact, network": lambda: on_network(qbound.lspfb, l2=0.1, rank=4, method="exact"),
    "lspfb, paper, linear": lambda: on_linear(qbound.lspfb, l2=0.1, rank=4, method="paper"),
    "spfb, descending": lambda: on_linear(qbound.spfb, l2=0.1, order="descending"),
    "spfb, given": lambda: on_linear(qbound.spfb, l2=0.1, order="given"),
    "spfb, one example in closed form": lambda: update(qbound.linear_logits, LINEAR, shape(1, 20), qbound.spfb, l2=0.1),
    "spfb, window, linear": lambda: on_linear(qbound.spfb, "example_weights", l2=0.1, window=500, inputs_like=ROW),
    "spfb, window, network": lambda: on_network(qbound.spfb, l2=0.1, window=500, inputs_like=ROW, limit_steps=False),
    "spfb, microbatches, cg, network": lambda: on_network(
        qbound.spfb, "example_weights", l2=0.1, microbatch_size=30, solver="cg"
    ),
    "spfb, microbatches, dense, network": lambda: on_network(qbound.spfb, l2=0.1, microbatch_size=30, solver="dense"),
    "spfb, warm start and adaptive damping": lambda: on_linear(
        qbound.spfb, "value", l2=0.1, solver="cg", warm_start=True, adaptive_damping=1.0
    ),
    "spfb, preconditioned": lambda: on_linear(qbound.spfb, l2=0.1, precondition=halved),
    "spfb, preconditioned by kspfb": lambda: on_linear(
        qbound.spfb, l2=0.1, precondition=qbound.scale_by_kspfb(qbound.linear_logits, damping=0.1)
    ),
    "spfb, preconditioned by lspfb": lambda: on_linear(
        qbound.spfb, l2=0.1, precondition=qbound.scale_by_lspfb(qbound.linear_logits, rank=4, damping=0.1)
    ),
    "spfb, bfloat16": lambda: update(
        qbound.linear_logits, shape(20, 10, dtype=jnp.bfloat16), shape(100, 20, dtype=jnp.bfloat16), qbound.spfb, l2=0.1
    ),
    "scale_by_spfb, network": lambda: on_network(qbound.scale_by_spfb, damping=0.1),
    "lspfb, decay": lambda: on_linear(
        qbound.lspfb, "example_weights", "value", l2=0.1, rank=4, decay=0.9, adaptive_damping=1.0
    ),
    "scale_by_lspfb": lambda: on_linear(qbound.scale_by_lspfb, damping=0.1, rank=4, decay=0.9),
    "kspfb": lambda: on_linear(qbound.kspfb, l2=0.1),
    "kspfb, weights": lambda: on_linear(qbound.kspfb, "example_weights", l2=0.1, label_examples=50),
    "kspfb, neither momentum nor scales": lambda: on_linear(qbound.kspfb, l2=0.1, momentum=0.0, relative_damping=0.0),
    "kspfb, bohning": lambda: on_linear(qbound.kspfb, l2=0.1, label_curvature="bohning"),
    "kspfb, all eigenvectors": lambda: on_many_inputs(qbound.kspfb, l2=0.1, input_rank=None),
    "kspfb, leading eigenvectors": lambda: on_many_inputs(qbound.kspfb, l2=0.1),
    "kspfb, many labels": lambda: update(qbound.linear_logits, shape(20, 2000), ROWS, qbound.kspfb, l2=0.1),
    "scale_by_kspfb": lambda: on_linear(qbound.scale_by_kspfb, damping=0.1),
    "layerwise_spfb": lambda: on_network(qbound.layerwise_spfb, "example_weights", "value", adaptive_damping=1.0),
    "layerwise_spfb, a part of the batch": lambda: on_network(qbound.layerwise_spfb, l2=0.1, probe_examples=30),
    "layerwise_spfb, a bound": lambda: on_network(qbound.layerwise_spfb, factors="bound", momentum=0.0),
    "layerwise_spfb, gauss_newton": lambda: on_network(qbound.layerwise_spfb, curvature="gauss_newton"),
    "layerwise_spfb, diagonals": lambda: on_network(qbound.layerwise_spfb, longest_axis=12, weight_decay=1e-4),
    "scale_by_layerwise_spfb": lambda: on_linear(qbound.scale_by_layerwise_spfb),
    "curvature_trace": lambda: of_trace(),
}


# Full batches.


def data_of(params: Any) -> tuple:
    return params, shape(1000, 20), shape(1000, dtype=jnp.int32)


def mm_step(params: Any, **options: Any) -> Program:
    def function(params, x, y, weights):
        state = mm.init(qbound.linear_logits, params, x, y, l2=0.1, example_weights=weights)
        return mm.step(qbound.linear_logits, state, x, y, l2=0.1, example_weights=weights, **options)

    return function, (*data_of(params), shape(1000))


def mm_run(**options: Any) -> Program:
    def function(params, x, y):
        return mm.run(qbound.linear_logits, params, x, y, l2=0.1, throw=False, **options)

    return function, data_of(LINEAR)


def mm_step_of_features() -> Program:
    """An affine model that the solvers know nothing of."""

    def model(weights, x):
        return jnp.tanh(x) @ weights

    def function(weights, x, y):
        return mm.step(model, mm.init(model, weights, x, y, l2=0.1), x, y, l2=0.1)

    return function, data_of(shape(20, 4))


def mm_program(**options: Any) -> Program:
    def function(params, x, y, eta, tolerance):
        static = qbound.linear_logits, MMOptions(**options), 100, None
        return PROGRAMS["qbound.fitting.run._run"](*static, params, x, y, 0.1, None, eta, tolerance, None)

    return function, (*data_of(LINEAR), shape(), shape())


FULL_BATCH: dict[str, Callable[[], Program]] = {
    "linear_logits": lambda: (qbound.linear_logits, (LINEAR, ROWS)),
    "mm.init": lambda: (
        lambda *arrays: mm.init(qbound.linear_logits, *arrays, l2={"weights": 0.1, "bias": 0.0}),
        data_of(LINEAR),
    ),
    "mm.step, cg": lambda: mm_step(LINEAR),
    "mm.step, dense": lambda: mm_step(shape(20, 4)),
    "mm.step, bound": lambda: mm_step(LINEAR, curvature="bound", order="given", eta=1.0),
    "mm.step, bohning": lambda: mm_step(LINEAR, curvature="bohning", precondition=halved, cg_tolerance=0.1),
    "mm.step, of features": mm_step_of_features,
    "mm.run": mm_run,
}


# Programs of fits.


class Shapes:
    """Of a fit with an intercept, in the order in which its programs take them."""

    def __init__(self, rows: int, columns: int, labels: int, dtype: Any = jnp.float32):
        self.data = dense_data(rows, columns, dtype)
        self.columns, self.labels = columns + 1, labels
        self.l2, self.params = shape(columns + 1, dtype=dtype), shape(labels, columns + 1, dtype=dtype)
        self.objective = objective_of(self.data, self.l2)
        self.number, self.count = shape(dtype=dtype), shape(dtype=jnp.int32)
        self.rows = shape(min(rows, 4000), dtype=jnp.int32)

    def factor(self, rank: int | None = None) -> Any:
        program = PROGRAMS["qbound.fitting.phases._input_factor"]
        return jax.eval_shape(lambda data, rows: program(data, rows, self.columns, rank), self.data, self.rows)

    def block_size(self) -> int:
        return block_size(self.data.labels.size, self.rows.size, self.labels, self.columns, self.columns)

    def block(self) -> Any:
        return jax.eval_shape(lambda: unknown_block(self.labels, self.block_size()))

    def point(self) -> Any:
        return jax.eval_shape(PROGRAMS["qbound.fitting.newton.evaluate"], self.objective, self.params)


def objective_of(data: Data, l2: Any) -> LinearObjective:
    return jax.eval_shape(LinearObjective, data, l2)


def dense_data(rows: int, columns: int, dtype: Any = jnp.float32) -> Data:
    def zeros():
        design = DenseInputs(jnp.zeros((rows, columns), dtype))
        return Data(design, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, dtype))

    return jax.eval_shape(zeros)


def sparse_data(rows: int, columns: int) -> Data:
    # With more entries in every row and column than are summed at a time.
    design = SparseInputs.from_csr(scipy.sparse.csr_array(np.ones((rows, columns))), np.float32)
    return Data(design, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32))


MNIST, MANY_LABELS, SMALL, LONG = (60_000, 784, 10), (5000, 300, 700), (1000, 4, 3), (200_000, 4, 3)


def newton_step(sizes: Sizes, solver: str, data: Data | None = None, dtype: Any = jnp.float32) -> Program:
    of = Shapes(*sizes, dtype=dtype)
    factors = (of.factor(), of.block()) if solver == "kronecker" else (None, None)
    objective = of.objective if data is None else objective_of(data, of.l2)
    arguments = (objective, of.params, *factors, of.number, of.number)
    return functools.partial(PROGRAMS["qbound.fitting.newton.newton_step"], solver=solver), arguments


def newton_on_sample() -> Program:
    of = Shapes(*LONG)
    arguments = (of.objective, shape(25_000, dtype=jnp.int32), of.params, of.number, of.count)
    return PROGRAMS["qbound.fitting.newton.newton_on_sample"], arguments


def evaluate(sizes: Sizes) -> Program:
    of = Shapes(*sizes)
    return PROGRAMS["qbound.fitting.newton.evaluate"], (of.objective, of.params)


def lbfgs_steps(dtype: Any = jnp.float32) -> Program:
    of = Shapes(*MNIST, dtype=dtype)
    memory = jax.eval_shape(empty_memory, of.params)
    arguments = (of.objective, of.point(), memory, of.factor(), of.block(), of.number, of.count)
    return PROGRAMS["qbound.fitting.quasi_newton.lbfgs_steps"], arguments


def input_factor(sizes: Sizes, rank: int | None) -> Program:
    of, program = Shapes(*sizes), PROGRAMS["qbound.fitting.phases._input_factor"]
    return lambda data, rows: program(data, rows, of.columns, rank), (of.data, of.rows)


def exact_block() -> Program:
    of, program = Shapes(*MNIST), PROGRAMS["qbound.fitting.phases._exact_block"]
    return lambda *arrays: program(*arrays, of.block_size()), (of.data, of.rows, of.factor(), of.l2, of.params)


def epoch() -> Program:
    of = Shapes(*MNIST)
    iterate = jax.eval_shape(first_iterate, of.params)
    arguments = (of.data, of.l2, of.factor(128), iterate, shape(60, 1000, dtype=jnp.int32), shape(60))
    return PROGRAMS["qbound.fitting.stochastic.epoch"], arguments


def consume(columns: int, labels: int) -> Program:
    stream = jax.eval_shape(first_stream, shape(labels, columns + 1))
    return PROGRAMS["qbound.fitting.stream.consume"], (stream, dense_data(1000, columns), shape(columns + 1))


def rescaled() -> Program:
    return lambda stream: rescaled_stream(stream, 0.5), (jax.eval_shape(first_stream, shape(10, 785)),)


# For every jitted function of the package.
FITS: dict[str, dict[str, Callable[[], Program]]] = {
    "qbound.fitting.newton.newton_step": {
        "dense": lambda: newton_step(SMALL, "dense"),
        "kronecker": lambda: newton_step(MNIST, "kronecker"),
        "many labels": lambda: newton_step(MANY_LABELS, "diagonal"),
        "sparse": lambda: newton_step((40, 20, 4), "diagonal", sparse_data(40, 20)),
    },
    "qbound.fitting.newton.newton_on_sample": {"on a sample": newton_on_sample},
    "qbound.fitting.newton.evaluate": {
        "at MNIST": lambda: evaluate(MNIST),
        "many labels": lambda: evaluate(MANY_LABELS),
    },
    "qbound.fitting.quasi_newton.lbfgs_steps": {"on MNIST": lbfgs_steps},
    "qbound.fitting.phases._input_factor": {
        "all eigenvectors": lambda: input_factor(MNIST, None),
        "leading eigenvectors": lambda: input_factor(MNIST, 128),
        "few inputs": lambda: input_factor(SMALL, 128),
    },
    "qbound.fitting.phases._exact_block": {"of MNIST": exact_block},
    "qbound.fitting.stochastic.epoch": {"on MNIST": epoch},
    "qbound.fitting.stream.consume": {
        "a matrix": lambda: consume(20, 10),
        "a sketch": lambda: consume(3000, 10),
        "many labels": lambda: consume(20, 2000),
    },
    "qbound.fitting.run._run": {"dense": lambda: mm_program(solver="dense", curvature="hessian", search=False)},
}
STREAMS: dict[str, Callable[[], Program]] = {
    "first_stream": lambda: (first_stream, (shape(10, 785),)),
    "stream.rescaled": rescaled,
}
FIT_CASES = {f"{name}, {option}": make for name, options in FITS.items() for option, make in options.items()}
CASES = BOUNDS | TRANSFORMS | FULL_BATCH | STREAMS | FIT_CASES
# Here products of the model, `qbound.linear_logits`, are in the precision that is the default of a device.
HAS_ROUNDED_MODEL = {"linear_logits", *(name for name in TRANSFORMS if "network" not in name)}


@pytest.mark.parametrize("name", CASES)
def test_program_needs_no_host_and_rounds_no_product_on_other_platforms(name):
    with jax.enable_x64(False):
        function, arguments = CASES[name]()
        assert faults(function, *arguments, may_round=name in HAS_ROUNDED_MODEL) == []


@pytest.mark.parametrize(
    "make",
    [lambda: newton_step(SMALL, "dense", dtype=jnp.float64), lambda: lbfgs_steps(jnp.float64)],
    ids=["newton_step", "lbfgs_steps"],
)
def test_fits_in_float64_need_no_host_on_gpus(make):
    function, arguments = make()
    assert faults(function, *arguments, platforms=("cuda",)) == []


def test_runs_take_the_precision_that_jax_was_told():
    with jax.enable_x64(False), jax.default_matmul_precision("bfloat16"):
        function, arguments = CASES["mm.init"]()
        (fault,) = faults(function, *arguments)
    assert "products that may be rounded" in fault


@pytest.mark.parametrize("name", ["spfb, woodbury, linear", "kspfb, bohning"])
def test_updates_take_full_precision_if_jax_is_told_so(name):
    with jax.enable_x64(False), jax.default_matmul_precision("highest"):
        function, arguments = CASES[name]()
        assert faults(function, *arguments) == []


def test_every_jitted_function_of_the_package_is_lowered():
    assert set(PROGRAMS) == set(FITS)


def test_package_jits_at_the_top_of_modules_alone():
    """Where `jitted_programs` finds it; but for what is there for CPUs alone."""
    made = [name.rpartition(".")[0] for name in PROGRAMS]
    uses = {name: count for name, count in uses_of_jit(qbound).items() if name not in FOR_CPUS}
    assert uses == {module: made.count(module) for module in made}


def test_every_public_function_is_lowered():
    modules = {"": qbound, "mm.": mm}
    public = {
        prefix + name: getattr(module, name)
        for prefix, module in modules.items()
        for name in module.__all__
        if inspect.isroutine(inspect.unwrap(getattr(module, name)))
    }
    lowered = {name.split(",")[0] for name in CASES}
    by_program = {id(program): name for name, program in PROGRAMS.items()}
    missing = {name for name, value in public.items() if {name, by_program.get(id(value))}.isdisjoint(lowered)}
    # A loop in Python around the programs of fits, which are lowered one by one.
    assert missing == {"fit"}


def test_collector_finds_jitted_functions_once():
    package = ModuleType("package")
    package.__path__ = []
    found = {"by_jax": jax.jit(halved), "by_package": compiler.jit(halved), "static": jax.jit(update, static_argnums=0)}
    vars(package).update(found, again=found["by_jax"], function=halved, text="lower", partial=functools.partial(halved))
    assert jitted_programs(package) == {f"package.{name}": value for name, value in found.items()}


def pure_callback(x):
    return jax.pure_callback(np.sin, x, x)


def io_callback(x):
    return jax.experimental.io_callback(np.sin, x, x)


def ordered_io_callback(x):
    return jax.experimental.io_callback(np.sin, x, x, ordered=True)


def debug_callback(x):
    jax.debug.callback(lambda x: None, x)
    return x


def debug_print(x):
    jax.debug.print("{}", x)
    return x


def with_own_derivative(function):
    outer = jax.custom_jvp(function)
    outer.defjvp(lambda primals, tangents: (outer(*primals), *tangents))
    return outer


CALLBACKS = [pure_callback, io_callback, ordered_io_callback, debug_callback, debug_print]
PLACES = {
    "in jit": jax.jit,
    "in a loop": lambda f: lambda x: jax.lax.while_loop(lambda x: x[0] < 0, f, x),
    "in a branch": lambda f: lambda x: jax.lax.cond(x[0] < 0, f, lambda x: x, x),
    "in a scan": lambda f: lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, length=3)[0],
    "with a derivative of its own": with_own_derivative,
    "checkpointed": jax.checkpoint,
}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("callback", CALLBACKS, ids=lambda callback: callback.__name__)
def test_checker_finds_callbacks(callback, platform):
    kind = callback.__name__.removeprefix("ordered_")
    found = faults(callback, shape(3), platforms=(platform,))
    assert any(fault in (kind, "debug_callback") for fault in found)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_checker_finds_callbacks_anywhere(platform, place):
    assert faults(PLACES[place](pure_callback), shape(3), platforms=(platform,)) == ["pure_callback"]


def test_checker_finds_the_callback_of_a_run_that_was_asked_for_one():
    with jax.enable_x64(False):
        function, arguments = mm_run(callback=print)
        assert any("callback" in fault for fault in faults(function, *arguments))


@pytest.mark.parametrize(
    "function", [pure_callback, lambda x: jnp.linalg.cholesky(x[:, None] * x[None, :])], ids=["callback", "lapack"]
)
def test_checker_finds_what_runs_on_cpus_alone_in_modules(function):
    module = jax.jit(function).trace(shape(3)).lower(lowering_platforms=("cpu",)).as_text()
    assert module_faults(module)


@pytest.mark.parametrize(
    "target",
    ["xla_python_gpu_callback", "xla_ffi_python_gpu_callback", "xla_ffi_partitioned_python_gpu_callback", "MoveToHost"],
)
def test_checker_finds_calls_of_the_host_in_modules(target):
    call = jax.ffi.ffi_call(target, shape(3))
    module = jax.jit(call).trace(shape(3)).lower(lowering_platforms=("cuda",)).as_text()
    assert module_faults(module) == [target]
    line = f'%0 = "stablehlo.custom_call"(%arg0) <{{call_target_name = "{target}"}}> : (tensor<3xf32>) -> tensor<3xf32>'
    assert module_faults(line) == [target]


@pytest.mark.parametrize("operation", ["send", "recv", "infeed", "outfeed"])
def test_checker_finds_transfers_in_modules(operation):
    line = f'%1 = "stablehlo.{operation}"(%arg0, %0) <{{is_host_transfer = true}}> : (tensor<3xf32>, !stablehlo.token)'
    assert module_faults(line) == [f"stablehlo.{operation}"]


@pytest.mark.parametrize("precision", [None, "high"])
def test_checker_finds_products_that_are_rounded(precision):
    def function(a, b):
        return jnp.matmul(a, b, precision=precision) + jnp.matmul(b, a, precision="highest")

    assert faults(function, shape(3, 3), shape(3, 3)) == ["1 products that may be rounded"]
    assert faults(function, shape(3, 3), shape(3, 3), may_round=True) == []


def test_eigenvalues_of_general_matrices_are_refused():
    """What JAX can lower for neither platform, or by a call of the host: the checks of `jax.export` are needed."""
    for platform in PLATFORMS:
        with pytest.raises((NotImplementedError, ValueError)):
            faults(jnp.linalg.eigvals, shape(3, 3), platforms=(platform,))
