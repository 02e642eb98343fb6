"""What a value must look like: one structure, fixed dtypes, fixed shapes, a name for every leaf.

This module decides how leaves are named, how a loosely typed value (a Python float, a weak type)
becomes an array, and when one tree may replace another. It does not know
environments. All of it happens while JAX traces; at run time only the casts remain.

Conventions
    template  tree of `jax.ShapeDtypeStruct`, as `jax.eval_shape` returns it.
    path      what `jax.tree_util.tree_flatten_with_path` gives for a leaf.
    name      tuple of strings: dataclass fields, dict keys, sequence indices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envkit.errors import StateStructureError

PyTree = Any
"""Arrays in dicts, tuples, lists and registered dataclasses: states, parameters, observations, actions."""


def strong(value: jax.typing.ArrayLike) -> jax.Array:
    """Return ``value`` as an array that is not weakly typed.

    Python numbers become 32 bits wide, also when JAX has 64-bit types enabled; arrays keep their
    dtype. So no float64 appears unless you ask for it.
    """
    array = jnp.asarray(value)
    if not array.weak_type:
        return array
    narrow = {"float64": "float32", "int64": "int32", "complex128": "complex64"}
    dtype = narrow.get(array.dtype.name, array.dtype.name)
    return jax.lax.convert_element_type(array, jnp.dtype(dtype))


def conform(tree: PyTree, template: PyTree, *, what: str) -> PyTree:
    """Cast the leaves of ``tree`` to the dtypes of ``template``, which must match it otherwise.

    Within a kind every width is cast, and so is bool to integer to float. The other direction
    would lose values silently, so it is an error.

    Args:
        tree: what a step returned, leaves of any array type.
        template: what the reset returned, leaves with ``shape`` and ``dtype``.
        what: noun for the message, such as "state".

    Raises:
        StateStructureError: a leaf is missing, added, of another shape, or of a dtype that cannot
            be cast without loss of kind. The message names its path.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    wanted, wanted_treedef = jax.tree_util.tree_flatten_with_path(template)
    if treedef != wanted_treedef:
        raise StateStructureError(_describe_difference(leaves, wanted, what))
    leaves = [
        _conform_leaf(leaf, like, f"{what}{jax.tree_util.keystr(path)}")
        for (path, leaf), (_, like) in zip(leaves, wanted, strict=True)
    ]
    return jax.tree.unflatten(wanted_treedef, leaves)


def name_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the name of a leaf: the dataclass fields, dict keys and sequence indices that lead to it."""
    return tuple(_entry_name(entry) for entry in path)


def is_typed_key(dtype: jax.typing.DTypeLike) -> bool:
    """Check whether arrays of this dtype are typed PRNG keys (``jax.random.key``)."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _entry_name(entry: object) -> str:
    for attribute in ("name", "key", "idx"):  # GetAttrKey; DictKey, FlattenedIndexKey; SequenceKey
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _conform_leaf(leaf: jax.typing.ArrayLike, like: jax.ShapeDtypeStruct, where: str) -> jax.Array:
    array = jnp.asarray(leaf)
    if array.shape != like.shape:
        raise StateStructureError(
            f"{where} has shape {array.shape} after step, but shape {like.shape} after reset. "
            "Return the same shape from both, e.g. by reshaping it in step."
        )
    if array.dtype == like.dtype:
        return strong(array)
    if _rank(array.dtype) > _rank(like.dtype) or is_typed_key(array.dtype):
        raise StateStructureError(
            f"{where} has dtype {array.dtype} after step, but dtype {like.dtype} after reset, "
            f"which cannot hold its values. Start it as {array.dtype} in reset, or cast it in step."
        )
    return jax.lax.convert_element_type(array, like.dtype)


def _rank(dtype: jax.typing.DTypeLike) -> int:
    """Order the kinds of numbers: each holds the ones before it. A typed key holds no number."""
    if is_typed_key(dtype):
        return -1
    kinds = (np.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next(rank for rank, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind))


def _describe_difference(leaves: list, wanted: list, what: str) -> str:
    paths = {jax.tree_util.keystr(path) for path, _ in leaves}
    wanted_paths = {jax.tree_util.keystr(path) for path, _ in wanted}
    added = sorted(paths - wanted_paths)
    missing = sorted(wanted_paths - paths)
    changes = [f"{what}{path} appears only after step" for path in added]
    changes += [f"{what}{path} exists only after reset" for path in missing]
    detail = "; ".join(changes) or f"the containers of {what} differ in type or static fields"
    return (
        f"the structure of {what} changes between reset and step: {detail}. "
        "Return the same fields from both; fill those that reset does not know with zeros."
    )
