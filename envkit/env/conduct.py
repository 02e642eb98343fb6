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


def faults(env: EnvBase, seed: int | None, start: TensorDictBase | None) -> list[str]:
    """List what an env does wrong, whose data is as its specs say.

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
        return _of_seeding(env, seed) or _faults_of(env, start, _seeded_too(env, seed))
    finally:
        for name, generator in _GENERATORS.items():
            generator.write(before[name])


def _states() -> dict[str, Any]:
    return {name: generator.read() for name, generator in _GENERATORS.items()}


def _faults_of(env: EnvBase, start: TensorDictBase | None, seeded: set[str]) -> list[str]:
    core = env
    while isinstance(inner := getattr(core, "base_env", None), EnvBase):
        core = inner
    lines = list(core._faults())
    try:
        lines += [
            *_drawn_elsewhere(core, start, seeded),
            *_of_a_step(core, start),
            *_of_masks(core, start),
        ]
    except EnvkitError:  # the core cannot be run by itself, with data that is for what is around it
        if core is env:
            raise
    return lines


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
