"""Immutable records that JAX can trace: frozen dataclasses, registered as pytrees."""

import dataclasses
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**kwargs):
    """A field that belongs to the structure of a record: hashable, never traced."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static, dataclasses.field))
def record(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a pytree.

    Equality is identity: comparing arrays has no single truth value, and a record must stay hashable to be
    called under `jax.jit`. Unlike `jax.tree_util.register_dataclass`, unflattening does not call `__init__`: JAX
    rebuilds records around batched arrays and placeholders, which the annotations of the fields do not describe. The
    `repr` shows arrays by dtype and shape.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    data = tuple(f.name for f in fields if not f.metadata.get("static", False))
    meta = tuple(f.name for f in fields if f.metadata.get("static", False))

    def flatten_with_keys(obj):
        children = tuple((jax.tree_util.GetAttrKey(name), getattr(obj, name)) for name in data)
        return children, tuple(getattr(obj, name) for name in meta)

    def flatten(obj):
        return tuple(getattr(obj, name) for name in data), tuple(getattr(obj, name) for name in meta)

    def unflatten(aux, children):
        obj = object.__new__(cls)
        for name, value in (*zip(data, children, strict=True), *zip(meta, aux, strict=True)):
            object.__setattr__(obj, name, value)
        return obj

    def short_repr(self):
        parts = (f"{field.name}={_summary(getattr(self, field.name))}" for field in fields)
        return f"{cls.__name__}({', '.join(parts)})"

    cls.__repr__ = short_repr
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def _summary(value):
    """Arrays by dtype and shape, as `float32[3,4]`: a record may hold millions of numbers."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_summary, value))})"
    return repr(value)
