"""Collectors with workers: shapes, weights, seeds, what is waited for; on real processes."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from envkit import (
    Collector,
    GymEnv,
    JaxPolicy,
    MultiAsyncCollector,
    MultiaSyncDataCollector,
    MultiSyncCollector,
    MultiSyncDataCollector,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TransformedEnv,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchCountError,
    BusyError,
    ClosedEnvError,
    CopyError,
)
from tests.collectors.slow_model import assert_same, collected
from tests.zoo.envs import Chaos, Count, Slow

IDS = ("collector", "traj_ids")


@pytest.fixture
def built(request):
    """Build collectors that are shut down after the test."""
    collectors = []

    def build(cls, *args, **kwargs):
        collectors.append(cls(*args, **kwargs))
        return collectors[-1]

    yield build
    for collector in collectors:
        collector.shutdown()


def one():
    return Count(5)


def two():
    return SerialEnv(2, lambda: Count(5))


def still(td):
    return td.set("action", torch.zeros((*td.batch_size, 1), dtype=torch.int64))


class Says(TensorDictModule):
    """Acts with its only weight."""

    def __init__(self, value: float = 0.0):
        module = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(module.weight)
        torch.nn.init.constant_(module.bias, value)
        super().__init__(torch.nn.Sequential(_ToFloat(), module, _ToInt()), ["count"], ["action"])

    def say(self, value: float) -> None:
        torch.nn.init.constant_(self.module[1].bias, value)


class _ToFloat(torch.nn.Module):
    def forward(self, count):
        return count.float()


class _ToInt(torch.nn.Module):
    def forward(self, value):
        return value.round().long()


@pytest.mark.parametrize(
    ("make", "cat", "frames", "batch", "names"),
    [
        (one, None, 8, (2, 4), [None, "time"]),
        (one, 0, 8, (8,), [None]),
        (one, -1, 8, (8,), [None]),
        (two, "stack", 12, (2, 2, 3), [None, None, "time"]),
        (two, 0, 12, (4, 3), [None, "time"]),
        (two, -1, 12, (2, 6), [None, None]),
    ],
)
def test_parts_of_workers_are_joined_as_asked_for(built, make, cat, frames, batch, names):
    collector = built(MultiSyncDataCollector, [make] * 2, frames_per_batch=frames, cat_results=cat)

    first, second = collector.next(), collector.next()

    for found in (first, second):  # the second one came by shared memory
        assert (tuple(found.batch_size), found.names) == (batch, names)
    counts = torch.cat([first["count"].reshape(-1), second["count"].reshape(-1)])
    steps = frames // (2 * make().batch_size.numel())
    assert counts.sum() == 2 * make().batch_size.numel() * sum(
        step % 5 for step in range(2 * steps)
    )


def test_workers_give_what_each_would_give_alone(built):
    def make():
        return TransformedEnv(SerialEnv(2, lambda: Chaos(3)), StepCounter())

    collector = built(MultiSyncDataCollector, [make] * 2, still, frames_per_batch=20)
    following = collector.set_seed(5)
    wanted = []
    seed = 5
    for worker in range(2):
        env = make()
        seed = env.set_seed(seed)
        batches = collected(env, still, steps=5, batches=3)
        wanted.append([numbered(batch, worker) for batch in batches])

    for batch in range(3):
        found = collector.next()
        for worker in range(2):
            assert_same(found[worker], wanted[worker][batch])
    assert following == seed


@pytest.mark.parametrize("make", [one, two])
def test_each_worker_makes_the_number_of_frames_that_it_was_given(built, make):
    collector = built(
        MultiSyncDataCollector, [make] * 2, still, frames_per_batch=[8, 4], total_frames=36
    )
    alone = [collected(make(), still, steps // make().batch_size.numel(), 3) for steps in (8, 4)]

    assert len(collector) == 3
    assert collector.frames_per_batch == collector.requested_frames_per_batch == 12
    assert [collector.frames_per_batch_worker(worker) for worker in range(2)] == [8, 4]
    for first, second in zip(*alone, strict=True):  # the second batch comes by shared memory
        parts = [numbered(first, 0), numbered(second, 1)]
        assert_same(collector.next(), torch.cat(parts, -1))
    assert collector.next() is None and collector.frames == 36


def test_a_number_of_all_workers_is_asked_for_where_there_is_none(built):
    collector = built(MultiSyncDataCollector, [one] * 2, frames_per_batch=[8, 4])

    with pytest.raises(
        ArgumentError, match=r"make \[8, 4\] transitions of a batch.*frames_per_batch_worker\(0\)"
    ):
        collector.frames_per_batch_worker()
    with pytest.raises(ArgumentError, match=r"indices has \[2\]"):
        collector.frames_per_batch_worker(2)


def test_asynchronous_batches_have_the_number_of_frames_of_their_worker(built):
    collector = built(
        MultiaSyncDataCollector, [one] * 2, still, frames_per_batch=[8, 4], total_frames=48
    )

    with pytest.raises(BatchCountError, match=r"\[8, 4\].*which workers are ready first"):
        len(collector)
    batches = list(collector)

    assert 48 <= collector.frames == sum(len(batch) for batch in batches) < 56
    for worker, frames in enumerate((8, 4)):
        own = [batch for batch in batches if int(batch[IDS][0]) % 2 == worker]
        assert {len(batch) for batch in own} == {frames}
        data = torch.cat(own)
        assert data["count"].flatten().tolist() == [step % 5 for step in range(len(data))]


@pytest.mark.parametrize("cls", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_a_warning_tells_what_workers_make_beyond_their_numbers(built, cls):
    sizes = {MultiSyncDataCollector: {10}, MultiaSyncDataCollector: {4, 6}}[cls]

    with pytest.warns(UserWarning, match="no multiple of the 2 envs") as told:
        collector = built(cls, [two] * 2, frames_per_batch=[3, 5], total_frames=20)

    assert {int(str(one.message).split("batches have ")[1].split()[0]) for one in told} == sizes
    assert {batch.numel() for batch in collector} <= sizes


def test_a_worker_of_fewer_frames_is_stopped_where_it_is(built):
    collector = built(
        MultiSyncDataCollector,
        [lambda: Slow(0.0), lambda: Slow(0.2)],
        frames_per_batch=[3, 9],
        preemptive_threshold=0.5,
    )

    batch, following = collector.next(), collector.next()

    assert 4 <= len(batch) < 12 and (batch[IDS] >= 0).all()
    assert collector.frames == len(batch) + len(following)
    assert batch["count"].flatten().tolist() == [*range(3), *range(len(batch) - 3)]
    assert following["count"].flatten().tolist()[:4] == [3, 4, 5, len(batch) - 3]


def numbered(batch, worker):
    """Number trajectories as worker ``worker`` of 2 does."""
    return batch.set(IDS, batch[IDS] * 2 + worker)


def test_an_asynchronous_collector_gives_whole_batches_of_single_workers(built):
    collector = built(
        MultiaSyncDataCollector, [one] * 2, still, frames_per_batch=6, total_frames=36
    )

    batches = list(collector)

    assert [tuple(batch.batch_size) for batch in batches] == [(6,)] * 6
    for worker in range(2):
        own = [batch for batch in batches if int(batch[IDS][0]) % 2 == worker]
        data = torch.cat(own)
        assert data["count"].flatten().tolist() == [step % 5 for step in range(6 * len(own))]


def test_numbers_are_unique_over_all_workers(built):
    collector = built(MultiaSyncDataCollector, [two] * 3, frames_per_batch=8, total_frames=96)

    data = torch.cat([batch.reshape(-1) for batch in collector])

    starts = data[data["count"].squeeze(-1) == 0]
    assert starts[IDS].unique().numel() == len(starts)


def test_a_fast_worker_is_not_held_up_by_a_slow_one(built):
    collector = built(
        MultiaSyncDataCollector,
        [lambda: Slow(0.0), lambda: Slow(0.3)],
        frames_per_batch=2,
        total_frames=20,
        use_buffers=False,
    )

    workers = [int(batch[IDS][0]) % 2 for _, batch in zip(range(8), collector, strict=False)]

    assert workers.count(0) > workers.count(1)


def test_new_weights_act_from_the_next_batch_on_and_say_so(built):
    policy = Says(0)
    collector = built(
        MultiSyncDataCollector, [one] * 2, policy, frames_per_batch=8, track_policy_version=True
    )
    seen = []
    for value in (0, 1, 2):
        batch = collector.next()
        seen.append(
            (
                batch["action"].unique().tolist(),
                batch["policy_version"].unique().tolist(),
            )
        )
        policy.say(value + 1)
        collector.update_policy_weights_()

    assert seen == [([0], [0]), ([1], [1]), ([2], [2])]


def follow(params, observation, key):
    return jnp.broadcast_to(params["choice"], observation.shape[:1])


@pytest.mark.slow  # workers load JAX
@pytest.mark.parametrize("cls", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_params_of_a_policy_in_jax_reach_the_workers(built, cls):
    make = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
    policy = JaxPolicy(follow, {"choice": np.int32(0)})
    options = {"frames_per_batch": 6, "track_policy_version": True, "record_for_resume": True}
    collector = built(cls, [make] * 2, policy, **options)

    collector.next()
    collector.update_policy_weights_({"choice": np.int32(1)})
    old = {0, 1} if cls is MultiaSyncDataCollector else set()
    while old:  # one batch of each may have been begun before
        batch = collector.next()
        if (batch["policy_version"] == 1).all():
            old.discard(int(batch[IDS][0]) % 2)
    newest = collector.next()
    other = built(cls, [make] * 2, policy, **options)
    other.load_state_dict(collector.state_dict())

    for batch in (newest, *(other.next() for _ in range(3))):
        assert batch["action"].all() and (batch["policy_version"] == 1).all()


def test_weights_are_updated_at_each_batch_where_that_is_asked_for(built):
    policy = Says(0)
    collector = built(
        MultiSyncDataCollector, [one] * 2, policy, frames_per_batch=4, update_at_each_batch=True
    )
    collector.next()
    policy.say(1)

    assert collector.next()["action"].unique().tolist() == [1]


def test_asynchronous_workers_act_with_the_newest_weights_of_their_order(built):
    policy = Says(0)
    collector = built(
        MultiaSyncDataCollector, [one] * 2, policy, frames_per_batch=4, track_policy_version=True
    )
    for value in range(1, 8):
        batch = collector.next()
        acted = batch["action"].unique().tolist()
        assert acted == batch["policy_version"].unique().tolist()
        policy.say(value)
        collector.update_policy_weights_()

    assert batch["policy_version"].min() > 0


def test_the_next_batch_is_made_while_the_caller_trains(built):
    policy = Says(0)
    collector = built(
        MultiSyncDataCollector,
        [one] * 2,
        policy,
        frames_per_batch=4,
        prefetch=1,
        track_policy_version=True,
        total_frames=12,
    )
    versions = []
    for batch in collector:
        versions.append(batch["policy_version"].unique().tolist())
        collector.update_policy_weights_()

    assert versions == [[0], [0], [1]]


def test_no_step_is_made_between_batches(built):
    collector = built(MultiSyncDataCollector, [one] * 2, frames_per_batch=8)
    collector.next()

    found = collector.stats(workers="both")
    assert [found["worker_0/frames"], found["worker_1/frames"], found["frames"]] == [4, 4, 8]
    assert found["workers"] == found["workers_alive"] == 2
    assert not collector._worker_pool.jobs


def test_a_policy_is_made_where_it_acts(built):
    collector = built(
        MultiSyncDataCollector,
        [one] * 2,
        policy_factory=[lambda: Says(1), lambda: Says(2)],
        frames_per_batch=4,
    )

    assert collector.next()["action"].flatten(1).tolist() == [[1, 1], [2, 2]]
    with pytest.raises(ArgumentTypeError, match=r"no weights here.*policy_weights="):
        collector.update_policy_weights_()
    collector.update_policy_weights_(Says(4))
    assert collector.next()["action"].unique().tolist() == [4]


def test_random_frames_come_first(built):
    collector = built(
        MultiSyncDataCollector, [one] * 2, Says(7), frames_per_batch=4, init_random_frames=6
    )

    played = [collector.next()["action"].max().item() for _ in range(3)]

    assert max(played[:2]) <= 1 and played[2] == 7


def test_whole_episodes_come_from_all_workers(built):
    collector = built(
        MultiSyncDataCollector, [two, lambda: SerialEnv(2, lambda: Count(3))], trajs_per_batch=3
    )

    seen = []
    for _ in range(8):
        batch = collector.next()
        assert batch.batch_size[0] == 3
        for episode, mask in zip(batch, batch["collector", "mask"], strict=True):
            steps = int(mask.sum())
            assert steps in (3, 5)
            assert episode["count"][:steps].flatten().tolist() == list(range(steps))
            seen.append(int(episode[IDS][0]))
    assert len(set(seen)) == 24


def test_a_reset_by_worker_begins_new_trajectories_there_alone(built):
    collector = built(MultiSyncDataCollector, [one] * 2, frames_per_batch=6)
    collector.next()

    collector.reset([False, True])
    batch = collector.next()

    assert batch["count"].squeeze(-1).tolist() == [[3, 4, 0], [0, 1, 2]]
    assert batch[IDS].tolist() == [[0, 0, 2], [3, 3, 3]]


def test_workers_that_have_not_finished_stop_where_they_are(built):
    collector = built(
        MultiSyncDataCollector,
        [lambda: Slow(0.0), lambda: Slow(0.2)],
        frames_per_batch=12,
        preemptive_threshold=0.5,
    )

    batch = collector.next()

    mask = batch["collector", "mask"]
    assert batch.batch_size == (2, 6) and mask[0].all() and 1 <= mask[1].sum() < 6
    assert (batch[IDS][~mask] == -1).all() and (batch[IDS][mask] >= 0).all()
    assert collector.frames == mask.sum()
    made = int(mask[1].sum())
    assert batch["count"][1].flatten().tolist() == [*range(made), *[0] * (6 - made)]
    assert collector.next()["count"][1, 0] == made


def test_frames_that_were_not_made_do_not_count_as_random_ones(built):
    collector = built(
        MultiSyncDataCollector,
        [lambda: Slow(0.0), lambda: Slow(0.2)],
        still,
        frames_per_batch=12,
        preemptive_threshold=0.5,
        init_random_frames=12,
        cat_results=-1,
    )

    first, second, third = (collector.next()["collector", "random_action"] for _ in range(3))

    assert len(first) < 12 and first.all() and second.all() and not third.any()


def test_frames_of_stopped_workers_are_cut_out_along_time(built):
    collector = built(
        MultiSyncDataCollector,
        [lambda: Slow(0.0), lambda: Slow(0.2)],
        frames_per_batch=12,
        preemptive_threshold=0.5,
        cat_results=-1,
    )

    batch = collector.next()

    assert 7 <= len(batch) < 12 and (batch[IDS] >= 0).all()
    assert collector.frames == len(batch)


def test_policies_that_draw_follow_the_seed_of_the_collector(built):
    def draws(td):
        return td.set("action", torch.randint(2, (*td.batch_size, 1)))

    def run(seed):
        collector = built(MultiSyncDataCollector, [one] * 2, draws, frames_per_batch=20)
        collector.set_seed(seed)
        return collector.next()["action"].flatten().tolist()

    first, again, other = run(1), run(1), run(2)

    assert first == again != other
    assert first[:10] != first[10:]


def test_data_of_no_fixed_form_crosses_as_it_is(built):
    collector = built(MultiSyncDataCollector, [one] * 2, frames_per_batch=4, use_buffers=False)

    collector.next()

    assert collector.next()["count"].squeeze(-1).tolist() == [[2, 3], [2, 3]]
    assert not collector._worker_pool.packings


@pytest.mark.parametrize("cls", [MultiSyncDataCollector, MultiaSyncDataCollector])
@pytest.mark.parametrize("device", ["meta", "cpu", None])
def test_all_batches_of_workers_are_delivered_where_they_are_wanted(built, cls, device):
    collector = built(cls, [one] * 2, frames_per_batch=4, storing_device=device)

    batches = [collector.next() for _ in range(3)]

    where = None if device is None else torch.device(device)
    assert [td.device for td in batches] == [where] * 3
    assert all(td["count"].is_meta == (device == "meta") for td in batches)


def test_batches_stay_as_they_are_while_workers_go_on(built):
    collector = built(MultiaSyncDataCollector, [one] * 2, frames_per_batch=5)
    batches = [collector.next() for _ in range(6)]
    kept = [batch.clone() for batch in batches]
    for _ in range(4):
        collector.next()

    for batch, before in zip(batches, kept, strict=True):
        assert_same(batch, before)


def test_the_front_door_gives_the_class_that_fits(built):
    kinds = {True: MultiSyncDataCollector, False: MultiaSyncDataCollector}
    for sync, kind in kinds.items():
        collector = built(
            Collector, one, backend="process", num_collectors=2, sync=sync, frames_per_batch=4
        )
        assert type(collector) is kind and isinstance(collector, Collector)
        assert len(collector.worker_pids) == 2
    assert MultiSyncCollector is MultiSyncDataCollector
    assert MultiAsyncCollector is MultiaSyncDataCollector


def test_one_worker_gives_what_a_collector_here_gives(built):
    there = built(MultiSyncDataCollector, [lambda: Chaos(3)], still, frames_per_batch=5)
    here = built(SyncDataCollector, lambda: Chaos(3), still, frames_per_batch=5)
    there.set_seed(3)
    here.set_seed(3)

    for _ in range(3):
        assert_same(there.next()[0], here.next())


class Uniform(torch.nn.Module):
    """Tells the smallest and the largest of many weights."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(50_000))
        self.last = torch.nn.Parameter(torch.zeros(50_000))

    def forward(self, count):
        ends = torch.stack([*self.first.aminmax(), *self.last.aminmax()])
        return torch.zeros_like(count), ends.expand(*count.shape[:-1], 4)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_worker_ever_acts_with_half_an_update(built):
    policy = Uniform()
    collector = built(
        MultiaSyncDataCollector,
        [one] * 2,
        TensorDictModule(policy, ["count"], ["action", "ends"]),
        frames_per_batch=2,
        track_policy_version=True,
    )
    seen = set()
    for update in range(1, 10_001):
        with torch.no_grad():
            policy.first.fill_(update)
            policy.last.fill_(update)
        collector.update_policy_weights_()
        if update % 4 == 0:
            batch = collector.next()
            version = batch["policy_version"].unsqueeze(-1)
            assert (batch["ends"] == version).all()
            seen.add(int(version[0]))

    assert len(seen) > 2000


