"""Updates inside `jax.shard_map`, where a device sees a part of the batch, are an error and never a wrong step."""

import pytest

from tests import processes

SCRIPT = """
import re
import jax, jax.numpy as jnp, numpy as np, optax, qbound
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
x, y = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32), jnp.asarray(rng.integers(2, size=8))
w = jnp.zeros((3, 2), jnp.float32)
linear = qbound.linear_logits
network = lambda w, x: jnp.tanh(x) @ w

def loss(w, x, y, f=linear):
    return optax.softmax_cross_entropy_with_integer_labels(f(w, x), y).mean()

def mapped(f, *specs, **options):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), **options))

def expect(words, f, *arguments):
    try:
        jax.eval_shape(f, *arguments)
    except ValueError as error:
        assert re.match(words, str(error)), error
        assert "Call it outside, under jax.jit" in str(error), error
    else:
        raise AssertionError(f"no error: {words}")
"""

TRANSFORMS = """
transforms = {
    "spfb": qbound.spfb(1.0, linear, l2=1e-2),
    "spfb with a network": qbound.spfb(1.0, network, l2=1e-2, solver="cg"),
    "spfb in pieces": qbound.spfb(1.0, network, l2=1e-2, microbatch_size=2),
    "lspfb": qbound.lspfb(1.0, linear, rank=2, l2=1e-2),
    "kspfb": qbound.kspfb(1.0, linear, l2=1e-2),
    "scale_by_spfb": qbound.scale_by_spfb(linear, damping=0.1),
    "scale_by_lspfb": qbound.scale_by_lspfb(linear, rank=2, damping=0.1),
    "scale_by_kspfb": qbound.scale_by_kspfb(linear, damping=0.1),
}
for name, tx in transforms.items():
    def update(w, x, y):
        return tx.update(jax.lax.pmean(jax.grad(loss)(w, x, y), "d"), tx.init(w), w, inputs=x)[0]
    expect(".*: expected .* varies over 'd'", mapped(update, P(), P("d"), P("d")), w, x, y)
    expect(".*: expected .* check_vma=False, over 'd'", mapped(update, P(), P("d"), P("d"), check_vma=False), w, x, y)
"""

ARGUMENTS = """
tx = qbound.spfb(1.0, linear, l2=1e-2, adaptive_damping=0.1)
good = {"grads": w, "params": w, "inputs": x, "example_weights": jnp.ones(8), "value": jnp.float32(1)}
names = {"grads": "updates"}

def update(arguments):
    arguments = dict(arguments)
    params = arguments.pop("params")
    return tx.update(arguments.pop("grads"), tx.init(w), params, **arguments)[0]

one_varies = lambda name: {key: P("d") if key == name else P() for key in good}
for name in ("grads", "params", "inputs", "example_weights"):
    tall = good | {"grads": jnp.zeros((6, 2)), "params": jnp.zeros((6, 2))}
    halves = (tall | {"inputs": jnp.zeros((8, 6))}) if name in ("grads", "params") else good
    expect(f"{names.get(name, name)}: expected", mapped(update, one_varies(name)), halves)
expect("value: expected", mapped(lambda a, v: update(a | {"value": v[0]}), P(), P("d")), good, jnp.ones(2))

more = {"curvature_inputs": x, "curvature_weights": jnp.ones(8)}
for name in more:
    def update_of_another(arguments):
        tx = qbound.spfb(1.0, linear, l2=1e-2)
        return tx.update(w, tx.init(w), w, inputs=x, **arguments)[0]
    expect(f"{name}: expected", mapped(update_of_another, {key: P("d") if key == name else P() for key in more}), more)

# What a model closes over is seen by its logits.
def closed(w, x, shift):
    for make in (qbound.spfb, qbound.kspfb):
        tx = make(1.0, lambda w, x: x @ w + shift, l2=1e-2)
        expect("logits_fn: expected", lambda: tx.update(w, tx.init(w), w, inputs=x))
    return w
mapped(closed, P(), P(), P("d"))(w, x, jnp.ones(2))

# Arrays that are the same everywhere may be there, and the step is that of one device.
tx = qbound.spfb(1.0, linear, l2=1e-2)
update = lambda w, x, y: tx.update(jax.grad(loss)(w, x, y), tx.init(w), w, inputs=x)[0]
np.testing.assert_allclose(mapped(update, P(), P(), P())(w, x, y), jax.jit(update)(w, x, y), rtol=1e-5)

# An axis of jax.vmap is none of a mesh.
jax.eval_shape(jax.vmap(update, in_axes=(None, 0, 0), axis_name="d"), w, x.reshape(2, 4, 3), y.reshape(2, 4))
expect(".*: expected .* jax.pmap", lambda *a: jax.pmap(update, axis_name="d", in_axes=(None, 0, 0))(*a),
       w, x.reshape(2, 4, 3), y.reshape(2, 4))

# The gradient may be taken inside, as the mean over devices, and the update outside.
inside = mapped(lambda w, x, y: jax.grad(lambda w: jax.lax.pmean(loss(w, x, y), "d"))(w), P(), P("d"), P("d"))
@jax.jit
def step(w, x, y):
    return tx.update(inside(w, x, y), tx.init(w), w, inputs=x)[0]
data = (jax.device_put(a, jax.sharding.NamedSharding(mesh, P("d"))) for a in (x, y))
np.testing.assert_allclose(step(w, *data), jax.jit(update)(w, x, y), rtol=1e-4, atol=1e-6)
"""

MM = """
def run(w, x, y, **options):
    return qbound.mm.run(linear, w, x, y, l2=1e-2, throw=False, **options)[0]
def step(w, x, y):
    state = qbound.mm.init(linear, w, x, y, l2=1e-2)
    return qbound.mm.step(linear, state, x, y, l2=1e-2)[0].params
whole = jax.jit(lambda w, x, y: qbound.mm.init(linear, w, x, y, l2=1e-2))(w, x, y)
for f in (run, step):
    expect("inputs: expected .* varies over 'd'", mapped(f, P(), P("d"), P("d")), w, x, y)
    expect(".*: expected .* check_vma=False, over 'd'", mapped(f, P(), P("d"), P("d"), check_vma=False), w, x, y)
expect("labels: expected", mapped(lambda w, x, y: run(w, x, jnp.tile(y, 2)), P(), P(), P("d")), w, x, y)
expect("example_weights: expected", mapped(lambda w, x, y, c: run(w, x, y, example_weights=jnp.tile(c, 2)),
       P(), P(), P(), P("d")), w, x, y, jnp.ones(8))
expect("inputs: expected", mapped(lambda s, x, y: qbound.mm.step(linear, s, x, y, l2=1e-2)[0].params,
       P(), P("d"), P("d")), whole, x, y)
np.testing.assert_allclose(mapped(run, P(), P(), P())(w, x, y), jax.jit(run)(w, x, y), rtol=1e-4, atol=1e-6)
"""


@pytest.mark.parametrize("part", [TRANSFORMS, ARGUMENTS, MM], ids=["every transform", "every argument", "full batches"])
def test_update_inside_shard_map_is_an_error(part):
    result = processes.run("-c", SCRIPT + part, quick=True, devices=2)
    assert result.returncode == 0, result.stderr
