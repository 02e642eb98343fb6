"""Domain randomisation, metrics, repeated actions and pictures of stateless envs, behind the TensorDict interface."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from envkit import (
    Compose,
    JaxEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
    check_env_specs,
    compile_policy,
    record,
    video,
)
from envkit.errors import (
    ArgumentError,
    InputError,
    MissingKeyError,
    OptionError,
    StateStructureError,
    UnsupportedError,
)
from tests.bridges.compare import assert_close, assert_same, replay
from tests.zoo.jax_envs import Countdown, Sled
from tests.zoo.resumed import same, twice

ROWS = 4


def heavier(key, model):
    """Draw the mass and one of two frictions."""
    left, right = model["friction"]
    mass, friction = jax.random.uniform(key, (2,), minval=0.5, maxval=2.0)
    return {**model, "mass": mass, "friction": (left, friction * right)}


def sleds(**how):
    return JaxEnv(
        Sled(), batch_size=[ROWS], device="cpu", **{"metrics": True, "randomize": heavier, **how}
    )


@pytest.fixture(scope="module")
def env():
    return sleds(action_repeat=2, episode_length=3)


@pytest.mark.slow
def test_rows_of_a_run_keep_a_model_for_an_episode_and_draw_another_with_the_next(env):
    env.set_seed(1)

    data = env.rollout(5, break_when_any_done=False)

    mass = env.unpack(data["state"])["model", "mass"]
    assert data["next", "terminated"][:, 1].all()  # four steps of the simulator, two of the env
    assert torch.equal(mass[:, 0], mass[:, 1]) and torch.equal(mass[:, 2], mass[:, 3])
    assert len(mass[:, [0, 2, 4]].unique()) == 3 * ROWS


def test_metrics_are_zero_after_a_reset_and_reported_by_the_last_step_of_the_simulator(env):
    env.set_seed(1)

    data = env.rollout(4, break_when_any_done=False)

    work = data["next", "metrics", "work"]
    assert work.shape == (ROWS, 4) and (work != 0).all()
    assert not data["metrics", "work"][:, [0, 2]].any()
    assert torch.equal(data["metrics", "work"][:, 1], work[:, 0])
    torch.testing.assert_close(work, data["action"][..., 0] * data["next", "observation"][..., 0])


def test_a_stored_state_steps_with_its_own_model(env):
    env.set_seed(2)
    td = env.reset().set("action", torch.full((ROWS, 1), 0.5))
    wanted = env.step(td.clone())["next"]

    turned = env.step(td[[3, 2, 1, 0]].clone())["next"]

    assert_same(turned, wanted[[3, 2, 1, 0]])
    assert len(wanted["reward"].unique()) == ROWS


def test_the_specs_hold_and_say_what_is_drawn(env):
    check_env_specs(env, seed=0)

    assert env.drawn_bytes == {"mass": 4, "friction.1": 4}
    assert set(env.observation_spec.keys()) == {"observation", "metrics", "state"}


def test_an_action_is_repeated_a_whole_number_of_times():
    with pytest.raises(ArgumentError, match=r"action_repeat is 0, .*Pass action_repeat=1"):
        sleds(action_repeat=0)


@pytest.mark.parametrize("at", ["episode", "construction"])
def test_when_models_are_drawn_means_nothing_without_how(at):
    with pytest.raises(OptionError, match=rf"randomize_at='{at}'.*Pass randomize=f"):
        sleds(randomize=None, randomize_at=at)


def test_infos_of_an_env_without_metrics_stay_where_they_are():
    with pytest.raises(StateStructureError, match="appears only after step"):
        JaxEnv(Sled(), device="cpu").rollout(1)


# -------------------------------------------------------------------------------------------- pictures


@dataclass(frozen=True)
class Painted(Sled):
    """Draws a sled as a picture whose pixels are its moves, and whose width tells its mass."""

    dtype: type = np.uint8

    def render(self, states, height=2):
        width = int(100 * self.model["mass"])
        return [np.full((height, width, 3), state["moves"], self.dtype) for state in states]


@pytest.fixture(scope="module")
def painted():
    env = JaxEnv(Painted(), batch_size=[2, 2], device="cpu", metrics=True, randomize=heavier)
    env.set_seed(0)
    return env, env.rollout(3, break_when_any_done=False)


def test_a_row_is_drawn_from_its_stored_state_with_its_own_model(painted):
    env, data = painted

    frame = env.render(data[..., 2], row=3)
    frames = env.render_rollout(data, row=1, every=2, height=5)

    masses = env.unpack(data["state"])["model", "mass"][..., 0].flatten()
    assert frame.shape == (2, int(100 * masses[3]), 3) and frame.dtype == torch.uint8
    assert (frame == 2).all()
    assert frames.shape == (2, 3, 5, int(100 * masses[1]))
    assert frames[:, 0, 0, 0].tolist() == [0, 2]


def test_a_state_in_the_other_layout_is_drawn_alike(painted):
    env, data = painted
    nested = JaxEnv(Painted(), device="cpu", metrics=True, randomize=heavier, state_layout="nested")
    unpacked = data[0, 1, 1:2].select("state").set("state", env.unpack(data[0, 1, 1:2]["state"]))

    assert torch.equal(nested.render(unpacked), env.render(data[0, 1, 1:2]))


def test_what_cannot_be_drawn_says_why(painted, env):
    mine, data = painted
    odd = JaxEnv(Painted(dtype=np.int32), device="cpu", metrics=True, randomize=heavier)

    with pytest.raises(MissingKeyError, match=r"no 'state' to draw.*record_state=True"):
        mine.render(data.select("observation"))
    with pytest.raises(ArgumentError, match=r"row is 4, but .* has 4 rows\. Pass 0 to 3"):
        mine.render_rollout(data, row=4)
    with pytest.raises(ArgumentError, match="without a time axis"):
        mine.render_rollout(data[0, 0, 0])
    with pytest.raises(InputError, match="that of another env"):
        JaxEnv(Countdown(3), device="cpu").render(data)
    with pytest.raises(UnsupportedError, match=r"Sled cannot be drawn.*render\(states\) -> frames"):
        env.render(data)
    with pytest.raises(ArgumentError, match=r"render of Painted returned \['int32"):
        odd.render(data)


def test_a_run_that_was_recorded_is_a_video_without_stepping_again(painted, tmp_path):
    pytest.importorskip("imageio")
    env, data = painted

    seen = video(env, data, 1, tmp_path / "sled.gif", every=2, height=5, fps=4)
    inside = video(TransformedEnv(env, StepCounter()), data, row=1, every=2, height=5)

    assert torch.equal(seen.frames, env.render_rollout(data, row=1, every=2, height=5))
    assert torch.equal(inside.frames, seen.frames) and inside.fps == 7.5
    assert seen.path == tmp_path / "sled.gif" and seen.path.stat().st_size


def test_a_policy_is_recorded_in_the_rows_of_a_stateless_env(painted, env, tmp_path):
    pytest.importorskip("imageio")
    mine, _ = painted

    seen = record(mine, None, tmp_path / "sleds.gif", steps=2, rows=[3, 0])

    assert seen.frames[:, :, 0, 0].tolist() == [[0] * 3, [1] * 3, [2] * 3]
    with pytest.raises(UnsupportedError, match="Sled cannot be drawn"):
        record(env, None, tmp_path / "never.gif", steps=100_000)
    assert not (tmp_path / "never.gif").exists()


# ------------------------------------------------------------------------- with all else that there is


@pytest.mark.slow
@pytest.mark.parametrize("at", ["episode", "construction"])
def test_stepped_advanced_and_unrolled_rows_have_the_same_models(at):
    env = sleds(randomize_at=at)
    env.set_seed(3)
    start = env.reset()

    data, _ = env.unroll(start.clone(), 11, record_state=True)
    advanced, _ = replay(env, start.clone(), data["action"])

    assert_same(data.select("done", "action"), advanced.select("done", "action"))
    assert_close(data, advanced, atol=1e-6)
    mass = env.unpack(data["state"])["model", "mass"]
    assert torch.equal(mass, env.unpack(advanced["state"])["model", "mass"])
    assert len(mass.unique()) == (ROWS if at == "construction" else 3 * ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed", "nested"])
def test_rows_that_are_not_reset_keep_their_model_bit_for_bit(layout):
    env = sleds(state_layout=layout)
    env.set_seed(0)
    td = env.reset()
    before = td.clone()
    mask = torch.tensor([[True], [False], [True], [False]])

    after = env.reset(td.set("_reset", mask))

    kept = ~mask[:, 0]
    assert_same(after["state"][kept], before["state"][kept])
    seen = after["state"] if layout == "nested" else env.unpack(after["state"])
    old = before["state"] if layout == "nested" else env.unpack(before["state"])
    assert (seen["model", "mass"] != old["model", "mass"]).tolist() == mask[:, 0].tolist()


@pytest.mark.slow
def test_new_keys_leave_a_model_that_is_drawn_once():
    env = sleds(randomize_at="construction")
    td = env.reset()
    before = env.unpack(td["state"].clone())

    after = env.unpack(env.reseed(td)["state"])

    assert torch.equal(after["model", "mass"], before["model", "mass"])
    assert not torch.equal(after["key"], before["key"])


@pytest.mark.slow
def test_transforms_are_fused_around_it_and_policies_compiled_into_it():
    inner = sleds()
    env = TransformedEnv(inner, Compose(StepCounter(), RewardSum()))
    env.set_seed(0)
    policy = compile_policy(
        TensorDictModule(torch.nn.Linear(2, 1), in_keys=["observation"], out_keys=["action"])
    )
    start = env.reset()

    data, _ = env.unroll(start.clone(), 9, policy)
    advanced, _ = replay(env, start.clone(), data["action"].detach())

    assert_close(data.exclude("state"), advanced.exclude("state", ("next", "state")), atol=1e-5)
    assert data["next", "metrics", "work"].any() and data["step_count"].max() == 3


@pytest.mark.slow
@pytest.mark.parametrize("at", ["episode", "construction"])
def test_it_goes_on_to_the_same_bits_after_a_resume(at):
    assert same(
        twice(lambda: sleds(randomize_at=at), lambda env: env, before=6, after=7, seed=None)
    )


@pytest.mark.slow
def test_a_gradient_reaches_the_model_of_a_row():
    env = sleds(requires_grad=True)
    env.set_seed(0)
    td = env.reset()
    td["state", "floats"].requires_grad_()

    reward = env.step(td.set("action", torch.full((ROWS, 1), 0.5)))["next", "reward"]
    (gradient,) = torch.autograd.grad(reward.sum(), td["state", "floats"])

    named = env.unpack(td["state"].detach())
    mass, speed = named["model", "mass"], named["speed"]
    drag = (0.5 + named["model", "friction", "1"]) * speed
    slope = env.unpack(td["state"].clone().set("floats", gradient))["model", "mass"]
    torch.testing.assert_close(slope, -0.1 * (0.5 - drag) / mass**2)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["episode", "construction"])
def test_rows_on_several_devices_draw_what_they_draw_on_one(at):
    one, other = sleds(randomize_at=at), sleds(randomize_at=at, devices=jax.devices()[:ROWS])

    runs = [env.rollout(9, break_when_any_done=False) for env in map(_seeded, (one, other))]

    assert_close(*runs)
    masses = [
        env.unpack(run["state"])["model", "mass"]
        for env, run in zip((one, other), runs, strict=True)
    ]
    assert np.array_equal(*masses)


def _seeded(env):
    env.set_seed(3)
    return env
