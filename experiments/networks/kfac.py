"""K-FAC by its authors (Martens and Grosse 2015), https://github.com/google-deepmind/kfac-jax.

Its package is in an environment of its own, and imported where it is used.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.networks.methods import learning_rate, numbers
from experiments.networks.models import Network
from experiments.networks.train import Run

__all__ = ["KfacTrainer"]

# Steps between updates of the factors, and of their inverses.
FACTORS_EVERY, INVERSES_EVERY = 1, 5
DAMPING, MOMENTUM = 1e-3, 0.9


class KfacTrainer:
    """A learning rate by the schedule of all methods, momentum and damping by the setting."""

    # Programs differ between steps that update inverses and those that do not.
    warm_up = INVERSES_EVERY + 1

    def __init__(self, run: Run, params: Any):
        self._run, self._params, self._state = run, params, None
        self._optimizer = _optimizer(run.network, run.method.l2)
        rate = learning_rate(numbers(run.learning_rate, run.schedule, run.steps))
        self._rates = np.asarray(rate(np.arange(run.steps + 1)))
        self._key, self._step = jax.random.key(run.seed), 0
        self._momentum = jnp.float32(run.method.momentum or MOMENTUM)
        self._damping = jnp.float32(run.method.damping or DAMPING)

    def step(self, inputs: jax.Array, labels: jax.Array) -> None:
        self._key, key = jax.random.split(self._key)
        batch = (inputs, labels)
        if self._state is None:
            self._state = self._optimizer.init(self._params, key, batch)
        self._params, self._state, _ = self._optimizer.step(
            self._params,
            self._state,
            key,
            batch=batch,
            global_step_int=self._step,
            learning_rate=jnp.asarray(self._rates[min(self._step, self._run.steps)]),
            momentum=self._momentum,
            damping=self._damping,
        )
        self._step += 1

    def wait(self) -> None:
        jax.block_until_ready((self._params, self._state))

    def params(self) -> Any:
        # A copy, because the next step is given this memory to write to.
        return jax.tree.map(jnp.copy, self._params)


@functools.lru_cache(maxsize=4)
def _optimizer(network: Network, l2: float) -> Any:
    """One for all runs, because it compiles its programs for itself."""
    import kfac_jax  # pyright: ignore[reportMissingImports]

    def objective(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        inputs, labels = batch
        logits = network.logits(params, inputs)
        # One row for each example and position: the package averages over the first axis.
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        kfac_jax.register_softmax_cross_entropy_loss(logits, labels)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses) + l2 / 2 * optax.tree.norm(params, squared=True)

    return kfac_jax.Optimizer(
        value_and_grad_func=jax.value_and_grad(objective),
        l2_reg=l2,
        num_burnin_steps=0,
        curvature_update_period=FACTORS_EVERY,
        inverse_update_period=INVERSES_EVERY,
    )
