"""How a row is shown that is not stepped, and how a step becomes the root of the next one: the walk over TensorDicts for `rules`.

Every decision is taken in `rules`; this module only visits leaves. It knows TensorDict and
neither envs nor simulators.

Conventions
    td        root of a transition: what was known before the action; ``td["next"]`` what it made.
    path      leaf key as a tuple of strings.
    uneven    a lazy stack below a name whose parts differ in keys or shapes; its entries are no tensors.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from envkit import rules
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.errors import MissingKeyError
from envkit.specs.annotations import EnvData

OutputLeaf = tuple[Path, str, Any]  # path, kind (observation, reward or done), spec


def leaves(td: TensorDictBase, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Visit the leaves of a TensorDict, depth first in key order; non-tensor ones and uneven stacks are leaves."""
    for name, value in td.items():
        if type(value) is torch.Tensor:
            yield (*prefix, name), value
            continue
        is_stack = isinstance(value, LazyStackedTensorDict)
        is_entry = is_stack and (is_non_tensor(value) or is_uneven(value))
        if is_entry or not isinstance(value, TensorDictBase):
            yield (*prefix, name), value
        else:
            yield from leaves(value, (*prefix, name))


def is_uneven(node: LazyStackedTensorDict) -> bool:
    """Check whether the parts of a lazy stack differ in keys or shapes."""
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
    partial_keys: Collection[Key] = (),
) -> TensorDict:
    """Build ``next`` of rows that are not stepped: their root values where known, else zeros.

    Args:
        td: root, any batch size.
        outputs: what a step gives.
        batch_dims: leading axes of their specs that are batch axes.
        state_keys: inputs of the env besides actions.
        partial_keys: observations that only some parts of a stack have.
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
        is_shown = rules.is_at_root(path, reward_keys=rewards, state_keys=state_keys)
        previous = td.get(as_key(path), None) if is_shown else None
        if not _can_stay(previous, shape, td.batch_size):
            previous = spec[(0,) * batch_dims].zero(td.batch_size)
            if is_non_tensor(previous) and td.device is None:  # rows that were stepped name none
                previous.clear_device_()
        following.set(as_key(path), previous)
    _take_forms(following, td)
    for key in partial_keys:
        _take_own(following, td, as_path(key))
    return following


def _take_own(following: Any, root: Any, path: Path) -> None:
    """Write an entry into those parts of ``following`` that have it in ``root``, in place."""
    if isinstance(following, LazyStackedTensorDict) and isinstance(root, LazyStackedTensorDict):
        for part, shown in zip(following.tensordicts, root.tensordicts, strict=True):
            _take_own(part, shown, path)
        return
    value = root.get(path[0], None)
    if len(path) > 1 and value is not None and path[0] in following.keys():
        _take_own(following.get(path[0]), value, path[1:])
    elif len(path) == 1 and value is not None:
        following.set(path[0], value)


def _can_stay(previous: Any, shape: Sequence[int], batch: torch.Size) -> bool:
    """Check whether a root value can stand in for the value of a step that was not taken."""
    if is_non_tensor(previous):  # one object stands for each of the axes that it lacks
        return previous.shape[: len(batch)] == batch
    return rules.kept_shape(previous, shape)


def _take_forms(following: TensorDictBase, root: TensorDictBase) -> None:
    """Set, in place, the batch size and the tensor class of nodes of ``following`` to those that they have in ``root``."""
    for name, node in list(following.items()):
        like = root.get(name, None) if isinstance(node, TensorDictBase) else None
        if is_object(like):
            following.set(name, type(cast(Any, like)).from_tensordict(node))
        elif isinstance(like, TensorDictBase) and isinstance(node, TensorDict):
            _take_forms(node, like)
            if all(value.shape[: like.batch_dims] == like.batch_size for _, value in leaves(node)):
                cast(Any, node).batch_size = like.batch_size


def is_object(value: object) -> bool:
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


def drop_private(td: TensorDictBase, name: str) -> TensorDictBase:
    """Remove every entry called ``name`` at any level, in place."""
    found = [key for key in td.keys(True, True) if as_path(key)[-1] == name]
    return td.exclude(*found, inplace=True) if found else td


def stepped_rows(td: TensorDictBase) -> list[int] | None:
    """Return the rows that the `_step` mask of a root selects, counted along its flattened batch.

    None: all of them, or the mask is where looking at it would wait for a device.

    Raises:
        StepMaskError: the mask does not fit the data.
    """
    mask = td.get(rules.STEP, None)
    return None if mask is None else selected_rows(rules.step_mask(mask, td.batch_size))


def selected_rows(mask: torch.Tensor) -> list[int] | None:
    """Return the rows that a mask of a batch selects, see `stepped_rows`."""
    return mask.flatten().nonzero().squeeze(-1).tolist() if mask.is_cpu else None


def copied(td: TensorDictBase) -> TensorDictBase:
    """Copy all tensors, also those of unlike shapes, at which tensordict's own ``clone`` fails."""
    if not any(value.is_nested for _, value in leaves(td) if isinstance(value, torch.Tensor)):
        return td.clone()
    return cast(TensorDictBase, td.apply(torch.clone, filter_empty=False))


