"""Tensors that several processes hold at once.

A process that unpickles a `SharedState` maps the memory of the process that made it; no value is copied.
On Linux that memory has no name: it is reached through the maker's open descriptor, and a crash leaves
nothing behind. Elsewhere it is a file that the maker removes at its end.

Conventions
    maker  the process that built the object; pickles of it are of use while that process lives.
    token  random bytes in the memory, by which a process that opens it checks that it is the right one. On another
           machine, or once the maker is gone, its path may lead to anything.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envkit.errors import SharedMemoryError
from envkit.transport import Block, Field, Layout

_OPEN_FILES = "/proc/{pid}/fd/{fd}"
_TOKEN = Field("token of the shared state", (16,), "uint8")


class OwnState:
    """Named tensors that a pickle copies.

    Args:
        tensors: what to begin with; copied.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}


class SharedState:
    """Named tensors in memory that every process which unpickles this object maps.

    ``tensors`` holds them by name, on the CPU. While ``lock`` is held, no other process holds it.

    Args:
        tensors: what to begin with; copied. Dtypes that NumPy knows, or bfloat16.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        fields = (_field(name, tensor) for name, tensor in tensors.items())
        layout = Layout((_TOKEN, *fields), 1)
        if os.path.exists(_OPEN_FILES.format(pid="self", fd=0)):
            block = Block.create(layout)
            path = _OPEN_FILES.format(pid=os.getpid(), fd=block.fd)
        else:
            block, path = _named_block(layout)
            weakref.finalize(self, _remove, path, os.getpid())
        token = os.urandom(*_TOKEN.shape)
        block.arrays[_TOKEN.name][0] = np.frombuffer(token, np.uint8)
        self._map(block, path, {name: tensor.dtype for name, tensor in tensors.items()}, token)
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor.detach())

    def _map(self, block: Block, path: str, dtypes: dict[str, torch.dtype], token: bytes) -> None:
        self._attachment = path, block.layout, dtypes, token
        self.lock = FileLock(path)
        self.tensors = {
            name: torch.from_numpy(block.arrays[name][0, ...]).view(dtype)
            for name, dtype in dtypes.items()
        }
        weakref.finalize(self, block.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, self._attachment


class FileLock:
    """Excludes threads and processes from each other, with an open file as the token; reentrant.

    The kernel gives up the lock of a process that dies.
    """

    def __init__(self, path: str):
        self._path = path
        self._fd = _open(path)
        self._threads = threading.RLock()
        self._depth = 0
        weakref.finalize(self, os.close, self._fd)

    def __enter__(self) -> FileLock:
        self._threads.acquire()
        if self._depth == 0:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._threads.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return FileLock, (self._path,)


def _attached(
    path: str, layout: Layout, dtypes: dict[str, torch.dtype], token: bytes
) -> SharedState:
    fd = _open(path)
    try:
        block = Block.attach(fd, layout)
    except (OSError, ValueError) as error:
        os.close(fd)
        raise _not_there(path, str(error)) from error
    if block.arrays[_TOKEN.name].tobytes() != token:
        block.close()
        raise _not_there(path, "something else lies there")
    state = object.__new__(SharedState)
    state._map(block, path, dtypes, token)
    return state


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _not_there(path, str(error)) from error


def _not_there(path: str, why: str) -> SharedMemoryError:
    return SharedMemoryError(
        f"the shared state of an EnvCreator cannot be opened at {path} ({why}). The process "
        "that made the creator must still run, on this machine and as the same user. Make the "
        "creator again, or pass share_memory=False."
    )


def _named_block(layout: Layout) -> tuple[Block, str]:
    fd, path = tempfile.mkstemp(prefix="envkit-")
    try:
        return Block.create_in(fd, layout), path
    except SharedMemoryError:
        os.unlink(path)
        raise


def _remove(path: str, maker_pid: int) -> None:
    if os.getpid() == maker_pid:  # a fork of the maker runs this as well
        with suppress(FileNotFoundError):
            os.unlink(path)


def _field(name: str, tensor: Tensor) -> Field:
    dtype = torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype
    return Field(
        name, tuple(tensor.shape), torch.empty(0, dtype=dtype, device="cpu").numpy().dtype.str
    )
