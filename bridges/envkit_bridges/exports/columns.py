"""TensorDicts of steps as named columns of NumPy arrays, and back.

`Layout` says which entries recorded data has, and is written beside the columns as JSON. `read_batches` yields the
batches of a rollout or of an iterable, all of one layout. Files hold numbers and text alone: no pickles, so reading
them runs no code.

Conventions
    rows    batch axes in front of time; `arrays_of` flattens them into one.
    column  array of shape (rows, T, *shape), in a dtype that files know.
    shape   of an entry beyond its batch axes.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, is_non_tensor

from envkit.arrays.elementwise import dtype_name
from envkit.data.episodes import EpisodeNumbers, EpisodeSteps
from envkit.data.files import undamaged
from envkit.data.paths import Path, as_key
from envkit.errors import ArgumentError, ArgumentTypeError, BatchSizeError

TEXT = "text"

_SAME = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
_HELD = {
    **{dtype: dtype for dtype in (*_SAME, "float32", "float64")},
    "float16": "float32",
    "bfloat16": "float32",
    "complex64": "float32",
    "complex128": "float64",
    TEXT: "object",
}
"""Dtype of an entry to that of its column: not every reader knows the rest. Values are not rounded."""

RESERVED = frozenset({"episode", "step", "row", "time", "cut"})
"""Columns that say where a step is."""


@dataclass(frozen=True)
class Column:
    """One entry.

    Attributes:
        path: of the entry.
        name: of the column, unique.
        dtype: of torch, or "text".
        shape: beyond the batch axes.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def held_dtype(self) -> np.dtype:
        """The dtype of the column."""
        return np.dtype(_HELD[self.dtype])

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of one step in the column: complex numbers have an axis of their two parts."""
        return (*self.shape, 2) if self.dtype.startswith("complex") else self.shape


@dataclass(frozen=True)
class Layout:
    """Which entries data has.

    Attributes:
        rows: batch axes in front of time.
        names: of all batch axes.
        columns: of all entries.
        nodes: path of each nested TensorDict, and the axes of its batch size beyond those of the data.
        on_device: whether the data has a device; data that is read lies on the CPU.
    """

    rows: tuple[int, ...]
    names: tuple[str | None, ...]
    columns: tuple[Column, ...]
    nodes: tuple[tuple[Path, tuple[int, ...]], ...]
    on_device: bool

    def to_json(self) -> str:
        """Write the layout down."""
        checksum = zlib.crc32(json.dumps(asdict(self)).encode())
        return json.dumps({"version": 1, "checksum": checksum, **asdict(self)})

    @classmethod
    def from_json(cls, text: str | bytes, source: Any) -> Layout:
        """Read what `to_json` wrote.

        Raises:
            ArgumentError: (a ValueError) a newer envkit wrote it, or it is damaged.
        """
        with undamaged(source, "a dataset of envkit"):
            layout = json.loads(text)
            if layout.pop("version", None) != 1:
                raise ArgumentError(
                    f"{source} was written in a form that this version of envkit does not read. Update envkit."
                )
            checksum = layout.pop("checksum", None)  # files of older versions have none
            if checksum not in (None, zlib.crc32(json.dumps(layout).encode())):
                raise ArgumentError(
                    f"{source} is damaged: the list of its entries is not what was written, by the checksum beside it. "
                    "Take a copy of the file, or write it again."
                )
            for column in layout["columns"]:
                if column["dtype"] not in _HELD:
                    raise ArgumentError(
                        f"{source} is damaged: its entry {column['name']!r} has dtype {column['dtype']!r}; expected "
                        f"one of {', '.join(_HELD)}. Take a copy of the file, or write it again."
                    )
            columns = [Column(**tuples(column)) for column in layout["columns"]]
            return cls(**tuples({**layout, "columns": columns}))


def tuples(value: Any) -> Any:
    """Return a value of JSON with tuples in place of its lists."""
    if isinstance(value, dict):
        return {name: tuples(part) for name, part in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


# ---------------------------------------------------------------------------------------- reading data


def read_batches(data: object) -> Iterator[tuple[TensorDictBase, Layout]]:
    """Yield the batches of a rollout or an iterable of rollouts, each checked to be like the first.

    Raises:
        ArgumentTypeError: (a TypeError) it is, or gives, something else than TensorDicts.
        ArgumentError: (a ValueError) it has no steps, entries that no column holds, or batches of unlike entries.
        BatchSizeError: (a RuntimeError) the rows of batches differ.
    """
    if not isinstance(data, Iterable):
        raise ArgumentTypeError(
            f"data is of type {type(data).__name__}, but must be a TensorDict with a time axis, or an iterable of them. Pass "
            "a rollout or a collector."
        )
    first, is_empty = None, True
    for number, batch in enumerate([data] if isinstance(data, TensorDictBase) else data):
        if not isinstance(batch, TensorDictBase):
            raise ArgumentTypeError(
                f"batch {number} of the data is of type {type(batch).__name__}, but must be a TensorDict. A collector "
                "with a replay buffer gives none: leave out replay_buffer."
            )
        if not batch.batch_dims:
            raise ArgumentError(
                f"batch {number} has batch size (), but its last batch axis must be time. Pass a rollout."
            )
        layout = _layout_of(batch)
        first = first or layout
        if layout != first:
            raise _unlike(first, layout, number)
        if batch.batch_size.numel():
            is_empty = False
            yield batch, layout
    if is_empty:
        raise ArgumentError("the data has no steps, so there is nothing to write. Collect some.")


def _unlike(first: Layout, layout: Layout, number: int) -> Exception:
    """Return the error that says in which way a batch is unlike the first."""
    if layout.rows != first.rows:
        return BatchSizeError(
            f"batch {number} has rows of shape {layout.rows}, the first one {first.rows}; time is the last axis. "
            "Batches are joined along time: flatten them all (batch.reshape(-1), with trajectory ids), or write "
            "those of each shape by themselves."
        )
    was, now = (
        {column.path: f"{column.dtype} of shape {column.shape}" for column in one.columns}
        for one in (first, layout)
    )
    for path in sorted({*was, *now}):
        if was.get(path) != now.get(path):
            return ArgumentError(
                f"the entry {as_key(path)!r} of batch {number} is {now.get(path, 'missing')}, that of the first one "
                f"{was.get(path, 'missing')}. Write batches of the same entries, or leave it out: batch.exclude(...)."
            )
    return ArgumentError(
        f"batch {number} has other nested TensorDicts or names of axes than the first one. Write batches of one env."
    )


def _layout_of(batch: TensorDictBase) -> Layout:
    """Return which entries a batch has.

    Raises:
        ArgumentError: (a ValueError) no column can hold one of them.
    """
    columns: list[Column] = []
    nodes: list[tuple[Path, tuple[int, ...]]] = []
    names = set(RESERVED)
    for path, value in _entries(batch):
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            nodes.append((path, tuple(value.batch_size[batch.batch_dims :])))
            continue
        dtype = TEXT if is_non_tensor(value) else dtype_name(value.dtype)
        if dtype not in _HELD:
            raise ArgumentError(
                f"the entry {as_key(path)!r} has dtype {dtype}, which no column can hold. Convert it, or leave it "
                f"out: data.exclude({as_key(path)!r})."
            )
        name = ".".join(path)
        while name in names:
            name += "_"
        names.add(name)
        columns.append(Column(path, name, dtype, tuple(value.shape[batch.batch_dims :])))
    return Layout(
        rows=tuple(batch.batch_size[:-1]),
        names=tuple(batch.names),
        columns=tuple(columns),
        nodes=tuple(nodes),
        on_device=batch.device is not None,
    )


def _entries(data: TensorDictBase, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name in sorted(data.keys()):
        here = (*path, name)
        try:
            value: Any = data.get(name)
        except RuntimeError as error:
            raise ArgumentError(
                f"the entry {as_key(here)!r} has another shape in some rows than in others, so no column can hold it. "
                f"Leave it out: data.exclude({as_key(here)!r})."
            ) from error
        yield here, value
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            yield from _entries(value, here)


class EpisodeMarks:
    """Numbers the episodes of batches that follow each other.

    Attributes:
        newest: row and time of the newest step of each open episode, by its number.
        steps: how many steps of each row there were.
    """

    def __init__(self) -> None:
        self.newest: dict[int, tuple[int, int]] = {}
        self.steps = 0
        self._numbers = EpisodeNumbers()

    def number(self, batch: TensorDictBase) -> EpisodeSteps:
        """Return the episode of each step of the next batch, as `EpisodeNumbers` does."""
        marks = self._numbers.number(batch)
        for piece in marks.pieces:
            self.newest.pop(piece.episode, None)
            if not piece.ended:
                self.newest[piece.episode] = (piece.row, self.steps + piece.stop - 1)
        self.steps += batch.batch_size[-1]
        return marks


# ---------------------------------------------------------------------------------------- columns


def arrays_of(batch: TensorDictBase, layout: Layout) -> dict[Path, np.ndarray]:
    """Return the columns of a batch by path.

    Raises:
        ArgumentError: (a ValueError) data that is no tensor is no text.
    """
    shape = (int(np.prod(batch.batch_size[:-1])), batch.batch_size[-1])
    arrays = {}
    for column in layout.columns:
        value: Any = batch.get(as_key(column.path))
        held = _texts(value, column) if column.dtype == TEXT else _numbers(value)
        arrays[column.path] = held.reshape(*shape, *column.held_shape)
    return arrays


def _numbers(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu().resolve_conj().resolve_neg()
    if value.is_complex():
        value = torch.view_as_real(value)
    elif value.dtype in (torch.float16, torch.bfloat16):
        value = value.float()
    return value.numpy()


def _texts(value: Any, column: Column) -> np.ndarray:
    texts = value.tolist()
    for _ in value.batch_size[1:]:
        texts = [one for part in texts for one in part]
    for text in texts:
        if not isinstance(text, str) or _UNWRITABLE.search(text):
            raise ArgumentError(
                f"the entry {as_key(column.path)!r} holds {text!r}, of type {type(text).__name__}. Files hold tensors, "
                "and text without null characters and unpaired surrogates. Reading other objects back could run code. "
                f"Leave the entry out: data.exclude({as_key(column.path)!r})."
            )
    return np.array(texts, dtype=object)


_UNWRITABLE = re.compile("[\0\ud800-\udfff]")


def data_of(layout: Layout, arrays: Mapping[Path, np.ndarray]) -> TensorDict:
    """Build the data of which these are the columns, all steps in one TensorDict.

    Args:
        layout: of the data.
        arrays: columns by path; memory is shared where that is possible.
    """
    steps = next(iter(arrays.values())).shape[1]
    size = (*layout.rows, steps)
    data = TensorDict({}, size, device="cpu" if layout.on_device else None)
    for path, more in sorted(layout.nodes, key=lambda node: len(node[0])):
        data.set(as_key(path), TensorDict({}, (*size, *more)))
    for column in layout.columns:
        held = arrays[column.path].reshape((*size, *column.held_shape))
        data.set(as_key(column.path), _entry(column, held))
    if any(layout.names):
        data.names = list(layout.names)
    return data


def tensor_of(held: np.ndarray) -> Any:
    """Return a column as a tensor, text as a stack of it."""
    if held.dtype == object:
        return NonTensorStack.from_list(held.tolist())
    return torch.from_numpy(np.ascontiguousarray(held))


def _entry(column: Column, held: np.ndarray) -> Any:
    value = tensor_of(held)
    if column.dtype == TEXT:
        return value
    if column.dtype.startswith("complex"):
        return torch.complex(value[..., 0], value[..., 1])
    return value.to(getattr(torch, column.dtype))
