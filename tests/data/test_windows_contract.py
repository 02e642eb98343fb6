"""All that reads windows of recorded data, over every layout of a batch, against a model that walks each stretch by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler

from envkit import (
    ActionChunkTransform,
    CatFrames,
    Collector,
    MultiStep,
    MultiStepTransform,
    MultiSyncDataCollector,
    Reward2GoTransform,
    SerialEnv,
    TimeMaxPool,
    gae,
    split_trajectories,
)
from envkit.data.episodes import EpisodeNumbers
from envkit.errors import ArgumentError
from tests.zoo.envs import Count

GAMMA, LMBDA, N = 0.5, 0.8, 3
IDS = ("collector", "traj_ids")


def recorded(frames: int = 9) -> TensorDict:
    """Steps of three envs whose episodes last 3, 5 and 20 steps, so that rows end within episodes.

    Observations are unlike in all steps; ``step`` counts 10 more where an episode ends, 1 more at each step of it.
    """
    env = SerialEnv(3, [partial(Count, length) for length in (3, 5, 20)])
    data = Collector(env, frames_per_batch=3 * frames, total_frames=3 * frames).next()
    env.close()
    ids = data[IDS]
    place = torch.arange(1.0, frames + 1)[None] + 100 * torch.arange(3)[:, None]
    data["observation"] = (1000 * ids + place)[..., None]
    data["next", "observation"] = data["observation"] + 1
    data["next", "reward"] = place[..., None].clone()
    data["state_value"] = (place % 7)[..., None]
    data["next", "state_value"] = ((place + 1) % 7)[..., None]
    data["action"] = place[..., None].clone()
    data["step"] = (1000 * ids + place).long()
    data["down"] = -data["observation"]
    return data.exclude("count", ("next", "count"))


def without_ids(data: TensorDict) -> TensorDict:
    return data.exclude("collector")


def unnamed(data: TensorDict) -> TensorDict:
    data.names = [None] * data.batch_dims
    return data


def joined_in_time(data: TensorDict) -> TensorDict:
    return torch.cat(list(data), -1)


def time_first(data: TensorDict) -> TensorDict:
    return data.transpose(0, 1).contiguous()


def of_a_buffer(data: TensorDict) -> TensorDict:
    """Give what a buffer holds to which the envs have written in turns."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(27))
    for part in data.split(3, -1):
        for row in part:
            buffer.extend(row)
    return buffer[:]


def slices(data: TensorDict, **sampler: Any) -> TensorDict:
    torch.manual_seed(0)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(27), sampler=SliceSampler(slice_len=3, **sampler), batch_size=30
    )
    buffer.extend(data.reshape(-1))
    return buffer.sample()


LAYOUTS = {
    "one env": lambda: recorded()[1],
    "one env without ids": lambda: without_ids(recorded()[1]),
    "rows": recorded,
    "rows without ids": lambda: without_ids(recorded()),
    "rows without names": lambda: unnamed(recorded()),
    "rows without names or ids": lambda: unnamed(without_ids(recorded())),
    "time first": lambda: time_first(recorded()),
    "stacked workers": lambda: TensorDict.stack([recorded(), recorded()]),
    "workers joined along time": lambda: joined_in_time(recorded()),
    "workers joined along time, without ids": lambda: without_ids(joined_in_time(recorded())),
    "flattened": lambda: recorded().reshape(-1),
    "flattened without ids": lambda: without_ids(recorded().reshape(-1)),
    "padded": lambda: split_trajectories(recorded()),
    "contents of a buffer": lambda: of_a_buffer(recorded()),
    "slices": lambda: slices(recorded(), traj_key=IDS),
    "slices without ids": lambda: slices(without_ids(recorded()), end_key=("next", "done")),
}


def shuffled(data: TensorDict) -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    return data[..., torch.randperm(data.shape[-1], generator=generator)]


def without_next(data: TensorDict) -> TensorDict:
    """Leave nothing in ``next`` that the root has, too, but for flags and values."""
    return data.exclude(("next", "observation"))


REFUSED = {
    "time first, without names": lambda: unnamed(time_first(recorded())),
    "time first, without names or ids": lambda: unnamed(time_first(without_ids(recorded()))),
    "time first, one row without names": lambda: unnamed(time_first(recorded()[1:2])),
    "shuffled rows": lambda: shuffled(recorded()),
    "shuffled without ids": lambda: shuffled(without_ids(recorded()[1])),
    "shuffled and flattened": lambda: shuffled(recorded().reshape(-1)),
    "shuffled and flattened, without ids": lambda: shuffled(without_ids(recorded().reshape(-1))),
    "flattened by time": lambda: time_first(recorded()).reshape(-1),
}
REFUSED_UNKNOWN = {
    "flattened, nothing tells": lambda: without_next(without_ids(recorded().reshape(-1))),
    "ids lie apart, nothing tells": lambda: without_next(of_a_buffer(recorded())),
}


# ------------------------------------------------------------------------------------- the slow model


