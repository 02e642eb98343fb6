"""Envs that are made by name: the keywords that one takes, as far as can be said without making it, and how many are made.

Conventions
    made by  what the library calls to make an env, its entry point: a class mostly.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Collection, Iterable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from envkit.batched.parallel import ParallelEnv
from envkit.data.arguments import as_int
from envkit.data.keywords import refuse_unknown
from envkit.errors import ArgumentError
from envkit_bridges.libraries import parameters_of

__all__ = ["MaybeInWorkers", "known_to_env", "require_known", "require_render_mode"]


def known_to_env(library: ModuleType, env_name: Any, own: Iterable[str]) -> list[str]:
    """Name ``own`` keywords, those of ``gymnasium.make``, and of what makes the env, where that can be told."""
    made_by = _made_by(library, env_name)
    named = [*own, *parameters_of(library.make)]
    with contextlib.suppress(Exception):  # what a library says of its envs is a hint
        named += [] if made_by is None else parameters_of(made_by)
    return [name for name in dict.fromkeys(named) if name not in ("env", "id")]


def require_known(
    library: ModuleType, env_name: Any, given: Collection[str], own: Collection[str]
) -> None:
    """Check keywords against those of an env, unless it takes any; nothing is made, but its module may be imported.

    Raises:
        OptionError: (a TypeError) one is unknown.
    """
    asked = [name for name in given if name not in own and name not in parameters_of(library.make)]
    made_by = _made_by(library, env_name) if asked else None
    if made_by is None:
        return
    try:
        parameters = inspect.signature(made_by).parameters.values()
    except (TypeError, ValueError):
        return  # of some callables Python knows no signature
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        refuse_unknown(f"GymEnv({env_name!r})", asked, known_to_env(library, env_name, own))


def require_render_mode(library: ModuleType, env_name: Any, mode: Any) -> None:
    """Check that the class of an env says that it draws in a mode; one that names no modes is believed.

    Gymnasium makes lists of frames, and a window, of single arrays and texts.

    Raises:
        ArgumentError: (a ValueError) it does not.
    """
    if mode is None:
        return
    metadata = getattr(_made_by(library, env_name), "metadata", None) or {}
    known = list(metadata.get("render_modes") or [])
    made = [f"{one}_list" for one in known if isinstance(one, str)]
    if "rgb_array" in known or "rgb_array_list" in known:
        made.append("human")
    if known and mode not in (*known, *made):
        raise ArgumentError(
            f"render_mode of {env_name!r} is {mode!r}, but must be one of {', '.join(map(repr, known))}. Pass one of "
            "these, or leave it out."
        )


def _made_by(library: ModuleType, env_name: Any) -> Any:
    """Give what makes an env; None where the library does not say."""
    made_by = getattr(env_name, "entry_point", None)
    with contextlib.suppress(Exception):
        made_by = made_by or library.spec(env_name).entry_point
        return _loaded(made_by) if isinstance(made_by, str) else made_by
    return None


def _loaded(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


class MaybeInWorkers:
    """Base of a class of envs that takes ``num_workers``: above 1, what is made is a `ParallelEnv` of so many."""

    if not TYPE_CHECKING:  # which would look for the keywords here

        def __new__(cls, *args: Any, num_workers: int = 1, **kwargs: Any) -> Any:
            meaning = "the number of processes, or 1 to have the env in this one"
            num_workers = as_int("num_workers", num_workers, least=1, meaning=meaning)
            if num_workers > 1:
                return ParallelEnv(num_workers, partial(cls, *args, **kwargs))
            return super().__new__(cls)