def without_device(td: TensorDictBase) -> TensorDictBase:
    """Return the same tensors in a TensorDict of no device; ``clear_device_`` also changes nodes that other data shares."""
    return td.copy().clear_device_()


@dataclass(frozen=True)
class Carrying:
    """Say by path which entries of a transition are at the next root, see `rules.is_carried`: each is asked once."""

    reward_keys: Collection[Path] = ()
    done_keys: Collection[Path] = ()
    action_keys: Collection[Path] = ()
    state_keys: Collection[Path] = ()
    kept_keys: Collection[Path] = ()
    keep_other: bool = True
    keeps_empty_nodes: bool = False
    """Whether nodes of the root that hold no entries are at the next root."""
    answers: dict[tuple[Path, bool], bool] = field(default_factory=dict, init=False, compare=False)
    """Earlier answers, by path and ``from_next``."""

    def __call__(self, path: Path, *, from_next: bool) -> bool:
        """Check whether the entry at ``path`` is carried; see `rules.is_carried`."""
        answer = self.answers.get((path, from_next))
        if answer is None:
            answer = self.answers[path, from_next] = rules.is_carried(
                path,
                from_next=from_next,
                reward_keys=self.reward_keys,
                done_keys=self.done_keys,
                action_keys=self.action_keys,
                state_keys=self.state_keys,
                kept_keys=self.kept_keys,
                keep_other=self.keep_other,
            )
        return answer


def carry(
    td: TensorDictBase, is_carried: Carrying, fresh: TensorDictBase | None = None
) -> TensorDictBase:
    """Build the root of the next transition from a finished one.

    Args:
        td: the transition.
        is_carried: which of its entries.
        fresh: entries that win over those, all of them tensors; no lazy stack.

    Returns:
        A new TensorDict that shares the carried tensors with ``td``.

    Raises:
        MissingKeyError: (a KeyError) ``td`` has no ``next``.
    """
    if isinstance(td, LazyStackedTensorDict):
        parts = [carry(part, is_carried) for part in td.tensordicts]
        root = LazyStackedTensorDict(*parts, stack_dim=td.stack_dim)
        return root if fresh is None else root.update(fresh)
    following = td.get("next", None)
    if following is None:
        raise MissingKeyError(
            "the TensorDict has no 'next', from which step_mdp takes the root of the next step; it has "
            f"{sorted(map(str, td.keys()))}. Pass what env.step(td) gave."
        )
    if fresh is not None and fresh.device == td.device:
        given = {name: value for name, value in td.items() if name != "next"}
        if _replaces(fresh, following.items(), (), partial(is_carried, from_next=True)) and (
            _replaces(fresh, given.items(), (), partial(is_carried, from_next=False))
        ):
            return fresh
    source: dict[str, Any] = {}
    _collect(td, (), is_carried, False, source)
    _collect(following, (), is_carried, True, source)
    if fresh is None:
        return _rebuild(source, td, following)
    _collect(fresh, (), None, True, source)
    return _rebuild(source, td, fresh, following)


def _replaces(
    fresh: TensorDictBase,
    entries: Iterable[tuple[str, Any]],
    path: Path,
    is_carried: Callable[..., bool],
) -> bool:
    """Check whether ``fresh`` has all of the entries at ``path`` that are carried; tensors and plain nodes alone are looked at."""
    held = dict(fresh.items())
    for name, value in entries:
        new = held.get(name)
        if type(value) is torch.Tensor:
            is_there = type(new) is torch.Tensor
            is_replaced = is_there or (new is None and not is_carried((*path, name)))
        else:
            are_nodes = type(value) is TensorDict and type(new) is TensorDict
            is_replaced = are_nodes and _replaces(new, value.items(), (*path, name), is_carried)
        if not is_replaced:
            return False
    return True


