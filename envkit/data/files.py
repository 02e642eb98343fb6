"""Files and folders that are complete or not there: written under another name, flushed, then renamed.

This module knows no format. A failure while a file is written or read becomes one error that names the file.
`whole_file`, `whole_folder` and `file_to_read` say for all writers and readers which paths they accept.

A writer holds a lock on its file, which ends with its process. So a file without a lock has no writer, and the next
write of that name removes it. Where the file system knows no locks, or Python has none (Windows), such files stay.

Conventions
    temporary  name in the same folder: "." in front, behind it 32 hexadecimal digits and ".partial".
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import stat
import struct
import sys
import uuid
import zipfile
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from envkit.data.arguments import as_file
from envkit.errors import ArgumentError, EnvkitError, MissingFileError, WriteError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Generator[IO[bytes]]:
    """Open a file that gets its name when the block ends well; one of that name is replaced then.

    The target of a symbolic link is replaced, and not the link. Leftovers of a killed writer of that name in the
    folder are removed.

    Raises:
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) ``path`` is no path.
        WriteError: (an OSError) the file cannot be opened, flushed or named, or there is a folder, a device or a
            pipe of that name; no file has changed then.
    """
    path = as_file("path", path)
    with telling(path):
        path = path.resolve() if path.is_symlink() else path
        require_place(path)
    with _whole(path, Path.touch) as temporary:
        with telling(path):
            file = open(temporary, "w+b")  # noqa: SIM115 (closed below, and a failure to is no news then)
        try:
            yield file
            with telling(path):
                file.flush()
        finally:
            with suppress(OSError):
                file.close()


@contextmanager
def whole_folder(path: str | os.PathLike[str]) -> Generator[Path]:
    """Make a folder that gets its name when the block ends well, with the folders above it.

    Leftovers of a killed writer of that name beside it are removed.

    Raises:
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) ``path`` is no path.
        WriteError: (an OSError) it cannot be made, flushed or named, or there is one of that name. No file has
            changed then.
    """
    path = as_file("path", path)
    with telling(path):
        if path.exists():
            raise FileExistsError("there is something of that name already")
    above = [folder for folder in path.parents if not folder.exists()]
    try:
        with telling(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with _whole(path, Path.mkdir) as temporary:
            yield temporary
    except BaseException:
        for folder in above:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


@contextmanager
def _whole(path: Path, make: Callable[[Path], None]) -> Generator[Path]:
    """Yield a temporary of ``path``, which gets that name when the block ends well, and else is removed.

    Args:
        path: of the file or folder that is written.
        make: makes an empty file or folder of the name that it is called with.

    Raises:
        WriteError: (an OSError) it cannot be made, flushed or named.
    """
    _remove_unfinished(path)
    lock = None
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        with telling(path):
            make(temporary)
        lock = _locked(temporary, wait=True)
        if lock is None or temporary.exists():
            break
        os.close(lock)  # another writer removed it as a leftover before it was locked
    try:
        yield temporary
        with telling(path):
            for part in (*temporary.rglob("*"), temporary):
                _flush(part)
            os.replace(temporary, path)
            _flush(path.parent)
    except BaseException:
        _remove(temporary)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _remove_unfinished(path: Path) -> None:
    """Remove temporaries of ``path`` whose writers are gone; those that cannot be removed stay."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{32}}\.partial")
    with suppress(OSError):
        for left in [one for one in path.parent.iterdir() if name.fullmatch(one.name)]:
            lock = _locked(left, wait=False)
            if lock is not None:
                _remove(left)
                os.close(lock)


def _remove(path: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _locked(path: Path, *, wait: bool) -> int | None:
    """Lock a file or folder for this process; return the descriptor that holds the lock, or None if there is none."""
    if fcntl is None:
        return None
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # it is locked, gone, or of a file system without locks
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _flush(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk, where folders can be flushed."""
    if path.is_dir() and sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_place(path: Path) -> None:
    """Check that a file of this name could be written, or replaced: before work is done whose result is to go there.

    Raises:
        WriteError: (an OSError) the folder is not there or not to be written to, or what is there is no file: a
            folder, a device or a pipe.
    """
    with telling(path):
        if path.is_dir():
            raise IsADirectoryError("there is a folder of that name")
        if path.exists() and not path.is_file():
            raise FileExistsError("there is a device or a pipe of that name")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent}")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"the folder {path.parent} is read-only")


def file_to_read(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file that is to be read.

    Raises:
        MissingFileError: (a FileNotFoundError) there is none of that name.
        ArgumentTypeError, ArgumentError: (a TypeError, a ValueError) ``path`` is no path, or what is there is no
            file, or none that this user may read.
    """
    path = as_file("path", path)
    try:
        kind = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFileError(
            f"there is no file {path} (the current folder is {Path.cwd()}). Pass the path of one."
        ) from error
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}. Pass a file.") from error
    if not stat.S_ISREG(kind):
        what = "a folder" if stat.S_ISDIR(kind) else "a device or a pipe"
        raise ArgumentError(f"{path} is {what}, but must be a file. Pass the path of one.")
    if not os.access(path, os.R_OK):
        raise ArgumentError(f"{path} cannot be read: Permission denied. Pass a file you may read.")
    return path


@contextmanager
def telling(path: str | os.PathLike[str]) -> Generator[None]:
    """Raise what fails in the block as an error that names what was being written.

    Raises:
        WriteError: (an OSError) in place of any other OSError, also of one that led to a RuntimeError.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            # libraries fail once more while they close what could not be written
            cause = cause.__context__
        if cause is None or isinstance(error, WriteError):
            raise
        reason = cause.strerror or str(cause)
        raise WriteError(
            f"{os.fspath(path)} cannot be written: {reason}. The part that was written is removed, and an existing file is "
            "as it was. Free space, or choose a folder that exists and that you may write to."
        ) from error


@contextmanager
def undamaged(
    path: str | os.PathLike[str], kind: str, error: type[EnvkitError] = ArgumentError
) -> Generator[None]:
    """Raise what fails while a file is read as an error that says that the file is damaged.

    Args:
        path: of the file, or of the folder of a dataset.
        kind: of file that was expected, with its article.
        error: to raise in place of what a library raises of bytes that it cannot read.
    """
    try:
        yield
    except EnvkitError:
        raise
    except _UNREADABLE as cause:
        reason = (str(cause).strip() or "no reason is given").splitlines()[0]
        raise error(
            f"{os.fspath(path)} is damaged, or is not {kind}: {type(cause).__name__} was raised ({reason}). Read it "
            "with the program that wrote it, or take a copy of the file."
        ) from cause


_UNREADABLE = (
    *(AssertionError, AttributeError, EOFError, LookupError, NotImplementedError, OSError),
    *(OverflowError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
"""Exceptions that libraries raise for damaged files."""
