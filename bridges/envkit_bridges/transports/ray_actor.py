"""The actor that holds some rows in a Ray cluster: it serves one pool, one request after the other.

What an answer tells is decided in `envkit.transport.answers`, and what of the arrays moves in
`envkit.transport.moving`. Neither meaning nor deadline of a request is known here.

Conventions
    parts   rows of bound arrays, see `moving`. They arrive read-only, and are copied once into the arrays here.
    reply   a message, see `answers` (None where a command went well, which is all there is to tell), and the
            parts that were written.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envkit.errors import WorkerError
from envkit.transport.answers import Answers, build_host, call_host
from envkit.transport.host import Host, RowCursor
from envkit.transport.layout import Layout
from envkit.transport.moving import MovingRows

__all__ = ["RowActor", "Setup"]

Parts = Sequence[np.ndarray]
Reply = tuple[bytes | None, Parts]


@dataclass(frozen=True)
class Setup:
    """First message to an actor: who it is, and what its maker expects of the process."""

    index: int
    rows: range
    commands: dict[int | str, str]
    environ: dict[str, str]
    hide_warnings: bool
    prepare: tuple[bytes, ...]  # called next
    maker: bytes  # unpickled last, since its imports may need all of the above

    def apply(self) -> int:
        """Set up this process, and give its number; what else it finds around it is Ray's to decide."""
        if self.hide_warnings:
            warnings.simplefilter("ignore")
        os.environ.update(self.environ)
        for pickled in self.prepare:
            pickle.loads(pickled)()
        pickle.loads(self.maker)
        return os.getpid()


class RowActor:
    """Serves one pool; `RayPool` calls its methods from afar."""

    _host: Host | None = None
    _moving: MovingRows | None = None

    def arrive(self, setup: Setup) -> Reply:
        """Prepare this process, and import what the maker needs; answers the number of the process."""
        self._setup = setup
        self._answers = Answers(setup.index, setup.rows, setup.commands)
        return self._answers.of("start", lambda: (None, setup.apply()))[1], []

    def start(self) -> Reply:
        """Build the host; answers what it says of itself."""
        self._host, message = self._answers.of(
            "start", lambda: build_host(self._setup.maker, self._setup.rows)
        )
        return message, []

    def bind(self, layout: Layout, parts: Parts) -> Reply:
        """Bind arrays of this process, with all that the pool's hold of these rows; no parts if that is zeros."""
        host, rows = self._require_host(), self._setup.rows

        def work() -> tuple[None, None]:
            arrays = layout.zeros()
            self._moving = MovingRows(layout, arrays, rows)
            if parts:
                self._moving.take_everything(parts)
            host.bind(arrays, rows)
            return None, None

        return self._answers.of("bind", work)[1], []

    def run(self, command: int, rows: list[int] | None, moment: int | None, parts: Parts) -> Reply:
        """Carry out a command on some rows (None: all)."""
        host, moving, message = self._require_host(), self._moving, None
        chosen = RowCursor(self._setup.rows if rows is None else rows)
        if moving is not None:
            moving.take_inputs(command, moment, parts)
        try:
            host.run(command, chosen)
        except BaseException as error:
            message = self._answers.of_rest(host, command, chosen, error)
        return message, [] if moving is None else moving.outputs(command, moment, rows)

    def call(self, method: str, arguments: bytes, moment: int | None, parts: Parts) -> Reply:
        """Call a method of the host."""
        host, moving = self._require_host(), self._moving
        if moving is not None:
            moving.take_inputs(method, moment, parts)
        _, message = self._answers.of(method, lambda: (None, call_host(host, method, arguments)))
        return message, [] if moving is None else moving.outputs(method, moment, None)

    def close(self) -> None:
        """Close the host, if there is one."""
        host, self._host = self._host, None
        if host is not None:
            host.close()

    def _require_host(self) -> Host:
        if self._host is None:
            raise WorkerError(
                "Ray has started this actor anew (backend_options['max_restarts']), and what it held is gone."
            )
        return self._host
