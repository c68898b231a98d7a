"""A comparison of methods on one data set: what is compared, how each is tuned, and what is left of it in files.

Every method has a grid of the same size. Each setting is trained once, for a share of the method's epochs, on the
training rows without the validation rows. The penalty l2 belongs to the problem: it is the one with the best setting of
all methods, and every method then has its own best setting with that penalty, so that all curves are of one objective.
With these, every method is trained on all training rows, once for each seed; methods take turns within a seed.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

import qbound
from experiments.data import Data, load, with_intercept
from experiments.errors import UserError, writing
from experiments.fields import Checked, Count, Epochs, FolderName, NotNegative, Part, Positive, Share
from experiments.lock import alone_in, locked
from experiments.methods import Method, Schedule
from experiments.progress import Progress
from experiments.runs import REMOVE, Result, folder_of, perform, read_json, write_json
from experiments.train import Problem, Rows, Run

__all__ = ["Contender", "Experiment", "Setting", "grid", "perform_all", "problem_of", "slug"]

Select = Literal["validation", "test"]
RESERVED = ("least", "robustness")
VALIDATION_SEED = 0


@dataclasses.dataclass(frozen=True)
class Contender(Checked):
    """A method in a comparison, and what it is tuned over beside schedule and penalty."""

    label: str
    method: Method
    learning_rates: tuple[Positive, ...]
    epochs: Epochs
    chunk: Count  # steps to a compiled loop
    dampings: tuple[NotNegative, ...] = (0.0,)
    tuned_as: str | None = None  # the label of a contender whose setting is taken, where a step takes too long to tune


@dataclasses.dataclass(frozen=True)
class Experiment(Checked):
    """One data set, one size of batch."""

    name: FolderName  # of the folder under `output`
    data_set: str
    batch: Count
    contenders: tuple[Contender, ...]
    schedules: tuple[Schedule, ...]
    l2: tuple[NotNegative, ...]
    tuning_share: Share  # of its epochs that a contender is tuned with
    tuning_seconds: Positive  # of training, for each contender: shared by the settings of its grid
    seconds: Positive  # of training, for each contender: shared by its seeds
    seeds: Count
    select: Select = "validation"  # "test" is the choice of the paper, and flatters: labelled so
    validation: Part = 1 / 6  # of the training rows, held out while a contender is tuned
    intercept: bool = True
    least_tolerance: Positive = 1e-5  # gradient norm to which the least objective is found
    output: str = "results"

    def __post_init__(self):
        super().__post_init__()
        if self.name in RESERVED:
            raise ValueError(f"name: expected another than {', '.join(RESERVED)}, which have files of their own there")
        labels = [contender.label for contender in self.contenders]
        if len(set(labels)) < len(labels):
            raise ValueError(f"contenders: expected each label once; got {labels}")
        sizes = {c.label: len(c.learning_rates) * len(c.dampings) for c in self.contenders}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"contenders: expected grids of the same size; got {sizes}")
        tuned = [contender.label for contender in self.contenders if contender.tuned_as is None]
        for contender in self.contenders:
            if contender.tuned_as is not None and contender.tuned_as not in tuned:
                raise ValueError(
                    f"tuned_as: expected a contender that is tuned, of {tuned}; got {contender.tuned_as!r}"
                )


class Setting(NamedTuple):
    """What is tuned."""

    learning_rate: float
    schedule: Schedule
    l2: float
    damping: float


def grid(experiment: Experiment, contender: Contender) -> list[Setting]:
    """All settings of a contender."""
    return [
        Setting(*values)
        for values in itertools.product(
            contender.learning_rates, experiment.schedules, experiment.l2, contender.dampings
        )
    ]


def slug(label: str) -> str:
    """A label as the name of a folder."""
    return "".join(c if c.isalnum() else "_" for c in label.lower()).strip("_")


def problem_of(data: Data, split: str, validation: float, intercept: bool) -> Problem:
    """Training rows on the device, and what is held out."""
    inputs, test_inputs = data.train_inputs, data.test_inputs
    if intercept:
        inputs, test_inputs = with_intercept(inputs), with_intercept(test_inputs)
    test = _rows(test_inputs, data.test_labels)
    if split == "all":
        return Problem(_rows(inputs, data.train_labels), {"test": test}, data.classes)
    order = np.random.default_rng(VALIDATION_SEED).permutation(len(inputs))
    count = round(validation * len(order))
    if not 0 < count < len(order):
        raise UserError(f"validation: expected a share with rows in both parts, of {len(order)}; got {validation}")
    kept, held = np.split(order, [len(order) - count])
    kept, held = (_rows(inputs[which], data.train_labels[which]) for which in (np.sort(kept), np.sort(held)))
    return Problem(kept, {"validation": held, "test": test}, data.classes)


def _rows(inputs, labels) -> Rows:
    return Rows(jnp.asarray(inputs, jnp.float32), jnp.asarray(labels, jnp.int32))


def perform_all(experiment: Experiment, data_dir: str | None = None, show: bool = True) -> Path:
    """Tune and train every contender, write what was found to summary.json, and say where that is."""
    folder = Path(experiment.output) / experiment.name
    with alone_in(folder):
        return _perform_all(experiment, folder, data_dir, show)


def _perform_all(experiment: Experiment, folder: Path, data_dir: str | None, show: bool) -> Path:
    problems = _Problems(experiment, data_dir)
    tuned = [c for c in experiment.contenders if c.tuned_as is None]
    progress = Progress(
        experiment.name,
        len(tuned) * len(grid(experiment, tuned[0])) + experiment.seeds * len(experiment.contenders),
        show,
    )
    trials = {c.label: _tune(experiment, c, folder, problems, progress) for c in tuned}
    l2 = _choose_l2(experiment, trials)
    chosen = {label: _choose(experiment, found, l2) for label, found in trials.items()}
    problems.forget("tuning")
    least = _least_objective(experiment, l2, problems["all"])
    spent = dict.fromkeys((c.label for c in experiment.contenders), 0.0)
    runs: dict[str, list[str]] = {c.label: [] for c in experiment.contenders}
    for seed in range(experiment.seeds):
        for contender in experiment.contenders:
            label = contender.label
            if spent[label] >= experiment.seconds:
                progress.skip(f"{label}, seed {seed}: its seconds are used up")
                continue
            run = Run(
                **_shared(experiment, contender), **chosen[contender.tuned_as or label]._asdict(),
                split="all", epochs=contender.epochs, seconds=experiment.seconds / experiment.seeds, seed=seed,
            )  # fmt: skip
            where = folder_of(run, folder / slug(label))
            result = perform(run, problems["all"], where, progress.run(f"{label}, seed {seed}", run))
            progress.done(result)
            spent[label] += result.seconds
            runs[label].append(str(where.relative_to(folder)))
    write_json(
        folder / "summary.json",
        {
            "experiment": dataclasses.asdict(experiment),
            "l2": l2,
            "least_objective": least,
            "chosen": {c.label: chosen[c.tuned_as or c.label]._asdict() for c in experiment.contenders},
            "tuning_steps": {label: _median_steps(found) for label, found in trials.items()},
            "runs": runs,
        },
    )
    return folder / "summary.json"


class _Problems:
    """The rows of each split, read when first needed."""

    def __init__(self, experiment: Experiment, data_dir: str | None):
        self._experiment, self._data_dir = experiment, data_dir
        self._data: Data | None = None
        self._kept: dict[str, Problem] = {}

    def __getitem__(self, split: str) -> Callable[[], Problem]:
        def get() -> Problem:
            if split not in self._kept:
                e = self._experiment
                self._data = self._data or load(e.data_set, data_dir=self._data_dir)
                self._kept[split] = problem_of(self._data, split, e.validation, e.intercept)
            return self._kept[split]

        return get

    def forget(self, split: str) -> None:
        self._kept.pop(split, None)


def _shared(experiment: Experiment, contender: Contender) -> dict:
    """What all runs of a contender have in common."""
    return {
        "data_set": experiment.data_set,
        "validation": experiment.validation,
        "intercept": experiment.intercept,
        "batch": experiment.batch,
        "method": contender.method,
        "chunk": contender.chunk,
    }


def _tune(experiment, contender, folder, problems, progress) -> dict[Setting, Result]:
    """The result of each setting. All of them are tried: each may overrun its share of the seconds by one chunk."""
    settings = grid(experiment, contender)
    found = {}
    for i, setting in enumerate(settings):
        run = Run(
            **_shared(experiment, contender),
            **setting._asdict(),
            split="tuning",
            epochs=experiment.tuning_share * contender.epochs,
            seconds=experiment.tuning_seconds / len(settings),
            seed=0,
        )
        where = folder_of(run, folder / slug(contender.label))
        label = f"{contender.label}, setting {i + 1} of {len(settings)}"
        found[setting] = perform(run, problems["tuning"], where, progress.run(label, run))
        progress.done(found[setting])
    return found


def _score(experiment: Experiment, result: Result) -> float:
    """What is made small by tuning: the loss on the validation rows, or the paper's choice, the errors of the test."""
    value = result.metrics["validation_loss" if experiment.select == "validation" else "test_error"]
    return math.inf if result.ended == "diverged" or not math.isfinite(value) else value


