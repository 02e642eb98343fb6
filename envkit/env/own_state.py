"""Contents of a module's state dict beside parameters and buffers: generators, counters, simulators.

`OwnState` puts it under one key of the state dict, and hands it back when that is loaded. Each class decides
its content, in plain form (see `envkit.data.plain`).

Conventions
    own state  dict of plain values; empty where a class has nothing to say, and then not in the state dict. A state
               dict without it leaves it empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from envkit.data.arguments import require_state_dict
from envkit.data.plain import from_plain, plain
from envkit.errors import EnvkitError, ResumeError
from envkit.process_wide import warn
from envkit.specs.lasting import lasting

OWN = "_state"

WITHOUT_EPISODE = "without_episode"
"""Entry of an own state that leaves an episode under way out: the name of its env."""

NEVER_SAVED = "never_saved"
"""Entry beside it, the same name: the simulator offers no state, so no state dict can hold its episodes."""

LOADED = "load_state_dict()"
"""The call that led an env out of an episode that was not restored; its next step reports that truncated."""

_loads_strictly: ContextVar[bool | None] = ContextVar("loads_strictly", default=None)


def loads_strictly() -> bool:
    """Check whether the state dict that is being loaded must hold all that there is."""
    return _loads_strictly.get() is not False


def envs_without_episode(state: object, entry: str = WITHOUT_EPISODE) -> set[str]:
    """Return the names of the envs whose episode under way a state dict leaves out."""
    if not isinstance(state, Mapping):
        return set()
    own = {state[entry]} if entry in state else set[str]()
    return own.union(*(envs_without_episode(value, entry) for value in state.values()))


def advice_on_episodes(state: object) -> str:
    """Return how to save the episodes that a state dict leaves out, and which of them cannot be saved."""
    never = envs_without_episode(state, NEVER_SAVED)
    advice = []
    if envs_without_episode(state) - never:
        advice.append(
            "To continue episodes, call record_for_resume() before the first reset, or pass record_for_resume=True to a "
            "collector; a class of your own needs get_extra_state and set_extra_state."
        )
    if never:
        advice.append(
            f"Those of {', '.join(sorted(never))} cannot be saved, since the simulator offers no state: leave record_for_resume out, and "
            "begin new ones."
        )
    return " ".join(advice)


@contextmanager
def loading(state: object, *, strict: bool) -> Iterator[None]:
    """Load a state dict; around the outermost one, warn afterwards of envs in it whose episode it leaves out."""
    is_outermost = _loads_strictly.get() is None
    token = _loads_strictly.set(strict)
    try:
        yield
    finally:
        _loads_strictly.reset(token)
    if is_outermost:
        _warn_of_new_episodes(state)


def _warn_of_new_episodes(state: object) -> None:
    if names := envs_without_episode(state):
        warn(
            f"the state dict does not hold the episodes under way in {', '.join(sorted(names))}, so new ones begin. "
            + advice_on_episodes(state)
        )


class OwnState(nn.Module):
    """A module that changes with use in more than parameters and buffers."""

    _own_state_is_needed: ClassVar[bool] = False
    """A state dict without it lacks something, as one without a parameter does."""

    _changes_with_use: ClassVar[tuple[str, ...]] = ()
    """Attributes, no buffers among them, that later calls depend on; held where one of them holds anything."""

    def _own_state(self) -> dict[str, Any]:
        """Return all that the next calls depend on and that no parameter, buffer or argument says."""
        held = {name: getattr(self, name) for name in self._changes_with_use}
        if all(value is None or _is_empty(value) for value in held.values()):
            return {}
        return {name: plain(value, f"{type(self).__name__}.{name}") for name, value in held.items()}

    def _take_own_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load what `_own_state` returned.

        With ``strict``, raise `ResumeError` where that cannot be; without, do as much as can be done.
        """
        vars(self).update({name: from_plain(state[name]) for name in self._changes_with_use})

    def _hold_nothing(self) -> None:
        """Become as one that was not used, since one of these was saved."""
        for name in self._changes_with_use:
            value = getattr(self, name)
            setattr(self, name, type(value)() if isinstance(value, int | list | dict) else None)

    def _resume(self, state: Any, *, strict: bool) -> None:
        """Load what `_own_state` returned, if it is of this kind.

        Raises:
            ResumeError: a module of another kind gave it; or see `_take_own_state`.
        """
        try:
            self._take_own_state(state, strict=strict)
        except EnvkitError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            held = list(state) if isinstance(state, Mapping) else state
            raise ResumeError(
                f"what is loaded into {type(self).__name__} was not saved by one built alike: it holds {held}, "
                f"and {type(error).__name__} was raised ({error}). Load what its own state_dict() gave."
            ) from error

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` gave, see ``torch.nn.Module.load_state_dict``.

        Args:
            state_dict: of a module that was built alike.
            strict: all that is there must be in it, and the other way round. A recorded episode goes on as the one that
                was saved, or an error is raised. False: an episode that does not go on as it did is given up instead.
                The next step of such an env, and of one whose episode was not recorded, reports it truncated, and the
                reset that follows begins a new one.
            assign: take tensors as they are, instead of copying their values.

        Returns:
            The keys that are missing and those that were not expected.

        Raises:
            ArgumentTypeError: (a TypeError) it is no dict.
            RuntimeError: a key is missing or not expected, and ``strict`` is set.
            ResumeError: (a RuntimeError) an env did not get where it was, and it is set.
        """
        require_state_dict(state_dict)
        with loading(state_dict, strict=strict):
            return super().load_state_dict(state_dict, strict, assign)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if own := self._own_state():
            destination[prefix + OWN] = own

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state = state_dict.pop(prefix + OWN, None)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if state is not None:
            self._resume(state, strict=loads_strictly())
            if _loads_strictly.get() is None:  # a module that this one is part of is being loaded
                _warn_of_new_episodes(state)
        elif self._own_state_is_needed:
            missing_keys.append(prefix + OWN)
        elif loads_strictly():
            self._hold_nothing()


@contextmanager
def put_back_on_failure(module: nn.Module) -> Iterator[None]:
    """Restore a module and its parts if what is done with them raises.

    These are parameters, buffers, and the attributes that `OwnState` says; layers that get their shapes meanwhile
    keep them.
    """
    held = [
        (part, dict(part._parameters), dict(part._buffers), _changing(part))
        for part in module.modules()
    ]
    with lasting():
        tensors = [*module.parameters(), *module.buffers()]
        values = [(one, one.detach().clone()) for one in tensors if not is_lazy(one)]
    try:
        yield
    except BaseException:
        for part, parameters, buffers, changing in held:
            part._parameters, part._buffers = parameters, buffers
            vars(part).update(changing)
        with lasting(), torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        raise


def _changing(part: nn.Module) -> dict[str, Any]:
    names = part._changes_with_use if isinstance(part, OwnState) else ()
    return {name: vars(part)[name] for name in names if name in vars(part)}


def _is_empty(value: Any) -> bool:
    return isinstance(value, int | list | dict) and not value
