"""Transforms and env wrappers that users write themselves."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer

from envkit import (
    Bounded,
    CatFrames,
    Compose,
    Composite,
    DoubleToFloat,
    EnvBase,
    ExcludeTransform,
    GymEnv,
    GymLikeEnv,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    Transform,
    TransformedEnv,
    Unbounded,
    apply_to_composite,
    check_env_specs,
)


class AddOneToReward(Transform):
    def __init__(self):
        super().__init__(in_keys=["reward"], out_keys=["reward"])

    def _apply_transform(self, reward):
        return reward + 1


class Squash(Transform):
    """Actions of the policy live in (-inf, inf), those of the env in (-2, 2)."""

    def __init__(self):
        super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])

    def _inv_apply_transform(self, action):
        return 2 * action.tanh()

    def transform_input_spec(self, input_spec):
        spec = input_spec["full_action_spec", "action"]
        input_spec["full_action_spec", "action"] = Unbounded(
            shape=spec.shape, dtype=spec.dtype, device=spec.device
        )
        return input_spec


class PreviousAction(Transform):
    """Add the last action to what is observed."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("previous", tensordict["action"].clone())

    def _reset(self, tensordict, tensordict_reset):
        shape = self.parent.action_spec.shape
        return tensordict_reset.set("previous", torch.zeros(shape))

    def transform_observation_spec(self, observation_spec):
        observation_spec["previous"] = self.parent.action_spec.clone()
        return observation_spec


class Halved(Transform):
    @apply_to_composite
    def transform_observation_spec(self, observation_spec):
        low, high = observation_spec.space.low / 2, observation_spec.space.high / 2
        return Bounded(low, high, shape=observation_spec.shape, dtype=observation_spec.dtype)

    def _apply_transform(self, obs):
        return obs / 2

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


def test_a_reward_is_changed_by_its_key():
    env = TransformedEnv(GymEnv("CartPole-v1"), AddOneToReward())
    check_env_specs(env)

    assert (env.rollout(5)["next", "reward"] == 2).all()


def test_actions_are_squashed_on_their_way_in():
    env = TransformedEnv(GymEnv("Pendulum-v1"), Squash())
    check_env_specs(env)
    td = env.reset().set("action", torch.tensor([50.0]))

    out = env.step(td)

    assert out["action"].item() == 50.0
    assert isinstance(env.action_spec, Unbounded)


def test_the_last_action_is_observed():
    env = TransformedEnv(GymEnv("Pendulum-v1"), PreviousAction())
    check_env_specs(env)

    rollout = env.rollout(4)

    assert (rollout["previous"][0] == 0).all()
    torch.testing.assert_close(rollout["previous"][1:], rollout["action"][:-1])


def test_bounds_follow_what_a_transform_does_to_its_leaves():
    env = TransformedEnv(GymEnv("Pendulum-v1"), Halved(in_keys=["observation"]))
    check_env_specs(env)

    torch.testing.assert_close(
        env.observation_spec["observation"].space.high, torch.tensor([0.5, 0.5, 4.0])
    )


def test_a_lambda_is_a_transform():
    env = GymEnv("Pendulum-v1").append_transform(
        lambda td: td.set("observation", td["observation"].clamp(-0.1, 0.1))
    )

    assert env.rollout(5)["observation"].abs().max() <= 0.1 + 1e-6


def test_a_chain_is_changed_while_it_is_used():
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose())
    env.append_transform(RewardScaling(loc=0.0, scale=0.5))
    env.insert_transform(0, StepCounter())
    env.append_transform(RewardSum())
    env.append_transform(InitTracker())

    names = [type(transform).__name__ for transform in env.transform]
    rollout = env.rollout(3)

    assert names == ["StepCounter", "RewardScaling", "RewardSum", "InitTracker"]
    assert rollout["is_init"].flatten().tolist() == [True, False, False]
    torch.testing.assert_close(
        rollout["next", "episode_reward"], rollout["next", "reward"].cumsum(0)
    )
    clone = env.transform[0].clone()
    assert clone.parent is None and clone is not env.transform[0]


def test_the_data_of_an_env_passes_a_transform_in_a_replay_buffer():
    env = TransformedEnv(GymEnv("Pendulum-v1"), StepCounter())
    buffer = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=8)
    norm = ObservationNorm(
        loc=0.0, scale=2.0, in_keys=["observation", ("next", "observation")], standard_normal=True
    )
    buffer.append_transform(norm)
    rollout = env.rollout(20)

    buffer.extend(rollout)
    sample = buffer.sample()

    assert sample.shape == (8,)
    halves = rollout["observation"][sample["step_count"].squeeze(-1)] / 2
    torch.testing.assert_close(sample["observation"], halves)


def test_what_is_not_wanted_is_left_out():
    norm = ObservationNorm(loc=0.0, scale=2.0, in_keys=["observation"], out_keys=["normed"])
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(norm, ExcludeTransform("observation")))
    rollout = env.rollout(2)
    assert "normed" in rollout.keys() and "observation" not in rollout.keys()

    env = TransformedEnv(
        GymEnv("CartPole-v1"), Compose(StepCounter(), SelectTransform("step_count"))
    )
    rollout = env.rollout(2)
    assert "step_count" in rollout.keys() and "observation" not in rollout.keys()


