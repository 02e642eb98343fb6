"""Run a policy in an environment and stack what happened along time.

This module decides how a rollout begins and what its result looks like. The steps are made by the `loops`; an
env that can do a whole run at once offers it through `_fast_rollout`.

Conventions
    stop    "never": what is done is reset; "any": after the first step in which an env is done; "all":
            when all are; what is done before is frozen: it repeats its last transition with reward 0.
    result  TensorDict of batch size (*batch, T); time is the last batch axis, named "time".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import Any, TypeVar, cast

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.data.arguments import as_int, require_tensordict
from envkit.data.paths import Key, as_key
from envkit.data.transition import leaves
from envkit.env.loops import steps_of
from envkit.env.policy import PolicyLike, as_policy, on_device, policy_device, replay
from envkit.env.recorded import require_truncated, stack_steps, truncate_last, unrecorded
from envkit.env.runs import Run
from envkit.env.stepping import Stepping
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    OptionError,
    RolloutError,
)
from envkit.specs.annotations import Device, EnvData

__all__ = ["rollout"]


_Env = TypeVar("_Env", bound=Stepping)


def rollout(
    self: _Env,
    max_steps: int,
    policy: PolicyLike = None,
    callback: Callable[[_Env, EnvData], object] | None = None,
    *,
    actions: Iterable[Any] | None = None,
    auto_reset: bool = True,
    auto_cast_to_device: bool = False,
    break_when_any_done: bool | None = None,
    break_when_all_done: bool | None = None,
    return_contiguous: bool | None = None,
    tensordict: TensorDictBase | None = None,
    set_truncated: bool = False,
    out: TensorDictBase | None = None,
    trust_policy: bool = False,
    storing_device: Device | None = None,
    set_state: bool | None = None,
    record_state: bool = True,
    check_every: int = 1,
    pipeline: int = 1,
) -> EnvData:
    """Run a policy for up to ``max_steps`` steps; a method of every env.

    Args:
        max_steps: most steps taken.
        policy: see `envkit.env.policy.as_policy`; None takes random actions.
        callback: called as ``callback(env, td)`` after each step except the last, with the
            transition just completed; what it returns is dropped.
        actions: what is done instead of asking a policy: one action for each step (a tuple of them, or
            a TensorDict, where the env takes several). A sized one caps ``max_steps``.
        auto_reset: reset first; ``tensordict`` then gives batch size, parameters and state.
            False: ``tensordict`` is required, and what is done in it is reset.
        auto_cast_to_device: move data to the policy's device and back.
        break_when_any_done: stop after the first step in which any env is done (the default).
            With both rules False, done envs are reset and collection goes on.
        break_when_all_done: freeze done envs and stop when all are done. Frozen rows repeat their
            last transition with reward 0, so that a row's rewards sum up to its return.
        return_contiguous: stack densely; False gives a lazy stack along time. None: densely, unless the
            specs hold a size of -1.
        tensordict: what to start from.
        set_truncated: mark the last step ``truncated`` and ``done``.
        out: preallocated destination, at least as long as the result, with an entry of the same
            shape and dtype for each of the result's.
        trust_policy: call ``policy`` with the TensorDict whatever its signature.
        storing_device: where the transitions are kept; None leaves them where the env gives them.
        set_state: of the first `reset`, where ``auto_reset`` is set.
        record_state: keep the ``state`` of a stateless env at root and next of every step. It is most of what
            a simulator records, and on a card lies in JAX's share of it.
        check_every: after how many steps a stop rule is asked about all of them. To ask waits for a card. What was
            stepped too far is dropped: the data is the same, but a policy that acts step by step is called for it, up
            to ``check_every - 1`` times, and draws what it draws. Only for envs whose steps change nothing but data.
        pipeline: no longer there; leave it out.

    Returns:
        Transitions, batch size ``(*batch, T)``; T is the number of steps really taken.

    Raises:
        ArgumentError: (a ValueError) ``max_steps`` is below 1, or both ``policy`` and ``actions`` are given.
        ArgumentTypeError: (a TypeError) ``max_steps``, ``callback``, ``tensordict`` or ``out`` is of
            another type.
        OptionError: (a TypeError) both stop rules are True, ``out`` is to be a lazy stack, ``pipeline`` is given, or
            ``check_every`` where steps cannot be dropped, or with a callback or an iterator of actions.
        PolicyError: (a TypeError) ``policy`` is not callable, or gave something else than actions, or an item of
            ``actions`` is none.
        RolloutError: (a RuntimeError) ``auto_reset=False`` without ``tensordict``; ``actions`` end too
            early; steps cannot be stacked, or do not fit ``out``.
        BatchSizeError: ``out`` does not have room for the result.
        DoneError: ``set_truncated`` without a ``truncated`` leaf.
    """
    max_steps = as_int("max_steps", max_steps, least=1, meaning="the most steps to take")
    stop = _stop_rule(break_when_any_done, break_when_all_done)
    if return_contiguous is None:
        return_contiguous = not self._has_varying_sizes
    _require_arguments(callback, tensordict, out, return_contiguous)
    if pipeline != 1:
        raise OptionError(
            f"pipeline={pipeline!r} is given, but rollout no longer splits rows into parts: it was slower than whole steps. "
            "Leave pipeline out; the data is the same."
        )
    check_every = _between_checks(self, check_every, callback, actions)
    if set_truncated:
        require_truncated(self)
    if actions is None:
        act = as_policy(self, policy, trust=trust_policy)
    else:
        max_steps = _number_of(actions, max_steps, policy)
        policy = act = replay(self, actions)
    if policy is None and self._draws_its_own:
        policy = act  # nobody may draw in its place
    if auto_cast_to_device:
        act = on_device(act, policy_device(policy), self.device)
    if max_steps > 1 and auto_reset:
        self._expect_run(stop, policy)
    root = _first_root(self, tensordict, auto_reset, set_state)
    steps = None
    if callback is None and return_contiguous and self._steps_by_itself:
        run = Run(stop, root, max_steps, policy, act, record_state, check_every)
        steps = self._fast_rollout(run)
    if steps is None:
        hidden = unrecorded(self, record_state)
        made = steps_of(self, root, act, max_steps, stop, callback, check_every)
        steps = [_kept(step, hidden, storing_device) for step in made]
    if isinstance(steps, list):
        steps = stack_steps(self, steps, contiguous=return_contiguous)
    result = steps if storing_device is None else steps.to(storing_device)
    if set_truncated:
        truncate_last(self, result)
    if out is not None:
        result = _written(result, out)
    return result.refine_names(..., "time") if return_contiguous else result


def _kept(step: TensorDictBase, hidden: list[Key], device: Device | None) -> TensorDictBase:
    """Give a step as it is recorded."""
    step = step.exclude(*hidden) if hidden else step
    return step if device is None else step.to(device)


def _require_arguments(
    callback: object, td: object, out: TensorDictBase | None, return_contiguous: bool
) -> None:
    if callback is not None and not callable(callback):
        raise ArgumentTypeError(
            f"callback is {callback!r}, of type {type(callback).__name__}, which cannot be called. "
            "Pass a function callback(env, td), or None."
        )
    if td is not None:
        require_tensordict("tensordict", td)
    if out is not None:
        _require_dense(out, return_contiguous)


def _between_checks(env: Stepping, check_every: int, callback: object, actions: object) -> int:
    """Give how many steps are made before a stop rule is asked, and check that some of them may be dropped."""
    every = as_int(
        "check_every", check_every, least=1, meaning="after how many steps flags are read"
    )
    if every == 1:
        return 1
    if callback is not None:
        raise OptionError(
            f"check_every={every} is given with a callback, which would be called for steps that are dropped "
            "afterwards. Leave one of them out."
        )
    if not isinstance(actions, Sized | None):
        raise OptionError(
            f"check_every={every} is given with actions of type {type(actions).__name__}, of which more would be "
            "taken than are done. Pass a list of them, or leave check_every out."
        )
    if kind := env._cannot_drop_steps:
        raise OptionError(
            f"check_every={every} takes steps that may be dropped, but {kind} changes with each step, and not in its "
            "data alone. Leave check_every out."
        )
    return every


def _number_of(actions: Iterable[Any], max_steps: int, policy: PolicyLike) -> int:
    """Give the number of steps that actions are there for, ``max_steps`` at most."""
    if policy is not None:
        raise ArgumentError(
            "policy and actions are both given, but they say the same thing: what to do. Pass one of them."
        )
    if not isinstance(actions, Sized):
        return max_steps
    if not len(actions):
        raise RolloutError("actions is empty. Pass one action for each step.")
    return min(max_steps, len(actions))


def _stop_rule(any_done: bool | None, all_done: bool | None) -> rules.Stop:
    if any_done and all_done:
        raise OptionError(
            "break_when_any_done and break_when_all_done are both True, but they exclude each "
            "other. Pass one of them."
        )
    if all_done:
        return "all"
    return "never" if any_done is False else "any"


def _first_root(
    env: Stepping, td: TensorDictBase | None, auto_reset: bool, set_state: bool | None
) -> TensorDictBase:
    if td is not None:
        td = td.copy()  # what the caller has is not written to
        if td.device is None and env.device is not None:
            td = td.to(env.device)  # as all that follows
    if auto_reset:
        return env.reset(td) if set_state is None else env.reset(td, set_state=set_state)
    if td is None:
        raise RolloutError(
            "rollout(auto_reset=False) needs the data to start from. Pass tensordict=, e.g. "
            "env.step_mdp(last_rollout[..., -1]), or let auto_reset=True."
        )
    return env.maybe_reset(td)


# ------------------------------------------------------------------------------------- the result


def _written(result: TensorDictBase, out: TensorDictBase) -> TensorDictBase:
    """Write a result into the front of ``out``, and give that part; ``out`` itself when all is used."""
    *batch, steps = result.batch_size
    room = out.batch_size
    if not room or list(room[:-1]) != batch or room[-1] < steps:
        raise BatchSizeError(
            f"out has batch size {tuple(room)}, but the rollout has {tuple(result.batch_size)}. "
            "Allocate at least as many steps, time last: env.fake_tensordict() expanded and cloned."
        )
    destination = out if room[-1] == steps else cast(TensorDictBase, out[..., :steps])
    for path, value in leaves(result):
        _require_place(as_key(path), value, destination)
    return destination.update_(result)


def _require_dense(out: Any, return_contiguous: bool) -> None:
    require_tensordict("out", out, "one to write into: env.rollout(n, policy).clone()")
    if not return_contiguous:
        raise OptionError(
            "out is given and return_contiguous is False, but a lazy stack keeps the steps as they are "
            "and writes them nowhere. Leave one of them out."
        )


def _require_place(key: Key, value: Any, destination: TensorDictBase) -> None:
    """Check that ``destination`` holds an entry of the same shape and dtype."""
    place = destination.get(key, None)
    if place is None:
        raise RolloutError(
            f"out has no {key!r}, but the rollout has: it holds "
            f"{sorted(map(str, destination.keys(True, True)))}. Allocate it with every entry of a "
            "rollout: out = env.rollout(n, policy).clone()."
        )
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return
    wanted = tuple(value.shape), value.dtype
    held = tuple(place.shape), getattr(place, "dtype", None)
    if held != wanted:
        raise RolloutError(
            f"{key!r} has shape {held[0]} and dtype {held[1]} in out, but shape {wanted[0]} and dtype "
            f"{wanted[1]} in the rollout. Allocate it so: out = env.rollout(n, policy).clone()."
        )
