"""Windows of steps within the episodes of recorded data.

`frames` joins the frames of each window. What ends an episode is read from the data's own flags.

Conventions
    window  the last ``count`` steps up to a step, or, looking ahead, the next ones from it on.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from envkit.data.paths import Key, as_path
from envkit.errors import ArgumentError, MissingKeyError
from envkit.transforms.postprocess import time_axis

__all__ = ["Episodes"]


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

    def windows(self, frames: torch.Tensor, dim: int, fill: float | None) -> torch.Tensor:
        """Join the frames of each window along ``dim``; padding is ``fill``, or the nearest frame."""
        frames = frames.movedim(self.axis, 0)
        lead = self.steps.ndim - 2
        index = self.steps.movedim(-2, 0)  # T first, like the frames
        padded = self.padded.movedim(-2, 0)
        event = frames.shape[1 + lead :]
        parts = []
        for number in range(index.shape[-1]):
            place = index[..., number].reshape(*index.shape[:-1], *(1,) * len(event))
            part = frames.gather(0, place.expand(frames.shape))
            if fill is not None:
                blank = padded[..., number].reshape(place.shape)
                part = part.masked_fill(blank, fill)
            parts.append(part)
        return torch.cat(parts, dim).movedim(0, self.axis)
