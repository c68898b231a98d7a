"""Each way of holding an order answers like the plain one: a permutation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.families.ordered import PAIRWISE_LIMIT, LeadOrder, PairwiseOrder, SortedOrder, descending_order, lead_order
from tests import reference


def _descending(logits):
    return jax.jit(descending_order)(logits), reference.descending(logits)


def _max_first(logits):
    return lead_order(jnp.argmax(logits), len(logits)), reference.max_first(logits)


@jax.jit
def answers(order, x, terms):
    """To everything that an order is asked."""
    parts = order.permutation(), order.positions(), order.is_first(), order.first(x)
    return *parts, order.earlier(terms), order.later(terms)


@pytest.mark.parametrize("n", [1, 2, 9, 16, 17, 200])
@pytest.mark.parametrize("make", [_descending, _max_first])
@pytest.mark.parametrize("ties", [False, True])
def test_order_answers_like_a_permutation(ties, make, n):
    rng = np.random.default_rng(n)
    logits = rng.choice([-np.inf, 0.0, 1.0], size=n) if ties else rng.normal(size=n)
    order, permutation = make(logits)
    position = np.argsort(permutation)
    x = rng.normal(size=n)
    terms = np.where(position == 0, 0, x)  # as the sums ask for
    found, positions, is_first, first, earlier, later = answers(order, x, terms)
    np.testing.assert_array_equal(found, permutation)
    np.testing.assert_array_equal(positions, position)
    np.testing.assert_array_equal(is_first, position == 0)
    assert first == x[permutation[0]]
    sums = np.cumsum(terms[permutation])
    np.testing.assert_allclose(earlier, (sums - terms[permutation])[position], atol=1e-13)
    np.testing.assert_allclose(later, (sums[-1] - sums)[position], atol=1e-13)


def test_few_labels_are_compared_and_many_are_sorted():
    assert isinstance(_descending(np.zeros(PAIRWISE_LIMIT))[0], PairwiseOrder)
    assert isinstance(_descending(np.zeros(PAIRWISE_LIMIT + 1))[0], SortedOrder)
    assert isinstance(_max_first(np.zeros(PAIRWISE_LIMIT + 1))[0], LeadOrder)
