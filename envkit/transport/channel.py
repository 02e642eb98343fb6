"""Whole messages, and descriptors, over one stream socket.

This module decides how a message is framed. It carries bytes and does not pickle.

Conventions
    message  8 bytes of length (little-endian), then that many bytes.
    A message that was only half received when a timeout or Ctrl-C came is kept: the next `recv`
    goes on where that one stopped.
"""

import socket
import struct
import time

__all__ = ["Channel"]

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20


class Channel:
    """One end of a connection between two processes on this machine; owns its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()

    @classmethod
    def pair(cls) -> "tuple[Channel, socket.socket]":
        """Make a channel and the socket that is to become its other end."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(here), there

    def send(self, message: bytes, *, timeout_s: float | None = None) -> None:
        """Send one message, blocking while the other end is slow to read.

        Raises:
            TimeoutError, OSError: it was not, or not wholly, sent; the channel is then unusable.
        """
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_LENGTH.pack(len(message)))
        self._socket.sendall(message)

    def recv(self, *, timeout_s: float | None = None) -> bytes:
        """Receive one message.

        Raises:
            EOFError: the other end is closed.
            TimeoutError: no whole message came within ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._fill(_LENGTH.size, deadline)
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        self._fill(end, deadline)
        message = bytes(memoryview(self._received)[_LENGTH.size : end])
        self._received.clear()
        return message

    def send_fd(self, fd: int) -> None:
        """Send a duplicate of ``fd``; the other end takes it with `recv_fd`."""
        socket.send_fds(self._socket, [b"\0"], [fd])

    def recv_fd(self) -> int:
        """Receive a descriptor, which the caller owns."""
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise EOFError("the connection ended where a descriptor was expected")
        return fds[0]

    def drain(self, *, quiet_s: float, limit_s: float) -> bytes:
        """Take raw bytes, outside any framing, until none come for ``quiet_s``."""
        raw, end = bytes(self._received), time.monotonic() + limit_s
        self._received.clear()
        while (left := end - time.monotonic()) > 0:
            self._socket.settimeout(min(limit_s if not raw else quiet_s, left))
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except OSError:  # silence, or the other end was reset
                break
            if not chunk:
                break
            raw += chunk
        return raw

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket; closing twice does nothing."""
        self._socket.close()

    def _fill(self, size: int, deadline: float | None) -> None:
        while (missing := size - len(self._received)) > 0:
            left = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
            self._socket.settimeout(left)
            try:
                chunk = self._socket.recv(min(missing, _CHUNK_BYTES))
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise EOFError("the other end of the connection is closed")
            self._received += chunk
