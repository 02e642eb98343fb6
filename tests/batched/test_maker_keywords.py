"""A keyword that no sub-env takes is told when the pool is made, and nothing is started for it."""

from functools import partial

import pytest

from envkit import DMControlEnv, GymEnv, MultiThreadedEnv, ParallelEnv, SerialEnv
from envkit.errors import OptionError
from tests.zoo.envs import Count


def counting(limit=3):
    return Count(limit)


@pytest.mark.parametrize("pool", [SerialEnv, ParallelEnv])
@pytest.mark.parametrize(
    ("maker", "kwargs", "message"),
    [
        (partial(GymEnv, "CartPole-v1", sutton=1), {}, r"GymEnv\('CartPole-v1'\).*'sutton'"),
        (GymEnv, {"env_name": "CartPole-v1", "foo": 1}, "takes no keyword 'foo'"),
        (partial(DMControlEnv, "cartpole", "swingup", camera=1), {}, "Did you mean 'camera_id'"),
        (
            partial(MultiThreadedEnv, 2, "CartPole-v1", num_threads=1),
            {},
            "MultiThreadedEnv takes no keyword 'num_threads'",
        ),
        (counting, {"limt": 2}, "counting takes no keyword 'limt'. Did you mean 'limit'"),
    ],
)
def test_an_unknown_keyword_is_told_when_the_pool_is_made(pool, maker, kwargs, message):
    with pytest.raises(OptionError, match=message):
        pool(2, maker, create_env_kwargs=kwargs)


def test_what_any_env_takes_and_what_takes_anything_is_let_through(opened):
    class Passing(GymEnv):
        def __init__(self, size, **kwargs):
            super().__init__("CartPole-v1", **kwargs)

    makers = [
        partial(GymEnv, "CartPole-v1", spec_locked=False, max_episode_steps=2, render_mode=None),
        partial(GymEnv, "HalfCheetah-v5", whatever=1),
        partial(GymEnv, "CartPole-v1", num_envs=2, vector_kwargs={}),
        partial(Passing, size=2, sutton_barto_reward=True),
        lambda **kwargs: Count(3),
    ]

    pools = [opened(SerialEnv(2, maker, create_env_kwargs={})) for maker in makers]

    assert all(pool.is_closed for pool in pools)
