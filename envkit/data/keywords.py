"""Keywords that several classes take alike, written down once as a `TypedDict`.

Type checkers read name and type of each from ``**options: Unpack[Table]``. This module reads the defaults,
which stand beside the types, and shows the keywords one by one where Python asks for a signature. It does
not know what they mean.

Conventions
    table   a `TypedDict`, ``total=False``; each entry is ``Annotated[type, Default(value)]``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Unpack, get_args, get_origin, get_type_hints

__all__ = ["Default", "completed", "keywords_of"]


@dataclass(frozen=True)
class Default:
    """What a keyword is that was not given."""

    value: Any


def completed(table: type, given: Mapping[str, Any]) -> Any:
    """Give the keywords of a table as attributes, those that were not ``given`` at their defaults."""
    return SimpleNamespace(**{**{one.name: one.default for one in _listed(table)}, **given})


def keywords_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """List the parameters of a function or method, the entries of a table one by one."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        table = None
        if parameter.kind is parameter.VAR_KEYWORD:
            table = _table_in(get_type_hints(function).get(parameter.name))
        shown += [parameter] if table is None else _listed(table)
    return shown


def _table_in(annotation: Any) -> type | None:
    return get_args(annotation)[0] if get_origin(annotation) is Unpack else None


def _listed(table: type) -> list[inspect.Parameter]:
    """List the entries of a table as parameters, in its order."""
    listed = []
    for name, hint in get_type_hints(table, include_extras=True).items():
        annotation, default = get_args(hint)
        parameter = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default.value, annotation=annotation
        )
        listed.append(parameter)
    return listed
