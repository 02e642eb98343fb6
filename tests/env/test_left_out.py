"""Rollouts do not show the memory of transforms, and whoever goes on from one has it all the same."""

from __future__ import annotations

import pytest
import torch

from envkit import (
    CatFrames,
    Compose,
    ObservationNorm,
    SerialEnv,
    TimeMaxPool,
    TransformedEnv,
    check_env_specs,
    step_mdp,
)
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


def memory(td):
    return [key for key in td.keys(True) if "_cat_frames" in str(key) or "_time_max" in str(key)]


def by_rollout(env, root):
    return env.rollout(3, auto_reset=False, tensordict=root)["last"]


def by_steps(env, root):
    seen = []
    for _ in range(3):
        seen.append(root["last"])
        root = env.step_mdp(env.step(env.rand_action(root)))
    return torch.stack(seen, len(env.batch_size))


def by_steps_with_resets(env, root):
    seen = []
    for _ in range(3):
        seen.append(root["last"])
        _, root = env.step_and_maybe_reset(env.rand_action(root))
    return torch.stack(seen, len(env.batch_size))


WAYS = [by_rollout, by_steps, by_steps_with_resets]


@pytest.mark.parametrize("kind", ENVS)
def test_rollouts_show_no_memory_of_transforms(kind):
    env = ENVS[kind]()

    for options in ({}, {"return_contiguous": False}, {"break_when_any_done": False}):
        assert memory(env.rollout(4, **options)) == []
    assert memory(env.step(env.rand_action(env.reset()))["next"])
    check_env_specs(env)


@pytest.mark.parametrize("kind", ENVS)
@pytest.mark.parametrize("go_on", WAYS)
def test_what_goes_on_from_a_rollout_goes_on_with_its_windows(kind, go_on):
    whole = ENVS[kind]().rollout(8)
    env = ENVS[kind]()
    first = env.rollout(5)

    later = go_on(env, step_mdp(first[..., -1]))

    assert torch.equal(later, whole["last"][..., 5:, :])


@pytest.mark.parametrize("kind", ["one", "around rows"])
def test_other_data_begins_its_windows_anew(kind):
    env = ENVS[kind]()
    root = step_mdp(env.rollout(5)[..., 1])

    window = env.rollout(1, auto_reset=False, tensordict=root)["next", "last"]

    assert (window == window[..., :1]).all()  # padded with the one frame there is


def test_rows_are_told_what_other_data_lacks():
    env = ENVS["in rows"]()
    root = step_mdp(env.rollout(5)[..., 1])

    with pytest.raises(KeyError, match="from the last step of a rollout"):
        env.rollout(1, auto_reset=False, tensordict=root)


def test_an_env_that_is_loaded_goes_on_with_the_windows_of_the_saved_one():
    whole = windowed().rollout(8)
    saved, loaded = windowed(), windowed()
    first = saved.rollout(5)
    loaded.load_state_dict(saved.state_dict())

    later = loaded.rollout(3, auto_reset=False, tensordict=step_mdp(first[..., -1]))

    assert torch.equal(later["next", "last"][0, :2], whole["last"][5, 1:])


def test_a_plain_policy_is_not_shown_memory():
    seen = []

    def act(*observations):
        seen.append(len(observations))
        return torch.zeros(env.action_spec.shape, dtype=env.action_spec.dtype)

    env = TransformedEnv(Count(20), CatFrames(3, -1, ["count"], ["last"]))
    env.rollout(2, act)

    assert set(seen) == {2}
