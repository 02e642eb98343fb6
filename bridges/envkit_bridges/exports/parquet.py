"""Recorded steps as a Parquet file with one row for each step.

pyarrow, `datasets`, Polars and DuckDB read it. Which entries the columns stand for is written in the metadata of
the schema, so that `from_parquet` gives back the data as it was.

Conventions
    episode, step  numbers of the episode and of the step in it; null for padding.
    row, time      where the step is in the data, its axes in front of time flattened.
    cut            True at the last step of an episode that the end of the data cut.
    columns        "observation", "next.reward": numbers where an entry has one element, else lists of them all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path as File
from types import ModuleType
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from envkit.data.episodes import EpisodeNumbers, EpisodeSteps
from envkit.data.files import file_to_read, telling, undamaged, whole_file
from envkit.data.paths import Path
from envkit.errors import ArgumentError
from envkit.specs.annotations import EnvData
from envkit_bridges.exports.columns import TEXT, Column, Layout, arrays_of, data_of, read_batches
from envkit_bridges.libraries import require

_ENOUGH_ROWS = 2**16
_ENOUGH_BYTES = 2**26
"""How much is gathered before it is written as one group of rows."""


def to_parquet(
    data: TensorDictBase | Iterable[TensorDictBase], path: str | os.PathLike[str]
) -> File:
    """Write recorded steps into a Parquet file, which is complete or not there.

    Args:
        data: a rollout, batch size ``(*rows, T)``, or an iterable of such, as a collector. Batches are written as
            they come, and not kept.
        path: of the file; one that is there is replaced at the end.

    Returns:
        The path. The file has one row a step and the columns ``episode``, ``step``, ``row``, ``time``, ``cut``, and
        one for each entry.

    Raises:
        WriteError: (an OSError) it cannot be written; an existing file is kept.
        ArgumentTypeError: (a TypeError) ``path`` is no path, or ``data`` no data.
        ArgumentError: (a ValueError) ``path`` is empty, the data has no steps, no time axis, or what a column cannot hold.
        BatchSizeError: (a RuntimeError) batches have unlike rows.
        MissingKeyError: (a KeyError) there is no ``("next", "done")``.
        MissingLibraryError: (an ImportError) pyarrow is not installed.

    Example:
        >>> from envkit import GymEnv, from_parquet, to_parquet
        >>> env = GymEnv("CartPole-v1")
        >>> path = to_parquet(env.rollout(5), "steps.parquet")
        >>> from_parquet(path).batch_size
        torch.Size([5])
        >>> env.close()
    """
    parquet = require("pyarrow.parquet")
    with whole_file(path) as file, ExitStack() as stack:
        table, writer = None, None
        for batch, layout in read_batches(data):
            if table is None or writer is None:
                table = _Table(layout)
                with telling(path):
                    writer = parquet.ParquetWriter(
                        file, table.schema, use_dictionary=table.texts, write_page_checksum=True
                    )
                stack.callback(_close, writer, path)
            _write(writer, table.add(batch), path)
        if table is not None:
            _write(writer, table.rest(), path)
    return File(path)


def from_parquet(path: str | os.PathLike[str]) -> EnvData:
    """Read what `to_parquet` wrote.

    Args:
        path: of the file.

    Returns:
        The data, its batches joined along time: equal to ``torch.cat(batches, -1)`` in keys, shapes, dtypes and
        names of axes; on the CPU.

    Raises:
        MissingFileError: (a FileNotFoundError) there is no such file.
        ArgumentTypeError: (a TypeError) ``path`` is no path.
        ArgumentError: (a ValueError) there is a folder of that name, `to_parquet` did not write it, rows were taken out of it, or
            it is damaged: pages are compared with checksums.
        MissingLibraryError: (an ImportError) pyarrow is not installed.

    Example:
        >>> from envkit import GymEnv, from_parquet, to_parquet
        >>> env = GymEnv("CartPole-v1")
        >>> data = env.rollout(5)
        >>> path = to_parquet(data, "steps.parquet")
        >>> bool((from_parquet(path)["observation"] == data["observation"]).all())
        True
        >>> env.close()
    """
    parquet = require("pyarrow.parquet")
    path = file_to_read(path)
    with (
        undamaged(path, "a Parquet file of to_parquet"),
        parquet.ParquetFile(path, page_checksum_verification=True) as file,
    ):
        metadata = file.schema_arrow.metadata or {}
        if b"envkit" not in metadata:
            raise ArgumentError(
                f"{os.fspath(path)} does not say which entries its columns are, so to_parquet did not write it, or "
                "another program wrote it again. Read it with pyarrow.parquet.read_table."
            )
        layout = Layout.from_json(metadata[b"envkit"], path)
        return data_of(layout, _read(file, layout, path))


def _write(writer: Any, part: Any, path: str | os.PathLike[str]) -> None:
    if part is not None and part.num_rows:
        with telling(path):
            writer.write_table(part)


def _close(writer: Any, path: str | os.PathLike[str]) -> None:
    with telling(path):
        writer.close()


class _Table:
    """Steps that are not written yet: some that make a group of rows, and the newest of each open episode.

    Whether a step is the last of its episode is known when the data ends; so it waits.
    """

    def __init__(self, layout: Layout):
        self._arrow = require("pyarrow")
        self.layout = layout
        self.texts = [column.name for column in layout.columns if column.dtype == TEXT]
        self._numbers = EpisodeNumbers()
        self._open: dict[int, tuple[int, int]] = {}  # by episode: row and time of its newest step
        self._steps = 0
        self.schema = self._schema()
        self._waiting = self.schema.empty_table()

    def add(self, batch: TensorDictBase) -> Any:
        """Take a batch, and give a table that is to be written now, or None."""
        steps = self._numbers.number(batch)
        for piece in steps.pieces:
            self._open.pop(piece.episode, None)
            if not piece.ended:
                self._open[piece.episode] = (piece.row, self._steps + piece.stop - 1)
        newest = self._table(batch, steps)
        self._waiting = self._arrow.concat_tables([self._waiting, newest])
        self._steps += batch.batch_size[-1]
        if self._waiting.num_rows < _ENOUGH_ROWS and self._waiting.nbytes < _ENOUGH_BYTES:
            return None
        is_open = self._is_open()
        done = self._waiting.filter(self._arrow.array(~is_open))
        self._waiting = self._waiting.filter(self._arrow.array(is_open)).combine_chunks()
        return done

    def rest(self) -> Any:
        """Return what was not written yet; open episodes are cut."""
        at = self.schema.get_field_index("cut")
        cut = self._arrow.array(self._is_open())
        return self._waiting.set_column(at, self.schema.field("cut"), cut)

    def _is_open(self) -> np.ndarray:
        """Mark the waiting steps that are the newest of an open episode."""
        rows, times = (self._waiting[name].to_numpy() for name in ("row", "time"))
        count = max(int(np.prod(self.layout.rows)), 1)
        places = [row + count * time for row, time in self._open.values()]
        return np.isin(rows + count * times, places)

    def _schema(self) -> Any:
        arrow = self._arrow
        own = [(name, arrow.int64()) for name in ("episode", "step", "row", "time")]
        entries = [
            (column.name, _type(arrow, column)) for column in self.layout.columns if _size(column)
        ]
        schema = arrow.schema([*own, ("cut", arrow.bool_()), *entries])
        return schema.with_metadata({"envkit": self.layout.to_json()})

    def _table(self, batch: TensorDictBase, steps: EpisodeSteps) -> Any:
        arrow = self._arrow
        rows, times = np.indices(steps.episode.shape)
        outside = (steps.episode < 0).numpy().reshape(-1)
        parts = [
            arrow.array(number.numpy().reshape(-1), mask=outside)
            for number in (steps.episode, steps.step)
        ]
        parts += [arrow.array(rows.reshape(-1)), arrow.array(times.reshape(-1) + self._steps)]
        parts.append(arrow.array(np.zeros(outside.shape, bool)))
        arrays = arrays_of(batch, self.layout)
        columns = [column for column in self.layout.columns if _size(column)]
        parts += [_listed(arrow, column, arrays[column.path]) for column in columns]
        return arrow.table(parts, schema=self.schema)


def _size(column: Column) -> int:
    return int(np.prod(column.held_shape))


def _type(arrow: ModuleType, column: Column) -> Any:
    kind = arrow.string() if column.dtype == TEXT else arrow.from_numpy_dtype(column.held_dtype)
    return kind if _size(column) == 1 else arrow.list_(kind, _size(column))


def _listed(arrow: ModuleType, column: Column, held: np.ndarray) -> Any:
    """Return a column as an arrow array: a number, or a list of numbers, for each step."""
    kind = _type(arrow, column)
    if _size(column) == 1:
        return arrow.array(held.reshape(-1), type=kind)
    values = arrow.array(held.reshape(-1), type=kind.value_type)
    return arrow.FixedSizeListArray.from_arrays(values, type=kind)


def _read(file: Any, layout: Layout, path: str | os.PathLike[str]) -> dict[Path, np.ndarray]:
    """Put the steps where they were, one group of rows after the other."""
    rows, count = int(np.prod(layout.rows)), file.metadata.num_rows
    steps = count // rows if rows else 0
    arrays = {
        column.path: np.empty((rows, steps, *column.held_shape), column.held_dtype)
        for column in layout.columns
    }
    found = np.zeros((rows, steps), bool)
    for batch in file.iter_batches():
        at = tuple(batch.column(name).to_numpy() for name in ("row", "time"))
        if any((index >= limit).any() for index, limit in zip(at, found.shape, strict=True)):
            break
        found[at] = True
        for column in layout.columns:
            if _size(column):
                values: Any = batch.column(column.name)
                flat = values if _size(column) == 1 else values.flatten()
                held = flat.to_numpy(zero_copy_only=False)
                arrays[column.path][at] = held.reshape(-1, *column.held_shape)
    if rows * steps != count or not found.all():
        raise ArgumentError(
            f"{os.fspath(path)} has {count} steps, which are not all those of {rows} rows: some were taken out. Read "
            "it with pyarrow.parquet.read_table."
        )
    return arrays