def _choose_l2(experiment: Experiment, trials: dict[str, dict[Setting, Result]]) -> float:
    best = min(
        ((_score(experiment, result), setting.l2) for found in trials.values() for setting, result in found.items()),
        default=(math.inf, 0.0),
    )
    if best[0] == math.inf:
        raise UserError(f"{experiment.name}: every setting of every method diverged; give smaller learning_rates")
    return best[1]


def _choose(experiment: Experiment, found: dict[Setting, Result], l2: float) -> Setting:
    """The best setting with penalty l2; the first of equals."""
    with_l2 = {setting: result for setting, result in found.items() if setting.l2 == l2}
    return min(with_l2, key=lambda setting: _score(experiment, with_l2[setting]))


def _median_steps(found: dict[Setting, Result]) -> float:
    return float(np.median([result.step for result in found.values()]))


def _least_objective(experiment: Experiment, l2: float, problem: Callable[[], Problem]) -> float:
    """The minimum, by the full-batch method; kept in a file that all comparisons with this objective share."""
    end = "" if experiment.intercept else "-without-intercept"
    tolerance = experiment.least_tolerance
    # All digits of both: objectives that differ must not share a file.
    path = Path(experiment.output) / "least" / f"{experiment.data_set}-{l2!r}-{tolerance!r}{end}.json"
    waiting = f"{path.stem}: waiting for another process that looks for its least objective"
    with contextlib.ExitStack() as stack:
        # Comparisons of other names may need the same one.
        with writing(path.parent):
            stack.enter_context(locked(path.with_suffix(".lock"), lambda _: print(waiting, flush=True)))
        if not path.exists():
            write_json(path, _find_least(path.stem, l2, tolerance, problem))
        try:
            return float(read_json(path)["objective"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{path}: expected an objective; found: {error!r}. {REMOVE}") from error


def _find_least(name: str, l2: float, tolerance: float, problem: Callable[[], Problem]) -> dict[str, float]:
    rows, classes = problem().train, problem().classes
    params = jnp.zeros((rows.inputs.shape[1], classes), jnp.float32)
    _, info = qbound.mm.run(qbound.linear_logits, params, *rows, l2=l2, tolerance=tolerance, throw=False)
    if info.gradient_norm > tolerance:
        print(f"note: the least objective of {name} was found to a gradient norm of {info.gradient_norm:.1e} only")
    return {"objective": float(info.objective), "gradient_norm": float(info.gradient_norm), "steps": int(info.steps)}
