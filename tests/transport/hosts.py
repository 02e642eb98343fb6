"""Small hosts for the tests of the transport: counters over rows, with faults on request."""

import os
import signal
import threading
import time

import numpy as np

from envkit.transport import Field, Layout, Pool, Processes, Threads

STEP, RAISE_ODD, EXIT, KILL, HANG, SEGFAULT = range(6)
COMMANDS = {STEP: "step", RAISE_ODD: "raise", EXIT: "exit", KILL: "kill", HANG: "hang"}


def layout(rows):
    return Layout((Field("value", (3,), "float32"), Field("calls", (), "int64")), rows)


LIMITS = ("commands", "timeout_s", "start_timeout_s", "building")


def process_pool(make_host, rows, processes, **options):
    """Make a pool of processes, from options of both."""
    limits = {name: options.pop(name) for name in LIMITS if name in options}
    return Pool(Processes(make_host, rows, processes, **options), **limits)


def thread_pool(make_host, rows, threads, **limits):
    return Pool(Threads(make_host, rows, threads), **limits)


class Counter:
    """Adds one to the value of each row; ``calls`` counts the `run` calls of its worker."""

    def __init__(self, rows):
        self.rows = rows

    def describe(self):
        return self.rows

    def bind(self, arrays, rows):
        assert rows == self.rows
        self.value, self.calls = arrays["value"], arrays["calls"]

    def run(self, command, rows):
        self.calls[self.rows.start] += 1
        for row in rows:
            self.step(command, row)

    def step(self, command, row):
        if command == EXIT and row == 1:
            os._exit(3)
        if command == KILL and row == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if command == SEGFAULT and row == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if command == HANG and row == 1:
            threading.Event().wait()
        if command == RAISE_ODD and row % 2:
            raise ArithmeticError(f"row {row} is odd")
        self.value[row] += 1

    def call(self, method, /, *args, **kwargs):
        return getattr(self, method)(*args, **kwargs)

    def close(self):
        pass

    # What `call` may ask for

    def add(self, number, to=0):
        return number + to + self.rows.start

    def surroundings(self, variable):
        import sys

        return os.environ.get(variable), sys.path, os.getcwd()

    def bad_result(self):
        return threading.Lock()

    def fail(self):
        raise LookupError("nothing here")

    def random_draw(self):
        return np.random.random()

    def sleep(self, seconds):
        time.sleep(seconds)

    def echo(self, value):
        return value

    def ring(self, pause_s):
        """Run a signal handler again and again, and count."""
        self.rings = 0

        def count(*_):
            self.rings += 1

        signal.signal(signal.SIGALRM, count)
        signal.setitimer(signal.ITIMER_REAL, pause_s, pause_s)

    def rung(self):
        return self.rings


class FailsToStart(Counter):
    def __init__(self, rows):
        raise OSError(f"no licence for rows {rows.start}-{rows.stop - 1}")


class FailsToDescribe(Counter):
    def describe(self):
        raise LookupError("cannot say")


class ExitsAtStart(Counter):
    def __init__(self, rows):
        os._exit(7)


class HangsAtStart(Counter):
    def __init__(self, rows):
        threading.Event().wait()


class StartsLate(Counter):
    def __init__(self, gate, rows):
        super().__init__(rows)
        gate.read_text()  # waits for whoever opens it


class HangsInClose(Counter):
    def close(self):
        threading.Event().wait()
