"""PPO: its arithmetic by hand, every form of action, groups of agents, and training that stops and goes on."""

from __future__ import annotations

import copy
import signal
from functools import partial

import gymnasium
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from envkit import (
    PPO,
    Bounded,
    Categorical,
    Collector,
    Composite,
    EnvBase,
    ExplorationType,
    GymWrapper,
    PendulumEnv,
    PettingZooWrapper,
    SerialEnv,
    TransformedEnv,
    Unbounded,
    VecNorm,
    evaluate,
    load,
    make,
    save,
    set_exploration_type,
    split_trajectories,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    MissingKeyError,
    NotFiniteError,
    ResumeError,
)
from envkit.ppo import Normalizer
from tests.zoo.pettingzoo_games import Fading


class Guess(gymnasium.Env):
    """Pays the same for any action that is in its space; an episode has four steps."""

    def __init__(self, action_space: spaces.Space, *, truncates: bool = False, reward: float = 1.0):
        self.action_space, self.reward = action_space, reward
        self.observation_space = spaces.Box(-1.0, 1.0, (3,))
        self.truncates, self.step_number = truncates, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_number = 0
        return self._observation(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.step_number += 1
        ends = self.step_number == 4
        return (
            self._observation(),
            self.reward,
            ends and not self.truncates,
            ends and self.truncates,
            {},
        )

    def _observation(self):
        return self.np_random.uniform(-1.0, 1.0, 3).astype("float32")


ACTIONS = {
    "bounded": spaces.Box(-2.0, 0.5, (2, 2)),
    "unbounded": spaces.Box(-float("inf"), float("inf"), (2,)),
    "options": spaces.Discrete(3),
    "several": spaces.MultiDiscrete([2, 3]),
    "flags": spaces.MultiBinary(3),
}


def guesses(rows: int = 4, action: str = "options", reward: float = 1.0, **options):
    return SerialEnv(rows, lambda: GymWrapper(Guess(ACTIONS[action], reward=reward), **options))


# ---------------------------------------------------------------------- what it draws


@pytest.mark.parametrize("encoding", [False, True], ids=["one_hot", "numbers"])
@pytest.mark.parametrize("action", ACTIONS)
def test_every_kind_of_action_is_drawn_trained_and_in_its_space(action, encoding):
    with guesses(action=action, categorical_action_encoding=encoding) as env:
        ppo = PPO(env, frames_per_batch=32, seed=0)
        before = torch.cat([p.detach().flatten().clone() for p in ppo.policy.parameters()])

        ppo.fit(64, progress=False)
        batch = env.rollout(4, ppo.policy)

        after = torch.cat([p.detach().flatten() for p in ppo.policy.parameters()])
        assert not torch.equal(before, after)
        assert all(env.action_spec[0].is_in(one) for one in batch["action"].flatten(0, 1))
        assert ppo.returns == [4.0] * 16
        ppo.close()


@pytest.mark.parametrize("action", ACTIONS)
def test_the_log_probability_is_that_of_what_was_drawn(action):
    with guesses(action=action) as env:
        ppo = PPO(env, frames_per_batch=16, seed=0)
        actor = ppo.policy.module.actors[0]
        with set_exploration_type(ExplorationType.RANDOM):
            td = env.rollout(3, ppo.policy)
        again = actor.distribution(td, actor.observations(td)).log_prob(td["ppo_sample"])

        torch.testing.assert_close(td["ppo_log_prob"], again)
        ppo.close()


def test_evaluation_takes_the_best_action_and_training_draws():
    with guesses(action="bounded") as env:
        ppo = PPO(env, frames_per_batch=16, seed=0)
        td = TensorDict({"observation": torch.ones(4, 3)}, [4])
        with set_exploration_type(ExplorationType.RANDOM):
            drawn = [ppo.policy.module(td.clone())["action"] for _ in range(2)]
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            best = [ppo.policy.module(td.clone())["action"] for _ in range(2)]

        assert torch.equal(*best)
        assert not torch.equal(*drawn)
        ppo.close()


def test_actions_of_float64_keep_bounds_that_float32_does_not_have():
    space = spaces.Box(-0.1, 0.1, (2,), "float64")  # 0.1 is more in float32
    with SerialEnv(2, lambda: GymWrapper(Guess(space))) as env:
        ppo = PPO(env, frames_per_batch=16, seed=0)
        actor = ppo.policy.module.actors[0]
        largest = actor.form.action(torch.tensor([[20.0, -20.0]]))

        assert largest.tolist() == [[0.1, -0.1]]
        ppo.close()


class Seen(Guess):
    """Shows a picture and, deeper in the data, a number."""

    def __init__(self):
        super().__init__(spaces.Discrete(2))
        number = spaces.Box(-1.0, 1.0, (1,))
        self.observation_space = spaces.Dict(
            picture=spaces.Box(0, 255, (1, 6, 6), "uint8"), sensors=spaces.Dict(number=number)
        )

    def _observation(self):
        space = self.observation_space
        space.seed(int(self.np_random.integers(1000)))
        return space.sample()


class Eye(nn.Module):
    """Convolves pictures, as layers do that know one batch axis."""

    def __init__(self, outputs):
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.last = nn.Linear(4 * 16 + 1, outputs)

    def forward(self, picture, number):
        return self.last(torch.cat([self.see(picture / 255), number], -1))


def test_networks_of_your_own_see_pictures_and_nested_entries():
    with SerialEnv(3, lambda: GymWrapper(Seen())) as env:
        keys = ["picture", ("sensors", "number")]
        ppo = PPO(env, Eye(2), Eye(1), observation_keys=keys, frames_per_batch=24, seed=0)

        ppo.fit(24, progress=False)

        assert ppo.returns == [4.0] * 6
        ppo.close()


class Masked(Guess):
    """Allows the options 1 and 3 of five."""

    def __init__(self):
        super().__init__(spaces.Discrete(5))
        self.observation_space = spaces.Dict(
            observation=self.observation_space, action_mask=spaces.MultiBinary(5)
        )

    def _observation(self):
        mask = torch.tensor([0, 1, 0, 1, 0], dtype=torch.int8).numpy()
        return {"observation": super()._observation(), "action_mask": mask}

    def step(self, action):
        assert action in (1, 3), action
        return super().step(action)


def test_options_that_a_mask_forbids_are_never_taken():
    with SerialEnv(2, lambda: GymWrapper(Masked(), categorical_action_encoding=True)) as env:
        ppo = PPO(env, frames_per_batch=64, seed=0).fit(128, progress=False)
        entropy = ppo.scalars()["entropy"]

        with set_exploration_type(ExplorationType.RANDOM):
            env.rollout(4, ppo.policy)  # asserts in each step

        assert 0.5 < entropy <= 0.694  # ln 2: of the two that are allowed
        ppo.close()


class Two(Guess):
    """Pays for the last option of ``a``; ``b`` is a number beside it."""

    def __init__(self):
        super().__init__(spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1.0, 1.0, (2,))))

    def step(self, action):
        observation, _, *flags = super().step(action)
        return observation, float(action["a"] == 2), *flags


