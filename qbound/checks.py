"""What callers can get wrong and a trace can see: names, shapes and types.

Every message names the argument, what was expected and what was given. Values of arrays are not looked at, since a
traced array has none; a number out of range becomes NaN.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qbound.types import Scalar


def choice(name: str, value: object, options: Sequence[str]) -> None:
    """Raise unless `value` is one of `options`."""
    if value not in options:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, options))}; got {value!r}")


def function(name: str, value: object) -> None:
    """Raise unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name}: expected a function; got {value!r}")


def integer(name: str, value: object) -> int:
    """`value`, an integer of Python or NumPy above zero and not an array: shapes and loops depend on it."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(
            f"{name}: expected an integer > 0; got {value!r} (with optax.inject_hyperparams, name it in static_args)"
        )
    if value <= 0:
        raise ValueError(f"{name}: expected an integer > 0; got {value!r}")
    return int(value)


def array(name: str, value: Any) -> Array:
    """`value` as an array of numbers."""
    is_text = isinstance(value, (str, bytes)) or getattr(getattr(value, "dtype", None), "kind", "") in tuple("OSU")
    try:
        return jnp.asarray(None if is_text else value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected an array of numbers; got {value!r}") from None


def real_array(name: str, value: Any) -> Array:
    """`value` as an array of real numbers."""
    value = array(name, value)
    if jnp.iscomplexobj(value):
        raise TypeError(f"{name}: expected an array of real numbers; got dtype {value.dtype}")
    return value


def float_array(name: str, array: Any, axes: Sequence[str]) -> Float[Array, "..."]:
    """`array` as a float array with one axis of at least one entry for each name in `axes`."""
    expected = f"an array of shape ({', '.join(axes)}{',' if len(axes) == 1 else ''})"
    try:
        array = jnp.asarray(array)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected {expected}; got {array!r}") from None
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}: expected {expected} of a float dtype; got dtype {array.dtype}")
    if array.ndim != len(axes):
        hint = "; use jax.vmap for batches" if array.ndim > len(axes) else ""
        raise ValueError(f"{name}: expected {expected}; got shape {array.shape}{hint}")
    for axis, size in zip(axes, array.shape, strict=True):
        if size == 0:
            raise ValueError(f"{name}: expected {axis} >= 1 in {expected}; got shape {array.shape}")
    return array


def float_tree(name: str, tree: Any) -> Any:
    """`tree` with its leaves as arrays, all of a float dtype."""
    tree = jax.tree.map(lambda leaf: array(name, leaf), tree)
    for leaf in jax.tree.leaves(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"{name}: expected float arrays; got one of dtype {leaf.dtype}")
    return tree


def matching(name: str, array: Any, like: Any) -> Array:
    """`array` in the dtype of `like`, an array or a `jax.ShapeDtypeStruct`, which must have the same shape."""
    array = real_array(name, array)
    if array.shape != like.shape:
        raise ValueError(f"{name}: expected an array of shape {like.shape}; got shape {array.shape}")
    return array.astype(like.dtype)


def matching_tree(name: str, tree: Any, like: Any) -> Any:
    """`tree` in the dtypes of `like`, which must have the same structure and shapes."""
    structure, expected = jax.tree.structure(tree), jax.tree.structure(like)
    if structure != expected:
        raise ValueError(f"{name}: expected a tree of structure {expected}; got {structure}")
    return jax.tree.map(lambda leaf, like: matching(name, leaf, like), tree, like)


def unbatched(name: str, array: Any, ndim: int) -> Any:
    """`array`, a part of what is called `name`, unless it has more axes than in one such thing."""
    if len(array.shape) != ndim:
        raise ValueError(
            f"{name}: expected one {name}; got a batch of shape {array.shape[: len(array.shape) - ndim]}. "
            f"Use jax.vmap: jax.vmap(lambda {name}, x: ...)({name}s, xs)"
        )
    return array


def positive(name: str, number: Scalar) -> Scalar:
    """`number`, which must be above zero: an error for a Python number, NaN for an array that is not."""
    if _is_number(name, number) and not 0 < number < math.inf:
        raise ValueError(f"{name}: expected a finite number > 0; got {number!r}")
    return number if is_number(number) else jnp.where(number > 0, number, jnp.nan)


def nonnegative(name: str, number: Scalar) -> Scalar:
    """`number`, which must not be below zero: an error for a Python number, NaN for an array that is."""
    if _is_number(name, number) and not 0 <= number < math.inf:
        raise ValueError(f"{name}: expected a finite number >= 0; got {number!r}")
    return number if is_number(number) else jnp.where(number >= 0, number, jnp.nan)


def fraction(name: str, number: Scalar) -> Scalar:
    """`number`, which must be in [0, 1): an error for a Python number, NaN for an array that is not."""
    if _is_number(name, number) and not 0 <= number < 1:
        raise ValueError(f"{name}: expected a number in [0, 1); got {number!r}")
    return number if is_number(number) else jnp.where((number >= 0) & (number < 1), number, jnp.nan)


def outside_shard_map(**trees: Any) -> None:
    """Raise if an array in `trees`, by the names of the arguments, may differ from one device to the next.

    Inside `jax.shard_map` and `jax.pmap` a device sees its own part of a batch: means would be over that part, while a
    `vjp` sums over all. JAX marks arrays that vary over an axis of the mesh, unless told not to (`check_vma=False`,
    `jax.pmap`): where nothing is marked, nothing can be known, and that is an error too.
    """
    advice = (
        "Call it outside, under jax.jit, with arrays that are sharded over the mesh (jax.device_put with a "
        "NamedSharding): it then sees the whole batch. Gradients may come out of jax.shard_map, as means over devices"
    )
    for name, tree in trees.items():
        for leaf in jax.tree.leaves(tree):
            if _varying_axes(leaf):
                axes = ", ".join(sorted(map(repr, _varying_axes(leaf))))
                raise ValueError(
                    f"{name}: expected arrays that are the same on all devices; got one that varies over {axes}, an "
                    f"axis of the mesh, inside jax.shard_map. {advice}"
                )
    manual = jax.sharding.get_abstract_mesh().manual_axes
    unmarked = [axis for axis in manual if not _varying_axes(jax.lax.axis_index(axis))]
    if unmarked:
        axes = ", ".join(map(repr, unmarked))
        raise ValueError(
            f"{next(iter(trees))}: expected arrays that are known to be the same on all devices; got some inside "
            f"jax.pmap, or jax.shard_map with check_vma=False, over {axes}, where that is not known. {advice}"
        )


def _varying_axes(leaf) -> frozenset:
    """Of the mesh; none outside of `jax.shard_map`."""
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return frozenset()
    kind: Any = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    if not hasattr(kind, "manual_axis_type"):  # jax 0.9
        return getattr(kind, "vma", None) or frozenset()
    marks = kind.manual_axis_type
    # Over unreduced axes every device has a summand of its own.
    return frozenset() if marks is None else marks.varying | marks.unreduced


def is_number(number: object) -> bool:
    """Whether `number` is one of Python's or NumPy's, whose value is known, and not an array, which may be traced."""
    return isinstance(number, (int, float, np.integer, np.floating))


def _is_number(name, number):
    """As `is_number`; an array must have no axes, and anything else is an error."""
    if is_number(number):
        return True
    if not hasattr(number, "shape"):
        raise TypeError(f"{name}: expected a number; got {number!r}")
    if number.shape != ():
        raise ValueError(f"{name}: expected a number; got an array of shape {number.shape}")
    return False
