"""Infos are recorded, and no adapter or policy shows them as observations."""

from __future__ import annotations

from functools import partial

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import RecordEpisodeStatistics
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from envkit import (
    Box,
    Compose,
    GymWrapper,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    RenameTransform,
    SerialEnv,
    StepCounter,
    Timestep,
    TransformedEnv,
    default_info_dict_reader,
    from_minari,
    to_gym_vector,
    to_minari,
    to_sb3,
)
from envkit.data.paths import info_names
from envkit.env.policy import observation_inputs
from tests.zoo.envs import Count
from tests.zoo.gym_envs import Informed


def informed(**kwargs):
    return GymWrapper(Informed(**kwargs)).set_info_dict_reader()


def deep(count):
    return {"arm": {"angle": float(count)}, "success": count == 2}


class Sled:
    """Slides as it is pushed, and tells the work of the push."""

    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        return jnp.float32(0), Timestep(jnp.zeros(1), info={"work": jnp.float32(0)})

    def step(self, place, action):
        place = place + action[0]
        return place, Timestep(place[None], info={"work": jnp.abs(action[0])})


class Told(Count):
    """Declares an info as an env of one's own does."""

    def __init__(self):
        super().__init__()
        spec = self.observation_spec.clone()
        spec["info", "twice"] = spec["count"].clone()
        self.observation_spec = spec

    def _reset(self, td=None, **kwargs):
        out = super()._reset(td, **kwargs)
        return out.set(("info", "twice"), 2 * out["count"])

    def _step(self, td):
        out = super()._step(td)
        return out.set(("info", "twice"), 2 * out["count"])


ENVS = {
    "gym": (lambda: SerialEnv(2, informed), "observation", {"x", "y"}),
    "workers": (lambda: ParallelEnv(2, informed, num_processes=1), "observation", {"x", "y"}),
    "around": (
        lambda: TransformedEnv(SerialEnv(2, informed), RenameTransform(["observation"], ["seen"])),
        "seen",
        {"x", "y"},
    ),
    "inside": (
        lambda: SerialEnv(
            2, lambda: TransformedEnv(informed(), RenameTransform(["x"], [("info", "z")]))
        ),
        "observation",
        {"x", "y", "z"},
    ),
    "mixed": (
        lambda: MixedEnv([SerialEnv(1, informed)] * 1 + [SerialEnv(1, informed)]),
        "observation",
        {"x", "y"},
    ),
    "jax": (lambda: JaxEnv(Sled(), batch_size=[2]), "observation", {"work"}),
    "metrics": (
        lambda: JaxEnv(Sled(), batch_size=[2], metrics=True),
        "observation",
        {"metrics"},
    ),
    "custom": (lambda: SerialEnv(2, Told), "count", {"twice"}),
}


@pytest.mark.parametrize("kind", sorted(ENVS))
def test_infos_are_no_observations(kind):
    make, observed, infos = ENVS[kind]
    env = make()
    env.reset()
    rows = to_sb3(env)
    vector = to_gym_vector(env)

    rows.reset()
    action = np.stack([rows.action_space.sample()] * 2)
    *_, each = rows.step(action)
    vector.reset()
    *_, reported = vector.step(action)

    assert observation_inputs(env) == [observed]
    assert not isinstance(rows.observation_space, spaces.Dict)
    assert not isinstance(vector.single_observation_space, spaces.Dict)
    assert {name for name in reported if not name.startswith("_")} == infos
    shown = [{name for name in one if not name.startswith("_")} for one in each]
    assert shown == [{*infos, "TimeLimit.truncated"}] * 2
    env.close()


def test_a_success_flag_is_recorded_and_not_given_to_a_function():
    env = SerialEnv(2, lambda: informed(info=deep))
    seen = []

    data = env.rollout(3, lambda observation: seen.append(observation) or env.action_spec.rand())

    assert data["next", "success"].tolist() == [[False, True, False]] * 2
    assert all(one.shape == (2, 1) for one in seen)
    env.close()