def test_each_of_two_actions_side_by_side_learns_from_its_own_draws():
    with SerialEnv(8, lambda: GymWrapper(Two())) as env:
        ppo = PPO(env, frames_per_batch=256, learning_rate=5e-3, epochs=4, seed=0)
        with set_exploration_type(ExplorationType.RANDOM):
            batch = env.rollout(4, ppo.policy)
        assert torch.equal(batch["a"].argmax(-1), batch["ppo_sample_a"].squeeze(-1))
        assert batch["ppo_sample_b"].shape == (8, 4, 2)

        ppo.fit(4096, progress=False)

        assert {"a/entropy", "b/entropy"} <= ppo.scalars().keys()
        assert sum(ppo.returns[-100:]) / 100 > 3  # 1.33 by chance, 4 at best
        ppo.close()


# ---------------------------------------------------------------------- its arithmetic


class One(nn.Module):
    """A critic that says 1 everywhere."""

    def forward(self, observation):
        return torch.ones_like(observation[..., :1]) + 0 * self.unused

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))


@pytest.mark.parametrize("key", ["observation", ("next", "observation"), ("next", "reward")])
def test_numbers_that_are_not_finite_are_reported_before_they_spoil_networks(key):
    with guesses() as env:
        ppo = PPO(env, normalize_rewards=False, seed=0)
        with set_exploration_type(ExplorationType.RANDOM):
            batch = env.rollout(4, ppo.policy)
        batch[key][1, -1] = float("nan")

        with pytest.raises(NotFiniteError, match=key if isinstance(key, str) else key[-1]):
            ppo.update(batch)

        assert all(entry.isfinite().all() for entry in ppo.policy.state_dict().values())
        ppo.close()


