"""Workers that are asked one by one: each has a job, or is free for the next one.

`JobPool` is what an asynchronous pool of envs needs beside rounds: a job is begun, and is done when its worker
has answered, died, or let its deadline pass. This module does not know what a job means.

Conventions
    job   one command or call for one worker. A worker has at most one; who begins another before that is
          done has made a mistake.
    done  answered or failed. `outcome` tells which, once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envkit.errors import BusyEnvError
from envkit.transport import wake
from envkit.transport.handle import Request, WorkerHandle, pickle_arguments
from envkit.transport.pool import Pool, Selection, mask_of
from envkit.transport.processes import CONTROL_CODE, TO_ALL, TO_CHOSEN, ProcessPool
from envkit.transport.resources import Resources

__all__ = ["Job", "JobPool", "ProcessJobPool"]


@dataclass(frozen=True, eq=False)
class Job:
    """Something that one worker does, while others do other things."""

    worker: int
    request: Request


class JobPool(Pool, Protocol):
    """A pool whose workers can also be asked one by one."""

    def begin(self, worker: int, command: int, rows: list[int] | None = None) -> Job:
        """Have a worker that is free carry out a command on some of its rows; None: all."""
        ...

    def begin_call(self, worker: int, method: str, *args: Any, **kwargs: Any) -> Job:
        """Call a method of the host of a worker that is free."""
        ...

    @property
    def requests(self) -> int:
        """How many requests there were so far."""
        ...

    def begun_since(self, worker: int, requests: int) -> Job | None:
        """Give the job that a worker was given since there were so many requests; None where there is none.

        After Ctrl-C in `begin` nobody else knows of it.
        """
        ...

    def wait(self, jobs: Sequence[Job], count: int, timeout_s: float | None) -> list[Job]:
        """Wait until ``count`` of some jobs are done, and give all that are.

        After ``timeout_s`` seconds (None: no limit) it gives those that are done by then.
        """
        ...

    def outcome(self, job: Job) -> Any:
        """Give what a job that is done has returned; None for a command.

        Raises:
            WorkerError: it failed.
        """
        ...


class ProcessJobPool(ProcessPool):
    """Worker processes that can also be asked one by one; see `JobPool` and `ProcessPool`.

    Rounds wait for all workers, so none may be begun while jobs are under way.
    """

    def _make_room(self, resources: Resources, rows: Selection) -> None:
        """Check that the workers of a round are free, and finish the last one."""
        mask = None if rows is None else mask_of(rows, len(self._selected))
        asked = [h for h in resources.handles if mask is None or mask[list(h.rows)].any()]
        self._require_free(resources, asked)
        super()._make_room(resources, rows)

    def _exchange(
        self, name: str, handles: Sequence[WorkerHandle], *args: Any, **kwargs: Any
    ) -> list[Any]:
        self._require_free(self._require_open(), handles)
        return super()._exchange(name, handles, *args, **kwargs)

    def _require_free(self, resources: Resources, handles: Sequence[WorkerHandle]) -> None:
        """Check that workers have no job.

        Raises:
            BusyEnvError: some have one.
        """
        if not (busy := self._busy(resources, handles)):
            return
        self._attend(resources, 0.0)  # one that nobody waited for, after Ctrl-C, may be done
        if busy := self._busy(resources, handles):
            raise BusyEnvError(f"workers {busy} are still processing a job. Receive it first.")

    def _busy(self, resources: Resources, handles: Sequence[WorkerHandle]) -> list[int]:
        pending = resources.pending
        jobs = [h for h in handles if h.reply in pending and h.request is not self._round]
        return [handle.index for handle in jobs]

    def begin(self, worker: int, command: int, rows: list[int] | None = None) -> Job:
        resources, handle, job = self._job(worker, self._commands.get(command) or str(command))
        if not job.request.failures:
            code = TO_ALL[command]
            if rows is not None:
                own = slice(handle.rows.start, handle.rows.stop)
                self._selected[own] = mask_of(rows, len(self._selected))[own]
                code = TO_CHOSEN[command]
            self._hand(resources, handle, job, code)
        return job

    def begin_call(self, worker: int, method: str, *args: Any, **kwargs: Any) -> Job:
        pickled = pickle_arguments(method, (args, kwargs))
        resources, handle, job = self._job(worker, self._commands.get(method, method))
        if not job.request.failures:
            handle.post_call(method, pickled)
            self._posting = True
            self._hand(resources, handle, job, CONTROL_CODE)
            self._push(resources, handle)
        return job

    @property
    def requests(self) -> int:
        return self._requests

    def begun_since(self, worker: int, requests: int) -> Job | None:
        request = self._require_open().handles[worker].request
        is_new = request.number > requests and request is not self._round
        return Job(worker, request) if is_new else None

    def _job(self, worker: int, name: str) -> tuple[Resources, WorkerHandle, Job]:
        """Make a job, which has failed already if its worker is lost."""
        resources = self._require_open()
        handle = resources.handles[worker]
        self._require_free(resources, [handle])
        if handle.reply in resources.pending:  # of a round that was never received
            self._finish_abandoned(resources)
        job = Job(worker, self._request(name))
        if handle.lost is not None:
            job.request.failures[0, worker] = [handle.lost]
        return resources, handle, job

    def _hand(self, resources: Resources, handle: WorkerHandle, job: Job, code: Any) -> None:
        write, waker = wake.write, handle.waker
        handle.request = job.request
        resources.pending[handle.reply] = handle
        try:  # with no call since it is pending: Ctrl-C in between would leave it asleep
            write(waker, code)
        except BrokenPipeError:
            return  # `wait` finds out how it ended

    def wait(self, jobs: Sequence[Job], count: int, timeout_s: float | None) -> list[Job]:
        resources = self._require_open()
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._attend(resources, 0.0)
        while True:
            done = [job for job in jobs if self._is_done(resources, job)]
            if len(done) >= count or time.monotonic() >= until:
                return done
            deadlines = [handle.request.deadline for handle in resources.pending.values()]
            self._attend(resources, min([until, *deadlines]))

    def _is_done(self, resources: Resources, job: Job) -> bool:
        handle = resources.handles[job.worker]
        return handle.request is not job.request or handle.reply not in resources.pending

    def _finish_round(self, resources: Resources) -> None:
        """Wait for the workers that this round has asked; others may have jobs."""
        pending, begun = resources.pending, self._round
        while pending:
            for handle in pending.values():
                if handle.request is begun:
                    break
            else:
                return
            self._attend(resources, begun.deadline)

    def outcome(self, job: Job) -> Any:
        request = job.request
        if request.failures:
            raise self._error(request.failures, request.answers)
        return request.answers.get(job.worker)
