"""Batches go into replay buffers, TorchRL's or plain ones, and through what is done to them on the way."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler, TensorDictReplayBuffer

from envkit import (
    Collector,
    Compose,
    GymEnv,
    GymnaxEnv,
    JaxEnv,
    MultiStep,
    MultiSyncDataCollector,
    PendulumEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TransformedEnv,
    compile_policy,
)
from tests.collectors.test_resume import Saved
from tests.collectors.test_workers import still, two
from tests.zoo.envs import Count
from tests.zoo.jax_drift import jax_rows

IDS = ("collector", "traj_ids")


def counted() -> TransformedEnv:
    return TransformedEnv(two(), Compose(StepCounter(), RewardSum()))


def cart_poles() -> SerialEnv:
    return SerialEnv(2, lambda: GymEnv("CartPole-v1", max_episode_steps=7))


def push_right(observation: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, 1]).expand(*observation.shape[:-1], 2)


WAYS = {
    "a function of TensorDicts": (two, still, {}),
    "a function of observations": (cart_poles, push_right, {}),
    "random actions": (cart_poles, None, {}),
    "no shared rows": (lambda: SerialEnv(2, lambda: Count(5), use_buffers=False), still, {}),
    "transforms": (counted, still, {"max_frames_per_traj": 3}),
    "versions and limits": (
        cart_poles,
        push_right,
        {"track_policy_version": True, "set_truncated": True},
    ),
    "stored elsewhere": (two, None, {"storing_device": "cpu"}),
    "whole episodes": (two, still, {"trajs_per_batch": 2}),
    "a program": (jax_rows, None, {"return_contiguous": True}),
    "workers, stacked": ([two, two], still, {"backend": "process"}),
    "workers, along the batch": ([two, two], still, {"backend": "process", "cat_results": 0}),
    "workers, along time": ([two, two], still, {"backend": "process", "cat_results": -1}),
}


@pytest.mark.parametrize(("create", "policy", "options"), WAYS.values(), ids=WAYS)
def test_all_entries_of_a_batch_lie_in_contiguous_memory(create, policy, options):
    size = {} if "trajs_per_batch" in options else {"frames_per_batch": 24}
    collector = Collector(create, policy, total_frames=48, **size, **options)
    try:
        for batch in collector:
            leaves = batch.items(True, True)
            assert [key for key, leaf in leaves if not leaf.is_contiguous()] == []
            assert batch.view(-1).numel() == batch.numel()
    finally:
        collector.shutdown()


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_torchrls_buffers_hold_what_was_collected(kind):
    buffer = kind(storage=LazyTensorStorage(100), batch_size=4)
    wanted = list(SyncDataCollector(lambda: Count(5), still, frames_per_batch=6, total_frames=18))
    collector = SyncDataCollector(
        lambda: Count(5), still, frames_per_batch=6, total_frames=18, replay_buffer=buffer
    )

    assert list(collector) == [None] * 3

    assert len(buffer) == 18 and collector.frames == 18
    held = buffer.storage[:18]
    assert torch.equal(held["count"], torch.cat(wanted)["count"])
    assert torch.equal(held[IDS], torch.cat(wanted)[IDS])


def test_a_storage_of_rows_and_time_holds_batches_of_both():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), batch_size=4)
    collector = SyncDataCollector(two, still, frames_per_batch=8, replay_buffer=buffer)

    for _ in range(3):
        collector.next()

    assert len(buffer) == 24
    assert buffer.storage[:12]["count"].squeeze(-1)[:, 0].tolist() == [*range(5), *range(5), 0, 1]


def test_a_buffer_whose_transforms_add_entries_is_filled_on():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    buffer.append_transform(lambda td: td.set("more", td["count"]))
    make = {"frames_per_batch": 4, "total_frames": 8, "replay_buffer": buffer}

    for _ in range(2):
        list(SyncDataCollector(lambda: Count(5), still, **make))

    assert len(buffer) == 16 and "more" in buffer.sample().keys()


def test_single_steps_go_into_what_has_add():
    class Plain:
        def __init__(self):
            self.steps = []

        def add(self, step):
            self.steps.append(step)

    buffer = Plain()
    collector = SyncDataCollector(
        two, still, frames_per_batch=6, replay_buffer=buffer, replay_buffer_chunk=False
    )

    assert collector.next() is None

    assert [step["count"].flatten().tolist() for step in buffer.steps] == [[0, 0], [1, 1], [2, 2]]


def test_what_has_extend_alone_is_a_buffer():
    class Plain:
        rows = 0

        def extend(self, batch):
            self.rows += batch.numel()

    buffer = Plain()
    collector = SyncDataCollector(two, still, frames_per_batch=6, replay_buffer=buffer)

    collector.next()
    collector.next()

    assert buffer.rows == 12


def test_a_batch_that_a_buffer_refuses_is_delivered_again():
    class Full(list):
        refusals = 1

        def extend(self, batch):
            if self.refusals:
                self.refusals -= 1
                raise MemoryError("full")
            super().extend(batch)

    buffer = Full()
    collector = SyncDataCollector(lambda: Count(9), still, frames_per_batch=3, replay_buffer=buffer)
    with pytest.raises(MemoryError, match="full"):
        collector.next()
    assert collector.frames == 0

    collector.next()

    assert [step["count"].item() for step in buffer] == [0, 1, 2] and collector.frames == 3


def test_slices_of_a_buffer_stay_within_a_trajectory():
    sampler = SliceSampler(slice_len=3, traj_key=IDS)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=12)
    list(
        Collector(
            two, still, frames_per_batch=10, total_frames=60, replay_buffer=buffer, postproc=rows
        )
    )

    slices = buffer.sample().reshape(4, 3)

    assert (slices[IDS] == slices[IDS][:, :1]).all()
    assert (slices["count"].squeeze(-1).diff(dim=1) == 1).all()


def rows(batch):
    return batch.reshape(-1)


def test_returns_over_several_steps_are_made_of_each_batch():
    collector = SyncDataCollector(
        two, still, frames_per_batch=10, postproc=MultiStep(gamma=0.5, n_steps=2)
    )

    batch = collector.next()

    assert batch["next", "reward"].squeeze(-1)[0].tolist() == [1.5, 1.5, 1.5, 1.5, 1.0]
    assert batch["steps_to_next_obs"].squeeze(-1)[0].tolist() == [2, 2, 2, 2, 1]


def test_a_transform_can_be_a_last_step():
    collector = SyncDataCollector(
        two, still, frames_per_batch=10, split_trajs=True, postproc=RewardSum()
    )

    batch = collector.next()

    assert batch["next", "episode_reward"].squeeze(-1)[0].tolist() == [1, 2, 3, 4, 5]


def test_a_step_that_a_buffer_refuses_has_no_other_put_in_twice():
    class Full(list):
        refusals = 1

        def add(self, step):
            if len(self) == 2 and self.refusals:
                self.refusals -= 1
                raise MemoryError("full")
            self.append(step["count"].item())

    buffer = Full()
    collector = SyncDataCollector(
        partial(Saved, 9),
        still,
        frames_per_batch=3,
        replay_buffer=buffer,
        replay_buffer_chunk=False,
    )
    with pytest.raises(MemoryError, match="full"):
        collector.next()
    state = collector.state_dict()
    resumed = SyncDataCollector(
        partial(Saved, 9),
        still,
        frames_per_batch=3,
        replay_buffer=buffer,
        replay_buffer_chunk=False,
    )
    resumed.load_state_dict(state)

    resumed.next()
    resumed.next()

    assert buffer == [0, 1, 2, 3, 4, 5]


# ------------------------------------------------------------------------ transitions, and no padding


@pytest.mark.parametrize("options", [{}, {"cat_results": "stack"}])
def test_workers_put_transitions_into_a_buffer_and_no_rows_of_workers(options):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    make = {"frames_per_batch": 16, "total_frames": 32, **options}

    with MultiSyncDataCollector(
        [partial(Count, 5)] * 2, still, replay_buffer=buffer, **make
    ) as collector:
        list(collector)

    assert len(buffer) == 32
    assert buffer.sample().batch_size == (4,)
    held = buffer.storage[:32]
    for start in range(0, 32, 8):  # each worker's steps stay together
        assert len(set((held[IDS][start : start + 8] % 2).flatten().tolist())) == 1


def test_whole_episodes_go_into_a_buffer_without_padding():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(200),
        sampler=SliceSampler(num_slices=2, traj_key=IDS),
        batch_size=4,
    )
    lengths = [partial(Count, 3), partial(Count, 5)]
    collector = SyncDataCollector(
        lambda: SerialEnv(2, lengths),
        still,
        trajs_per_batch=2,
        total_frames=24,
        replay_buffer=buffer,
    )

    list(collector)

    assert len(buffer) == collector.frames >= 24
    assert buffer.storage[: len(buffer)].batch_size == (len(buffer),)
    assert buffer.sample().batch_size == (4,)


def test_frames_per_batch_beside_trajs_per_batch_says_how_many_steps_are_made_at_once():
    collector = SyncDataCollector(
        lambda: Count(5), still, frames_per_batch=3, trajs_per_batch=2, total_frames=20
    )

    batches = list(collector)

    assert [tuple(batch.shape) for batch in batches] == [(2, 5)] * 2
    assert collector.frames_per_batch == collector.requested_frames_per_batch == 3


@pytest.mark.parametrize("layout", ["padded", "cat"])
def test_episodes_that_begin_with_random_actions_go_on_with_those_of_a_policy(layout):
    """What the policy writes beside its action is zero in the random ones, and a mask says where."""
    env = Count(8)

    def telling(td):
        return td.update({**still(td.copy()).select(*env.action_keys), "value": td["count"] + 1.0})

    collector = SyncDataCollector(
        lambda: Count(8),
        telling,
        frames_per_batch=5,
        init_random_frames=5,
        trajs_per_batch=1,
        total_frames=16,
        traj_format=layout,
    )

    first, second = (batch.reshape(-1) for batch in collector)

    random = first["collector", "random_action"]
    assert random.tolist() == [True] * 5 + [False] * 3
    assert torch.equal(first["value"].squeeze(-1) != 0, ~random)
    assert not second["collector", "random_action"].any() and (second["value"] != 0).all()


def telling(td):
    """A policy that also writes down what it thinks of the state."""
    return td.update({**still(td.copy()).select("action"), "value": td["count"] + 1.0})


@pytest.mark.parametrize("layout", ["padded", "cat"])
def test_later_batches_hold_episodes_that_began_randomly_beside_others(layout):
    """Two rows begin randomly, and the second batch holds what is left of them and an episode without random actions."""
    collector = SyncDataCollector(
        lambda: SerialEnv(2, [lambda: Count(4), lambda: Count(14)]),
        telling,
        frames_per_batch=4,
        init_random_frames=4,
        trajs_per_batch=3,
        total_frames=60,
        traj_format=layout,
    )

    batch = collector.next()

    steps = batch if layout == "cat" else batch[batch["collector", "mask"]]
    assert torch.equal(steps["value"].squeeze(-1) != 0, ~steps["collector", "random_action"])
    assert steps["collector", "random_action"].sum() == 2
    later = collector.next()
    later = later if layout == "cat" else later[later["collector", "mask"]]
    assert later["collector", "random_action"].sum() == 2
    assert torch.equal(later["value"].squeeze(-1) != 0, ~later["collector", "random_action"])


@pytest.mark.parametrize(("at_once", "random"), [({}, 64), ({"frames_per_batch": 2}, 12)])
def test_random_frames_are_rounded_up_to_what_is_made_at_once(at_once, random):
    collector = SyncDataCollector(
        lambda: SerialEnv(2, lambda: Count(40)),
        telling,
        init_random_frames=12,
        trajs_per_batch=2,
        **at_once,
    )

    episodes = collector.next()

    assert episodes["collector", "random_action"].sum() == random


@pytest.mark.parametrize("amount", [{"trajs_per_batch": 2}, {"frames_per_batch": 5}])
def test_a_buffer_that_began_with_random_actions_holds_all_that_the_policy_writes(amount):
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=4)
    collector = SyncDataCollector(
        lambda: Count(8), telling, init_random_frames=5, replay_buffer=buffer, **amount
    )

    for _ in range(4):
        collector.next()

    held = buffer.storage[: len(buffer)]
    assert len(buffer) == collector.frames >= 20
    assert held["count"].flatten().tolist() == [step % 8 for step in range(len(buffer))]
    random = held["collector", "random_action"]
    assert random.sum() >= 5 and torch.equal(held["value"].squeeze(-1) != 0, ~random)


class Acts(torch.nn.Module):
    """Take the option of the highest score, and write two entries beside the action."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, observation):
        score = self.module(observation)
        best = score.argmax(-1)
        return torch.nn.functional.one_hot(best, score.shape[-1]), score + 100, best + 1


