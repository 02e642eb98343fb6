"""Dtypes by name, in whichever array namespace a value belongs to.

Decided here: where a namespace has no 64-bit numbers (JAX, unless told otherwise), those of 32 bits
stand in for them. It knows the array API and no library.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

__all__ = ["NARROWER", "dtype_named"]

NARROWER = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def dtype_named(value: Any, name: str) -> Any:
    """Give the dtype called ``name``, e.g. "int64", in the namespace of ``value``."""
    xp = array_namespace(value)
    narrower = NARROWER.get(name)
    if narrower is not None and name not in xp.__array_namespace_info__().dtypes():
        name = narrower
    return getattr(xp, name)
