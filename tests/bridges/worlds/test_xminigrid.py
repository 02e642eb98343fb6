"""`XMiniGridEnv`: the same numbers as XLand-MiniGrid stepped by hand, its rulesets in the data, its names, its errors."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit import Categorical, OneHot, compile_policy
from envkit.env.checks import check_env_specs
from envkit.errors import ArgumentError, ArgumentTypeError, FetchError, OptionError
from envkit_bridges.worlds.xminigrid import (
    XMiniGridEnv,
    XMiniGridWrapper,
    env_names,
)
from tests.bridges.compare import assert_same
from tests.bridges.worlds.bare import assert_equals_bare

ROWS = 4
XLAND = "XLand-MiniGrid-R1-9x9"


@pytest.fixture(scope="module")
def grid():
    return XMiniGridEnv("MiniGrid-Empty-8x8", batch_size=[ROWS], categorical_action_encoding=True)


def benchmark(goals: int = 3):
    """Rulesets that differ in the object to be picked up."""
    from xminigrid.benchmarks import Benchmark
    from xminigrid.core.constants import TILES_REGISTRY, Colors, Tiles
    from xminigrid.core.goals import AgentHoldGoal
    from xminigrid.core.rules import EmptyRule

    balls = [TILES_REGISTRY[Tiles.BALL, color] for color in (Colors.RED, Colors.BLUE, Colors.GREEN)]
    held = jnp.stack([AgentHoldGoal(tile=ball).encode() for ball in balls[:goals]])
    rules = jnp.tile(EmptyRule().encode()[None, None], (goals, 1, 1))
    tiles = jnp.tile(jnp.stack(balls)[None], (goals, 1, 1))
    return Benchmark(held, rules, tiles, jnp.zeros(goals, jnp.uint8))


def assert_equals_xminigrid(env, steps):
    from xminigrid.types import TimeStep

    bare, params = env._env, env.params

    def shown(moment):
        last, over = moment.last(), moment.discount == 0
        ends = {"terminated": last & over, "truncated": last & ~over}
        return {"observation": moment.observation, "reward": moment.reward, **ends}

    def reset(key):
        return {"observation": bare.reset(params, key).observation}

    def step(state, action):
        zero = jnp.float32(0)
        before = TimeStep(state=state, step_type=zero, reward=zero, discount=zero, observation=zero)
        moment = bare.step(params, before, action)
        return moment.state, shown(moment)

    return assert_equals_bare(env, steps, jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step)))


@pytest.mark.slow  # compiles 46 programs
def test_two_grids_equal_the_library_stepped_by_hand(grid):
    short = XMiniGridEnv(XLAND).params.replace(max_steps=10)
    tasks = benchmark(1).get_ruleset(0)
    xland = XMiniGridEnv(
        XLAND,
        env_params=short.replace(ruleset=tasks),
        batch_size=[ROWS],
        categorical_action_encoding=True,
    )

    assert_equals_xminigrid(grid, steps=20)
    ended = assert_equals_xminigrid(xland, steps=40)

    assert ended >= 3 * ROWS


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", env_names())
def test_every_env_equals_the_library_stepped_by_hand_and_does_what_its_specs_say(name):
    env = XMiniGridEnv(name, batch_size=[ROWS], categorical_action_encoding=True)

    assert_equals_xminigrid(env, steps=100)

    check_env_specs(env, seed=0)


# ------------------------------------------------------------------------------------ what is declared


def test_a_grid_shows_its_symbols_and_takes_integers_or_one_hot(grid):
    assert grid.action_spec == Categorical(6, shape=(ROWS,))
    assert XMiniGridEnv("MiniGrid-Empty-8x8").action_spec == OneHot(6, (6,), dtype=torch.int64)
    assert grid.observation_spec["observation"].shape == (ROWS, 7, 7, 2)
    assert grid.observation_spec["observation"].dtype == torch.uint8
    assert (grid.env_name, grid.libname, grid.params.height) == (
        "MiniGrid-Empty-8x8",
        "xminigrid",
        8,
    )


@pytest.mark.slow  # compiles for nine seconds
def test_the_time_limit_truncates_and_the_goal_terminates(grid):
    forward, right = 0, 1
    way = [forward] * 5 + [right] + [forward] * 5
    grid.set_seed(0)
    td = grid.reset()
    for move in way:
        td["action"] = torch.full((ROWS,), move)
        data = grid.step(td)
        td = grid.step_mdp(data)
    walked = data["next"]
    short = XMiniGridEnv(
        "MiniGrid-Empty-8x8", env_params=grid.params.replace(max_steps=3), batch_size=[2]
    )
    cut = short.rollout(3, break_when_any_done=False)["next"]

    assert walked["terminated"].all() and not walked["truncated"].any()
    torch.testing.assert_close(walked["reward"], torch.full((ROWS, 1), 1 - 0.9 * 11 / 256))
    assert cut["truncated"].squeeze(-1).tolist() == [[False, False, True]] * 2
    assert not cut["terminated"].any()


# --------------------------------------------------------------------------------- rulesets in the data


@pytest.mark.slow
def test_every_episode_draws_a_ruleset_of_a_benchmark():
    env = XMiniGridEnv(
        XLAND, benchmark=benchmark(), batch_size=[64], state_layout="nested", episode_length=2
    )
    env.set_seed(0)

    data = env.rollout(4, break_when_any_done=False)

    tasks = data["state", "goal_encoding"]
    assert {tuple(goal) for goal in tasks[:, 0].tolist()} == {
        tuple(goal) for goal in benchmark().goals.tolist()
    }
    assert torch.equal(tasks[:, 0], tasks[:, 1]) and not torch.equal(tasks[:, 1], tasks[:, 2])
    drawn = data["state", "params", "ruleset", "goal"]
    assert torch.equal(drawn, tasks)


@pytest.mark.slow
def test_rulesets_are_assigned_without_compiling_anew_and_rows_keep_their_own():
    tasks = benchmark()
    env = XMiniGridEnv(XLAND, benchmark=benchmark(1), batch_size=[3], state_layout="nested")
    fixed = XMiniGridEnv(XLAND, env_params=env.params, batch_size=[3], state_layout="nested")
    fixed.set_seed(0)
    fixed.rollout(3, break_when_any_done=False)
    traces = fixed.traces

    fixed.params = fixed.params.replace(ruleset=tasks.get_ruleset(2))
    data = fixed.rollout(3, break_when_any_done=False)
    rows = XMiniGridEnv(
        XLAND,
        env_params=env.params,
        batch_size=[3],
        state_layout="nested",
        params_per_row=True,
        episode_length=2,
    )
    td = rows.reset()
    goals = torch.tensor(tasks.goals.tolist(), dtype=torch.uint8)
    td["state", "params", "ruleset", "goal"] = goals
    kept, _ = rows.unroll(td, 6, record_state=True)

    assert fixed.traces == traces
    assert (data["state", "goal_encoding"] == goals[2]).all()
    assert torch.equal(kept["state", "params", "ruleset", "goal"][:, -1], goals)
    assert torch.equal(kept["state", "goal_encoding"][:, -1], goals)


def test_envs_of_other_sizes_do_not_share_programs(grid):
    from xminigrid import make

    small, params = make("MiniGrid-Empty-5x5")
    envs = [
        XMiniGridWrapper(small, env_params=params.replace(height=size, width=size), batch_size=[2])
        for size in (5, 6)
    ]

    words = [env.reset()["state", "words"].shape[-1] for env in envs]

    assert words[0] < words[1]


# ------------------------------------------------------------------------ what stateless envs can do


@pytest.mark.slow
def test_a_batch_of_any_size_masks_a_compiled_policy_and_a_copy_from_another_process(grid):
    class Forward(torch.nn.Module):
        def forward(self, observation):
            return observation[..., 0, 0, 0].long() * 0

    grid.set_seed(0)
    policy = TensorDictModule(Forward(), in_keys=["observation"], out_keys=["action"])
    data = grid.rollout(9, compile_policy(policy), break_when_any_done=False)
    copy = pickle.loads(pickle.dumps(grid))

    again = copy.step(data[:, 3].select("state", "action").clone())
    root = grid.reset(TensorDict(batch_size=[2]))
    root["action"] = torch.tensor([1, 1])
    root["_step"] = torch.tensor([True, False])
    after = grid.step(root.clone())["next"]

    assert_same(again["next"], data["next"][:, 3])
    moved = (grid.unpack(after["state"])["step_num"]).tolist()
    assert moved == [1, 0]


@pytest.mark.slow
def test_wrappers_that_change_what_is_observed_are_taken():
    from xminigrid import make
    from xminigrid.wrappers import DirectionObservationWrapper

    bare, params = make("MiniGrid-Empty-5x5")
    env = XMiniGridWrapper(
        DirectionObservationWrapper(bare), env_params=params, batch_size=[2], metrics=True
    )

    data = env.rollout(3)

    assert data["img"].shape == (2, 3, 7, 7, 2) and data["direction"].shape == (2, 3, 4)
    assert data["next", "metrics", "discount"].tolist() == [[1.0] * 3] * 2


@pytest.mark.slow
@pytest.mark.sweep
def test_pixels_are_observed_through_the_library_s_wrapper(monkeypatch, tmp_path):
    monkeypatch.setenv("XLAND_MINIGRID_CACHE", str(tmp_path))
    from xminigrid import make
    from xminigrid.experimental.img_obs import RGBImgObservationWrapper

    bare, params = make("MiniGrid-Empty-5x5")
    env = XMiniGridWrapper(RGBImgObservationWrapper(bare), env_params=params, batch_size=[2])

    seen = env.reset()["observation"]

    assert seen.shape == (2, 224, 224, 3) and seen.dtype == torch.uint8


@pytest.mark.slow
def test_a_stored_state_is_drawn(grid):
    grid.set_seed(0)
    td = grid.reset()
    td["action"] = torch.tensor([1, 0, 0, 0])
    after = grid.step(td)["next"]

    turned, went = grid.render(after, row=0), grid.render(after, row=1)

    assert turned.shape == (256, 256, 3) and turned.dtype == torch.uint8
    assert not torch.equal(turned, went)
    text = XMiniGridEnv(
        "MiniGrid-Empty-8x8", env_params=grid.params.replace(render_mode="rich_text")
    )
    with pytest.raises(ArgumentError, match="expected 'rgb_array'"):
        text.render(text.reset())


# --------------------------------------------------------------------------------- names and errors


def test_wrong_names_keywords_and_objects_are_told(grid):
    from xminigrid import make
    from xminigrid.wrappers import DirectionObservationWrapper, GymAutoResetWrapper

    with pytest.raises(ArgumentError, match=r"no env called 'MiniGrid-Empty-7x7'\. Did you mean"):
        XMiniGridEnv("MiniGrid-Empty-7x7")
    with pytest.raises(OptionError, match="'num_envs'"):
        XMiniGridEnv("MiniGrid-Empty-8x8", num_envs=3)
    with pytest.raises(ArgumentTypeError, match=r"XMiniGridEnv\('MiniGrid-Empty-8x8'\)"):
        XMiniGridWrapper("MiniGrid-Empty-8x8")
    with pytest.raises(ArgumentTypeError, match=r"env\.params\.replace"):
        XMiniGridEnv("MiniGrid-Empty-8x8", env_params=3)
    with pytest.raises(ArgumentTypeError, match=r"env\.params\.replace"):
        grid.params = grid.params.replace(height=9)
    resetting = DirectionObservationWrapper(GymAutoResetWrapper(make("MiniGrid-Empty-8x8")[0]))
    with pytest.raises(ArgumentError, match=r"GymAutoResetWrapper is a wrapper .* resets episodes"):
        XMiniGridWrapper(resetting)
    assert XMiniGridEnv.available_envs == env_names()


def test_wrong_benchmarks_are_told_and_so_is_one_that_cannot_be_fetched(monkeypatch, tmp_path):
    from xminigrid import benchmarks

    def offline(url, *args, **kwargs):
        raise OSError("no such host")

    monkeypatch.setattr(benchmarks, "DATA_PATH", str(tmp_path))
    monkeypatch.setattr(benchmarks.urllib.request, "urlretrieve", offline)
    with pytest.raises(FetchError, match=r"'trivial-21k' of XLand-MiniGrid is made.*no such host"):
        XMiniGridEnv(XLAND, benchmark="trivial-21k")
    with pytest.raises(ArgumentError, match=r"no benchmark called 'trivial'.*small-1m"):
        XMiniGridEnv(XLAND, benchmark="trivial")
    with pytest.raises(ArgumentTypeError, match="benchmark is 3, of type int"):
        XMiniGridEnv(XLAND, benchmark=3)
    with pytest.raises(ArgumentError, match="'MiniGrid-Empty-8x8' has a fixed task"):
        XMiniGridEnv("MiniGrid-Empty-8x8", benchmark=benchmark())
    with pytest.raises(OptionError, match="benchmark and randomize both"):
        XMiniGridEnv(XLAND, benchmark=benchmark(), randomize=lambda key, params: params)