def test_padding_and_rows_out_of_time_are_not_learnt_from():
    with guesses(2) as env:
        ppo = PPO(env, normalize_rewards=False, seed=0)
        (learner,) = ppo._learners
        batch = Collector(env, ppo.policy, frames_per_batch=12).next()
        parts = split_trajectories(batch)
        assert parts.shape == (4, 4)
        whole, cut = (ppo._samples(data, learner) for data in (batch, parts))

        assert len(whole) == len(cut) == 12
        for key in ("value_target", "advantage"):
            torch.testing.assert_close(whole[key].sort(0)[0], cut[key].sort(0)[0])
        with pytest.raises(ArgumentError, match="order"):
            ppo.update(batch[:, torch.tensor([2, 0, 4, 1, 5, 3])])
        ppo.close()


def test_steps_whose_last_observation_is_missing_teach_nothing():
    env = SerialEnv(2, lambda: GymWrapper(Guess(ACTIONS["options"], truncates=True)))
    with env:
        ppo = PPO(env, frames_per_batch=16, seed=0)
        batch = Collector(env, ppo.policy, frames_per_batch=16).next()
        cut = batch["next", "truncated"]
        batch["next", "final_missing"] = cut
        batch["next", "observation"][cut.expand(2, 8, 3)] = float("nan")
        (learner,) = ppo._learners

        samples = ppo._samples(batch, learner)

        assert (samples["advantage"] == 0).reshape(2, 8).equal(cut.squeeze(-1))
        ppo.update(batch)
        assert all(entry.isfinite().all() for entry in ppo.policy.state_dict().values())
        ppo.close()


def test_what_diverged_is_reported():
    with guesses() as env:
        ppo = PPO(env, learning_rate=1e30, frames_per_batch=32, seed=0)
        with pytest.raises(NotFiniteError, match=r"diverged.*lower learning_rate"):
            ppo.fit(320, progress=False)
        ppo.close()


@pytest.mark.parametrize("truncates", [False, True])
def test_advantages_are_cut_at_an_end_and_look_beyond_a_time_limit(truncates):
    env = SerialEnv(1, lambda: GymWrapper(Guess(ACTIONS["options"], truncates=truncates)))
    with env:
        ppo = PPO(
            env, critic=One(), frames_per_batch=4, gamma=0.5, lmbda=0.5, normalize_rewards=False
        )
        batch = env.rollout(4, ppo.policy)
        (learner,) = ppo._learners

        targets = ppo._samples(batch, learner)["value_target"].flatten()

        # delta = 1 + 0.5 * V' - 1 with V = V' = 1, and 0 at a termination; each is carried on with 0.25.
        last = 0.5 if truncates else 0.0
        expected, carried = [], 0.0
        for delta in (last, 0.5, 0.5, 0.5):
            carried = delta + 0.25 * carried
            expected.insert(0, 1.0 + carried)
        assert targets.tolist() == expected
        ppo.close()


def test_the_normalizer_has_mean_and_deviation_of_all_that_was_observed():
    torch.manual_seed(0)
    batches = torch.randn(3, 50, 4) * 3 + 7
    normalizer = Normalizer(torch.Size([4]))

    for batch in batches:
        normalizer.observe(batch)

    shown = normalizer(batches.flatten(0, 1))
    assert torch.allclose(shown.mean(0), torch.zeros(4), atol=1e-3)
    assert torch.allclose(shown.var(0, correction=0), torch.ones(4), atol=1e-3)


def test_each_option_changes_the_training():
    changes = {
        "epochs": 3,
        "minibatch_size": 3,
        "learning_rate": 1e-2,
        "gamma": 0.1,
        "lmbda": 0.1,
        "clip": 1e-5,
        "entropy": 5.0,
        "max_grad_norm": 1e-3,
        "normalize_observations": False,
        "actor": nn.Linear(3, 3),
        "critic": nn.Linear(3, 1),
        "seed": 1,
    }
    with guesses() as env:
        actor = PPO(env, normalize_rewards=False, seed=0).policy.module
        with set_exploration_type(ExplorationType.RANDOM):
            batch = env.rollout(4, actor)
        batch["next", "reward"] = torch.randn(4, 4, 1)

        def trained(**options):
            common = {"epochs": 2, "normalize_rewards": False, "seed": 0}
            ppo = PPO(env, **common | options)
            for _ in range(2):
                torch.manual_seed(5)
                ppo.update(batch)
            ppo.close()
            parameters = torch.cat([p.detach().flatten() for p in ppo.policy.parameters()])
            return ppo.scalars(), parameters

        plain, again = trained(), trained()
        changed = {name: trained(**{name: value}) for name, value in changes.items()}

    assert torch.equal(plain[1], again[1])
    for name, (_, parameters) in changed.items():
        has_its_shape = parameters.shape == plain[1].shape
        assert not (has_its_shape and torch.equal(parameters, plain[1])), name
    assert changed["clip"][0]["clipped"] > plain[0]["clipped"]
    assert changed["entropy"][0]["entropy"] > plain[0]["entropy"]


