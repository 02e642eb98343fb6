"""The envs that envkit brings itself, by name; their ids begin "envkit/".

Conventions
    name  what is in the id after "envkit/".
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from envkit.data.keywords import known_to, refuse_unknown
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError
from envkit_bridges.libraries import explained, get_available_libraries

_HOMES = {
    "Chess": ("envkit_bridges.worlds.native.chess", "ChessEnv"),
    "FinancialRegime": ("envkit_bridges.worlds.native.trading", "FinancialRegimeEnv"),
    "LLMHashing": ("envkit_bridges.worlds.native.llm_hashing", "LLMHashingEnv"),
    "Pendulum": ("envkit.envs.pendulum", "PendulumEnv"),
    "PendulumJax": ("envkit_bridges.worlds.native.pendulum", "PendulumJaxEnv"),
    "TicTacToe": ("envkit_bridges.worlds.native.tictactoe", "TicTacToeEnv"),
}
"""Name to module and class."""

_NEEDS = {"Chess": "chess", "PendulumJax": "jax"}
"""Name to the library that the core does not bring."""

_DEFAULTS = {"Chess": {"stateful": False, "include_fen": True}}
"""Keywords that make one of these envs stateless, as the others are."""


def env_names() -> list[str]:
    """List the names of those whose libraries are installed, sorted."""
    there = get_available_libraries()
    return [name for name in sorted(_HOMES) if there.get(_NEEDS.get(name, ""), True)]


def build(name: str, **kwargs: Any) -> EnvBase:
    """Build one env.

    Args:
        name: see `env_names`.
        **kwargs: of its class. Chess is stateless unless they say otherwise.

    Raises:
        ArgumentError: no env has this name; the message gives those closest to it.
        OptionError: (a TypeError) its class does not know a keyword.
        MissingLibraryError: (an ImportError) the library it needs is not installed.
    """
    if name not in _HOMES:
        near = get_close_matches(str(name), _HOMES, 3) or env_names()
        raise ArgumentError(
            f"envkit itself has no env called {name!r}. Did you mean {' or '.join(map(repr, near))}?"
        )
    home, kind = _HOMES[name]
    try:
        env_class = getattr(import_module(home), kind)
    except ModuleNotFoundError as error:
        raise explained(error) from error
    refuse_unknown(f"envkit/{name}", kwargs, known_to(env_class) or list(kwargs))
    return env_class(**{**_DEFAULTS.get(name, {}), **kwargs})
