"""Which episodes begin again, by the done flags and `_reset` masks of a TensorDict.

Every decision is taken in `rules`; this module only visits leaves, as `transition` does for steps.

Conventions
    masks     dict level -> bool mask without trailing singleton, as `collect_reset_masks` gives it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envkit import rules
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.data.transition import leaves
from envkit.errors import PrimerError
from envkit.specs import Composite
from envkit.specs.annotations import reading_waits


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


def shape_masks_like_done(
    td: TensorDictBase,
    masks: Mapping[Path, torch.Tensor],
    done_levels: Mapping[Path, list[str]],
    done_spec: Composite,
) -> None:
    """Reshape the `_reset` masks of ``td`` to the shape of the done leaves beside them, which `_reset` may expect.

    Args:
        masks: from `collect_reset_masks`.
    """
    batch = tuple(td.batch_size)
    for level, mask in masks.items():
        key = as_key((*level, rules.RESET))
        event = done_spec[as_key((*level, done_levels[level][0]))].shape[len(done_spec.shape) :]
        shape = (*batch, *event)
        if td.get(key).shape == rules.bare_mask_shape(shape, len(batch)) != shape:
            td.set(key, mask[..., None])


def undeclared(following: TensorDictBase | None, declared: Collection[Path]) -> list[Path]:
    """List the tensors of a preset ``next`` that are no entry an env knows: a policy's own."""
    if following is None:
        return []
    return [
        path
        for path, value in leaves(following)
        if isinstance(value, torch.Tensor)
        and path not in declared
        and path[-1] not in (rules.STEP, rules.RESET)
    ]


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
            env declares them. Their values when an episode begins are known to the env alone.
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
        if mask is not None and (reading_waits(mask) or bool(mask.any())):
            mask = rules.reset_mask(mask, mask.shape, root.batch_dims, level)
            mask = rules.reduce_mask(mask, kept.shape, root.batch_dims)
            root.set(as_key(path), rules.choose(mask, torch.zeros_like(kept), kept))


def any_done(td: TensorDictBase, done_levels: Mapping[Path, list[str]]) -> bool:
    """Check whether a done leaf is set that decides; if so write the `_reset` masks of the levels that do.

    Where a level has flags, these decide for all levels below it. A level's mask is the OR of its done
    leaves, in their shape.
    """
    masks = _what_ended(td, done_levels)
    for mask in masks.values():
        if bool(mask.any()):
            _ask_for(td, masks)
            return True
    return False


def mark_done(td: TensorDictBase, done_levels: Mapping[Path, list[str]]) -> None:
    """Write the masks as `any_done` does, without reading whether any flag is set; they may be all False."""
    _ask_for(td, _what_ended(td, done_levels))


def _ask_for(td: TensorDictBase, masks: Mapping[Path, torch.Tensor]) -> None:
    for level, mask in masks.items():
        td.set(as_key((*level, rules.RESET)), mask)


def _what_ended(
    td: TensorDictBase, done_levels: Mapping[Path, list[str]]
) -> dict[Path, torch.Tensor]:
    """Return the masks of the levels that decide and have flags in ``td``."""
    if len(done_levels) > 1:
        done_levels = {
            level: names
            for level, names in done_levels.items()
            if rules.governing_level(level, done_levels) == level
        }
    ended = {level: _ended(td, level, names) for level, names in done_levels.items()}
    return {level: mask for level, mask in ended.items() if mask is not None}


def done_outside(mask: torch.Tensor, td: TensorDictBase, done_keys: Iterable[Key]) -> bool:
    """Check whether parts of the batch that are not stepped are done, which only their own reset begins again.

    Args:
        mask: what is stepped, of the batch size of ``td``.
        td: root of the step.
        done_keys: done leaves.
    """
    flags = (td.get(key, None) for key in done_keys)
    return any(flag is not None and bool(flag[~mask].any()) for flag in flags)


def _ended(td: TensorDictBase, level: Path, names: Iterable[str]) -> torch.Tensor | None:
    ended = None
    for name in names:
        flag = td.get((*level, name) if level else name, None)
        if flag is not None:
            ended = flag if ended is None else ended | flag
    return ended


def terminated_or_truncated(
    data: TensorDictBase,
    full_done_spec: Composite | None = None,
    key: str | None = "_reset",
    write_full_false: bool = False,
) -> bool:
    """OR the end flags of each level and write the result under ``key`` beside them.

    Args:
        data: data with done leaves, any batch size; written to.
        full_done_spec: says which leaves count; None takes all called done, terminated, truncated.
        key: name of the written masks, which have the shape of the flags; None writes none.
        write_full_false: write the masks even when all of them are False. Otherwise masks that are there are
            removed then.

    Returns:
        Whether any flag is set.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import terminated_or_truncated
        >>> flags = {"terminated": torch.tensor([[True], [False]])}
        >>> data = TensorDict(flags | {"truncated": torch.zeros(2, 1, dtype=bool)}, [2])
        >>> terminated_or_truncated(data)
        True
        >>> data["_reset"].flatten()
        tensor([ True, False])
    """
    if full_done_spec is not None:
        paths = [as_path(leaf) for leaf in full_done_spec.keys(True, True)]
    else:
        paths = [path for path, _ in leaves(data) if path[-1] in rules.DONE_LEAVES]
    levels: dict[Path, list[str]] = {}
    for path in paths:
        levels.setdefault(path[:-1], []).append(path[-1])
    masks = {level: _ended(data, level, names) for level, names in levels.items()}
    has_ended = any(bool(mask.any()) for mask in masks.values() if mask is not None)
    if key is None:
        return has_ended
    for level, mask in masks.items():
        place = as_key((*level, key))
        if mask is not None and (has_ended or write_full_false):
            data.set(place, mask)
        elif not has_ended and data.get(place, None) is not None:
            data.pop(place)  # it is of another moment
    return has_ended