def test_large_rewards_are_normalised_for_learning_and_not_in_returns():
    losses = {}
    for normalizes in (False, True):
        with guesses(reward=1000.0) as env:
            ppo = PPO(env, frames_per_batch=32, normalize_rewards=normalizes, epochs=1, seed=0)
            ppo.fit(32, progress=False)
            losses[normalizes] = ppo.scalars()["value_loss"]
            assert ppo.returns == [4000.0] * 8
            ppo.close()

    assert losses[True] < 100 < 1e5 < losses[False]


@pytest.mark.filterwarnings("ignore:this TransformedEnv was stepped")
@pytest.mark.parametrize("steps_between", [False, True])
def test_discounted_returns_go_on_in_the_next_batch_unless_other_episodes_began(steps_between):
    with guesses(2) as env:
        ppo = PPO(env, frames_per_batch=2, gamma=0.5, seed=0)
        ppo.fit(2, progress=False)
        if steps_between:
            env.rollout(1)

        ppo.fit(4, progress=False)

        (learner,) = ppo._learners
        assert learner.totals.flatten().tolist() == [1.0 if steps_between else 1.5] * 2
        for _ in range(2):  # each a run of its own, without numbers of episodes
            ppo.update(env.rollout(2, ppo.policy))
        assert learner.totals.flatten().tolist() == [1.5] * 2
        ppo.close()


def test_the_learning_rate_falls_to_zero_unless_it_is_kept():
    def rates(anneal):
        with guesses() as env:
            found = []
            ppo = PPO(env, frames_per_batch=16, learning_rate=0.4, anneal=anneal)
            ppo.fit(
                64, lambda ppo, batch: found.append(ppo.scalars()["learning_rate"]), progress=False
            )
            ppo.close()
        return found

    assert rates(True) == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert rates(False) == [0.4] * 4


# ---------------------------------------------------------------------- agents


def test_each_group_has_networks_of_its_own_and_the_dead_are_left_out():
    with SerialEnv(
        2,
        lambda: PettingZooWrapper(
            Fading(),
            use_mask=True,
            group_map={"first": ["agent_0"], "rest": ["agent_1", "agent_2"]},
        ),
    ) as env:
        ppo = PPO(env, frames_per_batch=24, normalize_rewards=False, seed=0)
        batch = env.rollout(6, ppo.policy, break_when_any_done=False)
        for learner in ppo._learners:
            alive = batch.get(learner.actor.group.key("mask"), None)
            samples = ppo._samples(batch, learner)
            assert len(samples) == int(alive.sum())

        ppo.fit(48, progress=False)

        assert {"first/entropy", "rest/entropy"} <= ppo.scalars().keys()
        ppo.close()


class Pair(EnvBase):
    """Two agents, whose episode of two steps ends in a time limit for the second one alone."""

    def __init__(self, *, game_ends: bool):
        super().__init__()
        self.game_ends = game_ends
        flag = Categorical(2, (2, 1), dtype=torch.bool)
        self.observation_spec = Composite(
            agents=Composite(observation=Unbounded((2, 3)), shape=(2,))
        )
        self.action_spec = Composite(
            agents=Composite(action=Bounded(-1.0, 1.0, (2, 1)), shape=(2,))
        )
        self.reward_spec = Composite(agents=Composite(reward=Unbounded((2, 1)), shape=(2,)))
        flags = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        of_game = {name: Categorical(2, (1,), dtype=torch.bool) for name in flags}
        self.done_spec = Composite(
            agents=Composite(flags, shape=(2,)), **(of_game if game_ends else {})
        )
        self.step_number = 0

    def _set_seed(self, seed):
        pass

    def _reset(self, td):
        self.step_number = 0
        return self._shown(self._flags(False))

    def _step(self, td):
        self.step_number += 1
        shown = self._shown(self._flags(self.step_number == 2))
        shown["agents", "reward"] = torch.tensor([[1.0], [3.0]])
        return shown

    def _flags(self, ends):
        first, second = torch.tensor([[ends], [False]]), torch.tensor([[False], [ends]])
        return {"done": first | second, "terminated": first, "truncated": second}

    def _shown(self, flags):
        shown = TensorDict({"agents": TensorDict({"observation": torch.zeros(2, 3), **flags}, [2])})
        if self.game_ends:
            shown.update({name: flag.any(0) for name, flag in flags.items()})
        return shown


