"""A seed never changes the episode that is under way: what follows it begins with a reset."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from envkit import (
    AsyncEnvPool,
    Collector,
    EnvBase,
    GymEnv,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from envkit.errors import NotResetError
from envkit.specs import Composite, Unbounded

cartpole = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)
vector = partial(cartpole, num_envs=2)
KINDS = {
    "one": cartpole,
    "vector": vector,
    "serial": partial(SerialEnv, 2, cartpole),
    "parallel": partial(ParallelEnv, 2, cartpole, num_processes=1),
    "mixed": lambda: MixedEnv([SerialEnv(2, cartpole)]),
    "transformed": lambda: TransformedEnv(SerialEnv(2, cartpole), StepCounter()),
}


def midway(env: EnvBase) -> TensorDict:
    """Make two steps of an episode, and give the root that follows them."""
    env.set_seed(1)
    td = env.reset()
    for _ in range(2):
        td = env.step_mdp(env.step(env.rand_action(td)))
    return td


@pytest.fixture(params=KINDS)
def env(request, opened):
    return opened(KINDS[request.param]())


@pytest.mark.parametrize("how", ["step", "step_and_maybe_reset", "rollout"])
def test_a_step_from_before_a_seed_is_refused(env, how):
    td = env.rand_action(midway(env))

    go_on = partial(getattr(env, how), td)
    if how == "rollout":
        go_on = partial(
            env.rollout, 3, None, auto_reset=False, tensordict=td, break_when_any_done=False
        )

    env.set_seed(5)

    with pytest.raises(NotResetError, match=r"Call reset\(\) after set_seed\(\)"):
        go_on()


def test_what_follows_a_seed_and_a_reset_is_what_follows_them_in_a_new_env(env, opened, request):
    midway(env)
    env.set_seed(5)
    data = env.rollout(4, break_when_any_done=False)

    other = opened(KINDS[request.node.callspec.params["env"]]())
    other.set_seed(5)
    expected = other.rollout(4, break_when_any_done=False)

    assert (data == expected).all()


def test_rows_that_were_not_reset_since_a_seed_are_refused(opened):
    pool = opened(SerialEnv(2, cartpole))
    td = midway(pool)
    pool.set_seed(5)

    td = pool.reset(td.set("_reset", torch.tensor([True, False])))
    with pytest.raises(NotResetError):
        pool.step(pool.rand_action(td.clone()))
    td = pool.reset(td.set("_reset", torch.tensor([False, True])))

    assert pool.step(pool.rand_action(td))["next", "observation"].shape == (2, 4)


def test_an_async_pool_refuses_steps_of_rows_until_they_are_sent_a_reset(opened):
    pool = opened(AsyncEnvPool([cartpole] * 2, backend="threading"))
    td = midway(pool)
    pool.set_seed(5)

    with pytest.raises(NotResetError):
        pool.async_step_send(pool.rand_action(td.copy())[:1])
    pool.async_reset_send(td[:1])
    root = pool.async_reset_recv(1)
    pool.async_step_send(pool.rand_action(root))

    assert pool.async_step_recv(1)["next", "observation"].shape == (1, 4)


class Noisy(EnvBase):
    """Draws its observations; a seed begins its generator again, and moves nothing else."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(seen=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.generator = torch.Generator()

    def _reset(self, td=None):
        return TensorDict({"seen": torch.rand(1, generator=self.generator)})

    def _step(self, td):
        seen = torch.rand(1, generator=self.generator)
        return TensorDict({"seen": seen, "reward": torch.zeros(1), "done": False})

    def _set_seed(self, seed):
        self.generator.manual_seed(seed)


def test_an_env_whose_seed_moves_no_simulator_may_be_stepped_on(opened):
    for env in (Noisy(), opened(SerialEnv(2, Noisy))):
        td = env.rand_action(env.reset())
        env.set_seed(5)

        assert env.step(td)["next", "seen"].shape[-1] == 1


@pytest.mark.parametrize("kind", ["one", "vector", "serial", "transformed"])
def test_a_collector_begins_new_trajectories_after_a_seed(kind):
    make = KINDS[kind]
    options = {"frames_per_batch": 8, "total_frames": 64}
    with Collector(make, None, **options) as used, Collector(make, None, **options) as fresh:
        before = used.next()
        used.set_seed(5)
        fresh.set_seed(5)

        after, expected = used.next(), fresh.next()

    ids = "collector", "traj_ids"
    assert not set(before[ids].flatten().tolist()) & set(after[ids].flatten().tolist())
    assert torch.equal(after["observation"], expected["observation"])
    assert torch.equal(after["next", "observation"], expected["next", "observation"])
