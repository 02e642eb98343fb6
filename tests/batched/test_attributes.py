"""Attributes and methods of sub-envs, looked up through the batched env."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import pytest

from envkit import GymEnv, ParallelEnv, SerialEnv
from envkit.errors import NotStartedError, WorkerError
from tests.zoo.envs import Count

ON_BOTH = {"serial": SerialEnv, "parallel": partial(ParallelEnv, num_processes=2)}


class Rich(Count):
    """Holds plain values, things nested in each other, and what cannot be pickled."""

    def __init__(self, n: int):
        super().__init__(n)
        self.levels = SimpleNamespace(
            deep=SimpleNamespace(value=n * 10, double=lambda x: x * 2 * n)
        )
        self.lock = threading.Lock()
        self.maybe = {} if n > 5 else None
        self.log: list[int] = []

    def note(self, number: int, *, times: int = 1) -> int:
        self.log += [number] * times
        return len(self.log)

    @property
    def broken(self):
        raise ArithmeticError("no value")


@pytest.fixture(scope="module", params=ON_BOTH)
def rich(request):
    env = ON_BOTH[request.param](3, Rich, create_env_kwargs=[{"n": 3}, {"n": 7}, {"n": 3}])
    env.start()
    yield env
    env.close()


@pytest.fixture(scope="module", params=ON_BOTH)
def pendulums(request):
    env = ON_BOTH[request.param](2, partial(GymEnv, "Pendulum-v1", g=9.81))
    env.start()
    yield env
    env.close()


def test_an_attribute_is_a_list_of_one_value_for_each_sub_env(rich):
    first, second, third = rich.maxs

    assert (first, second, third) == (3, 7, 3)
    assert len(rich.maxs) == 3
    assert rich.maxs[1] == 7
    assert rich.maxs[-2:] == [7, 3]
    assert rich.maxs == [3, 7, 3]
    assert rich.maxs != [3, 7]
    assert rich.maxs == rich.n
    assert list(rich.maybe) == [None, {}, None]


def test_a_method_is_called_on_every_sub_env(rich):
    assert rich.hello(5) == [8, 12, 8]
    assert rich.note(1, times=2) == [2, 2, 2]
    assert list(rich.log) == [[1, 1]] * 3


def test_what_is_nested_is_reached_step_by_step(rich):
    assert list(rich.levels.deep.value) == [30, 70, 30]
    assert rich.levels.deep.double(2) == [12, 28, 12]


def test_attributes_of_wrapped_simulators_are_found(pendulums):
    a, b = pendulums.g

    assert (a, b) == (9.81, 9.81)
    assert list(pendulums.spec.id) == ["Pendulum-v1"] * 2
    assert list(pendulums.unwrapped.max_torque) == [2.0, 2.0]


def test_unknown_names_are_told_with_their_path(rich):
    with pytest.raises(AttributeError, match="'nope'"):
        _ = rich.nope
    with pytest.raises(AttributeError, match=r"'levels\.deep\.nope'"):
        _ = rich.levels.deep.nope
    assert not hasattr(rich, "nope")


def test_private_names_are_not_looked_up(rich):
    for name in ("__nope__", "_out", "_ipython_display_", "_repr_html_"):
        with pytest.raises(AttributeError):
            getattr(rich.levels, name)
    with pytest.raises(AttributeError):
        _ = rich.__nope__
    assert not hasattr(rich, "_seed_of_simulator")


def test_an_attribute_that_raises_tells_why(rich):
    with pytest.raises((WorkerError, ArithmeticError), match="no value"):
        _ = rich.broken

    assert list(rich.n) == [3, 7, 3]


def test_own_names_are_not_passed_on(rich):
    assert rich.num_workers == 3
    assert rich.batch_size == (3,)
    assert callable(rich.step)


def test_a_value_that_cannot_be_pickled_is_reached_but_not_fetched():
    env = ParallelEnv(2, partial(Rich, 3), num_processes=1)
    env.start()

    lock = env.lock
    taken = lock.acquire()
    with pytest.raises(WorkerError, match="cannot be pickled"):
        list(lock)
    again = lock.locked()
    env.close()

    assert taken == [True, True]
    assert again == [True, True]


def test_showing_an_attribute_fetches_nothing():
    env = ParallelEnv(1, partial(Rich, 3))
    env.start()

    shown = repr(env.levels.deep.value)
    env.close()

    assert shown == "WorkerAttribute('levels.deep.value' of the sub-envs of ParallelEnv)"


@pytest.mark.parametrize("make", ON_BOTH.values(), ids=ON_BOTH)
def test_a_name_of_its_own_that_is_misspelt_is_guessed_before_the_start(make):
    env = make(2, partial(Rich, 3))

    with pytest.raises(NotStartedError, match=r"'rolout'.*If you meant 'rollout'"):
        _ = env.rolout


@pytest.mark.parametrize("make", ON_BOTH.values(), ids=ON_BOTH)
def test_nothing_can_be_asked_before_the_start_nor_after_the_end(make):
    env = make(2, partial(Rich, 3))

    with pytest.raises(NotStartedError, match=r"'maxs'.*reset"):
        _ = env.maxs
    assert not hasattr(env, "maxs")
    env.start()
    assert hasattr(env, "maxs")
    env.close()

    with pytest.raises(RuntimeError, match="reset"):
        _ = env.maxs
