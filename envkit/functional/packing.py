"""A state pytree as two buffers, and back, without losing a bit.

Two arrays cross the border to torch where dozens of leaves would. Floats stay floats, so that
gradients flow; everything else becomes int32 words.

Conventions
    floats  (*batch, width), float32, or the widest float of the state.
    words   (*batch, width), int32: integers by value, uint32 and keys by their bits, bools as 0 or 1,
            64-bit integers as two words.
    path    names from the root: dataclass fields, dict keys, tuple fields or positions. A field
            called ``inner`` adds no name: what it holds stands beside its siblings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envkit.errors import StateStructureError

__all__ = ["PackedField", "StatePacking"]

Path = tuple[str, ...]


@dataclass(frozen=True)
class PackedField:
    """Where one leaf lies: ``size`` numbers from ``offset`` on in its buffer."""

    path: Path
    buffer: str  # "floats" or "words"
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: str  # of the leaf; keys count as the uint32 words they are made of
    is_key: bool = False

    @property
    def end(self) -> int:
        """Offset behind the field."""
        return self.offset + self.size


@dataclass(frozen=True)
class StatePacking:
    """How the state of one row is packed; built once from shapes alone."""

    treedef: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    fields: tuple[PackedField, ...]

    @classmethod
    def of(cls, env: Any) -> StatePacking:
        """Read the structure from an abstract reset of ``env``.

        Raises:
            StateStructureError: a leaf has a dtype that cannot be packed, or two leaves one name.
        """
        state, _ = jax.eval_shape(env.reset, jax.random.key(0))
        flat, treedef = jax.tree_util.tree_flatten_with_path(state)
        fields, ends = [], {"floats": 0, "words": 0}
        for keypath, leaf in flat:
            field = _field(_named(keypath), leaf, ends)
            ends[field.buffer] = field.end
            fields.append(field)
        _refuse_collisions([field.path for field in fields])
        return cls(treedef, tuple(leaf for _, leaf in flat), tuple(fields))

    @cached_property
    def float_dtype(self) -> np.dtype:
        """dtype of the floats buffer."""
        dtypes = [jnp.dtype(f.dtype) for f in self.fields if f.buffer == "floats" and f.size]
        return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)

    def width(self, buffer: str) -> int:
        """Numbers per row in a buffer; may be 0."""
        return max((field.end for field in self.fields if field.buffer == buffer), default=0)

    def pack(self, state: Any) -> dict[str, jax.Array]:
        """Pack a state with any batch axes in front; see `conform` for what is checked."""
        leaves = self.treedef.flatten_up_to(self.conform(state))
        batch = self._batch_of(leaves)
        parts: dict[str, list[jax.Array]] = {"floats": [], "words": []}
        for leaf, field in zip(leaves, self.fields, strict=True):
            if field.size:
                parts[field.buffer].append(self._to_buffer(leaf, field).reshape(*batch, field.size))
        dtypes = {"floats": self.float_dtype, "words": np.int32}
        return {
            name: jnp.concatenate(found, -1) if found else jnp.zeros((*batch, 0), dtypes[name])
            for name, found in parts.items()
        }

    def unpack(self, buffers: dict[str, jax.Array]) -> Any:
        """Give back the state that was packed."""
        leaves = []
        for field, model in zip(self.fields, self.leaves, strict=True):
            buffer = buffers[field.buffer]
            part = buffer[..., field.offset : field.end]
            leaves.append(self._from_buffer(part, field, model))
        return self.treedef.unflatten(leaves)

    def conform(self, state: Any) -> Any:
        """Cast a state to the dtypes of the reset; checked while tracing.

        Raises:
            StateStructureError: structure or shapes differ from the reset's; names the path.
        """
        flat, treedef = jax.tree_util.tree_flatten_with_path(state)
        if treedef != self.treedef:
            here, there = {_named(path) for path, _ in flat}, {f.path for f in self.fields}
            raise StateStructureError(
                "the state of this env changes its structure between reset and step: "
                f"{_shown(there - here)} only after reset, {_shown(here - there)} only after step. "
                "Return the same fields from both."
            )
        batch = self._batch_of([leaf for _, leaf in flat])
        leaves = []
        for (keypath, leaf), model in zip(flat, self.leaves, strict=True):
            if tuple(leaf.shape) != (*batch, *model.shape):
                raise StateStructureError(
                    f"{'.'.join(_named(keypath))!r} in the state has shape {model.shape} after "
                    f"reset, but {tuple(leaf.shape[len(batch) :])} after step. Keep its shape."
                )
            leaves.append(leaf if leaf.dtype == model.dtype else leaf.astype(model.dtype))
        return self.treedef.unflatten(leaves)

    def _batch_of(self, leaves: list[Any]) -> tuple[int, ...]:
        leaf, model = leaves[-1], self.leaves[-1]  # the row key: always there, always last
        return tuple(leaf.shape[: leaf.ndim - model.ndim])

    def _to_buffer(self, leaf: jax.Array, field: PackedField) -> jax.Array:
        if field.buffer == "floats":
            return leaf.astype(self.float_dtype)
        if field.is_key:
            leaf = jax.random.key_data(leaf)
        if leaf.dtype in (jnp.uint32, jnp.int64, jnp.uint64):
            return jax.lax.bitcast_convert_type(leaf, jnp.int32)
        return leaf.astype(jnp.int32)

    def _from_buffer(self, part: jax.Array, field: PackedField, model: Any) -> jax.Array:
        shape = (*part.shape[:-1], *field.shape)
        dtype = jnp.dtype(field.dtype)
        if field.buffer == "floats":
            return part.reshape(shape).astype(dtype)
        if dtype.itemsize == 8:
            return jax.lax.bitcast_convert_type(part.reshape(*shape, 2), dtype)
        if dtype == jnp.uint32:
            words = jax.lax.bitcast_convert_type(part.reshape(shape), jnp.uint32)
            return jax.random.wrap_key_data(words, impl=_impl(model)) if field.is_key else words
        return part.reshape(shape).astype(dtype)


def _field(path: Path, leaf: Any, ends: dict[str, int]) -> PackedField:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, leaf)
        size = math.prod(data.shape)
        return PackedField(path, "words", ends["words"], size, data.shape, "uint32", is_key=True)
    size = math.prod(leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return PackedField(path, "floats", ends["floats"], size, leaf.shape, leaf.dtype.name)
    if jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == bool:
        words = size * max(1, leaf.dtype.itemsize // 4)
        return PackedField(path, "words", ends["words"], words, leaf.shape, leaf.dtype.name)
    raise StateStructureError(
        f"{'.'.join(path)!r} in the state has dtype {leaf.dtype}, which cannot be packed. "
        "Use floats, integers, bools or PRNG keys."
    )


def _impl(model: Any) -> Any:
    return jax.random.key_impl(jax.ShapeDtypeStruct((), model.dtype))


def _named(keypath: tuple[Any, ...]) -> Path:
    names = []
    for entry in keypath:
        name = next(
            str(getattr(entry, attribute))
            for attribute in ("name", "key", "idx")
            if hasattr(entry, attribute)
        )
        if name != "inner":
            names.append(name)
    return tuple(names) or ("value",)


def _refuse_collisions(paths: list[Path]) -> None:
    prefixes = {path[:depth] for path in paths for depth in range(1, len(path))}
    for path in paths:
        if paths.count(path) > 1 or path in prefixes:
            raise StateStructureError(
                f"two parts of the state are both called {'.'.join(path)!r}. Rename one; the names "
                "'elapsed' and 'key' beside an env's fields belong to envkit."
            )


def _shown(paths: set[Path]) -> Iterator[str] | list[str]:
    return sorted(".".join(path) for path in paths)
