"""What is no argument of a call: the class of the error, and what its message says.

`tests/env/test_misuse_env.py` holds what is wrong with envs and data.
"""

from __future__ import annotations

from functools import partial

import gymnasium
import pytest
import torch
from tensordict import TensorDict

from envkit import EnvBase, GymEnv, GymWrapper, check_env_specs, step_mdp
from envkit.errors import EnvkitError
from envkit.specs import Composite, OneHot, Unbounded
from envkit_bridges.exports.gym_registry import gym_env_of
from envkit_bridges.gym.backend import set_gym_backend
from envkit_bridges.gym.like import GymLikeEnv
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.worlds.brax import BraxWrapper
from tests.zoo.envs import Count
from tests.zoo.gym_envs import Informed
from tests.zoo.walkers import Pendulum

JAX = partial(JaxEnv, Pendulum(), device="cpu")


def preset(**entries):
    """A destination of three steps; an entry that is None is not there."""
    out = Count().rollout(3).clone()
    for name, value in entries.items():
        out = out.exclude(name) if value is None else out.set(name, value)
    return out


def faced(**options):
    """An env behind gym's protocol, reset."""
    env = gym_env_of(Count(), "gymnasium", **{"info_keys": None, "to_numpy": False, **options})
    env.reset()
    return env


class Untold(GymLikeEnv):
    """Declares an action and no observation."""

    def __init__(self):
        super().__init__(Informed())
        self.action_spec = OneHot(2)


