"""TensorDicts of steps as named columns of NumPy arrays, and back.

`Layout` says which entries recorded data has, and is written beside the columns as JSON; `read_batches` gives the
batches of whatever holds data, all of one layout. Files hold numbers and text alone: nothing is pickled,
and nothing that is read back runs.

Conventions
    rows    batch axes in front of time; `arrays_of` flattens them into one.
    column  array of shape (rows, T, *shape), in a dtype that files know.
    shape   of an entry beyond its batch axes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_non_tensor

from envkit.arrays.elementwise import dtype_name
from envkit.data.files import undamaged
from envkit.data.paths import Path, as_key, nest
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
        nodes: path of each nested TensorDict, and what its batch size has beyond that of the data.
        on_device: whether the data says where it is; what is read lies on the CPU.
    """

    rows: tuple[int, ...]
    names: tuple[str | None, ...]
    columns: tuple[Column, ...]
    nodes: tuple[tuple[Path, tuple[int, ...]], ...]
    on_device: bool

    def to_json(self) -> str:
        """Write the layout down."""
        told = json.dumps(asdict(self))
        return json.dumps({"version": 1, "checksum": zlib.crc32(told.encode()), **asdict(self)})

    @classmethod
    def from_json(cls, text: str | bytes, source: Any) -> Layout:
        """Read what `to_json` wrote.

        Raises:
            ArgumentError: (a ValueError) a newer envkit wrote it, or it is damaged.
        """
        with undamaged(source, "a dataset of envkit"):
            return cls._read(json.loads(text), source)

    @classmethod
    def _read(cls, told: dict[str, Any], source: object) -> Layout:
        if told.pop("version", None) != 1:
            raise ArgumentError(
                f"{source} was written in a form that this version of envkit does not read. Update envkit."
            )
        checksum = told.pop("checksum", None)  # files of older versions have none
        if checksum is not None and checksum != zlib.crc32(json.dumps(told).encode()):
            raise ArgumentError(
                f"{source} is damaged: the list of its entries is not what was written, by the checksum beside it. "
                "Take a copy of the file, or write it again."
            )
        columns = [
            Column(tuple(one["path"]), one["name"], one["dtype"], tuple(one["shape"]))
            for one in told["columns"]
        ]
        for column in columns:
            if column.dtype not in _HELD:
                raise ArgumentError(
                    f"{source} is damaged: its entry {column.name!r} has dtype {column.dtype!r}; expected one of "
                    f"{', '.join(_HELD)}. Take a copy of the file, or write it again."
                )
        return cls(
            rows=tuple(told["rows"]),
            names=tuple(told["names"]),
            columns=tuple(columns),
            nodes=tuple((tuple(path), tuple(more)) for path, more in told["nodes"]),
            on_device=told["on_device"],
        )


# ---------------------------------------------------------------------------------------- reading data


def read_batches(data: object) -> Iterator[tuple[TensorDictBase, Layout]]:
    """Yield the batches of a rollout or an iterable of rollouts, each checked to be like the first.

    Raises:
        ArgumentTypeError: (a TypeError) it is, or gives, something else than TensorDicts.
        ArgumentError: (a ValueError) it has no steps, entries that no column holds, or batches of unlike entries.
        BatchSizeError: (a RuntimeError) the rows of batches differ.
    """
    layout, is_empty = None, True
    for number, batch in enumerate(_listed(data)):
        if not isinstance(batch, TensorDictBase):
            raise ArgumentTypeError(
                f"batch {number} of the data is of type {type(batch).__name__}, but must be a TensorDict. A collector "
                "with a replay buffer gives none: leave out replay_buffer."
            )
        if not batch.batch_dims:
            raise ArgumentError(
                f"batch {number} has batch size (), but its last batch axis must be time. Pass a rollout."
            )
        found = layout_of(batch)
        if layout is None:
            layout = found
        _require_like(layout, found, number)
        if batch.batch_size.numel():
            is_empty = False
            yield batch, layout
    if is_empty:
        raise ArgumentError("the data has no steps, so there is nothing to write. Collect some.")


def _listed(data: object) -> Iterable[Any]:
    if isinstance(data, TensorDictBase):
        return (data,)
    if not isinstance(data, Iterable):
        raise ArgumentTypeError(
            f"data is of type {type(data).__name__}, but must be a TensorDict with a time axis, or an iterable of them. Pass "
            "a rollout or a collector."
        )
    return data


def _require_like(first: Layout, found: Layout, number: int) -> None:
    if found == first:
        return
    if found.rows != first.rows:
        raise BatchSizeError(
            f"batch {number} has rows of shape {found.rows}, the first one {first.rows}; time is the last axis. "
            "Batches are joined along time: flatten them all (batch.reshape(-1), with trajectory ids), or write "
            "those of each shape by themselves."
        )
    was = {column.path: (column.dtype, column.shape) for column in first.columns}
    now = {column.path: (column.dtype, column.shape) for column in found.columns}
    for path in sorted({*was, *now}):
        if was.get(path) != now.get(path):
            raise ArgumentError(
                f"the entry {as_key(path)!r} of batch {number} is {_told(now.get(path))}, that of the first one "
                f"{_told(was.get(path))}. Write batches of the same entries, or leave it out: batch.exclude(...)."
            )
    raise ArgumentError(
        f"batch {number} has other nested TensorDicts or names of axes than the first one. Write batches of one env."
    )


