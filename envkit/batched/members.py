"""The members of a mixed batch: their rows, what they must have in common, and what of their state is in the data.

It decides where the states of unlike members are in one dense batch, and which data a simulator has left behind.
Keys, shapes and dtypes of members must agree, and what actions are drawn from; bounds may differ. When members are
stepped and reset is decided in `mixed`.

Conventions
    member   an env with one batch axis; its rows follow those of the member before it.
    state    what the next step of a member reads besides actions, and its steps give. Where all members
             give an entry alike, it is in the data of the whole batch as in theirs. Else entry
             ``path`` is at ``("state", "member{i}", *path)``, zero in the rows of other members.
    version  ``("state", "moment")``, int64 (rows, 1): how often a row of a stateful member was stepped or
             reset since it was seeded. 0 makes no claim; rows of stateless members hold it.
    told     what a member gave, under its own names.
    kind     observation, action, reward or done; states that travel are no observations here.
    leaves   specs of one member by kind and path.
    mask     bool (rows,) on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.data.merging import merge_rows
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError, KeyCollisionError, SpecError, StaleDataError
from envkit.specs import Bounded, Composite, TensorSpec, Unbounded

STATE = "state"
_Placed = TypeVar("_Placed", TensorDictBase, TensorSpec)


@dataclass
class Member:
    """An env of a `MixedEnv`, the rows it has there, and its newest results.

    ``state`` are the entries of its state that are at their own place, by its own names.
    """

    env: EnvBase
    name: str
    rows: slice
    state: Mapping[Path, TensorSpec]
    newest: TensorDictBase | None = field(default=None)

    def state_key(self, path: Path) -> Key:
        """Return the name of an entry of ``state`` in the data of the whole batch."""
        return as_key((STATE, self.name, *path))

    def part(self, td: TensorDictBase, hidden: Sequence[Key] = ()) -> TensorDictBase:
        """Return this member's rows of a root under its own names, where it expects them.

        Args:
            td: root of the whole batch.
            hidden: entries of ``td`` that no member knows.
        """
        part = cast(TensorDictBase, td[self.rows]).exclude("next", *hidden)
        for path in self.state:
            value = td.get(self.state_key(path), None)
            if value is not None:
                part.set(as_key(path), value[self.rows])
        return delivered(part, (self.env._declared.table or self.env._table).device)

    def part_to_reset(self, td: TensorDictBase, hidden: Sequence[Key] = ()) -> TensorDictBase:
        """The same for a partial reset, with the results of the member in place of what ``td`` made of them.

        Rows that are not reset then hold the member's values, not the caller's.
        """
        assert self.newest is not None
        shown = [key for key in self.env._table.shown if key not in self.env.state_keys]
        return self.newest.copy().update(self.part(td, hidden).exclude(*shown))

    def keep(self, results: TensorDictBase, rows: torch.Tensor | None = None) -> None:
        """Store the results of the member; of some rows, given as a mask of them, or of all."""
        table = self.env._declared.table or self.env._table
        newest = results.select(*table.shown, strict=False)
        if rows is not None and self.newest is not None:
            newest = merge_rows(self.newest.copy(), newest, {(): rows})
        self.newest = newest

    def shown(self, results: TensorDictBase, members: Sequence[Member]) -> TensorDictBase:
        """Return the results of the member with the entries that the whole batch of ``members`` has."""
        shown = results.exclude(*map(as_key, self.state))
        if self.state:
            shown = shown.filter_empty_()
        for member in members:
            for path, leaf in member.state.items():
                value = results.get(as_key(path), None) if member is self else None
                if value is None:
                    shape = (*results.batch_size, *leaf.shape[1:])
                    value = torch.zeros(shape, dtype=leaf.dtype, device=results.device)
                shown.set(member.state_key(path), value)
        return shown


def members_of(envs: Sequence[EnvBase]) -> list[Member]:
    """Assign rows to envs, one after the other, and their states their places.

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
    """List the entries that are state of some env and that all give with one shape and dtype."""
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
    """Return a TensorDict or spec on a device; None sets no constraint."""
    return value if device is None or value.device == device else value.to(device)


