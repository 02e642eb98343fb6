"""The loops of a rollout: act, step, and go on until a stop rule ends it.

How a step is made, and what follows it, is asked of the env.

Conventions
    loop    a generator ``loop(env, root, act, steps, callback)`` of the transitions, batch size ``(*batch,)``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envkit import rules
from envkit.data.paths import Key, as_key, leaf_paths
from envkit.env.policy import Policy
from envkit.env.stepping import Stepping
from envkit.specs import Composite, StackedComposite

__all__ = ["Callback", "nonstop", "steps_of", "until_any_done"]

Callback = Callable[[Any, TensorDictBase], Any]


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
    """Stop after the first step in which any env is done.

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


def until_all_done(
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


LOOPS: dict[rules.Stop, Callable] = {
    "never": nonstop,
    "any": until_any_done,
    "all": until_all_done,
}


def steps_of(
    env: Stepping,
    td: TensorDictBase,
    act: Policy,
    steps: int,
    stop: rules.Stop,
    callback: Callback | None,
    check_every: int,
) -> Iterator[TensorDictBase]:
    """Give the transitions of a rollout; a stop rule is asked after ``check_every`` steps."""
    if check_every == 1 or stop == "never":
        return LOOPS[stop](env, td, act, steps, callback)
    return _checked_now_and_then(env, td, act, steps, stop, check_every)


def _checked_now_and_then(
    env: Stepping, td: TensorDictBase, act: Policy, steps: int, stop: rules.Stop, every: int
) -> Iterator[TensorDictBase]:
    """Step on without asking whether a stop rule ends it, which is asked after ``every`` steps; drop what was too much.

    Only for envs whose steps change nothing but data. Frozen rows are stepped too, and shown as if they were not.
    """
    made: list[TensorDictBase] = []
    ends: list[torch.Tensor] = []
    last, ended = td, None
    for index in range(steps):
        td = env.step(act(td))
        if stop == "all" and ended is not None and ended.ndim:
            td = _repeat_frozen(~ended, td, last, env.full_reward_spec, env.state_keys)
        ended = env._rows_done(td.get("next"))
        made.append(td)
        ends.append(ended.all() if stop == "all" else ended.any())
        if len(made) == every or index == steps - 1:
            flags = torch.stack(ends).cpu().tolist()
            if True in flags:
                yield from made[: flags.index(True) + 1]
                return
            yield from made
            made, ends = [], []
        last, td = td, env.step_mdp(td)


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
