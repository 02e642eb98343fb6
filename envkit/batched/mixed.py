"""Envs of different worlds as one batch, side by side.

`MixedEnv` concatenates the batches of its members. It hands out the step to all of them before it
waits for any, so that worker processes step while JAX computes. It knows neither.

Conventions
    member  an env with one batch axis; its rows follow those of the member before it. It is the
            submodule ``member{i}``.
    state   entries only stateless members have; they stay inside, in ``env.members[i].state``.
    device  where the mixed env delivers; each member is given data where it expects it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.base import EnvBase
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingKeyError,
    ReadOnlyError,
    ResetMaskError,
    SpecError,
)
from envkit.keys import Path, as_key, as_path
from envkit.specs import Bounded, Composite, TensorSpec, Unbounded

__all__ = ["Member", "MixedEnv"]

_KINDS = ("observation", "action", "reward", "done")
_Placed = TypeVar("_Placed", TensorDictBase, TensorSpec)


@dataclass
class Member:
    """An env of a `MixedEnv`, the rows it has there, and what it showed last."""

    env: EnvBase
    rows: slice
    state_paths: frozenset[Path]
    newest: TensorDictBase | None = field(default=None)

    @property
    def state(self) -> TensorDictBase | None:
        """What the next step of a stateless member starts from; None before the first reset."""
        if self.newest is None or not self.state_paths:
            return None
        return self.newest.select(*map(as_key, self.state_paths))

    def part(self, td: TensorDictBase) -> TensorDictBase:
        """Give this member's rows of a root where it expects them, its state put back in."""
        part, state = self.taken(td).exclude("next"), self.state
        return part if state is None else part.update(state)

    def taken(self, td: TensorDictBase) -> TensorDictBase:
        """Give this member's rows, where it expects them."""
        return _delivered(td[self.rows], self.env.device)  # type: ignore[type-var]

    def completed(self, td: TensorDictBase) -> TensorDictBase:
        """The same, with the newest known values of what ``td`` lacks."""
        part = self.part(td)
        return part if self.newest is None else self.newest.copy().update(part)

    def keep(self, td: TensorDictBase) -> TensorDictBase:
        """Remember the newest root, and give what other members have too."""
        self.newest = td.select(*self.env.observation_keys, *self.env.done_keys, strict=False)
        return self.without_state(td)

    def without_state(self, td: TensorDictBase) -> TensorDictBase:
        """Give what other members have too."""
        if not self.state_paths:
            return td
        return td.exclude(*map(as_key, self.state_paths)).filter_empty_()


