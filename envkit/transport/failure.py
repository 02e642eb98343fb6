"""Failures of workers, and how they are reported.

This module decides the wording of worker errors. It does not notice failures itself.

Conventions
    exitcode  of the process: 0 or more as given to ``exit``, negative for the signal that ended it
              (-9 is SIGKILL), None while it runs or where it cannot be known.
"""

import pickle
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from envkit.errors import WorkerError, WorkerTimeoutError
from envkit.transport import by_value
from envkit.transport.host import RowsFailedError

_ADVICE = {
    -signal.SIGKILL: "It was killed from outside, most often for memory: use fewer workers "
    "(num_processes=) or smaller environments.",
    -signal.SIGSEGV: "Native code crashed: run the same environment in this process (SerialEnv) "
    "or alone to find the call.",
    -signal.SIGBUS: "It touched memory that was not there: the machine ran out of memory or disk.",
    -signal.SIGABRT: "Native code gave up (abort); its message is on stderr.",
    -signal.SIGTERM: "Something asked it to stop: a job scheduler, or a tool such as kill.",
    None: "How it ended is unknown, because the fork server that started it is gone too.",
}
_START_ADVICE = (
    "A limit on processes (ulimit -u), open files (ulimit -n) or memory was reached: raise it, or "
    "use fewer workers (num_processes=)."
)
_EXIT_ADVICE = (
    "Code in the environment ended the process (os._exit or a library's fatal error); "
    "it must raise an exception instead."
)


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong in one worker.

    ``rows`` are the rows to blame: the one that raised, or all that a worker held that is gone.
    ``message`` is that of the exception, how long a stuck worker was waited for, or why a dead one
    never started. ``traceback`` is text: of the exception, or the stack of a stuck or crashed worker ("" if
    there is none). ``exception`` is the original one where it survived pickling. ``advice`` says how a worker
    ended and what to do, where who started it knows better; ``ending`` what became of a stuck one.
    """

    worker: int
    rows: tuple[int, ...]
    command: str
    kind: Literal["raised", "died", "timeout", "interrupted"]
    message: str = ""
    error_type: str = ""
    traceback: str = ""
    exitcode: int | None = None
    exception: BaseException | None = None
    advice: str = ""
    ending: str = "was killed"

    def packed(self) -> "tuple[Failure, bytes | None]":
        """Split off the exception, pickled if it can be, so that the rest always arrives."""
        try:
            pickled = by_value.dumps(self.exception)
        except Exception:
            pickled = None
        return replace(self, exception=None), pickled

    def unpacked(self, pickled: bytes | None) -> "Failure":
        """Undo `packed`; an exception that cannot be rebuilt here stays away."""
        try:
            return replace(self, exception=pickle.loads(pickled) if pickled else None)
        except Exception:
            return self

    def headline(self, num_workers: int | None, seeds: Mapping[int, int]) -> str:
        """Return in one or two sentences what happened and what to do about it.

        ``num_workers`` is None where this process itself is the worker.
        """
        who = "this process" if num_workers is None else f"worker {self.worker} of {num_workers}"
        rows = _rows_text(self.rows, seeds)
        if self.kind == "raised":
            return f"{who} raised {self.error_type} in {rows} during {self.command!r}: " + (
                self.message or "(no message)"
            )
        if self.kind == "timeout":
            advice = self.advice or (
                "Raise that limit if the work is this slow; otherwise its stack "
                + ("below says where it hangs." if self.traceback else "could not be had.")
            )
            return (
                f"{who}, which held {rows}, did not answer {self.command!r} {self.message} and "
                f"{self.ending}. {advice}"
            )
        if self.kind == "interrupted":
            return (
                f"{who}, which held {rows}, was ended, because an interrupt (Ctrl-C) came while "
                f"{self.command!r} was sent to it."
            )
        if self.message:
            return (
                f"{who}, which was to hold {rows}, could not be started: {self.message}. "
                + _START_ADVICE
            )
        advice = self.advice or _ADVICE.get(self.exitcode, _EXIT_ADVICE)
        return (
            f"{who}, which held {rows}, {_ending(self.exitcode)} during {self.command!r}. {advice}"
        )


def failure_of(
    error: BaseException, *, worker: int, rows: tuple[int, ...], command: str
) -> Failure:
    """Describe an exception that was raised in a worker; call it where the traceback is."""
    return Failure(
        worker=worker,
        rows=rows,
        command=command,
        kind="raised",
        message=_message_of(error),
        error_type=type(error).__qualname__,
        traceback="".join(traceback.format_exception(error)),
        exception=error,
    )


def failures_of(
    error: BaseException, *, worker: int, rows: tuple[int, ...], command: str
) -> list[Failure]:
    """Describe what a call raised: row by row where that is known, else all ``rows`` are blamed."""
    by_row = {rows: error}
    if isinstance(error, RowsFailedError):
        by_row = {(row,): raised for row, raised in error.errors.items()}
    return [
        failure_of(raised, worker=worker, rows=blamed, command=command)
        for blamed, raised in by_row.items()
    ]


def worker_error(
    failures: Sequence[Failure],
    num_workers: int | None,
    seeds: Mapping[int, int],
    answers: Mapping[int, object] | None = None,
) -> WorkerError:
    """Make one error of all failures of a round; its cause is the first original exception.

    ``num_workers`` is None where this process itself is the worker. ``seeds`` are those the rows
    were last given, ``answers`` what the others gave, by worker.
    """
    timed_out = any(failure.kind == "timeout" for failure in failures)
    error_class = WorkerTimeoutError if timed_out else WorkerError
    stories = [_story(failure, num_workers, seeds) for failure in failures]
    error = error_class("\n\n".join(stories))
    error.failures = tuple(failures)
    error.answers = dict(answers or {})
    error.__cause__ = next((failure.exception for failure in failures if failure.exception), None)
    return error


def _story(failure: Failure, num_workers: int | None, seeds: Mapping[int, int]) -> str:
    headline = failure.headline(num_workers, seeds)
    if not failure.traceback:
        return headline
    title = "Traceback in the worker" if failure.kind == "raised" else "Stack of the worker"
    if num_workers is None:
        title = "Traceback"
    text = "\n".join("    " + line for line in failure.traceback.rstrip().splitlines())
    return f"{headline}\n  {title}:\n{text}"


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # an exception of the user's whose __str__ raises
        return f"(its message cannot be shown: {type(broken).__name__} in __str__)"


def _rows_text(rows: tuple[int, ...], seeds: Mapping[int, int]) -> str:
    seeds_used = [str(seeds[row]) for row in rows if row in seeds]
    if len(rows) == 1:
        return f"row {rows[0]}" + (f" (seed {seeds_used[0]})" if seeds_used else "")
    text = "rows " + ", ".join(map(str, rows))
    if rows and rows == tuple(range(rows[0], rows[-1] + 1)):
        text = f"rows {rows[0]}-{rows[-1]}"
    return text + (f" (seeds {', '.join(seeds_used)})" if seeds_used else "")


def _ending(exitcode: int | None) -> str:
    if exitcode is None:
        return "was lost"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        return f"was ended by signal {-exitcode} ({signal.Signals(-exitcode).name})"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-exitcode}"