@pytest.mark.parametrize("game_ends", [False, True])
def test_each_agent_has_its_own_end_also_where_the_game_has_one(game_ends):
    with Pair(game_ends=game_ends) as env:
        ppo = PPO(
            env, critic=One(), frames_per_batch=2, gamma=0.5, lmbda=0.5, normalize_rewards=False
        )
        batch = env.rollout(2, ppo.policy)
        (learner,) = ppo._learners

        targets = ppo._samples(batch, learner)["value_target"].reshape(2, 2)

        # The value is 1, and 0 behind the end of the first agent.
        assert targets[1].tolist() == [1.0, 3.5]
        assert targets[0].tolist() == [1 + 0.5 * 1 + 0.25 * 0.0, 3 + 0.5 + 0.25 * 2.5]
        assert ppo.fit(4, progress=False).returns == [4.0] * 2  # a mean of 2 and 6
        ppo.close()


def test_the_deviation_of_rewards_is_that_of_agents_in_the_game():
    with PettingZooWrapper(Fading((1, 40)), use_mask=True, done_on_any=False) as env:
        ppo = PPO(env, frames_per_batch=24, seed=0).fit(24, progress=False)
        batch = Collector(env, ppo.policy, frames_per_batch=24).next()
        (learner,) = ppo._learners
        before = learner.rewards.count.item()

        ppo.update(batch)

        mask = batch[learner.actor.group.alive_key]
        assert learner.rewards.count.item() - before == int(mask.sum()) < mask.numel()
        ppo.close()


def test_a_group_whose_agents_are_all_dead_learns_nothing_from_that_batch():
    with PettingZooWrapper(
        Fading((1, 40)),
        use_mask=True,
        done_on_any=False,
        group_map={"first": ["agent_0"], "rest": ["agent_1"]},
    ) as env:
        ppo = PPO(env, frames_per_batch=4, normalize_rewards=False, seed=0).fit(4, progress=False)
        assert "first/entropy" in ppo.scalars()

        ppo.fit(8, progress=False)

        assert "first/entropy" not in ppo.scalars()
        assert "rest/entropy" in ppo.scalars()
        ppo.close()


# ---------------------------------------------------------------------- populations


def acted(env, policy, steps=8):
    with set_exploration_type(ExplorationType.RANDOM):
        return env.rollout(steps, policy, break_when_any_done=False)


@pytest.mark.parametrize("action", ACTIONS)
def test_members_of_a_population_learn_as_each_would_alone(action):
    options = {
        "learning_rate": torch.tensor([1e-2, 1e-3, 3e-4]),
        "gamma": torch.tensor([0.99, 0.5, 0.0]),
        "lmbda": torch.tensor([0.9, 0.0, 1.0]),
        "clip": torch.tensor([0.2, 0.01, 0.3]),
        "entropy": torch.tensor([0.0, 0.1, 0.01]),
        "max_grad_norm": torch.tensor([0.5, 0.01, 10.0]),
    }
    with guesses(6, action) as env, guesses(2, action) as two:
        population = PPO(env, policies=3, epochs=2, seed=0, **options)
        alone = [
            PPO(two, epochs=2, **{name: float(value[place]) for name, value in options.items()})
            for place in range(3)
        ]
        (learner,) = population._learners
        for place, ppo in enumerate(alone):
            member = population.policy.module.unstacked(place)
            ppo.policy.module.load_state_dict(member.state_dict())
            critic = {name: value[place] for name, value in learner.critic.state_dict().items()}
            ppo._learners[0].critic.load_state_dict(critic)

        for round_ in range(3):
            batch = acted(env, population.policy)
            batch["next", "reward"] = torch.randn(6, 8, 1)
            torch.manual_seed(round_)
            population.update(batch)
            for ppo, rows in zip(alone, batch.split(2), strict=True):
                torch.manual_seed(round_)
                ppo.update(rows)

        for place, ppo in enumerate(alone):
            member = population.policy.module.unstacked(place).state_dict()
            for name, value in ppo.policy.module.state_dict().items():
                torch.testing.assert_close(member[name], value, rtol=1e-4, atol=1e-5)
            for name in ("value_loss", "entropy", "kl", "clipped", "learning_rate"):
                found = population.scalars()[f"policy_{place}/{name}"]
                assert found == pytest.approx(ppo.scalars()[name], rel=1e-3, abs=1e-5)
            ppo.close()
        population.close()


