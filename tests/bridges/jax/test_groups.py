"""A stateless env of the user's own with groups of agents: specs, batch sizes, ends, masks, resets as a whole, policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from envkit import (
    Box,
    Categorical,
    JaxEnv,
    JaxPolicy,
    RewardSum,
    Timestep,
    TransformedEnv,
    compile_policy,
)
from envkit.env.checks import check_env_specs
from envkit.errors import PolicyError, ResetMaskError
from envkit.functional import AgentsDiscrete


@dataclass(frozen=True)
class Race:
    """Two walkers go forward by 0 to 2, a pilot pulls both; a walker that has gone 4 stops, the game ends with both."""

    groups: ClassVar = {"walker": 2, "pilot": 1}
    action_space: ClassVar = {
        "walker": {"action": AgentsDiscrete.of(3, 2)},
        "pilot": {"action": Box(-1.0, 1.0, (1, 1))},
    }
    reward_shape: ClassVar = {
        "walker": {"reward": (2, 1)},
        "pilot": {"reward": (1, 1)},
        "team_reward": (1,),
    }
    action_masks = ((("walker", "action"), ("walker", "action_mask")),)

    def reset(self, key):
        place = jax.random.uniform(key, (2,), maxval=0.5)
        return place, self.shown(place, jnp.zeros(2), False)

    def step(self, place, action):
        going = place < 4
        gone = action["walker"]["action"] * going + action["pilot"]["action"].sum() * 0.1
        place = place + gone
        return place, self.shown(place, gone, (place >= 4).all())

    def shown(self, place, gone, over):
        arrived = place >= 4
        observed = {
            "walker": {
                "observation": place[:, None],
                "terminated": arrived[:, None],
                "mask": arrived,
                "action_mask": jnp.stack([place > 99, place > -9, place < 2], -1),
            },
            "pilot": {"observation": place[None]},
        }
        paid = {
            "walker": {"reward": gone[:, None]},
            "pilot": {"reward": gone.sum().reshape(1, 1)},
            "team_reward": gone.sum().reshape(1),
        }
        return Timestep(observed, paid, over, info={"far": place.max()})


@pytest.fixture(scope="module")
def race():
    return JaxEnv(Race(), batch_size=[4], categorical_action_encoding=True)


def test_nodes_have_an_axis_of_agents_in_specs_and_in_data(race):
    race.set_seed(0)
    data = race.rollout(3, break_when_any_done=False)
    run, root = race.unroll(race.reset(), 3)

    assert race.full_action_spec["walker", "action"] == Categorical(3, shape=(4, 2))
    assert race.full_reward_spec["walker"].shape == (4, 2)
    assert race.observation_spec["pilot", "observation"].shape == (4, 1, 2)
    assert set(race.done_keys) >= {("walker", "done"), ("pilot", "truncated"), "done"}
    for one in (data, run):
        assert one["walker"].batch_size == one["next", "walker"].batch_size == (4, 3, 2)
        assert one["next", "team_reward"].shape == (4, 3, 1)
    assert root["pilot"].batch_size == (4, 1) and root["info", "far"].shape == (4,)
    check_env_specs(race, seed=0)


def test_random_actions_obey_the_masks_of_agents(race):
    race.set_seed(1)
    run, root = race.unroll(race.reset(), 30)
    td = race.rand_action(root)

    for one in (run, td):
        assert one["walker", "action_mask"].gather(-1, one["walker", "action"][..., None]).all()
    assert set(run["walker", "action"].unique().tolist()) == {1, 2}


def test_specs_are_checked_without_the_mask_of_the_actions_that_were_drawn_last():
    env = JaxEnv(Race(), batch_size=[4], categorical_action_encoding=True)
    env.set_seed(1)
    env.rand_action(env.unroll(env.reset(), 4)[1])
    assert env.full_action_spec["walker", "action"].mask is not None

    check_env_specs(env, seed=0)


def test_agents_end_before_the_game_or_with_it(race):
    env = JaxEnv(Race(), batch_size=[4], categorical_action_encoding=True, episode_length=4)
    env.set_seed(0)
    fast = torch.tensor([[2, 0]]).expand(4, 2)
    still = torch.zeros(4, 1, 1)

    def act(td):
        td["walker", "action"] = fast
        return td.set(("pilot", "action"), still)

    following = env.rollout(4, act)["next"]

    assert following["walker", "terminated"][0].squeeze(-1).tolist() == [
        [False, False],
        [True, False],
        [True, False],
        [True, False],
    ]
    assert following["walker", "truncated"][0].squeeze(-1).tolist() == [[False, False]] * 3 + [
        [False, True]
    ]
    assert following["pilot", "truncated"][0].flatten().tolist() == [False, False, False, True]
    assert torch.equal(following["walker", "mask"], ~following["walker", "done"].squeeze(-1))
    assert following["truncated"][:, -1].all() and not following["terminated"].any()


def test_steps_of_the_simulator_are_repeated_for_all_agents():
    env = JaxEnv(Race(), batch_size=[2], categorical_action_encoding=True, action_repeat=2)
    td = env.reset()
    td["walker", "action"] = torch.ones(2, 2, dtype=torch.int64)
    td["pilot", "action"] = torch.zeros(2, 1, 1)

    following = env.step(td)["next"]

    assert following["walker", "reward"].flatten().tolist() == [2.0] * 4
    assert following["team_reward"].flatten().tolist() == [4.0] * 2


def test_masks_of_all_agents_reset_a_row_and_of_some_are_refused(race):
    td = race.reset()
    before = td["walker", "observation"].clone()
    some = torch.tensor([True, False, False, False])
    masks = {
        "walker": some[:, None, None].expand(4, 2, 1).clone(),
        "pilot": some[:, None, None].clone(),
    }

    asked = td.clone()
    for group, mask in masks.items():
        asked[group, "_reset"] = mask
    fresh = race.reset(asked)

    changed = (fresh["walker", "observation"] != before).flatten(1).any(1)
    assert changed.tolist() == some.tolist()
    partly = td.clone().set(("walker", "_reset"), masks["walker"])
    with pytest.raises(ResetMaskError, match="cannot be reset in part"):
        race.reset(partly)
    masks["walker"][0, 1] = False
    for group, mask in masks.items():
        partly[group, "_reset"] = mask
    with pytest.raises(ResetMaskError, match="cannot be reset in part"):
        race.reset(partly)


class Ahead(torch.nn.Module):
    def forward(self, place):
        return (place[..., 0] > 1).long()


class Pull(torch.nn.Module):
    def forward(self, places):
        return places.mean(-1, keepdim=True) * 0.1


def test_a_policy_for_each_group_runs_in_a_program_as_it_does_stepwise(race):
    def policy():
        walker = TensorDictModule(Ahead(), [("walker", "observation")], [("walker", "action")])
        pilot = TensorDictModule(Pull(), [("pilot", "observation")], [("pilot", "action")])
        return TensorDictSequential(walker, pilot)

    race.set_seed(3)
    stepped = race.rollout(6, policy(), break_when_any_done=False)
    race.set_seed(3)
    run = race.rollout(6, compile_policy(policy()), break_when_any_done=False)

    for key in (("walker", "action"), ("pilot", "action"), ("next", "walker", "reward")):
        torch.testing.assert_close(run[key], stepped[key])


def test_a_policy_in_jax_writes_by_group_and_is_told_what_is_missing(race):
    def act(params, observation, key):
        rows = observation["pilot"]["observation"].shape[0]
        pilot = {"action": jnp.zeros((rows, 1, 1))}
        return {"walker": {"action": jnp.ones((rows, 2), jnp.int32)}, "pilot": pilot}

    data = race.rollout(2, JaxPolicy(act), tensordict=TensorDict(batch_size=[2]))

    assert (data["walker", "action"] == 1).all() and not data["pilot", "action"].any()
    with pytest.raises(PolicyError, match=r"takes the actions \[\('pilot', 'action'\), \('walker'"):
        race.unroll(race.reset(), 2, JaxPolicy(lambda params, seen, key: {"action": 1}))


@pytest.mark.slow
def test_returns_are_summed_inside_the_program(race):
    summed = TransformedEnv(
        race, RewardSum(in_keys=[("walker", "reward")], out_keys=[("walker", "return")])
    )
    race.set_seed(0)

    data, root = summed.unroll(summed.reset(), 3)

    paid = data["next", "walker", "reward"].sum(1)
    torch.testing.assert_close(data["next", "walker", "return"][:, -1], paid)
    assert data["walker"].batch_size == (4, 3, 2) and root["walker"].batch_size == (4, 2)
