"""Data that is spread over devices by examples: the run is the same."""

from tests import processes

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, qbound
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 6)).astype(np.float32), rng.integers(4, size=64)
w = np.zeros((6, 4), np.float32)

def run(x, y, w):
    return qbound.mm.run(lambda w, x: x @ w, w, x, y, l2=1e-2, solver="cg")

expected, alone = run(jnp.asarray(x), jnp.asarray(y), jnp.asarray(w))
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        data = (jax.device_put(a, NamedSharding(mesh, P("d"))) for a in (x, y))
        found, info = run(*data, jax.device_put(w, NamedSharding(mesh, P())))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=1e-4)
    assert info.steps == alone.steps > 2
    if kind is AxisType.Auto:
        data = (jax.device_put(a, NamedSharding(mesh, P("d"))) for a in (x, y))
        found, info = qbound.fit(qbound.linear_logits, w, *data, l2=1e-2)
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=1e-4)
        assert np.all(np.isnan(info.history.seconds))
"""


def test_run_and_fit_are_the_same_with_data_over_two_devices():
    result = processes.run("-c", SCRIPT, quick=True, devices=2)
    assert result.returncode == 0, result.stderr
