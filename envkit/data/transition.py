"""How data of one step is merged, skipped and carried: the walk over TensorDicts for `rules`.

Every decision is taken in `rules`; this module only visits leaves. It knows TensorDict and
neither envs nor simulators.

Conventions
    td        root of a transition: what was known before the action; ``td["next"]`` what it made.
    masks     dict level -> bool mask without trailing singleton, as `collect_reset_masks` gives it.
    path      leaf key as a tuple of strings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
)

from envkit import rules
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.data.results import EnvData
from envkit.errors import MissingKeyError, PrimerError
from envkit.specs import Composite

__all__ = [
    "OutputLeaf",
    "any_done",
    "carry",
    "choose_leaf",
    "collect_reset_masks",
    "drop_private",
    "forget",
    "leaves",
    "merge_reset",
    "skipped_next",
    "step_mdp",
    "stepped_rows",
    "terminated_or_truncated",
]

OutputLeaf = tuple[Path, str, Any]  # path, kind (observation, reward or done), spec


def leaves(td: TensorDictBase, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Visit the leaves of a TensorDict, non-tensor ones included, depth first in key order."""
    for name, value in td.items():
        if isinstance(value, torch.Tensor) or is_non_tensor(value):
            yield (*prefix, name), value
        elif isinstance(value, TensorDictBase):
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def empty_like(td: TensorDictBase, source: dict[str, Any] | None = None) -> TensorDict:
    """Make a TensorDict with the batch size, names and device of ``td``, holding ``source``."""
    return TensorDict(source or {}, batch_size=td.batch_size, device=td.device)


# ------------------------------------------------------------------------------------ next -> root


def carry(
    td: TensorDictBase,
    *,
    reward_keys: Collection[Path] = (),
    done_keys: Collection[Path] = (),
    action_keys: Collection[Path] = (),
    state_keys: Collection[Path] = (),
    keep_other: bool = True,
) -> TensorDictBase:
    """Build the root of the next transition from a finished one; see `rules.is_carried`.

    Returns:
        A new TensorDict that shares the carried tensors with ``td``.

    Raises:
        MissingKeyError: (a KeyError) ``td`` has no ``next``.
    """
    if isinstance(td, LazyStackedTensorDict):
        parts = [
            carry(
                part,
                reward_keys=reward_keys,
                done_keys=done_keys,
                action_keys=action_keys,
                state_keys=state_keys,
                keep_other=keep_other,
            )
            for part in td.tensordicts
        ]
        return LazyStackedTensorDict(*parts, stack_dim=td.stack_dim)

    def walk(node: TensorDictBase, path: Path, from_next: bool, into: dict[str, Any]) -> None:
        for name, value in node.items():
            here = (*path, name)
            if not from_next and here == ("next",):
                continue
            if isinstance(value, TensorDictBase) and not is_non_tensor(value):
                below = into.get(name)
                below = dict(below) if isinstance(below, dict) else {}
                walk(value, here, from_next, below)
                if below or not len(value.keys()):
                    into[name] = below or empty_like(value)
            elif rules.is_carried(
                here,
                from_next=from_next,
                reward_keys=reward_keys,
                done_keys=done_keys,
                action_keys=action_keys,
                state_keys=state_keys,
                keep_other=keep_other,
            ):
                into[name] = value
            else:
                into.pop(name, None)

    following = td.get("next", None)
    if following is None:
        raise MissingKeyError(
            "the TensorDict has no 'next', from which step_mdp takes the root of the next step; it has "
            f"{sorted(map(str, td.keys()))}. Pass what env.step(td) gave."
        )
    source: dict[str, Any] = {}
    walk(td, (), False, source)
    walk(following, (), True, source)
    return _rebuild(source, td, following)


def _rebuild(source: dict[str, Any], like: TensorDictBase, following: TensorDictBase) -> TensorDict:

    def node(values: dict[str, Any], path: Path) -> TensorDict:
        model = like if not path else _node_at(following, like, path)
        built = {
            name: node(value, (*path, name)) if isinstance(value, dict) else value
            for name, value in values.items()
        }
        return TensorDict._new_unsafe(built, batch_size=model.batch_size, device=model.device)

    return node(source, ())


def _node_at(first: TensorDictBase, second: TensorDictBase, path: Path) -> TensorDictBase:
    found = first.get(path, None)
    return found if isinstance(found, TensorDictBase) else second.get(path)


