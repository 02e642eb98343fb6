"""How data of one step is merged and skipped: the walk over TensorDicts for `rules`.

Every decision is taken in `rules`; this module only visits leaves. It knows TensorDict and
neither envs nor simulators.

Conventions
    td        root of a transition: what was known before the action; ``td["next"]`` what it made.
    masks     dict level -> bool mask without trailing singleton, as `collect_reset_masks` gives it.
    path      leaf key as a tuple of strings.
    uneven    a lazy stack below a name whose parts differ in keys or shapes; its entries are no tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from envkit import rules
from envkit.data.paths import Key, Path, as_key, as_path

__all__ = [
    "OutputLeaf",
    "choose_leaf",
    "copied",
    "drop_private",
    "is_uneven",
    "leaves",
    "selected_rows",
    "skipped_next",
    "stepped_rows",
]

OutputLeaf = tuple[Path, str, Any]  # path, kind (observation, reward or done), spec


def leaves(td: TensorDictBase, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Visit the leaves of a TensorDict, depth first in key order; non-tensor ones and uneven stacks are leaves."""
    for name, value in td.items():
        if type(value) is torch.Tensor:
            yield (*prefix, name), value
            continue
        is_stack = isinstance(value, LazyStackedTensorDict)
        if not isinstance(value, TensorDictBase) or (is_stack and _is_one(value)):
            yield (*prefix, name), value
        else:
            yield from leaves(value, (*prefix, name))


def _is_one(stack: LazyStackedTensorDict) -> bool:
    """Say whether a lazy stack is an entry by itself, not a node of tensors."""
    return is_non_tensor(stack) or is_uneven(stack)


def is_uneven(node: LazyStackedTensorDict) -> bool:
    """Say whether the parts of a lazy stack differ in keys or shapes."""
    first, *others = (
        {path: getattr(value, "shape", None) for path, value in leaves(part)}
        for part in node.tensordicts
    )
    return any(other != first for other in others)


def empty_like(td: TensorDictBase, source: dict[str, Any] | None = None) -> TensorDict:
    """Make a TensorDict with the batch size, names and device of ``td``, holding ``source``."""
    return TensorDict(source or {}, batch_size=td.batch_size, device=td.device)


# --------------------------------------------------------------------------------- not stepped


def skipped_next(
    td: TensorDictBase,
    outputs: Sequence[OutputLeaf],
    *,
    batch_dims: int,
    state_keys: Collection[Path],
    own: Collection[Key] = (),
) -> TensorDict:
    """Build ``next`` of rows that are not stepped: their root values where known, else zeros.

    Args:
        td: root, any batch size.
        outputs: what a step gives.
        batch_dims: leading axes of their specs that are batch axes.
        state_keys: inputs of the env besides actions.
        own: observations that only some parts of a stack have.
    """
    following = empty_like(td)
    rewards = {path for path, kind, _ in outputs if kind == "reward"}
    uneven = _uneven_nodes(td, {path[0] for path, _, _ in outputs if len(path) > 1})
    for place, node in uneven.items():
        below = [(path[1:], kind, spec) for path, kind, spec in outputs if path[0] == place]
        states = [path[1:] for path in state_keys if path[0] == place]
        parts = (
            skipped_next(part, _of_part(below, node, i), batch_dims=batch_dims, state_keys=states)
            for i, part in enumerate(node.tensordicts)
        )
        following.set(place, LazyStackedTensorDict(*parts, stack_dim=node.stack_dim))
    for path, _, spec in outputs:
        if path[0] in uneven:
            continue
        shape = (*td.batch_size, *spec.shape[batch_dims:])
        known = rules.is_at_root(path, reward_keys=rewards, state_keys=state_keys)
        previous = td.get(as_key(path), None) if known else None
        if not _can_stay(previous, shape, td.batch_size):
            previous = spec[(0,) * batch_dims].zero(td.batch_size)
            if is_non_tensor(previous) and td.device is None:  # rows that were stepped name none
                previous.clear_device_()
        following.set(as_key(path), previous)
    _take_forms(following, td)
    for key in own:
        _take_own(following, td, as_path(key))
    return following