class MixedEnv(EnvBase):
    """Concatenate envs along their batch axis; batch-locked.

    Args:
        members: envs with one batch axis each, of equal keys (state apart), shapes and dtypes.
        device: where data is delivered; None takes the device that members name.

    Raises:
        ArgumentError: (a ValueError) there is no member, or members name several devices and
            ``device`` none.
        SpecError: the members differ; the message lists every difference.
    """

    def __init__(self, members: Sequence[EnvBase], *, device: Any = None):
        members = list(members)
        if not members:
            raise ArgumentError(
                "MixedEnv got an empty list, but needs at least one env. "
                "Pass envs with one batch axis each: MixedEnv([BraxEnv(...), ParallelEnv(...)])."
            )
        for number, env in enumerate(members):
            if env.batch_dims != 1:
                raise SpecError(
                    f"member {number} has batch size {tuple(env.batch_size)}, but a mixed env "
                    "needs exactly one batch axis. Build it with batch_size=[n], or put a single "
                    "env in SerialEnv(1, ...)."
                )
        leaves = [_shared_leaves(env) for env in members]
        _require_alike(leaves)
        ends = torch.tensor([env.batch_size[0] for env in members]).cumsum(0).tolist()
        super().__init__(
            batch_size=[ends[-1]],
            device=_common_device(members) if device is None else device,
            allow_done_after_reset=any(env.allow_done_after_reset for env in members),
        )
        self.members = [
            Member(env, slice(end - env.batch_size[0], end), _state_paths(env))
            for env, end in zip(members, ends, strict=True)
        ]
        masks = [pair for env in members for pair in env._action_masks]
        self._action_masks = tuple(dict.fromkeys(masks))
        for number, env in enumerate(members):
            self.add_module(_name_of(number), env)
        for kind in _KINDS:
            spec = Composite(shape=self.batch_size, device=self.device)
            for path in leaves[0][kind]:
                spec[as_key(path)] = _concatenated(
                    [_delivered(found[kind][path], self.device) for found in leaves]
                )
            setattr(self, f"full_{kind}_spec", spec)

    keeps_last_output = True

    # ---------------------------------------------------------------------------------------- step

    def _step_send(self, td: TensorDictBase) -> None:
        self._check_batch(td)
        vars(self)["_sent"] = td
        for member in reversed(self._in_order_of_waiting()):
            member.env._step_send(member.part(td))

    def _step_recv(self) -> TensorDictBase:
        td = vars(self).pop("_sent")
        parts = {
            id(member): member.keep(member.env._step_recv().get("next"))
            for member in self._in_order_of_waiting()
        }
        return self._attach_next(td.exclude(rules.STEP, inplace=True), self._joined(parts))

    def _advance_send(self, td: TensorDictBase) -> None:
        self._check_batch(td)
        vars(self)["_sent"] = td
        for member in reversed(self._in_order_of_waiting()):
            part = member.part(td)
            preset = td.get("next", None)
            if preset is not None:  # what the caller preset may change which rows are done
                part.set("next", member.taken(preset).copy())
            member.env._advance_send(part)

    def _advance_recv(self) -> tuple[TensorDictBase, TensorDictBase]:
        td = vars(self).pop("_sent").exclude(rules.STEP, inplace=True)
        nexts, roots = {}, {}
        for member in self._in_order_of_waiting():
            data, root = member.env._advance_recv()
            nexts[id(member)] = member.without_state(data.get("next"))
            roots[id(member)] = member.keep(root)
        return self._attach_next(td, self._joined(nexts)), self._joined(roots)

    def _joined(self, parts: dict[int, TensorDictBase]) -> TensorDictBase:
        """Concatenate what each member gave, named by its id, in the order of the rows."""
        return self._concatenated([parts[id(member)] for member in self.members])

    def _concatenated(self, parts: list[TensorDictBase]) -> TensorDictBase:
        return _concatenate([_delivered(part, self.device) for part in parts])

    def _in_order_of_waiting(self) -> list[Member]:
        """Members that compute in this process first: the others work meanwhile."""
        return sorted(self.members, key=lambda member: member.env.works_elsewhere)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError("MixedEnv steps through its members.")

    # --------------------------------------------------------------------------------------- reset

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        parts = [member.keep(self._reset_member(member, td, kwargs)) for member in self.members]
        keys = [key for kind in ("observation", "done") for key in getattr(self, f"{kind}_keys")]
        return self._concatenated([part.select(*keys, strict=False) for part in parts])

    def _reset_member(
        self, member: Member, td: TensorDictBase | None, kwargs: dict[str, Any]
    ) -> TensorDictBase:
        if td is None:
            return member.env.reset(**kwargs)
        mask = td.get(rules.RESET, None)
        if mask is None:
            return member.env.reset(member.part(td), **kwargs)
        if member.newest is None:
            raise ResetMaskError(
                "a partial reset came before the first full one. Call reset() once without a mask."
            )
        part = member.completed(td)
        if not bool(part.get(rules.RESET).any()):
            return part.exclude(rules.RESET)
        return member.env.reset(part, **kwargs)

    # ------------------------------------------------------------------------- specs, place, state

    def add_truncated_keys(self) -> EnvBase:  # type: ignore[override]
        """Refused: the members decide what they report."""
        raise ReadOnlyError(
            "truncated keys cannot be added to a mixed env: its done spec is that of its members. Add "
            "them to each: MixedEnv([member.add_truncated_keys(), ...])."
        )

    def to(self, *args: Any, **kwargs: Any) -> EnvBase:
        """Move the members, and deliver to that device from now on; returns self."""
        super().to(*args, **kwargs)
        for member in self.members:
            member.env.to(*args, **kwargs)
            if member.newest is not None:
                member.newest = _delivered(member.newest, member.env.device)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Give ``{"member0": {...}, ...}``, the state dict of every member."""
        return {
            _name_of(number): member.env.state_dict(*args, **kwargs)
            for number, member in enumerate(self.members)
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load what `state_dict` gave.

        Raises:
            ArgumentTypeError: it is no dict.
            MissingKeyError: (a KeyError) a member is not in it.
        """
        if not isinstance(state_dict, Mapping):
            raise ArgumentTypeError(
                f"the state dict is of type {type(state_dict).__name__}, but must be a dict. "
                "Pass what state_dict() gave."
            )
        names = [_name_of(number) for number in range(len(self.members))]
        if sorted(state_dict) != sorted(names):
            raise MissingKeyError(
                f"the state dict has the entries {list(state_dict)}, but this env has the members "
                f"{names}. Pass what state_dict() of an env with as many members gave."
            )
        for name, member in zip(names, self.members, strict=True):
            member.env.load_state_dict(state_dict[name], *args, **kwargs)

    # ------------------------------------------------------------------------------- seed and life

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the members one after the other, each with the seed the one before returned."""
        self._seed_actions(seed)
        for member in self.members:
            seed = member.env.set_seed(seed, static_seed=static_seed)
        return seed

    def _set_seed(self, seed: int | None) -> None:
        self.set_seed(seed)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close every member."""
        super().close(raise_if_closed=raise_if_closed)
        for member in self.members:
            member.env.close(raise_if_closed=False)


def _name_of(number: int) -> str:
    """Name a member as a submodule and in state dicts."""
    return f"member{number}"


def _common_device(members: list[EnvBase]) -> torch.device | None:
    devices = list(dict.fromkeys(env.device for env in members if env.device is not None))
    if len(devices) > 1:
        raise ArgumentError(
            f"the members deliver to different devices, {list(map(str, devices))}, but a mixed env "
            f"delivers to one. Say to which: MixedEnv(members, device={str(devices[0])!r})."
        )
    return devices[0] if devices else None


def _delivered(value: _Placed, device: torch.device | None) -> _Placed:
    return value if device is None or value.device == device else value.to(device)


def _concatenate(parts: list[TensorDictBase]) -> TensorDictBase:
    return torch.cat(parts, 0)  # type: ignore[return-value, arg-type]


def _state_paths(env: EnvBase) -> frozenset[Path]:
    return frozenset(as_path(key) for key in env.full_state_spec.keys(True, True))


def _shared_leaves(env: EnvBase) -> dict[str, dict[Path, TensorSpec]]:
    state = _state_paths(env)
    return {
        kind: {
            as_path(key): leaf
            for key, leaf in getattr(env, f"full_{kind}_spec").items(True, True)
            if as_path(key) not in state
        }
        for kind in _KINDS
    }


def _require_alike(leaves: list[dict[str, dict[Path, TensorSpec]]]) -> None:
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
            "the members of a mixed env must have equal keys, shapes and dtypes, but differ:\n"
            + "\n".join(differences)
            + "\nBring them to one spec with wrappers, e.g. gymnasium's DtypeObservation."
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
