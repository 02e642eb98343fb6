"""Policies are recorded and shown whichever kind of env they act in, in files that are complete or absent."""

from __future__ import annotations

import base64
import re
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch

from envkit import (
    GymEnv,
    GymWrapper,
    MixedEnv,
    PendulumEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    record,
    video,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingLibraryError,
    OptionError,
    UnsupportedError,
    WriteError,
)
from envkit_bridges.exports.video import Video
from envkit_bridges.gym.frames import draw

imageio = pytest.importorskip("imageio.v3")


class Lamp(gymnasium.Env):
    """Four by six pixels that get brighter by 40 a step; an episode has four steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, first: int = 0):
        self.render_mode, self.first = "rgb_array", first

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.full(1, self.time, np.float32), 1.0, self.time == 4, False, {}

    def render(self):
        return np.full((4, 6, 3), self.first + 40 * self.time, np.uint8)[::-1]  # as MuJoCo's


def lamps(*firsts: int) -> SerialEnv:
    return SerialEnv(len(firsts), [lambda first=first: GymWrapper(Lamp(first)) for first in firsts])


def test_an_episode_is_recorded_from_its_reset_to_how_it_ended(tmp_path):
    seen = record(GymWrapper(Lamp()), None, tmp_path / "lamp.gif")

    assert seen.frames[:, 0, 0, 0].tolist() == [0, 40, 80, 120, 160]
    assert seen.path == tmp_path / "lamp.gif" and seen.fps == 25
    written = imageio.imread(seen.path, index=None)
    assert written.shape == (5, 4, 6, 3)
    assert np.abs(written[:, 0, 0, 0].astype(int) - [0, 40, 80, 120, 160]).max() <= 2


@pytest.mark.parametrize("count", [1, 2])
def test_a_keyword_that_the_renderer_does_not_take_is_told(count, tmp_path):
    env = GymWrapper(Lamp()) if count == 1 else lamps(0, 10)

    with pytest.raises(OptionError, match=r"render of .*Lamp.* takes no keyword 'height'"):
        record(env, None, tmp_path / "lamp.gif", steps=1, height=3)


def test_steps_go_on_into_the_next_episode(tmp_path):
    seen = record(GymWrapper(Lamp()), None, tmp_path / "lamp.gif", steps=6, fps=10)

    assert seen.frames[:, 0, 0, 0].tolist() == [0, 40, 80, 120, 160, 40, 80]
    assert seen.fps == 10


def test_rows_of_a_pool_behind_transforms_stand_side_by_side(tmp_path):
    env = TransformedEnv(lamps(0, 10, 20), StepCounter())

    seen = record(env, None, tmp_path / "lamps.gif", steps=1, rows=3)
    last = record(env, None, tmp_path / "lamps.gif", steps=1, rows=[2])

    assert seen.frames.shape == (2, 3, 8, 12)
    assert seen.frames[1, 0, ::4, ::6].tolist() == [[40, 50], [60, 0]]
    assert last.frames[:, 0, 0, 0].tolist() == [20, 60]
    env.close()


def test_each_row_of_a_mixed_env_is_drawn_by_its_member(tmp_path):
    env = MixedEnv([lamps(0, 10), lamps(20)])

    seen = record(env, None, tmp_path / "mixed.gif", steps=1, rows=[2, 0])

    assert seen.frames[1, 0, 0, ::6].tolist() == [60, 40]
    env.close()


class Stepped(Lamp):
    """Says how long a step takes, as a 0-d array."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    dt = np.asarray(0.1, np.float32)


class Slow(Lamp):
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def control_timestep(self):
        return 0.05


@pytest.mark.parametrize(
    ("env", "pace"),
    [
        (lambda: GymWrapper(Stepped()), 10),
        (lambda: GymWrapper(Slow(), frame_skip=2), 10),
        (lambda: SerialEnv(1, lambda: GymWrapper(Slow())), 20),
        (lambda: lamps(0, 10), 25),
    ],
)
def test_the_pace_is_that_of_the_env(env, pace, tmp_path):
    assert record(env(), None, tmp_path / "lamp.gif", steps=1).fps == pytest.approx(pace)


def recorded_by_its_own_renderer(env, tmp_path, steps) -> torch.Tensor:
    """Give the frames of some steps, the last of which is what the env draws of itself."""
    env.set_seed(0)
    frames = record(env, None, tmp_path / "real.gif", steps=steps).frames
    last = draw(env._env.unwrapped)  # whose wrappers are again as before the first reset
    assert torch.equal(frames[-1].movedim(0, -1), torch.tensor(last.copy()))
    return frames


def test_classic_control_is_recorded_as_pygame_draws_it(tmp_path, opened):
    pytest.importorskip("pygame", reason="classic control needs pygame: gymnasium[classic-control]")
    env = opened(GymEnv("CartPole-v1", render_mode="rgb_array"))

    frames = recorded_by_its_own_renderer(env, tmp_path, steps=8)

    assert frames.shape == (9, 3, 400, 600) and (frames[0] != frames[-1]).any()


