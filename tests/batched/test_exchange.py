"""What the exchanges decide before any data travels: how many moments lie in memory, who may wait."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule

from envkit.batched.async_pool import AsyncEnvPool
from envkit.batched.exchange import memory
from envkit.batched.exchange.memory import BufferPlan, can_wait
from envkit.batched.serial import SerialEnv
from envkit.specs import Categorical, Composite, Unbounded
from envkit_bridges.gym.gym_env import GymEnv
from tests.bridges.compare import assert_same
from tests.zoo.envs import Count


class Leaves:
    """An env that acts by one float and observes ``size`` of them."""

    batch_size = torch.Size([])

    def __init__(self, size: int):
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        self.kinds = {
            "observation": {("seen",): Unbounded((size,))},
            "reward": {("reward",): Unbounded((1,))},
            "done": {("team", "done"): flag},
            "action": {("action",): Unbounded((1,))},
            "state": {},
        }

    def paths(self, *kinds):
        return {path: leaf for kind in kinds for path, leaf in self.kinds[kind].items()}


def moment_bytes(size: int, rows: int) -> int:
    return rows * (4 + (4 * size + 1) + (4 * size + 1 + 4))  # in, root, next


@pytest.mark.parametrize(("size", "rows"), [(10_000, 3), (100_000, 2), (200_000, 1)])
def test_as_many_moments_lie_side_by_side_as_fit_four_mebibytes(size, rows):
    plan = BufferPlan.of(Leaves(size), rows)

    room = 4 * 2**20
    assert plan.num_slots * moment_bytes(size, rows) <= room
    assert (plan.num_slots + 1) * moment_bytes(size, rows) > room


@pytest.mark.parametrize(("size", "rows", "slots"), [(1, 1, 64), (0, 1, 64), (500_000, 8, 2)])
def test_there_are_64_moments_at_most_and_two_at_least(size, rows, slots):
    assert BufferPlan.of(Leaves(size), rows).num_slots == slots


def test_a_root_has_one_moment_more_and_masks_stand_beside_the_flags():
    regions = BufferPlan.of(Leaves(1), 1).regions

    assert regions["root"]["seen",].shape == regions["next"]["seen",].shape == (1,)
    assert regions["root"]["seen",].slots == 65 and regions["next"]["seen",].slots == 64
    assert regions["mask"].keys() == {("_step",), ("team", "_reset")}


def test_a_plan_is_a_value_that_nobody_can_change():
    plan = BufferPlan.of(Leaves(1), 1)

    with pytest.raises(FrozenInstanceError):
        plan.num_slots = 3
    with pytest.raises(FrozenInstanceError):
        plan.regions["in"]["action",].name = "other"


@pytest.mark.parametrize(
    ("device", "non_blocking", "waits"),
    [
        (None, True, False),
        ("cpu", True, False),
        ("meta", True, False),
        ("cuda", True, True),
        ("cuda", False, False),
    ],
)
def test_only_copies_to_cuda_may_end_after_the_call(device, non_blocking, waits):
    device = None if device is None else torch.device(device)

    assert can_wait(device, non_blocking) is waits


class Halving(Count):
    """Takes actions of a dtype that NumPy lacks, and shows the last one."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(last=Unbounded((1,), dtype=torch.bfloat16))
        self.action_spec = Unbounded((1,), dtype=torch.bfloat16)
        self.last = torch.zeros(1, dtype=torch.bfloat16)

    def _out(self):
        return super()._out().exclude("count").set("last", self.last.clone())

    def _step(self, td):
        self.last = td["action"].clone()
        return super()._step(td)


@pytest.mark.parametrize("policy", [lambda last: last + 0.5, lambda last: (last + 0.5).float()])
def test_actions_of_a_dtype_that_numpy_lacks_reach_the_sub_envs(policy):
    env = SerialEnv(2, Halving, use_buffers=True)

    data = env.rollout(3, policy, break_when_any_done=False)

    assert data["next", "last"].dtype == torch.bfloat16
    assert data["next", "last"][0, :, 0].tolist() == [0.5, 1.0, 1.5]
    env.close()


def test_an_asynchronous_pool_moves_rows_of_a_dtype_that_numpy_lacks():
    env = AsyncEnvPool([Halving] * 3, backend="threading", use_buffers=True)
    actions = torch.tensor([[0.5], [1.0], [1.5]], dtype=torch.bfloat16)
    root = env.reset().set("action", actions)

    env.async_step_send(root[[2, 0]])
    stepped = env.async_step_recv(min_get=2)

    assert list(stepped["env_index"]) == [0, 2]
    assert torch.equal(stepped["next", "last"], actions[[0, 2]])
    env.close()


class Ahead(torch.nn.Module):
    """A policy that needs no TensorDict: rollouts with it are recorded in another way than random ones."""

    def forward(self, observation):
        return (observation[..., 2] > 0).long()


AHEAD = TensorDictModule(Ahead(), in_keys=["observation"], out_keys=["action"])
POLICIES = {
    "random": None,
    "on leaves": AHEAD,
    "on tensordicts": lambda td: AHEAD(td).set("mine", td["observation"] * 2),
}


@pytest.mark.parametrize("steps", [1, 4, 23])
@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_rollout_leaves_in_slots_is_copied_before_they_are_written_again(
    policy, slots, steps, monkeypatch
):
    make = partial(GymEnv, "CartPole-v1", max_episode_steps=6, categorical_action_encoding=True)
    act = POLICIES[policy]
    monkeypatch.setattr(memory, "_MOST_SLOTS", slots)
    few = SerialEnv(2, make)
    few.set_seed(0)
    data = few.rollout(steps, act, break_when_any_done=False)
    monkeypatch.undo()

    many = SerialEnv(2, make)
    many.set_seed(0)
    td, stepped = many.reset(), []
    for action in data["action"].unbind(1):
        one, td = many.step_and_maybe_reset(td.set("action", action.clone()))
        stepped.append(one)

    assert few._exchange.num_slots == slots
    assert_same(data.exclude("mine"), torch.stack(stepped, 1))
    assert steps < 23 or data["next", "done"].any()


@pytest.mark.parametrize("masked", [False, True])
def test_steps_of_large_rows_reset_what_is_done_as_those_of_small_ones(masked, monkeypatch):
    make = partial(GymEnv, "CartPole-v1", max_episode_steps=6)
    runs = []
    for slots in (64, 2):
        monkeypatch.setattr(memory, "_MOST_SLOTS", slots)
        env = SerialEnv(2, make)
        env.set_seed(0)
        td, seen = env.reset(), []
        for step in range(16):
            td = env.rand_action(td)
            if masked:
                td["_step"] = torch.tensor([True, step % 3 > 0])
            data, td = env.step_and_maybe_reset(td)
            seen += [data.clone(), td.clone()]
        runs.append(seen)

    assert any(data["next", "done"].any() for data in runs[0][::2])
    for small, large in zip(*runs, strict=True):
        assert_same(small, large)
