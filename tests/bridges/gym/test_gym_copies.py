"""Envs that hold a simulator are copied and pickled: a copy goes on where the original stands."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import partial

import cloudpickle
import gymnasium
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.utils import EzPickle

from envkit import ParallelEnv, SerialEnv, StepCounter, TransformedEnv
from envkit.errors import ArgumentError, CopyError
from envkit_bridges.gym.gym_env import GymEnv
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.gym.like import GymLikeEnv
from tests.bridges.compare import assert_same
from tests.zoo.envs import Count

COPIES = {
    "copied": copy.deepcopy,
    "pickled": lambda env: pickle.loads(pickle.dumps(env)),
    "by value": lambda env: cloudpickle.loads(cloudpickle.dumps(env)),
}
ways = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


class Local(gymnasium.ObservationWrapper):
    """Has what plain pickle refuses."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation = lambda observation: observation * 2


class Listening(GymEnv):
    """Refers to itself."""

    def __init__(self):
        super().__init__("CartPole-v1")
        self.infos = 0
        self.set_info_dict_reader(self.count)

    def count(self, info, td):
        self.infos += 1


KINDS = {
    "by name": lambda: GymEnv("CartPole-v1", frame_skip=2),
    "discrete": lambda: GymEnv("FrozenLake-v1"),
    "wrapped": lambda: GymWrapper(Local()),
    "transformed": lambda: TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(9)),
    "refers to itself": Listening,
}


@ways
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_on_as_the_original_would_and_by_itself(kind, copied):
    env = KINDS[kind]()
    env.set_seed(3)
    td = env.rollout(3, break_when_any_done=False)[-1]
    td = env.rand_action(env.step_mdp(td))

    twin = copied(env)
    other = copied(env)
    first = env.step(td.clone())
    env.rollout(2)

    assert_same(twin.step(td.clone()), first)
    assert_same(other.step(td.clone()), first)
    assert_same(twin.reset(), other.reset())
    assert twin.specs == env.specs


@ways
def test_what_an_env_knows_of_itself_is_the_copy_in_the_copy(copied):
    env = Listening()
    env.rollout(3)
    before = env.infos

    twin = copied(env)
    twin.rollout(3)

    assert env.infos == before
    assert twin.infos > before


@ways
def test_a_simulator_that_is_built_anew_must_be_reset_first_and_draws_as_before(copied):
    pytest.importorskip("mujoco")
    env = GymEnv("InvertedPendulum-v5")
    env.set_seed(3)
    td = env.rand_action(env.reset())

    twin = copied(env)

    with pytest.raises(gymnasium.error.ResetNeeded):
        twin.step(td)
    assert_same(twin.reset(), env.reset())
    assert twin.spec == env.spec


class Easy(CartPoleEnv, EzPickle):
    def __init__(self):
        CartPoleEnv.__init__(self)
        EzPickle.__init__(self)


class Locked(CartPoleEnv):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@ways
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: GymWrapper(Easy()), "nothing would notice that it must be reset"),
        (lambda: GymWrapper(Locked()), "lock"),
        (
            lambda: GymEnv(
                "CartPole-v1",
                num_envs=1,
                vectorization_mode="async",
                vector_kwargs={
                    "context": "forkserver"
                },  # JAX, if another test has loaded it, warns of forks
            ),
            "its own processes",
        ),
    ],
    ids=["easy", "locked", "async"],
)
def test_what_cannot_be_copied_says_so_and_goes_on(make, reason, copied):
    env = make()
    env.reset()

    with pytest.raises(CopyError, match=rf"neither copied nor.*{reason}.*an `EnvCreator`"):
        copied(env)

    env.rand_step(env.reset())
    env.close()


def test_an_env_that_cannot_be_sent_to_workers_names_the_cure():
    with pytest.raises(ArgumentError, match=r"cannot be pickled.*lock.*`EnvCreator`"):
        ParallelEnv(1, GymWrapper(Locked())).start()


def test_a_simulator_without_gymnasium_is_copied():
    class Bare:
        at = 0

    env = GymLikeEnv(Bare())

    env._env.at = 4
    twin = copy.deepcopy(env)
    env._env.at = 5

    assert twin._env.at == 4


# ---------------------------------------------------------------------------------- batched envs


@pytest.mark.parametrize(
    "make",
    [
        partial(SerialEnv, 2, partial(GymEnv, "CartPole-v1")),
        partial(SerialEnv, 2, Count, use_buffers=True),
    ],
)
def test_rows_that_are_shared_with_sub_envs_are_not_copied(make):
    env = make()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        env.reset()
        with pytest.raises(
            CopyError, match=r"(?s)shares rows.*after close\(\), or.*use_buffers=False"
        ):
            copied(env)
        env.close()

        assert copied(env)
    assert copy.deepcopy(env).rollout(2).shape == (2, 2)


def test_a_serial_env_that_shares_no_rows_is_copied_with_its_sub_envs():
    env = SerialEnv(2, partial(GymEnv, "CartPole-v1"), use_buffers=False)
    env.set_seed(0)
    td = env.rand_action(env.reset())

    twin = copy.deepcopy(env)
    first = env.step(td.clone())
    env.close()

    assert torch.equal(twin.step(td)["next", "observation"], first["next", "observation"])
    twin.close()


def test_the_copy_of_a_serial_env_closes_its_own_sub_envs():
    env = SerialEnv(2, Count)
    env.reset()

    twin = copy.deepcopy(env)
    subs = list(twin._pool.backend.workers[0].host.envs)
    twin.close()

    assert all(sub.is_closed for sub in subs)
    assert not env.is_closed
    assert env.rollout(1).shape == (2, 1)