def test_a_population_trains_saves_and_goes_on(tmp_path):
    with guesses(6) as env:
        env.record_for_resume()
        rates = torch.tensor([1e-3, 1e-4, 1e-5])
        ppo = PPO(env, policies=3, learning_rate=rates, frames_per_batch=48, seed=0)
        before = ppo.policy.module.unstacked(1)

        ppo.fit(96, progress=False)

        assert ppo.returns == [[4.0] * 8] * 3
        assert ppo.scalars()["return"] == ppo.scalars()["policy_2/return"] == 4.0
        assert ppo.scalars()["policy_1/learning_rate"] == pytest.approx(5e-5)
        after = ppo.policy.module.unstacked(1)
        weights = [each.actors[0].network.layers[0].weight for each in (before, after)]
        assert not torch.equal(*weights)
        save(tmp_path / "ppo.pt", ppo=ppo)
        other = PPO(env, policies=3, learning_rate=rates, frames_per_batch=48, seed=7)
        load(tmp_path / "ppo.pt", ppo=other)
        assert (other.frames, other.returns) == (96, ppo.returns)
        assert torch.equal(other._learners[0].totals, ppo._learners[0].totals)
        for one, two in zip(other.policy.parameters(), ppo.policy.parameters(), strict=True):
            assert torch.equal(one, two)
        ppo.close()
        other.close()


def test_a_population_of_one_is_one_policy():
    with guesses() as env:
        policies = []
        for number in (None, 1):
            ppo = PPO(env, policies=number, frames_per_batch=32, seed=0)
            ppo.fit(96, progress=False)
            policies.append(ppo.policy.module if number is None else ppo.policy.module.unstacked(0))
            ppo.close()

    for one, other in zip(*(policy.parameters() for policy in policies), strict=True):
        torch.testing.assert_close(one, other)


def test_networks_of_a_population_are_those_of_the_list():
    actors, critics = ([nn.Linear(3, outputs) for _ in range(2)] for outputs in (3, 1))
    with guesses() as env:
        ppo = PPO(env, actors, critics, policies=2)

        members = [ppo.policy.module.unstacked(place) for place in range(2)]
        assert torch.equal(members[1].actors[0].network.weight, actors[1].weight)
        assert torch.equal(ppo._learners[0].critic.weight[0], critics[0].weight)
        ppo.close()


@pytest.mark.parametrize("options", [{}, {"cat_results": 0}, {"cat_results": -1}])
def test_a_population_learns_from_workers_that_each_have_rows_of_all(options):
    actors = [Constant(0), Constant(2)]
    with guesses(4) as env:
        ppo = PPO(env, actors, policies=2, epochs=1, normalize_rewards=False)
        make_rows = partial(guesses, 4)
        collector = Collector(
            make_rows, ppo.policy, num_collectors=2, frames_per_batch=64, **options
        )
        batch = collector.next()
        collector.shutdown()

        samples = ppo._samples(ppo._by_policy(batch), ppo._learners[0])
        ppo.update(batch)

        assert samples["ppo_sample"].squeeze(-1).tolist() == [[0] * 32, [2] * 32]
        assert ppo.scalars()["policy_1/clipped"] == 0
        with pytest.raises(ArgumentError, match="expected a multiple of 4 rows"):
            ppo.update(batch.reshape(-1, batch.shape[-1])[:3])
        ppo.close()


class Constant(nn.Module):
    """An actor that takes one of three options."""

    def __init__(self, option):
        super().__init__()
        self.logits = nn.Parameter(30.0 * nn.functional.one_hot(torch.tensor(option), 3))

    def forward(self, observation):
        return self.logits.expand(len(observation), 3)


def test_a_population_of_one_acts_in_a_single_env():
    norm = VecNorm(["observation"], ["o"], policies=1)
    single = partial(GymWrapper, Guess(ACTIONS["options"]))
    with TransformedEnv(single(), norm) as env, single() as judged:
        ppo = PPO(env, policies=1, frames_per_batch=8, seed=0).fit(16, progress=False)
        assert evaluate(judged, ppo.policy, 2, seed=0).returns.tolist() == [4.0, 4.0]
        ppo.close()
        assert env.rollout(3)["o"].shape == (3, 3)


def test_members_with_dropout_or_without_gradients_train():
    with guesses(4) as env:
        critics = [nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)) for _ in range(2)]
        ppo = PPO(env, critic=critics, policies=2, frames_per_batch=32).fit(32, progress=False)
        ppo.close()
        fixed = PPO(env, critic=nn.Linear(3, 1).requires_grad_(False), frames_per_batch=32)
        fixed.fit(32, progress=False)
        fixed.close()


