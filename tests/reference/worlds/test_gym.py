"""What `GymWrapper` reads from a simulator, beside the reference library."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.reference.compare import OURS, check_works_alike, differs


class Informed(gymnasium.Env):
    """Counts, and tells in its infos what it counted."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def _shown(self):
        place = np.full(2, self.time, np.float32)
        return place / 10, {"left": np.array([3 - self.time]), "place": place}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._shown()

    def step(self, action):
        self.time += 1
        seen, info = self._shown()
        return seen, 1.0, self.time > 2, False, info


class Seeing(gymnasium.Env):
    """Observes a black picture."""

    observation_space = gymnasium.spaces.Box(0, 255, (4, 4, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros((4, 4, 3), np.uint8), {}

    def step(self, action):
        return np.zeros((4, 4, 3), np.uint8), 0.0, False, False, {}


def test_a_picture_that_is_observed_is_called_as_any_observation():
    def names(lib):
        return sorted(lib.GymWrapper(Seeing()).reset().keys())

    differs("pictures-are-asked-for", names)
    assert "observation" in names(OURS) and "pixels" not in names(OURS)


def test_an_action_spec_of_another_encoding_is_refused():
    def call(lib):
        env = lib.GymWrapper(Informed())
        env.action_spec = lib.Categorical(2)
        return env.rollout(2)["action"].shape

    differs("actions-as-built", call)
    with pytest.raises(ValueError, match="categorical_action_encoding="):
        call(OURS)


KEYS = {"one": ["place"], "two": ["left", "place"], "one that is missing": ["place", "nowhere"]}


@pytest.mark.parametrize("case", KEYS)
def test_infos_are_read_by_name_whatever_their_shape(case):
    def rolled(lib):
        env = lib.GymWrapper(Informed())
        reader = lib.default_info_dict_reader(KEYS[case])
        return env.set_info_dict_reader(reader).rollout(5)["next"].exclude("nowhere")

    check_works_alike(rolled)


def test_specs_of_named_infos_fit_what_is_read():
    env = OURS.GymWrapper(Informed())

    env.set_info_dict_reader(OURS.default_info_dict_reader(["left", "place"]))

    assert env.observation_spec["left"].dtype == torch.int64
    assert env.observation_spec["place"].shape == (2,)
    OURS.check_env_specs(env)


def test_infos_are_registered_at_once():
    def registered(lib):
        env = lib.GymWrapper(Informed()).auto_register_info_dict()
        data = env.rollout(5).exclude("action")
        return env.observation_spec, data

    check_works_alike(registered)


def test_readers_of_infos_are_assigned_as_a_whole():
    def call(lib):
        env = lib.GymWrapper(Informed()).set_info_dict_reader(
            lib.default_info_dict_reader(["left"])
        )
        env.info_dict_reader[0] = lib.default_info_dict_reader(["left"])
        return len(env.info_dict_reader)

    differs("readers-are-a-tuple", call)
    with pytest.raises(TypeError, match=r"env\.info_dict_reader = \["):
        call(OURS)


def test_the_device_of_a_simulator_is_the_cpu():
    differs("simulators-in-python", lambda lib: lib.GymWrapper(Informed()).device)
    check_works_alike(lambda lib: str(lib.GymWrapper(Informed()).action_spec.device))
    assert str(OURS.GymWrapper(Informed()).rollout(2).device) == "cpu"


def test_what_was_asked_for_is_kept():
    def read(lib):
        env = lib.GymWrapper(Informed(), pixels_only=False)
        return env.pixels_only, env.from_pixels, env.frame_skip

    check_works_alike(read)


def test_the_state_of_a_simulator_is_saved_with_its_episode():
    def entries(lib):
        env = lib.GymEnv("Pendulum-v1")
        env.reset()
        return list(env.state_dict())

    differs("simulators-in-python", entries)
    env = OURS.TransformedEnv(OURS.GymEnv("Pendulum-v1"), OURS.StepCounter())
    env.reset()
    assert not env.transform.state_dict()


def test_infos_of_a_vector_env_are_recorded_where_they_are_asked_for():
    def rolled(lib, **options):
        rows = SyncVectorEnv([Informed] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        return lib.GymWrapper(rows, **options).rollout(4, break_when_any_done=False)

    differs("infos-on-request", lambda lib: sorted(rolled(lib)["next"].keys()))

    assert "place" not in rolled(OURS)["next"].keys()
    places = rolled(OURS, info=True)["next", "place"]
    assert places[..., 0].tolist() == [[1, 2, 3, 1]] * 2  # the last one of an episode is its own
