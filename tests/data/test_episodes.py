"""Which episode each step belongs to: rows, batches that follow each other, ids of collectors, padding."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envkit import Collector, SerialEnv, split_trajectories
from envkit.data.episodes import EpisodeNumbers
from envkit.errors import ArgumentError, BatchSizeError, MissingKeyError
from tests.zoo.envs import Count


def numbered(*batches):
    """Give the episode of each step, and its place in it, batch by batch."""
    numbers = EpisodeNumbers()
    found = [numbers.number(batch) for batch in batches]
    return [steps.episode.tolist() for steps in found], [steps.step.tolist() for steps in found]


def two_rows(steps: int) -> TensorDict:
    env = SerialEnv(2, [partial(Count, 2), partial(Count, 4)])
    data = env.rollout(steps, break_when_any_done=False)
    env.close()
    return data


def test_rows_are_cut_after_each_done_and_numbered_row_by_row():
    episodes, steps = numbered(two_rows(5))

    assert episodes == [[[0, 0, 1, 1, 2], [3, 3, 3, 3, 4]]]
    assert steps == [[[0, 1, 0, 1, 0], [0, 1, 2, 3, 0]]]


def test_a_row_goes_on_in_the_next_batch():
    data = two_rows(5)

    episodes, steps = numbered(data[:, :1], data[:, 1:3], data[:, 3:])

    assert episodes == [[[0], [1]], [[0, 2], [1, 1]], [[2, 3], [1, 4]]]
    assert steps == [[[0], [0]], [[1, 0], [1, 2]], [[1, 0], [3, 0]]]


def test_a_row_that_was_reset_between_two_batches_begins_a_new_episode():
    rollouts = [Count(5).rollout(3) for _ in range(2)]

    episodes, steps = numbered(*rollouts)

    assert episodes == [[[0, 0, 0]], [[1, 1, 1]]]
    assert steps == [[[0, 1, 2]], [[0, 1, 2]]]


def test_not_a_number_goes_on_as_any_other_observation():
    data = Count(5).rollout(4)
    data["lost"] = data["next", "lost"] = torch.full((4, 1), torch.nan)

    episodes, _ = numbered(data[:2], data[2:])

    assert episodes == [[[0, 0]], [[0, 0]]]


@pytest.mark.parametrize("form", ["as it is", "flattened"])
def test_the_ids_of_a_collector_join_batches_of_any_form(form):
    def make():
        return SerialEnv(2, partial(Count, 5))

    with Collector(make, frames_per_batch=6, total_frames=18) as collector:
        batches = [batch if form == "as it is" else batch.reshape(-1) for batch in collector]

    episodes, steps = numbered(*batches)

    flat = [torch.tensor(part).flatten().tolist() for part in episodes]
    assert flat == [[0, 0, 0, 1, 1, 1], [0, 0, 2, 1, 1, 3], [2, 2, 2, 3, 3, 3]]
    assert torch.tensor(steps[1]).flatten().tolist() == [3, 4, 0, 3, 4, 0]


def test_workers_that_take_turns_keep_their_episodes_apart():
    data = Count(5).rollout(4)
    turns = [data[:2], data[:2], data[2:], data[2:]]
    for number, batch in enumerate(turns):
        batch["collector", "traj_ids"] = torch.full((2,), number % 2)

    episodes, _ = numbered(*turns)

    assert episodes == [[[0, 0]], [[1, 1]], [[0, 0]], [[1, 1]]]


def test_ids_at_the_root_hold_within_their_batch():
    split = split_trajectories(Count(5).rollout(7, break_when_any_done=False))

    episodes, _ = numbered(split, split)

    assert episodes[0] == [[0] * 5, [1, 1, -1, -1, -1]]
    assert episodes[1] == [[2] * 5, [3, 3, -1, -1, -1]]


def test_steps_that_nobody_made_belong_to_no_episode():
    env = SerialEnv(2, [partial(Count, 2), partial(Count, 4)])
    frozen = env.rollout(9, break_when_all_done=True, break_when_any_done=False)
    env.close()

    episodes, _ = numbered(frozen)

    assert episodes == [[[0, 0, -1, -1], [1, 1, 1, 1]]]


def test_episodes_that_are_alike_are_not_taken_for_repetitions():
    env = SerialEnv(2, partial(Count, 1))
    alike = env.rollout(3, break_when_any_done=False)
    env.close()
    alike["next", "reward"].zero_()

    episodes, _ = numbered(alike)

    assert episodes == [[[0, 1, 2], [3, 4, 5]]]


@settings(max_examples=30)
@given(
    flags=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3),
    cuts=st.sets(st.integers(1, 5)),
)
def test_where_batches_are_cut_changes_no_episode(flags, cuts):
    done = torch.tensor(flags)[..., None]
    size = done.shape[:2]
    now = torch.arange(6).expand(size)
    following = TensorDict({"done": done, "now": now + 1}, size)
    data = TensorDict({"now": now, "next": following}, size, names=[None, "time"])
    at = [0, *sorted(cuts), 6]

    parts = EpisodeNumbers(), EpisodeNumbers()
    whole = parts[0].number(data)
    found = [parts[1].number(data[:, a:b]) for a, b in pairwise(at)]

    joined = torch.cat([steps.episode for steps in found], 1)
    assert torch.equal(torch.cat([steps.step for steps in found], 1), whole.step)
    pairs = set(zip(joined.flatten().tolist(), whole.episode.flatten().tolist(), strict=True))
    assert len(pairs) == parts[0].count == parts[1].count == int(whole.episode.max()) + 1


def test_data_that_does_not_say_where_its_rows_end_is_refused():
    data = two_rows(4)

    with pytest.raises(ArgumentError, match=r"no last axis named 'time'.*data\.names = \['time'\]"):
        numbered(data.reshape(-1))
    with pytest.raises(ArgumentError, match="last batch axis must be time"):
        numbered(data[0, 0])
    with pytest.raises(MissingKeyError, match="done"):
        numbered(data.exclude(("next", "done")))
    with pytest.raises(BatchSizeError, match=r"rows of shape \(1,\), the one before \(2,\)"):
        numbered(data, data[:1])
