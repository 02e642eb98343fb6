"""What carries a number from a parent to a worker: an eventfd, or a pipe where there is none."""

import importlib.util
import os

import pytest

from envkit.transport import wake


@pytest.fixture(params=["eventfd", "pipe"])
def carrier(request, monkeypatch):
    """The module, as it is where an eventfd exists and where it does not."""
    if request.param == "eventfd":
        if not hasattr(os, "eventfd"):
            pytest.skip("needs an eventfd")
        return wake
    monkeypatch.delattr(os, "eventfd", raising=False)
    spec = importlib.util.find_spec("envkit.transport.wake")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pair(carrier):
    waker, ear = carrier.open_pair()
    yield waker, ear
    for fd in (waker, ear):
        os.close(fd)


def test_codes_arrive_one_by_one(carrier, pair):
    waker, ear = pair
    heard = []

    for code in (1, 0x1FF, 0x800):
        carrier.write(waker, carrier.encode(code))
        heard.append(carrier.read(ear))

    assert heard == [1, 0x1FF, 0x800]


def test_stop_is_heard_through_a_code_that_was_not_read(carrier, pair):
    waker, ear = pair

    for code in (0x1FF, carrier.STOP, carrier.STOP):
        carrier.write(waker, carrier.encode(code))
    heard = carrier.read(ear)
    if heard < carrier.STOP:
        heard = carrier.read(ear)

    assert heard >= carrier.STOP


def test_the_two_ends_are_closed_apart(carrier):
    waker, ear = carrier.open_pair()

    os.close(waker)

    os.close(ear)  # would raise if they were one
