"""Many labels: no program holds the logits of all examples, which would be 2 GB here."""

import jax
import jax.numpy as jnp
import pytest

from qbound.fitting.factors import InputFactor
from qbound.fitting.newton import newton_step
from qbound.fitting.objective import Data, LinearObjective, PassSizes
from qbound.fitting.stream import consume, first_stream
from qbound.models.inputs import DenseInputs

B, N, D = 50_000, 10_000, 128
E = D + 1


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def like(example, *arrays):
    """Built without its checks, which arrays that do not exist fail."""
    return jax.tree.unflatten(jax.tree.structure(example), arrays)


def data(rows):
    example = Data(DenseInputs(jnp.zeros((1, 1))), jnp.zeros(1, jnp.int32), jnp.zeros(1))
    return like(example, array(rows, D), array(rows, dtype=jnp.int32), array(rows))


OBJECTIVE = like(
    LinearObjective(Data(DenseInputs(jnp.zeros((1, 1))), jnp.zeros(1, jnp.int32), jnp.zeros(1)), jnp.zeros(1)),
    *jax.tree.leaves(data(B)),
    array(E),
)
FACTOR = like(InputFactor(jnp.zeros(1), jnp.zeros(1), jnp.zeros((1, 1))), array(E), array(E), array(E, E))


def lowered(solver):
    factor = FACTOR if solver == "kronecker" else None
    return newton_step.plain.lower(OBJECTIVE, array(N, E), factor, None, array(), array(), solver=solver)


PROGRAMS = {
    "kronecker": lambda: lowered("kronecker"),
    "diagonal": lambda: lowered("diagonal"),
    "stream": lambda: consume.plain.lower(jax.eval_shape(first_stream, array(N, E)), data(419), array(E)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_is_that_of_coefficients_and_of_blocks(name):
    memory = PROGRAMS[name]().compile().memory_analysis().temp_size_in_bytes
    coefficients, block = 4 * N * E, 4 * PassSizes().block_logits
    limit = 10 * coefficients + 4 * block
    assert memory < limit < 4 * B * N / 10
