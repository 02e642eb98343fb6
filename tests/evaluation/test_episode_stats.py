"""Returns and lengths of recorded episodes, against sums by hand, cut across batches in any way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envkit import SerialEnv, SyncDataCollector, episode_stats
from envkit.errors import ArgumentError, DataTypeError, MissingKeyError
from tests.zoo.envs import Count


def recorded(ended: list[list[bool]]) -> TensorDict:
    """Make data in which step t of row r is paid 10 r + t, and is observed as a number that no other has."""
    done = torch.tensor(ended)[..., None]
    rows, steps = done.shape[:2]
    reward = 10.0 * torch.arange(rows)[:, None] + torch.arange(steps)
    number = torch.arange(rows * (steps + 1)).reshape(rows, -1, 1)
    following = {"done": done, "terminated": done, "reward": reward[..., None]}
    root = torch.where(
        torch.cat([torch.zeros_like(done[:, :1]), done[:, :-1]], 1), -1, number[:, :-1]
    )
    return TensorDict(
        {"at": root, "next": TensorDict({"at": number[:, 1:], **following}, [rows, steps])},
        [rows, steps],
        names=[None, "time"],
    )


@settings(max_examples=40)
@given(data=st.data())
def test_episodes_cut_by_batches_are_what_they_are_in_one(data):
    rows = data.draw(st.integers(1, 3))
    chunks = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    flags = st.lists(st.booleans(), min_size=sum(chunks), max_size=sum(chunks))
    ended = [data.draw(flags) for _ in range(rows)]
    whole = recorded(ended)

    stats = episode_stats(whole.split(chunks, 1))

    expected = []
    for row, over in enumerate(ended):
        paid, length = 0.0, 0
        for at, is_last in enumerate(over):
            paid, length = paid + 10 * row + at, length + 1
            if is_last or at == len(over) - 1:
                expected.append((paid, length, is_last))
                paid, length = 0.0, 0
    assert sorted(zip(*(value.tolist() for value in stats[:3]), strict=True)) == sorted(expected)
    assert torch.equal(stats.terminated, stats.ended)
    assert sorted(zip(*(v.tolist() for v in episode_stats(whole)), strict=True)) == sorted(
        zip(*(v.tolist() for v in stats), strict=True)
    )


def test_episodes_of_a_collector_go_on_in_its_next_batch():
    collector = SyncDataCollector(
        SerialEnv(2, [Count, lambda: Count(7)]), None, frames_per_batch=6, total_frames=42
    )

    stats = episode_stats(collector)
    collector.shutdown()

    assert sorted(stats.lengths[stats.ended].tolist()) == [5] * 4 + [7] * 3
    assert stats.returns.tolist() == stats.lengths.tolist()
    assert stats.lengths[~stats.ended].tolist() == [1]


def test_rows_that_a_rollout_froze_are_no_steps():
    env = SerialEnv(2, [Count, lambda: Count(3)])

    found = episode_stats(env.rollout(9, break_when_all_done=True))

    assert found.lengths.tolist() == [5, 3]
    assert found.terminated.all()
    env.close()


def test_an_episode_that_was_truncated_has_ended_and_is_not_terminated():
    data = recorded([[False, True, False]])
    data["next", "terminated"] = torch.zeros(1, 3, 1, dtype=torch.bool)

    found = episode_stats(data)

    assert found.ended.tolist() == [True, False]
    assert not found.terminated.any()


def test_another_entry_is_summed_where_it_is_named():
    data = recorded([[False, True]])
    data["next", "cost"] = torch.tensor([[2.0, 3.0]])

    for key in (("next", "cost"), "cost"):
        assert episode_stats(data, reward_key=key).returns.tolist() == [5.0]
    data["cost"] = torch.zeros(1, 2)  # that of the step before
    assert episode_stats(data, reward_key="cost").returns.tolist() == [5.0]


def test_no_data_is_no_episode():
    assert all(len(value) == 0 for value in episode_stats([]))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (
            recorded([[True]]).exclude(("next", "reward")),
            MissingKeyError,
            r"no \('next', 'reward'\)",
        ),
        (recorded([[True]]).exclude(("next", "done")), MissingKeyError, r"'done'"),
        (
            recorded([[True]]).set(("next", "reward"), torch.zeros(1, 1, 2)),
            ArgumentError,
            r"has 2 numbers for each step",
        ),
        (TensorDict({}, []), ArgumentError, r"last batch axis must be time"),
        ([{"reward": 1}], DataTypeError, r"data"),
        (
            None,
            DataTypeError,
            r"data is of type NoneType, but must be a TensorDict\. Pass a rollout",
        ),
    ],
)
def test_data_that_does_not_tell_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        episode_stats(data)


def test_statistics_of_many_episodes_are_told_in_one_line():
    many = recorded([[True, False]] * 500)

    told = repr(episode_stats(many))

    returns = torch.arange(500) * 10.0
    assert told == (
        f"EpisodeStats(1000 episodes, 500 ended: mean return {returns.mean():.6g}, mean length 1)"
    )
    assert repr(episode_stats(recorded([[False]]))) == "EpisodeStats(1 episodes, 0 ended)"
