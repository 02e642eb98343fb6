"""DeepMind Control in both libraries: the same specs, seeds, data and ends."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.reference.compare import check_same, check_works_alike

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the library finds no window
    from dm_control import suite

KINDS = ("action", "reward", "done", "observation")


def built(lib, *pair, **options):
    return lib.DMControlEnv(*pair, **options)


@pytest.mark.parametrize("pair", [("cartpole", "swingup"), ("humanoid", "stand")])
def test_specs(pair):
    check_works_alike(
        lambda lib: {kind: getattr(built(lib, *pair), f"full_{kind}_spec") for kind in KINDS}
    )


@pytest.mark.parametrize("skip", [1, 4])
def test_data_of_seeded_rollouts(skip):
    def play(lib):
        env = built(lib, "cartpole", "balance", frame_skip=skip)
        env.set_seed(5)
        act = lambda td: td.set("action", td["position"][..., 1:2].clamp(-1, 1))  # noqa: E731
        return env.rollout(260, act, break_when_any_done=False)[::7]

    check_works_alike(play)


def test_wrapped_env_objects():
    def play(lib):
        env = lib.DMControlWrapper(suite.load("fish", "upright", {"time_limit": 0.5}))
        env.set_seed(1)
        return env.rollout(30, lambda td: td.set("action", torch.ones(5, dtype=torch.float64)))

    check_works_alike(play)


@pytest.mark.slow
def test_pixels(rendering):
    def play(lib):
        env = built(lib, "cartpole", "swingup", from_pixels=True, pixels_only=False)
        env.set_seed(0)
        return env.rollout(2, lambda td: td.set("action", torch.ones(1, dtype=torch.float64)))

    check_works_alike(play)


def test_what_they_are_called():
    def described(lib):
        env = built(lib, "walker", "run")
        return [env.libname, env.env_name, env.task_name, env.available_envs, env.batch_locked]

    check_works_alike(described)


@pytest.mark.parametrize("pair", [("cartpole",), ("cartpole", "swing"), ("carpole", "swingup")])
def test_names_that_there_are_not(pair):
    check_same(lambda lib: built(lib, *pair))
