"""Returns over several steps. Checklist row T11."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from envkit import MultiStep


def recorded(rewards: torch.Tensor, done: torch.Tensor) -> TensorDict:
    """Data of batch size [B, T] whose observation is the time."""
    rows, time = rewards.shape
    observation = torch.arange(time).float().expand(rows, time)[..., None]
    following = TensorDict(
        {"observation": observation + 1, "reward": rewards[..., None], "done": done[..., None]},
        [rows, time],
    )
    return TensorDict({"observation": observation, "next": following}, [rows, time])


def ends(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def test_the_worked_example():  # T11
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
