"""Every transform on streams that are not like their first batch, at rates from far too small to far too large.

At any rate no parameter may become NaN or infinite. At the documented rate no objective may exceed three times that of
the zero model. The objective is that of the tenth of the stream that has just passed, with the parameters after it, ten
times in a stream: a stream whose inputs change by a factor of 30 is judged by what is made of that, not by the batch
that no method could have foreseen.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qbound
from experiments.soak_rows import Row

__all__ = ["HIGHEST", "PARTS", "RATES", "STEPS", "STREAMS", "TRANSFORMS", "Entrant", "Outcome", "outcomes", "run"]

INPUTS, LABELS, L2 = 6, 3, 1e-3
STEPS, PARTS = 2000, 10
RATES = (0.01, 0.1, 1.0, 10.0, 100.0)
# In times the objective of the zero model.
HIGHEST = 3.0


class Stream(NamedTuple):
    """Batches in their order."""

    inputs: np.ndarray
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A transform: how it is made for a learning rate, which one the documentation names, and whether it decays.

    Batches have more examples where the documentation asks for a few hundred. LSPFB has fewer, since its time goes with
    them.
    """

    make: Callable[[Any], optax.GradientTransformationExtraArgs]
    documented: float | None
    batch: int
    decays: bool = False


class Outcome(NamedTuple):
    """Of one transform on one stream at one rate: the highest objective, in times that of the zero model."""

    transform: str
    stream: str
    rate: float
    documented: bool
    finite: bool
    highest: float

    def holds(self) -> bool:
        """What must be so."""
        return self.finite and (not self.documented or self.highest <= HIGHEST)

    def failure(self) -> str:
        """What to say if it is not."""
        what = f"{self.highest:.3g} times the zero model" if self.finite else "parameters that are not finite"
        return f"{self.transform}, {self.stream}, rate {self.rate:g}: {what}"


