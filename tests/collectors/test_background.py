"""Collecting in a thread of its own: start, pause, what waits for it, and how it ends."""

from __future__ import annotations

import threading

import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer

from envkit import Collector, MultiSyncDataCollector, SyncDataCollector
from envkit.errors import BusyError, ClosedEnvError, NotStartedError, StartedError
from tests.zoo.envs import Count


class Writes:
    """A buffer that tells when it holds so many steps."""

    def __init__(self, wanted: int = 40):
        self.batches, self.wanted = [], wanted
        self.is_filled = threading.Event()

    def extend(self, batch) -> None:
        self.batches.append(batch.clone())
        if len(self) >= self.wanted:
            self.is_filled.set()

    def __len__(self) -> int:
        return sum(batch.numel() for batch in self.batches)


class Says(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.choice = torch.nn.Parameter(torch.tensor(0), requires_grad=False)

    def forward(self, count):
        return self.choice.expand(count.shape).clone()


def test_a_buffer_is_filled_until_it_is_enough_and_transitions_follow_each_other():
    buffer = Writes()
    collector = SyncDataCollector(lambda: Count(5), frames_per_batch=4, replay_buffer=buffer)

    collector.start()
    assert buffer.is_filled.wait(30)
    collector.async_shutdown(timeout=30)

    counts = torch.cat([batch["count"] for batch in buffer.batches]).flatten()
    assert counts.tolist() == [step % 5 for step in range(len(buffer))]
    assert not collector.is_running() and collector.frames == len(buffer)


def test_workers_fill_torchrls_buffer_to_the_last_frame():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    with MultiSyncDataCollector(
        [Count] * 2, frames_per_batch=8, total_frames=48, replay_buffer=buffer
    ) as collector:
        collector.start()
        while collector.is_running():
            threading.Event().wait(0.01)

        assert len(buffer) == collector.frames == 48


def test_a_pause_holds_it_between_two_batches_and_it_goes_on():
    buffer = Writes()
    with SyncDataCollector(Count, frames_per_batch=4, replay_buffer=buffer) as collector:
        collector.start()
        with collector.pause(), collector.pause():
            held = len(buffer)
            collector.next()
            assert len(buffer) == held + 4 == collector.frames
        assert buffer.is_filled.wait(30)
        collector.start()  # which goes on as it is


def test_calls_wait_for_the_batch_under_way_and_change_the_next():
    policy, buffer = Says(), Writes(wanted=400)
    with SyncDataCollector(
        Count, policy, frames_per_batch=4, replay_buffer=buffer, track_policy_version=True
    ) as collector:
        collector.start()
        for value in (1, 0, 1):
            with collector.pause():
                policy.choice.fill_(value)
            collector.update_policy_weights_()
            collector.set_attr("n", 3 + value)
        assert collector.get_attr("n") == [4]
        assert buffer.is_filled.wait(30)

    for batch in buffer.batches:
        assert len(batch["policy_version"].unique()) == 1
        assert (batch["action"] == batch["action"][0]).all()
    assert buffer.batches[-1]["policy_version"].unique().tolist() == [3]


def test_what_raises_there_is_raised_by_the_next_call_once():
    class Refuses(Writes):
        def extend(self, batch):
            raise OSError("the disk is full")

    collector = SyncDataCollector(Count, frames_per_batch=4, replay_buffer=Refuses())
    collector.start()
    while collector.is_running():
        threading.Event().wait(0.01)

    with pytest.raises(OSError, match="disk is full"), collector.pause():
        pass
    collector.start()
    with pytest.raises(OSError, match="disk is full"):
        collector.shutdown()
    collector.shutdown()
    with pytest.raises(ClosedEnvError):
        collector.start()


def test_another_thread_takes_no_batch_from_it():
    buffer = Writes()
    with SyncDataCollector(Count, frames_per_batch=4, replay_buffer=buffer) as collector:
        collector.start()

        with pytest.raises(BusyError, match=r"background since start.*within pause"):
            collector.next()


def test_what_does_not_run_cannot_be_paused():
    collector = SyncDataCollector(Count, frames_per_batch=4)

    with pytest.raises(NotStartedError, match=r"Call start\(\) first"), collector.pause():
        pass
    with pytest.raises(RuntimeError, match=r"has none. Pass replay_buffer="):
        collector.start()


def test_a_hook_cannot_wait_for_itself():
    was_refused = threading.Event()

    def hook() -> None:
        with pytest.raises(StartedError, match="wait for itself"), collector.pause():
            pass
        was_refused.set()

    collector = SyncDataCollector(
        Count, frames_per_batch=4, replay_buffer=Writes(), pre_collect_hook=hook
    )
    collector.start()

    assert was_refused.wait(30)
    collector.shutdown()


def test_a_batch_that_takes_too_long_is_told_and_waited_for_again():
    goes_on = threading.Event()
    collector = SyncDataCollector(
        Count,
        lambda td: (goes_on.wait(30), td.set("action", torch.zeros(1, dtype=torch.int64)))[1],
        frames_per_batch=4,
        replay_buffer=Writes(),
    )
    collector.start()

    with pytest.raises(BusyError, match=r"not done within 0.05 s"):
        collector.async_shutdown(timeout=0.05)
    goes_on.set()
    collector.async_shutdown(timeout=30)

    assert not collector.is_running()


def test_an_env_can_be_left_open():
    env = Count()
    collector = Collector(env, frames_per_batch=4)

    collector.shutdown(close_env=False)

    assert not env.is_closed
    with pytest.raises(ClosedEnvError):
        collector.next()
