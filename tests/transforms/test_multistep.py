"""Returns over several steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler
from torchrl.objectives.value import TD0Estimator
from torchrl.objectives.value.functional import generalized_advantage_estimate

from envkit import MultiStep, MultiStepTransform, for_replay_buffer, split_trajectories


def recorded(rewards: torch.Tensor, done: torch.Tensor) -> TensorDict:
    """Data of batch size [B, T] whose observation is the time."""
    rows, time = rewards.shape
    observation = torch.arange(time).float().expand(rows, time)[..., None]
    following = TensorDict(
        {"observation": observation + 1, "reward": rewards[..., None], "done": done[..., None]},
        [rows, time],
    )
    data = {"observation": observation, "next": following}
    return TensorDict(data, [rows, time], names=[None, "time"])


def ends(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def test_the_worked_example():
    data = recorded(torch.ones(1, 6), ends([0, 0, 0, 1, 0, 0]))

    out = MultiStep(0.5, 3)(data)

    assert out["next", "reward"].flatten().tolist() == [1.75, 1.75, 1.5, 1, 1.5, 1]
    assert out["steps_to_next_obs"].tolist() == [[3, 3, 2, 1, 2, 1]]
    assert out["next", "observation"].flatten().tolist() == [3, 4, 4, 4, 6, 6]
    assert out["gamma"].tolist() == [[0.125, 0.125, 0.25, 0.5, 0.25, 0.5]]
    assert out["nonterminal"].tolist() == [[True, True, True, False, True, False]]
    assert out["next", "done"].equal(data["next", "done"])
    assert out["next", "original_reward"].equal(data["next", "reward"])
    assert data["next", "reward"].eq(1).all() and "gamma" not in data.keys()


def test_padding_is_in_no_window():
    data = recorded(torch.ones(1, 5), ends([0, 0, 0, 0, 0]))
    data["mask"] = torch.tensor([[True, True, True, False, False]])

    out = MultiStep(1.0, 4)(data)

    assert out["steps_to_next_obs"][0, :3].tolist() == [3, 2, 1]
    assert out["nonterminal"].tolist() == [[True, True, False, False, False]]


def test_data_of_one_env_needs_no_batch_axis():
    data = recorded(torch.ones(1, 4), ends([0, 0, 0, 0]))[0]

    assert MultiStep(0.5, 2)(data)["next", "reward"].flatten().tolist() == [1.5, 1.5, 1.5, 1]


@pytest.mark.parametrize(("gamma", "n"), [(0.5, 0), (0.0, 1), (1.1, 1)])
def test_wrong_windows_and_discounts_are_refused(gamma, n):
    with pytest.raises(ValueError, match="must"):
        MultiStep(gamma, n)


@given(st.data(), st.integers(1, 3), st.integers(1, 7), st.integers(1, 9))
def test_every_window_adds_up_what_the_definition_says(draw, rows, time, n_steps):
    flags = st.lists(st.booleans(), min_size=time, max_size=time)
    done = ends(*(draw.draw(flags) for _ in range(rows)))
    rewards = torch.arange(rows * time).reshape(rows, time).double()

    out = MultiStep(0.5, n_steps)(recorded(rewards, done))

    for row in range(rows):
        for start in range(time):
            k = 1
            while k < n_steps and start + k < time and not done[row, start + k - 1]:
                k += 1
            expected = sum(0.5**i * rewards[row, start + i] for i in range(k))
            assert out["steps_to_next_obs"][row, start] == k
            assert out["next", "reward"][row, start, 0] == expected
            assert out["next", "observation"][row, start, 0] == start + k


def episodes() -> TensorDict:
    """Ten steps of one env: an episode that terminates after four, one that is truncated after three, and three more."""
    data = recorded(torch.ones(1, 10), ends([0, 0, 0, 1, 0, 0, 1, 0, 0, 0]))[0]
    following = data["next"]
    following["terminated"], following["truncated"] = torch.zeros(2, 10, 1, dtype=torch.bool)
    following["terminated"][3] = following["truncated"][6] = True
    data["collector"] = TensorDict({"traj_ids": torch.tensor([0] * 4 + [1] * 3 + [2] * 3)}, [10])
    return data


def targets(data: TensorDict, gamma: float, value: float) -> list[float]:
    """What TorchRL's estimator says that a state is worth, with a critic that says ``value`` of every state."""
    critic = TensorDictModule(lambda x: torch.full_like(x, value), ["observation"], ["state_value"])
    estimator = TD0Estimator(gamma=gamma, value_network=critic)
    return estimator.value_estimate(data).flatten().tolist()


