"""Agents that plan, remember and imagine; simulators that reset themselves; agents in groups of all kinds."""

from __future__ import annotations

from typing import Unpack

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import MLP, EGreedyModule, LSTMModule, QValueModule
from torchrl.objectives import DQNLoss

from envkit import (
    Bounded,
    Categorical,
    Composite,
    EnvBase,
    GymEnv,
    InitTracker,
    MarlGroupMapType,
    OneHot,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    Unbounded,
    check_env_specs,
    check_marl_grouping,
    set_exploration_type,
    step_mdp,
)
from envkit import ExplorationType as Exploration
from envkit.env.options import EnvOptions


class Corridor(EnvBase):
    """Walk along a line towards 3; the place is in the data, and a reset can begin anywhere."""

    batch_locked = False  # type: ignore[assignment]
    _supports_set_state = True

    def __init__(self, device=None):
        super().__init__(device=device)
        self.observation_spec = Composite(place=Unbounded((1,)))
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(-1.0, 1.0, (1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict=None, set_state=False):
        shape = () if tensordict is None else tensordict.batch_size
        place = torch.zeros(*shape, 1)
        if set_state and tensordict is not None:
            place = tensordict["place"]
        return TensorDict({"place": place}, shape)

    def _step(self, tensordict):
        place = tensordict["place"] + tensordict["action"]
        return TensorDict(
            {"place": place, "reward": -(place - 3).abs(), "terminated": place >= 3},
            tensordict.batch_size,
        )

    def _set_seed(self, seed):
        self.rng = torch.manual_seed(seed)


def test_a_planner_tries_many_futures_from_where_it_is():
    env = Corridor()
    now = env.reset()
    torch.manual_seed(0)

    for _ in range(5):
        futures = now.select("place").expand(64).clone()
        plans = env.action_spec_unbatched.rand((4, 64))
        imagined = env.rollout(
            4, actions=plans, tensordict=futures, set_state=True, break_when_any_done=False
        )
        best = imagined["next", "reward"].sum(1).argmax()
        now = step_mdp(env.step(now.set("action", plans[0, best])))

    assert now["place"].item() > 1.5


def test_a_trajectory_is_replayed_without_a_policy():
    env = TransformedEnv(Corridor(), StepCounter())
    env.set_seed(0)
    first = env.rollout(5)

    again = env.rollout(100, actions=first["action"])

    assert again.shape == (5,)
    assert torch.equal(again["next", "place"], first["next", "place"])


def test_specs_are_found_by_running_a_policy():
    class Undeclared(EnvBase):
        def _reset(self, tensordict=None):
            return TensorDict({"observation": torch.zeros(2)})

        def _step(self, tensordict):
            seen = tensordict["action"].repeat(2)
            return TensorDict({"observation": seen, "reward": seen[:1], "done": seen[:1] > 3})

        def _set_seed(self, seed): ...

    policy = TensorDictModule(nn.Linear(2, 1), in_keys=["observation"], out_keys=["action"])

    env = Undeclared().auto_specs_(policy)

    assert env.observation_spec["observation"].shape == (2,)
    assert env.rollout(3, policy).shape == (3,)


class Remember(EnvBase):
    """Shows a sign at the beginning, and pays for naming it at the end."""

    def __init__(self, device=None):
        super().__init__(device=device)
        self.observation_spec = Composite(observation=Unbounded((2,)))
        self.action_spec = OneHot(2)
        self.reward_spec = Unbounded((1,))
        self.time = 0

    def _reset(self, tensordict=None, **kwargs):
        self.time, self.sign = 0, torch.eye(2)[torch.randint(2, ())]
        return TensorDict({"observation": self.sign})

    def _step(self, tensordict):
        self.time += 1
        named = (tensordict["action"] * self.sign).sum(-1, keepdim=True)
        over = torch.tensor([self.time == 4])
        return TensorDict({"observation": torch.zeros(2), "reward": named * over, "done": over})

    def _set_seed(self, seed):
        torch.manual_seed(seed)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_recurrent_q_network_is_primed_by_its_env(workers):
    lstm = LSTMModule(input_size=2, hidden_size=8, in_key="observation", out_key="features")
    make = Remember if not workers else (lambda: SerialEnv(workers, Remember))
    env = TransformedEnv(make(), InitTracker())
    env.append_transform(lstm.make_tensordict_primer())
    head = TensorDictModule(
        MLP(8, 2, num_cells=[8]), in_keys=["features"], out_keys=["action_value"]
    )
    value = TensorDictSequential(lstm, head, QValueModule(action_space="one_hot"))
    explore = EGreedyModule(env.action_spec, annealing_num_steps=10)

    data = env.rollout(9, TensorDictSequential(value, explore), break_when_any_done=False)

    assert data["recurrent_state_h"].shape == (*env.batch_size, 9, 1, 8)
    begun = data["is_init"].squeeze(-1)
    assert begun.sum(-1).eq(3).all()
    assert data["recurrent_state_h"][begun].eq(0).all()
    assert data["recurrent_state_h"][~begun].ne(0).any()


def test_q_learning_takes_the_data_of_an_env():
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(20))
    net = TensorDictModule(
        MLP(4, 2, num_cells=[8]), in_keys=["observation"], out_keys=["action_value"]
    )
    actor = TensorDictSequential(net, QValueModule(spec=env.action_spec))
    loss = DQNLoss(actor, action_space=env.action_spec, delay_value=False)

    with set_exploration_type(Exploration.DETERMINISTIC):
        data = env.rollout(10, actor)
    loss(data)["loss"].backward()

    assert data["action"].sum(-1).eq(1).all()
    assert any(weight.grad is not None for weight in loss.parameters())


