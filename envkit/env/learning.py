"""Run an env and leave it as it was, as where a policy is judged: nothing learns, and all that moved is put back.

A transform that learns says so with `Transform.learns`, and looks at ``self.frozen`` before it learns. Its buffers, and
what it returns from ``get_extra_state``, are put back. That is the whole declaration, for transforms of users too.

Conventions
    visit   function of the transforms of an env, and of what is given for them, to an answer.
            `EnvBase._visit_transforms` calls it for each env behind transforms, in workers too.
    earlier `ALL`, or what an earlier visit answered, of the same form.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from envkit.env.own_state import advice_on_episodes, envs_without_episode, loading
from envkit.errors import EnvkitError
from envkit.process_wide import warn

ALL = "all"
"""Value for a visit that is the first of its kind."""


@contextmanager
def not_learning(env: Any) -> Iterator[None]:
    """Freeze the transforms of an env that learn, those in sub-envs too, and let them learn again afterwards."""
    before = env._visit_transforms(_freeze, ALL)
    try:
        yield
    finally:
        if not env.is_closed:
            env._visit_transforms(_freeze, before)


@contextmanager
def left_as_it_was(
    env: Any, *, update_stats: bool = False, warns_as: str | None = None
) -> Iterator[None]:
    """Freeze what learns in an env, those in sub-envs too; afterwards, bring the env to where it was.

    This holds after errors and Ctrl-C too, and where such blocks are nested. The global generators of torch, NumPy
    and Python are put back as well. Where the env cannot say where it is, only its transforms are put back. Then, and
    where it does not get back to where it was, a step before the next reset raises `NotResetError`.

    Args:
        env: any env. A pool that has not started yet is started.
        update_stats: True lets transforms learn, and keeps what they have learnt.
        warns_as: the name of the function that a warning begins with, where the env cannot be put back; None does not warn.
    """
    moves = env._in_use.moves
    held, reason = _held(env)
    if reason is not None and warns_as is not None and moves:  # else no episode is lost
        _warn_of_lost_episodes(env, reason, warns_as)
    of_transforms = _held_by_transforms(env) if held is None else None
    try:
        with nullcontext() if update_stats else not_learning(env), _global_generators_put_back():
            yield
    finally:
        if not env.is_closed:
            learnt = env._visit_transforms(_learnt, ALL) if update_stats else None
            if held is not None:
                failure = _put_back(env, held)
                if failure is not None and reason is None:
                    _warn_of_lost_episodes(env, failure, warns_as or "a check")
                    reason = failure
            elif of_transforms is not None:
                env._visit_transforms(_states, of_transforms)
            if learnt is not None:
                env._visit_transforms(_learnt, learnt)
            if reason is not None:
                env._leave_episodes(warns_as or "a check")
            if reason is None or not moves:
                env._in_use.moves = moves  # as if it had not been used


def _warn_of_lost_episodes(env: Any, reason: str, who: str) -> None:
    warn(
        f"{who} ends the episodes under way in {type(env).__name__}, because it cannot return to them: {reason} "
        "Reset the env before its next step, or pass an env that is used for nothing else.",
    )


def _put_back(env: Any, held: Any) -> str | None:
    """Load the state dict of an env; if it does not get there, return why, and give its episodes up."""
    with loading({}, strict=True):  # of episodes that are lost was warned before
        try:
            env.load_state_dict(held)
        except EnvkitError as error:
            with suppress(EnvkitError):
                env.load_state_dict(held, strict=False)
            return str(error).splitlines()[0]
    return None


@contextmanager
def _global_generators_put_back() -> Iterator[None]:
    numbers, drawn = np.random.get_state(), random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(drawn)


def _held(env: Any) -> tuple[Any, str | None]:
    """Return the state dict of an env, or None, and why it cannot be put back."""
    try:
        shown = env.state_dict()
        held = deepcopy(shown)  # of buffers that steps write to
        # What has no size yet is held as it is: a lazy layer that gets one meanwhile keeps it.
        held.update({name: value for name, value in shown.items() if is_lazy(value)})
        kind = env._facts.unsaved_state
    except Exception as error:  # of any class, where the env is a user's
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        return None, told
    if kind:
        return held, (
            f"{kind} does not save its episode: it lacks get_extra_state and set_extra_state."
        )
    if names := envs_without_episode(shown):
        return held, (
            f"the episodes of {', '.join(sorted(names))} were not recorded. "
            + advice_on_episodes(shown)
        )
    return held, None


def _held_by_transforms(env: Any) -> Any:
    """Return what the transforms of an env hold, or None where one cannot say it."""
    try:
        return env._visit_transforms(_states, ALL)
    except EnvkitError:
        return None


def any_learns(env: Any) -> bool:
    """Check whether a transform of an env learns."""
    return _holds_any(env._visit_transforms(_count, ALL))


def _holds_any(answer: Any) -> bool:
    if isinstance(answer, dict):
        return any(map(_holds_any, answer.values()))
    if isinstance(answer, list | tuple):
        return any(map(_holds_any, answer))
    return bool(answer)


# -------------------------------------------------------------------------------------------- visits


def _learners(transform: Any) -> list[Any]:
    return [one for one in transform.modules() if getattr(one, "learns", False)]


def _freeze(transform: Any, earlier: Any) -> list[bool]:
    """Freeze the transforms that learn, or bring them to where they were; gives how they were before."""
    learners = _learners(transform)
    before = [one.frozen for one in learners]
    for number, one in enumerate(learners):
        one.frozen = True if earlier == ALL else earlier[number]
    return before


def _count(transform: Any, earlier: Any) -> int:
    """Count the transforms that learn."""
    return len(_learners(transform))


def _learnt(transform: Any, earlier: Any) -> list[Any]:
    """Return the states of the transforms that learn, or load them."""
    learners = _learners(transform)
    if earlier == ALL:
        return [deepcopy(dict(one.state_dict())) for one in learners]
    for one, state in zip(learners, earlier, strict=True):
        one.load_state_dict(state)
    return []


def _states(transform: Any, earlier: Any) -> Any:
    """Return the states of all transforms, or load them."""
    if earlier == ALL:
        return deepcopy(dict(transform.state_dict()))
    transform.load_state_dict(earlier)
    return None
