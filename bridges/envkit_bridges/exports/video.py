"""Videos of policies: an env is played and drawn, or what was recorded of it is drawn without playing, and encoded.

`record` and `video` decide what is played and how rows are laid side by side. `Video` holds the frames, encodes them as
gif or mp4, and shows itself in Jupyter; `VideoFolder` is a logger for `envkit.VideoRecorder` that writes each video it
is given as one file. How a row is drawn is known to `painters`.

Conventions
    frames  uint8 tensor, shape (T, 3, H, W).
    format  "gif" or "mp4", which is also the ending of the file.
"""

from __future__ import annotations

import math
import os
import subprocess
from base64 import b64encode
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.arrays.integers import as_int
from envkit.data.arguments import as_bool, as_file, as_number, require_option
from envkit.data.files import require_place, telling, whole_file
from envkit.env.base import EnvBase
from envkit.env.bound_policy import bind_policy
from envkit.env.learning import left_as_it_was
from envkit.env.policy import PolicyLike
from envkit.env.wrapper_hints import require_env
from envkit.errors import ArgumentError, UnsupportedError, WriteError
from envkit_bridges.exports.painters import draws_states, pace_of, painter_of, without_transforms
from envkit_bridges.libraries import require

_WRITERS = {"gif": "imageio", "mp4": "imageio_ffmpeg"}
_SHOWN = {
    "gif": '<img src="data:image/gif;base64,{data}" alt="{label}">',
    "mp4": '<video src="data:video/mp4;base64,{data}" title="{label}" controls autoplay loop muted></video>',
}


