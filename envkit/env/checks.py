"""Does an environment do what its specs say?

`check_env_specs` runs a short rollout and compares it with `fake_tensordict`; all deviations are
reported at once. Where the env is refused before there is data (by `outputs`, say), what it returned
by hand is compared as far as it goes. It fixes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch
from tensordict import TensorDictBase

from envkit.data.arguments import as_bool
from envkit.data.paths import as_key
from envkit.data.transition import empty_like
from envkit.env.base import EnvBase
from envkit.env.conduct import faults
from envkit.env.deviations import changed_paths, deviations, distinct
from envkit.env.foreign import known_wrapping_of
from envkit.env.learning import left_as_it_was
from envkit.errors import (
    ArgumentTypeError,
    EnvkitError,
    EnvSpecWarning,
    OutOfSpecError,
    RolloutError,
)

__all__ = ["check_env_specs"]


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

    What makes the data of an env wrong is an error. What is unusual is one `EnvSpecWarning` with all points: random
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
        OutOfSpecError: an AssertionError that lists every key that is missing or too many, every
            shape, dtype and device that differs, every value outside its spec and every NaN, what
            the env was refused for, and every entry that was written to after it had been returned.
            Of an env whose data is right: what it does wrong, see `conduct`.
    """
    _require_env(env)
    as_bool("strict", strict)
    with left_as_it_was(env):
        wrong, unusual = _found(
            env, return_contiguous, check_dtype, seed, tensordict, break_when_any_done
        )
    if strict:
        wrong, unusual = [*wrong, *unusual], []
    if wrong:
        raise OutOfSpecError(
            f"{env} does not do what its specs say:\n{_listed(wrong)}\nCorrect the specs, or what _reset and _step return."
        )
    if unusual:
        warnings.warn(
            f"the data of {env} is as its specs say, but some of it is unusual:\n{_listed(unusual)}\nPass strict=True for "
            "an error instead.",
            EnvSpecWarning,
            stacklevel=2,
        )


def _listed(lines: list[str]) -> str:
    return "\n".join(f"  - {line}" for line in distinct(lines))


def _found(
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
        env.specs,
        device=env.device,
        check_dtype=check_dtype,
        accept_nan=env._gives_nan,
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
    return (problems, []) if problems else faults(env, seed, tensordict)


def _require_env(env: object) -> None:
    if isinstance(env, EnvBase):
        return
    is_class = isinstance(env, type)
    given = f"the class {env.__name__}" if is_class else f"a {type(env).__name__}"
    wrapping = known_wrapping_of(env)
    fix = f"Wrap it: check_env_specs({wrapping})."
    if wrapping is None:
        fix = f"Pass an instance: check_env_specs({f'{env.__name__}(...)' if is_class else 'env'})."
    raise ArgumentTypeError(f"check_env_specs was given {given}, but runs an env of envkit. {fix}")


def _by_hand(env: EnvBase, tensordict: TensorDictBase | None, find: partial) -> list[str]:
    """Reset and step until the env is refused, and list what deviates up to there."""
    fake = env.fake_tensordict()
    bare = fake.exclude("next", *env.action_keys)
    given = None if tensordict is None else tensordict.copy()
    try:
        root = env.reset(given)
    except EnvkitError as error:
        return [f"reset: {error}", *_unrefused(env, "_reset", given, bare, find)]
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
    given: TensorDictBase | None,
    wanted: TensorDictBase,
    find: partial,
) -> list[str]:
    """Look at what a hook returns without the checks of the env; done flags may still be missing."""
    with suppress(NotImplementedError, EnvkitError):  # envs of several parts have other ways
        out = getattr(env, method)(given)
        expected = env.batch_size if given is None else given.batch_size
        if isinstance(out, TensorDictBase) and out is not given and out.batch_size == expected:
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
