"""Bounds in float32 against the functions they bound in long double, with rows and points chosen to do harm.

A check is one bound at one point. It is violated if the bound is NaN, or lies below the function by more than

    ALLOWANCE eps T,   T = the sum of the absolute values of all that the bound is a sum of:

the largest logit at the point of contact (for features, of the absolute values of the products that it sums), the terms
of the slope, and the bound itself, whose quadratic term is the rest. At the point of contact a bound must not lie above
the function by more than that, either. No sum in floating point can promise an error below eps times what it sums;
docs/theory.md, section 13, has the reason for the multiple. The unit of the column "worst" is eps T.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import qbound
from experiments.soak_rows import Row
from qbound.families.low_rank.bound import Method

__all__ = ["ALLOWANCE", "log_sum_exp", "run"]

ALLOWANCE = 16.0
EPS = float(np.finfo(np.float32).eps)
LABELS = (3, 2, 10, 64, 500)
BATCH = 8192
# Of all checks: global bounds of logits, local ones, those of features, low-rank ones.
SHARES = {"global": 0.54, "local": 0.25, "features": 0.01, "low rank": 0.2}
RADIUS = 88.0  # the largest at which a local bound is not Böhning's


class Problem(NamedTuple):
    """Features of which many are repeated: (examples, labels, parameters), rank, and how many examples differ."""

    m: int
    n: int
    d: int
    k: int
    distinct: int


# Small ones first: few checks are made of these alone. Both kinds of chunks, of 2^14 and of 2^17 rows, are exceeded.
PROBLEMS = (
    Problem(20, 4, 6, 2, 20),
    Problem(3000, 3, 4, 4, 2),
    Problem(30_000, 2, 1, 1, 1),
    Problem(100_000, 2, 2, 1, 3),
    Problem(2000, 6, 30, 5, 100),
    Problem(150_000, 2, 3, 3, 1),
)
POINTS = 2000


def run(checks: int, show: Callable[[str], None]) -> list[Row]:
    """About `checks` checks of all bounds, in a row for each kind."""
    tallies: dict[str, _Tally] = {}
    for family, share in SHARES.items():
        for name, *outcome in _FAMILIES[family](max(1, round(share * checks)), np.random.default_rng(0)):
            tallies.setdefault(name, _Tally(name)).add(*outcome)
            show(f"{name}, {tallies[name].checks:,} checks, worst {tallies[name].worst:.2f} eps")
    return [tally.row() for tally in tallies.values()]


class _Tally:
    """Of one kind of bound."""

    def __init__(self, name: str):
        self.name, self.checks, self.violations, self.worst = name, 0, 0, 0.0

    def add(self, found: np.ndarray, exact: np.ndarray, size: np.ndarray, touches: np.ndarray) -> None:
        """Add bounds, what they bound, T, and whether it is at the point of contact."""
        with np.errstate(invalid="ignore"):
            short = np.where(touches, np.abs(exact - found), exact - found)
            # T is 0 only where everything is.
            units = np.where(short <= 0, 0, short / (EPS * np.where(size > 0, size, 1)))
        units = np.where(np.isnan(found), np.inf, np.where(found == np.inf, 0, units))
        self.checks += units.size
        self.violations += int(np.sum(~(units <= ALLOWANCE)))
        self.worst = max(self.worst, float(units.max()))

    def row(self) -> Row:
        return Row(self.name, self.checks, self.violations, self.worst, ALLOWANCE)


# What `_Tally.add` takes, alone and with the name of the bound.
Judged = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Outcome = tuple[str, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def log_sum_exp(x: np.ndarray) -> np.ndarray:
    """Over the last axis, in long double; -inf removes a label."""
    x = np.asarray(x, np.longdouble)
    largest = np.max(x, axis=-1, keepdims=True)
    return np.log(np.sum(np.exp(x - largest), axis=-1)) + largest[..., 0]


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, in long double."""
    x = np.asarray(x, np.longdouble)
    p = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return p / np.sum(p, axis=-1, keepdims=True)


# Bounds of logits


