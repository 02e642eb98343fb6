"""Frames that a replay buffer stores one by one and joins when it samples.

It stands in a module of its own because importing TorchRL, whose sampler it is, changes the process.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torchrl.data import SliceSampler

from envkit.data.paths import Key, as_key, as_path
from envkit.errors import OptionError
from envkit.transforms.core.compose import Compose
from envkit.transforms.frames import CatFrames
from envkit.transforms.keys import ExcludeTransform

__all__ = ["WindowSampler", "transform_and_sampler"]


class WindowSampler(SliceSampler):
    """Draw a slice for each row of the batch that is asked for."""

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict]:
        return super().sample(storage, batch_size * cast(int, self.slice_len))


def transform_and_sampler(frames: CatFrames, **options: Any) -> tuple[Compose, WindowSampler]:
    """See `CatFrames.make_rb_transform_and_sampler`; ``options`` are those of `SliceSampler`."""
    span = options.get("span", False)
    if not options.get("strict_length", True) or (
        any(span) if isinstance(span, list | tuple) else span
    ):
        raise OptionError(
            f"strict_length=False and span= draw fewer than {frames.N} steps of an episode, but each window has {frames.N}: "
            "frames of other episodes would fill it. Leave them out."
        )
    written = _and_next(frames.out_keys)
    joined = CatFrames(
        N=frames.N,
        dim=frames.dim,
        in_keys=_and_next(frames.in_keys),
        out_keys=written,
        padding=frames.padding,
        padding_value=frames.padding_value,
        done_key=frames.done_key,
        future=frames.future,
        mask_key=frames.mask_key,
    )
    in_rows = partial(_in_rows, length=frames.N)
    stored = ExcludeTransform(*written, inverse=True)
    return Compose(in_rows, joined, _last, stored), WindowSampler(slice_len=frames.N, **options)


def _and_next(keys: list[Key]) -> list[Key]:
    return [*keys, *(as_key(("next", *as_path(key))) for key in keys)]


def _in_rows(td: TensorDictBase, length: int) -> TensorDictBase:
    return td.reshape(-1, length)


def _last(td: TensorDictBase) -> TensorDictBase:
    return td[:, -1]