def test_a_primer_adds_a_hidden_state_that_episodes_begin_with():
    env = TransformedEnv(
        GymEnv("CartPole-v1"),
        TensorDictPrimer(Composite(hidden=Unbounded(shape=(4,))), default_value=0.5),
    )
    policy_calls = []

    def policy(td):
        policy_calls.append(td["hidden"].clone())
        td["action"] = env.action_spec.rand()
        td["next", "hidden"] = td["hidden"] + 1
        return td

    env.rollout(3, policy)

    assert [hidden[0].item() for hidden in policy_calls] == [0.5, 1.5, 2.5]


# ------------------------------------------------------------------------------ stacked observations


class Camera(EnvBase):
    """Frames that count up, as of a game."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(
            pixels=Bounded(0, 255, shape=(1, 4, 4), dtype=torch.uint8),
        )
        self.action_spec = Bounded(-1, 1, shape=(1,))
        self.reward_spec = Unbounded(shape=(1,))
        self.frame = 0

    def _reset(self, tensordict=None, **kwargs):
        self.frame = 0
        return TensorDict({"pixels": torch.zeros(1, 4, 4, dtype=torch.uint8)})

    def _step(self, tensordict):
        self.frame += 1
        pixels = torch.full((1, 4, 4), self.frame, dtype=torch.uint8)
        done = torch.tensor([self.frame >= 5])
        return TensorDict({"pixels": pixels, "reward": torch.ones(1), "done": done})

    def _set_seed(self, seed):
        pass


def test_frames_are_stacked_as_agents_of_games_see_them():
    env = TransformedEnv(Camera(), CatFrames(N=4, dim=-3, in_keys=["pixels"]))
    check_env_specs(env)

    rollout = env.rollout(8, break_when_any_done=False)

    seen = rollout["pixels"][..., 0, 0].tolist()
    assert seen[:3] == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 2]]
    assert seen[5] == [0, 0, 0, 0]


def test_stacking_in_a_replay_buffer_gives_what_the_env_would_have():
    env = TransformedEnv(Camera(), InitTracker())
    online = TransformedEnv(Camera(), CatFrames(N=3, dim=-3, in_keys=["pixels"]))
    unfold = CatFrames(N=3, dim=-3, in_keys=["pixels", ("next", "pixels")], padding="same")

    stacked = unfold(env.rollout(5))

    assert torch.equal(stacked["pixels"], online.rollout(5)["pixels"])


# --------------------------------------------------------------------------------- wrapping libraries


class Thermostat:
    """A simulator in plain Python with the interface of old gym."""

    def __init__(self, start=20.0):
        self.start = start

    def reset(self, seed=None, options=None):
        self.heat = self.start
        return [self.heat], {}

    def step(self, action):
        self.heat += float(action[0])
        return [self.heat], -abs(self.heat - 21.0), self.heat > 30, False, {}


class ThermostatEnv(GymLikeEnv):
    def _make_specs(self, env):
        self.observation_spec = Composite(observation=Unbounded(shape=(1,)))
        self.action_spec = Bounded(-1, 1, shape=(1,))
        self.reward_spec = Unbounded(shape=(1,))

    def _check_kwargs(self, kwargs):
        pass

    def _init_env(self):
        pass

    def _build_env(self, env):
        return env

    def _set_seed(self, seed):
        pass


def test_a_simulator_in_plain_python_is_wrapped():
    env = ThermostatEnv(env=Thermostat())
    check_env_specs(env)

    rollout = env.rollout(4, lambda td: td.set("action", torch.ones(1)))

    assert rollout["next", "observation"].flatten().tolist() == [21.0, 22.0, 23.0, 24.0]
    assert rollout["next", "reward"].flatten().tolist() == [0.0, -1.0, -2.0, -3.0]


def test_double_precision_simulators_become_single():
    class Double(Camera):
        def __init__(self):
            super().__init__()
            self.observation_spec = Composite(x=Unbounded(shape=(2,), dtype=torch.float64))

        def _reset(self, tensordict=None, **kwargs):
            super()._reset()
            return TensorDict({"x": torch.zeros(2, dtype=torch.float64)})

        def _step(self, tensordict):
            out = super()._step(tensordict).exclude("pixels")
            return out.set("x", torch.ones(2, dtype=torch.float64))

    env = TransformedEnv(Double(), DoubleToFloat())

    assert env.rollout(2)["x"].dtype == torch.float32
    assert env.observation_spec["x"].dtype == torch.float32


@pytest.mark.parametrize("outside", [True, False])
def test_transforms_go_inside_or_around_a_batch(outside):
    def make():
        return GymEnv("CartPole-v1")

    if outside:
        env = TransformedEnv(SerialEnv(2, make), StepCounter(3))
    else:
        env = SerialEnv(2, lambda: TransformedEnv(make(), StepCounter(3)))

    rollout = env.rollout(6, break_when_any_done=False)

    assert rollout["step_count"][0].flatten().tolist() == [0, 1, 2, 0, 1, 2]


def test_an_env_is_a_module_with_buffers_and_transforms():
    env = TransformedEnv(
        GymEnv("Pendulum-v1"), ObservationNorm(in_keys=["observation"], loc=1.0, scale=2.0)
    )

    assert isinstance(env, nn.Module)
    assert any("loc" in name for name in env.state_dict())
