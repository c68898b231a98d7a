"""Two small programs that releases of jaxlib get wrong, or crash on.

On Linux x86-64 CPU, 0.10.2 to 0.12.0.1 get `product` wrong, and the compilers of 0.10.0 and 0.10.1 crash on `gather`.
Both are right in 0.9, and in all of these with the flag that `qbound.compiler` knows.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np


def product(compiler_options: Mapping[str, str] | None = None) -> bool:
    """The largest entry of every row of X 1, where X is full of ones too: its number of columns.

    XLA fuses the product with what reduces it, and does not write the second factor where it is one number throughout:
    what is multiplied is memory as it was found.
    """
    rows, columns, count = 5000, 16, 2

    def largest(x):
        return jnp.max(x @ jnp.ones((columns, count), x.dtype), axis=1)

    compiled, x = _compiled(largest, np.ones((rows, columns), np.float32), compiler_options)
    return bool(np.all(np.asarray(compiled(x)) == columns))


def gather(compiler_options: Mapping[str, str] | None = None) -> bool:
    """A batched gather by argsort, followed by a batched product."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1000, 10, 10)).astype(np.float32)

    def mean_gram(rows):
        permuted = jax.vmap(lambda r: r[:, jnp.argsort(r[0])])(rows)
        return jnp.mean(jax.vmap(lambda r: r.T @ r)(permuted), axis=0)

    permuted = np.take_along_axis(rows.astype(np.float64), np.argsort(rows[:, :1], axis=2), axis=2)
    expected = np.einsum("bij,bik->jk", permuted, permuted) / len(rows)
    compiled, rows = _compiled(mean_gram, rows, compiler_options)
    return np.allclose(np.asarray(compiled(rows)), expected, atol=1e-4)


def _compiled(function, x: np.ndarray, compiler_options):
    """For CPU, also where `jax.jit` is switched off; and the argument on a CPU."""
    argument = jax.device_put(x, jax.local_devices(backend="cpu")[0])
    return jax.jit(function).lower(argument).compile(dict(compiler_options or {})), argument


PROGRAMS = {"product": product, "gather": gather}
