"""How the state of a gymnasium env is saved and restored: by its own methods, or by playing its episode again.

This module decides which of the two is taken, for one env at a time. How an episode is written down and played is
known to `episode_log`, what wrappers hold to `wrapper_states`.

Conventions
    offered  the bare env has ``get_state()`` and ``set_state(state)``, and all of its wrappers are known. Then
             nothing need be written down.
    fresh    never reset, as wrappers of gymnasium say; every env that was made by name has one that does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envkit.data.plain import from_plain, plain
from envkit.errors import ResumeError
from envkit_bridges.gym.episode_log import EpisodeLog, digest_of
from envkit_bridges.gym.wrapper_states import (
    Carried,
    chain_of,
    generator_in,
    held_in_episodes,
    is_fresh,
)

__all__ = ["bare", "recorded", "restored", "saved"]


def bare(env: Any) -> Any:
    """Give the env itself where a log may stand in its place."""
    return env.env if isinstance(env, EpisodeLog) else env


def recorded(env: Any, mode: bool) -> Any:
    """Give what takes the resets and steps of an env: a log of it, or with ``mode`` False the env itself.

    An env that cannot be saved, or needs no log for that, is given as it is; `saved` tells.
    """
    own = bare(env)
    if not mode or _held_if_offered(own) is not None:
        return own
    if isinstance(env, EpisodeLog):
        return env
    try:
        generator_in(own)
        return EpisodeLog(own, _gap(own, "it began before record_for_resume() was called"))
    except ResumeError:
        return own


def saved(env: Any) -> dict[str, Any]:
    """Give the state of an env, in plain form.

    Raises:
        ResumeError: it cannot be restored exactly, or was not written down.
    """
    own = bare(env)
    held = _held_if_offered(own)
    if held is None:
        generator_in(own)  # or say first that it has none
        log = env if own is not env else EpisodeLog(own, _gap(own, "it was not written down"))
        return log.state()
    state = plain(chain_of(own)[-1].get_state(), f"what get_state() of {own} gave")
    return {"offered": state, "held": plain(held.read()), "generator": _generator_if_any(own)}


def restored(env: Any, state: Mapping[str, Any]) -> Any:
    """Bring an env to where the one was that `saved` was asked for; give what takes its steps from now on.

    Raises:
        ResumeError: it did not get there.
    """
    own = bare(env)
    if "offered" not in state:
        log = recorded(env, True)
        log = log if isinstance(log, EpisodeLog) else EpisodeLog(own)
        log.play(state)
        return recorded(log, True)
    held, simulator = _held_if_offered(own), chain_of(own)[-1]
    if held is None:
        raise ResumeError(
            f"what is loaded was read by get_state(), but {own} has no get_state() and set_state(state), or "
            "has other wrappers. Build the same env as the one that was saved."
        )
    simulator.set_state(from_plain(state["offered"]))
    held.write(from_plain(state["held"]))
    if state["generator"] is not None:
        generator_in(own).state = from_plain(state["generator"])
    again = plain(simulator.get_state(), f"what get_state() of {own} gave")
    if digest_of(again, 0) != digest_of(state["offered"], 0):
        raise ResumeError(
            f"set_state of {simulator} was given what get_state gave, and get_state now gives something else: "
            "one of them leaves something out."
        )
    return own


def _held_if_offered(env: Any) -> Carried | None:
    simulator = chain_of(env)[-1]
    offers = all(callable(getattr(simulator, name, None)) for name in ("get_state", "set_state"))
    return held_in_episodes(env) if offers else None


def _generator_if_any(env: Any) -> Any:
    try:
        return plain(generator_in(env).state)
    except ResumeError:
        return None


def _gap(env: Any, reason: str) -> str | None:
    return None if is_fresh(env) else reason
