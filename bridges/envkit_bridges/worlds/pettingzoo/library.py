"""Envs of PettingZoo and MPE2: which there are, and how one is made.

Conventions
    task    "family/name", as "classic/tictactoe_v3"; the name alone will do.
    family  package of the library; Atari's games need ROMs of the user's, so they are made by name and not listed.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from envkit.data.keywords import refuse_unknown
from envkit.errors import ArgumentTypeError, OptionError, UnknownEnvError
from envkit_bridges.libraries import require

__all__ = ["has_parallel", "make", "names", "require_env", "require_known"]

_FAMILIES = {
    "butterfly": "pettingzoo.butterfly",
    "classic": "pettingzoo.classic",
    "mpe": "mpe2",
    "sisl": "pettingzoo.sisl",
}
_UNLISTED = {"atari": "pettingzoo.atari"}
_NAME = re.compile(r"\w+_v\d+")


def names() -> list[str]:
    """List the tasks that can be made here, read from the files of the library: nothing is built.

    Raises:
        MissingLibraryError: (an ImportError) PettingZoo or MPE2 is not installed.
    """
    return sorted(_modules(_FAMILIES))


def _modules(families: Mapping[str, str]) -> dict[str, str]:
    """Give the module of each task."""
    return {
        f"{family}/{found.name}": f"{package}.{found.name}"
        for family, package in families.items()
        for found in pkgutil.iter_modules(require(package).__path__)
        if _NAME.fullmatch(found.name)
    }


def make(task: str, *, parallel: bool, kwargs: Mapping[str, Any]) -> Any:
    """Build an env of the library, by its parallel or its turn-based (AEC) function.

    Raises:
        MissingLibraryError: (an ImportError) PettingZoo or MPE2 is not installed.
        BrokenLibraryError: (an ImportError) what they need is not.
        ArgumentTypeError: (a TypeError) the task is no name.
        UnknownEnvError: (a ValueError and a RuntimeError) there is no such task, or none whose agents act
            at the same time.
        OptionError: (a TypeError) the env does not take one of the keywords.
    """
    task, module = _found(task)
    home = _imported(module)
    with (
        warnings.catch_warnings()
    ):  # of bounds that float32 cannot tell, of displays that are not there
        warnings.simplefilter("ignore")
        _require_form(task, home, parallel=parallel)
        _refuse_unknown(task, home, kwargs)
        try:
            return (home.parallel_env if parallel else home.env)(**kwargs)
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            raise OptionError(
                f"PettingZooEnv of {task!r} takes no such keyword: {error}."
            ) from error


def require_env(task: str) -> None:
    """Check that there is a task of this name, listed or not.

    Raises:
        MissingLibraryError, ArgumentTypeError, UnknownEnvError: see `make`.
    """
    _found(task)


def require_known(task: str, *, parallel: bool, kwargs: Mapping[str, Any]) -> None:
    """Check what `make` will be given; its module is imported, and nothing built.

    Raises:
        OptionError, UnknownEnvError, MissingLibraryError, BrokenLibraryError, ArgumentTypeError: see `make`.
    """
    task, module = _found(task)
    home = _imported(module)
    _require_form(task, home, parallel=parallel)
    _refuse_unknown(task, home, kwargs)


def has_parallel(task: str) -> bool:
    """Say whether there is a form of an env whose agents act at the same time; it is not built.

    Raises:
        MissingLibraryError, ArgumentTypeError, UnknownEnvError: see `make`.
    """
    return hasattr(_imported(_found(task)[1]), "parallel_env")


def _imported(module: str) -> Any:
    """Import the module of an env without warnings: the library calls its old way of naming envs deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return require(module)


def _found(task: str) -> tuple[str, str]:
    if not isinstance(task, str):
        raise ArgumentTypeError(
            f"task is {task!r}, of type {type(task).__name__}, but must be the name of an env of PettingZoo, "
            "as 'classic/tictactoe_v3'. PettingZooWrapper(env) takes an env object."
        )
    modules = _modules({**_FAMILIES, **_UNLISTED})
    full = [name for name in modules if task in (name, name.partition("/")[2])]
    if full:
        return full[0], modules[full[0]]
    near = get_close_matches(task, [*modules, *(name.partition("/")[2] for name in modules)], 3)
    guess = (
        f"Did you mean {' or '.join(map(repr, near))}?"
        if near
        else "See PettingZooEnv.available_envs."
    )
    raise UnknownEnvError(f"PettingZoo has no env called {task!r}. {guess}")


def _require_form(task: str, home: Any, *, parallel: bool) -> None:
    if parallel and not hasattr(home, "parallel_env"):
        raise UnknownEnvError(
            f"the agents of {task!r} take turns, so there is no parallel form of it. Pass parallel=False "
            "and use_mask=True."
        )


def _refuse_unknown(task: str, home: Any, kwargs: Mapping[str, Any]) -> None:
    """Check keywords where the library says which it takes."""
    parameters = inspect.signature(home.raw_env).parameters
    if not any(found.kind is found.VAR_KEYWORD for found in parameters.values()):
        refuse_unknown(f"PettingZooEnv of {task!r}", kwargs, list(parameters))
