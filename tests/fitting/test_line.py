"""The line along a direction, held or made anew in blocks, against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.families.softmax import SoftmaxLine
from qbound.fitting.objective import BlockRows, PassSizes, line_along
from tests import reference
from tests.fitting.problems import N, problem

ETAS = np.array([1e-3, 0.1, 1.0, 5.0])


def measured(data, params, direction, a, c):
    """Of a line: v, r, the decrease and the slope at some lengths; and the quadratic of the bound."""
    line = line_along(data, params, direction, a, c)
    etas = [jnp.asarray(eta) for eta in ETAS]
    along = [(line.decrease(eta), *line.slope(eta)) for eta in etas]
    return line.v, line.r, jnp.array(along), line.rows.quadratic()


def lines(p):
    """Held, in one block; and made anew, in blocks with a remainder."""
    others = jnp.asarray(p.params), jnp.asarray(p.direction), jnp.asarray(0.7), jnp.asarray(0.2)
    for sizes, rows in ((PassSizes(), SoftmaxLine), (PassSizes(held=0, block_inputs=1), BlockRows)):
        data = p.data(sizes=sizes)
        assert isinstance(line_along(data, *others).rows, rows)
        yield jax.jit(measured)(data, *others)


def by_definition(p):
    """What `measured` finds, from values of the objective along the line and differences of its slope."""
    logits, u = p.logits()
    means = np.array([reference.softmax(h) @ row for h, row in zip(logits, u, strict=True)])
    e = u - means[:, None]
    v = np.array([reference.softmax(h) @ row**2 for h, row in zip(logits, e, strict=True)])

    def objective(eta):
        values = [reference.log_sum_exp(h) for h in logits - eta * u]
        return p.weights @ values + eta * p.weights @ means - eta * 0.7 + eta**2 * 0.1

    def slope(eta):
        terms = [reference.softmax(h - eta * row) @ row for h, row in zip(logits, u, strict=True)]
        return -0.7 + 0.2 * eta - p.weights @ (np.array(terms) - means)

    along = [
        (objective(0) - objective(eta), slope(eta), (slope(eta + 1e-5) - slope(eta - 1e-5)) / 2e-5) for eta in ETAS
    ]
    bounds = [reference.logit_bound(h, reference.max_first(h))[2] for h in logits]
    quadratic = sum(w * row @ m @ row for w, row, m in zip(p.weights, u, bounds, strict=True))
    return v, np.where(p.weights > 0, np.max(-e, axis=1), 0), along, quadratic


@pytest.mark.parametrize("n", [N, 65], ids=["bound label by label", "bound example by example"])
@pytest.mark.parametrize("intercept", [True, False], ids=["intercept", "none"])
def test_line_in_blocks_is_the_one_held(intercept, n):
    p = problem(intercept, n=n)
    held, in_blocks = lines(p)
    expected_v, expected_r, expected_along, expected_quadratic = by_definition(p)
    counts = p.weights > 0
    for v, r, along, quadratic in (held, in_blocks):
        np.testing.assert_allclose(np.asarray(v)[counts], expected_v[counts], rtol=1e-9)
        np.testing.assert_allclose(r, expected_r, rtol=1e-9)
        np.testing.assert_allclose(along, expected_along, rtol=1e-6, atol=1e-8)
        assert float(quadratic) == pytest.approx(expected_quadratic, rel=1e-10)
    # To more digits than derivatives by differences have.
    np.testing.assert_allclose(in_blocks[2], held[2], rtol=1e-10, atol=1e-13)
