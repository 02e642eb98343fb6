"""Keywords that several classes take alike, written down once as a `TypedDict`; unknown ones are refused.

Type checkers read name and type of each from ``**options: Unpack[Table]``. This module reads the defaults,
which are beside the types, and shows the keywords one by one where Python asks for a signature. It does
not know what they mean.

Conventions
    table   a `TypedDict`, ``total=False``; each entry is ``Annotated[type, Default(value)]``.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Unpack, get_args, get_origin, get_type_hints

from envkit.errors import OptionError

__all__ = [
    "ChecksKeywords",
    "Default",
    "ShownKeywords",
    "completed",
    "keywords_of",
    "known_to",
    "refuse_unknown",
]


@dataclass(frozen=True)
class Default:
    """Value of a keyword that was not given."""

    value: Any


class ShownKeywords:
    """Class attribute ``__signature__``: what Python, editors and notebooks show of the constructor, one by one."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:  # which is called with what its __call__ takes
            raise AttributeError(f"{owner.__name__} object has no attribute '__signature__'")
        return inspect.Signature(keywords_of(owner.__init__)[1:])


class ChecksKeywords:
    """Refuse what the ``__init__`` of a subclass does not take, with the nearest name that it does.

    Python itself guesses none before 3.13. A subclass whose ``__init__`` takes any keyword is left to itself.
    """

    __signature__ = ShownKeywords()  # or Python would show that of __new__

    if not TYPE_CHECKING:  # which would look for the keywords here

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if kwargs and (known := known_to(cls)) is not None:
                refuse_unknown(cls.__name__, kwargs, known)
            return super().__new__(cls)


def completed(table: type, given: Mapping[str, Any]) -> Any:
    """Give the keywords of a table as attributes, those that were not ``given`` at their defaults."""
    return SimpleNamespace(**{**{one.name: one.default for one in _listed(table)}, **given})


def keywords_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """List the parameters of a function or method, the entries of a table one by one."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        table = _table_of(function, parameter)
        shown += [parameter] if table is None else _listed(table)
    return shown


def known_to(cls: type) -> list[str] | None:
    """List what the constructor of a class takes; None where it takes any keyword."""
    parameters = keywords_of(cls.__init__)[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def refuse_unknown(
    owner: str,
    given: Iterable[str],
    known: Sequence[str],
    hint: str = "",
    meant: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that each keyword that was given is known.

    Args:
        owner: who takes keywords, for the message.
        given: names.
        known: names.
        hint: a sentence on where else a keyword might go.
        meant: what keywords of other libraries are called here.

    Raises:
        OptionError: (a TypeError) one is not; the message names the nearest that is.
    """
    for name in given:
        if name in known:
            continue
        near = [meant[name]] if name in meant else get_close_matches(name, known, 1)
        guess = f"Did you mean {near[0]!r}?" if near else "Leave it out."
        told = " ".join(part for part in (guess, hint) if part)
        raise OptionError(
            f"{owner} takes no keyword {name!r}. {told} It takes {', '.join(known) or 'none'}."
        )


def _table_of(function: Callable[..., Any], parameter: inspect.Parameter) -> type | None:
    """Give the table that ``**options: Unpack[Table]`` names; None of any other parameter."""
    written = parameter.annotation
    if isinstance(written, str) and not written.startswith("Unpack["):
        return None  # it may be made of names that only type checkers know
    holder = SimpleNamespace(__annotations__={"hint": written})
    hint = get_type_hints(holder, inspect.unwrap(function).__globals__)["hint"]
    return get_args(hint)[0] if get_origin(hint) is Unpack else None


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
