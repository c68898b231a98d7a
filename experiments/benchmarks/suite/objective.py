"""The objective in float64, and how far its least value can be below one that was found."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

__all__ = ["certified_gap", "objective", "objective_and_gradient_norm"]

# The most logits at a time, so that they stay in the cache.
BLOCK = 1 << 17


def objective(params: np.ndarray, inputs: np.ndarray, labels: np.ndarray, l2: float) -> float:
    """The mean log loss + l2/2 |W|^2, for W (d, n); NaN or infinite where a method has diverged."""
    params = np.asarray(params, np.float64)

    def loss(block) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            return float(_losses(*block)[0])

    # NumPy leaves the interpreter to others while it computes: a thread for every core.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        losses = sum(threads.map(loss, _blocks(inputs, labels, params)))
    with np.errstate(over="ignore", invalid="ignore"):
        return float(losses / len(labels) + l2 / 2 * np.sum(params**2))


def objective_and_gradient_norm(params, inputs, labels, l2) -> tuple[float, float]:
    """And the Euclidean norm of its gradient."""
    params = np.asarray(params, np.float64)
    losses, gradient = 0.0, np.zeros_like(params)
    for x, y, _ in _blocks(inputs, labels, params):
        loss, exponentials, total = _losses(x, y, params)
        p = exponentials / total
        p[np.arange(len(y)), y] -= 1
        losses += loss
        gradient += x.T @ p
    gradient = gradient / len(labels) + l2 * params
    return float(losses / len(labels) + l2 / 2 * np.sum(params**2)), float(np.linalg.norm(gradient))


def certified_gap(gradient_norm: float, l2: float) -> float:
    """The objective is at most so much above its least value: it is l2-strongly convex."""
    return gradient_norm**2 / (2 * l2)


def _blocks(inputs, labels, params):
    size = max(1, BLOCK // max(params.shape))
    for start in range(0, len(labels), size):
        yield inputs[start : start + size], labels[start : start + size], params


def _losses(x, y, params):
    """Their sum, the exponentials of logits from the largest of each row on, and their sums."""
    h = x.astype(np.float64, copy=False) @ params
    # Measured from what was observed, logits lose no digits of the loss. In place: arrays of many labels are large.
    observed = h[np.arange(len(y)), y][:, None]
    largest = h.max(axis=1, keepdims=True)
    h -= largest
    exponentials = np.exp(h, out=h)
    total = exponentials.sum(axis=1, keepdims=True)
    return np.sum(largest - observed + np.log(total)), exponentials, total
