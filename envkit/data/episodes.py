"""Which trajectory or episode each step of recorded data belongs to.

`split_trajectories` cuts a rollout where one trajectory ends and the next begins, and pads the pieces to one length.
`EpisodeNumbers` counts episodes over as many batches as there are: an episode ends after a step whose done flag is set.
Where it goes on in the next batch, trajectory ids of a collector say; without them, the same row does, unless it begins
elsewhere than it had ended. Both read data only and know no environment.

Conventions
    data     TensorDict of batch size (*batch, T); time is the last batch axis.
    piece    consecutive steps of one row that belong to one trajectory.
    rows     batch axes in front of time, flattened.
    number   of an episode: 0, 1, ... in the order in which they are met, by row, then by time.
    outside  steps of no episode: padding, and what a rollout repeats in rows that are done before others.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase, is_non_tensor
from torch.nn import functional

from envkit.data.paths import Key, as_key, as_path
from envkit.data.timeline import carried_keys, same_rows, seams, step_entry, time_axis
from envkit.data.transition import copied
from envkit.errors import ArgumentError, ArgumentTypeError, BatchSizeError, MissingKeyError
from envkit.process_wide import no_warnings
from envkit.specs.annotations import EnvData

_IDS = "traj_ids"


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: Key | None = None,
    trajectory_key: Key | None = None,
    done_key: Key | None = None,
    as_nested: bool | torch.layout = False,
) -> EnvData:
    """Put each trajectory of a rollout into its own row, zero-padded.

    A trajectory ends where its id changes. Data without ids ends it after each set done flag (which
    includes truncation). Padding that a mask beside the ids marks is left out. The end of a row of the data ends it, too, and a root that is not the ``next`` of the step before.

    Padding costs memory and hides lengths if you forget the mask. For new training code prefer
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
        ArgumentError: the data has no time axis or is not in the order of time, or is to be nested and has entries that
            are no tensors.
        ArgumentTypeError: ``as_nested`` is neither a bool nor a layout.
        MissingKeyError: an entry that was named is absent, or neither ids nor flags are there.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import split_trajectories
        >>> done = torch.tensor([[False], [True], [False], [False], [False]])
        >>> following = TensorDict(done=done, batch_size=[5])
        >>> x = torch.arange(5.0)
        >>> data = TensorDict(x=x, next=following, batch_size=[5], names=["time"])
        >>> rows = split_trajectories(data)
        >>> rows["x"]
        tensor([[0., 1., 0.],
                [2., 3., 4.]])
        >>> rows["mask"]
        tensor([[ True,  True, False],
                [ True,  True,  True]])
    """
    data = rollout_tensordict
    data = data.transpose(time_axis(data), -1)
    node = _node(data, prefix)
    ids_key = (*node, _IDS) if trajectory_key is None else as_path(trajectory_key)
    ids = data.get(as_key(ids_key), None)
    if trajectory_key is not None and ids is None:
        raise _missing(data, as_key(ids_key), "Name an entry that is there: trajectory_key=...")
    numbers = None
    if ids is not None and (done_key is None or trajectory_key is not None):
        numbers = ids.reshape(data.batch_size)
    flagged = None if numbers is not None else ended_steps(data, done_key or ("next", "done"))
    ended = ended_steps(data) if data.get(("next", "done"), None) is not None else flagged
    if ended is None:
        ended = torch.zeros(data.batch_size, dtype=torch.bool, device=data.device)
    is_cut = seams(
        data,
        ended.reshape(data.batch_size),
        data.batch_dims - 1,
        ids=numbers,
    ).reshape(-1, data.batch_size[-1])
    is_cut = is_cut if flagged is None else is_cut | flagged
    begins = functional.pad(is_cut[:, :-1], (1, 0), value=True)
    is_step = None if ids is None else step_entry(data, "mask")
    if is_step is not None:  # padding is no trajectory
        is_step = is_step.reshape(begins.shape)
        begins[:, 1:] |= is_step[:, 1:] != is_step[:, :-1]
    rows, mask = _rows(begins, is_step)
    if as_nested:
        steps: Any = data.reshape(-1)
        steps = steps if is_step is None else steps[is_step.flatten()]
        return _nested(steps, mask.sum(-1).tolist(), as_nested)
    if mask.all() and mask.shape[1] == data.batch_size[-1]:
        split = data.copy() if data.batch_dims > 1 else data.unsqueeze(0)
        mask = mask.reshape(split.batch_size)
    else:
        split = _padded(data, rows, mask)
    if ids is None:
        numbers = torch.arange(len(rows), device=begins.device)[:, None].expand(rows.shape)
        split.set(as_key(ids_key), (numbers * mask.reshape(rows.shape)).reshape(mask.shape))
    return split.set(as_key((*ids_key[:-1], "mask")), mask)


def _nested(data: Any, lengths: list[int], layout: object) -> EnvData:
    """Return pieces of these lengths, which follow each other in ``data``, as nested tensors."""
    if not isinstance(layout, torch.layout) and layout != 1:
        raise ArgumentTypeError(
            f"as_nested is {layout!r}, of type {type(layout).__name__}, but must be a bool or a torch.layout. "
            "Pass True, or torch.jagged."
        )
    chosen = layout if isinstance(layout, torch.layout) else torch.strided
    others = [key for key, leaf in data.items(True) if is_non_tensor(leaf)]
    if others:
        raise ArgumentError(
            f"the data has {others}, which are no tensors, but only tensors can be nested. Exclude them, or pass "
            "as_nested=False."
        )

    def nest(leaf: torch.Tensor) -> torch.Tensor:
        # torch says once that nested tensors may change
        with no_warnings("The PyTorch API of nested tensors", UserWarning):
            return torch.nested.as_nested_tensor(list(leaf.split(lengths)), layout=chosen)

    # `apply` would check the axis of time, which has no size, of jagged tensors.
    return data._fast_apply(nest, batch_size=[len(lengths), -1])


def _node(data: TensorDictBase, prefix: Key | None) -> tuple[str, ...]:
    if prefix is not None:
        return as_path(prefix)
    return ("collector",) if "collector" in data.keys() else ()


def _missing(data: TensorDictBase, key: Key, fix: str) -> MissingKeyError:
    return MissingKeyError(
        f"the data has no {key!r}; it has {sorted(map(str, data.keys(True, True)))}. {fix}"
    )


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


def _rows(begins: torch.Tensor, is_step: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the flat positions of each piece's steps, its last repeated, and which are no repeats."""
    starts = begins.flatten().nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([begins.numel()])])
    if is_step is not None:
        whole = is_step.flatten()[starts]
        starts, ends = starts[whole], ends[whole]
    steps = torch.arange(int((ends - starts).max()), device=begins.device)
    positions = starts[:, None] + steps
    return positions.minimum(ends[:, None] - 1), positions < ends[:, None]


