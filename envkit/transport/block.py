"""One piece of memory that several processes map.

This module decides where shared memory comes from and when it goes away. It does not know what
lies in it, nor how its descriptor reaches another process.

Conventions
    A block has no name: a memfd, or an unlinked temporary file where memfd is missing. The kernel
    frees it with the last descriptor and mapping, so a crash leaves nothing behind.
    All of it is reserved at creation: too little memory is an error there, not a SIGBUS later.
"""

import errno
import mmap
import os
import tempfile

import numpy as np

from envkit.errors import SharedMemoryError
from envkit.transport.layout import Layout

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
"""Numbers of errors (errno) that refuse a descriptor."""
_ZEROS = bytes(1 << 20)


class Block:
    """Shared memory that holds the arrays of one layout, zero at first.

    The arrays of every process that maps the block are views of the same bytes. The process that creates
    a block (`create`) passes ``block.fd`` on; the receiver maps it (`attach`) with the same layout.
    """

    def __init__(self, fd: int, layout: Layout) -> None:
        self.fd = fd
        self.layout = layout
        self.arrays: dict[str, np.ndarray] = layout.arrays(mmap.mmap(fd, layout.size_bytes))

    @classmethod
    def create(cls, layout: Layout, directory: str | None = None) -> "Block":
        """Reserve a block for ``layout``.

        Args:
            layout: the arrays it holds.
            directory: where to keep it in a file (without a name) instead of in memory.

        Raises:
            SharedMemoryError: the machine cannot give that much memory.
        """
        return cls.create_in(_open_anonymous_file(directory), layout, in_memory=directory is None)

    @classmethod
    def create_in(cls, fd: int, layout: Layout, *, in_memory: bool = False) -> "Block":
        """Reserve a block for ``layout`` in an open, empty file, which this object owns from here on.

        Args:
            fd: the file, open for reading and writing; closed if this fails.
            layout: the arrays it holds.
            in_memory: whether the file takes up memory rather than disk.

        Raises:
            SharedMemoryError: the machine cannot give that much memory, or the disk that much room.
        """
        try:
            _reserve(fd, layout.size_bytes, in_memory=in_memory)
            return cls(fd, layout)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            if getattr(error, "errno", None) in TOO_MANY_FILES:
                raise
            raise SharedMemoryError(_too_little(layout, error)) from error

    @classmethod
    def attach(cls, fd: int, layout: Layout) -> "Block":
        """Map a block that another process created; this object owns ``fd`` from here on."""
        return cls(fd, layout)

    def close(self) -> None:
        """Release the memory; what is still viewed lives until its last view is gone."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        # The mapping ends with its last array. Closing it by hand would crash a thread that still reads
        # one: NumPy does not lock a buffer it was given.
        self.arrays = {}


def _open_anonymous_file(directory: str | None) -> int:
    if directory is None and hasattr(os, "memfd_create"):
        return os.memfd_create("envkit")
    if directory is None and os.path.isdir("/dev/shm"):
        directory = "/dev/shm"
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.dup(file.fileno())


def _reserve(fd: int, size_bytes: int, *, in_memory: bool) -> None:
    # Asking the kernel for more than the machine has could wake its out-of-memory killer.
    if in_memory and size_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise OSError("more than the memory of this machine")
    os.ftruncate(fd, size_bytes)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size_bytes)
        return
    end = 0
    while end < size_bytes:  # what was written once has its place
        end += os.pwrite(fd, _ZEROS[: size_bytes - end], end)


def _too_little(layout: Layout, error: Exception) -> str:
    largest = max(layout.fields, key=lambda field: field.size_bytes(1))
    return (
        f"cannot reserve {layout.size_bytes / 2**20:,.1f} MiB of shared memory for "
        f"{layout.rows} rows of {len(layout.fields)} fields ({error}). The largest field is "
        f"{largest.name!r}, {largest.size_bytes(1):,} bytes a row. Use fewer "
        "environments or smaller observations, or give the machine (container: its memory limit, "
        "--shm-size where /dev/shm is used) more memory."
    )
