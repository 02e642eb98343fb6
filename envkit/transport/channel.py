"""Whole messages, and descriptors, over one stream socket.

This module decides how a message is framed. It carries bytes and does not pickle.

Conventions
    message  8 bytes of length (little-endian), then that many bytes. A descriptor that belongs to
             it goes before, with its own byte.
    `send` and `recv` wait. `post` and `push` send without waiting, so that one slow reader does not
    keep others waiting.
    Ctrl-C loses nothing: `push` and `recv` go on where they stopped, be it for a timeout or for an
    exception. Python may raise behind a call in C, before its result is kept, but not within; so
    what moves bytes also keeps, or counts, them: ``extend(map(...))``.
"""

import array
import socket
import struct
import time

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20


class Channel:
    """One end of a connection between two processes on this machine; owns its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received: list[bytes] = []
        self._request: object = None  # what the received bytes answer
        self._frame = b""
        self._sent: list[int] = []
        self._fd: int | None = None
        self._fd_sent: list[int] = []

    @classmethod
    def pair(cls) -> "tuple[Channel, socket.socket]":
        """Make a channel and the socket that is to become its other end."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(here), there

    def send(self, message: bytes) -> None:
        """Send one message, blocking while the other end is slow to read.

        Raises:
            OSError: it was not, or not wholly, sent; the channel is then unusable.
        """
        self._socket.settimeout(None)
        self._socket.sendall(_LENGTH.pack(len(message)))
        self._socket.sendall(message)

    def post(self, message: bytes, fd: int | None = None) -> None:
        """Make ``message``, and a duplicate of ``fd``, what `push` sends; what was before is gone."""
        self._sent, self._fd_sent = [], []
        self._frame, self._fd = _LENGTH.pack(len(message)) + message, fd

    def push(self) -> bool:
        """Send of what was posted as much as goes without waiting; say whether all has gone.

        Raises:
            OSError: the other end is closed.
        """
        frame = memoryview(self._frame)
        if sum(self._sent) == len(frame):
            return True
        self._socket.settimeout(0.0)
        try:
            if self._fd is not None and not self._fd_sent:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._fd]))
                self._fd_sent.extend(map(self._socket.sendmsg, ([b"\0"],), ([rights],)))
            while (done := sum(self._sent)) < len(frame):
                self._sent.extend(map(self._socket.send, (frame[done:],)))
        except BlockingIOError:
            return False
        return True

    def recv(self, *, request: object = None, timeout_s: float | None = None) -> memoryview:
        """Receive one message.

        Args:
            request: what the message answers. Asked again with the same, this goes on where it
                stopped, and gives a message that has come already once more. None: the next one.
            timeout_s: seconds to wait; None for no limit.

        Raises:
            EOFError: the other end is closed.
            TimeoutError: no whole message came within ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if request is None or request != self._request:
            self._received.clear()
            self._request = request
        self._fill(_LENGTH.size, deadline)
        length = b"".join(self._received[: _LENGTH.size])  # no chunk is empty
        self._fill(_LENGTH.size + _LENGTH.unpack_from(length)[0], deadline)
        return memoryview(b"".join(self._received))[_LENGTH.size :]

    def forget(self) -> None:
        """Free the memory of the last message, which will not be asked for again."""
        self._received.clear()

    def recv_fd(self) -> int:
        """Receive a descriptor, which the caller owns.

        Raises:
            EOFError: the other end is closed.
        """
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not fds:
            raise EOFError("the connection ended where a descriptor was expected")
        return fds[0]

    def drain(self, *, quiet_s: float, limit_s: float) -> bytes:
        """Take raw bytes, outside any framing, until none come for ``quiet_s``."""
        raw, end = b"".join(self._received), time.monotonic() + limit_s
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

    def end(self) -> None:
        """Send nothing more: the other end finds the end of the channel after what is on its way.

        Raises:
            OSError: the other end is closed.
        """
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket; closing twice does nothing."""
        self._socket.close()

    def _fill(self, size: int, deadline: float | None) -> None:
        while (missing := size - sum(map(len, self._received))) > 0:
            if self._received and not self._received[-1]:
                raise EOFError("the other end of the connection is closed")
            left = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
            self._socket.settimeout(left)
            try:
                self._received.extend(map(self._socket.recv, (min(missing, _CHUNK_BYTES),)))
            except ConnectionResetError as error:
                raise EOFError("the other end of the connection was reset") from error