LeavesByKind = dict[str, dict[Path, TensorSpec]]

_KINDS = ("observation", "action", "reward", "done")


def common_device(members: list[EnvBase]) -> torch.device | None:
    """Return the device that members name, None where none does.

    Raises:
        ArgumentError: they name several.
    """
    devices = list(dict.fromkeys(env.device for env in members if env.device is not None))
    if len(devices) > 1:
        raise ArgumentError(
            f"the members deliver to different devices, {list(map(str, devices))}, but a mixed env "
            f"delivers to one. Pass it: MixedEnv(members, device={str(devices[0])!r})."
        )
    return devices[0] if devices else None


def shared_leaves(members: Sequence[Member]) -> list[LeavesByKind]:
    """Return the leaves that members have in common with each other, for each member.

    Raises:
        SpecError: they differ; the message lists every difference.
    """
    leaves = [_leaves_of(member) for member in members]
    _require_alike(leaves)
    return leaves


def joined_specs(
    members: Sequence[Member],
    leaves: Sequence[LeavesByKind],
    batch_size: torch.Size,
    device: torch.device | None,
) -> dict[str, Composite]:
    """Declare the rows of all members, by kind; ``leaves`` are those of each member.

    Nodes have the axes that they have in the first member, as its data has them.
    """
    joined = {}
    for kind in _KINDS:
        spec = joined[kind] = Composite(shape=batch_size, device=device)
        nodes = getattr(members[0].env, f"full_{kind}_spec")
        for path in leaves[0][kind]:
            parts = [delivered(found[kind][path], device) for found in leaves]
            for end in range(1, len(path)):
                if as_key(path[:end]) not in spec:
                    shape = (*batch_size, *nodes[path[:end]].shape[1:])
                    spec[as_key(path[:end])] = Composite(shape=shape, device=device)
            spec[as_key(path)] = _concatenated(parts)
    return joined


def _leaves_of(member: Member) -> LeavesByKind:
    """Return what a member must have in common with the others."""
    return {
        kind: {
            as_path(key): leaf
            for key, leaf in getattr(member.env, f"full_{kind}_spec").items(True, True)
            if not (kind == "observation" and as_path(key) in member.state)
        }
        for kind in _KINDS
    }


def _require_alike(leaves: Sequence[LeavesByKind]) -> None:
    differences = []
    for number, other in enumerate(leaves[1:], 1):
        for kind in _KINDS:
            first, second = leaves[0][kind], other[kind]
            for path in dict.fromkeys((*first, *second)):
                shown = [_shown(leaf, kind) for leaf in (first.get(path), second.get(path))]
                if shown[0] != shown[1]:
                    differences.append(
                        f"  {kind} {as_key(path)!r}: member 0 has {shown[0]}, "
                        f"member {number} has {shown[1]}"
                    )
    if differences:
        raise SpecError(
            "the members of a mixed env differ, but must have equal keys, shapes and dtypes:\n"
            + "\n".join(differences)
            + "\nPut transforms around members until they agree, e.g. RenameTransform, UnsqueezeTransform, DoubleToFloat or "
            "ExcludeTransform: MixedEnv([first, TransformedEnv(second, DoubleToFloat())])."
        )


def require_free(places: Iterable[Path], observation: Composite) -> None:
    """Check that no observation of the members has the path of their states."""
    for path in places:
        for taken in map(as_path, observation.keys(True, True)):
            if path[: len(taken)] == taken or taken[: len(path)] == path:
                raise KeyCollisionError(
                    f"the members have an observation {as_key(taken)!r}, but a mixed env has its own entry "
                    f"{as_key(path)!r}, for states. Give theirs another name, e.g. with RenameTransform in "
                    "each member."
                )


