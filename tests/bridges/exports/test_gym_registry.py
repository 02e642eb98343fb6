"""Envs of envkit in the registry of Gymnasium."""

from __future__ import annotations

import itertools
import sys
import types
import warnings
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from tensordict import TensorDict

from envkit import (
    BraxEnv,
    Compose,
    EnvBase,
    GymEnv,
    PendulumEnv,
    RemoveEmptySpecs,
    RewardSum,
    StepCounter,
)
from envkit.errors import ArgumentError, EncodingError, InputError, MissingKeyError, OptionError
from envkit.specs import Categorical, Composite, MultiOneHot, OneHot, Unbounded
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.shaped_envs import Groups, Quiet, Several, Wordy

numbers = itertools.count()


@pytest.fixture
def id():
    """A name of its own, which is taken out of the registry afterwards."""
    name = f"envkit/Test{next(numbers)}-v0"
    yield name
    gymnasium.registry.pop(name, None)


def registered(env_class, id, **options):
    env_class.register_gym(id, **options)
    return gymnasium.make(id)


def is_tree_equal(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_tree_equal(one[k], other[k]) for k in one)
    return bool((one == other).all())


class Nested(Quiet):
    """Observations in a node, flags and classes among them, and a one-hot action."""

    def __init__(self):
        super().__init__()
        deep = Composite(twice=Unbounded((1,)), odd=Categorical(2, shape=(1,), dtype=torch.bool))
        self.observation_spec = Composite(deep=deep, kind=Categorical(9), code=OneHot(9))
        self.action_spec = OneHot(3)

    def _out(self):
        code = torch.nn.functional.one_hot(torch.tensor(self.c % 9), 9).bool()
        deep = {"twice": torch.tensor([2.0 * self.c]), "odd": torch.tensor([self.c % 2 == 1])}
        return TensorDict({"deep": deep, "kind": torch.tensor(self.c % 9), "code": code})

    def _rewards(self, td):
        return {"reward": torch.ones(1)}


# ------------------------------------------------------------------------------------- the protocol


def test_a_registered_class_is_made_by_name(id):
    env = registered(Count, id, n=3, backend="gymnasium")

    observation, info = env.reset(seed=0)
    steps = [env.step(1) for _ in range(3)]

    assert id in gymnasium.registry
    assert isinstance(env.unwrapped, gymnasium.Env)
    assert {name: value.tolist() for name, value in observation.items()} == {"count": [0]}
    assert info == {}
    assert [step[0]["count"].item() for step in steps] == [1, 2, 3]
    assert [step[1].tolist() for step in steps] == [[1.0]] * 3
    assert [step[2].tolist() for step in steps] == [[False], [False], [True]]
    assert [step[3].tolist() for step in steps] == [[False]] * 3
    assert env.unwrapped.envkit_env.n == 3


def test_values_are_tensors_or_arrays(id):
    tensors = registered(Count, id)
    arrays = gymnasium.make(id, to_numpy=True)

    assert isinstance(tensors.reset()[0]["count"], torch.Tensor)
    assert isinstance(tensors.step(1)[1], torch.Tensor)
    assert isinstance(arrays.reset()[0]["count"], np.ndarray)
    assert arrays.step(1)[1:4] == (1.0, False, False)
    assert [type(value) for value in arrays.step(1)[1:4]] == [float, bool, bool]


def test_observations_are_sorted_at_every_level(id):
    class Unsorted(Quiet):
        def __init__(self):
            super().__init__()
            deep = Composite(z=Unbounded((1,)), b=Unbounded((1,)))
            self.observation_spec = Composite(y=Unbounded((1,)), deep=deep, a=Unbounded((1,)))
            self.action_spec = Unbounded((1,))

        def _out(self):
            return self.full_observation_spec.zero()

    observation, _ = registered(Unsorted, id).reset()

    assert list(observation) == ["a", "deep", "y"]
    assert list(observation["deep"]) == ["b", "z"]


