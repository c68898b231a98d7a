"""Arrays that are spread over devices: the step is the same."""

from tests import processes

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, qbound
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

rng = np.random.default_rng(0)
x, w = rng.normal(size=(16, 6)).astype(np.float32), rng.normal(size=(6, 4)).astype(np.float32)
y = rng.integers(4, size=16)
window = {"window": 32, "inputs_like": jax.ShapeDtypeStruct((6,), jnp.float32)}

def run(logits_fn, options, x, y, w):
    tx = qbound.spfb(1.0, logits_fn, l2=1e-2, solver="cg", max_steps=60, tolerance=1e-6, **options)
    def loss(w):
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits_fn(w, x)) * jax.nn.one_hot(y, 4), axis=1))
    @jax.jit
    def step(w):
        updates, state = tx.update(jax.grad(loss)(w), tx.init(w), w, inputs=x)
        return w + updates, state
    moved, state = step(w)
    assert not state[0].spfb_info.spfb_nonfinite
    return moved

def network(w, x):
    return jnp.tanh(x) @ w

for logits_fn, options in ((network, {"warm_start": True}), (network, window), (qbound.linear_logits, {})):
    expected = run(logits_fn, options, jnp.asarray(x), jnp.asarray(y), jnp.asarray(w))
    for kind, spec in ((AxisType.Auto, P("d")), (AxisType.Explicit, P()), (AxisType.Explicit, P("d"))):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            data = (jax.device_put(a, NamedSharding(mesh, P("d"))) for a in (x, y))
            moved = run(logits_fn, options, *data, jax.device_put(w, NamedSharding(mesh, spec)))
        np.testing.assert_allclose(np.asarray(moved), np.asarray(expected), rtol=1e-3, atol=1e-4)
"""


def test_step_is_the_same_with_data_and_parameters_over_two_devices():
    result = processes.run("-c", SCRIPT, quick=True, devices=2)
    assert result.returncode == 0, result.stderr