@pytest.mark.usefixtures("rendering")
def test_mujoco_is_recorded_as_opengl_draws_it(tmp_path, opened):
    size = {"width": 64, "height": 48}
    env = opened(GymEnv("InvertedPendulum-v5", render_mode="rgb_array", **size))

    frames = recorded_by_its_own_renderer(env, tmp_path, steps=3)

    assert frames.shape == (4, 3, 48, 64) and (frames[0] != frames[-1]).any()


def test_a_video_shows_itself_inline(tmp_path):
    seen = Video(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), fps=5)
    unsaved = seen._repr_html_()
    seen.save(tmp_path / "black.gif")

    inline = re.fullmatch(
        r'<img src="data:image/gif;base64,([^"]+)" alt="2 frames">', seen._repr_html_()
    )
    assert inline and base64.b64decode(inline[1]) == (tmp_path / "black.gif").read_bytes()
    assert unsaved == seen._repr_html_()
    assert repr(seen).endswith("black.gif', 2 frames of 4x4, fps=5)")


def test_mp4_is_written_at_any_size(tmp_path):
    reason = "pip install -e '.[video]'"
    ffmpeg = pytest.importorskip("imageio_ffmpeg", reason=reason).get_ffmpeg_exe()
    seen = Video(torch.zeros(3, 3, 33, 35, dtype=torch.uint8), fps=5)

    seen.save(tmp_path / "black.mp4")

    read = [ffmpeg, "-i", str(tmp_path / "black.mp4"), "-f", "null", "-"]
    told = subprocess.run(read, capture_output=True, text=True, check=True).stderr
    assert re.findall(r"frame= *(\d+)", told)[-1] == "3"
    assert "36x34" in told and "5 fps" in told
    assert "data:video/mp4;base64," in seen._repr_html_()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            lambda: GymEnv("CartPole-v1"),
            r"render_mode is None.*Make it with render_mode='rgb_array'",
        ),
        (lambda: PendulumEnv(), r"PendulumEnv\(.*no method `render\(\) -> frame`"),
        (lambda: SerialEnv(1, lambda: GymEnv("CartPole-v1")), r"render_mode is None"),
    ],
)
def test_an_env_that_draws_nothing_says_what_to_pass(env, message, tmp_path):
    with pytest.raises(UnsupportedError, match=message):
        record(env(), None, tmp_path / "none.gif", steps=1)

    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_refused_before_anything_is_played(tmp_path, monkeypatch):
    env = GymWrapper(Lamp())
    (tmp_path / "folder.gif").mkdir()
    with pytest.raises(ArgumentError, match=r"ends in '.avi'.*'lamp.mp4' or 'lamp.gif'"):
        record(env, None, tmp_path / "lamp.avi")
    with pytest.raises(WriteError, match="there is no folder"):
        record(env, None, tmp_path / "missing" / "lamp.gif")
    with pytest.raises(WriteError, match="folder of that name"):
        record(env, None, tmp_path / "folder.gif")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingLibraryError, match=r"'\.\[video\]'"):
        record(env, None, tmp_path / "lamp.mp4")
    assert not hasattr(env.unwrapped, "time")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"rows": 2}, "the env has 1 row"),
        ({"rows": []}, "the env has 1 row"),
        ({"steps": 0}, "steps is 0"),
        ({"fps": -1}, "fps is -1"),
        ({"fps": 0}, "fps is 0, but must be a finite number, above 0"),
        ({"fps": "fast"}, "fps is 'fast'"),
        ({"fps": float("inf")}, "fps is inf"),
    ],
)
def test_impossible_recordings_are_refused(keywords, message, tmp_path):
    env = GymWrapper(Lamp())

    with pytest.raises(ArgumentError, match=message):
        record(env, None, tmp_path / "lamp.gif", **keywords)

    assert not hasattr(env.unwrapped, "time")  # nothing was played


def test_only_stored_states_are_drawn_later():
    env = GymWrapper(Lamp())

    with pytest.raises(UnsupportedError, match="record\\(env, policy, path\\)"):
        video(env, env.rollout(2))
    with pytest.raises(ArgumentTypeError, match="env is 'brax/ant', of type str"):
        video("brax/ant", env.rollout(2))


def test_the_repr_names_simulator_and_id():
    assert repr(GymEnv("CartPole-v1")) == "GymEnv('CartPole-v1', batch_size=(), device=cpu)"


def test_an_episode_under_way_that_cannot_be_put_back_is_told_once(tmp_path):
    env = TransformedEnv(GymWrapper(Lamp()), StepCounter())
    env.rollout(1)

    with pytest.warns(
        UserWarning, match=r"record\(\) ends the episodes under way .* Reset the env before"
    ) as told:
        record(env, None, tmp_path / "lamp.gif", steps=1)

    assert len(told) == 1
    assert env.reset()["step_count"] == 0
