"""Games of several players: action masks, groups of agents, nested keys, turns."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from envkit import (
    ActionMask,
    Binary,
    Bounded,
    Categorical,
    Composite,
    EnvBase,
    InitTracker,
    OneHot,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    Unbounded,
    check_env_specs,
    step_mdp,
)

# --------------------------------------------------------------------------------------- tic-tac-toe

LINES = torch.tensor(
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]
)


class TicTacToe(EnvBase):
    """Two players in turn; everything that a move needs is in the data."""

    batch_locked = False

    def __init__(self, device="cpu"):
        super().__init__(device=device, batch_size=[])
        self.observation_spec = self.state_spec = Composite(
            board=Categorical(3, shape=(9,), dtype=torch.int64),
            turn=Categorical(2, shape=(1,), dtype=torch.int64),
            mask=Binary(9, dtype=torch.bool),
        )
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Categorical(9, shape=(), dtype=torch.int64)
        self.reward_spec = Unbounded(shape=(1,))
        self.full_done_spec = Composite(
            done=Categorical(2, shape=(1,), dtype=torch.bool),
            terminated=Categorical(2, shape=(1,), dtype=torch.bool),
        )

    def _reset(self, tensordict=None, **kwargs):
        shape = self.batch_size if tensordict is None else tensordict.shape
        return TensorDict(
            {
                "board": torch.full((*shape, 9), 2),
                "turn": torch.zeros(*shape, 1, dtype=torch.int64),
                "mask": torch.ones(*shape, 9, dtype=torch.bool),
            },
            batch_size=shape,
        )

    def _step(self, tensordict):
        turn = tensordict["turn"]
        board = tensordict["board"].scatter(-1, tensordict["action"].unsqueeze(-1), turn)
        won = (board[..., LINES] == turn.unsqueeze(-1)).all(-1).any(-1, keepdim=True)
        full = (board != 2).all(-1, keepdim=True)
        return TensorDict(
            {
                "board": board,
                "turn": 1 - turn,
                "mask": board == 2,
                "reward": won.float(),
                "done": won | full,
                "terminated": won | full,
            },
            tensordict.shape,
        )

    def _set_seed(self, seed):
        pass


def masked(env):
    return TransformedEnv(env, ActionMask(action_key="action", mask_key="mask"))


def test_tic_tac_toe_is_played_by_its_mask():
    env = masked(TicTacToe())
    check_env_specs(env)
    torch.manual_seed(0)

    for _ in range(10):
        game = env.rollout(20)
        moves = game["action"].tolist()
        assert len(set(moves)) == len(moves)
        assert game["next", "done"][-1].all() and not game["next", "done"][:-1].any()


def test_a_taken_field_is_not_in_the_action_spec():
    env = masked(TicTacToe())
    td = env.reset()

    td = step_mdp(env.step(td.set("action", torch.tensor(4))))

    assert not td["mask"][4]
    assert not env.action_spec.is_in(torch.tensor(4))
    assert env.action_spec.is_in(torch.tensor(5))


def test_many_boards_are_played_at_once():
    env = TicTacToe()
    td = env.reset(TensorDict(batch_size=[5]))

    game = env.rollout(
        9,
        policy=lambda td: td.set("action", td["mask"].float().argmax(-1)),
        tensordict=td,
        auto_reset=False,
        break_when_any_done=False,
    )

    assert game.shape == (5, 9)
    assert (game["action"][:, :5] == torch.arange(5)).all()


# --------------------------------------------------------------------------------- groups of agents


class Soccer(EnvBase):
    """Two teams of unlike size, each with an observation, an action and a reward of its own."""

    def __init__(self, device=None):
        super().__init__(device=device)
        self.teams = {"red": 2, "blue": 3}
        actions, observations, rewards, dones = {}, {}, {}, {}
        for team, size in self.teams.items():
            actions[team] = Composite(action=Bounded(-1, 1, shape=(size, 2)), shape=(size,))
            observations[team] = Composite(position=Unbounded(shape=(size, 2)), shape=(size,))
            rewards[team] = Composite(reward=Unbounded(shape=(size, 1)), shape=(size,))
            dones[team] = Composite(
                done=Categorical(2, shape=(size, 1), dtype=torch.bool), shape=(size,)
            )
        self.action_spec = Composite(actions)
        self.observation_spec = Composite(observations)
        self.reward_spec = Composite(rewards)
        self.done_spec = Composite(dones, done=Categorical(2, shape=(1,), dtype=torch.bool))
        self.positions = {}

    def _reset(self, tensordict=None, **kwargs):
        self.positions = {team: torch.zeros(size, 2) for team, size in self.teams.items()}
        self.clock = 0
        return TensorDict(
            {
                team: TensorDict({"position": at.clone()}, batch_size=at.shape[:1])
                for team, at in self.positions.items()
            }
        )

    def _step(self, tensordict):
        self.clock += 1
        out = TensorDict({"done": torch.tensor([self.clock >= 4])})
        for team in self.teams:
            self.positions[team] = at = self.positions[team] + tensordict[team, "action"]
            out[team] = TensorDict(
                {
                    "position": at.clone(),
                    "reward": at.norm(dim=-1, keepdim=True),
                    "done": torch.zeros(len(at), 1, dtype=torch.bool),
                },
                batch_size=at.shape[:1],
            )
        return out

    def _set_seed(self, seed):
        pass


def test_teams_have_keys_of_their_own():
    env = Soccer()
    check_env_specs(env)

    assert set(env.action_keys) == {("red", "action"), ("blue", "action")}
    assert set(env.reward_keys) == {("red", "reward"), ("blue", "reward")}
    assert set(env.done_keys) >= {"done", ("red", "done"), ("blue", "done")}
    assert env.full_action_spec["blue", "action"].shape == (3, 2)


def test_returns_of_teams_are_summed():
    env = TransformedEnv(
        Soccer(),
        RewardSum(
            in_keys=[("red", "reward"), ("blue", "reward")],
            out_keys=[("red", "episode_reward"), ("blue", "episode_reward")],
        ),
    )

    rollout = env.rollout(10)

    assert rollout.shape == (4,)
    for team in ("red", "blue"):
        paid = rollout["next", team, "reward"]
        torch.testing.assert_close(rollout["next", team, "episode_reward"], paid.cumsum(0))


def test_a_policy_for_each_team_acts_on_nested_keys():
    env = Soccer()
    policy = TensorDictSequential(
        *(
            TensorDictModule(
                nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
                in_keys=[(team, "position")],
                out_keys=[(team, "action")],
            )
            for team in ("red", "blue")
        )
    )

    rollout = env.rollout(3, policy)

    assert rollout["red", "action"].shape == (3, 2, 2)
    assert rollout["blue", "action"].shape == (3, 3, 2)


@pytest.mark.parametrize("batched", [SerialEnv, pytest.param(ParallelEnv, marks=pytest.mark.slow)])
def test_teams_play_in_batches(batched):
    env = batched(2, Soccer)

    rollout = env.rollout(6, break_when_any_done=False)

    assert rollout["blue", "position"].shape == (2, 6, 3, 2)
    assert rollout["next", "done"][:, 3].all()
    assert (rollout["blue", "position"][:, 4] == 0).all()
    env.close()


# ----------------------------------------------------------------- agents that share one key and leave


class Walkers(EnvBase):
    """Agents that end one by one; the episode ends with the last."""

    def __init__(self, n_agents=3):
        super().__init__()
        self.n_agents = n_agents
        agents = {"shape": (n_agents,)}
        self.observation_spec = Composite(
            agents=Composite(
                steps=Unbounded(shape=(n_agents, 1), dtype=torch.int64),
                alive=Binary(1, shape=(n_agents, 1), dtype=torch.bool),
                **agents,
            )
        )
        self.action_spec = Composite(
            agents=Composite(action=OneHot(4, shape=(n_agents, 4)), **agents)
        )
        self.reward_spec = Composite(
            agents=Composite(reward=Unbounded(shape=(n_agents, 1)), **agents)
        )
        self.done_spec = Composite(
            done=Categorical(2, shape=(1,), dtype=torch.bool),
            agents=Composite(done=Categorical(2, shape=(n_agents, 1), dtype=torch.bool), **agents),
        )

    def _reset(self, tensordict=None, **kwargs):
        self.steps = torch.zeros(self.n_agents, 1, dtype=torch.int64)
        return TensorDict({"agents": self._seen()})

    def _seen(self):
        limits = torch.arange(1, self.n_agents + 1).unsqueeze(-1)
        self.over = self.steps >= limits
        return TensorDict(
            {"steps": self.steps.clone(), "alive": ~self.over}, batch_size=[self.n_agents]
        )

    def _step(self, tensordict):
        self.steps += 1
        seen = self._seen()
        seen["reward"] = tensordict["agents", "action"].float().argmax(-1, keepdim=True).float()
        seen["done"] = self.over
        return TensorDict({"agents": seen, "done": self.over.all().unsqueeze(0)})

    def _set_seed(self, seed):
        pass


def test_agents_end_one_by_one_and_the_root_with_the_last():
    env = TransformedEnv(Walkers(), InitTracker())
    check_env_specs(env)

    rollout = env.rollout(10)

    ends = rollout["next", "agents", "done"].squeeze(-1)
    assert ends.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert rollout["next", "done"].flatten().tolist() == [False, False, True]


def test_steps_of_agents_are_counted_and_truncated_together():
    env = TransformedEnv(Walkers(6), StepCounter(max_steps=2))

    rollout = env.rollout(10)

    assert rollout.shape == (2,)
    assert rollout["next", "truncated"][-1].all()
