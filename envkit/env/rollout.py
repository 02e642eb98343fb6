"""Run a policy in an environment and stack what happened along time.

This module decides when a rollout stops and what its last step looks like. How a step is made, and
what follows it, is asked of the env. An env that can do a whole run at once offers it through
`EnvBase._fast_rollout`.

Conventions
    stop    "never": what is done is reset; "any": after the first step in which an env is done; "all":
            when all are; what is done before is frozen: it repeats its last transition with reward 0.
    result  TensorDict of batch size (*batch, T); time is the last batch axis, named "time".
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envkit import rules
from envkit.data.arguments import as_int, require_tensordict
from envkit.data.paths import Key, as_key, as_path, leaf_paths
from envkit.data.transition import leaves
from envkit.env.policy import Policy, as_policy, policy_device
from envkit.env.stepping import Stepping
from envkit.errors import ArgumentTypeError, BatchSizeError, DoneError, OptionError, RolloutError
from envkit.specs import Composite, StackedComposite

__all__ = ["nonstop", "rollout", "until_any_done"]

Callback = Callable[[Any, TensorDictBase], Any]


def rollout(
    env: Stepping,
    max_steps: int,
    policy: Any = None,
    callback: Callback | None = None,
    *,
    auto_reset: bool = True,
    auto_cast_to_device: bool = False,
    break_when_any_done: bool | None = None,
    break_when_all_done: bool | None = None,
    return_contiguous: bool = True,
    tensordict: TensorDictBase | None = None,
    set_truncated: bool = False,
    out: TensorDictBase | None = None,
    trust_policy: bool = False,
) -> TensorDictBase:
    """Do what `EnvBase.rollout` documents."""
    max_steps = as_int("max_steps", max_steps, least=1, meaning="the most steps to take")
    stop = _stop_rule(break_when_any_done, break_when_all_done)
    if callback is not None and not callable(callback):
        raise ArgumentTypeError(
            f"callback is {callback!r}, of type {type(callback).__name__}, which cannot be called. "
            "Pass a function callback(env, td), or None."
        )
    if tensordict is not None:
        require_tensordict("tensordict", tensordict)
    if out is not None:
        _require_dense(out, return_contiguous)
    if set_truncated:
        _require_truncated(env)
    act = as_policy(env, policy, trust=trust_policy)
    if policy is None and env._draws_its_own:
        policy = act  # nobody may draw in its place
    if auto_cast_to_device:
        act = _on_device(act, policy_device(policy), env.device)
    if max_steps > 1 and auto_reset:
        env._expect_run(stop, policy)
    root = _first_root(env, tensordict, auto_reset)
    steps = None
    if callback is None and return_contiguous and env._steps_by_itself:
        steps = env._fast_rollout(stop, root, max_steps, policy, act)
    if steps is None:
        steps = list(_LOOPS[stop](env, root, act, max_steps, callback))
    result = _stack(env, steps, contiguous=return_contiguous) if isinstance(steps, list) else steps
    if set_truncated:
        _truncate_last(env, result)
    if out is not None:
        result = _written(result, out)
    result.refine_names(..., "time")
    return result


def _stop_rule(any_done: bool | None, all_done: bool | None) -> rules.Stop:
    if any_done and all_done:
        raise OptionError(
            "break_when_any_done and break_when_all_done are both True, but they exclude each "
            "other. Pass one of them."
        )
    if all_done:
        return "all"
    return "never" if any_done is False else "any"


def _first_root(env: Stepping, td: TensorDictBase | None, auto_reset: bool) -> TensorDictBase:
    if td is not None:
        td = td.copy()  # what the caller has is not written to
        if td.device is None and env.device is not None:
            td = td.to(env.device)  # as all that follows
    if auto_reset:
        return env.reset(td)
    if td is None:
        raise RolloutError(
            "rollout(auto_reset=False) needs the data to start from. Pass tensordict=, e.g. "
            "env.step_mdp(last_rollout[..., -1]), or let auto_reset=True."
        )
    return env.maybe_reset(td)


# ------------------------------------------------------------------------------------- stop rules


def nonstop(
    env: Stepping,
    td: TensorDictBase,
    act: Policy,
    steps: int,
    callback: Callback | None = None,
    *,
    acted: bool = False,
):
    """Reset whatever is done and go on; the last step triggers no reset.

    ``acted`` says that ``td`` already holds its action.
    """
    for index in range(steps):
        td = td if acted and index == 0 else act(td)
        if index == steps - 1:
            yield env.step(td) if index == 0 else env._step_last(td)
            return
        done, td = env.step_and_maybe_reset(td)
        yield done
        if callback is not None:
            callback(env, done)


def until_any_done(
    env: Stepping,
    td: TensorDictBase,
    act: Policy,
    steps: int,
    callback: Callback | None = None,
    *,
    acted: bool = False,
):
    """rules.Stop after the first step in which any env is done.

    ``acted`` says that ``td`` already holds its action.
    """
    for index in range(steps):
        td = env.step(td if acted and index == 0 else act(td))
        yield td
        if index == steps - 1 or env._rows_done(td.get("next")).any():
            return
        if callback is not None:
            callback(env, td)
        td = env.step_mdp(td)


def _until_all_done(
    env: Stepping, td: TensorDictBase, act: Policy, steps: int, callback: Callback | None
):
    """Freeze what is done with a `_step` mask until everything is."""
    running, last = None, None
    for index in range(steps):
        td = act(td)
        if running is not None:
            td.set(rules.STEP, running)
        td = env.step(td)
        if running is not None and not bool(running.all()):
            td = _repeat_frozen(running, td, last, env.full_reward_spec, env.state_keys)
        yield td
        running = ~env._rows_done(td.get("next"))
        if index == steps - 1 or not running.any():
            return
        if callback is not None:
            callback(env, td)
        last, td = td, env.step_mdp(td)


_LOOPS: dict[rules.Stop, Callable] = {
    "never": nonstop,
    "any": until_any_done,
    "all": _until_all_done,
}


def _repeat_frozen(
    running: torch.Tensor,
    td: TensorDictBase,
    last: TensorDictBase,
    specs: Composite,
    states: Collection[Key],
) -> TensorDictBase:
    """Let rows of finished envs repeat their last transition, but for its reward: that is 0 now.

    Args:
        running: rows that were stepped.
        td: the step just made.
        last: the one before.
        specs: of the rewards; those of unlike rows are stacked.
        states: entries that are repeated though they may be rewards as well.
    """
    if isinstance(td, LazyStackedTensorDict) and isinstance(last, LazyStackedTensorDict):
        dim = td.stack_dim
        parts = zip(running.unbind(dim), td.unbind(dim), last.unbind(dim), strict=True)
        rows = [
            _repeat_frozen(
                *part, specs[row] if isinstance(specs, StackedComposite) else specs, states
            )
            for row, part in enumerate(parts)
        ]
        return LazyStackedTensorDict(*rows, stack_dim=dim)
    if running.ndim:
        chosen = td.apply(
            lambda new, old: new if old is None else rules.choose(running, new, old),
            last,
            default=None,
        )
        shown = cast(TensorDictBase, chosen)
    else:
        shown = td if bool(running) else last.copy()
    following = shown.get("next").copy()
    for path in leaf_paths(specs):
        key = as_key(path)
        if key not in states and (paid := following.get(key, None)) is not None:
            following.set(key, rules.choose(running, paid, torch.zeros_like(paid)))
    return shown.set("next", following)


# ------------------------------------------------------------------------------------- the result


def _stack(env: Stepping, steps: list[TensorDictBase], *, contiguous: bool) -> TensorDictBase:
    dim = len(steps[0].batch_size)
    if not contiguous:
        return LazyStackedTensorDict.lazy_stack(steps, dim)
    if strays := _strays(env, steps[0]):
        steps = [td.exclude(*strays, *(("next", *as_path(key)) for key in strays)) for td in steps]
    try:
        return cast(TensorDictBase, torch.stack(cast(list, steps), dim))
    except (RuntimeError, KeyError) as error:
        raise RolloutError(
            "the steps of this rollout cannot be stacked into one tensor each: "
            f"{str(error).rstrip('.')}. Pass return_contiguous=False to get a lazy stack along time."
        ) from error


def _strays(env: Stepping, first: TensorDictBase) -> list[Key]:
    """Name the outputs that no spec declares: only some roots hold them, so they are dropped."""
    declared = {
        *(*env.observation_keys, *env.reward_keys, *env.done_keys, *env.state_keys),
        *first.keys(True, True),
    }
    return [key for key in first.get("next").keys(True, True) if key not in declared]


def _written(result: TensorDictBase, out: TensorDictBase) -> TensorDictBase:
    """Write a result into the front of ``out``, and give that part; ``out`` itself when all is used."""
    *batch, steps = result.batch_size
    room = out.batch_size
    if len(room) != len(batch) + 1 or list(room[:-1]) != batch or room[-1] < steps:
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


def _require_truncated(env: Stepping) -> None:
    if not any("truncated" in names for names in env.done_levels.values()):
        raise DoneError(
            "set_truncated=True needs a 'truncated' entry in the done spec, but the env declares "
            f"{env.done_keys}. Call env.add_truncated_keys() first."
        )


def _truncate_last(env: Stepping, result: TensorDictBase) -> None:
    following = result.get("next")
    for level, names in env.done_levels.items():
        for name in ("truncated", "done") if "truncated" in names else ():
            key = as_key((*level, name))
            flags = following.get(key).clone()
            flags.select(len(result.batch_size) - 1, -1).fill_(True)
            following.set(key, flags)


def _on_device(act: Policy, there: torch.device | None, back: torch.device | None) -> Policy:
    if there is None or there == back:
        return act

    def cast(td: TensorDictBase) -> TensorDictBase:
        acted = act(td.to(there))
        return acted.to(back) if back is not None else acted

    return cast
