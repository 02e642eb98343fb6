"""Specs of an env read off one step of it, for envs that declare none."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.data.paths import Key, as_key, as_path
from envkit.data.transition import leaves
from envkit.env.bound_policy import bind_policy
from envkit.env.policy import PolicyLike
from envkit.errors import MissingKeyError, ResetOutputError
from envkit.specs import Composite, make_composite_from_td

Keys = Key | list[Key]


def specs_of_a_step(
    env: Any, policy: PolicyLike, start: TensorDictBase | None, **kinds: Keys | None
) -> dict[str, Composite]:
    """Reset an env, act, step, and describe what was there.

    Args:
        env: its `_reset` and `_step` are called.
        policy: called with the TensorDict.
        start: a root, instead of that of a reset.
        **kinds: keys of "action", "done", "observation" and "reward"; done=None takes those of that name.

    Returns:
        An unbounded full spec of each kind; the state is all of a root but actions and done flags.

    Raises:
        MissingKeyError: (a KeyError) a key is not in the data.
        ResetOutputError: (a RuntimeError) the step gave an entry of no kind.
    """
    with torch.no_grad():
        root = env._reset(None) if start is None else start.copy()
        root = bind_policy(env, policy, trust=True)(root)
        following = env._step(root)
    written = [path for path, _ in leaves(following)]
    paths = {
        kind: [as_path(key) for key in (keys if isinstance(keys, list) else [keys])]
        for kind, keys in kinds.items()
        if keys is not None
    }
    paths.setdefault("done", [path for path in written if path[-1] in rules.DONE_LEAVES])
    with_role = {path for kind in ("done", "observation", "reward") for path in paths[kind]}
    if others := [as_key(path) for path in written if path not in with_role]:
        raise ResetOutputError(
            f"the step gave {others}, which have no declared role. Name them with observation_key=, "
            "reward_key= or done_key=, each a key or a list of keys."
        )
    states = [path for path, _ in leaves(root) if path not in {*paths["action"], *paths["done"]}]
    sides = {"action": root, "state": root}
    return {
        kind: _spec_of(sides.get(kind, following), of_kind)
        for kind, of_kind in {**paths, "state": states}.items()
    }


def _spec_of(td: TensorDictBase, paths: list[tuple[str, ...]]) -> Composite:
    for path in paths:
        if td.get(as_key(path), None) is None:
            raise MissingKeyError(
                f"the data has no {as_key(path)!r}, which was named as an entry of the env; it has "
                f"{sorted(map(str, td.keys(True, True)))}. Name the keys that are there."
            )
    return make_composite_from_td(
        td.select(*(as_key(path) for path in paths)), unsqueeze_null_shapes=False
    )
