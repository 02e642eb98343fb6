"""Stateless envs with several choices at once and a reward for each agent, behind the TensorDict interface."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch

from envkit import JaxPolicy, MultiCategorical, MultiOneHot, RewardSum, compile_policy
from envkit.env.checks import check_env_specs
from envkit_bridges.jax.jax_env import JaxEnv
from tests.bridges.compare import assert_same, replay
from tests.zoo.jax_envs import Team


@pytest.fixture(scope="module")
def team():
    return JaxEnv(Team(end=4), batch_size=[3])


@pytest.mark.slow
def test_choices_are_one_hot_side_by_side_and_each_agent_is_paid_what_it_chose(team):
    team.set_seed(0)

    data = team.rollout(6, break_when_any_done=False)

    assert team.action_spec == MultiOneHot((3, 2), (3, 5), dtype=torch.int64)
    assert data["action"].shape == (3, 6, 5)
    paid = torch.stack([part.argmax(-1) for part in data["action"].split((3, 2), -1)], -1)
    assert torch.equal(data["next", "reward"], paid.float())
    check_env_specs(team, seed=0)


@pytest.mark.slow
def test_a_run_of_many_steps_pays_as_single_steps_do(team):
    team.set_seed(1)
    root = team.reset()

    data, _ = team.unroll(root.clone(), 7)
    stepped, _ = replay(team, root.clone(), data["action"])

    assert_same(data, stepped.exclude("state", ("next", "state")))


@pytest.mark.slow
def test_rows_that_wait_for_the_others_are_paid_nothing_in_any_component(team):
    team.set_seed(0)

    data = team.rollout(8, break_when_all_done=True)

    done = data["next", "done"].squeeze(-1)
    waiting = torch.cat([torch.zeros(3, 1, dtype=torch.bool), done[:, :-1]], 1)
    assert waiting.any()
    assert (data["next", "reward"][waiting] == 0).all()


@pytest.mark.slow
def test_integers_are_taken_where_asked_for_and_policies_write_what_the_env_takes():
    env = JaxEnv(Team(end=4), batch_size=[3], categorical_action_encoding=True)
    module = torch.nn.Linear(1, 2)
    in_jax = JaxPolicy(lambda params, observation, key: jnp.tile(jnp.array([2, 1]), (3, 1)))

    class Torch(torch.nn.Module):
        in_keys, out_keys = ("observation",), ("action",)

        def forward(self, observation):
            return (module(observation.unsqueeze(-1)) * 0).long() + torch.tensor([1, 0])

    chosen = env.rollout(3, in_jax, break_when_any_done=False)
    translated = env.rollout(3, compile_policy(Torch()), break_when_any_done=False)

    assert env.action_spec == MultiCategorical((3, 2), (3, 2))
    assert (chosen["action"] == torch.tensor([2, 1])).all()
    assert torch.equal(chosen["next", "reward"], chosen["action"].float())
    assert torch.equal(translated["next", "reward"], translated["action"].float())


@pytest.mark.slow
def test_one_hot_choices_of_a_torch_policy_are_read_choice_by_choice(team):
    class Torch(torch.nn.Module):
        in_keys, out_keys = ("observation",), ("action",)

        def forward(self, observation):
            hot = torch.tensor([0, 0, 1, 0, 1])
            return (observation.unsqueeze(-1) * 0).long() + hot

    data = team.rollout(3, compile_policy(Torch()), break_when_any_done=False)

    assert (data["next", "reward"] == torch.tensor([2.0, 1.0])).all()


@pytest.mark.slow
def test_sums_of_rewards_are_kept_for_each_agent_fused_or_not(team):
    summed = team.append_transform(RewardSum())
    team.set_seed(0)

    data = summed.rollout(6, break_when_any_done=False)

    done = torch.zeros(3, 1, dtype=torch.bool)
    total = torch.zeros(3, 2)
    for moment in data.unbind(1):
        total = torch.where(done, 0, total) + moment["next", "reward"]
        assert torch.equal(moment["next", "episode_reward"], total)
        done = moment["next", "done"]
