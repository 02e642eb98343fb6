"""Every gymnasium env that can be made here: the bits of bare gymnasium, over 200 random steps.

The simulator by itself and behind `GymEnv` are given the same seed and actions and reset wherever an
episode ends; observations, rewards and flags must agree, however discrete spaces are encoded.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envkit.data.paths import nest
from envkit.specs import contains_lazy_spec
from envkit_bridges.gym.codecs import Codec
from envkit_bridges.gym.gym_env import GymEnv
from tests.zoo.gym_envs import same

STEPS, SEED = 200, 11

REGISTERED = sorted(gymnasium.registry.values(), key=lambda spec: spec.id)


def names_of(package: str, version: str = "") -> list[str]:
    """List the registered envs of one of gymnasium's packages."""
    return [
        spec.id
        for spec in REGISTERED
        if str(spec.entry_point).startswith(f"gymnasium.envs.{package}.")
        and spec.id.endswith(version)
    ]


SMALL = [*names_of("classic_control"), *names_of("toy_text")]
MUJOCO = names_of("mujoco", "-v5")

# Announcements of gymnasium's about its own envs.
pytestmark = [
    pytest.mark.rounding,
    pytest.mark.filterwarnings("ignore:.*is out of date"),
    pytest.mark.filterwarnings("ignore:.*you are not rendering"),
]


def env_or_skip(name: str, **kwargs: Any) -> GymEnv:
    """Make an env; only where its simulator is not installed may it be missing."""
    if name in MUJOCO:
        pytest.importorskip("mujoco")
    return GymEnv(name, **kwargs)


def bare_steps(name: str) -> tuple[list[Any], list[tuple]]:
    """Step the simulator by hand; give the actions and (seen, reward, terminated, truncated)."""
    env = gymnasium.make(name)
    env.action_space.seed(SEED)
    env.reset(seed=SEED)
    seen, _ = env.reset()
    actions, steps = [], []
    for _ in range(STEPS):
        action = env.action_space.sample()
        following, reward, terminated, truncated, _ = env.step(action)
        actions.append(action)
        steps.append((seen, following, np.float32(reward), terminated, truncated))
        seen = env.reset()[0] if terminated or truncated else following
    env.close()
    return actions, steps


class Follow:
    """Take the given actions, one a call."""

    def __init__(self, codec: Codec, actions: list[Any]):
        self.actions = (TensorDict(nest(codec.encode(action))) for action in actions)

    def __call__(self, td: TensorDict) -> TensorDict:
        return td.update(next(self.actions))


def shown(codec: Codec, td: TensorDict) -> Any:
    return codec.decode({path: td.get(path) for path in codec.leaves})


def assert_parity(name: str, *, one_by_one: bool, **kwargs: Any) -> None:
    env = env_or_skip(name, **kwargs)
    actions, bare = bare_steps(name)
    env.set_seed(SEED)

    data = env.rollout(
        STEPS,
        Follow(env.core.action, actions),
        (lambda env, td: None) if one_by_one else None,
        break_when_any_done=False,
        return_contiguous=not contains_lazy_spec(env.specs),
    )
    env.close()

    codec = env.core.observation
    for ours, (seen, following, reward, terminated, truncated) in zip(
        data.unbind(0), bare, strict=True
    ):
        assert same(shown(codec, ours), seen)
        assert same(shown(codec, ours["next"]), following)
        assert ours["next", "reward"].numpy().tobytes() == reward.tobytes()
        assert ours["next", "terminated"].item() == terminated
        assert ours["next", "truncated"].item() == truncated
        assert ours["next", "done"].item() == (terminated or truncated)
        assert not ours["done"].item()


@pytest.mark.parametrize("one_by_one", [False, True], ids=["at once", "one by one"])
@pytest.mark.parametrize("categorical", [False, True], ids=["one-hot", "categorical"])
@pytest.mark.parametrize("name", SMALL)
def test_small_envs_give_the_bits_of_bare_gymnasium(name, categorical, one_by_one):
    assert_parity(name, categorical_action_encoding=categorical, one_by_one=one_by_one)


@pytest.mark.parametrize("name", MUJOCO)
def test_mujoco_envs_give_the_bits_of_bare_gymnasium(name):
    assert_parity(name, one_by_one=False)


def test_dtypes_are_those_of_the_simulators():
    for name in ("HalfCheetah-v5", "CartPole-v1", "FrozenLake-v1"):
        env = env_or_skip(name, categorical_action_encoding=True)
        spec = env.observation_spec["observation"]

        assert spec.dtype == torch.from_numpy(np.empty(0, env.observation_space.dtype)).dtype


def test_all_packages_are_covered():
    assert len(SMALL) >= 12
    assert len(MUJOCO) >= 11
    assert any(name.startswith("Taxi") for name in SMALL)
    assert {"CartPole-v1", "FrozenLake-v1", "HalfCheetah-v5"} <= {*SMALL, *MUJOCO}


def test_the_simulators_that_make_test_installs_are_here():
    """Without them the cases above would skip, and nobody would notice."""
    for package in ("mujoco", "gymnasium", "brax"):
        assert importlib.util.find_spec(package), f"{package} is missing: see `make test`"
