"""`CraftaxEnv`: the same numbers as Craftax stepped by hand, its achievements, its params, its names, its errors.

Programs of these games take minutes of CPU time to compile: what needs one is slow.
"""

from __future__ import annotations

import pytest
import torch

from envkit import Categorical
from envkit.errors import ArgumentError, ArgumentTypeError, OptionError
from envkit_bridges.worlds.craftax import CraftaxEnv, CraftaxWrapper

ROWS = 2
CLASSIC = "Craftax-Classic-Symbolic-v1"


@pytest.fixture(scope="module")
def classic():
    return CraftaxEnv(CLASSIC, batch_size=[ROWS], categorical_action_encoding=True, metrics=True)


@pytest.fixture
def default_params(classic):
    """Whatever a test assigns, the next one starts from the library's."""
    yield classic._env.default_params
    classic.params = classic._env.default_params


# ------------------------------------------------------------------------------------ what is declared


def test_symbols_are_observed_and_achievements_are_metrics(classic):
    assert classic.action_spec == Categorical(17, shape=(ROWS,))
    assert classic.observation_spec["observation"].shape == (ROWS, 1345)
    names = list(classic.observation_spec["metrics"].keys())
    assert {"Achievements/collect_wood", "score", "discount"} <= set(names)
    assert (classic.env_name, classic.libname, classic.num_actions) == (CLASSIC, "craftax", 17)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_achievements_are_there_at_the_end_of_an_episode_and_time_truncates_it(
    classic, default_params
):
    classic.params = default_params.replace(max_timesteps=5)
    classic.set_seed(0)
    td, flags, metrics = classic.reset(), [], []
    for _ in range(5):
        data, td = classic.step_and_maybe_reset(td.set("action", torch.full((ROWS,), 5)))
        flags.append(data["next", "truncated"].flatten().tolist())
        metrics.append(data["next", "metrics"].clone())

    assert flags == [[False] * ROWS] * 4 + [[True] * ROWS]
    assert not data["next", "terminated"].any()
    achieved = {name for name, value in metrics[-1].items() if (value != 0).any()}
    assert not any((value != 0).any() for name, value in metrics[0].items() if name != "discount")
    assert achieved <= {name for name in metrics[-1].keys() if name.startswith("Ach")} | {"score"}
    assert (td["metrics", "score"] == 0).all()


# ------------------------------------------------------------------------ what stateless envs can do


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.sweep
def test_params_are_arguments_and_rows_may_have_their_own(classic, default_params):
    classic.set_seed(0)
    classic.rollout(9, break_when_any_done=False)
    traces = classic.traces

    classic.params = default_params.replace(max_timesteps=4)
    data = classic.rollout(9, break_when_any_done=False)
    rows = CraftaxEnv(CLASSIC, batch_size=[2], params_per_row=True, state_layout="nested")
    td = rows.reset()
    td["state", "params", "max_timesteps"] = torch.tensor([2, 3], dtype=torch.int32)
    cut, _ = rows.unroll(td, 6)

    assert classic.traces["unroll"] == traces["unroll"]
    assert data["next", "truncated"].sum(1).flatten().tolist() == [2] * ROWS
    assert cut["next", "truncated"].sum(1).flatten().tolist() == [3, 2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.sweep
def test_pixels_are_observed_and_stored_states_are_drawn(classic, default_params):
    env = CraftaxEnv("Craftax-Classic-Pixels-v1", batch_size=[ROWS])
    env.set_seed(0)
    classic.set_seed(0)

    seen = env.reset()["observation"]
    frames = [env.render(env.reset(), row=row, block_pixel_size=7) for row in range(ROWS)]
    larger = classic.render(classic.reset())

    assert seen.shape == (ROWS, 63, 63, 3) and seen.dtype == torch.float32
    assert float(seen.min()) >= 0 and float(seen.max()) <= 1
    assert [frame.shape for frame in frames] == [(63, 63, 3)] * ROWS
    assert not torch.equal(*frames)
    assert larger.shape == (144, 144, 3) and larger.dtype == torch.uint8
    with pytest.raises(ArgumentError, match="block_pixel_size is 8; expected one of 7, 16, 64"):
        env.render(env.reset(), block_pixel_size=8)
    with pytest.raises(OptionError, match="'height'"):
        env.render(env.reset(), height=8)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.sweep
def test_an_object_with_auto_reset_is_stepped_without():
    from craftax.craftax_env import make_craftax_env_from_name

    bare = make_craftax_env_from_name(CLASSIC, auto_reset=True)
    env = CraftaxWrapper(bare, batch_size=[ROWS], episode_length=3)
    env.set_seed(0)

    data = env.rollout(6, break_when_any_done=False)

    assert data["next", "truncated"][:, 2].all()
    assert not torch.equal(data["next", "observation"][:, 2], data["observation"][:, 3])


# --------------------------------------------------------------------------------- names and errors


def test_params_of_another_kind_are_refused(classic, default_params):
    with pytest.raises(ArgumentTypeError, match=r"env\.params\.replace"):
        classic.params = {"max_timesteps": 3}