def scores() -> TensorDictModule:
    torch.manual_seed(0)
    written = ["action", "score", ("own", "option")]
    return TensorDictModule(Acts(torch.nn.Linear(4, 2)), ["observation"], written)


def carts() -> JaxEnv:
    return GymnaxEnv("CartPole-v1", batch_size=[2])


def gym_carts() -> SerialEnv:
    return SerialEnv(2, lambda: GymEnv("CartPole-v1"))


KINDS_OF_COLLECTORS = {
    "here": (gym_carts, lambda policy: policy, {}),
    "stepwise JAX": (carts, lambda policy: policy, {}),
    "a program": (carts, compile_policy, {}),
    "workers": (gym_carts, lambda policy: policy, {"num_collectors": 2, "cat_results": 0}),
    "asynchronous workers": (
        gym_carts,
        lambda policy: policy,
        {"num_collectors": 1, "sync": False},
    ),
}


@pytest.mark.parametrize("kind", KINDS_OF_COLLECTORS)
def test_random_batches_have_the_entries_of_later_ones(kind):
    make, acting, options = KINDS_OF_COLLECTORS[kind]
    policy = acting(scores())
    collector = Collector(
        make, policy, frames_per_batch=12, total_frames=36, init_random_frames=12, **options
    )

    random, *later = [batch.cpu() for batch in collector]
    collector.shutdown()

    assert random["collector", "random_action"].all()
    assert not random["score"].any() and not random["own", "option"].any()
    for batch in later:
        assert not batch["collector", "random_action"].any() and batch["own", "option"].all()
        assert set(batch.keys(True)) == set(random.keys(True)) and batch.names == random.names
        for key in batch.keys(True, True):
            assert batch[key].shape == random[key].shape and batch[key].dtype == random[key].dtype
        assert batch["own"].batch_size == random["own"].batch_size


def test_what_a_policy_writes_is_found_without_changing_what_it_draws():
    """The policy is called once more, and neither its draws nor its buffers follow from that."""

    class Draws(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, angle):
            self.calls += 1
            drawn = torch.rand(1)
            return drawn * 4 - 2, drawn

    def collected(**options):
        module = Draws()
        policy = TensorDictModule(module, ["th"], ["action", "drawn"])
        collector = Collector(PendulumEnv(), policy, frames_per_batch=6, seed=0, **options)
        batches = [collector.next() for _ in range(3)]
        return batches, int(module.calls)

    data, calls = collected(init_random_frames=6)

    assert calls == 12
    torch.manual_seed(0)
    env = PendulumEnv()
    env.set_seed(0)
    assert torch.equal(data[0]["action"], env.rollout(6)["action"])
