"""Where, along time, recorded steps stop following each other.

An episode ends where a done flag is set. A batch holds more ends, which no flag marks: rows that were flattened, parts of
workers and rollouts joined along time, slices of a buffer. All that reads windows of recorded data finds them here.

Conventions
    data     TensorDict of batch size (*batch, T); see `time_axis`.
    seam     a step after which another trajectory goes on, or another stretch of the same one, though no flag is set.
    carried  entries of ``next`` that the root one step later has, too: equal there, unless a seam lies between.
    certain  an axis is, if it is named "time", is named by an argument, or is the last one of several and the steps do
             not go on along another one. The only axis of a batch without names may hold anything: a rollout, rows that
             were flattened, steps that were shuffled.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from envkit.data.paths import Key, as_key, as_path
from envkit.errors import ArgumentError

_NOT_CARRIED = {"done", "terminated", "truncated", "reward", "state_value"}

_LOOKED_FOR = 16
"""Steps whose next one is looked for elsewhere in the data, to tell shuffled data from data that was changed."""


def time_axis(data: TensorDictBase, time_dim: int | None = None) -> int:
    """Return which batch axis of recorded data is time: the given one, the one of that name, or the last one.

    Raises:
        ArgumentError: (a ValueError) there is no batch axis, or not the given one.
    """
    axes = data.batch_dims
    named = [axis for axis, name in enumerate(data.names) if name == "time"] if axes else []
    time = time_dim if time_dim is not None else named[0] if named else axes - 1
    if not axes or not -axes <= time < axes:
        remark, fix = "", "Pass a rollout, or put a transform into an environment."
        if time_dim is not None:
            remark, fix = f" and time_dim is {time_dim}", "Pass its axis of time as time_dim."
        raise ArgumentError(
            f"the data has batch size {tuple(data.batch_size)}{remark}, but recorded data needs a time axis. {fix}"
        )
    return time % axes


def step_entry(data: TensorDictBase, name: str) -> torch.Tensor | None:
    """Return one number a step, in the batch size, from where a collector or `split_trajectories` writes it.

    An env may show an entry of that name and another shape.
    """
    keys: tuple[Key, ...] = (("collector", name), name)
    shapes = tuple(data.batch_size), (*data.batch_size, 1)
    for key in keys:
        entry: Any = data.get(key, None)
        if isinstance(entry, torch.Tensor) and tuple(entry.shape) in shapes:
            return entry.reshape(data.batch_size)
    return None


def carried_keys(data: TensorDictBase) -> list[Key]:
    """List the entries of a step that are the next root's, flags and rewards aside."""
    root = set(map(as_path, data.keys(True, True)))
    paths = map(as_path, data.get("next").keys(True, True))
    return [as_key(path) for path in paths if path in root and path[-1] not in _NOT_CARRIED]


def seams(
    data: TensorDictBase,
    ended: torch.Tensor,
    axis: int,
    *,
    is_time: bool = False,
    ids: torch.Tensor | None = None,
    takes_turns: bool = False,
) -> torch.Tensor:
    """Mark the steps after which another trajectory goes on, or another stretch of it, though no flag is set.

    That is where trajectory ids change, and where the next root is not the ``next`` of the step.

    Args:
        data: recorded steps.
        ended: where a flag ends an episode, bool, shape ``(*batch, T)``.
        axis: of time.
        is_time: whether the axis is certain, whatever its name.
        ids: of trajectories, shape ``(*batch, T)``; None looks for ``traj_ids``.
        takes_turns: whether a trajectory may go on after steps of others.

    Returns:
        bool, shape ``(*batch, T)``; False at the last step of the axis.

    Raises:
        ArgumentError: (a ValueError) the steps are not in the order of time, or nothing tells.
    """
    ids = step_entry(data, "traj_ids") if ids is None else ids
    is_named = is_time or data.names[axis] == "time"
    is_certain = is_named or data.batch_dims > 1
    other = None if is_named else _axis_that_goes_on(data, ended, axis)
    if other is not None:
        raise _out_of_order(data, f"axis {other}", other)
    carried = _Carried.of(data, axis)
    over, mask = by_row(ended, axis), step_entry(data, "mask")
    steps = over.shape[1]
    if steps < 2:
        return torch.zeros_like(ended)
    numbers = torch.zeros_like(over, dtype=torch.int64) if ids is None else by_row(ids, axis)
    is_step = numbers >= 0 if mask is None else by_row(mask, axis) & (numbers >= 0)
    goes_on = is_step & ~over
    is_pair = (numbers[:, 1:] == numbers[:, :-1]) & goes_on[:, :-1] & is_step[:, 1:]
    apart = None if ids is None else _apart(numbers, goes_on, is_step)
    carried, follows = carried.telling(is_pair)
    if follows is None:
        is_open = bool(is_pair.any()) if ids is None else apart is not None
        if is_open and not (is_certain or takes_turns):
            raise _unknown(data, ids is not None)
        follows = torch.ones_like(is_pair)
    broken, kept = is_pair & ~follows, int((is_pair & follows).sum())
    lost = int(broken.sum())
    if apart is not None:
        in_turn = int(carried.agree(*apart).sum()) if takes_turns else 0
        lost, kept = lost + len(apart[0]) - in_turn, kept + in_turn
    if lost > kept:
        raise _out_of_order(data, None if is_certain else "its axis", axis)
    cut = torch.zeros_like(over)
    cut[:, :-1] = broken | (numbers[:, 1:] != numbers[:, :-1])
    moved = cut.reshape(ended.movedim(axis, -1).shape)
    return moved.movedim(-1, axis)


