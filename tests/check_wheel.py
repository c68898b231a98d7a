"""The installed wheel, in an environment that holds what it declares and nothing else. Run as a script."""

import importlib
import importlib.metadata
import importlib.resources
import importlib.util

import jax.numpy as jnp

import qbound


def main():
    assert "site-packages" in qbound.__file__, f"imported from {qbound.__file__}, not from the wheel"
    assert importlib.metadata.version("qbound") == qbound.__version__
    assert importlib.resources.files("qbound").joinpath("py.typed").is_file()
    for name in (
        "experiments",
        "configs",
        "tests",
        "sklearn",
        "matplotlib",
        "hypothesis",
        "beartype",
        "flax",
        "equinox",
    ):
        assert importlib.util.find_spec(name) is None, f"{name} came with the wheel"
    bound = qbound.log_partition_bound(jnp.zeros(2)).pullback(jnp.eye(2), jnp.zeros(2))
    assert jnp.allclose(bound.curvature.dense(), jnp.array([[0.25, -0.25], [-0.25, 0.25]]))
    tx = qbound.spfb(1.0, qbound.linear_logits, l2=0.1)
    weights, x = jnp.ones((2, 3)), jnp.ones((4, 2))
    updates, state = tx.update(weights, tx.init(weights), weights, inputs=x)
    assert jnp.isfinite(updates).all()
    assert not state[0].spfb_info.spfb_nonfinite
    try:
        importlib.import_module("qbound.estimator")
    except ModuleNotFoundError as error:
        assert "qbound.estimator needs scikit-learn: pip install" in str(error)
    else:
        raise AssertionError("qbound.estimator was imported without scikit-learn")
    print(f"qbound {qbound.__version__}: the wheel works by itself")


if __name__ == "__main__":
    main()
