"""Which episodes count, against a model that plays each row by hand."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envkit.evaluation.evaluate import Tally


def by_hand(rewards, ended, chunks, quota, max_steps):
    """Give (return, length, whether it ended) of a row's first episodes; one that is cut ends its chunk."""
    episodes, paid, steps, stale, begins = (
        [],
        0.0,
        0,
        False,
        {sum(chunks[:i]) for i in range(len(chunks))},
    )
    for at, (reward, is_last) in enumerate(zip(rewards, ended, strict=True)):
        if at in begins:
            stale = False
        if stale:
            continue
        paid, steps = paid + reward, steps + 1
        stale = not is_last and steps == max_steps
        if is_last or stale:
            episodes.append((paid, steps, is_last))
            paid, steps = 0.0, 0
    return episodes[:quota]


@settings(max_examples=50)
@given(data=st.data())
def test_each_rows_first_episodes_count_however_the_steps_come(data):
    rows, quota = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    max_steps = data.draw(st.none() | st.integers(1, 6))
    chunks = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    steps = sum(chunks)
    flags = st.lists(st.sampled_from([False, False, True]), min_size=steps, max_size=steps)
    ended = torch.tensor([data.draw(flags) for _ in range(rows)])
    rewards = torch.arange(rows * steps, dtype=torch.float64).reshape(rows, steps) + 1
    tally = Tally(rows, quota, max_steps)

    for part in torch.arange(steps).split(chunks):
        following = TensorDict({"at": part.expand(rows, -1)}, [rows, len(part)])
        tally.add(rewards[:, part], ended[:, part], ended[:, part], following)
        tally.begin_stale()

    for row in range(rows):
        episodes = by_hand(rewards[row].tolist(), ended[row].tolist(), chunks, quota, max_steps)
        count = len(episodes)
        assert int(tally.counted[row]) == count
        assert tally.returns[row, :count].tolist() == [paid for paid, _, _ in episodes]
        assert tally.lengths[row, :count].tolist() == [length for _, length, _ in episodes]
        assert tally.terminated[row, :count].tolist() == [is_last for _, _, is_last in episodes]
        assert tally.is_cut[row, :count].tolist() == [not is_last for _, _, is_last in episodes]


def test_the_last_steps_are_in_the_order_of_the_episodes():
    ended = torch.tensor([[False, True, True], [True, False, True]])
    tally = Tally(2, 2, None)

    tally.add(
        torch.ones(2, 3, dtype=torch.float64),
        ended,
        ended,
        TensorDict({"at": torch.tensor([[10, 11, 12], [20, 21, 22]])}, [2, 3]),
    )

    assert tally.last()["at"].tolist() == [11, 12, 20, 22]


def test_what_is_paid_after_a_cut_is_nobodys():
    reward = torch.tensor([[1.0, 1.0, float("nan"), float("nan")], [1.0, 1.0, 1.0, 1.0]]).double()
    never = torch.zeros(2, 4, dtype=torch.bool)
    ended = torch.tensor([[False, False], [False, True]])
    tally = Tally(2, 2, 2)

    tally.add(reward, never, never, empty(2, 4))
    tally.begin_stale()
    tally.add(torch.ones(2, 2).double(), ended, ended, empty(2, 2))

    assert tally.returns.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert tally.is_cut.tolist() == [[True, True], [True, False]]


def empty(*shape: int) -> TensorDict:
    return TensorDict({}, list(shape))
