"""Two small programs that releases of jaxlib have miscompiled or crashed on. Run as a script, in float32.

On Linux x86-64 CPU, jaxlib 0.10.2 gets `product` wrong: a product with zeros, fused with what follows, returns garbage.
`gather` crashes the compiler of 0.10.0 and 0.10.1. Both are right in 0.9.0 and 0.9.2.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np


def product() -> bool:
    """A sum over (p * (X @ 0)), which is 0."""
    inputs = jnp.asarray(np.random.default_rng(0).normal(size=(5000, 785)), jnp.float32)
    p = jnp.full((5000, 10), 0.1, jnp.float32)
    result = jax.jit(lambda X, p: (p * (X @ jnp.zeros((785, 10), jnp.float32))).sum(1))(inputs, p)
    return not np.any(np.asarray(result))


def gather() -> bool:
    """A batched gather by argsort, followed by a batched product."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(1000, 10, 10)), jnp.float32)
    h = jnp.asarray(rng.normal(size=(1000, 10)), jnp.float32)

    @jax.jit
    def mean_gram(rows, h):
        permuted = jax.vmap(lambda r, h: r[:, jnp.argsort(h)])(rows, h)
        return jax.vmap(lambda r: r.T @ r)(permuted).mean(0)

    permuted = np.take_along_axis(np.asarray(rows, np.float64), np.argsort(np.asarray(h), axis=1)[:, None, :], axis=2)
    expected = np.einsum("bij,bik->jk", permuted, permuted) / 1000
    return np.allclose(np.asarray(mean_gram(rows, h)), expected, atol=1e-4)


if __name__ == "__main__":
    passed = {"product": product, "gather": gather}[sys.argv[1]]()
    sys.exit(0 if passed else 1)
