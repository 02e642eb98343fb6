"""Collectors on Ray actors deliver the batches of worker processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule

from envkit import (
    Collector,
    GymEnv,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    TransformedEnv,
    VecNormV2,
    evaluate,
)
from envkit.errors import ArgumentError, MissingLibraryError, OptionError, WorkerError
from tests.zoo.envs import Chaos, Count
from tests.zoo.ray_cluster import Gated, begin_ray, bytes_in_stores, on_ray, wait_until

pytestmark = pytest.mark.timeout(400)
SEED, FRAMES = 3, 40
make_cartpole = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)


class Says(TensorDictModule):
    """Acts with its only weight."""

    def __init__(self, value: float):
        super().__init__(_Weight(value), ["count"], ["action"])

    def say(self, value: float) -> None:
        torch.nn.init.constant_(self.module.value, value)


class _Weight(torch.nn.Module):
    def __init__(self, value: float):
        super().__init__()
        self.value = torch.nn.Parameter(torch.full((1,), value))

    def forward(self, count: torch.Tensor) -> torch.Tensor:
        return (self.value + 0 * count).round().long()


@pytest.fixture
def built():
    """Build collectors that are shut down after the test."""
    collectors = []

    def build(*args, **kwargs):
        if kwargs["backend"] == "ray":
            begin_ray()
        collectors.append(Collector(*args, **kwargs))
        return collectors[-1]

    yield build
    for collector in collectors:
        collector.shutdown()


def calm(td):
    return td.set("action", torch.zeros(1, dtype=torch.int64))


@pytest.mark.slow
def test_the_batches_are_those_of_processes(built):
    runs = []
    for backend in ("process", "ray"):
        torch.manual_seed(SEED)
        collector = built(
            [make_cartpole] * 2, backend=backend, frames_per_batch=FRAMES, total_frames=3 * FRAMES
        )
        collector.set_seed(SEED)
        runs.append([td.clone() for td in collector])

    assert isinstance(collector, MultiSyncDataCollector)
    for ours, theirs in zip(*runs, strict=True):
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys(True, True))
        assert ours["observation"].add_(1).shape == (2, FRAMES // 2, 4)  # ours to write to


@pytest.mark.slow
@pytest.mark.parametrize("sync", [True, False])
def test_new_weights_act_in_the_next_batch(built, sync):
    policy = Says(0.0)
    collector = built([partial(Count, 5)] * 2, policy, backend="ray", sync=sync, frames_per_batch=8)

    first = [collector.next() for _ in range(2)]
    policy.say(1.0)
    collector.update_policy_weights_()
    in_flight = (
        1 if sync else 12
    )  # of an actor that is slow to start, others may have made many meanwhile
    later = [collector.next() for _ in range(in_flight + 1)]

    assert isinstance(collector, MultiSyncDataCollector if sync else MultiaSyncDataCollector)
    assert not any(td["action"].any() for td in first)
    assert later[-1]["action"].all()


@pytest.mark.slow
def test_the_store_holds_one_copy_of_new_weights_for_all_actors(built, tmp_path):
    policy = Gated(tmp_path, 2**21)
    size_bytes = policy.weight.nbytes
    collector = built([partial(Count, 5)] * 2, policy, backend="ray", frames_per_batch=4)
    assert bytes_in_stores() == pytest.approx(size_bytes, rel=0.1)  # those it was built with
    collector.next()

    for update in (1, 2):
        policy.say(update)
        collector.update_policy_weights_()
        calls = sum(policy.calls())
        policy.shut()
        with ThreadPoolExecutor() as pool:
            batch = pool.submit(collector.next)
            try:
                wait_until(lambda calls=calls: sum(policy.calls()) == calls + 2)
                held = bytes_in_stores()
            finally:
                policy.open()

        assert (batch.result()["action"] == update).all()
        assert held == pytest.approx(size_bytes, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "ahead"), [({"prefetch": 1}, 1), ({"sync": False}, 2)], ids=["prefetch", "async"]
)
def test_actors_collect_while_the_trainer_learns(built, tmp_path, options, ahead):
    policy = Gated(tmp_path)
    options = {"frames_per_batch": 4, "track_policy_version": True, **options}
    collector = built([partial(Count, 5)] * 2, policy, backend="ray", **options)
    calls = sum(policy.calls())

    collector.next()
    wait_until(lambda: sum(policy.calls()) == calls + 4 + 4 * ahead)  # with no next() meanwhile
    policy.say(1.0)
    collector.update_policy_weights_()
    batches = [collector.next() for _ in range(6)]

    versions = [batch["policy_version"].unique().item() for batch in batches]
    assert versions == [0] * ahead + [1] * (6 - ahead)
    for version, batch in zip(versions, batches, strict=True):
        assert (batch["action"] == version).all()


@pytest.mark.slow
def test_actors_fill_a_buffer_in_the_background(built):
    class Buffer(list):
        is_filled = threading.Event()

        def extend(self, batch):
            self.append(batch.clone())
            if batch["action"].all():
                self.is_filled.set()

    policy, buffer = Says(0.0), Buffer()
    options = {"frames_per_batch": 8, "replay_buffer": buffer}
    collector = built([partial(Count, 5)] * 2, policy, backend="ray", **options)

    collector.start()
    policy.say(1.0)
    collector.update_policy_weights_()
    assert buffer.is_filled.wait(60)
    with collector.pause():
        assert collector.frames == sum(batch.numel() for batch in buffer)
    collector.async_shutdown(timeout=60)

    assert not collector.is_running()


@pytest.mark.slow
def test_a_lost_worker_is_replaced_and_the_batch_is_complete(built):
    options = {"frames_per_batch": 12, "on_worker_failure": "restart"}
    collector = built([Chaos] * 2, calm, backend="ray", **options)
    collector.set_seed(SEED)
    collector.next()
    collector.next()

    os.kill(collector.worker_pids[1], signal.SIGKILL)
    batch = collector.next()

    assert batch.shape == (2, 6)
    assert batch["next", "truncated"].squeeze(-1).any(-1).tolist() == [False, True]
    left, right = (set(ids.flatten().tolist()) for ids in batch["collector", "traj_ids"])
    assert not left & right


@pytest.mark.slow
def test_a_lost_worker_is_an_error_that_names_it(built):
    collector = built([Chaos] * 2, calm, backend="ray", frames_per_batch=12)
    collector.next()

    os.kill(collector.worker_pids[1], signal.SIGKILL)

    with pytest.raises(WorkerError, match="worker 1 of 2, which held row 1, was lost"):
        collector.next()


def test_what_actors_cannot_do_is_refused(built, monkeypatch):
    both = [Count] * 2
    ready = {"backend": "process", "frames_per_batch": 4}

    with pytest.raises(OptionError, match="stops workers through memory"):
        Collector(both, backend="ray", frames_per_batch=4, preemptive_threshold=0.5)
    with pytest.raises(OptionError, match="takes no keyword 'cpus'"):
        Collector(both, backend="ray", frames_per_batch=4, backend_options={"cpus": 1})
    with pytest.raises(OptionError, match="backend='process' has no options"):
        built(both, backend_options={"num_cpus": 1}, **ready)
    with pytest.raises(ArgumentError, match="must be 'process', 'ray' or None"):
        MultiSyncDataCollector(both, backend="direct", frames_per_batch=4)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "envkit_bridges.transports.ray", raising=False)
    with pytest.raises(MissingLibraryError, match=r"'\.\[ray\]'"):
        Collector(both, backend="ray", frames_per_batch=4)


# ------------------------------------------------------------------- evaluations between two batches


def make_pendulum():
    return GymEnv("Pendulum-v1", max_episode_steps=10)


def make_that_learns():
    return TransformedEnv(make_pendulum(), VecNormV2(in_keys=["observation"]))


def on_actors_that_learn():
    return on_ray(2, make_that_learns, num_processes=2)


def on_actors():
    return TransformedEnv(
        on_ray(2, make_pendulum, num_processes=2), VecNormV2(in_keys=["observation"])
    )


def judged(env, learns: bool) -> float:
    return evaluate(env, env.rand_action, 4, seed=9, max_steps=6, update_stats=learns).mean


def judged_here(collector, learns: bool) -> None:
    judged(collector.env, learns)


def judged_in_actors(collector, learns: bool) -> None:
    collector._ask_envs(partial(judged, learns=learns), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "backend", "judge"),
    [
        pytest.param(on_actors, "direct", judged_here, marks=pytest.mark.sweep),
        pytest.param(on_actors_that_learn, "direct", judged_here, marks=pytest.mark.sweep),
        ([make_that_learns] * 2, "ray", judged_in_actors),
    ],
    ids=["statistics here", "statistics in actors", "collector in actors"],
)
def test_an_evaluation_between_batches_changes_none_of_them(built, make, backend, judge):
    begin_ray()
    runs = []
    for learns in (None, False, True):
        torch.manual_seed(SEED)
        collector = built(make, backend=backend, frames_per_batch=24, record_for_resume=True)
        collector.set_seed(SEED)
        runs.append([])
        for _ in range(3):
            runs[-1].append(collector.next().clone())
            if learns is not None:
                judge(collector, learns)
        assert collector.frames == 72
        collector.shutdown()

    untouched, judged_between, learning = (torch.cat(run, -1) for run in runs)
    assert set(untouched.keys(True, True)) == set(judged_between.keys(True, True))
    for key in untouched.keys(True, True):
        assert torch.equal(untouched[key], judged_between[key]), key
    assert not torch.equal(untouched["observation"], learning["observation"])


@pytest.mark.slow
@pytest.mark.sweep
def test_an_evaluation_elsewhere_leaves_a_collector_in_actors_alone(built):
    runs = []
    for judges in (False, True):
        torch.manual_seed(SEED)
        collector = built([make_that_learns] * 2, backend="ray", frames_per_batch=24)
        collector.set_seed(SEED)
        runs.append([])
        for _ in range(2):
            runs[-1].append(collector.next().clone())
            if judges:
                env = on_actors()
                judged(env, learns=False)
                env.close()

    for untouched, between in zip(*runs, strict=True):
        for key in untouched.keys(True, True):
            assert torch.equal(untouched[key], between[key]), key