MISUSES = {
    # -- 1. construction
    "a number as batch size": (
        lambda: Count(batch_size=3),
        TypeError,
        r"batch_size is 3, .*Pass batch_size=\[3\]",
    ),
    "words as batch size": (lambda: Count(batch_size=["a"]), TypeError, r"Pass batch_size=\[4\]"),
    "a negative batch": (lambda: Count(batch_size=[2, -1]), ValueError, r"\[2, -1\].*negative"),
    "a lock that is None": (
        lambda: Count(spec_locked=None),
        TypeError,
        "spec_locked is None.*bool",
    ),
    # -- 2. to 4. specs
    "a lock that is a word": (
        lambda: Count().set_spec_lock_("no"),
        TypeError,
        "'no'.*True or False",
    ),
    "specs that are assigned": (
        lambda: setattr(Count(), "specs", 1),
        AttributeError,
        "specs of an env.*Assign their parts",
    ),
    # -- 6. steps
    "the root after no step": (
        lambda: Count().step_mdp(Count().reset()),
        KeyError,
        r"no 'next'.*\['count', 'done', 'terminated'\].*env\.step\(td\)",
    ),
    "the same of the function": (
        lambda: step_mdp(TensorDict()),
        KeyError,
        r"no 'next'.*it has \[\]",
    ),
    "an action of another dtype": (
        lambda: Count(run_type_checks=True).step(Count().reset().set("action", torch.zeros(1))),
        TypeError,
        r"'action' is of type Tensor and dtype torch\.float32.*torch\.int64",
    ),
    "an action of another shape": (
        lambda: Count(run_type_checks=True).step(
            Count().reset().set("action", torch.zeros(3, dtype=torch.int64))
        ),
        ValueError,
        r"'action' has shape \(3,\).*takes \(1,\)",
    ),
    # -- 7. rollout
    **{
        f"{steps!r} steps": (partial(Count().rollout, steps), TypeError, f"max_steps is {steps!r}")
        for steps in ("a", None, 3.5)
    },
    "a callback that is a number": (
        lambda: Count().rollout(3, callback=3),
        TypeError,
        r"callback is 3.*callback\(env, td\)",
    ),
    "a start that is a number": (
        lambda: Count().rollout(3, tensordict=4),
        TypeError,
        "tensordict is of type int.*must be a TensorDict",
    ),
    "a policy that returns nothing": (
        lambda: Count().rollout(3, lambda count: None),
        TypeError,
        "returned None, of type NoneType, as 'action'.*Return a tensor",
    ),
    "a policy that returns too much": (
        lambda: Count().rollout(3, lambda count: torch.zeros(3)),
        TypeError,
        r"shape \(3,\) as 'action'.*takes \(1,\).*one value for each",
    ),
    "a destination that is a number": (
        lambda: Count().rollout(3, out=3),
        TypeError,
        r"out is of type int.*rollout\(n, policy\)",
    ),
    "a destination of a lazy stack": (
        lambda: Count(9).rollout(3, out=preset(), return_contiguous=False),
        TypeError,
        "out is given and return_contiguous is False.*Leave one of them out",
    ),
    "a destination without an entry": (
        lambda: Count(9).rollout(3, out=preset(count=None)),
        RuntimeError,
        r"out has no 'count'.*Allocate it",
    ),
    "a destination of another dtype": (
        lambda: Count(9).rollout(3, out=preset(count=torch.zeros(3, 1))),
        RuntimeError,
        r"'count' has shape \(3, 1\) and dtype torch\.float32 in out.*torch\.int64 in the rollout",
    ),
    "a destination of another shape": (
        lambda: Count(9).rollout(3, out=preset(count=torch.zeros(3, 2, dtype=torch.int64))),
        RuntimeError,
        r"'count' has shape \(3, 2\).*but shape \(3, 1\)",
    ),
    # -- 10. gym's registry, check_env_specs
    "an id that is a number": (
        lambda: Count.register_gym(3),
        TypeError,
        "id is 3.*must be a string",
    ),
    "an episode of no step": (
        lambda: Count.register_gym("Never-v0", max_episode_steps=0),
        ValueError,
        "max_episode_steps is 0.*None for no limit",
    ),
    "infos that are a number": (
        lambda: faced(info_keys=3),
        TypeError,
        "info_keys is 3.*list of keys",
    ),
    "a word as action": (
        lambda: faced().step("a"),
        TypeError,
        "'action' is 'a', of type str.*Pass",
    ),
    "no action": (lambda: faced().step(None), TypeError, "'action' is None.*Pass numbers"),
    "a check of a number": (
        lambda: check_env_specs(3),
        TypeError,
        "env is 3, of type int.*must be an env of envkit",
    ),
    "a check of a class": (
        lambda: check_env_specs(Count),
        TypeError,
        r"the class Count.*Build one: Count\(\.\.\.\)",
    ),
    # -- wrappers, 1. gym
    "a backend that is a number": (
        lambda: set_gym_backend(3),
        TypeError,
        "backend is 3, of type int.*gymnasium, gym",
    ),
    "an env with that backend": (
        lambda: GymEnv("CartPole-v1", backend=3),
        TypeError,
        "backend is 3",
    ),
    "a name that is wrapped": (
        lambda: GymWrapper("Pendulum-v1"),
        TypeError,
        r"'Pendulum-v1', of type str.*GymEnv\('Pendulum-v1'\)",
    ),
    "a number that is wrapped": (lambda: GymWrapper(3), TypeError, "given 3, of type int.*GymEnv"),
    "an env as a name": (
        lambda: GymEnv(gymnasium.make("CartPole-v1")),
        TypeError,
        r"env_name is .*CartPole.*Use GymWrapper\(env\)",
    ),
    "a number as a name": (lambda: GymEnv(3), TypeError, "env_name is 3.*name of a registered env"),
    "a vector of words": (
        lambda: GymEnv("CartPole-v1", num_envs="a"),
        TypeError,
        "num_envs is 'a'.*or 0 for one env",
    ),
    "a gym batch that is a number": (
        lambda: GymEnv("CartPole-v1", batch_size=3),
        TypeError,
        "batch_size is 3",
    ),
    "a reader that is a number": (
        lambda: GymWrapper(Informed()).set_info_dict_reader(3),
        TypeError,
        r"info reader is 3.*reader\(info, td\)",
    ),
    "an observation nobody declared": (
        lambda: Untold().reset(),
        ValueError,
        "Untold declares no observation spec.*_make_specs",
    ),
    # -- 2. JAX and Brax
    "a brax name that is wrapped": (
        lambda: BraxWrapper("fast", device="cpu"),
        TypeError,
        r"'fast', of type str.*BraxEnv\('fast'\)",
    ),
    "caches cleared before a step": (
        lambda: JAX(cache_clear_frequency=-1),
        ValueError,
        "cache_clear_frequency is -1.*False for never",
    ),
    **{
        f"caches cleared {often!r}": (
            partial(JAX, cache_clear_frequency=often),
            TypeError,
            f"cache_clear_frequency is {often!r}",
        )
        for often in ("x", True, 1.5)
    },
    "a number to unpack": (
        lambda: JAX().unpack(3),
        TypeError,
        r'state is of type int.*td\["state"\]',
    ),
    "no state to unpack": (lambda: JAX().unpack(TensorDict()), KeyError, "no 'floats', 'words'"),
    "a number to pack": (lambda: JAX().pack(3), TypeError, "nested is of type int.*env.unpack"),
    "no fields to pack": (lambda: JAX().pack(TensorDict()), KeyError, r"no .*'key'; it has \[\]"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_raises_a_class_of_ours_with_advice(misuse):
    call, kind, message = MISUSES[misuse]

    with pytest.raises(kind, match=f"(?s){message}") as caught:
        call()

    assert isinstance(caught.value, EnvkitError)
    assert str(caught.value).endswith(".")


# ------------------------------------------------------------------------------- what is accepted


class Halves(EnvBase):
    """Declares one half of its specs, and that the other is None."""

    def __init__(self, batch=()):
        super().__init__(batch_size=batch)
        action, seen = (Unbounded((*batch, 1)) for _ in range(2))
        self._input_spec = Composite(
            full_action_spec=Composite(action=action, shape=batch),
            full_state_spec=None,
            shape=batch,
        )
        self._output_spec = Composite(
            full_observation_spec=Composite(seen=seen, shape=batch),
            full_reward_spec=None,
            full_done_spec=None,
            shape=batch,
        )

    def _reset(self, td):
        return TensorDict({"seen": torch.zeros(*self.batch_size, 1)}, self.batch_size)

    def _step(self, td):
        return self._reset(td)

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_spec_that_is_none_is_not_declared(batch):
    env = Halves(batch)

    check_env_specs(env)
    assert env.state_spec.is_empty()
    assert env.reward_spec.shape == (*batch, 1)


def test_type_checks_look_at_resets():
    class Wrong(Halves):
        def _reset(self, td):
            return super()._reset(td).to(torch.int64)

    env = Wrong()
    env.run_type_checks = True

    with pytest.raises(TypeError, match=r"'seen' has dtype torch\.int64.*Cast it in _reset"):
        env.reset()


@pytest.mark.parametrize("action", [1, [1], torch.ones(1).numpy().astype("int64")])
def test_numbers_and_arrays_of_a_policy_become_tensors(action):
    data = Count(9).rollout(2, lambda count: action)

    assert data["action"].flatten().tolist() == [1, 1]


def test_a_type_of_number_that_can_index_counts_steps():
    assert Count(9).rollout(torch.tensor(2)).shape == (2,)


def test_one_name_of_an_info_is_a_list_of_one():
    observation, infos = faced(info_keys="count").reset()

    assert list(observation) == []
    assert infos["count"].tolist() == [0]


def test_specs_are_declared_in_make_specs():
    class Told(GymLikeEnv):
        def _make_specs(self, env):
            self.observation_spec = Composite(count=Unbounded(env.observation_space.shape))
            self.action_spec = OneHot(2)

    env = Told(Informed())

    check_env_specs(env)
    assert env.rollout(3)["next", "count"].flatten().tolist() == [1, 2, 3]