@pytest.mark.parametrize("flags", [["done", "terminated", "truncated"], ["done", "truncated"]])
def test_no_target_takes_the_value_of_a_state_after_the_end(flags):
    data = episodes()
    data["next"] = data["next"].select("observation", "reward", *flags)

    out = MultiStep(1.0, 3)(data)

    # The windows of steps 1 to 3 reach the terminal state; those of steps 4 to 6 a state that has a value.
    assert targets(out, 1.0, 100.0) == [103, 3, 2, 1, 103, 102, 101, 103, 102, 101]
    assert out["next", "terminated"].flatten().tolist() == [False, True, True, True] + [False] * 6


def test_without_flags_of_its_own_done_is_terminal():
    data = episodes()
    data["next"] = data["next"].select("observation", "reward", "done")

    out = MultiStep(1.0, 3)(data)

    assert targets(out, 1.0, 100.0)[:7] == [103, 3, 2, 1, 3, 2, 1]


def test_targets_as_torchrl_has_them_where_the_flags_are_named():
    out = MultiStep(1.0, 3, done_keys=["done", "terminated", "truncated"])(episodes())

    assert out["next", "terminated"].equal(episodes()["next", "terminated"])
    assert targets(out, 1.0, 100.0)[:4] == [103, 103, 102, 1]


def test_agents_have_ends_of_their_own_level():
    data = episodes()
    following = data["next"]
    data["next"] = TensorDict(
        {"agents": following.copy(), "observation": following["observation"]}, [10]
    )

    out = MultiStep(1.0, 3, reward_keys=[("agents", "reward")], done_key=("agents", "done"))(data)

    assert (
        out["next", "agents", "terminated"].flatten().tolist()
        == [False, True, True, True] + [False] * 6
    )
    assert out["next", "agents", "done"].equal(following["done"])


def test_episodes_are_still_cut_where_they_end():
    plain, out = episodes(), MultiStep(1.0, 3)(episodes())

    for data in (plain, out, out.exclude("collector")):
        cut = split_trajectories(data)
        assert cut.shape == (3, 4)
        mask = cut.get("mask", cut.get(("collector", "mask"), None))
        assert mask.sum(-1).tolist() == [4, 3, 3]

    for sampler in (
        SliceSampler(slice_len=2, traj_key=("collector", "traj_ids")),
        SliceSampler(slice_len=2, end_key=("next", "done")),
    ):
        buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=2)
        buffer.extend(out)
        for _ in range(30):
            pair = buffer.sample()["observation"].flatten().tolist()
            assert pair[1] == pair[0] + 1 and pair[0] not in (3, 6)

    nothing = torch.zeros(10, 1)
    advantage = generalized_advantage_estimate(
        1.0,
        1.0,
        nothing,
        nothing,
        out["next", "reward"],
        out["next", "done"],
        out["next", "terminated"],
    )[0]
    first = generalized_advantage_estimate(
        1.0,
        1.0,
        nothing[:4],
        nothing[:4],
        out[:4]["next", "reward"],
        out[:4]["next", "done"],
        out[:4]["next", "terminated"],
    )[0]
    assert advantage[:4].equal(first)


def test_a_buffer_that_writes_across_ends_gives_the_same_targets():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=1)
    buffer.append_transform(for_replay_buffer(MultiStepTransform(3, 1.0)))
    for piece in episodes().split(2):
        buffer.extend(piece)

    assert targets(buffer.storage[:], 1.0, 100.0) == [103, 3, 2, 1, 103, 102, 101]


@pytest.mark.parametrize("axes", [(), (1,), (2, 1)])
def test_flags_of_any_axes_end_a_window(axes):
    def written(shape):
        done = torch.tensor([False, False, True, False, False, False])
        done = done.reshape(6, *(1,) * len(shape)).expand(6, *shape).clone()
        reward = torch.arange(1.0, 7.0)
        following = {"reward": reward.reshape(6, *(1,) * len(shape)).expand(6, *shape).clone()}
        return TensorDict({"next": {**following, "done": done}}, [6], names=["time"])

    windows = MultiStepTransform(3, 1.0).inv(written(axes))["next", "reward"]

    assert windows.shape == (3, *axes)
    assert windows.reshape(3, -1)[:, 0].tolist() == [6.0, 5.0, 3.0]