def by_row(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Return one number a step as (rows, T)."""
    return tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis])


def _apart(
    numbers: torch.Tensor, goes_on: torch.Tensor, is_step: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return the rows and places of steps that go on, and of the next of their trajectory, where others lie between."""
    if bool((numbers[:, 1:] >= numbers[:, :-1]).all()):
        return None
    order = numbers.argsort(dim=-1, stable=True)
    first, second = order[:, :-1], order[:, 1:]
    is_apart = (numbers.gather(1, first) == numbers.gather(1, second)) & (second != first + 1)
    is_apart &= goes_on.gather(1, first) & is_step.gather(1, second)
    row, place = is_apart.nonzero(as_tuple=True)
    return (row, first[row, place], second[row, place]) if len(row) else None


class _Carried(NamedTuple):
    """The carried entries of data at the root and under ``next``, each of shape (rows, T, numbers)."""

    roots: list[torch.Tensor]
    following: list[torch.Tensor]

    @classmethod
    def of(cls, data: TensorDictBase, axis: int) -> _Carried:
        carried = cls([], [])
        tells = data.get("next", None) is not None and "steps_to_next_obs" not in data.keys()
        for key in carried_keys(data) if tells else ():
            try:
                pair: Any = data.get(key), data.get(as_key(("next", *as_path(key))))
            except RuntimeError:  # rows of unlike shapes
                continue
            if not all(isinstance(leaf, torch.Tensor) and not leaf.is_nested for leaf in pair):
                continue
            if len({(leaf.shape, leaf.dtype) for leaf in pair}) == 1:
                for leaf, leaves in zip(pair, carried, strict=True):
                    in_time = leaf.movedim(axis, data.batch_dims - 1)
                    rows = data.batch_size.numel() // max(1, data.batch_size[axis])
                    numbers = leaf.shape[data.batch_dims :].numel()
                    leaves.append(in_time.reshape(rows, data.batch_size[axis], numbers))
        return carried

    def telling(self, is_pair: torch.Tensor) -> tuple[_Carried, torch.Tensor | None]:
        """Return the entries that tell the order of steps, and which steps but the last the next one continues.

        An entry that agrees nowhere was changed after it was recorded, and tells nothing, unless the steps that continue
        others lie elsewhere. None where no entry tells.
        """
        carried, continues = _Carried([], []), None
        for root, following in zip(*self, strict=True):
            same = same_rows(following[:, :-1], root[:, 1:]).to(is_pair.device)
            agrees = not is_pair.any() or bool((same & is_pair).any())
            if agrees or _lie_elsewhere(root, following, is_pair):
                carried.roots.append(root)
                carried.following.append(following)
                continues = same if continues is None else continues & same
        return carried, continues

    def agree(self, row: torch.Tensor, step: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Mark the steps of a row that another step of it continues."""
        found = torch.ones_like(row, dtype=torch.bool)
        for root, following in zip(*self, strict=True):
            found &= same_rows(following[row, step], root[row, other]).to(row.device)
        return found


def _lie_elsewhere(root: torch.Tensor, following: torch.Tensor, is_pair: torch.Tensor) -> bool:
    """Return whether some step that the next one does not continue is continued by another one of its row."""
    row, step = (index[:_LOOKED_FOR] for index in is_pair.nonzero(as_tuple=True))
    found = same_rows(following[row, step][:, None].expand_as(root[row]), root[row])
    found[torch.arange(len(row), device=row.device), step] = False
    return bool(found.any())


def same_rows(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compare along the last axis; NaN equals NaN."""
    same = (one == other).all(-1)
    if one.is_floating_point() and not same.all():
        left, right = one[~same], other[~same]
        same[~same] = ((left == right) | ((left != left) & (right != right))).all(-1)
    return same


def _axis_that_goes_on(data: TensorDictBase, ended: torch.Tensor, axis: int) -> int | None:
    """Return another batch axis along which most steps go on, of an entry that goes on nowhere along this one."""
    here = _shares(data, ended, axis) if data.batch_dims > 1 else []
    for other in range(data.batch_dims if not all(here) else 0):
        shares = zip(here, _shares(data, ended, other), strict=True)
        if any(not share and along_other > 0.5 for share, along_other in shares):
            return other
    return None


def _shares(data: TensorDictBase, ended: torch.Tensor, axis: int) -> list[float]:
    """Return of each carried entry the share of the steps before an axis' last that the next one continues."""
    goes_on = ~by_row(ended, axis)[:, :-1]
    count = max(1, int(goes_on.sum()))
    pairs = zip(*_Carried.of(data, axis), strict=True)
    same = [same_rows(following[:, :-1], root[:, 1:]) for root, following in pairs]
    return [int((goes_on & one.to(goes_on.device)).sum()) / count for one in same]


def _named(data: TensorDictBase, axis: int) -> str:
    names = [None] * data.batch_dims
    return f"data.names = {[*names[:axis], 'time', *names[axis + 1 :]]}"


def _unknown(data: TensorDictBase, has_ids: bool) -> ArgumentError:
    lack = "steps of a trajectory lie apart" if has_ids else "there are no trajectory ids"
    return ArgumentError(
        f"the data has batch size {tuple(data.batch_size)} and no axis named 'time', and {lack}, so that nothing tells "
        "where one episode ends and the next begins. Pass it as it was before it was reshaped, or keep "
        f"('collector', 'traj_ids'). If its axis is time, name it: {_named(data, 0)}."
    )


def _out_of_order(data: TensorDictBase, which: str | None, axis: int) -> ArgumentError:
    """Build the error; the fix says ``which`` axis may be time, None none."""
    fix = "" if which is None else f" If {which} is time, name it: {_named(data, axis)}."
    return ArgumentError(
        f"the data has batch size {tuple(data.batch_size)}, and most of its steps are not followed by the next one of "
        f"their trajectory. Pass it in the order of time, as it was before it was shuffled or reshaped.{fix}"
    )