def _shown(leaf: TensorSpec | None, kind: str) -> str:
    """Describe a leaf by what must be equal: of an action also the set it is drawn from."""
    if leaf is None:
        return "absent"
    text = f"{leaf.dtype} {tuple(leaf.shape[1:])}"
    if kind != "action":
        return text
    count = getattr(leaf, "n", None)
    return f"{type(leaf).__name__} {text}" + ("" if count is None else f" of {count}")


def _concatenated(specs: list[TensorSpec]) -> TensorSpec:
    """Join leaf specs along the batch axis; a leaf some member does not bound is unbounded."""
    first = specs[0]
    shape = (sum(spec.shape[0] for spec in specs), *first.shape[1:])
    if all(isinstance(spec, Bounded) for spec in specs):
        low, high = (torch.cat([getattr(spec, end) for spec in specs]) for end in ("low", "high"))
        return Bounded(low, high, shape, dtype=first.dtype, device=first.device)
    if all(spec == first[0].expand(spec.shape) for spec in specs):
        return first[0].expand(shape)
    return Unbounded(shape, dtype=first.dtype, device=first.device)


VERSION = (STATE, "moment")  # its name in data that was saved


class RowVersions:
    """The versions of all rows: what tells data that a simulator has left behind.

    Args:
        is_stateful: rows whose simulator cannot go back.
    """

    def __init__(self, is_stateful: torch.Tensor):
        self.is_stateful = is_stateful
        self.are_written = bool(is_stateful.any())
        self._now = torch.zeros(is_stateful.shape, dtype=torch.int64, device="cpu")

    def begin_anew(self) -> None:
        """Forget all: the simulators were seeded."""
        self._now = torch.zeros_like(self._now)

    def state(self) -> torch.Tensor:
        """Return all versions."""
        return self._now.clone()

    def take(self, versions: torch.Tensor) -> None:
        """Load what `state` returned."""
        self._now = versions.clone()

    def count(self, rows: torch.Tensor, within: slice = slice(None)) -> None:
        """Count a step or a reset of those of some rows that lie ``within`` a range."""
        now = self._now.clone()
        now[within] += (rows & self.is_stateful)[within]
        self._now = now

    def moving(self, td: TensorDictBase, mask: torch.Tensor | None) -> torch.Tensor:
        """Return which rows a step of ``mask`` (None: of all) from ``td`` moves for good.

        Raises:
            StaleDataError: the simulator of one has left that data behind.
        """
        moving = self.is_stateful if mask is None else self.is_stateful & mask
        versions = td.get(VERSION, None) if self.are_written else None
        if versions is None:
            return moving
        versions, newest = versions.reshape(self._now.shape).cpu(), self._now
        stale = moving & (versions != newest) & (versions != 0) & (newest != 0)
        if bool(stale.any()):
            row = int(stale.nonzero()[0])
            raise StaleDataError(
                f"row {row} is to be stepped from moment {int(versions[row])}, but its simulator is at "
                f"moment {int(newest[row])} and cannot go back. Step from the newest data, env.step_mdp(td), or call "
                "env.reset()."
            )
        return moving

    def write(self, moment: Mapping[Path, torch.Tensor]) -> None:
        """Write the versions of all rows into a moment of rows."""
        moment[VERSION].copy_(self._now[:, None])

    def tell(
        self,
        td: TensorDictBase,
        root: TensorDictBase | None = None,
        stepped: torch.Tensor | None = None,
    ) -> None:
        """Write the versions of all rows; those that were not ``stepped`` keep what ``root`` says."""
        if not self.are_written:
            return
        versions = self._now[:, None].to(td.device or "cpu", copy=True)
        before = None if root is None else root.get(VERSION, None)
        if before is not None and stepped is not None:
            versions = rules.choose(stepped.to(versions.device), versions, before)
        td.set(VERSION, versions)
