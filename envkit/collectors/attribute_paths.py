"""Look up a path of attributes and items, and call the object that is there.

Conventions
    path  ``"env.base_env"``, ``"schemes['policy'].interval"``, ``"parts[0]"``: names, and items by int or string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from envkit.errors import ArgumentError, NotAMethodError

_PART = re.compile(r"\.?([A-Za-z_]\w*)|\[(-?\d+)\]|\[(?:'([^']*)'|\"([^\"]*)\")\]")


def followed(start: Any, path: str) -> Any:
    """Return what a path leads to.

    Raises:
        ArgumentError: (a ValueError) it is no path.
        AttributeError, KeyError, IndexError: there is nothing of this name.
    """
    value, at = start, 0
    while at < len(path):
        part = _PART.match(path, at)
        if part is None:
            raise ArgumentError(
                f"{path!r} is no path at {path[at:]!r}. Write names with dots between them, and items as [0] or "
                "['name']."
            )
        name, index, *quoted = part.groups()
        if name is not None:
            value = getattr(value, name)
        else:
            value = value[
                int(index) if index is not None else next(q for q in quoted if q is not None)
            ]
        at = part.end()
    return value


def executed(
    start: Any,
    path: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    must: bool = False,
) -> Any:
    """Call what a path leads to, or give it where it cannot be called.

    Args:
        must: refuse what cannot be called, arguments or not.

    Raises:
        ArgumentError: (a ValueError) it cannot be called, and there are arguments.
        NotAMethodError: (an AttributeError) it cannot be called, and must.
    """
    value = followed(start, path)
    if callable(value):
        return value(*args, **kwargs)
    if must:
        raise NotAMethodError(
            f"{path!r} is of type {type(value).__name__}, which cannot be called. Name a method, or use get_distant_attr()."
        )
    if args or kwargs:
        raise ArgumentError(
            f"{path!r} is of type {type(value).__name__}, which cannot be called, but has arguments. Leave them out."
        )
    return value


def paired(
    list_of_args: Sequence[Sequence[object]] | None,
    list_of_kwargs: Sequence[Mapping[str, object]] | None,
    count: int | None,
) -> list[tuple[Sequence[object], Mapping[str, object]]]:
    """Return the arguments of each call.

    Args:
        count: how many calls there are to be; None: as many as there are arguments, at least one.

    Raises:
        ArgumentError: (a ValueError) there are other numbers of them.
    """
    lengths = [len(one) for one in (list_of_args, list_of_kwargs) if one is not None]
    wanted = count if count is not None else max(lengths, default=1)
    if any(number != wanted for number in lengths):
        raise ArgumentError(
            f"list_of_args and list_of_kwargs have {lengths} entries, but there are {wanted} calls. Pass one entry for each."
        )
    every_args = [()] * wanted if list_of_args is None else list_of_args
    every_kwargs = [{}] * wanted if list_of_kwargs is None else list_of_kwargs
    return list(zip(every_args, every_kwargs, strict=True))