def test_reset_options_go_to_the_env(id):
    seen = {}

    class Asked(Count):
        def _reset(self, td, **kwargs):
            seen.update(kwargs)
            return super()._reset(td)

    registered(Asked, id).reset(options={"speed": 3})

    assert seen == {"speed": 3}


def test_reset_options_go_to_a_simulator_of_gymnasium(id):
    env = registered(
        GymEnv, id, env_name="CartPole-v1", observation_key="observation", to_numpy=True
    )

    observation, _ = env.reset(options={"low": 0.125, "high": 0.125})

    assert (observation == 0.125).all()


def test_a_step_before_a_reset_is_refused(id):
    env = registered(Count, id, order_enforce=False)

    with pytest.raises(ArgumentError, match="call reset first"):
        env.step(1)


def test_closing_closes_the_env(id):
    env = registered(Count, id)

    env.close()

    assert env.unwrapped.envkit_env.is_closed


@pytest.mark.parametrize(
    "make",
    [
        Count,
        StatelessCount,
        partial(GymEnv, "CartPole-v1"),
        partial(GymEnv, "Pendulum-v1"),
        partial(GymEnv, "FrozenLake-v1", categorical_action_encoding=True),
        partial(BraxEnv, "fast", device="cpu", episode_length=50),
        Nested,
    ],
    ids=lambda make: getattr(make, "__name__", None) or str(make.args or make.func.__name__),
)
def test_gymnasiums_own_checker_is_content(id, make):
    EnvBase.register_gym(id, entry_point=make, to_numpy=True)
    env = gymnasium.make(id)

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*(infinity|Not able to test|symmetric|function is dropped).*"
        )
        check_env(env.unwrapped, skip_render_check=True)
        env.reset(seed=1)
        for _ in range(4):
            observation, *_ = env.step(env.action_space.sample())
            assert env.observation_space.contains(observation)
    env.close()


def test_a_vector_env_is_made_of_registered_ones(id):
    Count.register_gym(id, n=3, to_numpy=True)
    env = gymnasium.make_vec(id, num_envs=2, vectorization_mode="sync")

    env.reset(seed=0)
    observation, reward, *_ = env.step(np.array([1, 0]))
    env.close()

    assert observation["count"].tolist() == [[1], [1]]
    assert reward.tolist() == [1.0, 1.0]


def test_a_registered_env_comes_back_as_an_envkit_env(id):
    Nested.register_gym(id, to_numpy=True)

    data = GymEnv(id).rollout(3)

    assert data["next", "deep", "twice"].flatten().tolist() == [2, 4, 6]
    assert data["next", "reward"].flatten().tolist() == [1, 1, 1]


# ----------------------------------------------------------------------------------- what is built


def test_another_class_may_be_the_entry_point(id):
    EnvBase.register_gym(id, entry_point=GymEnv, env_name="CartPole-v1")

    observation, _ = gymnasium.make(id).reset()

    assert observation["observation"].shape == (4,)


@pytest.mark.parametrize("entry_point", [lambda n: Count(n), "tests.zoo.envs:Count"])
def test_an_entry_point_is_a_callable_or_a_place(id, entry_point):
    EnvBase.register_gym(id, entry_point=entry_point, n=2)

    assert gymnasium.make(id).unwrapped.envkit_env.n == 2


def test_an_abstract_class_needs_an_entry_point(id):
    with pytest.raises(ArgumentError, match=r"EnvBase cannot be built.*entry_point="):
        EnvBase.register_gym(id)


def test_keywords_are_given_when_registered_or_made(id):
    Count.register_gym(id, n=2)

    assert gymnasium.make(id).unwrapped.envkit_env.n == 2
    assert gymnasium.make(id, n=7).unwrapped.envkit_env.n == 7


# -------------------------------------------------------------------------------- one observation


