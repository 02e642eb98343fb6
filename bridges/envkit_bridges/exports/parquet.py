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
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from envkit.data.files import file_to_read, telling, undamaged, whole_file
from envkit.data.paths import Path
from envkit.errors import ArgumentError
from envkit.specs.annotations import EnvData
from envkit_bridges.exports.columns import (
    TEXT,
    Column,
    EpisodeMarks,
    Layout,
    arrays_of,
    data_of,
    read_batches,
)
from envkit_bridges.libraries import require

_ENOUGH_ROWS = 2**16
_ENOUGH_BYTES = 2**26
"""How many steps are gathered before they are written as one group of rows."""


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
    arrow, parquet = require("pyarrow"), require("pyarrow.parquet")
    with whole_file(path) as file, ExitStack() as stack:
        batches, marks = read_batches(data), EpisodeMarks()
        batch, layout = next(batches)
        # The next group of rows, and the newest step of each open episode: it is cut if the data ends there.
        waiting = _table(batch, layout, marks)
        texts = [column.name for column in layout.columns if column.dtype == TEXT]
        with telling(path):
            writer = parquet.ParquetWriter(
                file, waiting.schema, use_dictionary=texts, write_page_checksum=True
            )
        stack.callback(_close, writer, path)

        def write(table: Any) -> None:
            if table.num_rows:
                with telling(path):
                    writer.write_table(table)

        for batch, _ in batches:
            waiting = arrow.concat_tables([waiting, _table(batch, layout, marks)])
            if waiting.num_rows >= _ENOUGH_ROWS or waiting.nbytes >= _ENOUGH_BYTES:
                is_open = _is_newest(waiting, layout, marks)
                write(waiting.filter(arrow.array(~is_open)))
                waiting = waiting.filter(arrow.array(is_open)).combine_chunks()
        at = waiting.schema.get_field_index("cut")
        cut = arrow.array(_is_newest(waiting, layout, marks))
        write(waiting.set_column(at, waiting.schema.field("cut"), cut))
    return File(path)


def _close(writer: Any, path: str | os.PathLike[str]) -> None:
    with telling(path):
        writer.close()


def _is_newest(table: Any, layout: Layout, marks: EpisodeMarks) -> np.ndarray:
    """Mark the steps that are the newest of an open episode."""
    count = int(np.prod(layout.rows))
    newest = [row + count * time for row, time in marks.newest.values()]
    return np.isin(table["row"].to_numpy() + count * table["time"].to_numpy(), newest)


def _table(batch: TensorDictBase, layout: Layout, marks: EpisodeMarks) -> Any:
    """Return the steps of a batch as an arrow table."""
    arrow = require("pyarrow")
    before = marks.steps
    steps = marks.number(batch)
    rows, times = np.indices(steps.episode.shape)
    is_outside = (steps.episode < 0).numpy().reshape(-1)
    parts = {
        name: arrow.array(numbers.numpy().reshape(-1), mask=is_outside)
        for name, numbers in (("episode", steps.episode), ("step", steps.step))
    }
    parts["row"] = arrow.array(rows.reshape(-1))
    parts["time"] = arrow.array(times.reshape(-1) + before)
    parts["cut"] = arrow.array(np.zeros(is_outside.shape, bool))
    arrays = arrays_of(batch, layout)
    for column in layout.columns:
        if size := _size(column):
            is_text = column.dtype == TEXT
            kind = arrow.string() if is_text else arrow.from_numpy_dtype(column.held_dtype)
            values = arrow.array(arrays[column.path].reshape(-1), type=kind)
            if size > 1:
                values = arrow.FixedSizeListArray.from_arrays(values, size)
            parts[column.name] = values
    return arrow.table(parts, metadata={"envkit": layout.to_json()})


def _size(column: Column) -> int:
    return int(np.prod(column.held_shape))


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


def _read(file: Any, layout: Layout, path: str | os.PathLike[str]) -> dict[Path, np.ndarray]:
    """Put the steps where they were, one group of rows after the other."""
    rows, count = int(np.prod(layout.rows)), file.metadata.num_rows
    steps = count // rows if rows else 0
    arrays = {
        column.path: np.empty((rows, steps, *column.held_shape), column.held_dtype)
        for column in layout.columns
    }
    is_there = np.zeros((rows, steps), bool)
    for batch in file.iter_batches():
        at = tuple(batch.column(name).to_numpy() for name in ("row", "time"))
        if any((index >= limit).any() for index, limit in zip(at, is_there.shape, strict=True)):
            break
        is_there[at] = True
        for column in layout.columns:
            if _size(column):
                values: Any = batch.column(column.name)
                flat = values if _size(column) == 1 else values.flatten()
                held = flat.to_numpy(zero_copy_only=False)
                arrays[column.path][at] = held.reshape(-1, *column.held_shape)
    if rows * steps != count or not is_there.all():
        raise ArgumentError(
            f"{os.fspath(path)} has {count} steps, which are not all those of {rows} rows: some were taken out. Read "
            "it with pyarrow.parquet.read_table."
        )
    return arrays
