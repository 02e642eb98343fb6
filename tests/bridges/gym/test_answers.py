"""Envs that answer in another form than Gymnasium's are refused by what they returned and should return."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from envkit import GymWrapper, SerialEnv, StepCounter, TransformedEnv, check_env_specs
from envkit.errors import ArgumentTypeError, EncodingError, OptionError, OutOfSpecError, WorkerError

PLACE = np.zeros(2, np.float32)


class Honest(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return PLACE, {}

    def step(self, action):
        return PLACE, 1.0, False, False, {}


def answering(**answers):
    """Make a class of envs whose ``reset`` or ``step`` gives something else."""
    methods = {
        name: lambda self, *_, _answer=answer, **__: _answer for name, answer in answers.items()
    }
    return type("Other", (Honest,), methods)


FIVE = r"must return five values, \(observation, reward, terminated, truncated, info\)"
TWO = r"must return two values, \(observation, info\)"
OTHERS = {
    "step of four values": (
        answering(step=(PLACE, 1.0, False, {})),
        rf"step .* 4 values \(ndarray, float, bool, dict\), but {FIVE}.* old gym",
    ),
    "step of an observation": (answering(step=PLACE), rf"step .* type ndarray, but {FIVE}"),
    "step of None": (answering(step=None), rf"step of the simulator returned None, but {FIVE}"),
    "reset without infos": (answering(reset=PLACE), rf"reset .* type ndarray, but {TWO}"),
    "reset of two observations": (
        answering(reset=(PLACE, PLACE)),
        rf"reset .* 2 values \(ndarray, ndarray\), but {TWO}",
    ),
    "reset of None": (answering(reset=None), rf"reset of the simulator returned None, but {TWO}"),
}
WAYS = {
    "rollout": lambda kind: GymWrapper(kind()).rollout(2),
    "in general": lambda kind: GymWrapper(kind(), run_type_checks=True).rollout(2),
    "step by step": lambda kind: (env := GymWrapper(kind())).step(env.rand_action(env.reset())),
    "frames skipped": lambda kind: GymWrapper(kind(), frame_skip=2).rollout(2),
    "written down": lambda kind: GymWrapper(kind()).record_for_resume().rollout(2),
    "transformed": lambda kind: TransformedEnv(GymWrapper(kind()), StepCounter()).rollout(2),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("kind", "message"), OTHERS.values(), ids=OTHERS)
def test_an_answer_of_another_form_is_named_with_the_form_that_is_expected(kind, message, way):
    with pytest.raises(EncodingError, match=message):
        way(kind)


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize(("kind", "message"), OTHERS.values(), ids=OTHERS)
def test_a_pool_names_it_too(kind, message, use_buffers):
    env = SerialEnv(2, lambda: GymWrapper(kind()), use_buffers=use_buffers)

    with pytest.raises(WorkerError, match=message):
        env.rollout(2)


@pytest.mark.parametrize(("kind", "message"), OTHERS.values(), ids=OTHERS)
def test_a_check_of_specs_reports_it(kind, message):
    with pytest.raises(OutOfSpecError, match=message):
        check_env_specs(GymWrapper(kind()))


def test_lists_and_infos_that_are_none_are_taken():
    env = GymWrapper(answering(reset=[PLACE, None], step=[PLACE, 1.0, False, False, None])())

    assert env.rollout(3)["next", "reward"].flatten().tolist() == [1, 1, 1]


class Unrelated:
    observation_space, action_space = Honest.observation_space, Honest.action_space

    def reset(self, seed=None, options=None):
        return PLACE, {}

    def step(self, action):
        return PLACE, 1.0, False, False, {}


class Spaceless(gymnasium.Env):
    observation_space = Honest.observation_space


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Honest, r"env is the class Honest.*Write GymWrapper\(Honest\(\)\)"),
        (Unrelated(), r"no gymnasium\.Env.*class Unrelated\(gymnasium\.Env\).*truncated, info"),
        (Spaceless(), r"has no action_space.*self\.action_space = "),
        (None, "was given None, of type NoneType"),
        ("CartPole-v1", r"let GymEnv\('CartPole-v1'\) build it"),
    ],
)
def test_what_is_no_env_object_is_refused_by_what_to_write(value, message):
    with pytest.raises(ArgumentTypeError, match=message):
        GymWrapper(value)


def test_a_reset_that_takes_no_seed_is_told_the_form_of_one_that_does():
    class Seedless(Honest):
        def reset(self):
            return PLACE, {}

    env = GymWrapper(Seedless())
    env.rollout(2)

    with pytest.raises(OptionError, match=r"takes no seed.*def reset\(self, \*, seed=None"):
        env.set_seed(0)
    with pytest.raises(OutOfSpecError, match=r"set_seed.*takes no seed"):
        check_env_specs(env)
