"""MuJoCo draws without a display: EGL, else OSMesa, else an error that names the cure."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from functools import partial

import mujoco
import pytest
import torch

from envkit import DMControlEnv, GymEnv
from envkit.errors import RenderingError
from envkit_bridges import offscreen


def test_mujoco_envs_of_gymnasium_give_pixels_without_a_display(rendering, opened):
    env = opened(GymEnv("HalfCheetah-v5", from_pixels=True, width=32, height=24))
    env.set_seed(0)

    data = env.rollout(3)

    frames = data["next", "pixels"]
    assert frames.shape == (3, 24, 32, 3) and frames.dtype == torch.uint8
    assert frames.float().std() > 0 and not frames[0].equal(frames[2])


def test_an_env_that_renders_on_demand_needs_no_display_either(rendering, opened):
    env = opened(GymEnv("InvertedPendulum-v5", render_mode="rgb_array", width=32, height=24))
    env.reset()

    frame = env.render()

    assert frame.shape == (24, 32, 3) and frame.std() > 0


SMALL = {"width": 32, "height": 24}
DRAWING = {
    "one of Gymnasium": partial(GymEnv, "InvertedPendulum-v5", from_pixels=True, **SMALL),
    "another": partial(GymEnv, "Hopper-v5", from_pixels=True, **SMALL),
    "one of dm_control": partial(
        DMControlEnv, "fish", "swim", from_pixels=True, render_kwargs=SMALL
    ),
    "another of dm_control": partial(
        DMControlEnv, "cheetah", "run", from_pixels=True, render_kwargs=SMALL
    ),
}


def drawn_by_turns(names: list[str], steps: int = 3) -> list[torch.Tensor]:
    """Step envs of these kinds in turn, and give the frames of each."""
    envs = [DRAWING[name]() for name in names]
    for env in envs:
        env.set_seed(0)
    roots, frames = [env.reset() for env in envs], [[] for _ in envs]
    for _ in range(steps):
        for index, env in enumerate(envs):
            roots[index] = env.step_mdp(env.rand_step(roots[index]))
            frames[index].append(roots[index]["pixels"].clone())
    for env in envs:
        env.close()
    return [torch.stack(each) for each in frames]


@pytest.mark.slow  # draws for five seconds
def test_envs_that_draw_in_turn_draw_what_each_draws_alone(rendering):
    alone = [drawn_by_turns([name])[0] for name in DRAWING]

    together = drawn_by_turns(list(DRAWING))

    for frames, expected in zip(together, alone, strict=True):
        assert frames.equal(expected)
        assert not frames[0].equal(frames[-1])


@pytest.mark.slow
def test_rows_and_whole_rollouts_draw_the_same(rendering, opened):
    (expected,) = drawn_by_turns(["another"])
    env, other = opened(DRAWING["another"]()), opened(DRAWING["one of Gymnasium"]())
    other.reset()
    env.set_seed(0)

    whole = env.rollout(3)

    assert whole["next", "pixels"].equal(expected)


@pytest.mark.slow
def test_an_env_that_is_forgotten_does_not_spoil_the_pictures_of_others(rendering, opened):
    (expected,) = drawn_by_turns(["one of dm_control"])
    env, forgotten = opened(DRAWING["one of dm_control"]()), DRAWING["another"]()
    env.set_seed(0)
    env.reset()
    forgotten.rollout(2)

    del forgotten
    gc.collect()
    env.set_seed(0)

    assert env.rollout(3)["next", "pixels"].equal(expected)


@pytest.mark.slow
def test_what_draws_with_mujoco_by_itself_does_not_spoil_them_either(rendering, opened):
    (expected,) = drawn_by_turns(["one of dm_control"])
    env = opened(DRAWING["one of dm_control"]())
    env.set_seed(0)
    env.reset()

    with mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 8, 8) as renderer:
        renderer.render()
        env.set_seed(0)
        data = env.rollout(3)

    assert data["next", "pixels"].equal(expected)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["egl", "osmesa"])
@pytest.mark.parametrize("env", ["DMControlEnv('fish', 'swim'", "GymEnv('Hopper-v5'"])
def test_a_program_that_closes_nothing_ends_in_silence(backend, env, rendering, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", backend)
    script = f"from envkit import *; env = {env}, from_pixels=True); env.rollout(2); print('drawn')"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    if "drawn" not in done.stdout:
        pytest.skip(f"{backend} does not work here: {done.stderr.splitlines()[-1]}")
    assert done.stderr == ""


def test_the_backend_that_works_is_what_processes_started_later_find(rendering):
    assert os.environ["MUJOCO_GL"] == rendering
    assert offscreen.prepare() == rendering


def test_a_backend_that_the_user_has_chosen_is_kept_and_not_tried(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "glfw")

    assert offscreen.prepare() == "glfw"


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="others keep their libraries' default"
)
def test_where_nothing_works_the_error_names_the_package(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setenv("PYOPENGL_PLATFORM", "glx")  # refused by EGL and by OSMesa alike

    with pytest.raises(RenderingError, match=r"egl: ImportError.*osmesa: ImportError.*libosmesa6"):
        offscreen.prepare()

    assert "MUJOCO_GL" not in os.environ


_LATE = """
import os, warnings
warnings.simplefilter("ignore")
import mujoco
from dm_control import suite
from envkit_bridges import offscreen
backend = offscreen.prepare()
env = suite.load("cartpole", "swingup")
env.reset()
assert env.physics.render(8, 8).any()
env.physics.free()
with mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 8, 8) as renderer:
    assert renderer.render().shape == (8, 8, 3)
print(backend)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["egl", "osmesa"])
def test_libraries_that_were_imported_before_draw_with_the_backend_too(monkeypatch, backend):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setenv("PYOPENGL_PLATFORM", backend)  # the other one refuses that

    done = subprocess.run([sys.executable, "-c", _LATE], capture_output=True, text=True)

    if "RenderingError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == backend


@pytest.mark.slow
def test_a_process_whose_opengl_is_bound_to_another_backend_is_told_to_restart(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("PYOPENGL_PLATFORM", raising=False)
    script = (
        "import os; from envkit_bridges import offscreen; offscreen._first_that_draws = lambda: 'osmesa'\n"
        "import mujoco.egl; offscreen.prepare()"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert "Set MUJOCO_GL=osmesa before Python is started" in done.stderr


_DRAWS = """
from envkit import GymEnv, SerialEnv
env = SerialEnv(1, lambda: GymEnv("CartPole-v1", render_mode="rgb_array"))
env.reset()
assert env.call("render")[0].any()
assert GymEnv("CartPole-v1", from_pixels=True).reset()["pixels"].any()
env.close()
"""


@pytest.mark.slow
def test_games_that_draw_with_pygame_open_no_sound_device():
    variables = {name: value for name, value in os.environ.items() if name != "SDL_AUDIODRIVER"}

    drawn = subprocess.run(
        [sys.executable, "-c", _DRAWS], env=variables, capture_output=True, text=True, timeout=100
    )

    assert drawn.returncode == 0, drawn.stderr
    assert "ALSA" not in drawn.stderr


def test_a_sound_driver_that_the_user_has_chosen_is_kept(monkeypatch):
    monkeypatch.setenv("SDL_AUDIODRIVER", "disk")
    offscreen.be_silent()
    assert os.environ["SDL_AUDIODRIVER"] == "disk"

    monkeypatch.delenv("SDL_AUDIODRIVER")
    offscreen.be_silent()
    assert os.environ.pop("SDL_AUDIODRIVER") == "dummy"
