"""Recorded steps as an HDF5 file with one array for each entry.

Conventions
    data           group with the entries, nested as they are: ``file["data/next/reward"]`` has shape
                   ``(*rows, T, 1)``.
    episode, step  int64, shape ``(*rows, T)``: numbers of the episode and of the step in it; -1 for padding.
    cut            bool of that shape: the last step of an episode that the end of the data cut.
    envkit         text: which entries there are, as JSON.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path as File
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from envkit.data.episodes import EpisodeNumbers
from envkit.data.files import file_to_read, undamaged, whole_file
from envkit.data.results import EnvData
from envkit.errors import ArgumentError
from envkit_bridges.exports.columns import TEXT, Column, Layout, arrays_of, data_of, read_batches
from envkit_bridges.exports.hdf5_file import append, hdf5_file, quoted
from envkit_bridges.libraries import require

__all__ = ["from_hdf5", "to_hdf5"]


def to_hdf5(data: TensorDictBase | Iterable[TensorDictBase], path: str | os.PathLike[str]) -> File:
    """Write recorded steps into an HDF5 file, which is complete or not there.

    Args:
        data: a rollout, batch size ``(*rows, T)``, or an iterable of such, as a collector. Batches are written as
            they come, and not kept.
        path: of the file; one that is there is replaced at the end.

    Returns:
        The path. In the file, ``data`` holds an array for each entry, and ``episode``, ``step`` and ``cut`` say
        where episodes begin and end.

    Raises:
        WriteError: (an OSError) it cannot be written. What was there before is as it was.
        ArgumentTypeError: (a TypeError) ``path`` is no path, or ``data`` no data.
        ArgumentError: (a ValueError) ``path`` is empty, the data has no steps, no time axis, or what a column cannot hold.
        BatchSizeError: (a RuntimeError) batches have unlike rows.
        MissingKeyError: (a KeyError) there is no ``("next", "done")``.
        MissingLibraryError: (an ImportError) h5py is not installed.
    """
    with whole_file(path) as raw, hdf5_file(raw, path) as (file, check):
        writer = None
        for batch, layout in read_batches(data):
            writer = writer or _Writer(file, layout)
            writer.add(batch)
            check()
        if writer is not None:
            writer.finish()
    return File(path)


def from_hdf5(path: str | os.PathLike[str]) -> EnvData:
    """Read what `to_hdf5` wrote.

    Returns:
        The data, its batches joined along time: equal to ``torch.cat(batches, -1)`` in keys, shapes, dtypes and
        names of axes; on the CPU.

    Raises:
        MissingFileError: (a FileNotFoundError) there is no such file.
        ArgumentTypeError: (a TypeError) ``path`` is no path.
        ArgumentError: (a ValueError) there is a folder of that name, `to_hdf5` did not write it, or it is damaged:
            numbers are compared with checksums.
        MissingLibraryError: (an ImportError) h5py is not installed.
    """
    h5py = require("h5py")
    path = file_to_read(path)
    with undamaged(path, "an HDF5 file of to_hdf5"), h5py.File(path, "r") as file:
        if "envkit" not in file:
            raise ArgumentError(
                f"{path} does not say which entries it holds, so to_hdf5 did not write it. Read it with h5py."
            )
        layout = Layout.from_json(file["envkit"][()], path)
        steps = file["episode"].shape[-1]
        arrays = {
            column.path: _read(file["data"], column, layout, steps) for column in layout.columns
        }
        return data_of(layout, arrays)


class _Writer:
    """Appends batches to the arrays of a file."""

    def __init__(self, file: Any, layout: Layout):
        self._file = file
        self._layout = layout
        self._numbers = EpisodeNumbers()
        self._open: dict[int, tuple[int, int]] = {}  # by episode: row and time of its newest step
        self._steps = 0
        file["envkit"] = layout.to_json()
        file.create_group("data")

    def add(self, batch: TensorDictBase) -> None:
        size, axis = tuple(batch.batch_size), batch.batch_dims - 1
        steps = self._numbers.number(batch)
        for piece in steps.pieces:
            self._open.pop(piece.episode, None)
            if not piece.ended:
                self._open[piece.episode] = (piece.row, self._steps + piece.stop - 1)
        own = {"episode": steps.episode, "step": steps.step, "cut": steps.episode.bool() & False}
        for name, values in own.items():
            append(self._file, name, values.numpy().reshape(size), axis)
        arrays = arrays_of(batch, self._layout)
        for column in self._layout.columns:
            if 0 not in column.held_shape:
                held = arrays[column.path].reshape((*size, *column.held_shape))
                append(self._file["data"], "/".join(quoted(column.path)), held, axis)
        self._steps += size[-1]

    def finish(self) -> None:
        """Mark the steps at which the end of the data cut episodes."""
        cut = self._file["cut"]
        for row, time in self._open.values():
            cut[(*np.unravel_index(row, cut.shape[:-1]), time)] = True


def _read(group: Any, column: Column, layout: Layout, steps: int) -> np.ndarray:
    shape = (int(np.prod(layout.rows)), steps, *column.held_shape)
    if 0 in column.held_shape:
        return np.zeros(shape, column.held_dtype)
    held = group["/".join(quoted(column.path))]
    if column.dtype == TEXT:
        held = held.asstr()
    return np.asarray(held[()]).reshape(shape)
