"""Where episodes begin, and when compiled programs are forgotten: keywords of stateless envs."""

from __future__ import annotations

import jax
import pytest
import torch

from envkit.errors import ArgumentError
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.worlds.brax import BraxEnv
from tests.zoo.walkers import Pendulum, Walker


def beginnings(**options):
    """Give the first observations of all episodes of a rollout, (rows, episodes, 3)."""
    env = JaxEnv(Pendulum(), batch_size=[6], episode_length=3, **options)
    env.set_seed(5)
    td = env.rollout(30, break_when_any_done=False)
    return td["observation"][:, ::3]


@pytest.mark.parametrize(
    ("options", "per_row", "in_all"),
    [
        ({}, [10] * 6, 60),
        ({"reset_mode": "fresh"}, [10] * 6, 60),
        ({"reset_mode": "cached"}, [1] * 6, 6),
    ],
)
def test_the_mode_says_where_episodes_begin(options, per_row, in_all):
    places = beginnings(**options)

    assert [len(torch.unique(row, dim=0)) for row in places] == per_row
    assert len(torch.unique(places.reshape(-1, 3), dim=0)) == in_all


def test_a_pool_has_as_many_beginnings_as_asked_for():
    places = beginnings(reset_mode="pool", pool_size=4).reshape(-1, 3)

    assert len(torch.unique(places, dim=0)) == 4


def test_a_full_reset_of_a_cached_row_begins_there_too():
    env = JaxEnv(Pendulum(), batch_size=[3], reset_mode="cached")
    td = env.reset()
    first = td["observation"].clone()

    _, td = env.step_and_maybe_reset(env.rand_action(td))
    td["_reset"] = torch.tensor([[True], [False], [True]])
    after = env.reset(td)["observation"]

    assert torch.equal(after[::2], first[::2]) and not torch.equal(after[1], first[1])


def test_brax_takes_these_keywords_and_refuses_other_modes():
    options = {"batch_size": [2], "device": "cpu"}
    env = BraxEnv("fast", reset_mode="pool", pool_size=1, cache_clear_frequency=7, **options)

    assert env.cache_clear_frequency == 7
    with pytest.raises(ArgumentError, match="fresh"):
        BraxEnv("fast", reset_mode="stale", **options)


@pytest.mark.parametrize("rows", [6, 40])
@pytest.mark.parametrize("run", ["step by step", "in one program", "until one ends"])
def test_episodes_are_the_same_whichever_rows_are_reset(rows, run):
    """40 rows are begun anew 16 at a time, or all at once."""
    how = {
        "step by step": {"callback": lambda env, td: None, "break_when_any_done": False},
        "in one program": {"break_when_any_done": False},
        "until one ends": {},
    }[run]
    done, every = (
        JaxEnv(Walker(), batch_size=[rows], episode_length=9, reset_rows=which)
        for which in ("done", "all")
    )
    for env in (done, every):
        env.set_seed(3)
    action = torch.linspace(0.1, 0.9, 2 * rows).reshape(rows, 2)
    policy = None if run == "in one program" else lambda td: td.set("action", action)
    expected, data = (env.rollout(30, policy, **how) for env in (done, every))

    assert set(data.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        torch.testing.assert_close(data[key], expected[key], rtol=1e-5, atol=1e-5)
    ends = expected["next", "done"][..., 0].sum(1)
    assert run == "until one ends" or (ends > 1).all()


@pytest.mark.parametrize(
    ("frequency", "clears"),
    [pytest.param(False, 0, marks=pytest.mark.slow), (3, 3), (5, 2), (100, 0)],
)
def test_caches_are_cleared_as_often_as_asked(monkeypatch, frequency, clears):
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(None))
    env = JaxEnv(Pendulum(), batch_size=[2], cache_clear_frequency=frequency)
    td = env.reset()

    for _ in range(4):
        env.rand_step(td.copy())
        _, td = env.step_and_maybe_reset(env.rand_action(td))
    env.unroll(td, 5)

    assert len(cleared) == clears