def step_mdp(
    tensordict: TensorDictBase,
    next_tensordict: TensorDictBase | None = None,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
    reward_keys: Key | list[Key] = "reward",
    done_keys: Key | list[Key] = "done",
    action_keys: Key | list[Key] = "action",
) -> EnvData:
    """Give the root of the next step: `next` entries over root ones, rewards and actions dropped.

    Args:
        tensordict: a transition with ``next``, any batch size, lazy stacks included.
        next_tensordict: written to (and returned) when given, instead of a new TensorDict.
        keep_other: keep root entries that the step did not produce.
        exclude_reward, exclude_done, exclude_action: drop that kind of entry. Excluding done also
            drops its companions ``terminated`` and ``truncated`` of the same level.
        reward_keys, done_keys, action_keys: the entries of each kind.

    Returns:
        The next root; ``_reset`` and ``_step`` never survive in it.

    Raises:
        MissingKeyError: (a KeyError) ``tensordict`` has no ``next``.
    """
    rewards, dones, actions = (
        {as_path(key) for key in ([keys] if isinstance(keys, str | tuple) else keys)}
        for keys in (reward_keys, done_keys, action_keys)
    )
    dones |= {(*path[:-1], name) for path in dones for name in rules.DONE_LEAVES}
    following = carry(
        tensordict,
        reward_keys=rewards if exclude_reward else (),
        done_keys=dones if exclude_done else (),
        action_keys=actions if exclude_action else (),
        keep_other=keep_other,
    )
    return following if next_tensordict is None else next_tensordict.update(following)


# --------------------------------------------------------------------------------- not stepped


def skipped_next(
    td: TensorDictBase,
    outputs: Sequence[OutputLeaf],
    *,
    batch_dims: int,
    state_keys: Collection[Path],
) -> TensorDict:
    """Build ``next`` of rows that are not stepped: their root values where known, else zeros.

    Args:
        td: root, any batch size.
        outputs: what a step gives.
        batch_dims: leading axes of their specs that are batch axes.
        state_keys: inputs of the env besides actions.
    """
    following = empty_like(td)
    rewards = {path for path, kind, _ in outputs if kind == "reward"}
    for path, _, spec in outputs:
        shape = (*td.batch_size, *spec.shape[batch_dims:])
        known = rules.is_at_root(path, reward_keys=rewards, state_keys=state_keys)
        previous = td.get(as_key(path), None) if known else None
        if not hasattr(previous, "shape") or not rules.kept_shape(previous, shape):
            previous = spec[(0,) * batch_dims].zero(td.batch_size)
        following.set(as_key(path), previous)
    return following


# ------------------------------------------------------------------------------------------ resets


def collect_reset_masks(
    td: TensorDictBase, done_levels: Mapping[Path, list[str]], done_spec: Composite
) -> dict[Path, torch.Tensor]:
    """Read the `_reset` masks that count, by level.

    Masks beside no done leaf are ignored, and so are those below a mask. A lower one is not even
    checked: it has no effect.

    Raises:
        ResetMaskError: a mask has the wrong dtype or shape.
    """
    masks: dict[Path, torch.Tensor] = {}
    for level, names in done_levels.items():
        mask = td.get(as_key((*level, rules.RESET)), None)
        if mask is None or rules.governing_level(level, masks) is not None:
            continue
        event = done_spec[as_key((*level, names[0]))].shape[len(done_spec.shape) :]
        shape = (*td.batch_size, *event)
        masks[level] = rules.reset_mask(mask, shape, len(td.batch_size), level)
    return masks


def merge_reset(
    td: TensorDictBase,
    fresh: TensorDictBase,
    masks: Mapping[Path, torch.Tensor],
    *,
    keeps_last: bool,
) -> TensorDictBase:
    """Write ``fresh`` into ``td`` where the masks select it, in place; `_reset` entries go.

    Args:
        td: current data; what it holds of the parts that are not reset stays.
        fresh: output of ``_reset``; ignored where nothing was selected.
        masks: from `collect_reset_masks`.
        keeps_last: ``fresh`` holds the last known values of parts that are not selected, which
            serve where ``td`` lacks the key. Otherwise zeros do.
    """
    if isinstance(td, LazyStackedTensorDict) and isinstance(fresh, LazyStackedTensorDict):
        for row, (part, new) in enumerate(zip(td.unbind(0), fresh.unbind(0), strict=True)):
            own = {level: mask[row] for level, mask in masks.items()}
            merge_reset(part, new, own, keeps_last=keeps_last)
        return drop_private(td, rules.RESET)
    for path, value in leaves(fresh):
        if path[-1] == rules.RESET:
            continue
        level = rules.governing_level(path[:-1], masks)
        if level is not None:
            value = _selected(td.get(as_key(path), None), value, masks[level], td, keeps_last)
        td.set(as_key(path), value)
    return drop_private(td, rules.RESET)


def _selected(
    kept: Any, fresh: Any, mask: torch.Tensor, td: TensorDictBase, keeps_last: bool
) -> Any:
    if kept is None:
        if keeps_last or is_non_tensor(fresh):
            return fresh
        kept = torch.zeros_like(fresh)
    if len(td.batch_size) or not isinstance(fresh, torch.Tensor):
        return choose_leaf(rules.reduce_mask(mask, fresh.shape, len(td.batch_size)), fresh, kept)
    if _is_alike(fresh, kept):
        return rules.choose(rules.reduce_mask(mask, fresh.shape, 0), fresh, kept)
    return fresh if bool(mask.any()) else kept  # one env, and an entry that changes its shape


def _is_alike(fresh: torch.Tensor, kept: Any) -> bool:
    """Say whether two tensors have one shape; nested ones tell none."""
    if not isinstance(kept, torch.Tensor) or fresh.is_nested or kept.is_nested:
        return False
    return fresh.shape == kept.shape


