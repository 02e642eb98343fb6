"""Frames an environment shows, kept as a video until they are asked for.

`VideoRecorder` decides which frames are kept and how a batch becomes one frame. What writes files is a
logger's business: any object with ``log_video(name=, video=, step=)``.

Conventions
    frame  uint8, shape (3, height, width).
    video  uint8, shape (1, frames, 3, height, width).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.data.arguments import as_bool, as_int
from envkit.data.paths import as_path
from envkit.errors import ArgumentError, SpecError
from envkit.specs import TensorSpec
from envkit.transforms.core.base import Keys
from envkit.transforms.core.leafwise import LeafTransform
from envkit.transforms.episodes import EpisodeTransform
from envkit.transforms.images import CenterCrop

__all__ = ["VideoRecorder"]


class VideoRecorder(EpisodeTransform, LeafTransform):
    """Record what an env shows; `dump` hands the video to a logger.

    One frame is kept for each step and each reset of the whole env. A batch is tiled into one frame: put
    the recorder around a batched env, not into its workers, whose recorders are out of reach. Called on
    data, every row of the batch is a frame.

    Args:
        logger: object with ``log_video(name=, video=, step=, **kwargs)``, such as a `VideoFolder` or a
            logger of the reference API; None: `dump` returns the video.
        tag: name of the video.
        in_keys: pictures or images of three channels or a grey one, bytes or numbers from 0 to 1; ``"pixels"``.
        skip: keep every ``skip``-th frame; by default every second one of a single env, else all.
        center_crop: cut frames to this square.
        make_grid: tile a batch into one frame; True by default.
        out_keys: where the unchanged entries go; in place by default.
        fps: frames per second, passed on to the logger.
        max_frames: most frames kept; what comes later is dropped until the next `dump`.
        dump_on_done: dump when a step ends the episode (of all rows at once).
        **kwargs: more keywords for ``log_video``.

    Raises:
        ArgumentError: (a ValueError) a batch is recorded with ``make_grid=False``, or ``skip`` is below 1.
        SpecError: when specs are read: the entry is no picture.
    """

    _changes_with_use = (
        "_frames",
        "_seen",
        "_dumped",
    )

    def __init__(
        self,
        logger: Any = None,
        tag: str | None = None,
        in_keys: Keys = None,
        skip: int | None = None,
        center_crop: int | None = None,
        make_grid: bool | None = None,
        out_keys: Keys = None,
        fps: int | None = None,
        max_frames: int | None = None,
        dump_on_done: bool = False,
        **kwargs: object,
    ):
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)
        if skip is not None:
            skip = as_int("skip", skip, least=1, meaning="1, which keeps every frame, or more")
        if max_frames is not None:
            max_frames = as_int(
                "max_frames", max_frames, least=0, meaning="the most frames to keep"
            )
        if len(self.in_keys) != 1:
            raise ArgumentError(
                f"VideoRecorder records one entry, got in_keys {self.in_keys}. Use one for each."
            )
        self.logger = logger
        self.tag = "video" if tag is None else tag
        self.skip = skip
        self.make_grid = None if make_grid is None else as_bool("make_grid", make_grid)
        self.max_frames = max_frames
        self.dump_on_done = as_bool("dump_on_done", dump_on_done)
        self.video_kwargs = kwargs if fps is None else {**kwargs, "fps": fps}
        self._crop = None if center_crop is None else CenterCrop(center_crop)
        self._frames: list[torch.Tensor] = []
        self._seen = self._dumped = 0

    @property
    def frames(self) -> torch.Tensor | None:
        """The frames since the last `dump`, uint8 ``(frames, 3, height, width)``; None if none."""
        return torch.stack(self._frames) if self._frames else None

    def dump(self, suffix: str | None = None, **kwargs: object) -> torch.Tensor | None:
        """Hand the video to the logger, and begin another one.

        Args:
            suffix: put behind the tag.
            **kwargs: keywords for ``log_video`` of this video, over those of the recorder.

        Returns:
            The video, ``(1, frames, 3, height, width)``; None when nothing was recorded.
        """
        frames, self._frames, self._seen = self.frames, [], 0
        if frames is None:
            return None
        video = frames[None]
        if self.logger is not None:
            name = self.tag if suffix is None else f"{self.tag}_{suffix}"
            options = {**self.video_kwargs, **kwargs}
            self.logger.log_video(name=name, video=video, step=self._dumped, **options)
        self._dumped += 1
        return video

    # ----------------------------------------------------------------------------------- recording

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        self._record(next_td, self._default_skip())
        shown = self._call(next_td)
        if self.dump_on_done and bool(self._env()._rows_done(shown).all()):
            self.dump()
        return shown

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        mask = self._reset_mask(td, as_path(self.in_keys[0])[:-1])
        if mask is None or bool(mask.all()):
            self._record(td_reset, self._default_skip())
        return self._call(td_reset)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Record every row of data."""
        for row in tensordict.reshape(-1) if tensordict.batch_dims else [tensordict]:
            self._record(row, 1)
        return self._call(tensordict)

    def _default_skip(self) -> int:
        return 1 if len(self._env().batch_size) else 2

    def _record(self, td: TensorDictBase, default_skip: int) -> None:
        value = td.get(self.in_keys[0], None)
        if value is None:
            return
        self._seen += 1
        full = self.max_frames is not None and len(self._frames) >= self.max_frames
        if self._seen % (self.skip or default_skip) or full:
            return
        images = _as_images(value.detach().cpu()).flatten(0, -4)
        if self._crop is not None:
            images = self._crop._apply_transform(images)
        if len(images) > 1 and self.make_grid is False:
            raise ArgumentError(
                f"VideoRecorder got {len(images)} images for one frame, but make_grid=False. Let it tile "
                "them, or record one env."
            )
        self._frames.append(_tiled(images))

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        if leaf.ndim < 3 or not {1, 3} & {leaf.shape[-1], leaf.shape[-3]}:
            raise SpecError(
                f"VideoRecorder records pictures with three channels or one, last or before the last two axes, "
                f"but the entry has shape {tuple(leaf.shape)}. Pass another in_keys=."
            )
        return leaf.clone()

    def extra_repr(self) -> str:
        return f"tag={self.tag!r}, {super().extra_repr()}"


def _as_images(value: torch.Tensor) -> torch.Tensor:
    """Give bytes with three channels before the last two axes, and one batch axis at least."""
    if value.shape[-1] == 3 or value.shape[-3] not in (1, 3):
        value = value.movedim(-1, -3)
    if value.shape[-3] == 1:
        value = value.expand(*value.shape[:-3], 3, *value.shape[-2:])
    if value.is_floating_point():
        value = value * 255
    return value.clamp(0, 255).to(torch.uint8)[None]


def _tiled(images: torch.Tensor) -> torch.Tensor:
    """Lay images ``(n, 3, height, width)`` out in a grid that is about as wide as high."""
    count, channels, height, width = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    grid = images.new_zeros(rows * columns, channels, height, width)
    grid[:count] = images
    grid = grid.reshape(rows, columns, channels, height, width)
    return grid.permute(2, 0, 3, 1, 4).reshape(channels, rows * height, columns * width)