def test_an_actor_and_a_critic_of_a_member_share_nothing():
    trunk = nn.Linear(3, 4)
    actors, critics = ([nn.Sequential(trunk, nn.Linear(4, n))] for n in (3, 1))
    with (
        guesses() as env,
        pytest.raises(ArgumentError, match=r"share parameters.*its own layers"),
    ):
        PPO(env, actors, critics, policies=1)


def test_a_population_of_which_agents_die_is_refused():
    game = partial(PettingZooWrapper, use_mask=True, done_on_any=False)
    with SerialEnv(2, lambda: game(Fading((1, 40)))) as env:
        ppo = PPO(env, policies=2, frames_per_batch=24)
        with pytest.raises(ArgumentError, match=r"not in the game.*without policies="):
            ppo.fit(48, progress=False)
        ppo.close()


# ---------------------------------------------------------------------- stopping and going on


def test_a_saved_training_goes_on_as_if_it_had_not_stopped(tmp_path):
    def stop(ppo, batch):
        return ppo.frames == 256

    with make("gymnax/CartPole-v1", 8) as env:
        whole = PPO(env, frames_per_batch=128, seed=0)
        whole.fit(512, progress=False)
        whole.close()
        first = PPO(env, frames_per_batch=128, seed=0)
        first.fit(512, stop, progress=False)
        save(tmp_path / "ppo.pt", ppo=first)
        first.close()
        second = PPO(env, frames_per_batch=128, seed=7)
        load(tmp_path / "ppo.pt", ppo=second)

        second.fit(512, progress=False)

        assert second.frames == 512
        assert second.returns == whole.returns
        assert second.scalars() == whole.scalars()
        for one, other in zip(second.policy.parameters(), whole.policy.parameters(), strict=True):
            assert torch.equal(one, other)
        second.close()


def test_a_state_that_is_kept_in_memory_stays_as_it_was():
    with guesses() as env:
        env.record_for_resume()
        ppo = PPO(env, frames_per_batch=32, seed=0).fit(32, progress=False)
        kept = ppo.state_dict()
        before = copy.deepcopy(kept["networks"])

        ppo.fit(96, progress=False)
        ppo.load_state_dict(kept)

        (now,), (then,) = ppo.state_dict()["networks"], before
        for name in ("actor", "critic", "rewards"):
            assert all(torch.equal(now[name][key], value) for key, value in then[name].items())
        first = now["optimizer"]["state"][0]["exp_avg"]
        assert torch.equal(first, then["optimizer"]["state"][0]["exp_avg"])
        population = PPO(env, policies=2)
        with pytest.raises(ResumeError, match="Build it with policies=1"):
            population.load_state_dict(kept)
        population.close()
        ppo.close()


def test_ctrl_c_in_a_callback_loses_nothing():
    def interrupt(ppo, batch):
        if ppo.frames == 32:
            raise KeyboardInterrupt

    with guesses() as env:
        ppo = PPO(env, frames_per_batch=16, seed=0)
        with pytest.raises(KeyboardInterrupt):
            ppo.fit(64, interrupt, progress=False)
        assert ppo.frames == 32

        ppo.fit(64, progress=False)

        assert (ppo.frames, len(ppo.returns)) == (64, 16)
        ppo.close()


class Interrupting(nn.Linear):
    """A critic in whose tenth gradient step Ctrl-C comes."""

    steps = 0

    def forward(self, observation):
        self.steps += torch.is_grad_enabled()
        if self.steps == 10:
            self.steps += 1
            signal.raise_signal(signal.SIGINT)
        return super().forward(observation)


def test_ctrl_c_in_an_update_waits_for_its_end():
    trained = []
    for critic in (Interrupting, nn.Linear):
        with guesses() as env:
            torch.manual_seed(0)
            ppo = PPO(env, critic=critic(3, 1), frames_per_batch=16, epochs=2, seed=0)
            if critic is Interrupting:
                with pytest.raises(KeyboardInterrupt):
                    ppo.fit(64, progress=False)
                assert ppo.frames == 16
            trained.append(ppo.fit(64, progress=False).policy.state_dict())
            ppo.close()

    for name, value in trained[0].items():
        assert torch.equal(value, trained[1][name]), name


