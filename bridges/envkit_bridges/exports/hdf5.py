"""Recorded steps as an HDF5 file with one array for each entry, and HDF5 files that survive a full disk.

The HDF5 library crashes the process when a file that it could not write is closed. In `hdf5_file` it does not learn of
it: from the first failure on, its writes are kept in memory, and the failure is raised once the file is closed.

Conventions
    data           group with the entries, nested as they are: ``file["data/next/reward"]`` has shape
                   ``(*rows, T, 1)``.
    episode, step  int64, shape ``(*rows, T)``: numbers of the episode and of the step in it; -1 for padding.
    cut            bool of that shape: the last step of an episode that the end of the data cut.
    envkit         text: which entries there are, as JSON.
    axis           in which datasets grow as steps come; the others are fixed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path as File
from typing import IO, Any

import numpy as np
from tensordict import TensorDictBase

from envkit.data.episodes import EpisodeNumbers
from envkit.data.files import file_to_read, telling, undamaged, whole_file
from envkit.data.paths import Path
from envkit.errors import ArgumentError
from envkit.specs.annotations import EnvData
from envkit_bridges.exports.columns import TEXT, Column, Layout, arrays_of, data_of, read_batches
from envkit_bridges.libraries import require


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
        WriteError: (an OSError) it cannot be written; an existing file is kept.
        ArgumentTypeError: (a TypeError) ``path`` is no path, or ``data`` no data.
        ArgumentError: (a ValueError) ``path`` is empty, the data has no steps, no time axis, or what a column cannot hold.
        BatchSizeError: (a RuntimeError) batches have unlike rows.
        MissingKeyError: (a KeyError) there is no ``("next", "done")``.
        MissingLibraryError: (an ImportError) h5py is not installed.

    Example:
        >>> from envkit import GymEnv, from_hdf5, to_hdf5
        >>> env = GymEnv("CartPole-v1")
        >>> path = to_hdf5(env.rollout(5), "steps.h5")
        >>> from_hdf5(path).batch_size
        torch.Size([5])
        >>> env.close()
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

    Args:
        path: of the file.

    Returns:
        The data, its batches joined along time: equal to ``torch.cat(batches, -1)`` in keys, shapes, dtypes and
        names of axes; on the CPU.

    Raises:
        MissingFileError: (a FileNotFoundError) there is no such file.
        ArgumentTypeError: (a TypeError) ``path`` is no path.
        ArgumentError: (a ValueError) there is a folder of that name, `to_hdf5` did not write it, it is damaged
            (numbers are compared with checksums), or it names other files to read data from.
        MissingLibraryError: (an ImportError) h5py is not installed.

    Example:
        >>> from envkit import GymEnv, from_hdf5, to_hdf5
        >>> env = GymEnv("CartPole-v1")
        >>> data = env.rollout(5)
        >>> path = to_hdf5(data, "steps.h5")
        >>> bool((from_hdf5(path)["observation"] == data["observation"]).all())
        True
        >>> env.close()
    """
    h5py = require("h5py")
    path = file_to_read(path)
    with undamaged(path, "an HDF5 file of to_hdf5"), h5py.File(path, "r") as file:
        require_own_data(file, path)
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


def require_own_data(file: Any, path: str | os.PathLike[str]) -> None:
    """Check that an open HDF5 file names no other file to read data from.

    HDF5 follows such a name to any file that this user may read, so a file of others could show its contents as data.

    Raises:
        ArgumentError: (a ValueError) a link or an array of it names another file.
    """
    h5py = require("h5py")

    groups, seen = [file], set[int]()
    while groups:
        group = groups.pop()
        for name in group:
            link: Any = group.get(name, getlink=True)
            held: Any = group[name] if isinstance(link, h5py.HardLink) else None
            is_array = isinstance(held, h5py.Dataset)
            if isinstance(link, h5py.ExternalLink) or (
                is_array and (held.external or held.is_virtual)
            ):
                entry = f"{group.name}/{name}".lstrip("/")
                raise ArgumentError(
                    f"{os.fspath(path)} has the entry {entry!r}, which names another file to read data from; expected "
                    "a file that holds all of its data. Do not use it unless you know who wrote it; then read it with "
                    "h5py."
                )
            if isinstance(held, h5py.Group) and (at := h5py.h5o.get_info(held.id).addr) not in seen:
                seen.add(at)
                groups.append(held)


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


class _Sink:
    """What h5py writes to: a file, and memory for what does not fit into it."""

    def __init__(self, file: io.FileIO):
        self._file = file
        self._at = 0
        self._kept: dict[int, bytes] = {}
        self.failure: OSError | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset if whence == os.SEEK_SET else self._file.seek(offset, whence)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> bytes:
        """Read; that there is one tells h5py that this is a file."""
        held = bytearray(size)
        return bytes(held[: self.readinto(held)])

    def readinto(self, buffer: Any) -> int:
        held = memoryview(bytearray(len(buffer)))
        self._file.seek(self._at)
        self._file.readinto(held)
        for start, part in self._kept.items():
            low, high = max(start, self._at), min(start + len(part), self._at + len(held))
            if low < high:
                held[low - self._at : high - self._at] = part[low - start : high - start]
        buffer[:] = held
        self._at += len(held)
        return len(held)

    def write(self, data: Any) -> int:
        data = bytes(data)
        if self.failure is None:
            try:
                self._write(data)
            except OSError as error:
                self.failure = error
        if self.failure is not None:
            self._kept[self._at] = data
        self._at += len(data)
        return len(data)

    def _write(self, data: bytes) -> None:
        self._file.seek(self._at)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def truncate(self, size: int | None = None) -> int:
        size = self._at if size is None else size
        if self.failure is None:
            try:
                self._file.truncate(size)
            except OSError as error:
                self.failure = error
        return size

    def flush(self) -> None:
        """Do nothing: no write is waiting."""


@contextmanager
def hdf5_file(file: IO[bytes], path: str | os.PathLike[str]) -> Iterator[tuple[Any, Any]]:
    """Open an HDF5 file for writing.

    Args:
        file: opened for writing and reading, buffered; nothing was written to it.
        path: for messages.

    Yields:
        The ``h5py.File``, and a function to be called now and then, which raises when the disk is full.

    Raises:
        WriteError: (an OSError) something could not be written.
    """
    sink = _Sink(file.raw)  # type: ignore[attr-defined]

    def check() -> None:
        with telling(path):
            if sink.failure is not None:
                raise sink.failure

    with require("h5py").File(sink, "w") as held:
        yield held, check
    check()


def append(group: Any, name: str, values: np.ndarray, axis: int = 0) -> None:
    """Write arrays behind what a dataset holds, along one axis; the first make the dataset."""
    if name in group:
        held = group[name]
        begin = held.shape[axis]
        held.resize(begin + values.shape[axis], axis)
        held[(slice(None),) * axis + (slice(begin, None),)] = values
        return
    growing = tuple(None if at == axis else size for at, size in enumerate(values.shape))
    dtype = require("h5py").string_dtype() if values.dtype == object else None
    # Text lies outside of chunks, where HDF5 has no checksums.
    group.create_dataset(
        name, data=values, dtype=dtype, chunks=True, maxshape=growing, fletcher32=dtype is None
    )


def quoted(path: Path) -> Path:
    """Return names of groups for a path: "/", and names of dots alone, are quoted as in URLs."""
    return tuple(
        part.replace("%", "%25").replace("/", "%2F")
        if part.strip(".")
        else part.replace(".", "%2E") or "%"
        for part in path
    )
