"""Next observations as differences: written to a buffer, and whole in what is sampled."""

from __future__ import annotations

import warnings

import pytest
import torch

from envkit import (
    CatTensors,
    Collector,
    Compose,
    GymEnv,
    NextObservationDelta,
    TransformedEnv,
)
from envkit.errors import ArgumentError, OptionError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement


def steps(*transforms):
    env = TransformedEnv(GymEnv("Pendulum-v1", max_episode_steps=5), *transforms)
    env.set_seed(0)
    return env.rollout(12, break_when_any_done=False)


def buffer_with(transform, size: int = 12) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(size),
        sampler=SamplerWithoutReplacement(shuffle=False),
        transform=transform,
        batch_size=size,
    )


@pytest.mark.parametrize("wraps", [lambda one: one, lambda one: Compose(one)])
def test_a_buffer_holds_differences_and_gives_observations(wraps):
    data, delta = steps(), NextObservationDelta(["observation"])
    buffer = buffer_with(wraps(delta))

    buffer.extend(data)

    held = buffer.storage[:]
    assert held["next", "delta", "observation"].dtype == torch.float16
    assert ("next", "observation") not in held.keys(True, True)
    assert held.bytes() < data.bytes()
    sample = buffer.sample()
    assert set(sample.keys(True, True)) >= set(data.keys(True, True))
    assert ("next", "delta") not in sample.keys(True)
    found, wanted = sample["next", "observation"], data["next", "observation"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)  # ends of episodes too


def test_samples_may_keep_the_difference_and_have_another_dtype():
    delta = NextObservationDelta(
        "observation", delta_dtype=torch.float32, restore_dtype=torch.float64, drop_delta=False
    )
    data = steps()

    sample = delta(delta.inv(data))

    assert sample["next", "observation"].dtype == torch.float64
    assert sample["next", "delta", "observation"].dtype == torch.float32
    assert "delta" not in data["next"].keys() and "observation" in data["next"].keys()


def test_one_object_serves_an_env_and_a_buffer():
    delta = NextObservationDelta()
    env = TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(CatTensors(["observation"], "seen", del_keys=False), delta),
    )
    data = env.rollout(4)

    stored = delta.inv(data)

    assert {"observation", "seen"} == set(stored["next", "delta"].keys())
    assert "seen" in data["next"].keys()


def test_a_collector_delivers_differences_as_a_postproc():
    collector = Collector(
        lambda: GymEnv("Pendulum-v1"),
        frames_per_batch=4,
        postproc=NextObservationDelta(["observation"]).inv,
    )

    batch = collector.next()

    collector.shutdown()
    assert batch["next", "delta", "observation"].shape == (4, 3)


def test_a_buffer_needs_to_be_told_the_keys():
    with pytest.raises(OptionError, match=r"Pass\s+in_keys=\['observation'\]"):
        NextObservationDelta().inv(steps())


@pytest.mark.parametrize("option", ["delta_dtype", "restore_dtype"])
def test_a_dtype_that_cannot_hold_differences_is_refused(option):
    with pytest.raises(ArgumentError, match=f"{option} is torch.int8"):
        NextObservationDelta(["observation"], **{option: torch.int8})
