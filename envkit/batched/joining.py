"""What envs must have in common to be rows of one mixed batch, and the specs of all their rows.

Keys, shapes and dtypes must agree, and what actions are drawn from; bounds may differ. States of members may be
unlike: `members` says where they stand.

Conventions
    kind    observation, action, reward or done; states that travel are no observations here.
    leaves  specs of one member by kind and path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from envkit.batched.members import Member, delivered
from envkit.data.paths import Path, as_key, as_path
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError, KeyCollisionError, SpecError
from envkit.specs import Bounded, Composite, TensorSpec, Unbounded

__all__ = ["common_device", "joined_specs", "require_free", "shared_leaves"]

LeavesByKind = dict[str, dict[Path, TensorSpec]]

_KINDS = ("observation", "action", "reward", "done")


def common_device(members: list[EnvBase]) -> torch.device | None:
    """Give the device that members name, None where none does.

    Raises:
        ArgumentError: they name several.
    """
    devices = list(dict.fromkeys(env.device for env in members if env.device is not None))
    if len(devices) > 1:
        raise ArgumentError(
            f"the members deliver to different devices, {list(map(str, devices))}, but a mixed env "
            f"delivers to one. Say to which: MixedEnv(members, device={str(devices[0])!r})."
        )
    return devices[0] if devices else None


def shared_leaves(members: Sequence[Member]) -> list[LeavesByKind]:
    """Give the leaves that members have in common with each other, for each member.

    Raises:
        SpecError: they differ; the message lists every difference.
    """
    leaves = [_leaves_of(member) for member in members]
    _require_alike(leaves)
    return leaves


def joined_specs(
    leaves: Sequence[LeavesByKind], batch_size: torch.Size, device: torch.device | None
) -> dict[str, Composite]:
    """Declare the rows of all members, by kind; ``leaves`` are those of each member."""
    joined = {}
    for kind in _KINDS:
        spec = joined[kind] = Composite(shape=batch_size, device=device)
        for path in leaves[0][kind]:
            parts = [delivered(found[kind][path], device) for found in leaves]
            spec[as_key(path)] = _concatenated(parts)
    return joined


def _leaves_of(member: Member) -> LeavesByKind:
    """Give what a member must have in common with the others."""
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
            "the members of a mixed env must have equal keys, shapes and dtypes, but differ:\n"
            + "\n".join(differences)
            + "\nBring them to one spec with wrappers, e.g. gymnasium's DtypeObservation."
        )


def require_free(places: Iterable[Path], observation: Composite) -> None:
    """Check that no observation of the members stands where their states go."""
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
