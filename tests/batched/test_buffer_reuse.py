"""Memory of large results: given again once its last holder is gone, and never before."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from envkit import GymEnv, SerialEnv
from envkit.batched.exchange.memory import LentMemory
from tests.bridges.compare import assert_same

CPU = torch.device("cpu")


def lent(memory, *shape, dtype=torch.float32):
    return memory.empty(shape, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.bool, torch.bfloat16], ids=str)
def test_memory_of_a_tensor_that_is_gone_is_lent_again(dtype):
    memory = LentMemory(large_bytes=1)
    first = lent(memory, 3, 4, dtype=dtype).fill_(1)
    place = first.data_ptr()

    del first
    second = lent(memory, 4, 3, dtype=dtype)

    assert second.data_ptr() == place
    assert second.shape == (4, 3) and second.dtype == dtype


def test_memory_that_anything_shows_is_not_lent_again():
    memory = LentMemory(large_bytes=1)
    first = lent(memory, 4).fill_(1)
    part = first[2:].numpy()

    del first
    lent(memory, 4).fill_(2)

    assert part.tolist() == [1, 1]


def test_no_more_is_kept_than_was_lent_last():
    memory = LentMemory(large_bytes=1)
    held = []
    for _ in range(5):
        memory.begin()
        held.append(lent(memory, 6))

    held.clear()

    assert [len(block) for block in memory._idle] == [24]


def test_a_tensor_outlives_the_memory_it_came_from():
    memory = LentMemory(large_bytes=1)
    only = lent(memory, 2).fill_(3)

    del memory

    assert only.tolist() == [3, 3]


def test_small_tensors_are_left_to_torch():
    memory = LentMemory(large_bytes=100)

    lent(memory, 3)

    assert memory._idle == [] and memory._lent_bytes == 0


@pytest.mark.parametrize("device", [CPU, None])
@pytest.mark.parametrize("large_bytes", [1, 100])
def test_memory_lies_on_the_cpu_whatever_the_default_of_torch_is(device, large_bytes):
    memory = LentMemory(large_bytes)

    with torch.device("meta"):
        given = memory.empty((4,), torch.float32, device)

    assert given.device == CPU


def test_rollouts_that_are_held_stay_as_they_are_while_others_are_recorded(monkeypatch):
    env = SerialEnv(2, partial(GymEnv, "CartPole-v1", max_episode_steps=6))
    env.set_seed(0)
    env.reset()
    monkeypatch.setattr(env._exchange.memory, "_large_bytes", 1)
    roll = partial(env.rollout, 9, break_when_any_done=False)

    held = roll()
    before = held.clone()
    second, third = places(roll()), places(roll())

    assert_same(held, before)
    assert second == third and second.isdisjoint(places(held))


def places(data):
    """Say where observations lie."""
    return {data["observation"].data_ptr(), data["next", "observation"].data_ptr()}