def _padded(data: TensorDictBase, rows: torch.Tensor, mask: torch.Tensor) -> TensorDictBase:
    def blanked(leaf: object) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.masked_fill(~mask.reshape((*mask.shape, *(1,) * (leaf.ndim - 2))), 0)

    pieces = cast(TensorDictBase, data.reshape(-1)[rows])
    split = cast(TensorDictBase, pieces.apply(blanked))
    split.names = [None, "time"]
    return split


_NO_FLAGS = "Pass steps as rollout and collectors give them, with their flags."


class Piece(NamedTuple):
    """Consecutive steps of one row that belong to one episode.

    Attributes:
        row: of the data.
        start, stop: the steps are ``start <= t < stop``.
        episode: its number.
        first: how many steps the episode had before.
        ended: whether the last of these is the last of the episode.
    """

    row: int
    start: int
    stop: int
    episode: int
    first: int
    ended: bool


class EpisodeSteps(NamedTuple):
    """Result of `EpisodeNumbers` for one batch.

    Attributes:
        episode: int64, shape ``(rows, T)``; -1 outside of episodes.
        step: int64 of that shape, how many steps of the episode came before; -1 outside.
        pieces: in the order of the rows, then of time.
    """

    episode: torch.Tensor
    step: torch.Tensor
    pieces: list[Piece]


