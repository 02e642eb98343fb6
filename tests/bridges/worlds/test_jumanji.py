"""`JumanjiEnv`: the same numbers as Jumanji stepped by hand, its names, its errors."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import torch

from envkit import Categorical, JaxPolicy, MultiCategorical, OneHot
from envkit.errors import ArgumentError, FetchError
from envkit_bridges.worlds.jumanji import JumanjiEnv, JumanjiWrapper, fetching_names
from tests.bridges.compare import assert_same
from tests.bridges.worlds.bare import own_states

ROWS = 4


@pytest.fixture(scope="module")
def snake():
    return JumanjiEnv("Snake-v1", batch_size=[ROWS])


# ------------------------------------------------------------------------------------ what is declared


def test_a_snake_shows_its_grid_and_takes_integers(snake):
    assert snake.action_spec == Categorical(4, shape=(ROWS,))
    assert snake.reward_spec.shape == (ROWS, 1)
    assert snake.observation_spec["grid"].shape == (ROWS, 12, 12, 5)
    assert snake.observation_spec["action_mask"].dtype == torch.bool
    assert (snake.env_name, snake.libname, snake.num_rows) == ("Snake-v1", "jumanji", 12)
    assert ("env", "key") in {field.name for field in snake._engine.programs.env.packing.fields}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_agent_of_a_connector_chooses_and_is_paid_and_one_flag_ends_the_episode():
    env = JumanjiEnv("Connector-v3", batch_size=[2], metrics=True)
    env.set_seed(0)
    wait = JaxPolicy(lambda params, observation, key: jnp.zeros((2, 10), jnp.int32))

    data = env.rollout(60, wait, break_when_any_done=False)

    assert env.action_spec == MultiCategorical((5,) * 10, (2, 10))
    assert data["next", "reward"].shape == (2, 60, 10)
    assert data["next", "metrics", "discount"].shape == (2, 60, 10)
    assert data["next", "done"].shape == (2, 60, 1)
    # Its time is over with a discount of 1: truncated, as the library says.
    assert data["next", "truncated"].any() and not data["next", "terminated"].any()


@pytest.mark.slow
def test_choices_are_one_hot_where_asked_for():
    env = JumanjiEnv("Snake-v1", batch_size=[ROWS], categorical_action_encoding=False)

    assert env.action_spec == OneHot(4, (ROWS, 4), dtype=torch.int64)
    assert env.rand_step(env.reset())["next", "reward"].shape == (ROWS, 1)


# ------------------------------------------------------------------- what every stateless env can do


@pytest.mark.slow
def test_a_compiled_run_equals_single_steps_and_a_stored_state_repeats_itself(snake):
    snake.set_seed(1)

    data = snake.rollout(40, break_when_any_done=False)
    snake.set_seed(1)
    stepped, _ = replay_integers(snake, snake.reset(), data["action"])

    assert_same(data, stepped)
    assert data["next", "done"].any()
    stored = data[:, 7].select("state", "action").clone()
    assert_same(snake.step(stored.clone())["next"], data["next"][:, 7])
    assert_same(snake.step(stored[1:3].clone())["next"], data["next"][1:3, 7])


def replay_integers(env, td, actions):
    steps = []
    for action in actions.unbind(1):
        data, td = env.step_and_maybe_reset(td.set("action", action.clone()))
        steps.append(data)
    return torch.stack(steps, 1), td


@pytest.mark.slow
def test_programs_are_left_uncompiled_where_asked_for(snake):
    plain = JumanjiEnv("Snake-v1", batch_size=[ROWS], jit=False)
    snake.set_seed(0)
    plain.set_seed(0)

    td = snake.rand_action(snake.reset())
    uncompiled = plain.step(plain.reset().set("action", td["action"].clone()))

    assert (plain.jit, snake.jit) == (False, True)
    assert_same(uncompiled["next"], snake.step(td)["next"])
    plain.jit = True
    assert plain.jit and plain.rand_step(plain.reset()).batch_size == (ROWS,)


@pytest.mark.slow
def test_states_and_observations_of_jumanji_are_read_by_name(snake):
    snake.set_seed(0)
    td = snake.reset()
    state, _ = own_states(snake, td)

    read = snake.read_state(state)
    shown = snake.read_obs(jax.vmap(lambda one: snake._env.step(one, 0)[1].observation)(state))

    assert torch.equal(read["body"], snake.unpack(td["state"])["body"].bool())
    assert read["key"].shape == (ROWS, 2)
    assert set(shown.keys()) == {"grid", "step_count", "action_mask"}
    assert shown["grid"].shape == (ROWS, 12, 12, 5)


def test_a_stored_state_is_drawn(snake):
    snake.set_seed(0)
    td = snake.reset()

    first, second = (snake.render(td, row=row) for row in (0, 1))

    assert first.dtype == torch.uint8 and first.ndim == 3 and first.shape[-1] == 3
    assert not torch.equal(first, second)
    assert torch.equal(first, snake.render(td[:1]))


# --------------------------------------------------------------------------------- names and errors


def test_wrappers_of_jumanji_that_reset_by_themselves_are_refused(snake):
    from jumanji.wrappers import AutoResetWrapper

    with pytest.raises(ArgumentError, match=r"AutoResetWrapper.*env\.unwrapped"):
        JumanjiWrapper(AutoResetWrapper(snake._env))


def test_what_cannot_be_fetched_is_told(monkeypatch):
    import jumanji

    def offline(name):
        raise FileNotFoundError("no such host")

    monkeypatch.setattr(jumanji, "make", offline)
    assert fetching_names() == {"Sokoban-v0"}
    with pytest.raises(FetchError, match=r"'Sokoban-v0' of Jumanji is made from.*no such host"):
        JumanjiEnv("Sokoban-v0")


@pytest.mark.slow
def test_a_notebook_keeps_its_way_of_showing_figures():
    script = (
        "import builtins; builtins.__IPYTHON__ = True  # as in Jupyter\n"
        "from envkit_bridges.worlds import jumanji; assert jumanji.env_names() and builtins.__IPYTHON__"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
