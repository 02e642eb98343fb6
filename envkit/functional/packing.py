"""A whole state in two buffers.

This module decides where each leaf of a state lies in the buffers "floats" and "words", and what
it is called. Packing loses nothing: `unpack` returns every bit that `pack` was given. It knows
neither torch nor environments.

Conventions
    floats  shape (*batch, float_width): all floating leaves; float32, or float64 if a leaf is that
            wide. Differentiable. Narrower floats are widened, which is exact.
    words   shape (*batch, word_width), int32: bools and integers of up to 16 bits by value; uint32
            and PRNG keys bit by bit; 64-bit integers as two words each.
    A buffer that holds nothing has width 0; DLPack carries those both ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp

from envkit.errors import KeyCollisionError, StateStructureError
from envkit.functional.core import WrapperState
from envkit.functional.structure import PyTree, is_typed_key, name_of

Buffers = dict[str, jax.Array]


@dataclass(frozen=True)
class Field:
    """Where one leaf of the state lies.

    The leaf is ``buffer[..., offset : offset + size]``, reshaped to ``(*batch, *stored_shape)``.
    That slice shows the leaf's own values where its dtype is the buffer's. Else it holds the same values (bool,
    narrow types), or the values reinterpreted (`words` of them an element), in the buffer's dtype.
    """

    name: tuple[str, ...]
    buffer: Literal["floats", "words"]
    offset: int
    shape: tuple[int, ...]  # of one row's leaf
    dtype: str  # name of the leaf's dtype; typed keys are "uint32"
    words: int  # buffer elements for each element of the leaf
    is_key: bool  # a typed PRNG key; its words are a trailing axis of the leaf

    @property
    def size(self) -> int:
        """Buffer elements of this leaf."""
        return math.prod(self.shape) * self.words

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of this leaf in its buffer: ``shape``, with an axis for the words if several."""
        return self.shape if self.words == 1 else (*self.shape, self.words)


