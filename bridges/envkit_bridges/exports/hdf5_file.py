"""HDF5 files that are written while a disk may fill up.

The HDF5 library crashes the process when a file that it could not write is closed. Here it never learns of it:
from the first failure on, what it writes is kept in memory, and the failure is told once the file is closed.

Conventions
    axis  in which datasets grow as steps come; the others are fixed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from envkit.data.files import telling
from envkit.data.paths import Path
from envkit_bridges.libraries import require

__all__ = ["append", "hdf5_file", "quoted"]


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
        """Nothing waits."""

    def raise_failure(self) -> None:
        """Tell what went wrong, if something did."""
        if self.failure is not None:
            raise self.failure


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
            sink.raise_failure()

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
    """Give names of groups for a path: "/", and names of dots alone, are quoted as in URLs."""
    return tuple(
        part.replace("%", "%25").replace("/", "%2F")
        if part.strip(".")
        else part.replace(".", "%2E") or "%"
        for part in path
    )
