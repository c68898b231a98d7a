"""Problems of a moment, and a summary written by hand."""

import numpy as np

from experiments.benchmarks.suite.optimum import find
from experiments.benchmarks.suite.problem import Problem

L2 = 1e-2


def rows(classes: int, examples: int = 800, inputs: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Inputs with a 1 at their end, and labels of all classes."""
    random = np.random.default_rng(classes)
    x = random.normal(size=(examples, inputs)).astype(np.float32)
    x[:, -1] = 1
    labels = np.argmax(x[:, :classes] + random.normal(size=(examples, classes)), axis=1)
    return x, labels.astype(np.int32)


def problem(classes: int, seconds: float = 60.0) -> tuple[Problem, float]:
    """And its least objective."""
    x, y = rows(classes)
    least = find(x, y, L2)["objective"]
    return Problem("small", x, y, classes, L2, goal=least * (1 + 1e-6), seconds=seconds), least


def method(seconds, ended, *, passes=None, messages=()):
    """What a summary has of a method in the heats of a problem."""
    return {
        "seconds": seconds,
        "passes": passes or [None if s is None else 10 * s for s in seconds],
        "settings": [None if s is None else 0 for s in seconds],
        "compile_seconds": 1.5,
        "limit": 2.5,
        "ended": ended,
        "messages": list(messages),
    }


ENDED = {"ended": {"limit": 3}, "messages": []}
SUMMARY = {
    "targets": [1e-1, 1e-6],
    "environment": {"machine": "Linux", "processor": "EPYC", "device": "cpu, 2 cores", "commit": "abc", "dirty": False},
    "commits": ["abc"],
    "versions": {"jax": "jax==0.9.2", "cyanure": "not installed: pip install cyanure: no wheel"},
    "problems": [
        {
            "data": "digits",
            "l2": 1e-4,
            "optimum": {"objective": 0.1},
            "methods": {
                "estimator": method([0.1, 0.2], {"reached": 1}),
                "kspfb": method([0.05, None], {"finished": 3}),
                "adam": method([0.2, None], {"finished": 8, "diverged": 1}),
                "scikit_learn_lbfgs": method([0.4, 0.3], {"reached": 1}),
            },
            "finals": [
                {"method": "kspfb", "setting": 0, "seconds": [[0.05, None], [0.1, None], [0.06, None]], **ENDED},
                {"method": "estimator", "setting": 0, "seconds": [[0.1, 0.2], [0.1, 0.4], [0.1, 0.2]], **ENDED},
                {"method": "adam", "setting": 2, "seconds": [[0.2, None], [0.2, None], [0.3, None]], **ENDED},
                {"method": "scikit_learn_lbfgs", "setting": 0, "seconds": [[0.4, 0.1]] * 2 + [[0.4, 0.3]], **ENDED},
            ],
        },
        {
            "data": "kmnist",
            "l2": 1e-4,
            "optimum": {"objective": 0.5},
            "methods": {
                "estimator": method([1.0, None], {"limit": 1}),
                "somax_egn": method([None, None], {"killed": 1}, messages=["no answer in 150 s"]),
            },
            "finals": [{"method": "estimator", "setting": 0, "seconds": [[1.0, None]], **ENDED}],
        },
    ],
}  # fmt: skip
