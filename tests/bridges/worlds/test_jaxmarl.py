"""`JaxMARLEnv`: the same numbers as JaxMARL stepped by hand, groups as of PettingZoo, masks, ends of agents, policies."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from envkit import (
    Categorical,
    JaxPolicy,
    MarlGroupMapType,
    OneHot,
    PettingZooEnv,
    RewardSum,
    TransformedEnv,
    compile_policy,
)
from envkit.data.transition import leaves
from envkit.errors import ArgumentError, ArgumentTypeError, OptionError, SpecError, UnsupportedError
from envkit_bridges.worlds.jaxmarl import JaxMARLEnv
from tests.bridges.worlds.libraries import assert_equals_jaxmarl

ROWS = 2
SPREAD = "MPE_simple_spread_v3"
ADVERSARY = "MPE_simple_adversary_v3"


@pytest.fixture(scope="module")
def spread():
    return JaxMARLEnv(SPREAD, batch_size=[ROWS])


@pytest.fixture(scope="module")
def adversary():
    return JaxMARLEnv(ADVERSARY, batch_size=[ROWS])


@pytest.fixture(scope="module")
def battle():
    """Two teams whose soldiers die one by one."""
    return JaxMARLEnv("SMAX", env_kwargs={"max_steps": 50}, batch_size=[ROWS], use_mask=True)


@pytest.mark.slow  # compiles for twelve seconds
def test_a_riddle_equals_jaxmarl_stepped_by_hand():
    riddle = JaxMARLEnv("switch_riddle", batch_size=[ROWS])

    solved = assert_equals_jaxmarl(riddle, steps=20)

    assert solved > ROWS


# ------------------------------------------------------------------------------- groups, as of PettingZoo


GAMES = {
    SPREAD: "mpe/simple_spread_v3",
    ADVERSARY: "mpe/simple_adversary_v3",
}


@pytest.mark.parametrize("name", GAMES)
def test_specs_are_those_of_the_same_game_of_pettingzoo(name):
    ours, theirs = JaxMARLEnv(name), PettingZooEnv(GAMES[name]).to("cpu")

    assert ours.group_map == theirs.group_map
    assert ours.full_action_spec == theirs.full_action_spec
    assert ours.full_reward_spec == theirs.full_reward_spec
    assert ours.full_done_spec == theirs.full_done_spec
    for group in ours.group_map:
        assert ours.observation_spec[group] == theirs.observation_spec[group]


class Highest(torch.nn.Module):
    """Choose by the largest of five numbers that are observed."""

    def forward(self, observation):
        return observation[..., :5].argmax(-1)


def policy_of(groups):
    return TensorDictSequential(
        *[
            TensorDictModule(Highest(), [(group, "observation")], [(group, "action")])
            for group in groups
        ]
    )


def layout(td):
    shapes = {path: (leaf.shape, leaf.dtype) for path, leaf in leaves(td) if "state" not in path}
    nodes = {key: td[key].batch_size for key in td.keys(True) if key[-1:] == ("agent",)}
    return shapes, nodes, td["agent"].batch_size, td["next", "agent"].batch_size


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_policy_gives_one_layout_in_jaxmarl_and_in_pettingzoo_and_a_program_does_as_it_does(
    adversary,
):
    game = PettingZooEnv(GAMES[ADVERSARY])
    policy = policy_of(game.group_map)
    adversary.set_seed(0)
    stepped = adversary.rollout(8, policy)
    adversary.set_seed(0)
    compiled = adversary.rollout(8, compile_policy(policy_of(game.group_map)))

    assert layout(stepped[0]) == layout(game.rollout(8, policy_of(game.group_map)))
    assert layout(compiled[0]) == layout(stepped[0])
    for group in adversary.group_map:
        for entry in ("observation", "action"):
            torch.testing.assert_close(compiled[group, entry], stepped[group, entry])
        assert torch.equal(
            compiled[group, "action"], compiled[group, "observation"][..., :5].argmax(-1)
        )


@pytest.mark.parametrize("name", ["storm", "storm_np", "storm_2p"])
def test_games_that_number_their_agents_have_them_in_one_group(name):
    env = JaxMARLEnv(name)

    assert env.group_map == {"agent": ["agent_0", "agent_1"]}
    assert env.observation_spec["agent"].shape == (2,)


def test_groups_are_by_name_or_as_they_are_said(spread):
    apart = JaxMARLEnv(SPREAD, group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT)
    named = JaxMARLEnv(SPREAD, group_map={"pair": ["agent_2", "agent_0"], "other": ["agent_1"]})

    assert spread.group_map == {"agent": ["agent_0", "agent_1", "agent_2"]}
    assert list(apart.group_map) == ["agent_0", "agent_1", "agent_2"]
    assert named.full_action_spec["pair", "action"] == Categorical(5, shape=(2,))
    assert named.observation_spec["pair"].shape == (2,)


@pytest.mark.slow
def test_one_hot_actions_have_an_axis_of_options():
    env = JaxMARLEnv(SPREAD, categorical_action_encoding=False)

    assert env.action_spec == OneHot(5, (3, 5), dtype=torch.int64)
    data = env.step(env.rand_action(env.reset()))
    assert data["agent", "action"].sum(-1).tolist() == [1, 1, 1]


def test_unlike_agents_are_taken_apart_and_refused_together():
    listener = JaxMARLEnv("MPE_simple_speaker_listener_v4")

    assert listener.full_action_spec["speaker", "action"].shape == (1,)
    with pytest.raises(SpecError, match=r"unlike shapes.*ONE_GROUP_PER_AGENT"):
        JaxMARLEnv("MPE_simple_speaker_listener_v4", group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)


# ---------------------------------------------------------------------------- masks, ends, rewards


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_actions_are_those_that_the_library_allows(battle):
    battle.set_seed(0)
    data, td = battle.unroll(battle.reset(), 40)
    td = battle.rand_action(td)

    for group in ("ally", "enemy"):
        for one in (data, td):
            mask, action = one[group, "action_mask"], one[group, "action"]
            assert mask.shape[-1] == 10 and not mask.all()
            assert mask.gather(-1, action[..., None]).all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_soldiers_that_die_stay_dead_and_those_that_live_end_with_the_game(battle):
    battle.set_seed(0)
    data, _ = battle.unroll(battle.reset(), 99)
    following = data["next"]

    over = following["done"].squeeze(-1)
    assert over.any()
    for group in ("ally", "enemy"):
        done, mask = following[group, "done"].squeeze(-1), following[group, "mask"]
        died = done[:, :-1] & ~over[:, :-1, None]
        assert died.any() and done[:, 1:][died].all()  # in the step after it, unless a game begins
        assert done[over].all()
        assert torch.equal(mask, ~done)
        early = done & ~over[..., None]
        assert following[group, "terminated"].squeeze(-1)[early].all()
        assert not following[group, "truncated"].squeeze(-1)[early].any()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_time_limit_truncates_every_agent_that_lives():
    env = JaxMARLEnv(SPREAD, batch_size=[ROWS], episode_length=3)
    env.set_seed(0)

    data = env.rollout(6, break_when_any_done=False)

    cut = torch.tensor([False, False, True, False, False, True])
    assert torch.equal(data["next", "truncated"].squeeze(-1), cut.expand(ROWS, 6))
    assert torch.equal(
        data["next", "agent", "truncated"].squeeze(-1), cut[:, None].expand(ROWS, 6, 3)
    )
    assert not data["next", "agent", "terminated"].any()
    assert not data["agent", "done"].any()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_team_is_paid_what_the_library_pays_it():
    env = JaxMARLEnv("hanabi", batch_size=[ROWS])
    env.set_seed(0)

    data, _ = env.unroll(env.reset(), 40)

    assert data["next", "team_reward"].shape == (ROWS, 40, 1)
    assert torch.equal(data["next", "team_reward"], data["next", "agent", "reward"][:, :, 0])
    assert data["next", "team_reward"].any()


def test_a_game_is_reset_as_a_whole(spread):
    spread.set_seed(0)
    td = spread.reset()
    before = td["agent", "observation"].clone()
    some = torch.zeros(ROWS, 3, 1, dtype=torch.bool)
    some[0] = True

    whole = spread.reset(td.clone().set(("agent", "_reset"), some))
    some[0, 1] = False

    assert not torch.equal(whole["agent", "observation"][0], before[0])
    assert torch.equal(whole["agent", "observation"][1], before[1])
    with pytest.raises(RuntimeError, match="cannot be reset in part"):
        spread.reset(td.clone().set(("agent", "_reset"), some))


# ------------------------------------------------------------------------ what stateless envs can do


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_returns_of_agents_are_summed_inside_the_program_and_a_policy_may_be_jax(adversary):
    summed = TransformedEnv(
        adversary,
        RewardSum(in_keys=[("agent", "reward")], out_keys=[("agent", "episode_reward")]),
    )

    def still(params, observation, key):
        rows = observation["agent"]["observation"].shape[0]
        return {
            "adversary": {"action": jnp.zeros((rows, 1), jnp.int32)},
            "agent": {"action": jnp.zeros((rows, 2), jnp.int32)},
        }

    summed.set_seed(0)

    data = summed.rollout(5, JaxPolicy(still), tensordict=TensorDict(batch_size=[3]))

    assert not data["agent", "action"].any() and data["agent"].batch_size == (3, 5, 2)
    torch.testing.assert_close(
        data["next", "agent", "episode_reward"][:, -1], data["next", "agent", "reward"].sum(1)
    )


def test_a_stored_state_is_drawn(spread):
    spread.set_seed(0)
    td = spread.reset()

    frames = [spread.render(td, row=row) for row in range(ROWS)]

    assert all(frame.shape == (500, 500, 3) and frame.dtype == torch.uint8 for frame in frames)
    assert not torch.equal(*frames)
    riddle = JaxMARLEnv("switch_riddle")
    with pytest.raises(UnsupportedError, match="SwitchRiddle of JaxMARL cannot be drawn"):
        riddle.render(riddle.reset())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_games_of_storm_are_drawn_and_show_what_is_each_agent_s():
    env = JaxMARLEnv("storm_2p", batch_size=[ROWS], metrics=True)
    env.set_seed(0)
    td = env.reset()
    later = env.rand_step(td.clone())["next"]

    first, second = env.render(td), env.render(later)

    assert td["agent", "observation", "inventory"].shape == (ROWS, 2, 6)
    assert first.shape == second.shape and first.dtype == second.dtype == torch.uint8
    before, after = ((frame[-64:] == 255).all(-1).split(32) for frame in (first, second))
    width = second.shape[1] // env.num_inner_steps
    assert [bar.sum() for bar in before] == [0, 0]
    assert [bar.sum() for bar in after] == [32 * width, 0] and after[0][:, :width].all()


# --------------------------------------------------------------------------------- names and errors


def test_wrong_options_are_told(spread):
    with pytest.raises(ArgumentTypeError, match="use_mask is 'no', but must be a bool"):
        JaxMARLEnv(SPREAD, use_mask="no")
    with pytest.raises(ArgumentError, match="agent 'agent_2' is in 0 groups"):
        JaxMARLEnv(SPREAD, group_map={"agent": ["agent_0", "agent_1"]})
    with pytest.raises(ArgumentError, match="a group 'state'"):
        JaxMARLEnv(SPREAD, group_map={"state": ["agent_0", "agent_1", "agent_2"]})
    with pytest.raises(OptionError, match="'maximum'"):
        JaxMARLEnv("switch_riddle", env_kwargs={"maximum": 3})
    more = JaxMARLEnv(SPREAD, env_kwargs={"num_agents": 4, "num_landmarks": 4})
    assert len(more.group_map["agent"]) == 4
    assert "env_kwargs={'num_agents': 4" in repr(more)
    assert spread.num_agents == 3