class Stopped(Guess):
    """Is stopped by Ctrl-C in its tenth step."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 10:
            raise KeyboardInterrupt
        return super().step(action)


def test_ctrl_c_in_the_middle_of_a_batch_leaves_a_training_that_continues():
    with SerialEnv(1, lambda: GymWrapper(Stopped(spaces.Discrete(3)))) as env:
        ppo = PPO(env, frames_per_batch=8, seed=0)
        with pytest.raises(KeyboardInterrupt):
            ppo.fit(32, progress=False)
        assert ppo.frames == 8

        ppo.fit(32, progress=False)

        assert (ppo.frames, ppo.returns) == (32, [4.0] * 8)
        ppo.close()


def test_a_batch_has_by_default_as_many_frames_as_all_rows_make_together():
    def frames(rows):
        with guesses(rows) as env:
            ppo = PPO(env, epochs=1).fit(1, progress=False)
            ppo.close()
            return ppo.frames

    assert [frames(rows) for rows in (1, 3, 200)] == [2048, 2046, 3200]


def test_only_true_ends_training_early():
    with guesses() as env:
        ppo = PPO(env, frames_per_batch=16)
        ppo.fit(48, lambda ppo, batch: "go on", progress=False)
        assert ppo.frames == 48
        ppo.fit(96, lambda ppo, batch: True, progress=False)
        assert ppo.frames == 64
        ppo.close()


def test_the_bar_shows_frames_and_returns(capsys):
    with guesses() as env:
        ppo = PPO(env, frames_per_batch=16).fit(32)
        ppo.close()

    assert "return=4" in capsys.readouterr().err


def test_it_learns_to_balance():
    """In ten thousand steps of CartPole, episodes become three times as long."""
    with make("gym/CartPole-v1", 8, backend="serial", seed=0) as env:
        ppo = PPO(env, frames_per_batch=1024, learning_rate=2e-3, seed=0)
        ppo.fit(12 * 1024, progress=False)
        ppo.close()

    first, last = ppo.returns[:20], ppo.returns[-20:]
    assert sum(last) > 3 * sum(first)


# ---------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"observation_keys": ["position"]}, MissingKeyError, "observation_keys="),
        ({"actor": nn.Linear(3, 7)}, ArgumentError, "expected shape (2, 3)"),
        ({"critic": nn.Linear(3, 2)}, ArgumentError, "expected shape (2, 1)"),
        ({"actor": {"wolves": nn.Linear(3, 3)}}, ArgumentError, "Pass a torch module"),
        ({"gamma": 1.5}, ArgumentError, "at most 1"),
        ({"epochs": 0}, ArgumentError, "epochs"),
        ({"policies": 3}, BatchSizeError, "Pass an env of batch_size=[3, n]"),
        ({"gamma": torch.tensor([0.9, 0.8])}, ArgumentError, "Pass one number"),
        ({"policies": 2, "gamma": [0.9, 1.8]}, ArgumentError, "at most 1"),
        ({"policies": 2, "clip": [0.1] * 3}, ArgumentError, "Pass a tensor of 2 numbers"),
        ({"policies": 2, "actor": nn.Linear(3, 3)}, ArgumentError, "actor=[make() for _"),
        ({"frames_per_batch": 0}, ArgumentError, "frames_per_batch"),
        ({"observation_keys": []}, ArgumentError, "Pass the keys of one observation"),
        ({"actor": [nn.Linear(3, 3)] * 2}, ArgumentError, "pass policies=2"),
        ({"actor": nn.Linear(5, 3)}, RuntimeError, "Pass a network that takes them"),
        ({"policies": 2, "learning_rate": ["fast", 1.0]}, ArgumentTypeError, "learning_rate"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_does_not_fit_is_refused_with_the_line_to_write(options, error, words):
    with guesses() as env, pytest.raises(error) as caught:
        PPO(env, **options)
    assert words in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_what_is_no_env_is_refused():
    with pytest.raises(ArgumentTypeError, match="GymEnv"):
        PPO("CartPole-v1")
    env = SerialEnv(1, lambda: GymWrapper(Guess(ACTIONS["options"])))
    with env, pytest.raises(MissingKeyError, match=r"Collect it with ppo\.policy"):
        PPO(env).update(env.rollout(2))


def test_rewards_of_several_numbers_are_refused():
    env = PendulumEnv(batch_size=[4])
    env.reward_spec = Unbounded((4, 2))
    with pytest.raises(ArgumentError, match="Put a LineariseRewards around the env"):
        PPO(env, observation_keys=["th"])


def test_an_action_with_half_its_bounds_is_refused():
    half = spaces.Box(torch.tensor([0.0, -float("inf")]).numpy(), torch.ones(2).numpy())
    env = SerialEnv(1, lambda: GymWrapper(Guess(half)))
    with env, pytest.raises(ArgumentError, match="bounds for all of them or for none"):
        PPO(env)