def test_a_collector_with_workers_is_not_copied(built):
    collector = built(MultiSyncDataCollector, [one], still, frames_per_batch=4)

    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CopyError, match=r"its workers belong to it alone. Build another one"):
            copied(collector)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_threads_get_no_batch_in_part_and_none_twice(built, cls):
    collector = built(cls, [one] * 2, still, frames_per_batch=8)
    batches: list = []
    refused = []

    def collect():
        for _ in range(30):
            try:
                batches.append(collector.next())
            except BusyError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=collect) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(batches) + len(refused) == 60 and collector.iter == len(batches)
    rows = torch.cat([batch.reshape(-1) for batch in batches])
    pairs = list(zip(rows[IDS].tolist(), rows["count"].flatten().tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_another_thread_may_update_weights_or_shut_down_while_a_batch_is_waited_for(built, cls):
    policy = Says()
    collector = built(
        cls, [lambda: Slow(0.01)] * 2, policy, frames_per_batch=4, track_policy_version=True
    )
    began, ended, batches = threading.Event(), [], []

    def collect():
        try:
            while True:
                batches.append(collector.next())
                began.set()
        except ClosedEnvError as error:
            ended.append(str(error))

    thread = threading.Thread(target=collect)
    thread.start()
    assert began.wait(60)
    for version in range(1, 21):
        policy.say(version)
        collector.update_policy_weights_()
    collector.shutdown()
    thread.join()

    assert ended == [f"this {cls.__name__} was shut down. Build a new one."]
    for batch in batches:
        assert torch.equal(batch["action"].flatten(), batch["policy_version"].flatten())


@pytest.mark.parametrize("cls", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_whatever_a_shutdown_causes_is_reported_as_the_shutdown(built, cls):
    def shut_down():
        collector.shutdown()
        raise ClosedEnvError("this pool of workers is closed; start a new one.")

    collector = built(cls, [Count], frames_per_batch=4, pre_collect_hook=shut_down)

    with pytest.raises(
        ClosedEnvError, match=rf"this {cls.__name__} was shut down. Build a new one"
    ):
        collector.next()
