"""`JumanjiEnv`: the same numbers as Jumanji stepped by hand, its names, its errors."""

from __future__ import annotations

import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit import Categorical, JaxPolicy, MultiCategorical, OneHot, compile_policy
from envkit.env.checks import check_env_specs
from envkit.errors import ArgumentError, FetchError, InputError
from envkit_bridges.worlds.jumanji import JumanjiEnv, JumanjiWrapper, env_names, fetching_names
from tests.bridges.compare import assert_same
from tests.bridges.worlds.bare import assert_equals_bare, own_states

ROWS = 4


@pytest.fixture(scope="module")
def snake():
    return JumanjiEnv("Snake-v1", batch_size=[ROWS])


def assert_equals_jumanji(env, steps):
    bare = env._env

    def shown(timestep):
        last, over = timestep.last(), (timestep.discount == 0).all()
        return {
            "observation": timestep.observation,
            "reward": timestep.reward,
            "terminated": last & over,
            "truncated": last & ~over,
        }

    def reset(key):
        moment = shown(bare.reset(key)[1])
        return {"observation": moment["observation"]}

    def step(state, action):
        state, timestep = bare.step(state, action.astype(bare.action_spec.dtype))
        return state, shown(timestep)

    return assert_equals_bare(env, steps, jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step)))


@pytest.mark.slow
def test_snake_equals_jumanji_stepped_by_hand(snake):
    ended = assert_equals_jumanji(snake, steps=100)

    assert ended > 10


FAILS: dict[str, str] = {}
"""Envs that fail in the library itself, and why."""

HEAVY = frozenset(("BinPack-v2", "MMST-v0", "FlatPack-v0", "JobShop-v0"))


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:scatter inputs:FutureWarning")  # in the bare library
@pytest.mark.parametrize("name", env_names())
def test_every_env_equals_jumanji_stepped_by_hand_and_does_what_its_specs_say(name):
    if name in fetching_names():
        pytest.skip("its levels are fetched from the network")
    if name in FAILS:
        pytest.skip(FAILS[name])
    env = JumanjiEnv(name, batch_size=[2 if name in HEAVY else ROWS])

    assert_equals_jumanji(env, steps=20 if name in HEAVY else 100)

    check_env_specs(env, seed=0)


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
def test_a_rollout_takes_the_batch_size_of_its_start():
    env = JumanjiEnv("Snake-v1")
    env.set_seed(0)

    data = env.rollout(3, tensordict=TensorDict(batch_size=[2]))

    assert data.shape == (2, 3)
    assert env.reset().batch_size == ()


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
def test_a_mask_leaves_rows_alone_and_a_policy_compiles(snake):
    snake.set_seed(0)
    td = snake.rand_action(snake.reset()).set("_step", torch.tensor([1, 0, 1, 0], dtype=torch.bool))
    module = torch.nn.Linear(5, 4)

    class Head(torch.nn.Module):
        def forward(self, grid, mask):
            scores = module(grid.mean((-3, -2)))
            return torch.where(mask, scores, -torch.inf).argmax(-1)

    policy = TensorDictModule(Head(), in_keys=["grid", "action_mask"], out_keys=["action"])

    with torch.no_grad():
        after = snake.step(td.clone())
        data = snake.rollout(12, compile_policy(policy), break_when_any_done=False)

    assert torch.equal(after["next", "state", "words"][1], td["state", "words"][1])
    assert not torch.equal(after["next", "state", "words"][0], td["state", "words"][0])
    assert data["action_mask"].gather(-1, data["action"][..., None]).all()


@pytest.mark.slow
def test_equal_envs_share_programs_and_a_copy_from_another_process_steps_alike(snake):
    snake.set_seed(0)
    td = snake.rand_step(snake.reset())

    twin = JumanjiEnv("Snake-v1", batch_size=[ROWS])
    copy = pickle.loads(pickle.dumps(snake))
    again = [env.step(td.select("state", "action").clone()) for env in (twin, copy)]

    assert twin.traces == {}
    for one in again:
        assert_same(one["next"], td["next"])


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


def test_an_action_of_a_wrong_shape_is_told(snake):
    snake.set_seed(0)

    with pytest.raises(InputError, match=r"'action' has shape \(4, 3\), but the env takes \(4,\)"):
        snake.step(snake.reset().set("action", torch.zeros(ROWS, 3, dtype=torch.int64)))


def test_what_cannot_be_fetched_is_told(monkeypatch):
    import jumanji

    def offline(name):
        raise FileNotFoundError("no such host")

    monkeypatch.setattr(jumanji, "make", offline)
    assert fetching_names() == {"Sokoban-v0"}
    with pytest.raises(FetchError, match=r"'Sokoban-v0' of Jumanji is made from.*no such host"):
        JumanjiEnv("Sokoban-v0")


def test_known_envs_are_listed():
    assert JumanjiEnv.available_envs == env_names()
    assert {"Snake-v1", "TSP-v1", "Sokoban-v0"} <= set(env_names())


@pytest.mark.slow
def test_a_notebook_keeps_its_way_of_showing_figures():
    script = (
        "import builtins; builtins.__IPYTHON__ = True  # as in Jupyter\n"
        "from envkit_bridges.worlds import jumanji; assert jumanji.env_names() and builtins.__IPYTHON__"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
