"""Videos as files.

`VideoFolder` is a logger for `envkit.VideoRecorder`: it writes each video it is given as one file.
It knows `imageio` and no environments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bridges.libraries import require
from envkit.errors import ArgumentError

__all__ = ["VideoFolder"]


_WRITERS = {"gif": ("imageio",), "mp4": ("imageio", "imageio_ffmpeg")}


class VideoFolder:
    """A folder of videos, written as ``<name>_<step>.<format>``.

    Args:
        folder: made with the first video.
        format: "gif", or "mp4".
        fps: frames per second of a video that does not say its own.

    Raises:
        ArgumentError: (a ValueError) another format.
        MissingLibraryError: a library that writes the format is not installed.
    """

    def __init__(self, folder: str | Path, *, format: str = "gif", fps: int = 30):
        if format not in _WRITERS:
            raise ArgumentError(f"format is {format!r}, but must be one of {sorted(_WRITERS)}.")
        for library in _WRITERS[format]:
            require(library)
        self.folder = Path(folder)
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
        path = self.folder / f"{name}{'' if step is None else f'_{step}'}.{self.format}"
        path.parent.mkdir(parents=True, exist_ok=True)
        require("imageio.v3").imwrite(path, _pictures(video), **self._pace(fps or self.fps))
        return path

    def _pace(self, fps: int) -> dict[str, Any]:
        if self.format == "gif":
            return {"duration": 1000 / fps, "loop": 0}
        return {"fps": fps}


def _pictures(video: torch.Tensor) -> Any:
    """Give frames as ``(frames, height, width, 3)``."""
    if video.ndim != 5 or video.shape[0] != 1 or video.shape[2] != 3:
        raise ArgumentError(
            f"a video must have shape (1, frames, 3, height, width), got {tuple(video.shape)}."
        )
    return video[0].permute(0, 2, 3, 1).cpu().numpy()
