"""`XMiniGridEnv`: the same numbers as XLand-MiniGrid stepped by hand, its rulesets in the data, its names, its errors."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch

from envkit import Categorical, OneHot
from envkit.errors import ArgumentError, ArgumentTypeError, FetchError, OptionError
from envkit_bridges.worlds.xminigrid import (
    XMiniGridEnv,
    XMiniGridWrapper,
)
from tests.bridges.worlds.libraries import assert_equals_xminigrid

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


@pytest.mark.slow  # compiles 46 programs
def test_a_grid_of_xland_equals_the_library_stepped_by_hand():
    short = XMiniGridEnv(XLAND).params.replace(max_steps=10)
    tasks = benchmark(1).get_ruleset(0)
    xland = XMiniGridEnv(
        XLAND,
        env_params=short.replace(ruleset=tasks),
        batch_size=[ROWS],
        categorical_action_encoding=True,
    )

    ended = assert_equals_xminigrid(xland, steps=40)

    assert ended >= 3 * ROWS


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


def test_wrong_params_and_wrappers_are_told(grid):
    from xminigrid import make
    from xminigrid.wrappers import DirectionObservationWrapper, GymAutoResetWrapper

    with pytest.raises(ArgumentTypeError, match=r"env\.params\.replace"):
        XMiniGridEnv("MiniGrid-Empty-8x8", env_params=3)
    with pytest.raises(ArgumentTypeError, match=r"env\.params\.replace"):
        grid.params = grid.params.replace(height=9)
    resetting = DirectionObservationWrapper(GymAutoResetWrapper(make("MiniGrid-Empty-8x8")[0]))
    with pytest.raises(ArgumentError, match=r"GymAutoResetWrapper is a wrapper .* resets episodes"):
        XMiniGridWrapper(resetting)


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