class StatePacking:
    """The layout of one kind of state, fixed once.

    Args:
        template: one row's state: `jax.ShapeDtypeStruct` leaves, as from ``jax.eval_shape(reset)``.
        renamed: other names for fields of wrappers.

    Attributes:
        fields: one `Field` for each leaf, in the order of `jax.tree.leaves`; None has no leaf.
        float_width, word_width: elements a row in each buffer.
        float_dtype: dtype of the float buffer.

    Raises:
        StateStructureError: a leaf has a dtype that fits neither buffer.
        KeyCollisionError: two leaves have the same name, or one the name of a group of others.
    """

    def __init__(self, template: PyTree, renamed: Mapping[str, str] = MappingProxyType({})) -> None:
        self.template = template
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(template)
        self._leaves = [leaf for _, leaf in paths]
        hidden = _wrapper_depth(template)
        names = _visible_names([path for path, _ in paths], hidden, renamed)
        _check_names(names)
        is_wide = any(leaf.dtype == jnp.float64 for leaf in self._leaves)
        self.float_dtype = jnp.dtype(jnp.float64 if is_wide else jnp.float32)
        self.fields: tuple[Field, ...] = self._lay_out(names, [path for path, _ in paths])
        self.float_width = sum(field.size for field in self.fields if field.buffer == "floats")
        self.word_width = sum(field.size for field in self.fields if field.buffer == "words")

    def pack(self, tree: PyTree) -> Buffers:
        """Lay a state out in ``{"floats": (*batch, float_width), "words": (*batch, word_width)}``.

        Args:
            tree: state whose leaves have shape ``(*batch, *event)``, any number of batch axes.

        Raises:
            StateStructureError: ``tree`` has other leaves than the template.
        """
        leaves, batch = self._checked_leaves(tree)
        parts: dict[str, list[jax.Array]] = {"floats": [], "words": []}
        for field, leaf in zip(self.fields, leaves, strict=True):
            if field.size:
                stored = _encode(leaf, self._dtype_of(field.buffer))
                parts[field.buffer].append(stored.reshape(*batch, field.size))
        return {
            name: jnp.concatenate(found, axis=-1)
            if found
            else jnp.zeros((*batch, 0), self._dtype_of(name))
            for name, found in parts.items()
        }

    def unpack(self, buffers: Mapping[str, jax.Array]) -> PyTree:
        """Rebuild the state that `pack` was given, exactly."""
        batch = buffers["words"].shape[:-1]
        leaves = [
            _decode(
                buffers[field.buffer][..., field.offset : field.offset + field.size].reshape(
                    *batch, *field.stored_shape
                ),
                like,
            )
            for field, like in zip(self.fields, self._leaves, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def blank(self, num_rows: int) -> PyTree:
        """Return states of nothing but zeros, leaves ``(num_rows, *event)``."""
        widths = {"floats": self.float_width, "words": self.word_width}
        return self.unpack(
            {
                name: jnp.zeros((num_rows, width), self._dtype_of(name))
                for name, width in widths.items()
            }
        )

    def leaves(self, tree: PyTree) -> dict[tuple[str, ...], jax.Array]:
        """Return the leaves of a state by name; typed keys as their uint32 words."""
        found, _ = self._checked_leaves(tree)
        return {
            field.name: jax.random.key_data(leaf) if field.is_key else leaf
            for field, leaf in zip(self.fields, found, strict=True)
        }

    def from_leaves(self, leaves: Mapping[tuple[str, ...], jax.Array]) -> PyTree:
        """Rebuild a state from its leaves by name, the inverse of `leaves`."""
        missing = [field.name for field in self.fields if field.name not in leaves]
        if missing:
            raise StateStructureError(
                f"the state lacks {', '.join('.'.join(name) for name in missing)}. "
                "Pass every leaf that reset returned."
            )
        restored = [
            _wrap_key(leaves[field.name], like) if field.is_key else leaves[field.name]
            for field, like in zip(self.fields, self._leaves, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, restored)

    def _lay_out(self, names: Sequence[tuple[str, ...]], paths: list) -> tuple[Field, ...]:
        offsets = {"floats": 0, "words": 0}
        fields = []
        for name, path, leaf in zip(names, paths, self._leaves, strict=True):
            buffer, words = _placement(leaf.dtype, jax.tree_util.keystr(path))
            is_key = is_typed_key(leaf.dtype)
            dtype = "uint32" if is_key else leaf.dtype.name
            shape = tuple(leaf.shape)
            field = Field(name, buffer, offsets[buffer], shape, dtype, words, is_key)
            offsets[buffer] += field.size
            fields.append(field)
        return tuple(fields)

    def _dtype_of(self, buffer: str) -> jnp.dtype:
        return self.float_dtype if buffer == "floats" else jnp.dtype(jnp.int32)

    def _checked_leaves(self, tree: PyTree) -> tuple[list[jax.Array], tuple[int, ...]]:
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self._treedef:
            raise StateStructureError(
                f"the state to pack is {treedef}, but the layout was made for {self._treedef}. "
                "Pack only states of the environment the layout belongs to."
            )
        batch: tuple[int, ...] = ()
        for index, (field, leaf) in enumerate(zip(self.fields, leaves, strict=True)):
            leading = leaf.shape[: leaf.ndim - len(field.shape)]
            batch = batch if index else leading
            if leaf.shape != (*batch, *field.shape) or leaf.dtype != self._leaves[index].dtype:
                raise StateStructureError(
                    f"state leaf {'.'.join(field.name)!r} is {leaf.dtype}{leaf.shape}, but the "
                    f"layout expects {self._leaves[index].dtype}{(*batch, *field.shape)}. "
                    "Call conform on what step returns before packing it."
                )
        return leaves, batch


# ----------------------------------------------------------------------------------------- bits


def _placement(dtype: jnp.dtype, where: str) -> tuple[Literal["floats", "words"], int]:
    """Return the name of the buffer of a dtype and the number of its elements that one element takes."""
    if is_typed_key(dtype):
        key = jax.eval_shape(lambda: jax.random.key_data(jnp.empty((), dtype)))
        return "words", math.prod(key.shape)
    if jnp.issubdtype(dtype, jnp.floating):
        return "floats", 1
    if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
        return "words", 2 if dtype.itemsize == 8 else 1
    raise StateStructureError(
        f"state{where} has dtype {dtype}, which fits neither the float nor the word buffer. "
        "Split it, e.g. a complex leaf into its real and imaginary parts."
    )


def _encode(leaf: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Store a leaf in a buffer's dtype; bits that need several words get a trailing axis."""
    if is_typed_key(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.uint32 or (leaf.dtype.itemsize == 8 and dtype == jnp.int32):
        return jax.lax.bitcast_convert_type(leaf, dtype)
    return leaf.astype(dtype)


def _decode(stored: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    if is_typed_key(like.dtype):
        return _wrap_key(jax.lax.bitcast_convert_type(stored, jnp.uint32), like)
    if like.dtype == jnp.uint32 or (like.dtype.itemsize == 8 and stored.dtype == jnp.int32):
        return jax.lax.bitcast_convert_type(stored, like.dtype)
    return stored.astype(like.dtype)


def _wrap_key(data: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    impl = jax.random.key_impl(jnp.empty((), like.dtype))  # which takes arrays only
    return jax.random.wrap_key_data(data, impl=impl)


# ---------------------------------------------------------------------------------------- names


def _wrapper_depth(template: PyTree) -> int:
    """Count the wrapper states that enclose the state of the bare environment."""
    depth = 0
    while isinstance(template, WrapperState):
        template, depth = template.inner, depth + 1
    return depth


def _visible_names(
    paths: Sequence[tuple[Any, ...]], depth: int, renamed: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Return the names of leaves; the ``inner`` of the wrappers is left out.

    A field of the bare environment that is called like one of a wrapper's is under "env".
    """
    names = [name_of(path) for path in paths]
    levels = [next((i for i in range(depth) if name[i] != "inner"), depth) for name in names]
    names = [
        (*name[:level], renamed.get(name[level], name[level]), *name[level + 1 :])
        if level < depth
        else name
        for name, level in zip(names, levels, strict=True)
    ]
    names_of_env = {name[level] for name, level in zip(names, levels, strict=True) if level < depth}
    visible = []
    for name, level in zip(names, levels, strict=True):
        shown = name[level:] or ("inner" if depth else "state",)
        is_hidden = level == depth and shown[0] in names_of_env
        visible.append(("env", *shown) if is_hidden else shown)
    return visible


def _check_names(names: Sequence[tuple[str, ...]]) -> None:
    seen: set[tuple[str, ...]] = set()
    groups = {name[:length] for name in names for length in range(1, len(name))}
    for name in names:
        if name in seen or name in groups:
            raise KeyCollisionError(
                f"two entries of the state are called {'.'.join(name)!r}. Rename one, or leave out a wrapper that "
                "is around the environment twice."
            )
        seen.add(name)
