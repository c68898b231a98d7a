"""Logits of the kinds that break implementations: ties, wide ranges, tiny spreads, removed labels."""

import hypothesis.strategies as st
import numpy as np
from hypothesis.extra import numpy as hnp

# Few sizes, because every size is compiled anew; 50 is above the limit of pairwise comparison.
SIZES = (1, 2, 3, 50)


def _arrays(n, elements):
    return hnp.arrays(np.float64, n, elements=elements)


def _floats(low, high):
    """Without numbers so small that float32, or XLA's flushing of subnormal numbers, would make them equal to 0."""
    return st.floats(low, high).map(lambda x: x if abs(x) > 1e-20 else 0.0)


def ordinary_logits(sizes=SIZES):
    return st.sampled_from(sizes).flatmap(lambda n: _arrays(n, _floats(-30, 30)))


def tied_logits(sizes=SIZES):
    return st.sampled_from(sizes).flatmap(lambda n: _arrays(n, st.sampled_from([-1.0, 0.0, 2.0])))


def wide_logits(sizes=SIZES):
    return st.sampled_from(sizes).flatmap(lambda n: _arrays(n, _floats(-1e4, 1e4)))


def narrow_logits(sizes=SIZES):
    """A spread of 1e-8 about some number."""
    return st.tuples(ordinary_logits(sizes), _floats(-10, 10)).map(lambda t: t[1] + 1e-8 * t[0] / 30)


def logits(sizes=SIZES):
    return st.one_of(ordinary_logits(sizes), tied_logits(sizes), wide_logits(sizes), narrow_logits(sizes))


@st.composite
def logits_and_vector(draw, sizes=SIZES, bound=30):
    h = draw(logits(sizes))
    return h, draw(_arrays(h.size, _floats(-bound, bound)))


@st.composite
def logits_and_mask(draw, sizes=(3, 50)):
    """Logits and which of them are kept, at least one."""
    h = draw(st.one_of(ordinary_logits(sizes), tied_logits(sizes)))
    kept = draw(hnp.arrays(np.bool_, h.size))
    kept[draw(st.integers(0, h.size - 1))] = True
    return h, kept


@st.composite
def features_and_theta(draw):
    """Feature matrices of full and of low rank, some with equal rows."""
    n, d = draw(st.sampled_from([(1, 2), (2, 3), (3, 3), (7, 2), (5, 8)]))
    features = draw(_arrays((n, d), _floats(-3, 3)))
    if draw(st.booleans()):
        features = features[np.zeros(n, dtype=int)] if n == 1 else np.vstack([features[:1], features[:-1]])
    return features, draw(_arrays(d, _floats(-3, 3)))
