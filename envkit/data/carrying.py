"""How a finished transition becomes the root of the next one.

What is carried is decided in `rules`; this module visits the entries. It knows TensorDict and neither envs nor
simulators.

Conventions
    td        root of a transition: what was known before the action; ``td["next"]`` what it made.
    path      leaf key as a tuple of strings.
    uneven    see `transition`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor

from envkit import rules
from envkit.data.paths import Key, Path, as_path
from envkit.data.results import EnvData
from envkit.data.transition import is_uneven
from envkit.errors import MissingKeyError

__all__ = ["Carrying", "carry", "step_mdp"]


@dataclass(frozen=True)
class Carrying:
    """Say by path which entries of a transition stand at the next root, see `rules.is_carried`: each is asked once."""

    reward_keys: Collection[Path] = ()
    done_keys: Collection[Path] = ()
    action_keys: Collection[Path] = ()
    state_keys: Collection[Path] = ()
    kept_keys: Collection[Path] = ()
    keep_other: bool = True
    keeps_empty_nodes: bool = False
    """Whether nodes of the root that hold no entries stand at the next root."""
    known: dict[tuple[Path, bool], bool] = field(default_factory=dict, init=False, compare=False)
    """What was asked before, by path and ``from_next``."""

    def __call__(self, path: Path, *, from_next: bool) -> bool:
        """Say whether the entry at ``path`` is carried; see `rules.is_carried`."""
        known = self.known.get((path, from_next))
        if known is None:
            known = self.known[path, from_next] = rules.is_carried(
                path,
                from_next=from_next,
                reward_keys=self.reward_keys,
                done_keys=self.done_keys,
                action_keys=self.action_keys,
                state_keys=self.state_keys,
                kept_keys=self.kept_keys,
                keep_other=self.keep_other,
            )
        return known


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
    """Say whether ``fresh`` has all of the entries at ``path`` that are carried; tensors and plain nodes alone are looked at."""
    held = dict(fresh.items())
    for name, value in entries:
        new = held.get(name)
        if type(value) is torch.Tensor:
            is_there = type(new) is torch.Tensor
            found = is_there or (new is None and not is_carried((*path, name)))
        else:
            are_nodes = type(value) is TensorDict and type(new) is TensorDict
            found = are_nodes and _replaces(new, value.items(), (*path, name), is_carried)
        if not found:
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
    known = None if is_carried is None else is_carried.known
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
        carried = True if known is None else known.get((here, from_next))
        if carried is None:
            assert is_carried is not None
            carried = is_carried(here, from_next=from_next)
        if carried:
            into[name] = value
        else:
            into.pop(name, None)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, TensorDictBase) or is_non_tensor(value)


@dataclass(frozen=True)
class _Parts:
    """What is carried of an uneven stack, a dict for each of its parts."""

    entries: list[dict[str, Any]]
    model: LazyStackedTensorDict

    @classmethod
    def of(cls, model: LazyStackedTensorDict, held: Any) -> _Parts:
        """Begin with what is ``held`` of the same node: parts, or entries that all parts share."""
        if isinstance(held, _Parts):
            return cls(held.entries, model)
        shared = TensorDict(held or {}, model.batch_size).unbind(model.stack_dim)
        return cls([part.to_dict(retain_none=True) for part in shared], model)

    def collect(
        self,
        value: LazyStackedTensorDict,
        path: Path,
        is_carried: Carrying | None,
        from_next: bool,
    ) -> None:
        """Put what is carried of each part into its dict, and take out the others."""
        for entries, part in zip(self.entries, value.tensordicts, strict=True):
            _collect(part, path, is_carried, from_next, entries)

    def stacked(self) -> LazyStackedTensorDict:
        """Give the parts as a stack again."""
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
    return TensorDict._new_unsafe(built, batch_size=model.batch_size, device=model.device)


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
    """Give the root of the next step: `next` entries over root ones, rewards and actions dropped.

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
