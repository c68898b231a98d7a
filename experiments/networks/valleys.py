"""Wide valleys: test error against the weight of the trace of the curvature in the loss, beside SAM.

Every run is AdamW with the same number of steps. One part of them minimises

    loss(theta) + w trace(theta),     trace = the mean over a batch of tr J_j'M_jJ_j, by one random probe a step

for several weights w, the other the loss at the worst point within a radius: sharpness-aware minimisation, SAM (Foret
et al., arXiv:2010.01412). Weight and radius 0 are AdamW itself. At the end of a run many probes measure the trace.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qbound
from experiments.fields import Checked, Count, FolderName, NotNegative, Positive, Seed
from experiments.lock import alone_in
from experiments.networks.data import TITLES, DataSet, Problem, batches, some
from experiments.networks.methods import Schedule, learning_rate, numbers
from experiments.networks.models import Kind, Network
from experiments.networks.report import versions
from experiments.networks.runs import Laboratory
from experiments.networks.train import Outcome, check_batch, evaluate, loss
from experiments.plots import panels, save
from experiments.runs import read_json, write_json
from experiments.train import batch_rows

__all__ = ["Valleys", "ValleyRun", "draw", "in_small", "perform_all", "table", "trace", "train"]

Penalty = Literal["trace", "sam"]
PENALTIES: tuple[Penalty, ...] = ("trace", "sam")
NAMES = {"trace": "weight of the trace", "sam": "radius of SAM"}
# Examples and probes of the trace at the end.
MEASURED, PROBES = 2000, 20


@dataclasses.dataclass(frozen=True)
class Valleys(Checked):
    """The experiment; fields that `Rates` has are the same here.

    Attributes:
      weights: of the trace in the loss.
      radii: of SAM.
    """

    name: FolderName
    network: Kind
    sizes: tuple[Count, ...]
    data_sets: tuple[DataSet, ...]
    rows: Count
    evaluated: Count
    batch: Count
    steps: Count
    schedule: Schedule
    learning_rate: Positive
    weight_decay: NotNegative
    weights: tuple[NotNegative, ...]
    radii: tuple[NotNegative, ...]
    seeds: tuple[Seed, ...] = (1, 2, 3, 4, 5)
    output: str = "results/networks"

    def __post_init__(self):
        super().__post_init__()
        Network(self.network, self.sizes)
        for name in ("weights", "radii"):
            if list(getattr(self, name)) != sorted(set(getattr(self, name))):
                raise ValueError(f"{name}: expected rising numbers; got {getattr(self, name)}")

    def strengths(self, penalty: Penalty) -> tuple[float, ...]:
        """Of a penalty, 0 first: without it."""
        return (0.0, *(x for x in (self.weights if penalty == "trace" else self.radii) if x > 0))


@dataclasses.dataclass(frozen=True)
class ValleyRun:
    """Everything that decides a result; `strength` is of the penalty."""

    network: Network
    data_set: DataSet
    rows: int
    evaluated: int
    batch: int
    steps: int
    schedule: Schedule
    learning_rate: float
    weight_decay: float
    penalty: Penalty
    strength: float
    seed: int

    @property
    def title(self) -> str:
        """What tells it from others of its penalty."""
        return f"{self.strength:g}-seed{self.seed}"

    @property
    def environment(self) -> None:
        """It needs no packages of its own."""
        return None


class _Step(NamedTuple):
    """What a program is compiled for."""

    network: Network
    penalty: Penalty
    weight_decay: float


def in_small(valleys: Valleys, data_set: DataSet) -> Valleys:
    """A look at everything in seconds, and nothing to conclude from."""
    return dataclasses.replace(
        valleys, sizes=(16,), data_sets=(data_set,), rows=1000, evaluated=300, batch=50, steps=20,
        weights=valleys.weights[-1:], radii=valleys.radii[-1:], seeds=valleys.seeds[:2],
    )  # fmt: skip


def perform_all(
    valleys: Valleys, data_dir: str | None = None, peers: frozenset[str] = frozenset(), show: bool = True
) -> Path:
    """Make every run, write what was found to summary.json, and say where that is; `peers` has no meaning here."""
    del peers
    folder = Path(valleys.output) / valleys.name
    with alone_in(folder):
        laboratory = Laboratory(folder, data_dir, show, train)
        found: dict[str, Any] = {}
        for data_set in valleys.data_sets:
            found[data_set] = {}
            for penalty in PENALTIES:
                ends = found[data_set][penalty] = {}
                for strength in valleys.strengths(penalty):
                    ends[repr(strength)] = _ends(valleys, laboratory, data_set, penalty, strength)
        write_json(folder / "summary.json", {"valleys": dataclasses.asdict(valleys), "ends": found})
    return folder / "summary.json"


def _ends(valleys: Valleys, laboratory: Laboratory, data_set: DataSet, penalty: Penalty, strength: float) -> dict:
    """For every measure a number of each seed; None where there is none."""
    # Without a penalty both are the same runs.
    penalty = penalty if strength > 0 else "trace"
    ends: dict[str, list[float | None]] = {}
    for seed in valleys.seeds:
        run = ValleyRun(
            network=Network(valleys.network, valleys.sizes), data_set=data_set, rows=valleys.rows,
            evaluated=valleys.evaluated, batch=valleys.batch, steps=valleys.steps, schedule=valleys.schedule,
            learning_rate=valleys.learning_rate, weight_decay=valleys.weight_decay, penalty=penalty,
            strength=strength, seed=seed,
        )  # fmt: skip
        label = f"{NAMES[penalty]} {strength:g}"
        outcome, _ = laboratory.perform(run, laboratory.folder / data_set, label)
        record = outcome.records[-1] | {"ms": 1e3 * outcome.seconds / outcome.steps}
        for name, value in record.items():
            ends.setdefault(name, []).append(value if math.isfinite(value) else None)
    return ends


def train(run: ValleyRun, problem: Problem, show: Any = lambda step: None) -> Outcome:
    """To its end. The clock runs in the steps alone; the first of them, thrown away, compiles."""
    check_batch(run, problem)
    params = run.network.first_params(run.seed, problem.train.inputs.shape[1], problem.classes)
    setting, what = (
        numbers(run.learning_rate, run.schedule, run.steps),
        _Step(run.network, run.penalty, run.weight_decay),
    )
    state = jax.tree.map(jnp.copy, _optimizer(what, setting, run.strength).init(params))
    strength, key = jnp.float32(run.strength), jax.random.key(run.seed)
    parts = {"train": some(problem.train, run.evaluated), "test": some(problem.test, run.evaluated)}
    which, seconds, step = batch_rows(len(problem.train.labels), run.batch, run.seed, range(run.steps)), 0.0, 0
    (first, *_), *_ = batches(problem.train, which[:1])
    compiled = _timed(lambda: _step(params, state, setting, strength, key, *first, what=what))[1]
    for ready in batches(problem.train, which):

        def some_steps(params, state, ready=ready, step=step):
            for i, (inputs, labels) in enumerate(ready):
                drawn = jax.random.fold_in(key, step + i)
                params, state = _step(params, state, setting, strength, drawn, inputs, labels, what=what)
            return params, state

        (params, state), took = _timed(functools.partial(some_steps, params, state))
        seconds, step = seconds + took, step + len(ready)
        show(step)
    record = {"step": step, "seconds": seconds, **evaluate(run.network, params, parts)}
    record["trace"] = trace(run.network, params, some(problem.train, MEASURED).inputs)
    ended = "finished" if math.isfinite(record["train_loss"]) else "diverged"
    return Outcome(ended, step, seconds, compiled, [record])


def _timed(function: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    return jax.block_until_ready(function()), time.perf_counter() - began


def _optimizer(what: _Step, setting: Any, radius: Any) -> optax.GradientTransformationExtraArgs:
    adamw = optax.adamw(learning_rate(setting), b2=0.98, weight_decay=what.weight_decay)
    if what.penalty == "trace":
        return optax.with_extra_args_support(adamw)
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(radius))
    return optax.contrib.sam(adamw, ascent, sync_period=2, opaque_mode=True)


@functools.partial(jax.jit, static_argnames="what")
def _step(params, state, setting, strength, key, inputs, labels, *, what: _Step):
    def objective(params, _=None):
        value = loss(what.network, params, inputs, labels)
        if what.penalty == "trace":
            value += strength * qbound.curvature_trace(what.network.logits, params, inputs, key)
        return value

    grad_fn = jax.grad(objective)
    rule = _optimizer(what, setting, strength)
    updates, state = rule.update(grad_fn(params), state, params, grad_fn=grad_fn)
    return optax.apply_updates(params, updates), state


def trace(network: Network, params: Any, inputs: np.ndarray) -> float:
    """Of the curvature of the bound, the mean over rows, by many probes."""
    estimate = jax.jit(lambda params, inputs: qbound.curvature_trace(
        network.logits, params, inputs, jax.random.key(0), probes=PROBES
    ))  # fmt: skip
    return float(estimate(params, jnp.asarray(inputs)))


# What was found.


def table(path: Path) -> str:
    """For each data set a row for each strength, means and standard deviations over seeds, in Markdown."""
    summary = read_json(path)
    rows = []
    for data_set, penalties in summary["ends"].items():
        seeds = len(summary["valleys"]["seeds"])
        rows += [
            f"### {TITLES[data_set]}, {summary['valleys']['rows']:,} rows, {seeds} seeds", "",
            "| | test error | test loss | training loss | trace at the end | ms per step |",
            "|---|---|---|---|---|---|",
        ]  # fmt: skip
        for penalty in PENALTIES:
            for strength, ends in penalties[penalty].items():
                if float(strength) == 0 and penalty == "sam":
                    continue
                name = "AdamW" if float(strength) == 0 else f"{NAMES[penalty]} {float(strength):g}"
                percent = [None if x is None else 100 * x for x in ends["test_error"]]
                cells = (
                    name, f"{_spread(percent, '.2f')} %", _spread(ends["test_loss"], ".3f"),
                    _spread(ends["train_loss"], ".3g"), _spread(ends["trace"], ".3g"),
                    _spread(ends["ms"], ".2f", with_deviation=False),
                )  # fmt: skip
                rows.append("| " + " | ".join(cells) + " |")
        rows.append("")
    return "\n".join(rows).rstrip()


def _spread(values: list[float | None], form: str, with_deviation: bool = True) -> str:
    kept = [value for value in values if value is not None]
    if not kept:
        return "no number"
    if not with_deviation:
        return f"{np.median(kept):{form}}"
    text = f"{np.mean(kept):{form}} ± {_deviation(kept):{form}}"
    return text if len(kept) == len(values) else f"{text}, {len(values) - len(kept)} of {len(values)} without a number"


def _deviation(values: list[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def draw(path: Path) -> Path:
    """A row for each data set: test error against the trace at the end, and against training loss."""
    summary = read_json(path)
    figure, axes = panels(len(summary["ends"]), 2, height=3.4)
    looks: Mapping[str, Any] = {
        "trace": {"color": "#0072B2", "marker": "s"}, "sam": {"color": "#D55E00", "marker": "^", "linestyle": "--"},
    }  # fmt: skip
    handles = {}
    for (data_set, penalties), (left, right) in zip(summary["ends"].items(), axes, strict=True):
        for penalty in PENALTIES:
            ends = list(penalties[penalty].values())
            error = np.array([_mean(one["test_error"]) for one in ends])
            spread = [_deviation([x for x in one["test_error"] if x is not None]) for one in ends]
            for axis, name in ((left, "trace"), (right, "train_loss")):
                x = [_mean(one[name]) for one in ends]
                handles[NAMES[penalty]] = axis.errorbar(
                    x, 100 * error, yerr=100 * np.array(spread), capsize=2, markersize=4, **looks[penalty]
                )
        for axis, name in ((left, "trace of the curvature at the end"), (right, "training loss at the end")):
            plain = penalties["trace"]["0.0"]
            x = _mean(plain["trace" if axis is left else "train_loss"])
            handles["AdamW"] = axis.plot([x], [100 * _mean(plain["test_error"])], "o", color="black", zorder=5)[0]
            axis.set(xscale="log", xlabel=name)
            axis.grid(alpha=0.25)
        left.set_ylabel("test error, %")
        left.set_title(TITLES[data_set], loc="left", fontsize=10)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{summary['valleys']['network']}; {versions(path)}", fontsize=8, color="#555555")
    return save(figure, str(path.parent / "valleys.png"))


def _mean(values: list[float | None]) -> float:
    return float(np.mean([math.nan if value is None else value for value in values]))