def test_nested_infos_nest_as_the_simulator_gave_them():
    rows, vector = (
        show(SerialEnv(2, lambda: informed(info=deep))) for show in (to_sb3, to_gym_vector)
    )
    theirs = DummyVecEnv([lambda: Informed(deep)])
    actions = np.zeros(2, int)

    rows.reset(), vector.reset(), theirs.reset()
    infos = rows.step(actions)[-1]
    reported = vector.step(actions)[-1]

    assert infos[0] == theirs.step(actions[:1])[-1][0]
    assert reported["arm"]["angle"].tolist() == [1, 1] and reported["_arm"].all()
    assert reported["arm"]["_angle"].all()


def test_a_rename_makes_an_info_an_observation_and_back():
    shown = TransformedEnv(informed(), RenameTransform(["x"], ["seen"]))
    swapped = TransformedEnv(
        informed(), Compose(RenameTransform(["x"], ["z"]), RenameTransform(["observation"], ["x"]))
    )
    hidden = TransformedEnv(shown, RenameTransform(["seen"], [("info", "x")]))

    assert set(observation_inputs(shown)) == {"observation", "seen"}
    assert set(observation_inputs(swapped)) == {"x", "z"}
    assert observation_inputs(hidden) == ["observation"]


def test_an_observation_called_info_is_one():
    class Names(gymnasium.Env):
        observation_space = spaces.Dict(info=spaces.Dict(a=spaces.Box(0, 1, (2,))))
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return {"info": {"a": np.zeros(2, np.float32)}}, {}

        def step(self, action):
            return self.reset()[0], 0.0, False, False, {}

    env = SerialEnv(2, lambda: GymWrapper(Names()))

    assert observation_inputs(env) == [("info", "a")]
    assert to_gym_vector(env).reset()[0]["info"]["a"].shape == (2, 2)
    env.close()


def test_names_of_infos_stay_apart():
    assert info_names([("info", "a"), ("b",)]) == {("info", "a"): ("a",), ("b",): ("b",)}
    assert info_names([("info", "a"), ("a",)]) == {("info", "a"): ("info", "a"), ("a",): ("a",)}
    assert info_names([("g", "info", "a")]) == {("g", "info", "a"): ("g", "a")}
    assert set(info_names([("info", "a", "b"), ("a",)]).values()) == {("info", "a", "b"), ("a",)}


def test_a_registered_env_shows_infos_as_infos():
    JaxEnv.register_gym(
        "Infos/Sled-v0", entry_point=partial(JaxEnv, Sled()), to_numpy=True, info_keys=["state"]
    )
    env = gymnasium.make("Infos/Sled-v0").unwrapped
    env.reset(seed=0)

    observation, *_, info = env.step(np.zeros(1, np.float32))

    assert list(observation) == ["observation"] and list(env.observation_space) == ["observation"]
    assert info["work"] == 0


