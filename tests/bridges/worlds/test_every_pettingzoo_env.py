"""Every env of PettingZoo and MPE2 that builds here says what the bare library says, and what its specs say.

Atari's games need ROMs and are not listed. Hanabi is seeded at each reset: without a seed the library draws from
the system's entropy, so no two runs are alike.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial

import pytest

from envkit import PettingZooEnv, check_env_specs
from envkit.errors import EnvSpecWarning, ResumeError
from envkit_bridges.worlds.pettingzoo.pettingzoo_env import build, env_names, has_parallel
from tests.zoo.pettingzoo_by_hand import play_beside_the_library
from tests.zoo.resumed import same, twice

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

SEEDED = ("classic/hanabi_v5",)
NOT_SAVED = {
    "classic/hanabi_v5": "each reset makes a generator anew",
    "classic/texas_holdem_no_limit_v6": "comes out otherwise when it is played again",
    "sisl/multiwalker_v9": "comes out otherwise when it is played again",
}


def forms(name: str) -> list[bool]:
    """Say which forms of an env there are: parallel, turn-based or both."""
    return [True, False] if has_parallel(name) else [False]


def test_what_is_listed_is_what_was_tried():
    assert len(env_names()) == 26
    assert sum(len(forms(name)) for name in env_names()) == 26 + 18


@pytest.mark.parametrize("name", env_names())
def test_a_game_is_the_bare_librarys_to_the_bit(name):
    for parallel in forms(name):
        seeds = itertools.count() if name in SEEDED else None

        play_beside_the_library(name, parallel, 120, seeds=seeds)


@pytest.mark.parametrize("name", env_names())
def test_a_game_does_what_its_specs_say(name):
    for parallel in forms(name):
        env = PettingZooEnv(name, parallel, use_mask=True, seed=0)

        with pytest.warns(EnvSpecWarning) if name in SEEDED else nullcontext():
            check_env_specs(env)  # each reset of hanabi makes a generator anew
        env.rollout(20, break_when_any_done=False)


@pytest.mark.parametrize("name", env_names())
def test_a_world_builds_what_it_lists(name):
    env = build(name, seed=0)

    assert env.rollout(2, break_when_any_done=False).shape == (2,)


@pytest.mark.parametrize("name", env_names())
@pytest.mark.filterwarnings("ignore:.*precision lowered")
def test_a_game_is_saved_and_goes_on_to_the_same_bits_or_says_that_it_does_not(name, opened):
    for parallel in forms(name):
        make = partial(PettingZooEnv, name, parallel, use_mask=True)
        if name in NOT_SAVED:
            with pytest.raises(ResumeError):
                twice(make, opened, before=30, after=1)
        else:
            assert same(twice(make, opened, before=30, after=10))