class World(EnvBase):
    """An env made of a network that has learnt what another env does."""

    batch_locked = False  # type: ignore[assignment]

    def __init__(self, model, device=None):
        super().__init__(device=device)
        self.model = model
        self.observation_spec = Composite(place=Unbounded((1,)))
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(-1.0, 1.0, (1,))

    def _reset(self, tensordict=None):
        shape = () if tensordict is None else tensordict.batch_size
        return TensorDict({"place": torch.zeros(*shape, 1)}, shape)

    def _step(self, tensordict):
        change, reward = self.model(tensordict["place"], tensordict["action"])
        return TensorDict(
            {"place": tensordict["place"] + change, "reward": reward}, tensordict.batch_size
        )

    def _set_seed(self, seed): ...


def test_an_agent_is_trained_in_a_model_it_has_learnt():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 1)

        def forward(self, place, action):
            change = self.net(torch.cat([place, action], -1))
            return change, -(place + change - 3).abs()

    torch.manual_seed(0)
    model, real = Model(), Corridor()
    seen = real.rollout(60, break_when_any_done=False).reshape(-1)
    fit = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(60):
        change, _ = model(seen["place"], seen["action"])
        error = (seen["place"] + change - seen["next", "place"]).square().mean()
        fit.zero_grad()
        error.backward()
        fit.step()
    policy = TensorDictModule(
        nn.Sequential(nn.Linear(1, 1), nn.Tanh()), in_keys=["place"], out_keys=["action"]
    )
    learn = torch.optim.Adam(policy.parameters(), 0.2)
    imagined = World(model)

    before = imagined.rollout(4, policy)["next", "reward"].sum()
    for _ in range(15):
        loss = -imagined.rollout(4, policy)["next", "reward"].sum()
        learn.zero_grad()
        loss.backward()
        learn.step()

    assert error < 0.05
    assert imagined.rollout(4, policy)["next", "reward"].sum() > before


class Looping(EnvBase):
    """Begins a new episode in the step that ends one."""

    def __init__(self, **options: Unpack[EnvOptions]):
        super().__init__(**options)
        self.observation_spec = Composite(time=Unbounded((1,)))
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded((1,))
        self.time = 0.0

    def _reset(self, tensordict=None):
        self.time = 0.0
        return TensorDict({"time": torch.zeros(1)})

    def _step(self, tensordict):
        self.time = (self.time + 1) % 3
        done = torch.tensor([self.time == 0])
        return TensorDict(
            {"time": torch.tensor([self.time]), "reward": torch.ones(1), "done": done}
        )

    def _set_seed(self, seed): ...


def test_a_simulator_that_resets_itself_is_told_at_construction():
    env = Looping(auto_reset=True)

    data = env.rollout(7, break_when_any_done=False)

    assert data["time"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]
    ended = data["next", "done"].flatten()
    assert ended.tolist() == [False, False, True, False, False, True, False]
    assert data["next", "time"][ended].isnan().all()


