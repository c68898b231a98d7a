"""Many labels: no program holds the logits of all examples, which would be 2 GB here."""

import jax
import jax.numpy as jnp
import pytest

from qbound.fitting import objective
from qbound.fitting.factors import InputFactor
from qbound.fitting.newton import advance
from qbound.fitting.objective import Data
from qbound.fitting.stream import consume, first_stream
from qbound.models.inputs import Dense

B, N, D = 50_000, 10_000, 128
E = D + 1


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def data(rows):
    """Built without its checks, which arrays that do not exist fail."""
    structure = jax.tree.structure(Data(Dense(jnp.zeros((1, 1))), jnp.zeros(1, jnp.int32), jnp.zeros(1)))
    return jax.tree.unflatten(structure, [array(rows, D), array(rows, dtype=jnp.int32), array(rows)])


DATA, BATCH = data(B), data(419)
FACTOR = jax.tree.unflatten(
    jax.tree.structure(InputFactor(jnp.zeros(1), jnp.zeros(1), jnp.zeros((1, 1)))), [array(E), array(E), array(E, E)]
)


def advanced(solver):
    factor = FACTOR if solver == "kronecker" else None
    return advance.plain.lower(DATA, array(E), array(N, E), factor, None, array(), array(), solver=solver)


PROGRAMS = {
    "kronecker": lambda: advanced("kronecker"),
    "diagonal": lambda: advanced("diagonal"),
    "stream": lambda: consume.plain.lower(jax.eval_shape(first_stream, array(N, E)), BATCH, array(E)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_is_that_of_coefficients_and_of_blocks(name):
    memory = PROGRAMS[name]().compile().memory_analysis().temp_size_in_bytes
    coefficients, block = 4 * N * E, 4 * objective._BLOCK
    limit = 10 * coefficients + 4 * block
    assert memory < limit < 4 * B * N / 10
