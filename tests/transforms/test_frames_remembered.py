"""The frames that a window remembers are in the data: any stored step may be gone on from."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from envkit import CatFrames, Compose, ObservationNorm, SerialEnv, TimeMaxPool, TransformedEnv
from tests.zoo.envs import Count


def windowed():
    """The window is changed by a later transform, so that it could not be read off the data."""
    frames = CatFrames(3, -1, ["count"], ["last"])
    return TransformedEnv(
        Count(20),
        Compose(frames, ObservationNorm(1.0, 2.0, ["last"]), TimeMaxPool(["count"], ["most"], T=3)),
    )


ENVS = {
    "one": windowed,
    "around rows": lambda: TransformedEnv(
        SerialEnv(2, lambda: Count(20)), CatFrames(3, -1, ["count"], ["last"])
    ),
    "in rows": lambda: SerialEnv(2, windowed),
}


@pytest.mark.parametrize("kind", ENVS)
@pytest.mark.parametrize("step", [1, 4])
def test_any_step_of_a_rollout_is_gone_on_from_with_its_window(kind, step):
    env = ENVS[kind]()
    root = env.step_mdp(env.rollout(5)[..., step])

    following = env.rollout(1, auto_reset=False, tensordict=root)[..., 0]

    assert torch.equal(following["next", "last"][..., :2], root["last"][..., 1:])
    assert not torch.equal(root["last"][..., 0], root["last"][..., 2])


LATER = {
    "of another shape": lambda: CatFrames(3, -1, ["count"]),
    "with other values": lambda: ObservationNorm(1.0, 2.0, ["count"]),
}


@pytest.mark.parametrize("later", LATER)
def test_a_window_in_place_is_kept_where_a_later_transform_shows_it_changed(later):
    lengths = [partial(Count, 2), partial(Count, 3)]  # so that rows are reset one by one

    def behind(make):
        return TransformedEnv(make(), Compose(TimeMaxPool(["count"], T=2), LATER[later]()))

    runs = [
        env.rollout(9, break_when_any_done=False)
        for env in (
            behind(lambda: SerialEnv(2, lengths)),
            SerialEnv(2, [partial(behind, make) for make in lengths]),
        )
    ]

    for key in ("count", ("next", "count")):
        assert torch.equal(runs[0][key], runs[1][key]), key


def test_a_plain_policy_is_not_shown_memory():
    seen = []

    def act(*observations):
        seen.append(len(observations))
        return torch.zeros(env.action_spec.shape, dtype=env.action_spec.dtype)

    env = TransformedEnv(Count(20), CatFrames(3, -1, ["count"], ["last"]))
    env.rollout(2, act)

    assert set(seen) == {2}
