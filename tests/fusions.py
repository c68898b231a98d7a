"""Do the package's own expressions meet the fault of the compiler, in programs that a user compiles? Run as a script.

The fault is in a fusion by the library YNN of a product whose second factor is one number throughout. Parameters of
zeros that are made inside a program, where most training starts, are such a factor.
"""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qbound
from qbound import compiler

EXAMPLES, INPUTS, LABELS = 1000, 785, 10


def faulty(text: str) -> list[str]:
    """The fusions with the fault in the text of a compiled program."""
    bodies = dict(re.findall(r"^%?(\S+) \([^\n]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE))
    names = set(re.findall(r"calls=%?([\w.-]+),.*__ynn_fusion", text))
    assert names <= set(bodies), "programs are printed in another way"
    return sorted(name for name in names if _has_constant_factor(bodies[name]))


def _has_constant_factor(body: str) -> bool:
    constant = set(re.findall(r"%?(\S+) = \S+ broadcast\([^)]*\), dimensions=\{\}", body))
    return any(second in constant for second in re.findall(r" dot\(%?[\w.-]+, %?([\w.-]+)\)", body))


def loss(weights, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(qbound.linear_logits(weights, x), y).mean()


def updated(make):
    def step(weights, x, y):
        tx = make(1.0, qbound.linear_logits, l2=1e-3)
        updates, _ = tx.update(jax.grad(loss)(weights, x, y), tx.init(weights), weights, inputs=x)
        return updates

    return step


def of_bounds(order):
    def compute(weights, x, y):
        bounds = jax.vmap(lambda h: qbound.log_partition_bound(h, order=order))(x @ weights)
        v = x @ jnp.ones_like(weights)
        products, solutions = jax.vmap(lambda c, v: (c.mv(v), c.solve(v, 0.1)))(bounds.curvature, v)
        return bounds.value.mean(), (bounds.grad * v).sum(1), (products * v).sum(), solutions.max(1)

    return compute


def mm_step(weights, x, y):
    state = qbound.mm.init(qbound.linear_logits, weights, x, y, l2=1e-3)
    return qbound.mm.step(qbound.linear_logits, state, x, y, l2=1e-3)[0].params


PROGRAMS = {
    **{f"bounds, {order}": of_bounds(order) for order in ("max_first", "descending", "given")},
    "spfb": updated(qbound.spfb),
    "kspfb": updated(qbound.kspfb),
    "layerwise_spfb": updated(qbound.layerwise_spfb),
    "mm.step": mm_step,
}


def main():
    warnings.simplefilter("ignore", compiler.MiscompilationWarning)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, INPUTS)).astype(np.float32)
    y = rng.integers(LABELS, size=EXAMPLES).astype(np.int32)
    weights = (0.01 * rng.normal(size=(INPUTS, LABELS))).astype(np.float32)

    # What is looked for is found where it is known to be.
    known = jax.jit(lambda x: jnp.max(x @ jnp.ones((INPUTS, LABELS), x.dtype), axis=1)).lower(x).compile()
    assert len(faulty(known.as_text())) == 1

    for name, program in PROGRAMS.items():
        for start in (lambda w: w, jnp.zeros_like):
            lowered = jax.jit(lambda w, x, y, start=start, run=program: run(start(w), x, y)).lower(weights, x, y)
            plain, right = lowered.compile(), lowered.compile({compiler.FLAG: ""})
            assert "__ynn_fusion" in plain.as_text(), name
            assert not faulty(plain.as_text()), name
            for a, b in zip(*(jax.tree.leaves(compiled(weights, x, y)) for compiled in (plain, right)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.max(np.abs(b)), err_msg=name)


if __name__ == "__main__":
    main()
