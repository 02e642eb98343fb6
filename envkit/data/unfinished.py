"""Names under which files are written before they are whole, and what killed writers have left under such names.

A writer holds a lock on what it writes, which ends with its process. So what nobody has locked is nobody's, and the
next write of that name removes it. Where the file system knows no locks, or Python has none (Windows), all of it
stays.

Conventions
    temporary  name in the same folder: "." in front, behind it 32 hexadecimal digits and ".partial".
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["claimed", "remove_unfinished"]


@contextmanager
def claimed(path: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Make a temporary of ``path``, and keep its lock while the block runs, also when it has got another name.

    Args:
        path: what it is to become.
        make: makes an empty file or folder of the name that it is given.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        make(temporary)
        lock = _locked(temporary, wait=True)
        if lock is None or temporary.exists():
            break
        os.close(lock)  # another writer took it for left over before it was locked
    try:
        yield temporary
    finally:
        if lock is not None:
            os.close(lock)


def remove_unfinished(path: Path) -> None:
    """Remove temporaries of ``path`` whose writers are gone; what cannot be removed stays, and nothing is said."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{32}}\.partial")
    with suppress(OSError):
        for left in [one for one in path.parent.iterdir() if name.fullmatch(one.name)]:
            lock = _locked(left, wait=False)
            if lock is None:
                continue
            with suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            os.close(lock)


def _locked(path: Path, *, wait: bool) -> int | None:
    """Lock a file or folder for this process; gives the descriptor that holds the lock, or None if there is none."""
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
