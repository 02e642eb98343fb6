"""Files and folders that are complete or not there: written under another name, flushed, then renamed.

This module knows no format. What fails while a file is written is told as one error that names the file.

Conventions
    temporary  name in the same folder that begins with "." and ends with ".partial".
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from envkit.errors import WriteError

__all__ = ["telling", "whole_file", "whole_folder"]


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file that gets its name when the block ends well; one of that name is replaced then.

    What a symbolic link leads to is replaced, and not the link.

    Raises:
        WriteError: (an OSError) the file cannot be opened, flushed or named, or what is there is no file: a folder,
            a device or a pipe. Nothing has changed then.
    """
    path = Path(path)
    with telling(path):
        path = path.resolve() if path.is_symlink() else path
    temporary = _temporary(path)
    try:
        with telling(path):
            if path.is_dir():
                raise IsADirectoryError("there is a folder of that name")
            if path.exists() and not path.is_file():
                raise FileExistsError("there is a device or a pipe of that name")
            file = open(temporary, "w+b")  # noqa: SIM115 (closed below, and a failure to is no news then)
        try:
            yield file
            with telling(path):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with suppress(OSError):
                file.close()
        with telling(path):
            os.replace(temporary, path)
            _flush_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a folder that gets its name when the block ends well, with the folders above it.

    Raises:
        WriteError: (an OSError) it cannot be made, flushed or named, or there is one of that name. Nothing has
            changed then.
    """
    path = Path(path)
    temporary = _temporary(path)
    above = [folder for folder in path.parents if not folder.exists()]
    try:
        with telling(path):
            if path.exists():
                raise FileExistsError("there is something of that name already")
            temporary.mkdir(parents=True)
        yield temporary
        with telling(path):
            for file in temporary.rglob("*"):
                _flush(file)
            _flush_folder(temporary)
            os.rename(temporary, path)
            _flush_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in above:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


@contextmanager
def telling(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise what fails in the block as an error that names what was being written.

    Raises:
        WriteError: (an OSError) in place of any other OSError, also of one that led to a RuntimeError.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = (
                cause.__context__
            )  # libraries fail once more while they close what could not be written
        if cause is None or isinstance(error, WriteError):
            raise
        reason = cause.strerror or str(cause)
        raise WriteError(
            f"{os.fspath(path)} cannot be written: {reason}. Nothing is left of it, and what was there before is "
            "as it was. Free space, or choose a folder that exists and that you may write to."
        ) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")


def _flush(path: Path) -> None:
    if path.is_dir():
        _flush_folder(path)
        return
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Have new names in a folder reach the disk too, where folders can be flushed."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
