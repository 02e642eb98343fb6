"""Keywords that several classes take alike, written down once as a `TypedDict`: which they are, and that others are refused.

Type checkers read name and type of each from ``**options: Unpack[Table]``, a table with ``total=False``. Values are
checked by `envkit.data.arguments.checked`. This module does not know what keywords mean.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Self, Unpack, get_args, get_origin, get_type_hints

from envkit.errors import OptionError


def signature_of(cls: type) -> inspect.Signature:
    """Return what the constructor of a class takes, the keywords of a table one by one, as type checkers show them.

    Python shows ``**options``, in which no notebook finds a keyword. The default of one from a table is shown as ``...``,
    as in stubs: its description says which it is.
    """
    shown: list[inspect.Parameter] = []
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        if (table := _table_of(cls.__init__, parameter)) is None:
            shown.append(parameter)
            continue
        shown += [
            inspect.Parameter(name, parameter.KEYWORD_ONLY, default=_described, annotation=hint)
            for name, hint in get_type_hints(table).items()
        ]
    return inspect.Signature(shown)


class _Described:
    def __repr__(self) -> str:
        return "..."


_described = _Described()


def _table_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the table that ``**options: Unpack[Table]`` names; None of any other parameter."""
    written = parameter.annotation
    if isinstance(written, str) and written.startswith("Unpack["):
        return inspect.unwrap(function).__globals__[written.removeprefix("Unpack[").rstrip("]")]
    return get_args(written)[0] if get_origin(written) is Unpack else None


class ShownSignature:
    """Class attribute ``__signature__`` of a class with a ``__new__``, whose parameters Python would show: `signature_of`."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:  # which is called with what its __call__ takes
            raise AttributeError(f"{owner.__name__} object has no attribute '__signature__'")
        return signature_of(owner)


class ChecksKeywords:
    """Refuse what the ``__init__`` of a subclass does not take, with the nearest name that it does.

    Python itself guesses none before 3.13. A subclass whose ``__init__`` takes any keyword is left to itself.
    """

    __signature__ = ShownSignature()

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        if kwargs and (known := known_to(cls)) is not None:
            refuse_unknown(cls.__name__, kwargs, known)
        return super().__new__(cls)


def known_to(cls: type) -> list[str] | None:
    """List what the constructor of a class takes; None where it takes any keyword."""
    parameters = signature_of(cls).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def refuse_unknown(
    owner: str,
    keywords: Iterable[str],
    accepted: Sequence[str],
    hint: str = "",
    meant: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that each keyword that was given is known.

    Args:
        owner: who takes keywords, for the message.
        keywords: names.
        accepted: names.
        hint: a sentence on where else a keyword might go.
        meant: what keywords of other libraries are called here.

    Raises:
        OptionError: (a TypeError) one is not; the message names the nearest that is.
    """
    for name in keywords:
        if name in accepted:
            continue
        near = [meant[name]] if name in meant else get_close_matches(name, accepted, 1)
        guess = f"Did you mean {near[0]!r}?" if near else "Leave it out."
        told = " ".join(part for part in (guess, hint) if part)
        raise OptionError(
            f"{owner} takes no keyword {name!r}. {told} It takes {', '.join(accepted) or 'none'}."
        )
