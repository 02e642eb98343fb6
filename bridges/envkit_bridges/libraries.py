"""Find optional libraries, and say which extra brings a missing one.

Conventions
    extra  name in ``pip install -e '.[extra]'``, run in a clone of envkit.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from envkit.data.keywords import refuse_unknown
from envkit.errors import (
    ArgumentTypeError,
    BrokenLibraryError,
    FetchError,
    MissingLibraryError,
    UnknownEnvError,
)
from envkit.installing import LIBRARIES, install_hint
from envkit.process_wide import filters_kept, no_output, no_warnings

Simulator = Any
"""An environment object of another library, e.g. Gymnasium, dm_control or Jumanji, which need not be installed."""


def require(library: str) -> ModuleType:
    """Import an optional library.

    Raises:
        MissingLibraryError: it is not installed; the message names the extra that brings it.
        BrokenLibraryError: it is, and fails when it is imported.
    """
    try:
        return importlib.import_module(library)
    except Exception as error:
        name = _top(library)
        if isinstance(error, ModuleNotFoundError) and _top(error.name) == name:
            raise explained(error) from error
        again = f"Run: pip install '{name}'"
        if name in LIBRARIES:
            again = install_hint(LIBRARIES[name].extra)
        raise BrokenLibraryError(
            f"{name!r} is installed, but importing it fails: {type(error).__name__}: {error}. A library that it "
            f"needs may be missing or have another version. {again}",
            name=name,
        ) from error


def explained(error: ModuleNotFoundError) -> ImportError:
    """Return how to install what an import did not find; ``error`` itself when envkit cannot know."""
    library = _top(error.name)
    if library not in LIBRARIES:
        return error
    return MissingLibraryError(
        f"{library!r} is not installed. {install_hint(LIBRARIES[library].extra)}", name=library
    )


def get_available_libraries() -> dict[str, bool]:
    """Return for each optional library whether it is installed.

    Example:
        >>> from envkit import get_available_libraries
        >>> get_available_libraries()["gymnasium"]
        True
    """
    return {name: importlib.util.find_spec(name) is not None for name in sorted(LIBRARIES)}


class EnvNames:
    """Class attribute ``available_envs``: names of envs, read from the library when looked at; none where it is missing."""

    def __init__(self, listed: Callable[[], Sequence[Any]]):
        self._listed = listed

    def __get__(self, instance: object, owner: type) -> list[Any]:
        try:
            return list(self._listed())
        except ImportError:
            return []


def require_name(library: str, name: object, names: Collection[str]) -> None:
    """Check that a library has an env of this name.

    Raises:
        ArgumentTypeError: (a TypeError) it is no name.
        UnknownEnvError: (a ValueError and a RuntimeError) no env has it; the message gives those closest to it, and all there are.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"the name of an env of {library} is {name!r} of type {type(name).__name__}, but must be a string. "
            "An env object goes to the class whose name ends in Wrapper."
        )
    if name not in names:
        near = " or ".join(map(repr, get_close_matches(name, names, 3)))
        guess = f"Did you mean {near}? " if near else ""
        raise UnknownEnvError(
            f"{library} has no env called {name!r}. {guess}Choose one of: {', '.join(sorted(names))}."
        )


def near_name(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return the question whether one of the nearest names was meant; ``otherwise`` where none is near."""
    near = get_close_matches(name, names, 3)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else otherwise


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress the lines that a library prints and the warnings it gives, when it is imported or called; other threads keep theirs."""
    with no_output(), filters_kept(), no_warnings():
        yield


def require_quietly(library: str) -> ModuleType:
    """Import an optional library, see `require`, without the lines it prints and the warnings it gives."""
    with quietly():
        return require(library)


@contextlib.contextmanager
def keywords_told(
    owner: str, keywords: Collection[str], accepted: Callable[[], Sequence[str]]
) -> Iterator[None]:
    """Explain a call of a library that fails because it does not know one of the keywords handed to it.

    Args:
        owner: who takes keywords, for the message.
        keywords: the names of those that were handed over; what else the library does not know is its own mistake.
        accepted: names those that it takes, as far as is known. Called only then.

    Raises:
        OptionError: (a TypeError) one is unknown; the message names the nearest that is known.
    """
    try:
        yield
    except TypeError as error:
        named = _UNEXPECTED.search(str(error))
        if named is None or named[1] not in keywords:
            raise
        refuse_unknown(owner, [named[1]], [name for name in accepted() if name != named[1]])


_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")


def parameters_of(made_by: Callable[..., Any]) -> list[str]:
    """List the keywords of a function, or of a class and those that it hands further keywords to, its bases."""
    functions = [made_by]
    if inspect.isclass(made_by):
        functions = [
            vars(base)["__init__"] for base in made_by.__mro__[:-1] if "__init__" in vars(base)
        ]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named: dict[str, None] = {}
    for function in functions:
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in kinds and name != "self":
                named[name] = None
    return list(named)


@contextlib.contextmanager
def fetched(library: str, name: str, fetching: Collection[str]) -> Iterator[None]:
    """Explain why an env could not be made, if it is one of those that are made from the network.

    Raises:
        FetchError: (an OSError) what it is made from could not be had.
    """
    try:
        yield
    except OSError as error:
        if name not in fetching:
            raise
        said = next(iter(str(error).strip().splitlines()), "")
        raise FetchError(
            f"{name!r} of {library} is made from data that the library fetches from the network, and that failed: "
            f"{type(error).__name__}: {said} Connect to the network, or make another env."
        ) from error


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


def no_object_of(what: str, name: str, env: object) -> ArgumentTypeError:
    """Return an error that says that a wrapper was given something else than an env object of its library.

    Args:
        what: what it wraps, e.g. "an env object of Brax".
        name: what ``Wrapper`` and ``Env`` are put behind, for the class that was called and for the one that makes envs.
        env: what it was given.
    """
    fix = f"{name}Env({env!r})" if isinstance(env, str) else f"{name}Env with the name of one"
    return ArgumentTypeError(
        f"{name}Wrapper was given {env!r}, of type {type(env).__name__}, but wraps {what}. Pass one, or let {fix} build it."
    )
