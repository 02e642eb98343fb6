"""One row a trajectory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from envkit import SerialEnv, TrajCounter, TransformedEnv, split_trajectories
from envkit.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from tests.zoo.envs import Count
from tests.zoo.shaped_envs import Wordy

T, F = True, False


def seven_frames() -> TensorDict:
    """Seven steps of an env that ends after five."""
    return Count(5).rollout(7, break_when_any_done=False)


def test_the_worked_example():
    split = split_trajectories(seven_frames())

    assert split.shape == (2, 5)
    assert split["mask"].tolist() == [[T, T, T, T, T], [T, T, F, F, F]]
    assert split["next", "count"].squeeze(-1).tolist() == [[1, 2, 3, 4, 5], [1, 2, 0, 0, 0]]
    assert split["traj_ids"].tolist() == [[0, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert split.names == [None, "time"]


def test_ids_and_mask_lie_in_the_node_of_the_collector():
    data = seven_frames()
    data["collector", "traj_ids"] = torch.tensor([3, 3, 3, 3, 4, 4, 4])

    split = split_trajectories(data)

    assert split.shape == (2, 4)
    assert split["collector", "mask"].tolist() == [[T] * 4, [T, T, T, F]]
    assert "mask" not in split.keys()
    assert split["next", "count"].squeeze(-1).tolist() == [[1, 2, 3, 4], [5, 1, 2, 0]]


@pytest.mark.parametrize("shape", [(7,), (7, 1)])
@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("traj_ids", {}),
        (("mine", "traj_ids"), {"prefix": "mine"}),
        (("deep", "er", "traj_ids"), {"prefix": ("deep", "er")}),
        (("mine", "number"), {"trajectory_key": ("mine", "number")}),
        ("number", {"trajectory_key": "number", "done_key": ("next", "done")}),
    ],
)
def test_ids_are_found_where_they_are_said_to_be(key, options, shape):
    data = seven_frames()
    data[key] = torch.tensor([0, 0, 1, 1, 1, 2, 2]).reshape(shape)

    split = split_trajectories(data, **options)

    assert split.shape == (3, 3)
    mask = "mask" if isinstance(key, str) else (*key[:-1], "mask")
    assert split[mask].sum(-1).tolist() == [2, 3, 2]


def test_flags_may_be_named_although_there_are_ids():
    data = seven_frames()
    data["traj_ids"] = torch.zeros(7, dtype=torch.int64)
    data["next", "mine"] = torch.tensor([F, F, T, F, F, F, F])[:, None]

    assert split_trajectories(data, done_key=("next", "mine")).shape == (2, 4)
    assert split_trajectories(data).shape == split_trajectories(data)["mask"].shape == (1, 7)


def test_the_rows_of_a_batch_are_cut_one_by_one():
    env = SerialEnv(2, [partial(Count, 2), partial(Count, 4)])
    data = env.rollout(5, break_when_any_done=False)
    env.close()

    split = split_trajectories(data)

    assert split["next", "count"].squeeze(-1).tolist() == [
        *([1, 2, 0, 0], [1, 2, 0, 0], [1, 0, 0, 0]),
        *([1, 2, 3, 4], [1, 0, 0, 0]),
    ]


def test_equal_ids_in_two_rows_are_two_trajectories():
    data = TensorDict({"x": torch.arange(6).reshape(2, 3), "traj_ids": torch.zeros(2, 3)}, [2, 3])
    data["traj_ids"][:, 2] = 1

    assert split_trajectories(data)["x"].tolist() == [[0, 1], [2, 0], [3, 4], [5, 0]]


@pytest.mark.parametrize("size", [(3,), (2, 3), (2, 2, 3)])
def test_full_trajectories_keep_their_shape_and_one_has_an_axis_before_time(size):
    done = torch.zeros(*size, 1, dtype=torch.bool)
    done[..., -1, :] = True
    names = [*[None] * (len(size) - 1), "time"]
    data = TensorDict({"x": torch.rand(size), "next": {"done": done}}, size, names=names)

    split = split_trajectories(data)

    rows = size if len(size) > 1 else (1, *size)
    assert split.shape == rows
    assert split["mask"].shape == rows and split["mask"].all()
    assert split["x"].equal(data["x"].reshape(rows))


def test_the_data_is_not_written_to():
    data = seven_frames()
    before = data.clone()

    split_trajectories(data)["next", "count"].zero_()

    assert set(data.keys()) == set(before.keys())
    assert (data == before).all()


def test_words_are_repeated():
    split = split_trajectories(Wordy(3).rollout(4, break_when_any_done=False))

    assert [list(row) for row in split["next", "word"]] == [
        ["one", "two", "three"],
        ["one", "one", "one"],
    ]


def test_gradients_pass():
    data = seven_frames()
    data["x"] = torch.ones(7, requires_grad=True)

    split_trajectories(data)["x"].sum().backward()

    assert data["x"].grad.tolist() == [1.0] * 7


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"trajectory_key": "mine"}, MissingKeyError, r"no 'mine'.*trajectory_key="),
        ({"done_key": ("next", "end")}, MissingKeyError, r"no \('next', 'end'\).*done_key="),
    ],
)
def test_what_is_missing_is_named(options, error, message):
    with pytest.raises(error, match=message) as raised:
        split_trajectories(seven_frames(), **options)

    assert isinstance(raised.value, KeyError)


def test_data_without_time_is_refused():
    with pytest.raises(ArgumentError, match="time"):
        split_trajectories(TensorDict({"next": {"done": torch.zeros(1)}}))


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4))
def test_every_step_stands_in_one_row_and_in_order(flags):
    done = torch.tensor(flags)
    data = TensorDict({"x": torch.arange(1, done.numel() + 1).reshape(done.shape)}, done.shape)
    data["next", "done"] = done[..., None]

    split = split_trajectories(data)

    mask = split["mask"]
    assert split["x"][mask].tolist() == data["x"].flatten().tolist()
    assert not split["x"][~mask].any()
    ends = split["next", "done"][..., 0]
    last = mask & ~torch.cat([mask[..., 1:], torch.zeros_like(mask[..., :1])], -1)
    assert not (ends & ~last).any()


def test_slices_of_the_flat_layout_stay_within_a_trajectory():
    from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

    make = partial(lambda n: TransformedEnv(Count(n), TrajCounter()), 5)
    env = SerialEnv(2, make)
    data = env.rollout(12, break_when_any_done=False)
    env.close()
    data["traj_ids"] = data["traj_count"].squeeze(-1) + 10 * torch.arange(2)[:, None]
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(24),
        sampler=SliceSampler(slice_len=3, traj_key="traj_ids", strict_length=True),
        batch_size=30,
    )
    buffer.extend(data.reshape(-1))

    slices = buffer.sample().reshape(10, 3)

    assert (slices["traj_ids"] == slices["traj_ids"][:, :1]).all()
    assert (slices["count"][:, 1:] == slices["next", "count"][:, :-1]).all()
    assert "prefer" in split_trajectories.__doc__ and "SliceSampler" in split_trajectories.__doc__


@pytest.mark.parametrize("layout", [True, torch.strided, torch.jagged])
def test_trajectories_are_nested_in_place_of_padding(layout):
    data = SerialEnv(2, [partial(Count, 2), partial(Count, 4)]).rollout(
        6, break_when_any_done=False
    )
    padded = split_trajectories(data)

    nested = split_trajectories(data, as_nested=layout)

    counts = [row[mask] for row, mask in zip(padded["next", "count"], padded["mask"], strict=True)]
    assert nested.batch_size == (len(counts), -1)
    rows = nested["next", "count"].unbind()
    assert all(row.equal(count) for row, count in zip(rows, counts, strict=True))
    assert nested.to_padded_tensor()["next", "count"].equal(padded["next", "count"])


def test_texts_are_not_nested():
    data = Wordy().rollout(3, break_when_any_done=False)

    with pytest.raises(ArgumentError, match="Exclude them, or pass as_nested=False"):
        split_trajectories(data, as_nested=True)
    with pytest.raises(ArgumentTypeError, match=r"a bool or a torch\.layout"):
        split_trajectories(seven_frames(), as_nested="jagged")
