"""Videos: frames encoded as gif or mp4, whole files of them, and how they show themselves in Jupyter.

`Video` holds frames, `VideoFolder` is a logger for `envkit.VideoRecorder` that writes each video it is given as one
file. This module knows `imageio` and no environments.

Conventions
    frames  uint8 tensor, shape (T, 3, H, W).
    format  "gif" or "mp4", which is also the ending of the file.
"""

from __future__ import annotations

import math
import os
import subprocess
from base64 import b64encode
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from envkit.data.arguments import as_file
from envkit.data.files import require_place, telling, whole_file
from envkit.errors import ArgumentError, WriteError
from envkit_bridges.libraries import require

__all__ = ["Video", "VideoFolder", "as_video_path", "require_pace"]


_WRITERS = {"gif": ("imageio",), "mp4": ("imageio_ffmpeg",)}
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
    """

    def __init__(self, frames: torch.Tensor, fps: float):
        if (
            frames.dtype != torch.uint8
            or frames.ndim != 4
            or frames.shape[1] != 3
            or not len(frames)
        ):
            raise ArgumentError(
                f"frames are {frames.dtype}{list(frames.shape)}, but must be uint8 of shape (frames, 3, height, width)."
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
    """

    def __init__(self, folder: str | Path, *, format: str = "gif", fps: int = 30):
        if format not in _WRITERS:
            raise ArgumentError(f"format is {format!r}, but must be one of {sorted(_WRITERS)}.")
        _require_writers(format)
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
        """
        if video.ndim != 5 or video.shape[0] != 1:
            raise ArgumentError(
                f"a video must have shape (1, frames, 3, height, width), got {tuple(video.shape)}."
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
    _require_writers(path.suffix[1:].lower())
    require_place(path)
    return path


def _require_writers(format: str) -> None:
    for library in _WRITERS[format]:
        require(library)


def require_pace(fps: float) -> float:
    """Give frames per second.

    Raises:
        ArgumentError: (a ValueError) it is no number above 0.
    """
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        raise ArgumentError(f"fps is {fps!r}, but must be a number above 0, such as 30.")
    return fps


def _encoded(frames: torch.Tensor, format: str, fps: float) -> bytes:
    """Give the bytes of a file."""
    _require_writers(format)
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
    made = ["-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "20"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        done = subprocess.run(
            [ffmpeg, "-loglevel", "error", *taken, *made, str(path)],
            input=np.ascontiguousarray(padded).data,
            capture_output=True,
            check=False,
        )
        if done.returncode != 0:
            told = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise WriteError(f"ffmpeg could not write {len(pictures)} frames of {size}: {told[-1]}")
        return path.read_bytes()
