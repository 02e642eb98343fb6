"""What an env does beside giving data of the right form, for `checks` to tell.

Each function runs an env a little and gives lines that name a fault and its cure: input that is written
to, rewards that are left out, masks that are ignored, random numbers that no seed decides. It compares
no data with specs; `deviations` does.

Conventions
    core  the env inside all wrappers: transforms may do on purpose what a simulator must not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envkit import rules
from envkit.data.paths import as_key
from envkit.data.transition import leaves
from envkit.env.base import EnvBase
from envkit.env.deviations import changed_paths
from envkit.errors import EnvkitError

__all__ = ["faults"]


class _Generator(NamedTuple):
    """A global generator of random numbers."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    draw: Callable[[], Any]


_GENERATORS = {
    "torch": _Generator(torch.get_rng_state, torch.set_rng_state, lambda: torch.rand(())),
    "NumPy": _Generator(
        lambda: np.random.get_state(legacy=False), np.random.set_state, np.random.random
    ),
    "Python": _Generator(random.getstate, random.setstate, random.random),
}


# Some actions change nothing, with or without a mask.
_DRAWS = 8


def faults(
    env: EnvBase, seed: int | None, start: TensorDictBase | None
) -> tuple[list[str], list[str]]:
    """List what an env does wrong, whose data is as its specs say; and where nothing is, what is unusual.

    The global generators are left as they were.

    Args:
        env: it is seeded, with ``seed``, else with the seed it has, else with one that torch's global
            generator decides.
        seed: what the user gave.
        start: what a reset is given.
    """
    before = _states()
    try:
        seed = _some_seed(env, seed)
        if lines := _of_seeding(env, seed):
            return lines, []
        return _faults_of(env, start, seed)
    finally:
        for name, generator in _GENERATORS.items():
            generator.write(before[name])


def _states() -> dict[str, Any]:
    return {name: generator.read() for name, generator in _GENERATORS.items()}


def _faults_of(
    env: EnvBase, start: TensorDictBase | None, seed: int
) -> tuple[list[str], list[str]]:
    core, seeded = env, _seeded_too(env, seed)
    while isinstance(inner := getattr(core, "base_env", None), EnvBase):
        core = inner
    wrong, unusual = list(core._faults()), list(_wide_rewards(env))
    try:
        wrong += [*_of_a_step(core, start), *_of_masks(core, start)]
        wrong += _of_reset_masks(core, start, seed)
        elsewhere = list(_drawn_elsewhere(core, start, seeded))
        unusual += elsewhere or _unseeded(core, start, seed)
    except EnvkitError:  # the core cannot be run by itself, with data that is for what is around it
        if core is env:
            raise
    return wrong, [] if wrong else unusual


def _wide_rewards(env: EnvBase) -> Iterator[str]:
    for key in env.reward_keys:
        if env.full_reward_spec[key].dtype == torch.float64:
            yield f"the reward {key!r} is float64, and most losses take float32: cast it, e.g. with DoubleToFloat"


def _begun(env: EnvBase, start: TensorDictBase | None) -> TensorDictBase:
    """Give a root of an env, with an action."""
    return env.rand_action(env.reset(None if start is None else start.copy()))


def _some_seed(env: EnvBase, seed: int | None) -> int:
    if seed is None:
        seed = env._action_seed
    return int(torch.randint(2**31 - 1, ())) if seed is None else seed


def _of_seeding(env: EnvBase, seed: int) -> list[str]:
    try:
        env.set_seed(seed)
    except Exception as error:
        return [
            f"set_seed({seed}) raises {type(error).__name__}: {error}. Seed the simulator in _set_seed, or "
            "let it do nothing where there is nothing random"
        ]
    return []


def _seeded_too(env: EnvBase, seed: int) -> set[str]:
    """Name the global generators that an env seeds with itself (``self.rng = torch.manual_seed(seed)``)."""
    once = _states()
    for generator in _GENERATORS.values():
        generator.draw()
    env.set_seed(seed)
    return {name for name, state in _states().items() if _is_same(once[name], state)}


def _drawn_elsewhere(env: EnvBase, start: TensorDictBase | None, seeded: set[str]) -> Iterator[str]:
    """Look whether global generators have moved that the seed of the env does not decide."""
    before = _states()
    env.step(_begun(env, start))
    for name, state in _states().items():
        if name not in seeded and not _is_same(before[name], state):
            yield (
                f"a reset or a step draws from the global generator of {name}, which set_seed does not "
                "touch: draw from a generator of the env's own, made anew in _set_seed"
            )


def _unseeded(env: EnvBase, start: TensorDictBase | None, seed: int) -> Iterator[str]:
    """Look whether the same seed gives the same reset and step again."""
    runs = []
    for _ in range(2):
        env.set_seed(seed)
        root = _begun(env, start)
        if isinstance(root, LazyStackedTensorDict):
            return
        following = env.step(root.copy()).get("next")
        # What counts on through resets, such as the number of a trajectory, is no draw.
        runs.append([td.exclude(*env._books).apply(torch.clone) for td in (root, following)])
    if any(_differ(*pair) for pair in zip(*runs, strict=True)):
        yield (
            f"a reset and a step after set_seed({seed}) give other data than the ones after set_seed({seed}) before: seed "
            "in _set_seed whatever the env draws from"
        )


