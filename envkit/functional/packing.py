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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envkit.errors import StateStructureError

__all__ = ["PackedField", "StatePacking", "conform", "path_of"]

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
    key_impl: Any = None  # PRNG implementation when the leaf is a typed key

    @property
    def end(self) -> int:
        """Offset behind the field."""
        return self.offset + self.size


@dataclass(frozen=True)
class StatePacking:
    """How the state of one row is packed; built once from shapes alone."""

    like: Any  # the state as a pytree of `jax.ShapeDtypeStruct`
    fields: tuple[PackedField, ...]

    @classmethod
    def of(cls, env: Any) -> StatePacking:
        """Read the structure from an abstract reset of ``env``.

        Raises:
            StateStructureError: a leaf has a dtype that cannot be packed, or two leaves one name.
        """
        impls: list[Any] = []

        def looked_at(key: jax.Array) -> Any:
            state, _ = env.reset(key)
            impls.extend(_impl(leaf) for leaf in jax.tree.leaves(state))
            return state

        like = jax.eval_shape(looked_at, jax.random.key(0))
        flat, _ = jax.tree_util.tree_flatten_with_path(like)
        fields, ends = [], {"floats": 0, "words": 0}
        for (keypath, leaf), impl in zip(flat, impls, strict=True):
            field = _field(path_of(keypath), leaf, ends, impl)
            ends[field.buffer] = field.end
            fields.append(field)
        _refuse_collisions([field.path for field in fields])
        return cls(like, tuple(fields))

    @cached_property
    def float_dtype(self) -> np.dtype:
        """dtype of the floats buffer."""
        dtypes = [jnp.dtype(f.dtype) for f in self.fields if f.buffer == "floats" and f.size]
        return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)

    def width(self, buffer: str) -> int:
        """Numbers per row in a buffer; may be 0."""
        return max((field.end for field in self.fields if field.buffer == buffer), default=0)

    def pack(self, state: Any) -> dict[str, jax.Array]:
        """Pack a state (as `conform` leaves it) with any batch axes in front."""
        leaves = jax.tree.leaves(state)
        # The row key is always there and always last.
        batch = leaves[-1].shape[: leaves[-1].ndim - jax.tree.leaves(self.like)[-1].ndim]
        parts: dict[str, list[jax.Array]] = {"floats": [], "words": []}
        for leaf, field in zip(leaves, self.fields, strict=True):
            if field.size:
                parts[field.buffer].append(self._to_buffer(leaf, field).reshape(*batch, field.size))
        dtypes = {"floats": self.float_dtype, "words": np.int32}
        return {
            name: jnp.concatenate(found, -1) if found else jnp.zeros((*batch, 0), dtypes[name])
            for name, found in parts.items()
        }

    def unpack(self, buffers: Mapping[str, jax.Array]) -> Any:
        """Give back the state that was packed."""
        leaves = [
            self._from_buffer(buffers[field.buffer][..., field.offset : field.end], field)
            for field in self.fields
        ]
        return jax.tree.structure(self.like).unflatten(leaves)

    def nested(self, state: Any) -> dict[Path, jax.Array]:
        """Give the leaves by path, keys as uint32 words; zero-size leaves are left out."""
        return {
            field.path: jax.random.key_data(leaf) if field.key_impl is not None else leaf
            for field, leaf in zip(self.fields, jax.tree.leaves(state), strict=True)
            if field.size
        }

    def from_nested(self, named: Mapping[Path, jax.Array], batch: tuple[int, ...]) -> Any:
        """Give back the state whose leaves `nested` named."""
        leaves = []
        for field in self.fields:
            if not field.size:
                leaf = jnp.zeros((*batch, *field.shape), field.dtype)
            else:
                leaf = named[field.path]
            if field.key_impl is not None:
                leaf = jax.random.wrap_key_data(leaf, impl=field.key_impl)
            leaves.append(leaf)
        return jax.tree.structure(self.like).unflatten(leaves)

    def _to_buffer(self, leaf: jax.Array, field: PackedField) -> jax.Array:
        if field.buffer == "floats":
            return leaf.astype(self.float_dtype)
        if field.key_impl is not None:
            leaf = jax.random.key_data(leaf)
        if leaf.dtype in (jnp.uint32, jnp.int64, jnp.uint64):
            return jax.lax.bitcast_convert_type(leaf, jnp.int32)
        return leaf.astype(jnp.int32)

    def _from_buffer(self, part: jax.Array, field: PackedField) -> jax.Array:
        shape = (*part.shape[:-1], *field.shape)
        dtype = jnp.dtype(field.dtype)
        if field.buffer == "floats":
            return part.reshape(shape).astype(dtype)
        if dtype.itemsize == 8:
            return jax.lax.bitcast_convert_type(part.reshape(*shape, 2), dtype)
        if dtype == jnp.uint32:
            words = jax.lax.bitcast_convert_type(part.reshape(shape), jnp.uint32)
            if field.key_impl is None:
                return words
            return jax.random.wrap_key_data(words, impl=field.key_impl)
        return part.reshape(shape).astype(dtype)


def conform(tree: Any, like: Any, *, what: str) -> Any:
    """Cast the leaves of what a step made to the dtypes a reset fixed; checked while tracing.

    Args:
        tree: pytree with one batch axis in front of every leaf.
        like: the same pytree of `jax.ShapeDtypeStruct`, without that axis.
        what: "state" or "timestep", for the message.

    Raises:
        StateStructureError: structure or shapes differ from the reset's; names the path.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    models, wanted = jax.tree_util.tree_flatten_with_path(like)
    if treedef != wanted:
        here, there = ({path_of(path) for path, _ in leaves} for leaves in (flat, models))
        raise StateStructureError(
            f"the {what} of this env changes its structure between reset and step: "
            f"{_shown(there - here)} only after reset, {_shown(here - there)} only after step. "
            "Return the same fields from both."
        )
    leaves = []
    for (keypath, leaf), (_, model) in zip(flat, models, strict=True):
        if tuple(leaf.shape[1:]) != tuple(model.shape):
            raise StateStructureError(
                f"{'.'.join(path_of(keypath))!r} in the {what} has shape {model.shape} after "
                f"reset, but {tuple(leaf.shape[1:])} after step. Keep its shape."
            )
        leaves.append(leaf if leaf.dtype == model.dtype else leaf.astype(model.dtype))
    return treedef.unflatten(leaves)


def path_of(keypath: tuple[Any, ...]) -> Path:
    """Name a leaf by the fields, keys or positions that lead to it, `inner` left out."""
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


def _field(path: Path, leaf: Any, ends: dict[str, int], impl: Any) -> PackedField:
    if impl is not None:
        data = jax.eval_shape(jax.random.key_data, leaf)
        size = math.prod(data.shape)
        return PackedField(path, "words", ends["words"], size, data.shape, "uint32", impl)
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


def _impl(leaf: Any) -> Any:
    return jax.random.key_impl(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else None


def _refuse_collisions(paths: list[Path]) -> None:
    prefixes = {path[:depth] for path in paths for depth in range(1, len(path))}
    for path in paths:
        if paths.count(path) > 1 or path in prefixes:
            raise StateStructureError(
                f"two parts of the state are both called {'.'.join(path)!r}. Rename one; the names "
                "'elapsed' and 'key' beside an env's fields belong to envkit."
            )


def _shown(paths: set[Path]) -> list[str]:
    return sorted(".".join(path) for path in paths)
