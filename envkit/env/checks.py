"""Does an environment do what its specs say?

`check_env_specs` runs a short rollout and compares it with `fake_tensordict`; all deviations are
reported at once. Where the env is refused before there is data (by `outputs`, for example), what it returned
by hand is compared as far as it goes. Then it runs the env a little more and looks at what else it does: input that
is written to, rewards that are left out, masks that are ignored, random numbers that no seed decides. It fixes nothing.
`deviations` compares data with specs.

Conventions
    core  the env inside all wrappers: transforms may do on purpose what a simulator must not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envkit import rules
from envkit.data.arguments import as_bool
from envkit.data.paths import Path, as_key, as_path
from envkit.data.transition import empty_like, leaves
from envkit.env.base import EnvBase
from envkit.env.deviations import changed_paths, deviations, distinct
from envkit.env.learning import left_as_it_was
from envkit.env.wrapper_hints import require_env
from envkit.errors import (
    EnvkitError,
    EnvSpecWarning,
    OutOfSpecError,
    RolloutError,
)
from envkit.process_wide import warn
from envkit.specs import Composite


def check_env_specs(
    env: EnvBase,
    return_contiguous: bool | None = None,
    check_dtype: bool = True,
    seed: int | None = None,
    tensordict: TensorDictBase | None = None,
    break_when_any_done: bool | None = None,
    *,
    strict: bool = False,
) -> None:
    """Compare random steps of an env with its specs, and look at what else it does; silent when all is well.

    The env is seeded: with ``seed``, else with the seed that it has. Transforms that learn, such as `VecNorm`, learn
    nothing from it. Afterwards the env is where it was, its seed and generators included. Where an env cannot say
    where it is (see `record_for_resume`), only its transforms are put back, and the next call must be a reset.

    Wrong data of an env is an error. Unusual data is one `EnvSpecWarning` with all points: random
    numbers that ``set_seed`` does not decide, of a global generator or of one that the env hides, and rewards in float64.

    Args:
        env: any environment.
        return_contiguous: stack the rollout densely; None: see `EnvBase.rollout`.
        check_dtype: compare dtypes too.
        seed: seeds the env first.
        tensordict: what to start from.
        break_when_any_done: stop rule of the rollout.
        strict: True raises for what is unusual, too.

    Raises:
        ArgumentTypeError: ``env`` is no env, or the class of one.
        OutOfSpecError: (an AssertionError) lists every key that is missing or too many, and every
            shape, dtype and device that differs. It also lists every value outside its spec, every NaN, every refusal,
            and every entry that was written to after it had been returned.
            Of an env whose data is right: input that is written to, rewards left out, masks ignored, random numbers that no seed decides.

    Example:
        >>> from envkit import PendulumEnv, check_env_specs
        >>> check_env_specs(PendulumEnv())
    """
    require_env("env", env)
    as_bool("strict", strict)
    with left_as_it_was(env):
        wrong, unusual = _problems_of(
            env, return_contiguous, check_dtype, seed, tensordict, break_when_any_done
        )
    if strict:
        wrong, unusual = [*wrong, *unusual], []
    if wrong:
        raise OutOfSpecError(
            f"{env} does not do what its specs say:\n{_listed(wrong)}\nCorrect the specs, or what _reset and _step return."
        )
    if unusual:
        warn(
            f"the data of {env} is as its specs say, but some of it is unusual:\n{_listed(unusual)}\nPass strict=True for "
            "an error instead.",
            EnvSpecWarning,
        )


def _listed(lines: list[str]) -> str:
    return "\n".join(f"  - {line}" for line in distinct(lines))


def _problems_of(
    env: EnvBase,
    return_contiguous: bool | None,
    check_dtype: bool,
    seed: int | None,
    tensordict: TensorDictBase | None,
    break_when_any_done: bool | None,
) -> tuple[list[str], list[str]]:
    """List what is wrong with an env, and where nothing is, what is unusual."""
    if seed is not None:
        env.set_seed(seed)
    run = partial(
        env.rollout,
        3,
        tensordict=tensordict,
        auto_reset=True,
        break_when_any_done=break_when_any_done,
    )
    find = partial(
        deviations,
        _lasting_specs(env),
        device=env.device,
        check_dtype=check_dtype,
        accept_nan=env._facts.gives_nan,
    )
    try:
        problems = find(env.fake_tensordict(), run(return_contiguous=return_contiguous))
    except RolloutError:  # perhaps steps cannot be stacked because one of them is not as it says
        problems = find(env.fake_tensordict(), run(return_contiguous=False))
        if not problems:
            raise
    except EnvkitError as error:
        problems = _by_hand(env, tensordict, find) or [str(error)]
    else:
        problems += _alone(env, tensordict, find)
    return (problems, []) if problems else _faults(env, seed, tensordict)


def _lasting_specs(env: EnvBase) -> Composite:
    """Return the specs without the options that the data of the last random action allowed."""
    specs = env.specs
    for action, _ in env._facts.action_masks:
        if (leaf := env.full_action_spec.get(action, None)) is not None:
            (leaf := leaf.clone()).update_mask(None)
            specs["input_spec", "full_action_spec", *as_path(action)] = leaf
    return specs


def _by_hand(env: EnvBase, tensordict: TensorDictBase | None, find: partial) -> list[str]:
    """Reset and step until the env is refused, and list what deviates up to there."""
    fake = env.fake_tensordict()
    bare = fake.exclude("next", *env.action_keys)
    start = None if tensordict is None else tensordict.copy()
    try:
        root = env.reset(start)
    except EnvkitError as error:
        return [f"reset: {error}", *_unrefused(env, "_reset", start, bare, find)]
    lines = find(bare, root)
    for _ in range(3):
        td = env.rand_action(root)
        try:
            root = env.step_mdp(env.step(td))
        except EnvkitError as error:
            return [*lines, f"step: {error}", *_unrefused(env, "_step", td, fake.get("next"), find)]
    return lines


def _unrefused(
    env: EnvBase,
    method: str,
    td: TensorDictBase | None,
    wanted: TensorDictBase,
    find: partial,
) -> list[str]:
    """List what deviates in what a hook returns, without the checks of the env; done flags may still be missing."""
    with suppress(NotImplementedError, EnvkitError):  # envs of several parts have other ways
        out = getattr(env, method)(td)
        expected = env.batch_size if td is None else td.batch_size
        if isinstance(out, TensorDictBase) and out is not td and out.batch_size == expected:
            scalars = (*env.done_keys, *env.reward_keys)
            sides = wanted.exclude(*scalars), out.exclude(*scalars)
            if method == "_step":
                sides = (empty_like(side, {"next": side}) for side in sides)
            return find(*sides)
    return []


def _alone(env: EnvBase, tensordict: TensorDictBase | None, find: partial) -> Iterator[str]:
    """Compare steps one by one, and name what a later step has written to.

    A dense rollout leaves out what only some of its roots hold, and keeps no tensor that an env gave.
    """
    fake, root = env.fake_tensordict(), env.reset(None if tensordict is None else tensordict.copy())
    taken = []
    for name in ("reset", "first step", "second step"):
        taken.append((name, root, root.apply(torch.clone)))  # td.clone() fails on nested tensors
        data = env.step(env.rand_action(root.copy()))
        yield from find(fake, data)
        if env._rows_done(data.get("next")).any():
            break
        root = env.step_mdp(data)
    for name, kept, copy in taken:
        for path in changed_paths(copy, kept):
            yield (
                f"{as_key(path)!r} of the {name} was written to by a later step: return a copy, "
                "value.clone()"
            )


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


def _faults(
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
        if not (elsewhere or seeded):
            wrong += _of_shared_state(core, start, seed)
    except EnvkitError:  # the core cannot be run by itself, with data that is for what is around it
        if core is env:
            raise
    return wrong, [] if wrong else unusual


def _wide_rewards(env: EnvBase) -> Iterator[str]:
    for key in env.reward_keys:
        if env.full_reward_spec[key].dtype == torch.float64:
            yield f"the reward {key!r} is float64, and most losses take float32: cast it, e.g. with DoubleToFloat"


def _begun(env: EnvBase, start: TensorDictBase | None) -> TensorDictBase:
    """Return a root of an env, with an action."""
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
    """Return the names of the global generators that an env seeds with itself (``self.rng = torch.manual_seed(seed)``)."""
    once = _states()
    for generator in _GENERATORS.values():
        generator.draw()
    env.set_seed(seed)
    return {name for name, state in _states().items() if _is_same(once[name], state)}


def _drawn_elsewhere(env: EnvBase, start: TensorDictBase | None, seeded: set[str]) -> Iterator[str]:
    """Check whether global generators have moved that the seed of the env does not decide."""
    before = _states()
    env.step(_begun(env, start))
    for name, state in _states().items():
        if name not in seeded and not _is_same(before[name], state):
            yield (
                f"a reset or a step draws from the global generator of {name}, which set_seed does not "
                "touch: draw from a generator of the env's own, made again in _set_seed"
            )


def _unseeded(env: EnvBase, start: TensorDictBase | None, seed: int) -> Iterator[str]:
    """Check whether the same seed gives the same reset and step again."""
    runs = []
    for _ in range(2):
        env.set_seed(seed)
        root = _begun(env, start)
        if isinstance(root, LazyStackedTensorDict):
            return
        following = env.step(root.copy()).get("next")
        # A value that counts on through resets, such as the number of a trajectory, is no draw.
        runs.append(
            [td.exclude(*env._facts.bookkeeping).apply(torch.clone) for td in (root, following)]
        )
    changed = {as_key(path) for pair in zip(*runs, strict=True) for path in _unlike(*pair)}
    if changed:
        yield (
            f"a reset and a step after set_seed({seed}) give other data than the ones after set_seed({seed}) before, in "
            f"{', '.join(sorted(map(repr, changed)))}: seed in _set_seed whatever the env draws from"
        )


def _unlike(one: TensorDictBase, other: TensorDictBase) -> set[Path]:
    """Return the paths of the entries that one of the two does not have, or with other values."""
    known, now = ({path for path, _ in leaves(td)} for td in (one, other))
    return known ^ now or set(changed_paths(one, other))


def _of_reset_masks(env: EnvBase, start: TensorDictBase | None, seed: int) -> Iterator[str]:
    """Check whether a batch-locked env leaves the rows in their episodes that a `_reset` mask leaves out.

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
        if one is None or other is None or _unlike(one, other):
            return
        kept, after = next_of_others(resets=False), next_of_others(resets=True)
    except EnvkitError:
        return  # it says so when a mask comes, or where it is seeded in the middle of an episode
    if kept is not None and after is not None:
        for path in changed_paths(kept, after):
            yield (
                f"{as_key(path)!r} of rows that a '_reset' mask leaves out changes after the reset: a batched env must "
                "honour the mask in _reset"
            )


