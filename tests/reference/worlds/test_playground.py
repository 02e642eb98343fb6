"""Envs of MuJoCo Playground give the same specs and names in both libraries, but where the page says otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.reference.compare import Library, check_same, check_works_alike, differs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def cartpole(library: Library) -> Any:
    return library.MujocoPlaygroundEnv(
        "CartpoleBalance", batch_size=[2], device="cpu", config_overrides={"impl": "jax"}
    )


def test_actions_observations_and_rewards_have_the_same_specs():
    def specs(library: Library) -> Any:
        env = cartpole(library)
        return env.full_action_spec, env.observation_spec["observation"], env.full_reward_spec

    check_works_alike(specs)


@pytest.mark.sweep
def test_steps_show_entries_of_the_same_names_shapes_and_dtypes():
    def shown(library: Library) -> Any:
        env = cartpole(library)
        env.set_seed(0)
        data = env.rollout(3, lambda td: td.set("action", torch.zeros(2, 1)))
        names = ("observation", "action", "done", "terminated", ("next", "reward"))
        return [(tuple(data[name].shape), data[name].dtype) for name in names]

    check_works_alike(shown)


def test_what_is_unknown_is_refused_alike():
    check_same(lambda library: library.MujocoPlaygroundEnv("CartpoleJump", device="cpu"))


def test_states_are_in_the_data_and_episodes_are_cut_at_their_length():
    differs("simulators-in-jax", lambda library: sorted(cartpole(library).done_spec.keys()))
    differs(
        "simulators-in-jax", lambda library: "state" in cartpole(library).observation_spec.keys()
    )
    differs("simulators-in-jax", lambda library: cartpole(library).batch_locked)
