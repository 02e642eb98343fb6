"""TorchRL's collector in one process and ours deliver the same batches, for the same env, seed and policy."""

from __future__ import annotations

import warnings

import pytest
import torch

from envkit import GymEnv, SyncDataCollector

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrl.collectors
    import torchrl.envs

pytestmark = pytest.mark.filterwarnings(  # of TorchRL and what it calls
    "ignore::UserWarning:torch", "ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"
)

IDS = ("collector", "traj_ids")


PATH = {0: 1, 4: 1, 8: 2, 9: 2, 10: 1, 14: 2}
"""Of a lake that is not slippery: nothing is drawn, and an episode has 6 steps."""


def walk(td):
    """Go the way to the goal."""
    observation = td["observation"]
    state = observation.argmax(-1) if observation.ndim else observation
    return td.set("action", torch.tensor(PATH[int(state)]))


def batches(cls, env_class, **options) -> list:
    def make():
        return env_class("FrozenLake-v1", categorical_action_encoding=True, is_slippery=False)

    collector = cls(make, walk, total_frames=240, **{"frames_per_batch": 80, **options})
    found = [batch.clone() for batch in collector]
    collector.shutdown()
    return found


def both(**options) -> tuple[list, list]:
    ours = batches(SyncDataCollector, GymEnv, **options)
    theirs = batches(torchrl.collectors.Collector, torchrl.envs.GymEnv, **options)
    return ours, theirs


def first_seen(ids: torch.Tensor) -> list[int]:
    """Number trajectories in the order in which they come."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(number, len(numbers)) for number in ids.flatten().tolist()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_frames_per_traj": 4},
        {"reset_at_each_iter": True},
        {"set_truncated": True},
        {"frames_per_batch": 48},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_batches_are_the_same(options):
    ours, theirs = both(**options)

    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.batch_size == other.batch_size
        assert mine.names == other.names
        assert set(mine.keys(True, True)) == set(other.keys(True, True))
        for key in mine.keys(True, True):
            assert mine[key].dtype == other[key].dtype, key
            if key != IDS:
                assert torch.equal(mine[key], other[key]), key
    joined = [torch.cat([batch[IDS] for batch in found]) for found in (ours, theirs)]
    assert first_seen(joined[0]) == first_seen(joined[1])
