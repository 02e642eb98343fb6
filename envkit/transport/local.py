"""A pool whose only worker is this process.

This module knows the `Host` protocol and no processes. Its errors are those of `ProcessPool`, so
that the layer above treats both alike; the original exception is their cause.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envkit.errors import ClosedEnvError
from envkit.transport.failure import Failure, failure_of, failures_of, worker_error
from envkit.transport.host import Host, MakeHost, RowCursor, RowsFailedError, run_rest
from envkit.transport.layout import Layout
from envkit.transport.pool import Selection, mask_of

__all__ = ["LocalPool"]


class LocalPool:
    """One host in this process, driven like a pool of processes.

    Args:
        make_host: builds the host for ``range(num_rows)``.
        num_rows: number of rows.
        commands: names of commands, and of methods that are to be called otherwise, for messages.
    """

    def __init__(
        self, make_host: MakeHost, num_rows: int, *, commands: Mapping[int | str, str] | None = None
    ) -> None:
        self.rows_of = (range(num_rows),)
        self.closed = False
        self.seeds: dict[int, int] = {}
        self.timeout_s: float | None = None  # nobody is there to notice
        self.start_timeout_s: float | None = None
        self._make_host = make_host
        self._commands = dict(commands or {})
        self._rows = RowCursor(range(num_rows))
        self._host: Host | None = None
        self._arrays: dict[str, np.ndarray] | None = None
        self._failures: list[Failure] = []

    @property
    def pids(self) -> list[int]:
        """This process, while open."""
        return [] if self._host is None else [os.getpid()]

    def start(self) -> list[object]:
        """Build the host and return what it says of itself."""
        if self.closed:
            raise ClosedEnvError("this pool is closed; make a new one.")
        try:
            self._host = self._make_host(self.rows_of[0])
            return [self._host.describe()]
        except Exception as error:
            raised = self._error(error, "start")
            self.close()
            raise raised from raised.__cause__

    def bind(self, layout: Layout) -> dict[str, np.ndarray]:
        """Allocate ordinary memory for ``layout`` and give it to the host."""
        arrays = layout.zeros()
        host = self._require_host()
        try:
            host.bind(dict(arrays), self.rows_of[0])
        except Exception as error:
            raised = self._error(error, "bind")
            raise raised from raised.__cause__
        self._arrays = arrays
        return arrays

    def restart_worker(self, index: int) -> object:
        """Build the host anew, bound to the same memory."""
        self._require_host().close()
        host = self._host = self._make_host(self.rows_of[index])
        if self._arrays is not None:
            host.bind(dict(self._arrays), self.rows_of[index])
        return host.describe()

    def send(self, command: int, rows: Selection = None) -> None:
        """Run ``command`` for ``rows`` right away; `recv` tells what raised."""
        host = self._host or self._require_host()
        chosen = self._rows
        if rows is not None:
            chosen = RowCursor(np.flatnonzero(mask_of(rows, len(self._rows))).tolist())
        self._failures = []
        if not chosen:
            return
        try:
            host.run(command, chosen)
        except Exception as error:
            name = self._commands.get(command, str(command))
            self._failures = [
                failure_of(raised, worker=0, rows=blamed, command=name)
                for blamed, raised in run_rest(host, command, chosen, error, catch=Exception)
            ]

    def recv(self) -> None:
        """Raise what the last `send` met."""
        failures, self._failures = self._failures, []
        if failures:
            raise worker_error(failures, None, self.seeds)

    def call(
        self, method: str, *args: Any, workers: Sequence[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``method`` of the host."""
        count = 1 if workers is None else len(workers)
        return self.call_each(method, [(args, kwargs)] * count, workers)

    def call_each(
        self,
        method: str,
        arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        workers: Sequence[int] | None = None,
    ) -> list[Any]:
        """Call ``method`` of the host with each of ``arguments`` (one, if any)."""
        host = self._require_host()
        try:
            return [host.call(method, *args, **kwargs) for args, kwargs in arguments]
        except Exception as error:
            answers = {0: error.result} if isinstance(error, RowsFailedError) else None
            raised = self._error(error, self._commands.get(method, method), answers)
            raise raised from raised.__cause__

    def close(self) -> None:
        """Close the host; closing twice does nothing."""
        host, self._host, self._arrays, self.closed = self._host, None, None, True
        if host is not None:
            host.close()

    def _require_host(self) -> Host:
        if self._host is None:
            raise ClosedEnvError("this pool is closed or was never started; start a new one.")
        return self._host

    def _error(
        self, error: Exception, command: str, answers: Mapping[int, object] | None = None
    ) -> Exception:
        failures = failures_of(error, worker=0, rows=tuple(self._rows), command=command)
        return worker_error(failures, None, self.seeds, answers)