@pytest.mark.parametrize("name", ["Blackjack-v1", "CartPole-v1", "Taxi-v4"])
def test_one_entry_is_the_observation_itself(id, name):
    GymEnv.register_gym(
        id,
        env_name=name,
        observation_key="observation",
        categorical_action_encoding=True,
        to_numpy=True,
    )
    env, in_dict = gymnasium.make(id), gymnasium.make(id, observation_key=None)

    assert env.observation_space == gymnasium.make(name).observation_space
    alone, held = env.reset(seed=3)[0], in_dict.reset(seed=3)[0]["observation"]
    assert alone in env.observation_space and np.array_equal(alone, held)
    alone, held = env.step(0)[0], in_dict.step(0)[0]["observation"]
    assert alone in env.observation_space and np.array_equal(alone, held)


def test_other_entries_are_infos_where_one_is_the_observation(id):
    env = registered(
        BraxEnv,
        id,
        env_name="fast",
        device="cpu",
        transform=StepCounter(),
        info_keys=["step_count"],
        observation_key="observation",
        to_numpy=True,
    )

    observation, info = env.reset()
    assert observation.shape == env.observation_space.shape == (2,)
    assert info["step_count"].tolist() == [0]


def test_the_observation_may_be_nested_or_chosen_when_made(id):
    Nested.register_gym(id)

    env = gymnasium.make(id, observation_key=("deep", "twice"))
    assert env.reset()[0].shape == env.observation_space.shape == (1,)

    for missing in ("observation", ("deep", "twice", "more")):
        with pytest.raises(MissingKeyError, match=r"observation_key is .* Pass the name of one"):
            gymnasium.make(id, observation_key=missing)


# ------------------------------------------------------------------------------ transforms and infos


def test_a_transform_is_applied(id):
    env = registered(Count, id, transform=StepCounter(2))

    assert list(env.reset()[0]) == ["count", "step_count"]
    assert not env.step(0)[3].any()
    assert env.step(0)[3].all()


def test_a_transform_may_be_given_when_made(id):
    Count.register_gym(id, transform=StepCounter())

    env = gymnasium.make(id, transform=lambda td: td.set("count", td["count"] + 10))

    assert {name: v.item() for name, v in env.reset()[0].items()} == {"count": 10}


def test_several_transforms_in_a_list_or_a_compose(id):
    for transform in ([StepCounter(), RewardSum()], Compose(StepCounter(), RewardSum())):
        env = registered(Count, id, transform=transform)
        assert list(env.reset()[0]) == ["count", "episode_reward", "step_count"]
        gymnasium.registry.pop(id)


def test_one_registered_transform_serves_many_envs(id):
    transform = StepCounter(5)
    Count.register_gym(id, transform=transform)

    first, second = gymnasium.make(id), gymnasium.make(id)
    third, fourth = (gymnasium.make(id, transform=transform) for _ in range(2))

    for env in (first, second, third, fourth):
        env.reset()
        assert env.step(0)[0]["step_count"].item() == 1


def test_entries_move_to_the_infos(id):
    env = registered(
        GymEnv,
        id,
        env_name="CartPole-v1",
        transform=StepCounter(5),
        info_keys=["step_count"],
        to_numpy=True,
    )

    observation, info = env.reset()

    assert info.keys() == {"step_count"}
    assert info["step_count"].tolist() == [0]
    assert list(observation) == ["observation"]
    assert list(env.observation_space) == ["observation"]
    assert env.step(0)[4]["step_count"].tolist() == [1]


def test_a_node_takes_along_what_is_below(id):
    env = registered(Groups, id, info_keys=["agent0", ("agent1", "position")])

    observation, info = env.reset()

    assert observation == {}
    assert {name: list(node) for name, node in info.items()} == {
        "agent0": ["position"],
        "agent1": ["position"],
    }


