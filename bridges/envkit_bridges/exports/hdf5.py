"""Recorded steps as an HDF5 file with one array for each entry, and HDF5 files that survive a full disk.

The arrays are those of tensordict's ``to_h5``, so its ``from_h5`` opens the files too. They are written with h5py:
``to_h5`` cannot append batches, holds no text for each step, and leaves out an array that HDF5 refuses or that finds
no room, without an error.

Conventions
    data           group with the entries, nested as they are: ``file["data/next/reward"]`` has shape
                   ``(*rows, T, 1)``.
    episode, step  int64, shape ``(*rows, T)``: numbers of the episode and of the step in it; -1 for padding.
    cut            bool of that shape: the last step of an episode that the end of the data cut.
    envkit         text: which entries there are, as JSON.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
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
    EpisodeMarks,
    Layout,
    arrays_of,
    data_of,
    read_batches,
)
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
    h5py = require("h5py")
    with whole_file(path) as raw:
        target = FileForHDF5(raw.fileno(), "r+", closefd=False)
        with h5py.File(target, "w") as file:
            marks = EpisodeMarks()
            for batch, layout in read_batches(data):
                if "envkit" not in file:
                    file["envkit"] = layout.to_json()
                _append_batch(file, batch, layout, marks)
                target.require_written(path)
            cut: Any = file["cut"]
            for row, time in marks.newest.values():
                cut[(*np.unravel_index(row, cut.shape[:-1]), time)] = True
        target.require_written(path)
    return File(path)


def _append_batch(file: Any, batch: TensorDictBase, layout: Layout, marks: EpisodeMarks) -> None:
    """Write the entries of a batch, and the episodes of its steps, behind those of the batches before."""
    steps = marks.number(batch)
    rows, time = layout.rows, batch.batch_size[-1]
    columns: dict[str, np.ndarray] = {
        "episode": steps.episode.numpy(),
        "step": steps.step.numpy(),
        "cut": np.zeros(steps.step.shape, bool),
    }
    arrays = arrays_of(batch, layout)
    for path, held in arrays.items():
        if 0 not in held.shape[2:]:  # HDF5 has no arrays without elements that grow
            columns[_name(path)] = held
    for name, values in columns.items():
        values = values.reshape(*rows, time, *values.shape[2:])
        if name in file:
            file[name].resize(marks.steps, len(rows))
            file[name][(*[slice(None)] * len(rows), slice(-time, None))] = values
        else:
            # Text lies outside of chunks, where HDF5 has no checksums.
            is_text = values.dtype == object
            file.create_dataset(
                name,
                data=values,
                dtype=require("h5py").string_dtype() if is_text else None,
                chunks=True,
                maxshape=(*rows, None, *values.shape[len(rows) + 1 :]),
                fletcher32=not is_text,
            )


def _name(path: Path) -> str:
    return "/".join(("data", *quoted(path)))


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
        size = int(np.prod(layout.rows)), file["episode"].shape[-1]
        arrays = {}
        for column in layout.columns:
            shape = (*size, *column.held_shape)
            if 0 in shape:
                arrays[column.path] = np.zeros(shape, column.held_dtype)
                continue
            held = file[_name(column.path)]
            held = held.asstr() if column.dtype == TEXT else held
            arrays[column.path] = np.asarray(held[()]).reshape(shape)
        return data_of(layout, arrays)


def require_own_data(file: Any, path: str | os.PathLike[str]) -> None:
    """Check that an open HDF5 file names no other file to read data from.

    HDF5 follows such a name to any file that this user may read, so a file of others could show its contents as data.

    Raises:
        ArgumentError: (a ValueError) a link or an array of it names another file.
    """
    h5py = require("h5py")
    groups, visited = [file], set[int]()
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
            if (
                isinstance(held, h5py.Group)
                and (at := h5py.h5o.get_info(held.id).addr) not in visited
            ):
                visited.add(at)
                groups.append(held)


class FileForHDF5(io.FileIO):
    """A file that reports no failure to HDF5, which crashes the process when it closes a file that it could not write.

    The first failure is kept for `require_written`. Later writes are dropped.
    """

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data)
        try:
            while rest and self.failure is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.failure = error
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size) if self.failure is None else 0
        except OSError as error:
            self.failure = error
            return 0

    def require_written(self, path: str | os.PathLike[str]) -> None:
        """Check that no write has failed.

        Args:
            path: for messages.

        Raises:
            WriteError: (an OSError) one has.
        """
        with telling(path):
            if self.failure is not None:
                raise self.failure


def quoted(path: Path) -> Path:
    """Return names of groups for a path: "/", and names of dots alone, are quoted as in URLs."""
    return tuple(
        part.replace("%", "%25").replace("/", "%2F")
        if part.strip(".")
        else part.replace(".", "%2E") or "%"
        for part in path
    )