def _take_own(following: Any, root: Any, path: Path) -> None:
    """Write an entry into those parts of ``following`` that have it in ``root``, in place."""
    if isinstance(following, LazyStackedTensorDict) and isinstance(root, LazyStackedTensorDict):
        for part, known in zip(following.tensordicts, root.tensordicts, strict=True):
            _take_own(part, known, path)
        return
    value = root.get(path[0], None)
    if len(path) > 1 and value is not None and path[0] in following.keys():
        _take_own(following.get(path[0]), value, path[1:])
    elif len(path) == 1 and value is not None:
        following.set(path[0], value)


def _can_stay(previous: Any, shape: Sequence[int], batch: torch.Size) -> bool:
    """Say whether a root value can stand in for the value of a step that was not taken."""
    if is_non_tensor(previous):  # one object stands for each of the axes that it lacks
        return previous.shape[: len(batch)] == batch
    return hasattr(previous, "shape") and rules.kept_shape(previous, shape)


def _take_forms(following: TensorDictBase, root: TensorDictBase) -> None:
    """Give nodes of ``following`` the batch size and the tensor class that they have in ``root``, in place."""
    for name, node in list(following.items()):
        like = root.get(name, None) if isinstance(node, TensorDictBase) else None
        if _is_object(like):
            following.set(name, type(cast(Any, like)).from_tensordict(node))
        elif isinstance(like, TensorDictBase) and isinstance(node, TensorDict):
            _take_forms(node, like)
            if all(value.shape[: like.batch_dims] == like.batch_size for _, value in leaves(node)):
                cast(Any, node).batch_size = like.batch_size


def _is_object(value: Any) -> bool:
    return is_tensorclass(value) and not is_non_tensor(value)


def _uneven_nodes(td: TensorDictBase, names: Iterable[str]) -> dict[str, LazyStackedTensorDict]:
    nodes = {name: td.get(name, None) for name in names}
    return {
        name: node
        for name, node in nodes.items()
        if isinstance(node, LazyStackedTensorDict) and is_uneven(node)
    }


def _of_part(
    outputs: Sequence[OutputLeaf], stack: LazyStackedTensorDict, part: int
) -> list[OutputLeaf]:
    """Describe the outputs of one part of a stack."""
    place = (*(slice(None),) * stack.stack_dim, part)
    return [(path, kind, spec[place]) for path, kind, spec in outputs]


def choose_leaf(mask: torch.Tensor, fresh: Any, kept: Any) -> Any:
    """Do what `rules.choose` does, for leaves that are no tensors as well, and for a mask on another device."""
    if isinstance(fresh, torch.Tensor) and isinstance(kept, torch.Tensor):
        return rules.choose(mask.to(fresh.device), fresh, kept)
    if mask.ndim == 0:
        return fresh if bool(mask) else kept
    if _is_object(fresh):
        return cast(Any, fresh).apply(partial(choose_leaf, mask), kept)
    rows = zip(mask.unbind(0), fresh.unbind(0), kept.unbind(0), strict=True)
    return NonTensorStack(*(choose_leaf(*row) for row in rows))  # type: ignore[abstract]


def drop_private(td: TensorDictBase, name: str) -> TensorDictBase:
    """Remove every entry called ``name`` at any level, in place."""
    found = [key for key in td.keys(True, True) if as_path(key)[-1] == name]
    return td.exclude(*found, inplace=True) if found else td


def stepped_rows(td: TensorDictBase) -> list[int] | None:
    """Give the rows that the `_step` mask of a root selects, counted along its flattened batch.

    None: all of them, or the mask is where looking at it would wait for a device.

    Raises:
        StepMaskError: the mask does not fit the data.
    """
    mask = td.get(rules.STEP, None)
    return None if mask is None else selected_rows(rules.step_mask(mask, td.batch_size))


def selected_rows(mask: torch.Tensor) -> list[int] | None:
    """Give the rows that a mask of a batch selects, see `stepped_rows`."""
    return mask.flatten().nonzero().squeeze(-1).tolist() if mask.is_cpu else None


def copied(td: TensorDictBase) -> TensorDictBase:
    """Copy all tensors, also those of unlike shapes, at which tensordict's own ``clone`` fails."""
    if not any(value.is_nested for _, value in leaves(td) if isinstance(value, torch.Tensor)):
        return td.clone()
    return cast(TensorDictBase, td.apply(torch.clone, filter_empty=False))