def test_a_dataset_keeps_infos_as_infos(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = informed()
    data = env.rollout(4)

    dataset = to_minari(data, "mine-v0", env=env)

    back = from_minari("mine-v0")
    episode = dataset[0]
    assert dataset.observation_space.shape == (1,)
    assert episode.infos["x"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(back["next", "y"], data["next", "y"]) and torch.equal(back["x"], data["x"])


def test_below_info_is_an_info_without_the_env(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))

    dataset = to_minari(Told().rollout(3), "mine-v0")

    assert dataset[0].observations.ndim == 2
    assert dataset[0].infos["info"]["twice"].ravel().tolist() == [0, 2, 4, 6]


# ------------------------------------------------------------------------------------ episode infos


def monitored(wrapper, length):
    return GymWrapper(wrapper(Informed(length=length)))


def pool(kind, wrapper):
    makers = [partial(monitored, wrapper, length) for length in (2, 3)]
    if kind == "serial":
        return SerialEnv(2, makers)
    if kind == "transformed":
        inside = [lambda make=make: TransformedEnv(make(), StepCounter()) for make in makers]
        return TransformedEnv(SerialEnv(2, inside), StepCounter(step_count_key="again"))
    if kind == "mixed":
        return MixedEnv([SerialEnv(1, makers[:1]), SerialEnv(1, makers[1:])])
    if kind == "gymnasium":
        one = [
            partial(lambda length: wrapper(Informed(length=length)), length) for length in (2, 3)
        ]
        return GymWrapper(gymnasium.vector.SyncVectorEnv(one))
    if kind == "with infos":
        return SerialEnv(
            2,
            [
                lambda make=make: make().set_info_dict_reader(default_info_dict_reader(["x"]))
                for make in makers
            ],
        )
    return ParallelEnv(2, makers, num_processes=1)


@pytest.mark.parametrize("wrapper", [Monitor, RecordEpisodeStatistics])
@pytest.mark.parametrize(
    "kind", ["serial", "parallel", "transformed", "mixed", "gymnasium", "with infos"]
)
def test_sb3_gets_episode_infos_at_the_ends(kind, wrapper):
    env = to_sb3(pool(kind, wrapper))
    env.reset()

    episodes = []
    for step in range(1, 7):
        _, _, done, infos = env.step(np.zeros(2, int))
        assert [("episode" in info) for info in infos] == done.tolist()
        episodes += [
            (step, row, float(info["episode"]["r"]), int(info["episode"]["l"]))
            for row, info in enumerate(infos)
            if done[row]
        ]
    env.close()

    assert episodes == [(2, 0, 2, 2), (3, 1, 3, 3), (4, 0, 2, 2), (6, 0, 2, 2), (6, 1, 3, 3)]


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_gymnasium_gets_episode_infos_as_its_own_vector_env_gives_them(mode):
    makers = [
        partial(lambda length: RecordEpisodeStatistics(Informed(length=length)), n) for n in (2, 3)
    ]
    ours = to_gym_vector(pool("serial", RecordEpisodeStatistics), mode)
    modes = {one.name.lower(): one for one in gymnasium.vector.AutoresetMode}
    theirs = gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=modes[mode])
    ours.reset(), theirs.reset()

    for _ in range(9):
        pair = [env.step(np.zeros(2, int)) for env in (ours, theirs)]
        for env, (_, _, terminated, truncated, _) in zip((ours, theirs), pair, strict=True):
            if mode == "disabled" and (ended := terminated | truncated).any():
                env.reset(options={"reset_mask": ended})
        one, other = (infos.get("final_info", infos) for *_, infos in pair)
        assert ("episode" in one) == ("episode" in other)
        if "episode" in one:
            assert np.array_equal(one["_episode"], other["_episode"])
            for name in ("r", "_r", "l", "_l", "_t"):
                assert np.array_equal(one["episode"][name], other["episode"][name])


def test_a_statistics_wrapper_around_a_vector_env_is_not_believed():
    inner = gymnasium.vector.SyncVectorEnv([lambda: Informed(length=2), lambda: Informed(length=3)])
    env = to_sb3(GymWrapper(gymnasium.wrappers.vector.RecordEpisodeStatistics(inner)))
    env.reset()

    told = [info for _ in range(6) for info in env.step(np.zeros(2, int))[-1]]

    assert not any("episode" in info for info in told)


def test_training_counts_the_episodes_of_monitors():
    from stable_baselines3 import PPO

    env = to_sb3(pool("serial", Monitor))
    model = PPO("MlpPolicy", env, n_steps=12, batch_size=12, n_epochs=1, device="cpu")

    model.learn(24)

    lengths = [told["l"] for told in model.ep_info_buffer]
    assert sorted(lengths) == [2] * 6 + [3] * 4
