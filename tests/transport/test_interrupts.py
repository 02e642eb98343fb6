"""Ctrl-C at every line at which the parent waits for replies: nothing is lost, nobody hangs."""

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from envkit.errors import WorkerError
from tests.transport.hosts import COMMANDS, RAISE_ODD, STEP

# Python cannot interrupt between two lines that call nothing. Where the code relies on that, lines
# are the wrong measure: `send`, `recv`, `run` and `_ask` are left out.
LINES_OF = {
    "channel.py": {"push", "recv", "_fill", "forget"},
    "pool.py": {"_make_room", "_busy", "_finish"},
    "processes.py": {"attend", "_push", "_settle", "_examine", "_unwatch_one"},
}


def interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Call, with Ctrl-C at the line of this number; say whether there are that many."""
    left = number

    def trace(frame, event, _):
        nonlocal left
        code = frame.f_code
        if code.co_name not in LINES_OF.get(Path(code.co_filename).name, ()):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert left <= 0
    finally:
        sys.settrace(before)
    return left <= 0


def lines_of(call: Callable[[], object]):
    """Interrupt a call at each of its lines, and each time let the caller look what became of it."""
    for number in count(1):
        if not interrupted_at(number, call):
            assert number > 20
            return
        yield number


def test_a_step_that_is_interrupted_is_finished_by_the_next(new_pool):
    pool, arrays = new_pool()
    pids = pool.pids

    def step():
        pool.send(STEP)
        pool.recv()

    for number in lines_of(step):
        step()

        assert (arrays["value"] == 2 * number).all()
    assert pool.pids == pids


def test_what_failed_in_an_interrupted_round_is_told_once_and_in_full(new_pool):
    pool, _ = new_pool()
    pids = pool.pids

    def fail():
        pool.send(RAISE_ODD)
        with pytest.raises(WorkerError):
            pool.recv()

    for _ in lines_of(fail):
        with pytest.raises(WorkerError, match=f"during '{COMMANDS[RAISE_ODD]}'") as caught:
            pool.recv()

        assert [failure.rows for failure in caught.value.failures] == [(1,), (3,)]
        pool.recv()
    assert pool.pids == pids


def test_large_messages_that_are_interrupted_are_not_lost(new_pool):
    pool, _ = new_pool()
    pids, large = pool.pids, np.arange(60_000)  # more than a socket takes at once

    for number in lines_of(lambda: pool.call("echo", large)):
        assert pool.call("add", number) == [number, number + 2]
    assert pool.pids == pids


def test_interrupts_one_after_the_other_take_no_answer_twice(new_pool):
    pool, _ = new_pool()
    pids = pool.pids

    for _ in lines_of(lambda: pool.call("add", 1)):
        pass  # nothing finishes what is half done but the next call, which is interrupted too

    assert pool.call("add", 5) == [5, 7]
    assert pool.pids == pids


def test_an_interrupt_while_a_replaced_worker_starts_is_told_until_it_is_replaced_again(new_pool):
    pool, _ = new_pool()

    assert interrupted_at(1, lambda: pool.restart_worker(0))
    with pytest.raises(WorkerError, match=r"interrupt \(Ctrl-C\) came while 'start' was sent"):
        pool.call("add", 1)
    pool.restart_worker(0)

    assert pool.call("add", 1) == [1, 3]
