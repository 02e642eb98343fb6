"""Agents of games as rows of vector envs, beside the same games stepped by hand, and training with one policy for all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces

from envkit import (
    GymEnv,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    PettingZooEnv,
    PettingZooWrapper,
    SerialEnv,
    Timestep,
    VmasEnv,
    to_gym_vector,
    to_sb3,
)
from envkit.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from envkit.functional import AgentsDiscrete
from tests.zoo.pettingzoo_games import Fading

LIVES = (1, 2, 4, 3)  # agents 0 and 3 are terminated, 1 and 2 truncated
AGENTS = len(LIVES)


def game():
    return PettingZooWrapper(Fading(LIVES), use_mask=True, done_on_any=False)


class Uneven(Fading):
    """One agent sees more than the others."""

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (3 if agent == "agent_1" else 2,), np.float32)


@dataclass(frozen=True)
class Relay:
    """Two agents add 0 to 2 to their places; the first stops at 3, the game ends with both, places over 4 allow 0 only."""

    groups: ClassVar = {"runner": 2}
    action_space: ClassVar = {"runner": {"action": AgentsDiscrete.of(3, 2)}}
    reward_shape: ClassVar = {"runner": {"reward": (2, 1)}, "team_reward": (1,)}
    action_masks = ((("runner", "action"), ("runner", "action_mask")),)

    def reset(self, key):
        place = jax.random.uniform(key, (2,))
        return place, self.shown(place, jnp.zeros(2))

    def step(self, place, action):
        gone = action["runner"]["action"] * (place < jnp.array([3.0, 9.0]))
        return place + gone, self.shown(place + gone, gone)

    def shown(self, place, gone):
        arrived = place >= jnp.array([3.0, 9.0])
        observed = {
            "observation": place[:, None],
            "terminated": arrived[:, None],
            "action_mask": jnp.stack([place > -1, place < 4, place < 4], -1),
        }
        paid = {"runner": {"reward": gone[:, None]}, "team_reward": gone.sum().reshape(1)}
        return Timestep({"runner": observed}, paid, arrived.all())


class ByHand:
    """Games of PettingZoo stepped by hand; a game that is over begins again in the step in which it ends, or after."""

    def __init__(self, count: int, seed: int, *, same_step: bool):
        self.games = [Fading(LIVES) for _ in range(count)]
        self.same_step = same_step
        self.over = [False] * count
        self.first = self.joined([self.begun(game, seed + n) for n, game in enumerate(self.games)])

    @staticmethod
    def begun(game, seed=None):
        observations, _ = game.reset(seed=seed)
        game.ends = dict.fromkeys(game.possible_agents, (False, False))
        return observations, {}, {}, dict.fromkeys(game.possible_agents, True)

    def step(self, actions):
        moments, last = [], []
        for number, game in enumerate(self.games):
            if self.over[number]:
                moment, self.over[number] = self.begun(game), False
            else:
                moment = self.played(game, actions[number * AGENTS : (number + 1) * AGENTS])
                self.over[number] = not game.agents
            last.append(moment)
            if self.over[number] and self.same_step:
                fresh = self.begun(game)
                moment, self.over[number] = (fresh[0], *moment[1:3], fresh[3]), False
            moments.append(moment)
        return self.joined(moments), self.joined(last)[0]

    @staticmethod
    def played(game, actions):
        chosen = dict(zip(game.possible_agents, actions, strict=True))
        living = list(game.agents)
        observations, rewards, terminated, truncated, _ = game.step(
            {name: chosen[name] for name in living}
        )
        for name in living:
            game.ends[name] = terminated[name], truncated[name]
        ends = {} if game.agents else game.ends
        alive = {name: name in game.agents for name in game.possible_agents}
        return observations, rewards, ends, alive

    def joined(self, moments):
        columns = []
        for (observations, rewards, ends, alive), game in zip(moments, self.games, strict=True):
            for name in game.possible_agents:
                seen = observations.get(name, np.zeros(2, np.float32))
                end = ends.get(name, (False, False))
                columns.append((seen, np.float32(rewards.get(name, 0)), *end, alive[name]))
        return [np.array(column) for column in zip(*columns, strict=True)]


def assert_told(step, expected):
    observations, rewards, terminated, truncated, infos = step
    for got, known in zip(
        (observations, rewards, terminated, truncated, infos["alive"]), expected, strict=True
    ):
        np.testing.assert_array_equal(got, known)


ENVS = {
    "serial": (2, lambda: SerialEnv(2, game)),
    "processes": (2, lambda: ParallelEnv(2, game)),
    "without rows": (2, lambda: SerialEnv(2, game, share_individual_td=False)),
}


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("kind", ENVS)
def test_rows_are_the_agents_of_games_stepped_by_hand(kind, mode, opened):
    count, make = ENVS[kind]
    envs = opened(to_gym_vector(make(), mode, agents="rows"))
    hand = ByHand(count, 5, same_step=mode == "same_step")
    actions = np.random.default_rng(0)

    observations, infos = envs.reset(seed=5)

    assert envs.num_envs == count * AGENTS and envs.single_action_space == spaces.Discrete(3)
    np.testing.assert_array_equal(observations, hand.first[0])
    assert infos["alive"].all()
    for _ in range(12):
        chosen = actions.integers(0, 3, envs.num_envs)
        step = envs.step(chosen)
        expected, last = hand.step(chosen)
        assert_told(step, expected)
        if "final_obs" in step[4]:
            np.testing.assert_array_equal(np.stack(step[4]["final_obs"]), last)
            assert not step[4]["final_info"]["alive"].any()


def test_rows_of_a_mixed_env_are_those_of_its_members_one_after_the_other(opened):
    envs = opened(to_gym_vector(MixedEnv([SerialEnv(1, game), SerialEnv(2, game)]), agents="rows"))
    envs.reset(seed=3)

    observations, *_, infos = envs.step(np.zeros(3 * AGENTS, int))

    assert observations[:, 0].tolist() == [0, 1, 2, 3] * 3
    assert infos["alive"].tolist() == [False, True, True, True] * 3
    assert envs.get_attr("use_mask") == (True,) * (3 * AGENTS)


def test_the_callers_resets_choose_whole_games(opened):
    envs = opened(to_gym_vector(SerialEnv(2, game), "disabled", agents="rows"))
    envs.reset(seed=[5] * AGENTS + [9] * AGENTS)
    still = np.repeat([False, True], AGENTS)
    for _ in range(max(LIVES)):
        *_, terminated, truncated, _ = envs.step(np.ones(2 * AGENTS, int))

    observations, infos = envs.reset(options={"reset_mask": ~still})

    assert (terminated | truncated).all() and terminated.tolist() == [True, False, False, True] * 2
    assert observations[:, 1].tolist() == [0] * AGENTS + [0, 0, 4, 0]
    assert infos["alive"].tolist() == [True] * AGENTS + [False] * AGENTS
    with pytest.raises(
        ArgumentError, match=r"a game of 4 agents is reset as a whole. Choose all 4"
    ):
        envs.reset(options={"reset_mask": np.arange(2 * AGENTS) < 2})
    with pytest.raises(
        ArgumentError, match=r"given 5 and 6, .* Pass the same for its rows, 0 to 3"
    ):
        envs.reset(seed=[5, 6] * AGENTS)


def test_options_of_the_agents_of_a_game_are_compared_also_where_they_hold_arrays(opened):
    pytest.importorskip("stable_baselines3")
    envs = to_sb3(opened(SerialEnv(1, game)), agents="rows")
    alike = [{"start": np.arange(2), "names": ["a", {"b": 1}]} for _ in range(AGENTS)]
    unlike = [{**alike[0], "start": np.arange(2) + row} for row in range(AGENTS)]

    envs.set_options(alike)
    assert len(envs.reset()) == AGENTS

    envs.set_options(unlike)
    with pytest.raises(ArgumentError, match="Pass the same for its rows, 0 to 3"):
        envs.reset()


def test_the_game_ends_for_all_rows_where_its_first_death_ends_it(opened):
    env = SerialEnv(1, lambda: PettingZooWrapper(Fading(LIVES), use_mask=True))
    envs = opened(to_gym_vector(env, agents="rows"))
    envs.reset(seed=0)

    *_, terminated, truncated, infos = envs.step(np.zeros(AGENTS, int))

    assert terminated.all() and not truncated.any()
    assert infos["alive"].tolist() == [False, True, True, True]


def test_a_time_limit_of_the_game_truncates_living_rows_alone(opened):
    env = JaxEnv(Relay(), batch_size=[3], categorical_action_encoding=True, episode_length=4)
    envs = opened(to_gym_vector(env, "same_step", agents="rows", info_keys=["action_mask"]))
    root = env.rollout(1)  # the env is free to be used in other ways between
    envs.reset(seed=0)
    actions = np.array([2, 1] * 3)

    told = [envs.step(actions) for _ in range(4)]

    ends = [np.stack(flags).T.tolist() for _, _, *flags, _ in told]
    assert root["runner", "observation"].shape == (3, 1, 2, 1)
    assert ends[:3] == [[[False, False]] * 6] * 3
    assert ends[3] == [[True, False], [False, True]] * 3
    assert told[1][4]["alive"].tolist() == [False, True] * 3


def test_rows_of_a_jax_env_are_its_groups(opened):
    def make():
        env = JaxEnv(Relay(), batch_size=[3], categorical_action_encoding=True)
        env.set_seed(7)
        return env

    envs = opened(to_gym_vector(make(), to_numpy=False, agents="rows"))
    td = make().reset()

    observations, _ = envs.reset(seed=7)

    assert envs.single_observation_space.keys() == {"observation", "action_mask"}
    for step in range(6):
        assert torch.equal(observations["observation"], td["runner", "observation"].flatten(0, 1))
        assert torch.equal(
            observations["action_mask"].bool(), td["runner", "action_mask"].flatten(0, 1)
        )
        chosen = torch.tensor([step % 3, 0] * 3)
        observations, rewards, terminated, truncated, infos = envs.step(chosen)
        td["runner", "action"] = chosen.view(3, 2)
        td = make().step(td)["next"]
        assert torch.equal(rewards, td["runner", "reward"].flatten())
        assert torch.equal(infos["alive"], ~td["runner", "done"].flatten())
        assert not (terminated | truncated).any()


@pytest.mark.parametrize("to_numpy", [True, False])
def test_agents_without_flags_are_alive_until_their_game_ends(to_numpy, opened):
    env, other = (opened(VmasEnv("balance", 3, max_steps=4, n_agents=2, seed=0)) for _ in range(2))
    envs = to_gym_vector(env, "same_step", agents="rows", to_numpy=to_numpy)
    envs.reset(seed=5)
    other.set_seed(5)
    root = other.reset()

    for number in range(6):
        push = torch.full((6, 2), 0.1 * number)
        shown, paid, terminated, truncated, infos = envs.step(push.numpy() if to_numpy else push)
        step, root = other.step_and_maybe_reset(
            root.set(("agents", "action"), push.unflatten(0, (3, 2)))
        )

        over = step["next", "truncated"].expand(3, 2).flatten()
        assert over.all() == (number == 3)
        expected = root["agents", "observation"].flatten(0, 1), step["next", "agents", "reward"]
        for one, known in ((shown, expected[0]), (paid, expected[1].flatten()), (truncated, over)):
            assert np.array_equal(one, known.numpy())
        assert not terminated.any() and infos["alive"].all()
        if number == 3:
            last = step["next", "agents", "observation"].flatten(0, 1).numpy()
            final = infos["final_obs"]
            assert np.array_equal(np.stack([*final]) if to_numpy else final, last)
            assert not infos["final_info"]["alive"].any()


def test_masks_of_agents_are_those_of_their_rows():
    env = JaxEnv(Relay(), batch_size=[2], categorical_action_encoding=True)
    envs = to_sb3(env, agents="rows")
    envs.seed(0)
    seen = envs.reset()
    allowed = []

    for _ in range(5):
        masks = np.stack(envs.env_method("action_masks"))
        np.testing.assert_array_equal(masks, seen["action_mask"])
        allowed.append(masks.sum(1).tolist())
        seen, *_ = envs.step(masks.sum(1) - 1)

    assert allowed[0] == [3] * 4 and allowed[-1] == [1] * 4


def test_one_policy_of_sb3_trains_on_all_agents(opened):
    sb3 = pytest.importorskip("stable_baselines3")
    envs = to_sb3(opened(SerialEnv(2, game)), agents="rows")
    hand = ByHand(2, 5, same_step=True)
    envs.seed(5)
    first = envs.reset()
    np.testing.assert_array_equal(first, hand.first[0])
    for _ in range(8):
        chosen = np.arange(2 * AGENTS) % 3
        observations, rewards, done, infos = envs.step(chosen)
        (seen, paid, terminated, truncated, _), last = hand.step(chosen)
        np.testing.assert_array_equal(observations, seen)
        np.testing.assert_array_equal(rewards, paid)
        np.testing.assert_array_equal(done, terminated | truncated)
        for row in np.flatnonzero(done):
            np.testing.assert_array_equal(infos[row]["terminal_observation"], last[row])
            assert infos[row]["TimeLimit.truncated"] == truncated[row]

    model = sb3.PPO("MlpPolicy", envs, n_steps=8, batch_size=16, n_epochs=1, device="cpu")

    assert model.learn(64).num_timesteps == 64


def test_a_game_of_the_library_shows_its_agents_in_their_order(opened):
    pytest.importorskip("mpe2")
    from mpe2 import simple_spread_v3

    env = SerialEnv(1, lambda: PettingZooEnv("mpe/simple_spread_v3"))
    envs = opened(to_gym_vector(env, agents="rows"))
    bare = simple_spread_v3.parallel_env()
    observations, _ = envs.reset(seed=2)
    expected, _ = bare.reset(seed=2)
    rng = np.random.default_rng(0)

    for _ in range(25):
        np.testing.assert_array_equal(observations, np.stack([*expected.values()]))
        chosen = rng.integers(0, 5, 3)
        observations, rewards, terminated, truncated, _ = envs.step(chosen)
        expected, paid, *_ = bare.step(dict(zip(bare.agents, chosen.tolist(), strict=True)))
        np.testing.assert_array_equal(rewards, np.float32([*paid.values()]))

    assert truncated.all() and not terminated.any()


def test_misfits_are_refused_with_what_differs():
    with pytest.raises(ArgumentError, match=r"agent 0 of .* shape \(2,\), .* and agent 1 .*\(3,\)"):
        to_gym_vector(SerialEnv(2, lambda: PettingZooWrapper(Uneven((2, 2)))), agents="rows")
    with pytest.raises(ArgumentError, match="GymEnv has no groups of agents"):
        to_sb3(GymEnv("CartPole-v1", num_envs=2), agents="rows")
    turns = partial(PettingZooEnv, "classic/tictactoe_v3", parallel=False, use_mask=True)
    with pytest.raises(ArgumentError, match=r"take turns. Make it with parallel=True"):
        to_gym_vector(SerialEnv(2, turns), agents="rows")
    with pytest.raises(ArgumentError, match="agents is 'agent', but must be 'rows' or None"):
        to_sb3(game(), agents="agent")
    with pytest.raises(ArgumentError, match="or show the agents of a game as rows"):
        to_gym_vector(SerialEnv(2, game))
    with pytest.raises(ArgumentError, match=r"is \(\). Make it with num_envs=n"):
        to_gym_vector(game(), agents="rows")
    with pytest.raises(ArgumentTypeError, match="must be an env"):
        to_gym_vector(3, agents="rows")
    with pytest.raises(MissingKeyError, match="info_keys names 'mood'"):
        to_gym_vector(SerialEnv(2, game), agents="rows", info_keys=["mood"])


def test_attributes_of_a_game_are_those_of_its_agents(opened):
    envs = opened(to_gym_vector(SerialEnv(2, game), agents="rows"))

    envs.set_attr("mood", [1] * AGENTS + [2] * AGENTS)

    assert envs.get_attr("mood") == (1,) * AGENTS + (2,) * AGENTS

    envs.set_attr("mood", list(np.repeat([0.5, 1.5], AGENTS)))  # equal numbers, each an object

    assert envs.get_attr("mood") == (0.5,) * AGENTS + (1.5,) * AGENTS
    with pytest.raises(ArgumentError, match="'mood' is 1 and 2 for agents of game 0"):
        envs.set_attr("mood", [1, 2] * AGENTS)