class EpisodeNumbers:
    """Number the episodes in batches that follow each other.

    With ``("collector", "traj_ids")`` the batches may have any shape, come from any worker, and be flattened.
    Without, the last axis must be time. A row then goes on where it ended in the batch before: its first root is
    the last ``next``. Where it is not, there and within a batch, the row was reset in between, and a new episode begins. ``traj_ids`` at the
    root, as `split_trajectories` writes them, hold within their batch.

    Attributes:
        count: how many episodes there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._open: dict[int, tuple[int, int]] = {}  # by id, or by row: number and steps so far
        self._last: TensorDictBase | None = None

    def number(self, batch: TensorDictBase) -> EpisodeSteps:
        """Return which episode each step of the next batch belongs to.

        Raises:
            ArgumentError: (a ValueError) the data has no time axis, or neither ids nor a last axis named "time".
            BatchSizeError: (a RuntimeError) without ids, the batch has other rows than the one before.
            MissingKeyError: (a KeyError) it has no ``("next", "done")``.
        """
        if not batch.batch_dims:
            raise ArgumentError(
                "the data has batch size (), but its last batch axis must be time. Pass a rollout."
            )
        ended = ended_steps(batch, fix=_NO_FLAGS).cpu()
        ids, is_whole = _ids(batch)
        outside = _outside(batch, ids)
        if ids is None:
            outside |= _frozen(batch, ended)
            self._go_on(batch)
            ids = torch.arange(len(ended), device="cpu")[:, None].expand(ended.shape)
        shape = batch.batch_size
        seam = seams(
            batch, ended.reshape(shape), len(shape) - 1, ids=ids.reshape(shape), takes_turns=True
        )
        pieces = list(self._pieces(ids, ended, outside, seam.reshape(ended.shape)))
        if is_whole:
            self._open.clear()
        return EpisodeSteps(*_spread(pieces, ended.shape), pieces)

    def _pieces(
        self, ids: torch.Tensor, ended: torch.Tensor, outside: torch.Tensor, seam: torch.Tensor
    ) -> Iterator[Piece]:
        begins = torch.ones_like(ended)
        begins[:, 1:] = ended[:, :-1] | seam[:, :-1]
        is_lost = seam.clone()
        is_lost[:, :-1] &= ids[:, 1:] == ids[:, :-1]
        begins[:, 1:] |= outside[:, 1:] != outside[:, :-1]
        rows, starts = (begins & ~outside).nonzero(as_tuple=True)
        stops = _next_begin(begins)[rows, starts]
        last = (rows, stops - 1)
        of_piece = (rows, starts, stops, ids[rows, starts], ended[last])
        for row, start, stop, key, is_last in zip(*(x.tolist() for x in of_piece), strict=True):
            number, first = self._open.pop(key, (self.count, 0))
            self.count = max(self.count, number + 1)
            if not (is_last or is_lost[row, stop - 1]):
                self._open[key] = (number, first + stop - start)
            yield Piece(row, start, stop, number, first, is_last)

    def _go_on(self, batch: TensorDictBase) -> None:
        """Forget the open episodes of rows that begin elsewhere than they ended, and keep where these end."""
        if batch.names[-1] != "time":
            names = [*([None] * (batch.batch_dims - 1)), "time"]
            raise ArgumentError(
                f"the data has batch size {tuple(batch.batch_size)}, no trajectory ids, and no last axis named "
                "'time', so that nothing tells where its rows end. Pass it as it was before it was reshaped. If "
                f"its last axis is time, say so: data.names = {names}."
            )
        rows, carried = batch.batch_size[:-1], carried_keys(batch)
        if self._last is not None:
            if rows != self._last.batch_size:
                raise BatchSizeError(
                    f"a batch has rows of shape {tuple(rows)}, the one before {tuple(self._last.batch_size)}, and no "
                    "trajectory ids say which go on. Pass batches of one env, or write them one by one."
                )
            same = _same(self._last, batch[..., 0], carried)
            for row in (~same).nonzero()[:, 0].tolist():
                self._open.pop(row, None)
        self._last = copied(batch.get("next")[..., -1].select(*carried))


def _ids(batch: TensorDictBase) -> tuple[torch.Tensor | None, bool]:
    """Return the trajectory ids of each step, and whether they hold within the batch only."""
    for key, is_whole in ((("collector", "traj_ids"), False), ("traj_ids", True)):
        ids: Any = batch.get(key, None)
        if ids is not None:
            return ids.reshape(-1, batch.batch_size[-1]).cpu(), is_whole
    return None, False


def _outside(batch: TensorDictBase, ids: torch.Tensor | None) -> torch.Tensor:
    """Mark padding, and steps from a root whose episode has ended already."""
    steps = batch.batch_size[-1]
    outside = torch.zeros(
        batch.batch_size.numel() // max(steps, 1), steps, dtype=torch.bool, device="cpu"
    )
    done: Any = batch.get("done", None)
    if done is not None:
        outside |= done.reshape(*outside.shape, -1).any(-1).cpu()
    if ids is not None:
        beside = ("collector", "mask") if "collector" in batch.keys() else "mask"
        mask: Any = batch.get(beside, None)
        outside |= ids < 0
        if mask is not None:
            outside |= ~mask.reshape(outside.shape).cpu()
    return outside


def _frozen(batch: TensorDictBase, ended: torch.Tensor) -> torch.Tensor:
    """Mark what ``rollout(break_when_all_done=True)`` repeats in rows that are done before others.

    There some row has not ended yet at each step but the last, and whatever follows the first end of a row is
    that step again, unpaid.
    """
    over = ended.cumsum(1) > 0
    repeats = torch.cat([torch.zeros_like(over[:, :1]), over[:, :-1]], 1)
    none = torch.zeros_like(over)
    if not repeats.any() or over[:, :-1].all(0).any() or not carried_keys(batch):
        return none
    rows, steps = repeats.nonzero(as_tuple=True)
    ends = ended.int().argmax(1)[rows]
    root = set(map(as_path, batch.keys(True, True)))
    for path in sorted(root):
        values = batch.get(as_key(path)).reshape(*ended.shape, -1)
        again, was = values[rows, steps], values[rows, ends]
        same = (again == was) | ((again != again) & (was != was))
        if path[0] == "next" and path[1:] not in root:  # rewards
            same |= again == 0
        if not same.all():
            return none
    return repeats


def _next_begin(begins: torch.Tensor) -> torch.Tensor:
    """Return for each step where, after it, the next piece of its row begins."""
    steps = begins.shape[1]
    at = torch.arange(steps, device="cpu").expand(begins.shape).where(begins, steps)
    after = torch.cat([at[:, 1:], torch.full_like(at[:, :1], steps)], 1)
    return after.flip(1).cummin(1).values.flip(1)


def _spread(pieces: list[Piece], shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the number of the episode, and that of the step in it, at each step."""
    episode = torch.full(shape, -1, dtype=torch.int64, device="cpu")
    step = episode.clone()
    for row, start, stop, number, first, _ in pieces:
        episode[row, start:stop] = number
        step[row, start:stop] = torch.arange(first, first + stop - start, device="cpu")
    return episode, step


def _same(last: TensorDictBase, root: TensorDictBase, keys: list[Key]) -> torch.Tensor:
    """Return for each row whether it begins where it ended, NaN included."""
    same = torch.ones(last.batch_size.numel(), dtype=torch.bool, device="cpu")
    for key in keys:
        was, now = last.get(key), root.get(key)
        if was.is_nested:  # of unlike shapes, which one row alone has
            same &= all(map(torch.equal, was.unbind(), now.unbind()))
            continue
        rows = (value.reshape(len(same), -1) for value in (was, now))
        same &= same_rows(*rows).cpu()
    return same