def _of_shared_state(env: EnvBase, start: TensorDictBase | None, seed: int) -> Iterator[str]:
    """Check whether steps and resets of some sub-envs move the others, as state of their class does.

    Only entries count that are the same with another seed: sub-envs may share a generator of random numbers.
    """
    if not env._rows_are_envs or env.batch_size[0] < 2:
        return
    env.set_seed(seed)
    begun = _begun(env, start)
    first = begun.select(*env.action_keys)
    second = env.rand_action(env.step_mdp(env.step(begun))).select(*env.action_keys)

    def next_of_others(what: str = "", seed: int = seed) -> dict[Path, Any] | None:
        env.set_seed(seed)
        root = env.step_mdp(env.step(_begun(env, start).update(first)))
        if isinstance(root, LazyStackedTensorDict) or bool(env._rows_done(root).any()):
            return None
        moving = torch.zeros(root.batch_size, dtype=torch.bool, device=root.device)
        moving[::2] = True
        acted = root.copy().update(second)
        if what == "step":
            env.step(acted.copy().set(rules.STEP, moving))
        elif what == "reset" and () in env.done_levels:
            env.reset(root.set(rules.RESET, moving.unsqueeze(-1)))
        following = env.step(acted.set(rules.STEP, ~moving)).get("next")
        following = following.exclude(*env._facts.bookkeeping)
        found = dict(leaves(following))
        return {
            path: leaf[~moving].clone()
            for path, leaf in found.items()
            if isinstance(leaf, torch.Tensor) and not leaf.is_nested
        }

    runs = [next_of_others(), next_of_others()]
    try:
        runs.append(next_of_others(seed=seed ^ 1))
    except EnvkitError:
        return  # a game that begins otherwise may not allow the same actions
    moved = [next_of_others("step"), next_of_others("reset")]
    for path, kept in (runs[0] or {}).items():
        still = [run is not None and _is_alike(kept, run.get(path)) for run in runs]
        if all(still) and not all(run is None or _is_alike(kept, run.get(path)) for run in moved):
            yield (
                f"{as_key(path)!r} of sub-envs that are not stepped changes with steps or resets of others: they share state, such "
                "as an attribute of their class or a variable of a module. Keep it in attributes of self, set in __init__"
            )


def _is_alike(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return (
        other is not None
        and one.shape == other.shape
        and not changed_paths(TensorDict({"value": one}), TensorDict({"value": other}))
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_is_same(value, other[name]) for name, value in one.items())
    return bool(np.array_equal(one, other)) if hasattr(one, "shape") else one == other


def _of_a_step(env: EnvBase, start: TensorDictBase | None) -> list[str]:
    """Check what `_step` does to its input, and what it gives before it is completed."""
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
    """Check whether a batch-locked env leaves the rows alone that a `_step` mask leaves out."""
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
            "batched env must honour the mask in _step"
        )