def _labelled(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.argmax(x[:, :LABELS] + rng.gumbel(size=(len(x), LABELS)), axis=1)


def _stream(x: np.ndarray, y: np.ndarray, steps: int) -> Stream:
    return Stream(x.reshape(steps, -1, INPUTS).astype(np.float32), y.reshape(steps, -1).astype(np.int32))


def plain(steps: int, batch: int, rng: np.random.Generator) -> Stream:
    """Nothing is wrong with it."""
    x = rng.normal(size=(steps * batch, INPUTS))
    return _stream(x, _labelled(x, rng), steps)


def sorted_by_size(steps: int, batch: int, rng: np.random.Generator) -> Stream:
    """Rows from small to large, over four orders of magnitude."""
    x = rng.normal(size=(steps * batch, INPUTS))
    y = _labelled(x, rng)
    x = x * np.exp(1.5 * rng.normal(size=(steps * batch, 1)))
    order = np.argsort(np.sum(x**2, axis=1))
    return _stream(x[order], y[order], steps)


def sorted_by_label(steps: int, batch: int, rng: np.random.Generator) -> Stream:
    """One label after the other."""
    x = rng.normal(size=(steps * batch, INPUTS))
    y = _labelled(x, rng)
    order = np.argsort(y, kind="stable")
    return _stream(x[order], y[order], steps)


def heavy_tailed(steps: int, batch: int, rng: np.random.Generator) -> Stream:
    """Sizes of rows that have a mean and no variance."""
    x = rng.normal(size=(steps * batch, INPUTS))
    y = _labelled(x, rng)
    return _stream(x * np.abs(rng.standard_t(1.5, size=(steps * batch, 1))), y, steps)


def small_at_first(steps: int, batch: int, rng: np.random.Generator) -> Stream:
    """The first batch is 50 times smaller than the others."""
    x = rng.normal(size=(steps * batch, INPUTS))
    y = _labelled(x, rng)
    x[:batch] *= 0.02
    return _stream(x, y, steps)


def rescaled(steps: int, batch: int, rng: np.random.Generator) -> Stream:
    """From the middle on, inputs are 30 times larger."""
    x = rng.normal(size=(steps * batch, INPUTS))
    y = _labelled(x, rng)
    x[len(x) // 2 :] *= 30
    return _stream(x, y, steps)


def constant(steps: int, batch: int, rng: np.random.Generator) -> Stream:
    """The same row again and again, and labels at random."""
    x = np.tile(rng.normal(size=INPUTS), (steps * batch, 1))
    return _stream(x, rng.integers(LABELS, size=steps * batch), steps)


def sparse(steps: int, batch: int, rng: np.random.Generator) -> Stream:
    """Column k is 0 but in one of k^2 rows, so that some come up late; every tenth batch is 0 throughout."""
    there = rng.random((steps * batch, INPUTS)) < 1 / np.arange(1, INPUTS + 1) ** 2
    x = rng.normal(size=there.shape) * there
    y = _labelled(x, rng)
    x.reshape(steps, batch, INPUTS)[::10] = 0
    return _stream(x, y, steps)


STREAMS: dict[str, Callable[[int, int, np.random.Generator], Stream]] = {
    "plain": plain,
    "sorted by size": sorted_by_size,
    "sorted by label": sorted_by_label,
    "heavy-tailed": heavy_tailed,
    "small at first": small_at_first,
    "rescaled": rescaled,
    "constant": constant,
    "sparse": sparse,
}


def _made(transform: Callable, **options) -> Callable[[Any], optax.GradientTransformationExtraArgs]:
    return lambda rate: transform(rate, qbound.linear_logits, l2=L2, **options)


def _scaled(transform: Callable, **options) -> Callable[[Any], Any]:
    """With nothing but a learning rate behind it: nobody limits its steps."""

    def make(rate):
        return optax.chain(
            optax.add_decayed_weights(L2),
            transform(qbound.linear_logits, damping=L2, **options),
            optax.scale_by_learning_rate(rate),
        )

    return make


_WINDOW = {"window": 1000, "inputs_like": jax.ShapeDtypeStruct((INPUTS,), jnp.float32)}
TRANSFORMS = {
    "spfb": Entrant(_made(qbound.spfb), 1.0, 200),
    "spfb, cg": Entrant(_made(qbound.spfb, solver="cg"), 1.0, 200),
    "spfb, window": Entrant(_made(qbound.spfb, **_WINDOW), 1.0, 50),
    "spfb, adaptive damping": Entrant(_made(qbound.spfb, adaptive_damping=1.0), 1.0, 200),
    "lspfb": Entrant(_made(qbound.lspfb, rank=4), 1.0, 50),
    "lspfb, decay": Entrant(_made(qbound.lspfb, rank=4, decay=0.9), 1.0, 50),
    "kspfb": Entrant(_made(qbound.kspfb), 2.0, 100, decays=True),
    "scale_by_spfb": Entrant(_scaled(qbound.scale_by_spfb), 1.0, 200),
    "scale_by_lspfb": Entrant(_scaled(qbound.scale_by_lspfb, rank=4), 1.0, 50),
    "scale_by_kspfb": Entrant(_scaled(qbound.scale_by_kspfb), None, 200),
}


def _loss(params, x, y):
    logits = qbound.linear_logits(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def _run(entrant: Entrant, rate, inputs, labels) -> tuple[Any, Any]:
    """Whether all parameters were finite, and the objective of each tenth of the stream."""
    steps = len(inputs)

    def rate_of(step):
        return rate * (0.5 + 0.5 * jnp.cos(jnp.pi * step / steps) if entrant.decays else 1.0)

    tx = entrant.make(rate_of)

    def step(carry, batch):
        params, state, finite = carry
        x, y = batch
        value, grads = jax.value_and_grad(_loss)(params, x, y)
        updates, state = tx.update(grads, state, params, inputs=x, value=value)
        params = cast(jax.Array, optax.apply_updates(params, updates))
        return (params, state, finite & jnp.all(jnp.isfinite(params))), None

    def part(carry, batches):
        carry, _ = jax.lax.scan(step, carry, batches)
        x, y = (a.reshape(-1, *a.shape[2:]) for a in batches)
        params = cast(jax.Array, carry[0])
        return carry, _loss(params, x, y) + L2 / 2 * jnp.sum(params**2)

    params = jnp.zeros((INPUTS, LABELS), jnp.float32)
    parts = tuple(a.reshape(PARTS, -1, *a.shape[1:]) for a in (inputs, labels))
    (_, _, finite), objectives = jax.lax.scan(part, (params, tx.init(params), jnp.array(True)), parts)
    return finite, objectives


def outcomes(name: str, steps: int) -> Iterator[Outcome]:
    """Of one transform on every stream at every rate, one after the other, so that progress can be shown."""
    entrant = TRANSFORMS[name]
    run = jax.jit(functools.partial(_run, entrant))
    documented = () if entrant.documented is None else (entrant.documented,)
    for kind, make in STREAMS.items():
        stream = jax.tree.map(jnp.asarray, make(steps, entrant.batch, np.random.default_rng(0)))
        for rate in sorted({*RATES, *documented}):
            finite, objectives = run(jnp.float32(rate), *stream)
            highest = float(np.max(np.asarray(objectives))) / np.log(LABELS)
            yield Outcome(name, kind, rate, rate == entrant.documented, bool(finite), highest)


def run(steps: int, show: Callable[[str], None]) -> list[Row]:
    """A row for each transform. The worst is the highest objective at the documented rate, in zero models."""
    rows = []
    for name in TRANSFORMS:
        found = []
        for outcome in outcomes(name, steps):
            found.append(outcome)
            show(f"{name}, {outcome.stream}, rate {outcome.rate:g}: {outcome.highest:.3g} times the zero model")
        failures = tuple(outcome.failure() for outcome in found if not outcome.holds())
        documented = [outcome.highest for outcome in found if outcome.documented]
        worst = float(np.max(documented)) if documented else None
        rows.append(Row(name, len(found), len(failures), worst, HIGHEST, failures))
    return rows