def _told(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if entry is None else f"{entry[0]} of shape {entry[1]}"


def layout_of(batch: TensorDictBase) -> Layout:
    """Return which entries a batch has.

    Raises:
        ArgumentError: (a ValueError) no column can hold one of them.
    """
    columns: list[Column] = []
    nodes: list[tuple[Path, tuple[int, ...]]] = []
    taken: set[str] = set()
    for path, value in _entries(batch):
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            nodes.append((path, tuple(value.batch_size[batch.batch_dims :])))
            continue
        is_text = is_non_tensor(value)
        shape = value.batch_size if is_text else value.shape
        dtype = TEXT if is_text else dtype_name(value.dtype)
        if dtype not in _HELD:
            raise ArgumentError(
                f"the entry {as_key(path)!r} has dtype {dtype}, which no column can hold. Convert it, or leave it "
                f"out: data.exclude({as_key(path)!r})."
            )
        columns.append(Column(path, _name(path, taken), dtype, tuple(shape[batch.batch_dims :])))
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


def _name(path: Path, taken: set[str]) -> str:
    """Name the column of an entry: "next.reward"; with "_" behind where that is taken."""
    name = ".".join(path)
    while name in taken or name in RESERVED:
        name += "_"
    taken.add(name)
    return name


RESERVED = frozenset({"episode", "step", "row", "time", "cut"})
"""Columns that say where a step is."""


# ---------------------------------------------------------------------------------------- columns


def arrays_of(batch: TensorDictBase, layout: Layout) -> dict[Path, np.ndarray]:
    """Return the columns of a batch by path.

    Raises:
        ArgumentError: (a ValueError) data that is no tensor is no text.
    """
    size = (-1, batch.batch_size[-1])
    found = {}
    for column in layout.columns:
        value: Any = batch.get(as_key(column.path))
        held = _text(value, column) if column.dtype == TEXT else _numbers(value, column)
        rows = int(np.prod(layout.rows))
        found[column.path] = held.reshape(rows, size[1], *column.held_shape)
    return found


def _numbers(value: torch.Tensor, column: Column) -> np.ndarray:
    value = value.detach().cpu().resolve_conj().resolve_neg()
    if value.is_complex():
        value = torch.view_as_real(value)
    elif value.dtype in (torch.float16, torch.bfloat16):
        value = value.float()
    return value.numpy()


def _text(value: Any, column: Column) -> np.ndarray:
    if isinstance(value, NonTensorData):
        held = np.full(tuple(value.batch_size), None, dtype=object)
        held.fill(value.data)
    else:
        held = np.empty(tuple(value.batch_size), dtype=object)
        held.reshape(-1)[:] = _flat(value.tolist(), held.ndim)
    for text in held.flat:
        if not isinstance(text, str) or not _is_plain(text):
            raise ArgumentError(
                f"the entry {as_key(column.path)!r} holds {text!r}, of type {type(text).__name__}. Files hold tensors, "
                "and text without null characters and unpaired surrogates. Reading other objects back could run code. "
                f"Leave the entry out: data.exclude({as_key(column.path)!r})."
            )
    return held


def _is_plain(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= sign <= "\udfff" for sign in text)


def _flat(nested: Any, depth: int) -> list[Any]:
    if depth == 0:
        return [nested]
    return [one for part in nested for one in _flat(part, depth - 1)]


def data_of(layout: Layout, arrays: Mapping[Path, np.ndarray]) -> TensorDict:
    """Build the data of which these are the columns, all steps in one TensorDict.

    Args:
        layout: of the data.
        arrays: columns by path; memory is shared where that is possible.
    """
    steps = next(iter(arrays.values())).shape[1]
    size = (*layout.rows, steps)
    entries = {column.path: _entry(column, arrays[column.path], size) for column in layout.columns}
    device = "cpu" if layout.on_device else None
    data = TensorDict(_nested(entries, layout, size), size, device=device)
    if any(layout.names):
        data.names = list(layout.names)
    return data


def _nested(entries: Mapping[Path, Any], layout: Layout, size: tuple[int, ...]) -> dict[str, Any]:
    below = dict(entries)
    for path, more in sorted(layout.nodes, key=lambda node: -len(node[0])):  # the deepest first
        inside = {at[-1]: below.pop(at) for at in list(below) if at[:-1] == path}
        below[path] = TensorDict(inside, (*size, *more))
    return nest(below)


def _entry(column: Column, held: np.ndarray, size: tuple[int, ...]) -> Any:
    whole = held.reshape((*size, *column.held_shape))
    if column.dtype == TEXT:
        return _stacked(whole)
    value = torch.from_numpy(np.ascontiguousarray(whole))
    if column.dtype.startswith("complex") and value.numel():
        return torch.view_as_complex(value)
    return value.reshape((*size, *column.shape)).to(getattr(torch, column.dtype))


def _stacked(texts: np.ndarray) -> Any:
    if texts.ndim == 0:
        return NonTensorData(texts.item())
    parts = [_stacked(np.asarray(part, dtype=object)) for part in texts]
    return NonTensorStack(*parts)  # type: ignore[abstract]
