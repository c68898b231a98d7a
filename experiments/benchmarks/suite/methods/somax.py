"""Somax (Korbit and Zanon 2026): Gauss-Newton and Newton methods for JAX, https://github.com/cor3bit/somax.

Its cross-entropy curvature has no penalty, and its weight decay acts on the direction and so moves the optimum: the
penalty is added here to the operator, which is what the library's parts are made for.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import somax
from somax.curvature.base import RowOperator
from somax.curvature.ggn_ce import GGNCE

from experiments.benchmarks.suite.problem import Checkpoint, Problem, Ready, batch_size, blocks

__all__ = ["egn", "newton_cg", "sgn"]

# The library's CG divides by max(p'Ap, 1.2e-7) in float32, so it stalls once gradients are small. An objective
# multiplied by this, and its damping with it, has the same steps and stays far from that floor.
_SCALE = 1e6

Array = jax.Array
Params = dict[str, Array]  # {"w": W}: the library compares gradients to (), which fails for a bare array.


def egn(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """Gauss-Newton on batches, solved exactly in the space of m n logits.

    Settings: `rate`, `epochs`, `damping`, `corrected` (see _corrected_rows), and `batch`: a step costs (m n)^3, so
    that it needs smaller batches than the others. Their blocks are cut into these.
    """
    size = min(setting.get("batch", max(1, 200 // problem.classes)), batch_size(len(problem.labels)))
    damping = setting.get("damping", 1e-1) + problem.l2
    method = somax.egn_ce(
        predict_fn=_logits,
        lam0=damping,
        learning_rate=_rate(problem, setting, size),
        weight_decay=problem.l2 / damping,  # The other half of what _PenalisedRows does.
    )
    method.op = _PenalisedRows(problem.l2 / damping, corrected=setting.get("corrected", True))
    # The library makes its matrix by a product with the Jacobian and one with its transpose for each of m n unit
    # vectors; the gradient and the direction are two more products, which is one more pair.
    products = size * problem.classes + 1
    return _stochastic(problem, setting, seed, method, size, lambda info: jnp.float32(products))


def sgn(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """Gauss-Newton on batches by CG.

    Settings: `rate`, `epochs`, `damping`, `adaptive` (damping by the gain ratio), `maxiter`, `tol` and `warm_start`
    of CG.
    """
    size = batch_size(len(problem.labels))
    method = somax.sgn_ce(
        predict_fn=_logits,
        learning_rate=_rate(problem, setting, size),
        **_damping(setting, 1e-3),
        **_cg(setting, maxiter=5, tol=1e-3, warm_start=True),
    )
    method.op = _Penalised(problem.l2)
    return _stochastic(problem, setting, seed, method, size, functools.partial(_products, method))


def newton_cg(problem: Problem, setting: Mapping[str, Any], seed: int) -> Iterator[Ready | Checkpoint]:
    """Newton by CG on the whole data, where the gain ratio that adapts the damping is exact.

    The library has no line search and never refuses a step.

    Settings: `rate`, `damping` (the first), `adaptive`, `maxiter`, `tol` and `warm_start` of CG.
    """
    method = somax.newton_cg(
        loss_fn=lambda params, batch: _SCALE * _objective(problem.l2, params, batch),
        learning_rate=setting.get("rate", 1.0),
        **_damping({"adaptive": True, **setting}, 1e-3),
        **_cg(setting, maxiter=50, tol=0.3, warm_start=False),
    )
    batch = {"x": jnp.asarray(problem.inputs), "y": jnp.asarray(problem.labels)}

    @jax.jit
    def step(params: Params, state: Any, key: Array, batch: Mapping[str, Array]) -> tuple[Params, Any, Array]:
        params, state, info = method.step(params, batch, state, key)
        return params, state, _products(method, info)

    key = jax.random.key(seed)
    params, state = _start(problem, method)
    started = time.perf_counter()
    jax.block_until_ready(step(params, state, key, batch))
    yield Ready(time.perf_counter() - started)
    yield Checkpoint(0.0, 0.0, params["w"])
    seconds = passes = 0.0
    while True:
        started = time.perf_counter()
        params, state, products = jax.block_until_ready(step(params, state, key, batch))
        seconds += time.perf_counter() - started
        passes += float(products)
        yield Checkpoint(seconds, passes, params["w"])


def _stochastic(
    problem: Problem,
    setting: Mapping[str, Any],
    seed: int,
    method: somax.SecondOrderMethod,
    size: int,
    products: Callable[[Mapping[str, Array]], Array],
) -> Iterator[Ready | Checkpoint]:
    """Chunks of steps on batches of `size` rows, each chunk one program; `products` counts those of one step."""
    inputs, labels = jnp.asarray(problem.inputs), jnp.asarray(problem.labels)
    key = jax.random.key(seed)

    @jax.jit
    def chunk(params: Params, state: Any, starts: Array, inputs: Array, labels: Array) -> tuple[Params, Any, Array]:
        def one(carry: tuple[Params, Any], start: Array) -> tuple[tuple[Params, Any], Array]:
            x = jax.lax.dynamic_slice_in_dim(inputs, start, size)
            y = jax.lax.dynamic_slice_in_dim(labels, start, size)
            params, state, info = method.step(carry[0], {"x": x, "y": y}, carry[1], key)
            return (params, state), products(info)

        (params, state), counts = jax.lax.scan(one, (params, state), starts)
        return params, state, counts.sum()

    length = _chunk_length(problem, size)
    params, state = _start(problem, method)
    started = time.perf_counter()
    jax.block_until_ready(chunk(params, state, jnp.zeros(length, jnp.int32), inputs, labels))
    yield Ready(time.perf_counter() - started)
    yield Checkpoint(0.0, 0.0, params["w"])
    places = _places(len(problem.labels), size, seed)
    seconds = passes = 0.0
    chunks = range(_steps(problem, setting, size) // length) if "epochs" in setting else itertools.count()
    for _ in chunks:
        started = time.perf_counter()
        starts = np.fromiter(itertools.islice(places, length), np.int32, length)
        params, state, counts = jax.block_until_ready(chunk(params, state, starts, inputs, labels))
        seconds += time.perf_counter() - started
        passes += float(counts) * size / len(problem.labels)
        yield Checkpoint(seconds, passes, params["w"])


def _places(examples: int, size: int, seed: int) -> Iterator[int]:
    """First rows of batches: the common blocks, each cut into as many whole batches as it holds."""
    for epoch in blocks(examples, seed):
        for start in epoch:
            yield from range(start, start + batch_size(examples) - size + 1, size)


def _epoch_steps(problem: Problem, size: int) -> int:
    examples = len(problem.labels)
    return (examples // batch_size(examples)) * (batch_size(examples) // size)


def _chunk_length(problem: Problem, size: int) -> int:
    return min(20, _epoch_steps(problem, size))


def _steps(problem: Problem, setting: Mapping[str, Any], size: int) -> int:
    """Steps of the whole schedule, rounded up to whole chunks."""
    length = _chunk_length(problem, size)
    return max(1, math.ceil(setting["epochs"] * _epoch_steps(problem, size) / length)) * length


def _rate(problem: Problem, setting: Mapping[str, Any], size: int) -> float | optax.Schedule:
    """Constant, or a cosine down to zero over the epochs of the setting."""
    rate = setting.get("rate", 0.1)
    return optax.cosine_decay_schedule(rate, _steps(problem, setting, size)) if "epochs" in setting else rate


def _damping(setting: Mapping[str, Any], default: float) -> dict[str, Any]:
    """The library's arguments for a damping of the unscaled objective."""
    damping = {"lam0": _SCALE * setting.get("damping", default)}
    if setting.get("adaptive", False):
        damping |= {"lam_policy": "trust_region", "lam_kwargs": {"min_lam": _SCALE * 1e-12, "max_lam": _SCALE * 1e6}}
    return damping


