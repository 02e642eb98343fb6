"""GymLikeEnv: simulators in the style of gym, and the methods that read them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from envkit import ParallelEnv, SerialEnv, check_env_specs
from envkit.errors import ResetMaskError
from envkit.specs import Bounded, Categorical, Composite, NonTensor, Unbounded
from envkit_bridges.gym.gym_env import GymEnv
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.gym.like import GymLikeEnv
from tests.zoo.gym_envs import Informed
from tests.zoo.policies import Replay


class Slope:
    """A simulator that knows nothing of gymnasium: rolls down from 5, its action is a push."""

    gravity = 2.0

    def reset(self, seed=None):
        self.height = np.float64(5.0)
        return {"height": self.height, "word": "high"}, {}

    def step(self, action):
        assert isinstance(action, np.ndarray)
        self.height += action[0] - self.gravity
        word = "high" if self.height > 2 else "low"
        return {"height": self.height, "word": word}, -1.0, self.height <= 0, False, {"n": 1}


class SlopeEnv(GymLikeEnv):
    """The slope, as a subclass declares it."""

    libname = "slope"

    def __init__(self, simulator=None, **kwargs):
        super().__init__(simulator or Slope(), **kwargs)
        self.observation_spec = Composite(
            height=Unbounded((1,), dtype=torch.float64), word=NonTensor(shape=())
        )
        self.action_spec = Bounded(-1.0, 1.0, (1,))
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone())


class OldSlope(Slope):
    """The same with other answers: a number, one end flag."""

    def reset(self, seed=None):
        super().reset(seed)
        return self.height

    def step(self, action):
        super().step(action)
        return self.height, 1.0, bool(self.height <= 0)


class OldSlopeEnv(GymLikeEnv):
    def __init__(self):
        super().__init__(OldSlope())
        self.observation_spec = Composite(height=Unbounded((1,)))
        self.action_spec = Bounded(-1.0, 1.0, (1,))

    def read_reward(self, reward):
        return torch.tensor([10 * reward])

    def _output_transform(self, result):
        height, reward, done = result
        return height, reward, None, None, done, {}

    def _reset_output_transform(self, result):
        return result, {}


PUSHES = torch.tensor([[0.5], [1.0], [-1.0], [0.0]])


# --------------------------------------------------------------------------------------- stepping


def test_a_simulator_of_ones_own_passes_the_checks():
    env = SlopeEnv()

    check_env_specs(env)
    data = env.rollout(10, Replay(PUSHES))

    assert data["next", "height"].flatten().tolist() == [3.5, 2.5, -0.5]
    assert data["next", "reward"].flatten().tolist() == [-1, -1, -1]
    assert data["next", "terminated"].flatten().tolist() == [False, False, True]
    assert data["height"].dtype == torch.float64
    assert [step["next"]["word"] for step in data.unbind(0)] == ["high", "high", "low"]


def test_answers_of_another_form_are_brought_to_the_usual_one():
    env = OldSlopeEnv()

    check_env_specs(env)
    data = env.rollout(10, Replay(PUSHES))

    assert data["next", "height"].flatten().tolist() == [3.5, 2.5, -0.5]
    assert data["next", "reward"].flatten().tolist() == [10, 10, 10]
    assert data["next", "terminated"].flatten().tolist() == [False, False, True]


@pytest.mark.parametrize("batched", [SerialEnv, partial(ParallelEnv, num_processes=1)])
def test_it_can_be_batched(batched):
    env = batched(2, OldSlopeEnv)
    data = env.rollout(3, Replay(PUSHES[:3].expand(2, 3, 1)))
    env.close()

    assert data["next", "height"].squeeze(-1).tolist() == [[3.5, 2.5, -0.5]] * 2


def test_frames_are_repeated_until_the_end():
    data = SlopeEnv(frame_skip=2).rollout(10, Replay(PUSHES))

    assert data["next", "height"].flatten().tolist() == [2.0, 0.0]
    assert data["next", "reward"].flatten().tolist() == [-2, -2]


def test_actions_may_go_to_the_simulator_as_tensors():
    class TorchSlope(Slope):
        def step(self, action):
            assert isinstance(action, torch.Tensor)
            return super().step(action.numpy())

    env = SlopeEnv(TorchSlope(), convert_actions_to_numpy=False)

    assert env.rollout(2, Replay(PUSHES))["next", "height"].flatten().tolist() == [3.5, 2.5]


def test_gym_actions_may_go_to_the_simulator_as_tensors():
    class Torch(Informed):
        def step(self, action):
            assert isinstance(action, torch.Tensor)
            assert action.shape == (2,)
            return super().step(action)

    env = GymWrapper(Torch(), convert_actions_to_numpy=False)

    assert env.rollout(2).batch_size == (2,)


def test_an_observation_called_state_is_shown_as_observation():
    env = SlopeEnv()

    assert env.read_obs({"state": 1, "word": 2}) == {"observation": 1, "word": 2}
    assert env.read_obs({"state": 1, "observation": 2}) == {"state": 1, "observation": 2}
    assert env.read_obs(3.0) == {"height": 3.0}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"done": True}, (True, None, True, True)),
        ({"terminated": False}, (False, None, False, False)),
        ({"terminated": False, "truncated": True}, (False, True, True, True)),
        ({"truncated": True}, (None, True, True, True)),
        ({}, (False, None, False, False)),
    ],
)
def test_end_flags_are_completed(flags, expected):
    assert SlopeEnv().read_done(**flags) == expected


def test_an_entry_nobody_declared_is_named():
    class More(Slope):
        def reset(self, seed=None):
            observation, info = super().reset(seed)
            return {**observation, "depth": 1.0}, info

    with pytest.raises(KeyError, match="'depth', which no spec declares"):
        SlopeEnv(More()).reset()


# -------------------------------------------------------------------------------------- the rest


def test_a_partial_reset_is_refused():
    env = SlopeEnv()
    td = env.reset()

    with pytest.raises(ResetMaskError, match="cannot be reset in part"):
        env.reset(td.set("_reset", torch.tensor([False])))


def test_unknown_names_are_looked_up_on_the_simulator():
    env = SlopeEnv()

    assert env.gravity == 2.0
    assert env.libname == "slope"
    assert env.env_name is None
    assert env.available_envs == []
    with pytest.raises(AttributeError, match="neither SlopeEnv nor its simulator Slope"):
        _ = env.no_such_name


def test_a_misspelt_name_is_told_of_the_env_and_not_of_the_outermost_wrapper():
    with pytest.raises(
        AttributeError, match=r"neither GymEnv nor its simulator .*'rolout'$"
    ) as told:
        _ = GymEnv("CartPole-v1").rolout

    assert isinstance(told.value.obj, GymEnv)  # where Python looks for the nearest name


def test_encodings_are_remembered_on_request():
    plain, fast = SlopeEnv(), SlopeEnv()
    fast.fast_encoding()

    runs = [env.rollout(3, Replay(PUSHES)) for env in (plain, fast)]

    for key in ("height", ("next", "height"), ("next", "reward")):
        assert runs[0][key].equal(runs[1][key])
    GymEnv("CartPole-v1").fast_encoding()


@pytest.mark.parametrize("name", ["read_obs", "read_reward"])
@pytest.mark.parametrize("base", [SlopeEnv, partial(GymEnv, "CartPole-v1")])
def test_encodings_of_ones_own_are_not_remembered(base, name):
    kind = getattr(base, "func", base)
    changed = type("Changed", (kind,), {name: lambda self, value: getattr(kind, name)(self, value)})
    env = changed("CartPole-v1") if kind is GymEnv else changed()

    with pytest.raises(RuntimeError, match=f"overrides {name}"):
        env.fast_encoding()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("read_obs", lambda entries: {"observation": entries["observation"] + 100}),
        ("read_reward", lambda reward: reward + 100),
        ("read_action", lambda action: 1 - action),
        ("_output_transform", lambda result: (result[0], result[1] + 100, *result[2:])),
        ("_reset_output_transform", lambda result: (result[0] + 100, result[1])),
    ],
)
@pytest.mark.parametrize("batched", [None, SerialEnv])
def test_overridden_methods_of_a_gym_env_are_heard(name, change, batched):
    def method(self, *args):
        return change(getattr(GymWrapper, name)(self, *args))

    changed = type("Changed", (GymWrapper,), {name: method})

    def run(kind):
        def make():
            simulator = Pushed()
            return kind(simulator, categorical_action_encoding=True)

        env = make() if batched is None else batched(1, make)
        actions = torch.zeros(2, dtype=torch.int64)
        data = env.rollout(2, Replay(actions if batched is None else actions[None]))
        return torch.cat(
            [data[key].flatten() for key in ("observation", ("next", "observation"))]
            + [data["next", "reward"].flatten()]
        )

    assert not run(changed).equal(run(GymWrapper))


class Pushed(Informed):
    """Counts on by what it is told."""

    def step(self, action):
        self.count += int(action)
        return super().step(action)


def test_a_simulator_without_close_is_closed():
    env = SlopeEnv()
    env.close()

    assert env.is_closed


@pytest.mark.parametrize(
    "make", [partial(GymEnv, "CartPole-v1"), lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1"))]
)
def test_a_name_of_gymnasium_that_is_gone_says_what_it_is_called_here(make):
    with (
        make() as env,
        pytest.raises(AttributeError, match=r"'seed'.* here it is env\.set_seed\(0\)"),
    ):
        env.seed(0)


def test_the_number_of_rows_has_another_name_here():
    with (
        SerialEnv(2, lambda: GymEnv("CartPole-v1")) as env,
        pytest.raises(AttributeError, match=r"'num_envs'.* here it is env\.batch_size\.numel\(\)"),
    ):
        _ = env.num_envs