class Video:
    """Frames and their pace; in Jupyter it shows itself inline.

    Args:
        frames: uint8, shape ``(T, 3, H, W)``.
        fps: frames per second.

    Attributes:
        path: the file it was saved as last, or None. Without one it is shown as a gif.

    Raises:
        ArgumentError: (a ValueError) ``frames`` are of another dtype or shape, there is none, or ``fps`` is not
            above 0.

    Example:
        >>> import torch
        >>> from envkit import Video
        >>> Video(torch.zeros(20, 3, 48, 64, dtype=torch.uint8), fps=10)
        Video(20 frames of 64x48, fps=10)
    """

    def __init__(self, frames: torch.Tensor, fps: float):
        is_uint8 = frames.dtype == torch.uint8
        if not is_uint8 or frames.ndim != 4 or frames.shape[1] != 3 or not len(frames):
            raise ArgumentError(
                f"frames are {frames.dtype}{list(frames.shape)}, but must be uint8 of shape (frames, 3, height, width). Convert "
                "them, e.g. frames.permute(0, 3, 1, 2) where the colours come last."
            )
        self.frames = frames
        self.fps = require_pace(fps)
        self.path: Path | None = None

    def __len__(self) -> int:
        return len(self.frames)

    def __repr__(self) -> str:
        _, _, height, width = self.frames.shape
        told = [f"{len(self)} frames of {width}x{height}", f"fps={self.fps:.4g}"]
        return f"Video({', '.join(told if self.path is None else [repr(str(self.path)), *told])})"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a file, complete or not at all; one of that name is replaced.

        Args:
            path: ends in ".gif" or ".mp4".

        Raises:
            ArgumentError: (a ValueError) another ending.
            MissingLibraryError: a library that writes the format is not installed.
            WriteError: (an OSError) the file cannot be written.

        Example:
            >>> import torch
            >>> from envkit import Video
            >>> Video(torch.zeros(5, 3, 16, 16, dtype=torch.uint8), fps=10).save("dark.gif")
            PosixPath('dark.gif')
        """
        path = as_video_path(path)
        data = _encoded(self.frames, path.suffix[1:].lower(), self.fps)
        with whole_file(path) as file, telling(path):
            file.write(data)
        self.path = path
        return path

    def _repr_html_(self) -> str:
        format = "gif" if self.path is None else self.path.suffix[1:].lower()
        data = self._as_gif if format == "gif" else _encoded(self.frames, format, self.fps)
        label = f"{len(self)} frames"
        return _SHOWN[format].format(data=b64encode(data).decode(), label=label)

    @cached_property
    def _as_gif(self) -> bytes:
        return _encoded(self.frames, "gif", self.fps)


class VideoFolder:
    """A folder of videos, written as ``<name>_<step>.<format>``.

    Args:
        folder: made with the first video.
        format: "gif", or "mp4".
        fps: frames per second of a video that does not say its own.

    Raises:
        ArgumentTypeError: (a TypeError) ``folder`` is no path.
        ArgumentError: (a ValueError) another format, or ``folder`` is empty.
        MissingLibraryError: a library that writes the format is not installed.

    Example:
        >>> import torch
        >>> from envkit import VideoFolder
        >>> frames = torch.zeros(1, 5, 3, 16, 16, dtype=torch.uint8)
        >>> VideoFolder("videos").log_video(name="play", video=frames, step=0).name
        'play_0.gif'
    """

    def __init__(self, folder: str | Path, *, format: str = "gif", fps: int = 30):
        require_option("format", format, sorted(_WRITERS))
        require(_WRITERS[format])
        self.folder = as_file("folder", folder)
        self.format = format
        self.fps = fps

    def log_video(
        self, name: str, video: torch.Tensor, step: int | None = None, fps: int | None = None
    ) -> Path:
        """Write one video.

        Args:
            name: name of the file, without number and ending.
            video: uint8, shape ``(1, frames, 3, height, width)``.
            step: number of the video.
            fps: frames per second.

        Returns:
            Where it was written; a file of that name is replaced.

        Example:
            >>> import torch
            >>> from envkit import VideoFolder
            >>> frames = torch.zeros(1, 5, 3, 16, 16, dtype=torch.uint8)
            >>> VideoFolder("videos").log_video(name="play", video=frames)
            PosixPath('videos/play.gif')
        """
        if video.ndim != 5 or video.shape[0] != 1:
            raise ArgumentError(
                f"video has shape {tuple(video.shape)}, but must have shape (1, frames, 3, height, width). Reshape it."
            )
        path = self.folder / f"{name}{'' if step is None else f'_{step}'}.{self.format}"
        with telling(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return Video(video[0], self.fps if fps is None else fps).save(path)


def as_video_path(path: str | os.PathLike[str]) -> Path:
    """Check, before anything is drawn, that a video can be written there.

    Raises:
        ArgumentTypeError: (a TypeError) it is no path.
        ArgumentError: (a ValueError) the name is empty, or ends in something else than ".gif" and ".mp4".
        MissingLibraryError: a library that writes the format is not installed.
        WriteError: (an OSError) the folder is not there, or not to be written to.
    """
    path = as_file("path", path)
    if path.suffix[1:].lower() not in _WRITERS:
        raise ArgumentError(
            f"{str(path)!r} ends in {path.suffix!r}, which no video is written as. Name it "
            f"'{path.stem or 'video'}.mp4' or '{path.stem or 'video'}.gif'."
        )
    require(_WRITERS[path.suffix[1:].lower()])
    require_place(path)
    return path


def require_pace(fps: float) -> float:
    """Return frames per second.

    Raises:
        ArgumentError: (a ValueError) it is no number above 0.
    """
    as_number("fps", fps, above=0, meaning="the frames per second, such as 30")
    return fps


def _encoded(frames: torch.Tensor, format: str, fps: float) -> bytes:
    """Return the bytes of a file."""
    pictures = frames.permute(0, 2, 3, 1).cpu().numpy()
    if format == "gif":
        writer: Any = require("imageio.v3")
        hundredths = max(2, round(100 / fps))  # browsers slow down what is faster
        return writer.imwrite(
            "<bytes>", pictures, extension=".gif", duration=10 * hundredths, loop=0
        )
    return _as_mp4(pictures, fps)


def _as_mp4(pictures: np.ndarray, fps: float) -> bytes:
    """Encode by H.264, which halves the resolution of colours, so both sides get even.

    ffmpeg is run from here, not by imageio, which forks this process and leaves a pipe open.
    """
    height, width = pictures.shape[1:3]
    even = ((0, 0), (0, height % 2), (0, width % 2), (0, 0))
    padded = np.pad(pictures, even, mode="edge")
    size = f"{padded.shape[2]}x{padded.shape[1]}"
    ffmpeg = require("imageio_ffmpeg").get_ffmpeg_exe()
    taken = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps), "-i", "-"]
    encoding = ["-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "20"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        done = subprocess.run(
            [ffmpeg, "-loglevel", "error", *taken, *encoding, str(path)],
            input=np.ascontiguousarray(padded).data,
            capture_output=True,
            check=False,
        )
        if done.returncode != 0:
            errors = done.stderr.decode(errors="replace").strip().splitlines() or [
                "no reason given"
            ]
            raise WriteError(
                f"ffmpeg could not write {len(pictures)} frames of {size}: {errors[-1]}"
            )
        return path.read_bytes()


_LONGEST = 1000
"""Steps after which a recording without ``steps`` stops, whether an episode has ended or not."""


def record(
    env: EnvBase,
    policy: PolicyLike,
    path: str | os.PathLike[str],
    steps: int | None = None,
    rows: int | Sequence[int] = 1,
    fps: float | None = None,
    *,
    update_stats: bool = False,
    **options: Any,
) -> Video:
    """Play a policy from a reset on, draw it, and write the video.

    There is a frame of the first moment and one after each step. The frame after the last step of an episode shows
    its end, and the next one is a step into the new one. Every kind of env is drawn: stateless envs from their
    states, Gymnasium's, PettingZoo's and dm_control's by their own ``render``, pools and `MixedEnv` row by row.
    Afterwards the env is where it was, its generators included, as are the global generators. Where an env cannot say
    where it is (see `record_for_resume`), only its transforms are put back, and the next call must be a reset.

    Args:
        env: one of Gymnasium needs ``render_mode="rgb_array"``.
        policy: what `rollout` takes; None for random actions.
        path: ends in ".mp4" or ".gif". The file is complete or absent; one of that name is replaced.
        steps: None plays until every row that is shown has ended an episode, at most 1000 steps.
        rows: how many rows are shown side by side, from the first on; or their numbers, counted through the batch.
        fps: None takes the pace of the env's own time, at most 60, or 15 where it has none.
        update_stats: True lets transforms that learn, such as `VecNorm`, learn from what is played.
        **options: for the renderer, such as ``height``, ``width`` and ``camera`` of MuJoCo's.

    Returns:
        The video, which shows itself in Jupyter.

    Raises:
        ArgumentError: (a ValueError) another ending, no such row, ``steps`` below 1, ``fps`` not above 0.
        UnsupportedError: (a NotImplementedError) the env draws nothing; the message says what to pass.
        RenderingError: (a RuntimeError) nothing works here that draws without a display; the message says what to
            install.
        MissingLibraryError: (an ImportError) a library that writes the format is not installed.
        WriteError: (an OSError) the file cannot be written.

    Example:
        >>> from envkit import GymEnv, record
        >>> env = GymEnv("CartPole-v1", render_mode="rgb_array")
        >>> record(env, None, "cartpole.gif", steps=2)
        Video('cartpole.gif', 3 frames of 600x400, fps=50)
        >>> env.close()
    """
    require_env("env", env, "Pass GymEnv('CartPole-v1', render_mode='rgb_array'), for example.")
    path = as_video_path(path)
    if steps is not None:
        steps = as_int(
            "steps", steps, least=1, meaning="how many steps are shown, or None for an episode"
        )
    pace = None if fps is None else require_pace(fps)
    shown = _rows_of(env, rows)
    learns = as_bool("update_stats", update_stats)
    with left_as_it_was(env, update_stats=learns, warns_as="record()"):
        frames = _side_by_side(_played(env, policy, steps, shown, options))
    seen = Video(frames, pace_of(env) if pace is None else pace)
    seen.save(path)
    return seen


def video(
    env: EnvBase,
    data: TensorDictBase,
    row: int = 0,
    path: str | os.PathLike[str] | None = None,
    *,
    every: int = 1,
    fps: float | None = None,
    **options: Any,
) -> Video:
    """Draw what a stateless env recorded, without stepping again.

    Args:
        env: what recorded ``data``, or one like it.
        data: a rollout with "state", batch size ``(*batch, T)``.
        row: which one, counted through the batch without time.
        path: also write the video there; see `record`.
        every: draw one step of so many.
        fps: None keeps the pace of the env's own time.
        **options: for the renderer; see `record`.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env.
        UnsupportedError: (a NotImplementedError) the env is not stateless, or cannot be drawn.
        MissingKeyError: (a KeyError) ``data`` has no state.
        ArgumentError: (a ValueError) there is no such row, or another ending.
        RenderingError, MissingLibraryError, WriteError: see `record`.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from envkit import Box, JaxEnv, Timestep, video
        >>> class Level:
        ...     action_space = Box(-1.0, 1.0, (1,))
        ...     def reset(self, key):
        ...         return jnp.float32(0.0), Timestep(jnp.float32(0.0))
        ...     def step(self, level, action):
        ...         level = jnp.clip(level + action[0], 0.0, 255.0)
        ...         return level, Timestep(level, 1.0)
        ...     def render(self, states):
        ...         return [np.full((16, 16, 3), level, np.uint8) for level in states]
        >>> env = JaxEnv(Level(), batch_size=[4])
        >>> video(env, env.rollout(3), row=2)
        Video(3 frames of 16x16, fps=15)
    """
    require_env("env", env, "Pass GymEnv('CartPole-v1', render_mode='rgb_array'), for example.")
    drawing: Any = without_transforms(env)
    if not draws_states(drawing):
        raise UnsupportedError(
            f"{env!r} keeps no states in the data that could be drawn later. record(env, policy, path) plays and "
            "draws it."
        )
    path = None if path is None else as_video_path(path)
    pace = None if fps is None else require_pace(fps)
    frames = drawing.render_rollout(data, row, every, **options)
    seen = Video(frames, pace_of(env) / every if pace is None else pace)
    if path is not None:
        seen.save(path)
    return seen


def _rows_of(env: EnvBase, rows: int | Sequence[int]) -> list[int]:
    count = env.numel()
    if isinstance(rows, Sequence):
        wanted = [as_int("a row", row, least=0, meaning="the number of a row") for row in rows]
    else:
        wanted = list(range(as_int("rows", rows, least=1, meaning="how many rows are shown")))
    if not wanted or max(wanted) >= count:
        raise ArgumentError(
            f"rows is {rows!r}, but the env has {count} row{'s' * (count > 1)}. Pass 1 to {count}, or numbers from "
            f"0 to {count - 1}."
        )
    return wanted


def _played(
    env: EnvBase, policy: PolicyLike, steps: int | None, rows: list[int], options: dict[str, Any]
) -> list[torch.Tensor]:
    """Play, and give the frames of each row."""
    painter, act = painter_of(env, rows, options), bind_policy(env, policy)
    ended = torch.zeros(len(rows), dtype=torch.bool)
    with torch.no_grad():
        root = env.reset()
        painter.look(root)
        for _ in range(_LONGEST if steps is None else steps):
            data = env.step(act(root))
            moment = env.step_mdp(data)
            painter.look(moment)
            ended |= env._rows_done(data.get("next")).reshape(-1)[rows].cpu()
            if steps is None and bool(ended.all()):
                break
            root = env.maybe_reset(moment)
    return painter.frames()


def _side_by_side(rows: list[torch.Tensor]) -> torch.Tensor:
    """Lay rows out as a grid, each as large as the largest: uint8 (T, 3, H, W)."""
    across = math.ceil(math.sqrt(len(rows)))
    height, width = (max(row.shape[axis] for row in rows) for axis in (2, 3))
    down = math.ceil(len(rows) / across)
    sheet = torch.zeros((len(rows[0]), 3, down * height, across * width), dtype=torch.uint8)
    for number, row in enumerate(rows):
        top, left = number // across * height, number % across * width
        sheet[:, :, top : top + row.shape[2], left : left + row.shape[3]] = row
    return sheet