def _collect(
    node: TensorDictBase,
    path: Path,
    is_carried: Carrying | None,
    from_next: bool,
    into: dict[str, Any],
) -> None:
    """Put those entries of the node at ``path`` that are carried, all without a rule, into nested dicts; take out others."""
    answers = None if is_carried is None else is_carried.answers
    keeps_empty = is_carried is not None and not from_next and is_carried.keeps_empty_nodes
    for name, value in node.items():
        here = (*path, name)
        if not (type(value) is torch.Tensor or _is_leaf(value)):
            if not path and not from_next and name == "next":
                continue
            below = into.get(name)
            if isinstance(value, LazyStackedTensorDict) and is_uneven(value):
                into[name] = _Parts.of(value, below)
                into[name].collect(value, here, is_carried, from_next)
                continue
            below = dict(below) if isinstance(below, dict) else {}
            _collect(value, here, is_carried, from_next, below)
            if below or (keeps_empty and cast(TensorDictBase, value).is_empty()):
                into[name] = below
            continue
        carried = True if answers is None else answers.get((here, from_next))
        if carried is None:
            assert is_carried is not None
            carried = is_carried(here, from_next=from_next)
        if carried:
            into[name] = value
        else:
            into.pop(name, None)


def _is_leaf(value: object) -> bool:
    return not isinstance(value, TensorDictBase) or is_non_tensor(value)


@dataclass(frozen=True)
class _Parts:
    """Entries of an uneven stack that are carried, a dict for each of its parts."""

    entries: list[dict[str, Any]]
    model: LazyStackedTensorDict

    @classmethod
    def of(cls, model: LazyStackedTensorDict, held: object) -> _Parts:
        """Begin with what is ``held`` of the same node: parts, or entries that all parts share."""
        if isinstance(held, _Parts):
            return cls(held.entries, model)
        shared = TensorDict(held or {}, model.batch_size).unbind(model.stack_dim)
        return cls([part.to_dict(retain_none=True) for part in shared], model)

    def collect(
        self, value: LazyStackedTensorDict, path: Path, is_carried: Carrying | None, from_next: bool
    ) -> None:
        """Put what is carried of each part into its dict, and take out the others."""
        for entries, part in zip(self.entries, value.tensordicts, strict=True):
            _collect(part, path, is_carried, from_next, entries)

    def stacked(self) -> LazyStackedTensorDict:
        """Return the parts as a stack again."""
        parts = zip(self.entries, self.model.tensordicts, strict=True)
        rebuilt = [_rebuild(entries, part, part) for entries, part in parts]
        return LazyStackedTensorDict(*rebuilt, stack_dim=self.model.stack_dim)


def _rebuild(
    source: dict[str, Any], like: TensorDictBase, *following: TensorDictBase, path: Path = ()
) -> TensorDict:
    """Build nodes of nested dicts, each as the first node of that path among ``following`` and ``like``.

    A closure that called itself would hold ``like`` until the next garbage collection, and with it a rollout's memory.
    """
    model = like if not path else _node_at(path, *following, like)
    built = {}
    for name, value in source.items():
        if isinstance(value, dict):
            value = _rebuild(value, like, *following, path=(*path, name))
        built[name] = value.stacked() if isinstance(value, _Parts) else value
    return TensorDict._new_unsafe(built, batch_size=model.batch_size, device=model.device)  # pyright: ignore[reportPrivateUsage]


def _node_at(path: Path, *models: TensorDictBase) -> TensorDictBase:
    found = (model.get(path, None) for model in models)
    return next(node for node in found if isinstance(node, TensorDictBase))


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
    """Return the root of the next step: `next` entries over root ones, rewards and actions dropped.

    Args:
        tensordict: a transition with ``next``, any batch size, lazy stacks included.
        next_tensordict: written to (and returned) when given, instead of a new TensorDict.
        keep_other: keep root entries that the step did not produce.
        exclude_reward, exclude_done, exclude_action: drop that kind of entry. Excluding done also
            drops its companions ``terminated`` and ``truncated`` of the same level.
        reward_keys, done_keys, action_keys: the entries of each kind.

    Returns:
        The next root; ``_reset``, ``_step`` and nodes without entries never survive in it.

    Raises:
        MissingKeyError: (a KeyError) ``tensordict`` has no ``next``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import step_mdp
        >>> after = TensorDict(observation=torch.tensor(2.0), reward=torch.tensor([1.0]))
        >>> step_mdp(TensorDict(observation=torch.tensor(1.0), next=after))["observation"]
        tensor(2.)
    """
    rewards, dones, actions = (
        {as_path(key) for key in ([keys] if isinstance(keys, str | tuple) else keys)}
        for keys in (reward_keys, done_keys, action_keys)
    )
    dones |= {(*path[:-1], name) for path in dones for name in rules.DONE_LEAVES}
    is_carried = Carrying(
        reward_keys=rewards if exclude_reward else (),
        done_keys=dones if exclude_done else (),
        action_keys=actions if exclude_action else (),
        kept_keys=actions,
        keep_other=keep_other,
    )
    following = carry(tensordict, is_carried)
    return following if next_tensordict is None else next_tensordict.update(following)