class Team(EnvBase):
    """Agents with a flag each, in whatever groups the user wants."""

    def __init__(
        self, agents=("scout", "guard", "medic"), group_map=MarlGroupMapType.ALL_IN_ONE_GROUP
    ):
        super().__init__()
        names = list(agents)
        self.group_map = (
            group_map.get_group_map(names) if isinstance(group_map, MarlGroupMapType) else group_map
        )
        check_marl_grouping(self.group_map, names)
        observation, action, reward = Composite(), Composite(), Composite()
        for group, members in self.group_map.items():
            n = len(members)
            observation[group] = Composite(observation=Unbounded((n, 2)), shape=(n,))
            action[group] = Composite(action=Categorical(3, shape=(n,)), shape=(n,))
            reward[group] = Composite(reward=Unbounded((n, 1)), shape=(n,))
        self.observation_spec, self.action_spec, self.reward_spec = observation, action, reward

    def _seen(self):
        return TensorDict(
            {
                group: TensorDict({"observation": torch.zeros(len(members), 2)}, [len(members)])
                for group, members in self.group_map.items()
            }
        )

    def _reset(self, tensordict=None):
        return self._seen()

    def _step(self, tensordict):
        out = self._seen()
        for group in self.group_map:
            out[group, "reward"] = tensordict[group, "action"].unsqueeze(-1).float()
        return out

    def _set_seed(self, seed): ...


@pytest.mark.parametrize(
    ("group_map", "keys"),
    [
        (MarlGroupMapType.ALL_IN_ONE_GROUP, [("agents", "action")]),
        (
            MarlGroupMapType.ONE_GROUP_PER_AGENT,
            [("guard", "action"), ("medic", "action"), ("scout", "action")],
        ),
        ({"fast": ["scout"], "slow": ["guard", "medic"]}, [("fast", "action"), ("slow", "action")]),
    ],
)
def test_the_user_groups_the_agents(group_map, keys):
    env = Team(group_map=group_map)

    check_env_specs(env)

    assert env.action_keys == keys
    assert env.rollout(2)["next", keys[0][0], "reward"].shape[-1] == 1


def test_an_agent_in_two_groups_is_refused():
    with pytest.raises(ValueError, match="'scout' is in 2 groups"):
        Team(group_map={"a": ["scout", "guard"], "b": ["scout", "medic"]})


class Unlike(EnvBase):
    """A fly sees two numbers and an ant three; specs are those of one env, whatever its batch size."""

    def __init__(self, batch_size=()):
        super().__init__(batch_size=batch_size)
        agents = [Composite(observation=Unbounded((size,))) for size in (2, 3)]
        self.observation_spec_unbatched = Composite(agents=torch.stack(agents))
        self.action_spec_unbatched = Composite(
            agents=Composite(action=Bounded(-1.0, 1.0, (2, 1)), shape=(2,))
        )
        self.reward_spec_unbatched = Unbounded((1,))

    def _seen(self):
        parts = [
            TensorDict({"observation": torch.ones(*self.batch_size, size)}, self.batch_size)
            for size in (2, 3)
        ]
        agents = LazyStackedTensorDict(*parts, stack_dim=self.batch_dims)
        return TensorDict({"agents": agents}, self.batch_size)

    def _reset(self, tensordict=None):
        return self._seen()

    def _step(self, tensordict):
        reward = tensordict["agents", "action"].sum(-2)
        return self._seen().set("reward", reward)

    def _set_seed(self, seed): ...


def test_each_of_two_unlike_agents_acts_by_a_network_of_its_own():
    networks = [nn.Linear(2, 1), nn.Linear(3, 1)]

    def policy(tensordict):
        for agent, network in zip(tensordict["agents"].unbind(-1), networks, strict=True):
            agent["action"] = network(agent["observation"]).tanh()
        return tensordict

    data = Unlike().rollout(4, policy)

    fly, ant = data["agents"].unbind(-1)
    assert fly["observation"].shape == (4, 2)
    assert ant["observation"].shape == (4, 3)
    assert data["next", "reward"].requires_grad
    assert SerialEnv(2, Unlike).rollout(3, policy).shape == (2, 3)
    assert Unlike(batch_size=[5]).observation_spec.shape == (5,)


def test_a_policy_need_not_write_into_what_it_is_given():
    plan = TensorDictModule(
        lambda place: torch.ones_like(place), in_keys=["place"], out_keys=["action"], inplace=False
    )

    data = Corridor().rollout(9, plan)

    assert data["place"].flatten().tolist() == [0, 1, 2]
    assert data["next", "terminated"].flatten().tolist() == [False, False, True]
