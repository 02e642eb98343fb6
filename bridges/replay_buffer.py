"""Transforms in the replay buffers of TorchRL.

A buffer of TorchRL runs both passes of its own transforms: the inverse one on what is written, the
forward one on what is sampled. Anything else it takes for a function and calls on samples alone, so an
inverse pass would be left out without a word. `for_replay_buffer` gives a transform that class. It does
not know which transforms there are.
"""

from __future__ import annotations

from tensordict import TensorDictBase
from torchrl.envs import transforms as torchrl

from envkit.transforms.base import Transform
from envkit.transforms.compose import as_transform

__all__ = ["for_replay_buffer"]


def for_replay_buffer(transform: Transform) -> torchrl.Transform:
    """Give a transform as one that TorchRL's replay buffers run both ways.

    Pass the result as ``ReplayBuffer(transform=...)``, to ``append_transform`` or to
    ``insert_transform``. What is extended goes through `Transform.inv`, what is sampled through
    `Transform.forward`. The buffer puts transforms into eval mode: running statistics stand still.

    Args:
        transform: a transform, a `Compose`, or a function ``td -> td``.

    Raises:
        ArgumentError: (a ValueError) it is none of these.
        ModuleNotFoundError: when the name is imported: TorchRL is not installed.
    """
    return _BothWays(as_transform(transform))


class _BothWays(torchrl.Transform):
    """A transform of TorchRL whose passes are those of one of ours."""

    def __init__(self, transform: Transform):
        super().__init__()
        self.transform = transform

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.transform(tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.transform(next_tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.transform.inv(tensordict)
