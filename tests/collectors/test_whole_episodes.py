"""`EpisodeStore` puts whole episodes together from the fragments that runners make."""

import torch
from tensordict import TensorDict

from envkit.collectors.trajectories import EpisodeStore


def fragment(*rows: list[int], **entries: torch.Tensor) -> TensorDict:
    """Steps of rows, told by the numbers of their trajectories; each holds its place, from 0 on in a row."""
    numbers = torch.tensor(rows)
    steps = torch.arange(numbers.shape[1]).expand(numbers.shape)
    flags = torch.zeros(*numbers.shape, 1, dtype=torch.bool)
    source = {
        "step": steps,
        "collector": {"traj_ids": numbers},
        "next": {"done": flags, "truncated": flags.clone()},
        **entries,
    }
    return TensorDict(source, numbers.shape)


def test_episodes_are_given_in_the_order_of_their_ends_and_across_fragments():
    store = EpisodeStore()

    store.add(fragment([0, 0, 0], [1, 1, 2]), torch.tensor([0, 2]))
    store.add(fragment([0, 3, 3], [2, 2, 2]), torch.tensor([3, 2]))

    assert len(store) == 2
    data = store.take(2, "cat")
    assert data["collector", "traj_ids"].tolist() == [1, 1, 0, 0, 0, 0]
    assert data["step"].tolist() == [0, 1, 0, 1, 2, 0]
    assert len(store) == 0


def test_what_is_cut_ends_by_truncation_at_its_last_step():
    store = EpisodeStore()
    store.add(fragment([0, 0], [1, 1]), torch.tensor([0, 1]))

    store.cut([1])

    assert len(store) == 1
    assert store.take(1, "cat")["next", "truncated"].flatten().tolist() == [False, True]


def test_an_episode_that_nobody_goes_on_with_is_cut_when_the_next_fragment_comes():
    store = EpisodeStore()
    store.add(fragment([0, 0]), torch.tensor([0]))

    store.add(fragment([5, 5]), torch.tensor([5]))

    assert store.take(1, "padded")["collector", "traj_ids"].tolist() == [[0, 0]]


def test_a_store_goes_on_from_the_state_of_another():
    one, other = EpisodeStore(), EpisodeStore()
    one.add(fragment([0, 0, 1]), torch.tensor([1]))

    other.load_state_dict(one.state_dict())
    other.add(fragment([1, 2, 2]), torch.tensor([2]))

    assert other.take(2, "cat")["collector", "traj_ids"].tolist() == [0, 0, 1, 1]