def _cg(setting: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The library's arguments for CG.

    By default it starts CG again after every 10 iterations for a fresh residual, which loses the conjugacy: without,
    newton_cg took about half as many passes.
    """
    options = {name: setting.get(name, default) for name, default in defaults.items()}
    return {**options, "stabilise_every": setting.get("stabilise_every", 0), "record_cg_stats": True}


def _products(method: somax.SecondOrderMethod, info: Mapping[str, Array]) -> Array:
    """Pairs of products with X and its transpose in one step that solves by CG."""
    solver = method.solver
    count = 1 + info["cg_iters"].astype(jnp.float32)
    if solver._do_stabilise:
        count += info["cg_iters"] // solver._stabilise_every  # Residuals computed afresh.
    if solver._warm_start:
        count += 1  # The first residual.
    if method.plan.want.want_rho_pack:
        count += 1.5  # The gain ratio: a product with the curvature, and the loss at the new point.
    return count


def _start(problem: Problem, method: somax.SecondOrderMethod) -> tuple[Params, Any]:
    params = {"w": jnp.zeros((problem.inputs.shape[1], problem.classes), jnp.float32)}
    return params, method.init(params)


def _logits(params: Params, inputs: Array) -> Array:
    return inputs @ params["w"]


def _penalty(l2: float, params: Params) -> Array:
    return l2 / 2 * jnp.vdot(params["w"], params["w"])


def _objective(l2: float, params: Params, batch: Mapping[str, Array]) -> Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(_logits(params, batch["x"]), batch["y"])
    return jnp.mean(losses) + _penalty(l2, params)


class _Penalised(GGNCE):
    """The library's Gauss-Newton operator for the scaled objective with its penalty."""

    def __init__(self, l2: float):
        super().__init__(predict_fn=_logits)
        self.l2 = l2

    def init(self, params: Params, batch: Mapping[str, Array], *, with_grad: bool = False) -> tuple[Any, Any]:
        state, grad = super().init(params, batch, with_grad=with_grad)
        return state, {"w": _SCALE * (grad["w"] + self.l2 * params["w"])} if with_grad else grad

    def matvec(self, params: Params, state: Any, v: Params) -> Params:
        return {"w": _SCALE * (super().matvec(params, state, v)["w"] + self.l2 * v["w"])}

    def loss(self, params: Params, state: Any, batch: Mapping[str, Array]) -> Array:
        return _SCALE * (super().loss(params, state, batch) + _penalty(self.l2, params))

    def loss_only(self, params: Params, batch: Mapping[str, Array]) -> Array:
        return _SCALE * (super().loss_only(params, batch) + _penalty(self.l2, params))


class _PenalisedRows(GGNCE):
    """The library's system in the space of logits, for the gradient g + l2 W instead of g.

    With curvature J'J/m and mu = damping + l2, (J'J/m + mu I)^-1 W = (W - J'(JJ' + m mu I)^-1 J W) / mu. So l2/mu J W
    comes off the right-hand side, and l2/mu W is added to the direction: that is the library's weight decay.
    """

    def __init__(self, ratio: float, *, corrected: bool):
        super().__init__(predict_fn=_logits)
        self.ratio = ratio
        self.corrected = corrected

    def row_op(self, params: Params, state: Any, batch: Mapping[str, Array]) -> RowOperator:
        rows = _corrected_rows(state.cache) if self.corrected else super().row_op(params, state, batch)
        return rows.replace(rhs=rows.rhs - self.ratio * rows.jvp(params))


def _corrected_rows(cache: Any) -> RowOperator:
    """GGNCE.row_op of version 1.0.1, with its factor transposed.

    That takes Q = LL' of the logits' curvature, and then L J for the root of J'QJ, where it is L'J: the curvature
    becomes J'L'LJ, in which the last class has next to none, and steps along it are as long as the damping allows.
    """
    size, classes = cache.probs.shape
    curvature = jax.vmap(lambda p: jnp.diag(p) - jnp.outer(p, p))(cache.probs)
    lower = jnp.linalg.cholesky(curvature + 1e-6 * jnp.eye(classes))  # The library's jitter; Q is singular.

    def jvp(v: Params) -> Array:
        return jnp.einsum("bji,bj->bi", lower, cache.jvp(v)).ravel()

    def vjp(u: Array) -> Params:
        return cache.vjp(jnp.einsum("bij,bj->bi", lower, u.reshape(size, classes)))[0]

    rhs = jax.lax.linalg.triangular_solve(lower, cache.r[..., None], left_side=True, lower=True)
    return RowOperator(rhs=rhs.ravel(), b=size, jvp=jvp, vjp=vjp)
