"""Rollouts of one gymnasium env that are recorded at once: the bits of stepping one by one."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit import EnvBase, compile_policy
from envkit.env.bound_policy import bind_policy
from envkit.env.runs import Run
from envkit.errors import BatchSizeError, ClosedEnvError, InputError
from envkit_bridges.gym.gym_env import GymEnv
from envkit_bridges.gym.gym_wrapper import GymWrapper
from tests.zoo.gym_envs import Informed, Sampler

SPACES = spaces.Dict(
    state=spaces.Box(-1, 1, (2,), np.float64),
    arm=spaces.Dict(level=spaces.Discrete(4, start=1), grip=spaces.MultiBinary(2)),
)
ACTIONS = spaces.Dict(wheel=spaces.Box(-1, 1, (1,)), gear=spaces.MultiDiscrete([2, 3]))


def limited(observation_space, action_space):
    return GymWrapper(wrappers.TimeLimit(Sampler(observation_space, action_space), 3))


MAKERS = {
    "CartPole": partial(GymEnv, "CartPole-v1", max_episode_steps=15),
    "CartPole categorical": partial(GymEnv, "CartPole-v1", categorical_action_encoding=True),
    "Pendulum": partial(GymEnv, "Pendulum-v1", max_episode_steps=20),
    "FrozenLake": partial(GymEnv, "FrozenLake-v1", categorical_action_encoding=True),
    "skipping": partial(GymEnv, "CartPole-v1", frame_skip=3),
    "pixels": partial(GymEnv, "FrozenLake-v1", from_pixels=True, pixels_only=False),
    "dict": partial(limited, SPACES, spaces.MultiDiscrete([2, 3], start=[1, 0])),
    "dict actions": partial(limited, SPACES, ACTIONS),
    "binary actions": partial(limited, SPACES, spaces.MultiBinary(3)),
    "integer actions": partial(limited, SPACES, spaces.Box(-5, 5, (2,), np.int16)),
    "unbounded actions": partial(limited, SPACES, spaces.Box(-np.inf, np.inf, (20,))),
}


class Writes:
    """Acts at random, and leaves things in the TensorDict."""

    def __init__(self, env: EnvBase):
        self.env = env

    def __call__(self, td):
        self.env.rand_action(td)
        count = td.get("count", torch.zeros(1))
        td.set("count", count + 1)
        td.set(("memory", "last"), td.get("terminated").float() + count)
        return td.set("score", torch.randn(3, generator=torch.Generator().manual_seed(int(count))))


class Looks(Writes):
    """Acts on what it sees."""

    def __call__(self, td):
        torch.manual_seed(
            int(1e6 * sum(float(leaf.double().sum()) for leaf in td.values(True, True)))
        )
        return td.update(self.env.full_action_spec.rand())


def replaces(env):
    def act(td):
        key = env.observation_keys[0]
        return env.rand_action(td.set(key, td.get(key) * 2))

    return act


def returns_another(env):
    return lambda td: env.rand_action(td.select("done", *env.observation_keys))


def presets_next_later(env):
    def act(td):
        count = td.get("count", torch.zeros(1))
        td.set("count", count + 1)
        if count > 4:
            td.set(("next", "reward"), torch.full((1,), 7.0))
        return env.rand_action(td)

    return act


def presets_next(env):
    return lambda td: env.rand_action(td.set(("next", "reward"), torch.full((1,), 7.0)))


def speaks(env):
    return lambda td: env.rand_action(td).set_non_tensor("word", f"{td['done'].item()}")


def plans_ahead(env):
    def act(td):
        count = td.get("count", torch.zeros(1))
        if count == 3:
            env.step(env.rand_action(env.fake_tensordict().exclude("next")))
        return env.rand_action(td.set("count", count + 1))

    return act


def notes_a_reward(env):
    return lambda td: env.rand_action(td.set("reward", torch.ones(1)))


POLICIES = {
    "random": lambda env: None,
    "writes": Writes,
    "looks": Looks,
    "replaces": replaces,
    "returns another": returns_another,
    "presets next": presets_next,
    "presets next later": presets_next_later,
    "speaks": speaks,
    "notes a reward": notes_a_reward,
    "plans ahead": plans_ahead,
}


def both_ways(make, policy, steps, **kwargs) -> list:
    """Roll out at once and, since a callback wants to see each step, one by one."""
    results = []
    for callback in (None, lambda env, td: None):
        env = make()
        env.set_seed(3)
        data = env.rollout(steps, POLICIES[policy](env), callback, **kwargs)
        again = env.rollout(5, POLICIES[policy](env), callback, **kwargs)
        results.append((data, again, env.rand_action()))
        env.close()
    return results


def assert_same(left, right) -> None:
    assert left.batch_size == right.batch_size
    assert left.names == right.names
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        ours, theirs = left.get(key), right.get(key)
        if isinstance(ours, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        else:
            assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("policy", ["random", "writes", "looks"])
@pytest.mark.parametrize("name", MAKERS)
def test_recording_at_once_gives_the_bits_of_stepping(name, policy, stops):
    at_once, stepped = both_ways(MAKERS[name], policy, 70, break_when_any_done=stops)

    for left, right in zip(at_once, stepped, strict=True):
        assert_same(left, right)
    assert at_once[0]["next", "done"].any()


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("policy", list(POLICIES)[3:])
def test_what_has_no_room_in_a_record_is_stepped(policy, stops):
    at_once, stepped = both_ways(MAKERS["CartPole"], policy, 40, break_when_any_done=stops)

    for left, right in zip(at_once, stepped, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize("stops", [True, False])
def test_a_compiled_policy_acts_on_the_row_as_it_does_step_by_step(stops):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    class Leans(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, observation):
            return (self.net(observation)[..., 0] > 0).long()

    runs = []
    for callback in (None, lambda env, td: None):
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        env.set_seed(3)
        with torch.no_grad():
            policy = compile_policy(Leans())
            runs.append(env.rollout(100, policy, callback, break_when_any_done=stops))

    assert_same(*runs)
    assert runs[0]["next", "done"].any()


def test_a_choice_of_a_compiled_policy_that_there_is_not_is_refused():
    class Leans(torch.nn.Module):
        def forward(self, observation):
            return torch.where(observation[..., 0] > -9, 7, 0)

    env = GymEnv("CartPole-v1", categorical_action_encoding=True)

    with pytest.raises(InputError, match="'action' is 7"):
        env.rollout(3, compile_policy(Leans()))


@settings(max_examples=30)
@given(
    steps=st.integers(1, 150),
    length=st.integers(1, 150),
    stops=st.booleans(),
    policy=st.sampled_from(["random", "writes"]),
)
def test_runs_and_episodes_of_any_length_are_recorded(steps, length, stops, policy):
    make = lambda: GymWrapper(Informed(length=length))  # noqa: E731
    at_once, stepped = both_ways(make, policy, steps, break_when_any_done=stops)

    for left, right in zip(at_once, stepped, strict=True):
        assert_same(left, right)
    assert len(at_once[0]) == (min(steps, length) if stops else steps)


@pytest.mark.parametrize("policy", [None, lambda td: td.set("action", torch.tensor([0, 1]))])
def test_plain_policies_are_recorded_at_once(policy):
    env = GymEnv("CartPole-v1")
    act = bind_policy(env, policy)

    whole = env._runs().record(Run("never", env.reset(), 30, policy, act))
    episode = env._runs().record(Run("any", env.reset(), 300, policy, act))

    assert whole.batch_size == (30,)
    assert episode["next", "done"].flatten().tolist() == [False] * (len(episode) - 1) + [True]
    assert all(leaf.is_contiguous() for leaf in whole.values(True, True))


@pytest.mark.parametrize("seeded", [True, False])
def test_actions_not_needed_are_not_drawn(seeded):
    env = GymEnv("CartPole-v1")
    torch.manual_seed(5)
    if seeded:
        env.set_seed(5)

    data = env.rollout(1000)
    following = env.rand_action()["action"]

    generator = torch.Generator().manual_seed(5)
    drawn = [env.action_spec.rand((), generator) for _ in range(len(data) + 1)]
    assert torch.stack(drawn).equal(torch.cat([data["action"], following[None]]))


def test_entries_of_the_callers_are_carried_along():
    env = GymEnv("CartPole-v1")
    root = env.reset().set("goal", torch.ones(2)).set(("task", "number"), torch.tensor(4))

    data = env.rollout(9, auto_reset=False, tensordict=root, break_when_any_done=False)

    assert data["goal"].equal(torch.ones(9, 2))
    assert data["task", "number"].equal(torch.full((9,), 4))


def test_a_policy_gradient_flows_into_a_record():
    env = GymEnv("Pendulum-v1")
    weight = torch.ones(3, requires_grad=True)

    data = env.rollout(4, lambda observation: (observation * weight).sum(-1, keepdim=True).tanh())
    data["action"].sum().backward()

    assert weight.grad is not None and weight.grad.abs().sum() > 0


def test_masked_choices_are_drawn_from_what_is_allowed():
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    env.set_spec_lock_(False)
    env.full_action_spec["action"].update_mask(torch.tensor([False, True]))

    assert env.rollout(5)["action"].eq(1).all()


def test_an_action_of_another_shape_is_refused():
    env = GymEnv("Pendulum-v1")

    with pytest.raises(ValueError, match=r"'action' has shape \(3,\)"):
        env.rollout(3, lambda td: td.set("action", torch.zeros(3)))


def test_a_closed_env_records_nothing():
    env = GymEnv("CartPole-v1")
    root = env.reset()
    env.close()

    with pytest.raises(ClosedEnvError):
        env.rollout(3, auto_reset=False, tensordict=root)


def test_a_root_of_another_batch_size_is_refused():
    env = GymEnv("CartPole-v1")

    with pytest.raises(BatchSizeError):
        env.rollout(3, auto_reset=False, tensordict=env.reset().expand(2).clone())


def test_a_subclass_that_changes_a_step_is_heard():
    class Doubles(GymEnv):
        def read_reward(self, reward):
            return super().read_reward(2 * reward)

    assert Doubles("CartPole-v1").rollout(3)["next", "reward"].eq(2).all()


def test_a_subclass_that_draws_its_own_actions_is_heard():
    class Pushes(GymEnv):
        def rand_action(self, tensordict=None):
            return tensordict.set("action", torch.tensor([0, 1]))

    assert Pushes("CartPole-v1").rollout(3)["action"].tolist() == [[0, 1]] * 3


def test_errors_of_the_simulator_come_through():
    class Broken(gymnasium.Wrapper):
        def step(self, action):
            raise RuntimeError("the simulator broke")

    env = GymWrapper(Broken(gymnasium.make("CartPole-v1")))

    with pytest.raises(RuntimeError, match="the simulator broke"):
        env.rollout(3)
