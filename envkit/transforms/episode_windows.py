"""Windows of steps within the episodes of recorded data, and the frames of each joined.

What ends an episode is read from the data's own flags, or said by a mask.

Conventions
    window  the last ``count`` steps up to a step, or, looking ahead, the next ones from it on.
"""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDictBase

from envkit.data.arguments import as_int
from envkit.data.paths import Key, as_path
from envkit.errors import ArgumentError, MissingKeyError
from envkit.transforms.core.leafwise import require_negative
from envkit.transforms.postprocess import time_axis

__all__ = ["Episodes", "cat_frames", "require_window"]


def require_window(N: int, padding: str) -> int:
    """Check how many frames are joined, which it gives, and what stands for those before the first.

    Raises:
        ArgumentTypeError: (a TypeError) ``N`` is no integer.
        ArgumentError: (a ValueError) ``N`` below 1, or an unknown padding.
    """
    N = as_int("N", N, least=1, meaning="how many frames to join")
    if padding not in ("same", "constant"):
        raise ArgumentError(f"padding is {padding!r}, but must be 'same' or 'constant'.")
    return N


def cat_frames(
    tensor: torch.Tensor,
    N: int,
    dim: int,
    *,
    padding: Literal["same", "constant"] = "same",
    padding_value: float = 0.0,
    time_dim: int = -1,
    done_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Join each frame of a sequence with the ``N - 1`` before it, oldest first; see `CatFrames`.

    Args:
        tensor: frames, shape ``(*batch, T, *event)``.
        N: number of frames of a window.
        dim: axis along which they are joined, negative.
        padding: "same" takes the next frame of the window that is no padding; "constant" takes
            ``padding_value``.
        padding_value: see ``padding``.
        time_dim: the axis of time, negative.
        done_mask: which frames of each window belong to another episode and are padding, bool
            ``(*batch, T, N)``; what lies before the first frame always is.

    Returns:
        A new tensor, ``N`` times as long along ``dim``, of the same dtype and device.

    Raises:
        ArgumentError: (a ValueError) an axis is not negative, ``N`` below 1, or an unknown padding.
    """
    require_window(N, padding)
    axis = require_negative("time_dim", time_dim) % tensor.ndim
    place = torch.arange(N, device=tensor.device)
    first = torch.arange(tensor.shape[axis], device=tensor.device)[:, None] - (N - 1)
    padded = (first + place < 0).expand(*tensor.shape[: axis + 1], N)
    if done_mask is not None:
        padded = padded | done_mask
    nearest = torch.where(padded, N - 1, place).flip(-1).cummin(-1).values.flip(-1)
    fill = None if padding == "same" else padding_value
    return _joined(tensor, axis, first + nearest, padded, require_negative("dim", dim), fill)


def _joined(
    frames: torch.Tensor,
    axis: int,
    steps: torch.Tensor,
    padded: torch.Tensor,
    dim: int,
    fill: float | None,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """Join the frames of windows along ``dim``; see `Episodes` for ``steps``, ``padded`` and ``before``."""
    frames = frames.movedim(axis, 0)
    index, blank = steps.movedim(-2, 0), padded.movedim(-2, 0)  # T first, like the frames
    shape = (*index.shape[:-1], *(1,) * (frames.ndim - index.ndim + 1))
    parts = []
    for number in range(index.shape[-1]):
        at = index[..., number].reshape(shape).expand(frames.shape)
        is_blank = blank[..., number].reshape(shape)
        part = frames.gather(0, at)
        if before is not None:
            part = torch.where(is_blank, before.movedim(axis, 0).gather(0, at), part)
            is_blank = is_blank & blank.roll(-1, -1)[..., number].reshape(shape)
        if fill is not None:
            part = part.masked_fill(is_blank, fill)
        parts.append(part.movedim(0, axis))
    return torch.cat(parts, dim)


class Episodes:
    """Where the windows of recorded data begin and end.

    Attributes:
        axis: the time axis.
        steps: for each step and each frame of its window, the step it is taken from, int64
            ``(*batch, T, count)``; padded frames are taken from the end of the episode that is nearest.
        padded: which of these are padding, bool.
    """

    def __init__(self, td: TensorDictBase, done_key: Key, count: int, *, ahead: bool):
        if not td.batch_dims:
            raise ArgumentError(
                "recorded data needs a time axis, but the TensorDict has batch size (). Pass a rollout, "
                "or put the transform into an environment."
            )
        self.axis = time_axis(td)
        steps = torch.arange(td.shape[self.axis], device=td.device)
        first = self._first(td, done_key, steps, ahead=ahead)
        reach = torch.arange(count, device=td.device)
        wanted = steps[:, None] + (reach if ahead else reach - (count - 1))
        if ahead:
            last = (
                len(steps)
                - 1
                - self._first(td, done_key, steps, ahead=True, backwards=True).flip(-1)
            )
            nearest = wanted.minimum(last[..., None])
        else:
            nearest = wanted.maximum(first[..., None])
        self.steps, self.padded = nearest, nearest != wanted

    def _first(
        self,
        td: TensorDictBase,
        done_key: Key,
        steps: torch.Tensor,
        *,
        ahead: bool,
        backwards: bool = False,
    ) -> torch.Tensor:
        """For each step the first one of its episode in the data, time last."""
        done = td.get(("next", *as_path(done_key)), None)
        if done is None and not ahead:
            raise MissingKeyError(
                f"frames of recorded data are joined within episodes, but the data has no "
                f"{('next', *as_path(done_key))} that says where they end. Record it, or pass done_key=."
            )
        if done is None:
            shape = [size for axis, size in enumerate(td.batch_size) if axis != self.axis]
            return steps.new_zeros(*shape, len(steps))
        ended = done.flatten(td.batch_dims).any(-1) if done.ndim > td.batch_dims else done
        ended = ended.movedim(self.axis, -1)
        begins = torch.ones_like(ended)
        begins[..., 1:] = ended.flip(-1)[..., 1:] if backwards else ended[..., :-1]
        return torch.where(begins, steps, 0).cummax(-1).values

    def windows(
        self,
        frames: torch.Tensor,
        dim: int,
        fill: float | None,
        *,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Join the frames of each window along ``dim``; padding is ``fill``, or the nearest frame.

        Args:
            before: frames that precede those of the same step; the one of an episode's first step stands
                before all of ``frames``.
        """
        return _joined(frames, self.axis, self.steps, self.padded, dim, fill, before)