def forget(
    root: TensorDictBase,
    paths: Iterable[Path],
    ended: TensorDictBase,
    levels: Mapping[Path, list[str]],
) -> None:
    """Set to zero, in place, what a policy remembers of episodes that have ended.

    Args:
        root: root of the next step, after resets.
        paths: tensors in it that are the policy's alone: it wrote them under ``next``, and no spec of the
            env declares them. Nobody else can say what they are when an episode begins.
        ended: ``next`` of the step, whose done flags say which episodes those are.
        levels: done leaves by level.

    Raises:
        PrimerError: (a RuntimeError) an entry could belong to several levels.
    """
    if isinstance(root, LazyStackedTensorDict) and isinstance(ended, LazyStackedTensorDict):
        for part, own in zip(root.tensordicts, ended.tensordicts, strict=True):
            forget(part, paths, own, levels)
        return
    tops = [level for level in levels if rules.governing_level(level, levels) == level]
    for path in paths:
        level = tops[0] if len(tops) == 1 else rules.governing_level(path[:-1], tops)
        if level is None:
            raise PrimerError(
                f"the policy remembers {as_key(path)!r}, but the env begins episodes at "
                f"{list(map(as_key, tops))}, and nothing says which of them it obeys. Append a "
                "TensorDictPrimer with reset_key=."
            )
        mask, kept = _ended(ended, level, levels[level]), root.get(as_key(path))
        if mask is not None and bool(mask.any()):
            mask = rules.reset_mask(mask, mask.shape, root.batch_dims, level)
            mask = rules.reduce_mask(mask, kept.shape, root.batch_dims)
            root.set(as_key(path), rules.choose(mask, torch.zeros_like(kept), kept))


def choose_leaf(mask: torch.Tensor, fresh: Any, kept: Any) -> Any:
    """Do what `rules.choose` does, for leaves that are no tensors as well."""
    if isinstance(fresh, torch.Tensor) and isinstance(kept, torch.Tensor):
        return rules.choose(mask, fresh, kept)
    if mask.ndim == 0:
        return fresh if bool(mask) else kept
    rows = zip(mask.unbind(0), fresh.unbind(0), kept.unbind(0), strict=True)
    return NonTensorStack(*(choose_leaf(*row) for row in rows))  # type: ignore[abstract]


def drop_private(td: TensorDictBase, name: str) -> TensorDictBase:
    """Remove every entry called ``name`` at any level, in place."""
    found = [key for key in td.keys(True, True) if as_path(key)[-1] == name]
    return td.exclude(*found, inplace=True) if found else td


def any_done(td: TensorDictBase, done_levels: Mapping[Path, list[str]]) -> bool:
    """Say whether any done leaf is set; if so write the `_reset` mask of every level.

    A level's mask is the OR of its done leaves, in their shape.
    """
    masks = {level: _ended(td, level, names) for level, names in done_levels.items()}
    if not any(bool(mask.any()) for mask in masks.values() if mask is not None):
        return False
    for level, mask in masks.items():
        if mask is not None:
            td.set(as_key((*level, rules.RESET)), mask)
    return True


def _ended(td: TensorDictBase, level: Path, names: Iterable[str]) -> torch.Tensor | None:
    ended = None
    for name in names:
        flag = td.get(as_key((*level, name)), None)
        if flag is not None:
            ended = flag if ended is None else ended | flag
    return ended


def terminated_or_truncated(
    tensordict: TensorDictBase,
    full_done_spec: Composite | None = None,
    key: str | None = "_reset",
    write_full_false: bool = False,
) -> bool:
    """OR the end flags of each level and write the result under ``key`` beside them.

    Args:
        tensordict: data with done leaves, any batch size; written to.
        full_done_spec: says which leaves count; None takes all called done, terminated, truncated.
        key: name of the written masks, which have the shape of the flags; None writes none.
        write_full_false: write the masks even when all of them are False.

    Returns:
        Whether any flag is set.
    """
    if full_done_spec is not None:
        paths = [as_path(leaf) for leaf in full_done_spec.keys(True, True)]
    else:
        paths = [path for path, _ in leaves(tensordict) if path[-1] in rules.DONE_LEAVES]
    levels: dict[Path, list[str]] = {}
    for path in paths:
        levels.setdefault(path[:-1], []).append(path[-1])
    masks = {level: _ended(tensordict, level, names) for level, names in levels.items()}
    found = any(bool(mask.any()) for mask in masks.values() if mask is not None)
    if key is not None and (found or write_full_false):
        for level, mask in masks.items():
            if mask is not None:
                tensordict.set(as_key((*level, key)), mask)
    return found


def stepped_rows(td: TensorDictBase) -> list[int] | None:
    """Give the rows that the `_step` mask of a root selects, counted along its flattened batch.

    None: all of them, or the mask is where looking at it would wait for a device.

    Raises:
        StepMaskError: the mask does not fit the data.
    """
    mask = td.get(rules.STEP, None)
    if mask is None or mask.device.type != "cpu":
        return None
    return rules.step_mask(mask, td.batch_size).flatten().nonzero().squeeze(-1).tolist()
