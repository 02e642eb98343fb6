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
    if name in NARROWER and not _has_64_bits(xp):
        name = NARROWER[name]
    return getattr(xp, name)


def _has_64_bits(xp: Any) -> bool:
    """Say whether a namespace has 64-bit numbers, by the dtype it gives integers.

    Asked which dtypes there are, array_api_compat makes a tensor of each below a bare ``except``, where a Ctrl-C is lost.
    """
    return xp.__array_namespace_info__().default_dtypes()["integral"] == xp.int64
