"""`NavixEnv`: the same numbers as Navix stepped by hand, its events, its names, its errors."""

from __future__ import annotations

import pickle

import jax
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit import Categorical, OneHot, compile_policy
from envkit.env.checks import check_env_specs
from envkit.errors import ArgumentError, ArgumentTypeError, OptionError
from tests.bridges.compare import assert_same
from tests.bridges.worlds.bare import assert_equals_bare
from tests.test_readme import ROOT, blocks, execute

pytest.importorskip("navix", reason="needs the extra navix")

from envkit_bridges.worlds.navix import NavixEnv, NavixWrapper, env_names

ROWS = 4


@pytest.fixture(scope="module")
def grid():
    return NavixEnv(
        "Navix-Empty-5x5-v0", batch_size=[ROWS], categorical_action_encoding=True, metrics=True
    )


def assert_equals_navix(env, steps):
    from navix import StepType
    from navix.rendering.cache import RenderingCache

    bare = env._env

    def reset(key):
        return {"observation": bare.reset(key).observation}

    def step(moment, action):
        whole = moment.state.replace(cache=RenderingCache.init(moment.state.grid))
        before = bare.reset(moment.state.key).replace(
            t=moment.t, state=whole, step_type=StepType.TRANSITION
        )
        after = bare.step(before, action)  # does not reset: no episode has ended
        state = after.state.replace(cache=moment.state.cache)
        shown = {
            "observation": after.observation,
            "reward": after.reward,
            "terminated": after.is_termination(),
            "truncated": after.is_truncation(),
        }
        return type(moment)(state, after.t), shown

    return assert_equals_bare(env, steps, jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step)))


def test_two_grids_equal_the_library_stepped_by_hand(grid):
    doors = NavixEnv(
        "Navix-DoorKey-5x5-v0",
        max_steps=10,
        observation_fn="symbolic_first_person",
        batch_size=[ROWS],
        categorical_action_encoding=True,
    )

    assert_equals_navix(grid, steps=20)
    ended = assert_equals_navix(doors, steps=40)

    assert ended >= 3 * ROWS


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", env_names())
def test_every_env_equals_the_library_stepped_by_hand_and_does_what_its_specs_say(name):
    env = NavixEnv(name, batch_size=[ROWS], categorical_action_encoding=True)

    assert_equals_navix(env, steps=120)

    check_env_specs(env, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["categorical", "categorical_first_person", "rgb"])
def test_what_is_observed_is_chosen_by_name(seen):
    env = NavixEnv(
        "Navix-Empty-5x5-v0",
        observation_fn=seen,
        batch_size=[ROWS],
        categorical_action_encoding=True,
    )

    assert_equals_navix(env, steps=5)


# ------------------------------------------------------------------------------------ what is declared


def test_a_grid_shows_its_symbols_and_takes_integers_or_one_hot(grid):
    assert grid.action_spec == Categorical(7, shape=(ROWS,))
    assert NavixEnv("Navix-Empty-5x5-v0").action_spec == OneHot(7, (7,), dtype=torch.int64)
    assert grid.observation_spec["observation"].shape == (ROWS, 5, 5, 3)
    assert grid.observation_spec["observation"].dtype == torch.uint8
    assert (grid.env_name, grid.libname, grid.height) == ("Navix-Empty-5x5-v0", "navix", 5)


def test_the_goal_terminates_with_its_event_and_the_time_limit_truncates(grid):
    right, forward = 1, 2
    grid.set_seed(0)
    td = grid.reset()
    for move in [forward] * 2 + [right] + [forward] * 2:
        td["action"] = torch.full((ROWS,), move)
        data = grid.step(td)
        td = grid.step_mdp(data)
    walked = data["next"]
    short = NavixEnv("Navix-Empty-5x5-v0", max_steps=3, batch_size=[2])
    cut = short.rollout(3, break_when_any_done=False)["next"]

    assert walked["terminated"].all() and not walked["truncated"].any()
    assert walked["metrics", "goal_reached"].all() and (walked["reward"] == 1).all()
    assert cut["truncated"].squeeze(-1).tolist() == [[False, False, True]] * 2
    assert not cut["terminated"].any()


def test_states_hold_pictures_only_where_they_are_observed(grid):
    pictures = NavixEnv("Navix-Empty-5x5-v0", observation_fn="rgb", batch_size=[1])

    words = [env.reset()["state", "words"].shape[-1] for env in (grid, pictures)]

    assert words[0] + 25 * 8 * 8 * 3 // 4 < words[1]


# ------------------------------------------------------------------------ what stateless envs can do


@pytest.mark.slow
def test_a_batch_of_any_size_masks_a_compiled_policy_and_a_copy_from_another_process(grid):
    class Forward(torch.nn.Module):
        def forward(self, observation):
            return observation[..., 0, 0, 0].long() * 0 + 2

    grid.set_seed(0)
    policy = TensorDictModule(Forward(), in_keys=["observation"], out_keys=["action"])
    data = grid.rollout(9, compile_policy(policy), break_when_any_done=False)
    copy = pickle.loads(pickle.dumps(grid))

    again = copy.step(data[:, 3].select("state", "action").clone())
    root = grid.reset(TensorDict(batch_size=[2]))
    root["action"] = torch.tensor([2, 2])
    root["_step"] = torch.tensor([True, False])
    after = grid.step(root.clone())["next"]

    assert_same(again["next"], data["next"][:, 3])
    assert grid.unpack(after["state"])["t"].tolist() == [1, 0]


def test_a_stored_state_is_drawn(grid):
    grid.set_seed(0)
    td = grid.reset()
    td["action"] = torch.tensor([1, 2, 2, 2])
    after = grid.step(td)["next"]

    turned, went = grid.render(after, row=0), grid.render(after, row=1)

    assert turned.shape == (40, 40, 3) and turned.dtype == torch.uint8
    assert not torch.equal(turned, went)


@pytest.mark.slow
def test_the_page_and_the_contract_of_specs_hold():
    for code in blocks(ROOT / "docs" / "navix.md").values():
        execute(code)
    env = NavixEnv("Navix-Empty-5x5-v0", batch_size=[3], episode_length=5)

    check_env_specs(env, seed=0)


# --------------------------------------------------------------------------------- names and errors


def test_wrong_names_keywords_and_objects_are_refused():
    import navix

    with pytest.raises(ArgumentError, match=r"no env called 'Navix-Empty-7x7-v0'\. Did you mean"):
        NavixEnv("Navix-Empty-7x7-v0")
    with pytest.raises(OptionError, match="'num_envs'"):
        NavixEnv("Navix-Empty-5x5-v0", num_envs=3)
    with pytest.raises(ArgumentTypeError, match=r"NavixEnv\('Navix-Empty-5x5-v0'\)"):
        NavixWrapper("Navix-Empty-5x5-v0")
    with pytest.raises(ArgumentError, match="max_steps is 0, but must be"):
        NavixEnv("Navix-Empty-5x5-v0", max_steps=0)
    with pytest.raises(ArgumentError, match=r"observation_fn is 'pixels', but must be one of none"):
        NavixEnv("Navix-Empty-5x5-v0", observation_fn="pixels")
    wrapped = NavixWrapper(navix.make("Navix-Empty-5x5-v0"), batch_size=[2])
    assert wrapped.reset()["observation"].shape == (2, 5, 5, 3)
    assert NavixEnv.available_envs == env_names()
