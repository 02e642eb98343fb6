"""What belongs to the process is as it was after threads that changed it for a while, in whatever order they end."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import envkit
import envkit_bridges
from envkit import make
from envkit.env.torch_threads import ThreadLimit
from envkit.process_wide import alone, filters_kept, no_output, no_warnings, variables_kept
from envkit_bridges.libraries import quietly

PATIENCE_S = 60.0
NAME = "ENVKIT_A_VARIABLE"


@contextlib.contextmanager
def with_a_variable():
    with variables_kept(NAME):
        os.environ[NAME] = "changed"
        yield


@contextlib.contextmanager
def with_other_filters():
    with filters_kept():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no output": no_output,
    "no output of errors": lambda: no_output("stderr"),
    "no warnings": no_warnings,
    "filters": with_other_filters,
    "variables": with_a_variable,
    "quiet": quietly,
}


def state() -> list[object]:
    streams = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    return [*map(id, streams), [*warnings.filters], dict(os.environ)]


class Other:
    """A thread that enters a context, and leaves it when it is told."""

    def __init__(self, context: Callable[[], AbstractContextManager[object]]):
        self._context = context
        self._entered, self._may_leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._context():
            self._entered.set()
            assert self._may_leave.wait(PATIENCE_S)

    def enter(self) -> None:
        self._thread.start()
        assert self._entered.wait(PATIENCE_S)

    def leave(self) -> None:
        self._may_leave.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_threads_that_end_in_any_order_leave_the_process_as_it_was(context, order):
    before = state()
    others = [Other(CONTEXTS[context]) for _ in range(3)]

    for other in others:
        other.enter()
    for number in order:
        others[number].leave()

    assert state() == before


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_can_be_nested(context):
    before = state()

    with CONTEXTS[context](), pytest.raises(ZeroDivisionError), CONTEXTS[context]():
        raise ZeroDivisionError

    assert state() == before


def test_lines_of_other_threads_are_printed_meanwhile(capsys):
    other = Other(quietly)
    other.enter()
    print("a line of the program")
    with quietly():
        print("a line of a library")
    print("another line", file=sys.stdout)
    other.leave()

    assert capsys.readouterr().out == "a line of the program\nanother line\n"


@pytest.mark.parametrize("leaves_first", [True, False])
def test_output_that_another_thread_redirects_meanwhile_arrives_there(capsys, leaves_first):
    other, redirected = Other(quietly), io.StringIO()
    other.enter()
    with contextlib.redirect_stdout(redirected):
        print("a line in a file")
        with quietly():
            print("a line of a library")
        if leaves_first:
            other.leave()
    if not leaves_first:
        other.leave()
    print("a line of the program")

    assert redirected.getvalue() == "a line in a file\n"
    assert capsys.readouterr().out == "a line of the program\n"


def test_output_that_was_redirected_before_arrives_where_it_did(capsys):
    other, redirected = Other(quietly), io.StringIO()
    with contextlib.redirect_stdout(redirected):
        other.enter()
        print("a line in a file")
    print("a line of the program")
    other.leave()
    print("another line")

    assert redirected.getvalue() == "a line in a file\n"
    assert capsys.readouterr().out == "a line of the program\nanother line\n"


def test_warnings_of_other_threads_are_given_meanwhile():
    other = Other(quietly)
    other.enter()

    with pytest.warns(UserWarning, match="of the program"):
        warnings.warn("of the program", stacklevel=1)
    with quietly(), no_warnings("of a library", UserWarning):
        warnings.warn("of a library", stacklevel=1)
    with no_warnings("of a library", UserWarning), pytest.raises(UserWarning, match="else"):
        warnings.warn("something else", stacklevel=1)
    other.leave()


def test_one_thread_at_a_time_is_alone():
    inside: list[int] = []
    most: list[int] = []
    start = threading.Barrier(4)

    def enter() -> None:
        start.wait(PATIENCE_S)
        for _ in range(50):
            with alone(), alone():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert most == [1] * 200


def test_limits_of_threads_that_end_in_any_order_leave_the_number_as_it_was():
    import torch

    before = torch.get_num_threads()
    first, second = ThreadLimit(1), ThreadLimit(2)
    first.end()
    assert torch.get_num_threads() == 2
    second.end()

    assert torch.get_num_threads() == before


def test_envs_that_several_threads_make_at_once_leave_the_process_as_it_was(capsys):
    before, start = state(), threading.Barrier(4)

    def build() -> None:
        start.wait(PATIENCE_S)
        make("gymnax/CartPole-v1", 2).close()

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    print("a line of the program")

    assert state()[:5] == before[:5]
    assert capsys.readouterr().out == "a line of the program\n"


KNOWN = {"process_wide.py", "errors.py", "transport/forkserver.py", "cli/bench.py"}
"""This place, an example, and what runs in a process of its own."""


def test_streams_and_warnings_are_changed_in_one_place():
    changes = re.compile(r"catch_warnings|redirect_std(out|err)|simplefilter\(")
    changing = {
        file.relative_to(root).as_posix()
        for root in (Path(package.__path__[0]) for package in (envkit, envkit_bridges))
        for file in root.rglob("*.py")
        if changes.search(file.read_text())
    }

    examples = {"worlds/mjlab.py"}  # the library prints tables
    assert changing <= KNOWN | examples | {"transport/worker.py", "transports/ray.py"}
