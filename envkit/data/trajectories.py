"""Recorded steps, one row for each trajectory.

`split_trajectories` cuts a rollout where one trajectory ends and the next begins, and pads the pieces to
one length. It reads data only; it knows no environment.

Conventions
    data   TensorDict of batch size (*batch, T); time is the last batch axis.
    piece  consecutive steps of one row that belong to one trajectory.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from tensordict import TensorDictBase, is_non_tensor

from envkit.data.paths import Key, as_key, as_path
from envkit.data.results import EnvData
from envkit.errors import ArgumentError, ArgumentTypeError, MissingKeyError

__all__ = ["ended_steps", "split_trajectories"]

_IDS = "traj_ids"


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: Key | None = None,
    trajectory_key: Key | None = None,
    done_key: Key | None = None,
    as_nested: bool | torch.layout = False,
) -> EnvData:
    """Give each trajectory of a rollout a row of its own, zero-padded.

    A trajectory ends where its id changes. Data without ids ends it after each set done flag (which
    includes truncation). The end of a row of the data ends it, too.

    Padding costs memory and hides lengths from whoever forgets the mask. For new training code prefer
    the flat layout, ``data.reshape(-1)``, and sample slices that stay within one id, with TorchRL's
    ``SliceSampler(traj_key=...)`` for instance.

    Args:
        rollout_tensordict: data, batch size ``(*batch, T)``.
        prefix: node of ids and mask; None takes ``"collector"`` where the data has it, else the root.
        trajectory_key: entry of the ids, shape ``(*batch, T)`` or that with trailing singletons; None
            takes ``traj_ids`` in the node of ``prefix``.
        done_key: flags that end a trajectory, ``("next", "done")`` by default. When it is given and
            ``trajectory_key`` is not, ids are not asked.
        as_nested: give nested tensors in place of padding, of the layout that is passed, ``torch.strided``
            or ``torch.jagged``; True stands for the former.

    Returns:
        Data of batch size ``(trajectories, longest)``, rows in the order of the data, and ``mask``
        beside the ids: bool of that shape, True where a step is no padding. Tensors are 0 where it is
        False, other data repeats the last step. Where each row of the data is one trajectory, its batch size is
        kept, and ``(T,)`` becomes ``(1, T)``. Data without ids gets some.

        With ``as_nested``: nested tensors in a TensorDict of batch size ``(trajectories, -1)``, without a mask
        and without new ids; ``to_padded_tensor()`` pads them.

    Raises:
        ArgumentError: the data has no time axis, or is to be nested and has entries that are no tensors.
        ArgumentTypeError: ``as_nested`` is neither a bool nor a layout.
        MissingKeyError: an entry that was named is absent, or neither ids nor flags are there.
    """
    data = rollout_tensordict
    if not data.batch_dims:
        raise ArgumentError(
            "the data has batch size (), but its last batch axis must be time. Pass a rollout."
        )
    node = _node(data, prefix)
    ids_key = (*node, _IDS) if trajectory_key is None else as_path(trajectory_key)
    ids = data.get(as_key(ids_key), None)
    if trajectory_key is not None and ids is None:
        raise _missing(data, as_key(ids_key), "Name an entry that is there: trajectory_key=...")
    known = ids is not None and (done_key is None or trajectory_key is not None)
    begins = _by_ids(data, ids) if known else _by_flags(data, done_key or ("next", "done"))
    rows, mask = _rows(begins)
    if as_nested is not False:
        return _nested(data, mask.sum(-1).tolist(), as_nested)
    if mask.all() and mask.shape[1] == data.batch_size[-1]:
        split = data.copy() if data.batch_dims > 1 else data.unsqueeze(0)
        mask = mask.reshape(split.batch_size)
    else:
        split = _padded(data, rows, mask)
    if ids is None:
        numbers = torch.arange(len(rows), device=begins.device)[:, None].expand(rows.shape)
        split.set(as_key(ids_key), (numbers * mask.reshape(rows.shape)).reshape(mask.shape))
    return split.set(as_key((*ids_key[:-1], "mask")), mask)


def _nested(data: TensorDictBase, lengths: list[int], layout: bool | torch.layout) -> EnvData:
    """Give pieces of these lengths, which follow each other in ``data``, as nested tensors."""
    if not isinstance(layout, bool | torch.layout):
        raise ArgumentTypeError(
            f"as_nested is {layout!r}, of type {type(layout).__name__}, but must be a bool or a torch.layout. "
            "Pass True, or torch.jagged."
        )
    chosen = torch.strided if layout is True else layout
    others = [key for key, leaf in data.items(True) if is_non_tensor(leaf)]
    if others:
        raise ArgumentError(
            f"the data has {others}, which are no tensors, but only tensors can be nested. Exclude them, or pass "
            "as_nested=False."
        )

    def nest(leaf: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():  # torch says once that nested tensors may change
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
            return torch.nested.as_nested_tensor(list(leaf.split(lengths)), layout=chosen)

    # `apply` would check the axis of time, which has no size, of jagged tensors.
    return data.reshape(-1)._fast_apply(nest, batch_size=[len(lengths), -1])


def _node(data: TensorDictBase, prefix: Key | None) -> tuple[str, ...]:
    if prefix is not None:
        return as_path(prefix)
    return ("collector",) if "collector" in data.keys() else ()


def _missing(data: TensorDictBase, key: Key, fix: str) -> MissingKeyError:
    return MissingKeyError(
        f"the data has no {key!r}; it has {sorted(map(str, data.keys(True, True)))}. {fix}"
    )


def _by_ids(data: TensorDictBase, ids: torch.Tensor) -> torch.Tensor:
    """Mark the steps that begin a piece, shape ``(rows, T)``."""
    ids = ids.reshape(-1, data.batch_size[-1])
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return begins


def ended_steps(
    data: TensorDictBase,
    done_key: Key = ("next", "done"),
    fix: str = "Name an entry that is there: done_key=...",
) -> torch.Tensor:
    """Mark the steps after which an episode has ended: a done flag is set, which includes truncation.

    Args:
        data: steps; time is the last batch axis.
        done_key: of the flags.
        fix: what to do where there are none, for messages.

    Returns:
        bool, shape ``(rows, T)``; the batch axes in front of time are flattened.

    Raises:
        MissingKeyError: (a KeyError) there is no such entry.
    """
    flags: Any = data.get(done_key, None)
    if flags is None:
        raise _missing(data, as_key(as_path(done_key)), fix)
    steps = data.batch_size[-1]
    return flags.reshape(*data.batch_size, -1).any(-1).reshape(-1, steps)


def _by_flags(data: TensorDictBase, done_key: Key) -> torch.Tensor:
    ended = ended_steps(data, done_key)
    begins = torch.ones_like(ended)
    begins[:, 1:] = ended[:, :-1]
    return begins


def _rows(begins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the flat positions of each piece's steps, its last repeated, and which are no repeats."""
    starts = begins.flatten().nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([begins.numel()])])
    steps = torch.arange(int((ends - starts).max()), device=begins.device)
    positions = starts[:, None] + steps
    return positions.minimum(ends[:, None] - 1), positions < ends[:, None]


def _padded(data: TensorDictBase, rows: torch.Tensor, mask: torch.Tensor) -> TensorDictBase:
    def blanked(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.masked_fill(~mask.reshape((*mask.shape, *(1,) * (leaf.ndim - 2))), 0)

    pieces = cast(TensorDictBase, data.reshape(-1)[rows])
    split = cast(TensorDictBase, pieces.apply(blanked))
    split.names = [None, "time"]
    return split
