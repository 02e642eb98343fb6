"""The members of a mixed batch: their rows, the names of their states there, what they told last.

It decides where the states of unlike members stand in one dense batch. When members are stepped and
reset is decided in `mixed`.

Conventions
    member  an env with one batch axis; its rows follow those of the member before it.
    state   what the next step of a member reads besides actions, and its steps give. Where all members
            give an entry alike, it stands in the data of the whole batch as in theirs. Else entry
            ``path`` stands at ``("state", "member{i}", *path)``, zero in the rows of other members.
    told    what a member gave, under its own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from tensordict import TensorDictBase

from envkit.data.paths import Key, Path, as_key, as_path
from envkit.data.transition import choose_leaf, leaves
from envkit.env.base import EnvBase
from envkit.errors import SpecError
from envkit.specs import TensorSpec

__all__ = ["STATE", "Member", "delivered", "members_of"]

STATE = "state"
_Placed = TypeVar("_Placed", TensorDictBase, TensorSpec)


@dataclass
class Member:
    """An env of a `MixedEnv`, the rows it has there, and what it told last.

    ``state`` are the entries of its state that stand at a place of their own, by its own names.
    """

    env: EnvBase
    name: str
    rows: slice
    state: Mapping[Path, TensorSpec]
    newest: TensorDictBase | None = field(default=None)

    def state_key(self, path: Path) -> Key:
        """Name an entry of ``state`` in the data of the whole batch."""
        return as_key((STATE, self.name, *path))

    def part(self, td: TensorDictBase, hidden: Sequence[Key] = ()) -> TensorDictBase:
        """Give this member's rows of a root under its own names, where it expects them.

        Args:
            td: root of the whole batch.
            hidden: entries of ``td`` that no member knows.
        """
        own = cast(TensorDictBase, td[self.rows]).exclude("next", *hidden)
        for path in self.state:
            value = td.get(self.state_key(path), None)
            if value is not None:
                own.set(as_key(path), value[self.rows])
        return delivered(own, (self.env._declared.table or self.env._table).device)

    def part_to_reset(self, td: TensorDictBase, hidden: Sequence[Key] = ()) -> TensorDictBase:
        """The same for a partial reset, with what the member told in place of what ``td`` made of it.

        What the member then gives of rows that are not reset is its own, and not the caller's.
        """
        assert self.newest is not None
        told = [key for key in self.env._table.shown if key not in self.env.state_keys]
        return self.newest.copy().update(self.part(td, hidden).exclude(*told))

    def keep(self, told: TensorDictBase, rows: torch.Tensor | None = None) -> None:
        """Remember what the member told; of some rows, given as a mask of them, or of all."""
        table = self.env._declared.table or self.env._table
        newest = told.select(*table.shown, strict=False)
        if rows is not None and self.newest is not None:
            for path, value in leaves(newest):
                before = self.newest.get(as_key(path), None)
                if before is not None:
                    newest.set(as_key(path), choose_leaf(rows.to(value.device), value, before))
        self.newest = newest

    def shown(self, told: TensorDictBase, members: Sequence[Member]) -> TensorDictBase:
        """Give what the member told with the entries that the whole batch of ``members`` has."""
        shown = told.exclude(*map(as_key, self.state))
        if self.state:
            shown = shown.filter_empty_()
        for member in members:
            for path, leaf in member.state.items():
                value = told.get(as_key(path), None) if member is self else None
                if value is None:
                    shape = (*told.batch_size, *leaf.shape[1:])
                    value = torch.zeros(shape, dtype=leaf.dtype, device=told.device)
                shown.set(member.state_key(path), value)
        return shown


def members_of(envs: Sequence[EnvBase]) -> list[Member]:
    """Give envs their rows, one after the other, and their states their places.

    Raises:
        SpecError: a state has an entry that is no tensor of fixed shape.
    """
    alike, members, start = _alike_states(envs), [], 0
    for number, env in enumerate(envs):
        stop = start + env.batch_size[0]
        state = {path: leaf for path, leaf in _state_of(env).items() if path not in alike}
        members.append(Member(env, f"member{number}", slice(start, stop), state))
        start = stop
    return members


def _alike_states(envs: Sequence[EnvBase]) -> set[Path]:
    """Name the entries that are state of some env and that all give with one shape and dtype."""
    forms = [
        {
            as_path(key): (leaf.shape[1:], leaf.dtype)
            for key, leaf in env.full_observation_spec.items(True, True)
        }
        for env in envs
    ]
    states = {path for env in envs for path in _state_of(env)}
    return {path for path in states if all(form.get(path) == forms[0].get(path) for form in forms)}


def _state_of(env: EnvBase) -> dict[Path, TensorSpec]:
    given = set(env.observation_keys)
    state = {as_path(key): env.full_state_spec[key] for key in env.state_keys if key in given}
    for path, leaf in state.items():
        if leaf.dtype is None or -1 in leaf.shape:
            raise SpecError(
                f"the state {as_key(path)!r} is declared as {leaf}, but a mixed env lays the states of "
                "its members side by side, for which each is a tensor of fixed shape. Declare it so."
            )
    return state


def delivered(value: _Placed, device: Any) -> _Placed:
    """Give a TensorDict or spec on a device; None sets no constraint."""
    return value if device is None or value.device == device else value.to(device)
