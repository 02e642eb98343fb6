"""Keywords that several classes take alike, written down once as a `TypedDict`; unknown ones are refused.

Type checkers read name and type of each from ``**options: Unpack[Table]``. This module reads the defaults,
which are beside the types, and shows the keywords one by one where Python asks for a signature or a docstring. It
does not know what they mean.

Conventions
    table   a `TypedDict`, ``total=False``; each entry is ``Annotated[type, Default(value)]``. Its docstring describes
            its own entries under ``Args:``, and names above that, with module, the tables that it extends.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType, NoneType, SimpleNamespace, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from envkit.data.arguments import as_bool, require_callable, require_option
from envkit.errors import OptionError

Check = Callable[[str, Any], Any]
"""Takes the name of a keyword and a value; returns the value in the form in which it is used, or raises."""


@dataclass(frozen=True)
class Default:
    """Value of a keyword that was not given."""

    value: Any


class InitSignature:
    """Class attribute ``__signature__`` of a class with ``__new__``: that of ``__init__``, as Python 3.13 shows by itself."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:  # which is called with what its __call__ takes
            raise AttributeError(f"{owner.__name__} object has no attribute '__signature__'")
        _, *parameters = inspect.signature(owner.__init__).parameters.values()
        return inspect.Signature(parameters)


class _DescribedKeywords:
    """Class attribute ``__doc__``: see `describe_keywords`. It is put together when it is read."""

    def __init__(self, text: str):
        self._text = text

    def __get__(self, instance: Any, owner: type) -> str:
        head, written, tail = _split(self._text)
        own = {name for names in written for name in names.split(", ")} - {"**options"}
        found: dict[str, str] = {}
        for table in _tables_of(owner):
            found = {**found, **_described(table), **found}
        taken = inspect.signature(owner).parameters.keys() - own
        shown = {names: text for names, text in found.items() if taken & set(names.split(", "))}
        rest = {names: written.pop(names) for names in list(written) if names.startswith("**")}
        rest.pop("**options", None)
        entries = written | shown | rest
        arguments = ["Args:", *entries.values(), ""] if entries else []
        return "\n".join([*head, *arguments, *tail]).strip()


class ChecksKeywords:
    """Refuse what the ``__init__`` of a subclass does not take, with the nearest name that it does.

    Python itself guesses none before 3.13. A subclass whose ``__init__`` takes any keyword is left to itself.
    """

    __signature__ = InitSignature()

    if not TYPE_CHECKING:  # which would look for the keywords here

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if kwargs and (known := known_to(cls)) is not None:
                refuse_unknown(cls.__name__, kwargs, known)
            return super().__new__(cls)


def checked(table: type, options: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Check keywords one by one, and return them in the form in which they are used.

    A keyword has its own check, or its type in the table says what it must be: a bool, one of the words of a `Literal`,
    or a function. None passes where that type allows it.

    Args:
        table: of all keywords.
        options: values by name.
        checks: of keywords whose type does not say enough, by name.

    Raises:
        ArgumentTypeError: (a TypeError) a value is of another type.
        ArgumentError: (a ValueError) it is none of the words, or refused by its own check.
    """
    types = get_type_hints(table)
    return {
        name: _checked(name, value, types[name], checks.get(name))
        for name, value in options.items()
    }


def _checked(name: str, value: Any, hint: Any, check: Check | None) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    is_optional = NoneType in kinds
    if value is None and is_optional:
        return None
    if check is not None:
        return check(name, value)
    if kinds[0] is bool:
        return as_bool(name, value)
    if get_origin(kinds[0]) is Literal:
        require_option(name, value, get_args(kinds[0]))
    if get_origin(kinds[0]) is Callable:
        require_callable(name, value, is_optional=is_optional)
    return value


def completed(table: type, given: Mapping[str, Any]) -> Any:
    """Return the keywords of a table as attributes, those that were not ``given`` at their defaults."""
    return SimpleNamespace(**{**{one.name: one.default for one in _listed(table)}, **given})


def describe_keywords(cls: type) -> None:
    """Have the docstring of a class describe, under ``Args:``, those of its keywords that a table describes.

    An entry ``**options`` of the docstring gives way to them. Keywords that the docstring describes itself are left out.
    A class without a docstring is left as it is.
    """
    written = vars(cls)["__doc__"]
    if isinstance(written, str):
        setattr(cls, "__doc__", _DescribedKeywords(written))  # noqa: B010  (no str, for type checkers)


def keywords_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """List the parameters of a function or method, the entries of a table one by one."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        table = _table_of(function, parameter)
        shown += [parameter] if table is None else _listed(table)
    return shown


def known_to(cls: type) -> list[str] | None:
    """List what the constructor of a class takes, the entries of a table one by one; None where it takes any keyword."""
    names: list[str] = []
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.append(parameter.name)
        elif (table := _table_of(cls.__init__, parameter)) is not None:
            names += table.__annotations__
        else:
            return None
    return names


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


def _tables_of(cls: type) -> list[type]:
    """List the tables that ``__init__`` of a class takes, and those of its bases, whose keywords it may name one by one."""
    written = [vars(base).get("__init__") for base in cls.__mro__]
    functions = [function for function in written if inspect.isfunction(function)]
    tables = [
        _table_of(function, parameter)
        for function in functions
        for parameter in inspect.signature(function).parameters.values()
    ]
    return [table for table in tables if table is not None]


def _described(table: type) -> dict[str, str]:
    """Read what the docstrings of a table, and of those that it extends, say of each entry."""
    head, entries, _ = _split(table.__doc__ or "")
    found: dict[str, str] = {}
    for module, name in re.findall(r"`([\w.]+)\.(\w+)`", "\n".join(head)):
        found |= _described(getattr(sys.modules[module], name))
    return found | entries


def _split(text: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Split a docstring into the lines above its arguments, the text of each by its name, and the lines below."""
    lines = inspect.cleandoc(text).splitlines()
    sections = [row for row, line in enumerate(lines) if re.fullmatch(r"[A-Z]\w+:", line)]
    at = lines.index("Args:") if "Args:" in lines else next(iter(sections), len(lines))
    end = at
    entries: dict[str, str] = {}
    if "Args:" in lines:
        inside = range(at + 1, len(lines))
        end = next((row for row in inside if lines[row][:1].strip()), len(lines))
        names = ""
        for line in filter(str.strip, lines[at + 1 : end]):
            is_first = len(line) - len(line.lstrip()) == 4
            names = line.partition(":")[0].strip() if is_first else names
            entries[names] = line if is_first else f"{entries[names]}\n{line}"
    head = [*lines[:at], ""] if lines[at - 1 : at] != [""] else lines[:at]
    return head, entries, lines[end:]


def _table_of(function: Callable[..., Any], parameter: inspect.Parameter) -> type | None:
    """Return the table that ``**options: Unpack[Table]`` names; None of any other parameter."""
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
