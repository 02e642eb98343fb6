"""How a worker tells what came of a request: one pickled message with a result and with what failed.

Every request has an answer, also construction and also failure, so that the parent never has to guess. This
module knows hosts and messages, but not the way that messages go: a socket to a process, Ray's store to an actor.
The name of the request does not travel: `read_answer` puts it into the failures.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from envkit.errors import WorkerError
from envkit.transport import by_value
from envkit.transport.failure import Failure, failure_of, failures_of
from envkit.transport.host import Host, RowCursor, RowsFailedError, run_rest


class Answers:
    """Makes the answers of one worker.

    Args:
        worker: its number.
        rows: what its host holds; they are blamed where no single row is.
    """

    def __init__(self, worker: int, rows: range) -> None:
        self._worker, self._rows = worker, tuple(rows)

    def of(self, work: Callable[[], tuple[Any, object]]) -> tuple[Any, bytes]:
        """Call ``work`` and return what is to be kept of it, and the message with its result or what it raised."""
        kept, result, failures = None, None, []
        try:
            kept, result = work()
        except BaseException as error:
            result = error.result if isinstance(error, RowsFailedError) else None
            failures = self._packed(error, self._rows)
        try:
            return kept, _dumps((result, failures))
        except WorkerError as error:
            result, stuck = _without_stuck(result, error)
            return None, _dumps((result, [*failures, *self._packed(stuck, self._rows)]))

    def of_rest(self, host: Host, command: int, rows: RowCursor, error: BaseException) -> bytes:
        """Run a command on the rows behind the one that raised, and return the message with all failures."""
        rest = run_rest(host, command, rows, error, catch=BaseException)
        return _dumps(
            (None, [one for blamed, raised in rest for one in self._packed(raised, blamed)])
        )

    def _packed(self, error: BaseException, rows: tuple[int, ...]) -> list[Any]:
        failures = failures_of(error, worker=self._worker, rows=rows, command="")
        return [failure.packed() for failure in failures]


def build_host(maker: bytes, rows: range) -> tuple[Host, object]:
    """Build the host of some rows, and return it and how it describes itself."""
    host: Host = pickle.loads(maker)(rows)
    try:
        return host, host.describe()
    except BaseException:
        host.close()
        raise


def call_host(host: Host, method: str, arguments: bytes) -> object:
    """Call a method of a host with pickled ``(args, kwargs)``."""
    args, kwargs = pickle.loads(arguments)
    return host.call(method, *args, **kwargs)


def read_answer(
    message: bytes | memoryview, *, worker: int, rows: range, command: str
) -> tuple[Any, list[Failure]]:
    """Return the result in a message, and what failed instead or beside."""
    try:
        result, failures = pickle.loads(message)
    except Exception as error:  # of a class that only the worker can import, for example
        return None, [failure_of(error, worker=worker, rows=tuple(rows), command=command)]
    return result, [
        replace(failure.unpacked(pickled), command=command) for failure, pickled in failures
    ]


def _dumps(message: tuple[object, list[Any]]) -> bytes:
    """Pickle a message; classes that only this process can import travel by value."""
    try:
        return by_value.dumps_by_name(message)
    except Exception:
        try:
            return by_value.dumps(message)
        except Exception as error:
            raise WorkerError(
                f"the result, of type {type(message[0]).__qualname__}, cannot be pickled and so "
                f"cannot leave the worker ({error}). Return arrays, numbers, strings or containers "
                "of them."
            ) from error


def _without_stuck(result: object, error: Exception) -> tuple[object, Exception]:
    """Part a result that cannot be pickled: what can be after all, and an error for the rest.

    Of a dict by row the rows are looked at one by one, see `Host.call`.
    """
    if not isinstance(result, dict):
        return None, error
    of_row, stuck = cast("dict[int, object]", result), dict[int, Exception]()
    for row, value in of_row.items():
        try:
            _dumps((value, []))
        except WorkerError as own:
            stuck[row] = own
    sound = {row: value for row, value in of_row.items() if row not in stuck}
    return sound, RowsFailedError(stuck, None)
