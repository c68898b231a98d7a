"""How far a step goes: by the better certificate, and no further than a search can be trusted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qbound.families.softmax import Softmax
from qbound.fitting.line import Line, certified_by_bound, certified_locally, make_line, step_length

ONE = jnp.ones(())


def line_of(rise, slope, rarity=6.0):
    """Along which a rare label rises, with Böhning's bound."""
    logits, u = jnp.array([[0.0, -rarity], [0.0, 1.0]]), jnp.array([[0.0, -rise], [0.3, 0.0]])
    family = Softmax(is_bohning=True)
    return make_line(family, jnp.full(2, 0.5), logits.T, u.T, jnp.asarray(slope), jnp.asarray(1e-3))


def test_quadratic_of_a_line_is_that_of_its_family():
    """Böhning's, of two labels a quarter of the square of what they are apart."""
    for rise in (0.1, 6.0):
        assert float(line_of(rise, 0.3).rows.quadratic()) == pytest.approx((rise**2 + 0.3**2) / 8, rel=1e-12)


def test_better_certificate_wins_unless_the_local_one_has_half_of_newtons_decrease():
    @jax.jit
    def found(rise, slope):
        line = line_of(rise, slope)
        step = step_length(line, is_local=True, search=False, eta=ONE)
        both = certified_by_bound(line, line.rows.quadratic(), ONE), certified_locally(line)
        return step, *both, line.newton_decrease()

    winners = set()
    for rise in (0.1, 1.0, 3.0, 6.0):
        for slope in (0.003, 0.03, 0.3, 3.0):
            step, bound, local, newton = found(rise, slope)
            assert step.certified >= min(max(bound[1], local[1]), newton / 2)
            assert step.certified <= newton
            expected = local if step.local else bound
            assert (step.length, step.certified) == expected
            part = float(local[1] / newton)
            winners.add((bool(step.local), part > 0.5))
            if 0.06 < part < 0.5 and bound[1] > local[1]:
                winners.add("bound, though the local one has a part")
    # Both win somewhere, the bound also where the local one certifies much.
    assert winners >= {(True, True), (False, False), "bound, though the local one has a part"}


class Misled(Line):
    """A line whose search goes far too far."""

    def search(self, first):
        return 50 * first


@pytest.mark.parametrize("kind", [Line, Misled], ids=["right", "misled"])
@pytest.mark.parametrize("is_local", [True, False], ids=["local", "bound alone"])
def test_search_is_followed_unless_it_falls_short_of_the_certificate(kind, is_local):
    line = line_of(6.0, 0.3)
    line = kind(**{name: getattr(line, name) for name in ("rows", "weights", "v", "r", "a", "c")})
    lengths = functools.partial(step_length, line, is_local=is_local, eta=ONE)
    certified, searched = lengths(search=False), lengths(search=True)
    assert searched.certified == certified.certified <= searched.actual
    np.testing.assert_allclose(searched.actual, line.decrease(searched.length), rtol=1e-12)
    if kind is Misled:
        assert line.decrease(50 * certified.length) < certified.certified
        assert searched.length == certified.length
    else:
        assert searched.length > 1.01 * certified.length
        assert searched.actual > certified.actual