def stretches(data: TensorDict) -> list[list[TensorDict]]:
    """Give the steps of each stretch of an episode that lie one after the other, row by row."""
    if data.names[0] == "time" and data.batch_dims > 1:
        data = data.transpose(0, 1)
    mask = data.get(("collector", "mask"), torch.ones(data.shape, dtype=torch.bool))
    parts: list[list[TensorDict]] = []
    for row, valid in zip(
        data.reshape(-1, data.shape[-1]), mask.reshape(-1, data.shape[-1]), strict=True
    ):
        last = None
        for step in row[valid]:
            if last is None or last["next", "done"] or step["step"] != last["step"] + 1:
                parts.append([])
            parts[-1].append(last := step)
    return parts


def flat(data: TensorDict, key: Any) -> torch.Tensor:
    """Give an entry of all steps but padding, row by row."""
    if data.names[0] == "time" and data.batch_dims > 1:
        data = data.transpose(0, 1)
    mask = data.get(("collector", "mask"), None)
    data = data.reshape(-1) if mask is None else data[mask]
    return data.get(key)


def n_step(steps: list[TensorDict]) -> list[list[float]]:
    windows = []
    for start in range(len(steps)):
        window = steps[start : start + N]
        total = sum(GAMMA**i * step["next", "reward"].item() for i, step in enumerate(window))
        windows.append([total, window[-1]["next", "observation"].item(), len(window)])
    return windows


def joined_before(steps: list[TensorDict]) -> list[list[float]]:
    seen = [step["observation"].item() for step in steps]
    return [[seen[max(at - back, 0)] for back in (2, 1, 0)] for at in range(len(seen))]


def joined_after(steps: list[TensorDict]) -> list[list[float]]:
    seen = [step["observation"].item() for step in steps]
    return [[seen[min(at + on, len(seen) - 1)] for on in (0, 1, 2)] for at in range(len(seen))]


def actions_after(steps: list[TensorDict]) -> list[list[float]]:
    acted = [step["action"].item() for step in steps]
    return [[acted[min(at + on, len(acted) - 1)] for on in (0, 1, 2)] for at in range(len(acted))]


def to_go(steps: list[TensorDict]) -> list[list[float]]:
    left, sums = 0.0, []
    for step in reversed(steps):
        left = step["next", "reward"].item() + GAMMA * left
        sums.append([left])
    return sums[::-1]


def advantages(steps: list[TensorDict]) -> list[list[float]]:
    left, values = 0.0, []
    for step in reversed(steps):
        future = GAMMA * step["next", "state_value"].item() * (not step["next", "terminated"])
        left = (
            step["next", "reward"].item()
            + future
            - step["state_value"].item()
            + GAMMA * LMBDA * left
        )
        values.append([left])
    return values[::-1]


def split_back(data: TensorDict) -> TensorDict:
    """Give each step the first step of its trajectory."""
    split = split_trajectories(data)
    mask = split.get(("collector", "mask"), split.get("mask", None))
    first = split["step"][..., :1].expand(mask.shape)[mask]
    return TensorDict({"first": first}, [len(first)])


def n_steps_of(out: TensorDict) -> torch.Tensor:
    parts = [flat(out, ("next", key))[:, 0] for key in ("reward", "observation")]
    return torch.stack([*parts, flat(out, "steps_to_next_obs").float()], -1)


