"""Three small networks as plain functions: parameters are nested dicts of arrays, inputs one batch.

`sizes` of a network are the numbers of its kind:

perceptron      widths of the hidden layers: 256, 128
convolutional   channels of the convolutions, then the width of the hidden layer: 16, 32, 64
transformer     layers, width, heads, positions: 2, 96, 4, 64
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from experiments.fields import Checked, Count

__all__ = ["Kind", "Network"]

Kind = Literal["perceptron", "convolutional", "transformer"]
Params = dict[str, Any]
LEAST = {"perceptron": 1, "convolutional": 2, "transformer": 4}


@dataclasses.dataclass(frozen=True)
class Network(Checked):
    """What a program is compiled for."""

    kind: Kind
    sizes: tuple[Count, ...]

    def __post_init__(self):
        super().__post_init__()
        least, count = LEAST[self.kind], len(self.sizes)
        if count < least or (self.kind == "transformer" and count > least):
            raise ValueError(f"sizes: expected {least} numbers for a {self.kind}; got {self.sizes}")
        if self.kind == "transformer" and self.sizes[1] % self.sizes[2]:
            raise ValueError(f"sizes: expected a width that is a multiple of the heads; got {self.sizes}")

    @property
    def positions(self) -> int:
        """Of a sequence; 0 for networks that take none."""
        return self.sizes[3] if self.kind == "transformer" else 0

    def first_params(self, seed: int, width: int, classes: int, scale: float = 1.0) -> Params:
        """Random weights, `scale` times their usual size, for `width` inputs; biases are 0, gains 1."""
        make = {"perceptron": _perceptron, "convolutional": _convolutional, "transformer": _transformer}[self.kind]
        params = make(self.sizes, _Keys(seed), width, classes)
        return jax.tree.map(lambda leaf: leaf * scale if leaf.ndim > 1 else leaf, params)

    def logits(self, params: Params, inputs: jax.Array) -> jax.Array:
        """(b, n) of images (b, d), or (b, t, n) of bytes (b, t)."""
        if self.kind == "transformer":
            return _read(self.sizes[2], params, inputs)
        if self.kind == "convolutional":
            inputs = _convolve(params, inputs)
        return _dense(params, inputs)


class _Keys:
    """A new one at every call."""

    def __init__(self, seed: int):
        self._key, self._count = jax.random.key(seed), 0

    def normal(self, *shape: int, size: float) -> jax.Array:
        self._count += 1
        return size * jax.random.normal(jax.random.fold_in(self._key, self._count), shape, jnp.float32)


def _he(keys: _Keys, *shape: int) -> Params:
    """Weights whose outputs, after a ReLU, are as large as the inputs; the last axis is that of outputs."""
    weights = keys.normal(*shape, size=math.sqrt(2 / math.prod(shape[:-1])))
    return {"weights": weights, "bias": jnp.zeros(shape[-1], jnp.float32)}


def _perceptron(sizes: tuple[int, ...], keys: _Keys, width: int, classes: int) -> Params:
    widths = (width, *sizes)
    layers = {f"dense{i}": _he(keys, *pair) for i, pair in enumerate(zip(widths, widths[1:], strict=False))}
    return {**layers, "head": _he(keys, widths[-1], classes)}


def _convolutional(sizes: tuple[int, ...], keys: _Keys, width: int, classes: int) -> Params:
    *channels, hidden = sizes
    depths, side = (1, *channels), math.isqrt(width) >> len(channels)
    if side == 0:
        raise ValueError(f"sizes: expected at most {math.isqrt(width).bit_length() - 1} convolutions; got {sizes}")
    layers = {f"conv{i}": _he(keys, 3, 3, *pair) for i, pair in enumerate(zip(depths, depths[1:], strict=False))}
    return {**layers, "dense0": _he(keys, side * side * depths[-1], hidden), "head": _he(keys, hidden, classes)}


def _layers(params: Params, name: str) -> list[Params]:
    return [params[f"{name}{i}"] for i in range(sum(key.startswith(name) for key in params))]


def _dense(params: Params, x: jax.Array) -> jax.Array:
    for layer in _layers(params, "dense"):
        x = jax.nn.relu(x @ layer["weights"] + layer["bias"])
    return x @ params["head"]["weights"] + params["head"]["bias"]


def _convolve(params: Params, inputs: jax.Array) -> jax.Array:
    side = math.isqrt(inputs.shape[1])
    x = inputs.reshape(-1, side, side, 1)
    for layer in _layers(params, "conv"):
        x = jax.lax.conv_general_dilated(
            x, layer["weights"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = _pool(jax.nn.relu(x + layer["bias"]))
    return x.reshape(len(x), -1)


def _pool(x: jax.Array) -> jax.Array:
    """The largest of 2 x 2, as reshapes: the gradient of a window reduction is many times slower on CPU."""
    b, h, w, c = x.shape
    half = x[:, : h // 2 * 2, : w // 2 * 2].reshape(b, h // 2, 2, w // 2, 2, c)
    return half.max(axis=(2, 4))


def _transformer(sizes: tuple[int, ...], keys: _Keys, width: int, classes: int) -> Params:
    layers, inner, _, positions = sizes
    if width != positions:
        raise ValueError(f"sizes: expected as many positions as sequences have; got {positions}, and {width}")

    def matrix(rows: int, columns: int, share: float = 1.0) -> jax.Array:
        return keys.normal(rows, columns, size=share / math.sqrt(rows))

    # What is added to the stream is smaller the more layers add to it.
    share = 1 / math.sqrt(2 * layers)
    blocks = {
        f"block{i}": {
            "attention_gain": jnp.ones(inner, jnp.float32),
            "query": matrix(inner, inner),
            "key": matrix(inner, inner),
            "value": matrix(inner, inner),
            "output": matrix(inner, inner, share),
            "mlp_gain": jnp.ones(inner, jnp.float32),
            "up": matrix(inner, 4 * inner),
            "down": matrix(4 * inner, inner, share),
        }
        for i in range(layers)
    }
    embeddings = {name: keys.normal(n, inner, size=0.1) for name, n in (("bytes", classes), ("positions", positions))}
    return {
        "embedding": embeddings,
        **blocks,
        "gain": jnp.ones(inner, jnp.float32),
        "head": {"weights": matrix(inner, classes)},
    }


def _read(heads: int, params: Params, inputs: jax.Array) -> jax.Array:
    x = params["embedding"]["bytes"][inputs] + params["embedding"]["positions"][: inputs.shape[1]]
    for block in _layers(params, "block"):
        x = x + _attend(heads, block, _normalised(x) * block["attention_gain"])
        x = x + jax.nn.gelu((_normalised(x) * block["mlp_gain"]) @ block["up"]) @ block["down"]
    return (_normalised(x) * params["gain"]) @ params["head"]["weights"]


def _normalised(x: jax.Array) -> jax.Array:
    x = x - x.mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)


def _attend(heads: int, block: Params, x: jax.Array) -> jax.Array:
    b, t, width = x.shape
    query, key, value = ((x @ block[name]).reshape(b, t, heads, -1) for name in ("query", "key", "value"))
    scores = jnp.einsum("bihd,bjhd->bhij", query, key) / math.sqrt(width // heads)
    before = jnp.tril(jnp.ones((t, t), bool))
    weights = jax.nn.softmax(jnp.where(before, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, value).reshape(b, t, width) @ block["output"]
