"""What all tests share: signals that mean what they do in a terminal, envs that end, counts of leaks."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from zlib import crc32

import hypothesis
import psutil
import pytest

# On a busy machine an example may take any time.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# A shell has what it starts in the background ignore Ctrl-C, nohup the end of the terminal, and the scripts
# that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# In /dev/shm: of multiprocessing, torch, Ray and EnvPool, in whatever program.
FOREIGN = ("sem.mp-", "torch_", "plasma", "ViZDoom")

CASES = 2  # of one test, among the quick ones
CASES_IN_CI = 4  # of one test; what further ones were worth is in docs/decisions.md

_frozen = {"blocks": 0}  # of memory, when objects were last taken out of garbage collection


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Mark further cases before -m selects, and order the files where processes take them as they come.

    Files with slow tests come first then, and of them those with the fewest: the last one would be waited for.
    """
    mark_further_cases(items)
    yield
    if not config.getoption("loadscopereorder", True):
        tests = Counter(item.path for item in items)
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (item.path not in slow, tests[item.path], str(item.path)))


def mark_further_cases(items: list[pytest.Item]) -> None:
    """Mark the quick cases of a test as further ones, but for two that a hash of their names chooses.

    Those beyond four are sweeps. Rows of a table ask different questions: all of them stay quick.
    """
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "more", "row"))):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        of_one.sort(key=lambda item: crc32(item.nodeid.encode()))
        for item in of_one[CASES:]:
            item.add_marker("more")
        for item in of_one[CASES_IN_CI:]:
            item.add_marker("sweep")


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_look_through() -> None:
    """Take what earlier modules have left out of garbage collection: of a million objects each one takes 0.4 s."""
    if sys.getallocatedblocks() - _frozen["blocks"] > 300_000:
        gc.collect()
        gc.freeze()
        _frozen["blocks"] = sys.getallocatedblocks()


@pytest.fixture(scope="session", autouse=True)
def workers_find_what_tests_import() -> None:
    """Preload in the fork server what a worker whose maker is in a file of tests would take 0.9 s to import."""
    from envkit.transport import shared_fork_server

    libraries = ("pytest", "psutil", "hypothesis", "jax.numpy", "torchrl.envs")
    shared_fork_server().warm_up((*libraries, "tests.zoo.envs"))


@pytest.fixture
def opened() -> Iterator[Callable]:
    """Hand out envs that are closed after the test, whatever it does."""
    with ExitStack() as stack:

        def keep(env):
            stack.callback(env.close, raise_if_closed=False)
            return env

        yield keep


@pytest.fixture
def full_disk() -> Callable:
    """Let no file grow beyond a size, which is how a full disk looks to whoever writes."""

    @contextmanager
    def full(size_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return full


@pytest.fixture
def holdings() -> Callable[[], tuple[int, list[int], list[str]]]:
    """Count descriptors, child processes and files in /dev/shm, the fork server's own being there.

    Where an earlier test began Ray, its raylet starts and ends workers as it likes: those are not counted.
    """
    from envkit.transport import shared_fork_server

    shared_fork_server().warm_up()

    def count() -> tuple[int, list[int], list[str]]:
        for _ in range(
            2
        ):  # errors of earlier tests hold pools in cycles, whose finalizers leave others
            gc.collect()
        children = list[int]()
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if child.name() != "raylet":
                    below = child.children(recursive=True)
                    children += [child.pid, *(process.pid for process in below)]
        shared = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
        shared = [name for name in shared if not name.startswith(FOREIGN)]
        return len(os.listdir("/proc/self/fd")), sorted(children), shared

    return count


@pytest.fixture
def rendering() -> str:
    """Let MuJoCo draw without a window, and name the backend; skip where no backend works."""
    from envkit.errors import RenderingError
    from envkit_bridges import offscreen

    try:
        return offscreen.prepare()
    except RenderingError as error:
        pytest.skip(str(error))