READERS = {
    "MultiStep": (
        lambda data: n_steps_of(MultiStep(GAMMA, N)(data)),
        n_step,
    ),
    "CatFrames": (
        lambda data: flat(CatFrames(N, -1, ["observation"])(data), "observation"),
        joined_before,
    ),
    "CatFrames of the future": (
        lambda data: flat(CatFrames(N, -1, ["observation"], future=True)(data), "observation"),
        joined_after,
    ),
    "TimeMaxPool": (
        lambda data: flat(TimeMaxPool(["down"], T=N)(data), "down"),
        lambda steps: [[-min(row)] for row in joined_before(steps)],
    ),
    "Reward2GoTransform": (
        lambda data: flat(Reward2GoTransform(GAMMA).inv(data), ("next", "reward")),
        to_go,
    ),
    "gae": (lambda data: flat(gae(data, gamma=GAMMA, lmbda=LMBDA), "advantage"), advantages),
    "ActionChunkTransform": (
        lambda data: flat(ActionChunkTransform(N)(data), ("vla_action", "chunk")).squeeze(-1),
        actions_after,
    ),
    "split_trajectories": (
        lambda data: split_back(data)["first"][:, None].float(),
        lambda steps: [[float(steps[0]["step"])]] * len(steps),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reader", READERS)
def test_windows_are_those_of_each_stretch_by_itself(reader, layout):
    read, model = READERS[reader]
    data = LAYOUTS[layout]()
    if reader == "ActionChunkTransform" and layout == "time first":
        pytest.skip("its time is the axis before the last")
    expected = [row for steps in stretches(data) for row in model(steps)]

    found = read(data.clone())

    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("layout", [*REFUSED, *REFUSED_UNKNOWN])
@pytest.mark.parametrize("reader", [name for name in READERS if name != "ActionChunkTransform"])
def test_data_whose_order_is_lost_is_refused(reader, layout):
    data = (REFUSED | REFUSED_UNKNOWN)[layout]()
    message = (
        "in the order of time" if layout in REFUSED else r"nothing tells.*data\.names = \['time'\]"
    )

    with pytest.raises(ArgumentError, match=message):
        READERS[reader][0](data)


WRITES = {
    "rows of one collector": lambda: list(recorded().split(2, -1)),
    "rollouts that are cut": lambda: [recorded()[1, 6:], recorded()[1, :4], recorded()[2, :5]],
    "rollouts that are cut, without ids": lambda: [
        without_ids(recorded()[row, first:last])
        for row, first, last in ((1, 6, 9), (1, 0, 4), (2, 0, 5))
    ],
    "workers in turns": lambda: [row for part in recorded().split(5, -1) for row in part],
    "workers joined along time": lambda: [joined_in_time(part) for part in recorded().split(5, -1)],
    "flattened": lambda: [part.reshape(-1) for part in recorded().split(5, -1)],
    "time first": lambda: [time_first(part) for part in recorded().split(4, -1)],
}


@pytest.mark.parametrize("writes", WRITES)
def test_windows_across_writes_are_those_of_each_stretch(writes):
    parts = WRITES[writes]()
    axis = 0 if parts[0].names[0] == "time" else -1
    whole = torch.cat(parts, axis)
    buffer = MultiStepTransform(N, GAMMA)

    written = [out for part in parts if (out := buffer.inv(part.clone())) is not None]

    out = torch.cat(written, axis)
    assert out.shape[axis] == whole.shape[axis] - N
    expected = {
        int(step["step"]): row
        for steps in stretches(whole)
        for step, row in zip(steps, n_step(steps), strict=True)
    }
    rows = torch.tensor([expected[step] for step in flat(out, "step").tolist()])
    torch.testing.assert_close(n_steps_of(out), rows)


@pytest.mark.parametrize("constant", [False, True])
def test_steps_that_are_stacked_along_the_first_axis_are_answered_with_the_name_to_set(constant):
    data = unnamed(time_first(without_ids(recorded())))
    if constant:  # agrees along each axis
        data["goal"] = data["next", "goal"] = torch.ones(9, 3)
    right = gae(data.clone(), gamma=GAMMA, lmbda=LMBDA, time_dim=0)

    with pytest.raises(ArgumentError, match=r"data\.names = \['time', None\]"):
        gae(data, gamma=GAMMA, lmbda=LMBDA)
    data.names = ["time", None]

    assert gae(data, gamma=GAMMA, lmbda=LMBDA)["advantage"].equal(right["advantage"])


def test_a_buffer_of_single_moments_of_several_envs_is_refused():
    buffer = MultiStepTransform(N, GAMMA)

    first, second = recorded().unbind(1)[:2]
    buffer.inv(first)

    with pytest.raises(ArgumentError, match="in the order of time"):
        buffer.inv(second)


@pytest.mark.slow
@pytest.mark.parametrize("joined", [0, -1, "stack"])
def test_windows_of_workers_stay_within_their_env(joined):
    collector = MultiSyncDataCollector(
        [partial(Count, 4), partial(Count, 7)],
        None,
        frames_per_batch=20,
        total_frames=60,
        cat_results=joined,
        postproc=MultiStep(GAMMA, N),
    )
    for batch in collector:
        count = flat(batch, "count")[:, 0]
        steps = flat(batch, "steps_to_next_obs")
        assert flat(batch, ("next", "count"))[:, 0].equal(count + steps)
    collector.shutdown()


def test_shuffled_steps_make_no_episodes():
    with pytest.raises(ArgumentError, match="in the order of time"):
        EpisodeNumbers().number(shuffled(recorded().reshape(-1)))


def test_rollouts_that_were_joined_are_two_episodes():
    first, second = Count(9).rollout(3), Count(9).rollout(4)

    found = EpisodeNumbers().number(torch.cat([first, second]))

    assert found.episode.tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert found.step.tolist() == [[0, 1, 2, 0, 1, 2, 3]]


def test_an_entry_that_was_changed_afterwards_tells_nothing_where_the_axis_is_named():
    data = without_ids(recorded()[1])
    windows = CatFrames(N, -1, ["observation"])
    expected = windows(data.clone())["observation"] / 7
    data["observation"] /= 7

    assert windows(data)["observation"].equal(expected)


def test_an_entry_that_was_changed_afterwards_hides_no_other_one():
    data = recorded().reshape(-1)
    data["spent"], data["next", "spent"] = torch.rand(2, 27)
    plain = recorded().reshape(-1)

    for one in (data, plain):
        one.update(gae(one, gamma=GAMMA, lmbda=LMBDA))

    assert data["advantage"].equal(plain["advantage"])
    with pytest.raises(ArgumentError, match="in the order of time"):
        gae(shuffled(data), gamma=GAMMA, lmbda=LMBDA)