def _differ(one: TensorDictBase, other: TensorDictBase) -> bool:
    known, now = ({path for path, _ in leaves(td)} for td in (one, other))
    return known != now or bool(list(changed_paths(one, other)))


def _of_reset_masks(env: EnvBase, start: TensorDictBase | None, seed: int) -> Iterator[str]:
    """Look whether a batch-locked env leaves the rows in their episodes that a `_reset` mask leaves out.

    That shows in the next step of these rows, unless steps draw random numbers: a reset may shift those.
    """
    if not (env.batch_locked and env.batch_dims and env.numel() > 1) or env.keeps_last_output:
        return

    def next_of_others(*, resets: bool, reseed: int | None = None) -> TensorDictBase | None:
        env.set_seed(seed)
        td = _begun(env, start)
        actions = td.select(*env.action_keys)
        root = env.step_mdp(env.step(td))
        if bool(env._rows_done(root).any()) or isinstance(root, LazyStackedTensorDict):
            return None
        chosen = torch.zeros(root.batch_size, dtype=torch.bool, device=root.device)
        chosen.view(-1)[::2] = True
        if resets:
            root = env.reset(root.set(rules.RESET, chosen.unsqueeze(-1)))
        if reseed is not None:
            env.set_seed(reseed)
        return cast(TensorDictBase, env.step(root.update(actions)).get("next")[~chosen]).clone()

    try:
        one, other = (next_of_others(resets=False, reseed=seed + more) for more in (1, 2))
        if one is None or other is None or _differ(one, other):
            return
        kept, after = next_of_others(resets=False), next_of_others(resets=True)
    except EnvkitError:
        return  # it says so when a mask comes, or where it is seeded in the middle of an episode
    if kept is not None and after is not None:
        for path in changed_paths(kept, after):
            yield (
                f"{as_key(path)!r} of rows that a '_reset' mask leaves out changes after the reset: a batched env must "
                "honour the mask in _reset, see docs/custom_envs.md"
            )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_is_same(value, other[name]) for name, value in one.items())
    return bool(np.array_equal(one, other)) if hasattr(one, "shape") else one == other


def _of_a_step(env: EnvBase, start: TensorDictBase | None) -> list[str]:
    """Look at what `_step` does to its input, and at what it gives before it is completed."""
    lines: list[str] = []
    td = _begun(env, start)
    with _watched(env, lines):
        env.step(td)
    return lines


@contextmanager
def _watched(env: EnvBase, lines: list[str]) -> Iterator[None]:
    step = env._step

    def watched(td: TensorDictBase) -> TensorDictBase:
        before = td.apply(torch.clone)
        out = step(td)
        lines.extend(_written(before, td))
        lines.extend(_left_out(env, out))
        lines.extend(_undone(env, out))
        return out

    vars(env)["_step"] = watched
    try:
        yield
    finally:
        del vars(env)["_step"]


def _written(before: TensorDictBase, after: TensorDictBase) -> Iterator[str]:
    known, now = ({path for path, _ in leaves(td)} for td in (before, after))
    names = [*sorted(known ^ now), *(changed_paths(before, after) if known == now else [])]
    for path in names:
        yield (
            f"_step writes {as_key(path)!r} into its input, which is the caller's: return it in a new "
            "TensorDict"
        )


def _left_out(env: EnvBase, out: TensorDictBase) -> Iterator[str]:
    for key in () if env._declared.reward_is_implied else env.reward_keys:
        if out.get(key, None) is None:
            yield f"_step returns no {key!r}, so it is 0 in every step: return it, or zeros"


def _undone(env: EnvBase, out: TensorDictBase) -> Iterator[str]:
    for level, names in env.done_levels.items():
        flags = {name: out.get(as_key((*level, name)), None) for name in names}
        done = flags.pop("done", None)
        for name, flag in flags.items():
            if done is None or flag is None:
                continue
            if bool((flag.flatten() & ~done.flatten()).any()):
                yield (
                    f"{as_key((*level, 'done'))!r} is False where {name!r} is True: leave it out, and it "
                    "is made of the others"
                )


def _of_masks(env: EnvBase, start: TensorDictBase | None) -> Iterator[str]:
    """Look whether a batch-locked env leaves the rows alone that a `_step` mask leaves out."""
    if not (env.batch_locked and env.batch_dims and env.numel() > 1):
        return
    for _ in range(_DRAWS):
        if lines := list(_of_one_mask(env, start)):
            yield from lines
            return


def _of_one_mask(env: EnvBase, start: TensorDictBase | None) -> Iterator[str]:
    td = _begun(env, start)
    if isinstance(td, LazyStackedTensorDict):
        return
    moving = torch.zeros(td.batch_size, dtype=torch.bool, device=td.device)
    moving.view(-1)[::2] = True
    wanted = cast(TensorDictBase, env._skipped_next(td)[~moving])
    try:
        following = env.step(td.copy().set(rules.STEP, moving)).get("next")[~moving]
    except EnvkitError:
        return  # it says so when a mask comes
    for path in changed_paths(wanted, following.select(*wanted.keys(True, True))):
        yield (
            f"{as_key(path)!r} of rows that the '_step' mask leaves out is not that of their root: a "
            "batched env must honour the mask in _step, see docs/custom_envs.md"
        )
