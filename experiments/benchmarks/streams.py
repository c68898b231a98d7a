"""How near `partial_fit` comes to `fit` on data with many columns, in random order and sorted by label.

    python -m experiments.benchmarks.streams [--penalty P]

Prints log losses on the training data after 1, 2 and 5 passes in parts of 1,000, and by how much the objective exceeds
that of `fit`. The penalty is P / examples; 1 by default.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from sklearn.feature_extraction.text import TfidfTransformer

from qbound.estimator import LogisticRegression

__all__ = ["DATA", "Result", "main", "streamed"]

PART, PASSES = 1000, (1, 2, 5)


class Result(NamedTuple):
    """Log losses after some passes, and the last objective over that of `fit`, less 1."""

    losses: list[float]
    excess: float


def _labels(z: np.ndarray, labels: int, rng: np.random.Generator) -> np.ndarray:
    """By a random linear model, whose logits vary by 3, and Gumbel noise."""
    weights = 3 * rng.normal(size=(z.shape[1], labels)) / np.sqrt(np.mean(np.sum(z**2, axis=1)))
    h = z @ weights
    h = h - h.mean(axis=0)
    return np.argmax(h + rng.gumbel(size=h.shape), axis=1)


def dense(rows: int = 6000, columns: int = 3000) -> tuple[Any, np.ndarray]:
    """Columns of mean 2 and variance 1."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(rows, columns))
    return (z + 2).astype(np.float32), _labels(z, 4, rng)


def zipf(rows: int = 6000, columns: int = 3000) -> tuple[Any, np.ndarray]:
    """Counts; column j is not 0 in 3/j of all rows."""
    rng = np.random.default_rng(0)
    there = rng.random((rows, columns)) < np.minimum(1, 3 / np.arange(1, columns + 1.0))
    x = there * (1 + rng.poisson(1.0, size=(rows, columns)))
    return x.astype(np.float32), _labels(x.astype(float), 4, rng)


def tfidf(rows: int = 5000, columns: int = 19_488) -> tuple[Any, np.ndarray]:
    """Documents of about 100 words by Zipf's law, a third of them by that of one of 20 labels."""
    rng = np.random.default_rng(0)
    common = 1 / np.arange(1, columns + 1.0)
    common /= common.sum()
    labels = rng.integers(20, size=rows)
    own = np.stack([common * np.exp(1.5 * rng.normal(size=columns)) for _ in range(20)])
    own /= own.sum(axis=1, keepdims=True)
    lengths = np.maximum(5, (100 * np.exp(0.7 * rng.normal(size=rows))).astype(int))
    words = []
    for label, length in zip(labels, lengths, strict=True):
        k = rng.binomial(length, 0.35)
        words.append(np.concatenate([rng.choice(columns, k, p=own[label]), rng.choice(columns, length - k, p=common)]))
    place = np.repeat(np.arange(rows), lengths), np.concatenate(words)
    counts = scipy.sparse.csr_matrix((np.ones(lengths.sum(), np.float32), place), shape=(rows, columns))
    return TfidfTransformer().fit_transform(counts).astype(np.float32), labels


DATA: dict[str, Callable[[], tuple[Any, np.ndarray]]] = {
    "N(2, 1), 6,000 x 3,000, 4 labels": dense,
    "Zipf columns, 6,000 x 3,000, 4 labels": zipf,
    "tf-idf, 5,000 x 19,488, 20 labels": tfidf,
    "Zipf columns, 8,000 x 500, 4 labels": lambda: zipf(8000, 500),
}


def _loss(model: LogisticRegression, x: Any, labels: np.ndarray) -> float:
    return float(-np.mean(model.predict_log_proba(x)[np.arange(len(labels)), labels]))


def _objective(model: LogisticRegression, x: Any, labels: np.ndarray, l2: float) -> float:
    return _loss(model, x, labels) + l2 / 2 * float(np.sum(model.coef_.astype(float) ** 2))


def streamed(x: Any, labels: np.ndarray, l2: float, fitted: LogisticRegression, by_label: bool) -> Result:
    """A stream of all rows, in random order or one label after the other."""
    places = np.random.default_rng(1).permutation(len(labels))
    if by_label:
        places = places[np.argsort(labels[places], kind="stable")]
    x, labels = x[places], labels[places]
    model, losses = LogisticRegression(l2=l2, random_state=0), []
    for number in range(1, max(PASSES) + 1):
        for start in range(0, len(labels), PART):
            rows = slice(start, start + PART)
            model.partial_fit(x[rows], labels[rows], classes=fitted.classes_)
        if number in PASSES:
            losses.append(_loss(model, x, labels))
    return Result(losses, _objective(model, x, labels, l2) / _objective(fitted, x, labels, l2) - 1)


def main(arguments: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--penalty", type=float, default=1.0, help="l2, in 1 / examples; 1 by default")
    penalty = parser.parse_args(arguments).penalty
    print("| data | order | zero model | 1 pass | 2 passes | 5 passes | objective of `fit` exceeded by |")
    print("|---|---|---|---|---|---|---|")
    for name, make in DATA.items():
        x, labels = make()
        l2 = penalty / len(labels)
        fitted = LogisticRegression(l2=l2, random_state=0, max_iter=200).fit(x, labels)
        best = _objective(fitted, x, labels, l2)
        for by_label in (False, True):
            losses, excess = streamed(x, labels, l2, fitted, by_label)
            cells = [name, "by label" if by_label else "random", f"{np.log(len(fitted.classes_)):.2f}"]
            cells += [*(f"{loss:.3f}" for loss in losses), f"{100 * excess:.1f} % of {best:.3f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