@pytest.mark.parametrize("transform", [None, RemoveEmptySpecs()])
def test_a_node_that_is_empty_then_is_not_shown(id, transform):
    env = registered(Several, id, info_keys=[("deep", "twice")], transform=transform, to_numpy=True)

    observation, info = env.reset()

    assert list(observation) == list(env.observation_space) == ["count"]
    assert info["deep"]["twice"].tolist() == [0, 0]


def test_info_keys_may_be_given_when_made(id):
    Several.register_gym(id)

    assert list(gymnasium.make(id, info_keys=["count"]).reset()[1]) == ["count"]


def test_an_info_key_nobody_has_is_named(id):
    Several.register_gym(id, info_keys=["speed"])

    with pytest.raises(
        MissingKeyError, match=r"info_keys names 'speed'.*'count', \('deep', 'twice'\)"
    ):
        gymnasium.make(id)


def test_words_are_shown_as_words(id):
    env = registered(Wordy, id, to_numpy=True, disable_env_checker=True)

    env.reset()

    assert env.step(0)[0]["word"] == "one"


# ------------------------------------------------------------------------------------------ actions


@pytest.mark.parametrize(
    ("spec", "action", "seen", "space"),
    [
        (OneHot(3), 2, [0, 0, 1], "Discrete(3)"),
        (OneHot(3), np.int64(1), [0, 1, 0], "Discrete(3)"),
        (OneHot(3), torch.tensor([0, 1, 0]), [0, 1, 0], "Discrete(3)"),
        (Categorical(3), 2, 2, "Discrete(3)"),
        (Categorical(3, shape=(1,)), 2, [2], "Discrete(3)"),
        (Categorical(3, shape=(1,)), np.array([2]), [2], "Discrete(3)"),
        (MultiOneHot([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0], "MultiDiscrete([2 3])"),
        (Unbounded((2,)), [0.5, 1.5], [0.5, 1.5], "Box(-inf, inf, (2,), float32)"),
    ],
)
def test_actions_are_indices_or_what_the_spec_holds(id, spec, action, seen, space):
    class Echo(Quiet):
        def __init__(self):
            super().__init__()
            self.action_spec = spec
            self.observation_spec = Composite(echo=spec)

        def _reset(self, td):
            return TensorDict({"echo": spec.zero()})

        def _step(self, td):
            return TensorDict({"echo": td["action"]})

    env = registered(Echo, id)
    env.reset()

    assert str(env.action_space) == space
    assert env.step(action)[0]["echo"].int().tolist() == torch.as_tensor(seen).int().tolist()


def test_several_actions_come_as_a_dict(id):
    env = registered(Several, id)
    env.reset()

    _, rewards, *_ = env.step({"button": 1, "deep": {"force": np.array([0.25, 0.5])}})

    assert rewards["deep"]["cost"].tolist() == [-0.75]
    assert rewards["gain"].tolist() == [1.0]
    with pytest.raises(MissingKeyError, match=r"no \('deep', 'force'\).*'button'"):
        env.step({"button": 1})
    with pytest.raises(MissingKeyError, match=r"no 'button', it holds int"):
        env.step(1)


def test_an_action_that_does_not_fit_is_refused(id):
    env = registered(GymEnv, id, env_name="Pendulum-v1")
    env.reset()

    with pytest.raises(EncodingError, match=r"\(3,\)"):
        env.step([0.0, 0.0, 0.0])


def test_numbers_of_options_are_integers(id):
    env = registered(GymEnv, id, env_name="CartPole-v1")
    env.reset()

    with pytest.raises(InputError, match=r"dtype torch\.float64.*Pass integers"):
        env.step(0.6)


@pytest.mark.parametrize("to_numpy", [True, False])
def test_whoever_changes_an_observation_does_not_change_the_env(id, to_numpy):
    """The state of this env lies among its observations, and is read by its next step."""
    env = registered(PendulumEnv, id, to_numpy=to_numpy, info_keys=["params"])
    shown = []
    for changed in (True, False):
        observation, _ = env.reset(seed=0)
        if changed:
            observation["th"][...] = 0.5
        shown.append(float(env.step(np.ones(1, np.float32))[0]["th"]))

    assert shown[0] == shown[1]


# ------------------------------------------------------------------------------------------ options


def test_gyms_own_options_are_forwarded(id):
    env = registered(
        Count,
        id,
        n=9,
        reward_threshold=3.5,
        nondeterministic=True,
        max_episode_steps=3,
        order_enforce=False,
        disable_env_checker=True,
    )

    env.reset()
    truncated = [bool(env.step(0)[3]) for _ in range(3)]

    assert truncated == [False, False, True]
    spec = gymnasium.spec(id)
    assert (spec.reward_threshold, spec.nondeterministic, spec.order_enforce) == (3.5, True, False)


@pytest.mark.parametrize("option", ["autoreset", "apply_api_compatibility"])
def test_options_that_the_version_lacks_are_refused(id, option):
    with pytest.raises(OptionError, match=rf"gymnasium {gymnasium.__version__}.*{option}") as error:
        Count.register_gym(id, **{option: True})

    assert isinstance(error.value, TypeError)
    assert id not in gymnasium.registry


def test_the_checker_runs_where_arrays_are_given(id):
    wrapped = str(registered(Count, id, to_numpy=True))
    bare = str(gymnasium.make(id, to_numpy=False, disable_env_checker=True))

    assert "PassiveEnvChecker" in wrapped
    assert "PassiveEnvChecker" not in bare


def test_another_library_may_be_the_backend(id, monkeypatch):
    monkeypatch.setitem(sys.modules, "gym", None)  # where it is installed, too
    with pytest.raises(ArgumentError, match="no gym backend called 'gim'"):
        Count.register_gym(id, backend="gim")
    with pytest.raises(ImportError, match="gym"):
        Count.register_gym(id, backend="gym")
    assert isinstance(gymnasium, types.ModuleType)
    Count.register_gym(id, backend=gymnasium)
    assert id in gymnasium.registry


# ------------------------------------------------------------------------------------ stateless envs


def test_the_state_of_a_stateless_env_is_kept(id):
    env = registered(StatelessCount, id)

    env.reset()
    counts = [env.step(0)[0]["count"].item() for _ in range(3)]

    assert counts == [1, 2, 3]


@pytest.mark.parametrize("state_layout", ["packed", pytest.param("nested", marks=pytest.mark.slow)])
def test_a_brax_env_gives_what_its_rollout_gives(id, state_layout):
    options = {"batch_size": [2], "device": "cpu", "state_layout": state_layout}
    direct = BraxEnv("fast", **options)
    direct.set_seed(0)
    data = direct.rollout(5, break_when_any_done=False)
    env = registered(BraxEnv, id, env_name="fast", info_keys=["state"], **options)

    first, info = env.reset(seed=0)
    steps = [env.step(action) for action in data["action"].unbind(1)]

    assert list(first) == ["observation"]
    assert list(info) == ["state"]
    assert first["observation"].equal(data["observation"][:, 0])
    for index, (observation, reward, terminated, truncated, info) in enumerate(steps):
        following = data["next"][:, index]
        assert observation["observation"].equal(following["observation"])
        assert reward.equal(following["reward"])
        assert terminated.equal(following["terminated"])
        assert truncated.equal(following["truncated"])
        assert is_tree_equal(info["state"], following["state"].to_dict())


@pytest.mark.parametrize("options", [{"env_name": "CartPole-v1"}, {"env_name": "Pendulum-v1"}])
def test_the_same_seed_gives_the_same_episode(id, options):
    env = registered(GymEnv, id, **options)
    starts = []

    for _ in range(2):
        env.unwrapped.seed(0)
        starts.append(env.reset()[0])
    starts.append(env.reset(seed=0)[0])

    assert is_tree_equal(starts[0], starts[1])
    assert is_tree_equal(starts[0], starts[2])
    assert not is_tree_equal(starts[0], env.reset()[0])