def _rows(rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    """Logits, of every kind that has done harm or might."""
    size = rng.choice([1e-30, 1e-4, 1e-2, 1.0, 10.0, 100.0, 1e4, 1e10, 1e30], size=(count, 1))
    normal = rng.normal(size=(count, n))
    first = np.arange(n)[None, :] == rng.integers(n, size=(count, 1))
    height = rng.choice([1.0, 17.0, 80.0, 88.5, 103.0, 200.0, 1e6], size=(count, 1))
    kinds = [
        size * normal,  # of any size
        np.broadcast_to(size * normal[:, :1], (count, n)),  # constant
        normal[:, :1] * size + 1e-7 * size * normal,  # ties but for rounding
        np.where(first, 0, -height + 0.1 * normal),  # one dominates
        np.where(first, -height, normal),  # one is nearly gone
        np.where(rng.random((count, n)) < 0.4, -height, normal),  # many are
        np.where((rng.random((count, n)) < 0.3) & ~first, -np.inf, 3 * normal),  # removed
        size ** rng.random((count, n)) * normal,  # sizes far apart
    ]
    return np.stack(kinds)[rng.integers(len(kinds), size=count), np.arange(count)].astype(np.float32)


def _points(rng: np.random.Generator, h: np.ndarray) -> np.ndarray:
    """A point for each row: near, far, turned round, another row; sometimes the point of contact."""
    count, n = h.shape
    finite = np.where(np.isinf(h), 0, h).astype(np.float64)
    normal = rng.normal(size=(count, n))
    one = np.arange(n)[None, :] == rng.integers(n, size=(count, 1))
    kinds = [
        finite,
        finite + 10.0 ** rng.uniform(-7, 0, size=(count, 1)) * normal,
        finite * (1 + 10.0 ** rng.uniform(-7, 0, size=(count, 1)) * normal),
        finite + 10.0 ** rng.uniform(0, 3, size=(count, 1)) * normal,
        finite + 10.0 ** rng.uniform(3, 37, size=(count, 1)) * np.clip(normal, -3, 3),
        finite + one * rng.uniform(-100, 100, size=(count, 1)),
        -finite,
        finite[:, ::-1],
        np.where(np.isinf(other := _rows(rng, count, n)), 0, other),
    ]
    return np.stack(kinds)[rng.integers(len(kinds), size=count), np.arange(count)].astype(np.float32)


def _batches(checks: int, kinds: int) -> Iterator[tuple[int, int]]:
    """How many checks to make at a time of each kind, and of how many labels."""
    each = -(-checks // kinds)
    for number in range(-(-each // BATCH)):
        yield min(BATCH, each), LABELS[number % len(LABELS)]


def _judge(h: np.ndarray, x: np.ndarray, found: np.ndarray) -> Judged:
    """For one point of each row."""
    removed = np.isinf(h)
    x_there = np.where(removed, -np.inf, x.astype(np.longdouble))
    delta = np.where(removed, 0, x.astype(np.longdouble) - np.where(removed, 0, h))
    size = np.max(np.abs(np.where(removed, 0, h)), axis=1) + np.sum(softmax(h) * np.abs(delta), axis=1)
    found = found.astype(np.longdouble)
    return found, log_sum_exp(x_there), size + np.abs(found), ~np.any(delta != 0, axis=1)


def _global(checks: int, rng: np.random.Generator) -> Iterator[Outcome]:
    make = {
        f"log_partition_bound, {order}": functools.partial(qbound.log_partition_bound, order=order)
        for order in ("descending", "max_first", "given")
    } | {"bohning_bound": qbound.bohning_bound}
    evaluate = {name: jax.jit(jax.vmap(lambda h, x, make=make: make(h)(x))) for name, make in make.items()}
    for count, n in _batches(checks, len(make)):
        for name, function in evaluate.items():
            h = _rows(rng, count, n)
            x = _points(rng, h)
            yield name, *_judge(h, x, np.asarray(function(h, x)))


def _local(checks: int, rng: np.random.Generator) -> Iterator[Outcome]:
    """At the edge of the radius: each point has the smallest that contains it, and some a larger one."""
    evaluate = jax.jit(jax.vmap(lambda h, x, r: qbound.local_bound(h, r)(x)))
    for count, n in _batches(checks, 1):
        h = _rows(rng, count, n)
        x = _points(rng, h)
        # Most points are moved towards the row, to a radius of up to the largest.
        asked = rng.choice([0.01, 0.5, 2.0, 20.0, 52.0, 80.0, 85.0, RADIUS, np.inf], size=count)
        share = np.minimum(1, 0.999 * asked / np.maximum(_displaced(h, x), 1e-30))
        finite = np.where(np.isinf(h), 0, h).astype(np.longdouble)
        x = (finite + share[:, None] * (x - finite)).astype(np.float32)
        radius = np.nextafter(_displaced(h, x).astype(np.float32), np.float32(np.inf))
        found = np.asarray(evaluate(h, x, radius))
        within = radius <= RADIUS
        found, exact, size, touches = _judge(h, x, found)
        for name, chosen in (("local_bound", within), ("local_bound, beyond its largest radius", ~within)):
            if chosen.any():
                yield name, found[chosen], exact[chosen], size[chosen], touches[chosen]


def _displaced(h: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The size of a displacement, max(delta) - p.delta, in long double."""
    removed = np.isinf(h)
    delta = np.where(removed, 0, x.astype(np.longdouble) - np.where(removed, 0, h))
    mean = np.sum(softmax(h) * delta, axis=1)
    return np.maximum(np.max(np.where(removed, -np.inf, delta - mean[:, None]), axis=1), 0)


# Bounds of features


class _Example(NamedTuple):
    """Features in float32, of which `distinct` come again and again, and where to expand."""

    features: np.ndarray
    distinct: np.ndarray
    counts: np.ndarray
    theta: np.ndarray


def _example(rng: np.random.Generator, problem: Problem) -> _Example:
    shape = (problem.distinct, problem.n, problem.d)
    size = rng.choice([1e-3, 1.0, 1.0, 30.0])
    kind = rng.integers(5)
    distinct = size * rng.normal(size=shape)
    if kind == 1:
        distinct = size * rng.choice([-1.0, 1.0], size=shape)
    elif kind == 2:  # of one sign: sums do not cancel
        distinct = size * rng.uniform(0.1, 1, size=shape)
    elif kind == 3:  # parameters of different sizes
        distinct = distinct * np.logspace(0, -3, problem.d)
    elif kind == 4:  # examples of different sizes
        distinct = distinct * np.logspace(0, -3, problem.distinct)[:, None, None]
    distinct = distinct.astype(np.float32)
    index = np.arange(problem.m) % problem.distinct
    theta = rng.choice([0.0, 0.1, 1.0, 4.0]) * rng.normal(size=problem.d) / size
    return _Example(distinct[index], distinct, np.bincount(index), theta.astype(np.float32))


def _points_of(rng: np.random.Generator, example: _Example, count: int) -> np.ndarray:
    theta = example.theta.astype(np.float64)
    size = 10.0 ** rng.uniform(-6, 3, size=(count, 1)) / np.abs(example.distinct).max()
    points = theta + size * rng.normal(size=(count, theta.size))
    points[::4] = -points[::4]
    points[0], points[1] = theta, -theta
    return points.astype(np.float32)


def _judge_features(example: _Example, x: np.ndarray, found: np.ndarray) -> Judged:
    features = example.distinct.astype(np.longdouble)
    theta, weights = example.theta.astype(np.longdouble), example.counts / np.sum(example.counts)
    p = softmax(features @ theta)
    delta = x.astype(np.longdouble) - theta
    exact = np.zeros(len(x), np.longdouble)
    for w, f in zip(weights, features, strict=True):
        exact += w * log_sum_exp(x @ f.T)
    size = weights @ np.max(np.abs(features) @ np.abs(theta), axis=1)
    slope = np.abs(delta) @ np.einsum("j,jn,jnd->d", weights.astype(np.longdouble), p, np.abs(features))
    found = found.astype(np.longdouble)
    return found, exact, size + slope + np.abs(found), ~np.any(delta != 0, axis=1)


def _evaluated(
    checks: int, rng, make: dict[str, Callable[[Any, Any, int], Any]], problems, points
) -> Iterator[Outcome]:
    """Kinds of bounds in turn, each on every problem, until there are `checks` of them."""
    build = {name: jax.jit(function, static_argnums=2) for name, function in make.items()}
    evaluate = jax.jit(lambda bound, x: jax.lax.map(bound, x, batch_size=64))
    each, number = -(-checks // len(make)), 0
    count = min(points, each)
    while number * count < each:
        problem = problems[number % len(problems)]
        for name, function in build.items():
            example = _example(rng, problem)
            x = _points_of(rng, example, max(2, count))
            found = evaluate(function(example.features, example.theta, problem.k), x)
            yield name, *_judge_features(example, x, np.asarray(found))
        number += 1


def _features(checks: int, rng: np.random.Generator) -> Iterator[Outcome]:
    def mean(features, theta, rank):
        def one(f):
            return qbound.log_partition_bound(f @ theta).pullback(f, theta)

        return jax.vmap(one)(features).mean()

    def single(features, theta, rank):
        return qbound.partition_function_bound(theta, features[0])

    one = [problem._replace(m=1, distinct=1) for problem in PROBLEMS]
    yield from _evaluated(-(-checks // 2), rng, {"mean of pullbacks": mean}, PROBLEMS[:4], 200)
    yield from _evaluated(-(-checks // 2), rng, {"partition_function_bound": single}, one, 500)


def _low_rank(checks: int, rng: np.random.Generator) -> Iterator[Outcome]:
    def of_method(method: Method, features, theta, rank):
        return qbound.low_rank_bound(features, theta, rank=rank, method=method)

    methods: tuple[Method, ...] = ("frequent_directions", "exact", "paper")
    make = {f"low_rank_bound, {method}": functools.partial(of_method, method) for method in methods}
    yield from _evaluated(checks, rng, make, PROBLEMS, POINTS)


_FAMILIES = {"global": _global, "local": _local, "features": _features, "low rank": _low_rank}
