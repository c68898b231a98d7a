"""A run as a folder; one that has ended is read, and one that was interrupted is made again.

config.json        the run; its hash is in the name of the folder
environment.json   commit, whether files differed from it, versions, device; of peers the versions in their environment
metrics.jsonl      one record a line: step, seconds of training, losses and shares of errors
result.json        how the run ended, its seconds, and its last record
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.errors import UserError, writing
from experiments.networks.data import Problem, problem_of, save
from experiments.networks.environments import Failed, Peers
from experiments.networks.train import Outcome, Run, train
from experiments.networks.turns import Cost, take_turns
from experiments.runs import environment, read_json, write_json

__all__ = ["Laboratory", "folder_of", "read", "slug"]

REMOVE = "Remove it, and what it was of is made again"


def slug(label: str) -> str:
    """A label as the name of a folder."""
    return "".join(c if c.isalnum() else "_" for c in label.lower()).strip("_")


def folder_of(run: Any, parent: Path) -> Path:
    """Of a name that tells runs apart, and a hash that tells configurations apart."""
    return parent / f"{run.title}-{_hash(dataclasses.asdict(run))}"


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def read(folder: Path) -> Outcome | None:
    """None if the run has not ended."""
    if not (folder / "result.json").exists():
        return None
    found = read_json(folder / "result.json")
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records = [_with_nan(json.loads(line)) for line in lines]
        return Outcome(found["ended"], found["steps"], found["seconds"], found["compile_seconds"], records)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: expected the result of a run; found: {error!r}. {REMOVE}") from error


class Laboratory:
    """Where runs are made: data sets are read when first needed, peers in their environments, progress is shown.

    Args:
      folder: of the results.
      data_dir: of raw files, as `experiments.data.load` takes it.
      show: whether to print a line for every run.
      made_by: from a run, what it is trained on and a function that shows steps, to its outcome; None for `train`.
    """

    def __init__(
        self,
        folder: Path,
        data_dir: str | None = None,
        show: bool = True,
        made_by: Callable[..., Outcome] | None = None,
    ):
        self.folder, self._made_by = folder, made_by
        self._data_dir, self._show = data_dir, show
        self._processes = Peers(folder / "peers")
        self._began = time.monotonic()
        self._shown: set[Path] = set()
        self._problem = functools.lru_cache(maxsize=1)(problem_of)

    def perform(self, run: Any, parent: Path, label: str) -> tuple[Outcome, str]:
        """The outcome of a run and its folder, by its name under that of the results.

        Raises:
          Failed: the method could not be run; nothing is left of it, so that the next start tries again.
        """
        where = folder_of(run, parent / slug(label))
        found, made = read(where), False
        if found is None:
            found, made = self._make(run, where, label), True
        if where not in self._shown:
            self._shown.add(where)
            last = found.records[-1]
            self._line(
                f"{parent.name}, {label}: {run.learning_rate:g}, {run.schedule}, {found.steps} steps, seed {run.seed}: "
                f"loss {last['train_loss']:.4f}, of the test {last['test_loss']:.4f}, errors {last['test_error']:.2%}, "
                f"{found.seconds:.1f} s, {found.ended}{'' if made else ', made before'}"
            )
        return found, str(where.relative_to(self.folder))

    def _make(self, run: Any, where: Path, label: str) -> Outcome:
        with writing(where):
            where.mkdir(parents=True, exist_ok=True)
        write_json(where / "config.json", dataclasses.asdict(run))
        started, peer = environment(), run.environment
        if peer is None:
            problem = self.problem(run)
            with _one_line():
                outcome = (self._made_by or train)(run, problem, functools.partial(self._step, label, run.steps))
        else:
            answer = self._ask(peer, {"task": "train"}, {label: run})
            started = {**started, "versions": answer["versions"]}
            outcome = Outcome(**answer["outcome"])
        write_json(where / "environment.json", [started])
        with writing(where):
            lines = [json.dumps(_without_nan(record), allow_nan=False) for record in outcome.records]
            (where / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        result = {**outcome._asdict(), "metrics": _without_nan(outcome.records[-1])}
        write_json(where / "result.json", {name: value for name, value in result.items() if name != "records"})
        return outcome

    def costs(self, runs: Mapping[str, Run], parent: Path, reference: str, **how: int) -> dict[str, Cost]:
        """What their steps cost, in turns; peers take turns with the reference in their own environment."""
        ours = {label: run for label, run in runs.items() if run.method.environment is None}
        asked = {label: dataclasses.asdict(run) for label, run in runs.items()}
        path = parent / f"costs-{_hash([asked, reference, how])}.json"
        if path.exists():
            return {label: Cost(**cost) for label, cost in read_json(path)["costs"].items()}
        self._line(f"what a step costs: {', '.join(runs)}")
        one = runs[reference]
        found = take_turns(ours, self.problem(one), reference, **how)
        for label, run in runs.items():
            if run.method.environment is not None:
                with self.forgiving(label):
                    request = {"task": "turns", "reference": reference, **how}
                    answer = self._ask(run.method.environment, request, {reference: one, label: run})
                    found[label] = Cost(**answer["costs"][label])
        write_json(path, {"costs": {label: cost._asdict() for label, cost in found.items()}, **environment()})
        return found

    def problem(self, run: Any) -> Problem:
        """What a run is trained on; the last one is kept."""
        return self._problem(run.data_set, run.rows, run.network.positions, self._data_dir)

    @contextlib.contextmanager
    def forgiving(self, label: str):
        """What fails is said in one line, and the rest goes on."""
        try:
            yield
        except Failed as error:
            self._line(f"{label}: {error}")

    def _ask(self, peer: str, request: dict[str, Any], runs: Mapping[str, Run]) -> dict[str, Any]:
        run = next(iter(runs.values()))
        rows = self.folder / "peers" / f"{run.data_set}-{run.rows}-{run.network.positions}.npz"
        if not rows.exists():
            save(self.problem(run), rows)
        asked = {label: dataclasses.asdict(one) for label, one in runs.items()}
        return self._processes.call(peer, {**request, "rows": str(rows.absolute()), "runs": asked})

    def _step(self, label: str, steps: int, step: int) -> None:
        if self._show and sys.stdout.isatty():
            text = f"{self._minutes()}  {label}: step {step} of {steps}"
            print(f"\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}", end="\r", flush=True)

    def _line(self, text: str) -> None:
        if self._show:
            print(f"{chr(27) + '[2K' if sys.stdout.isatty() else ''}{self._minutes()}  {text}", flush=True)

    def _minutes(self) -> str:
        return f"{(time.monotonic() - self._began) / 60:6.1f} min"


@contextlib.contextmanager
def _one_line():
    """A method that cannot do what it is asked: not a mistake of the user's, and no reason to stop the others."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise Failed(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def _without_nan(record: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no word for numbers that are not finite but null."""
    return {name: value if math.isfinite(value) else None for name, value in record.items()}


def _with_nan(record: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in record.items()}
