"""Transforms in the replay buffers of TorchRL.

A buffer of TorchRL runs both passes of its own transforms: the inverse one on what is written, the
forward one on what is sampled. Anything else it takes for a function and calls on samples alone, so an
inverse pass would be left out without a word. `for_replay_buffer` gives a transform that class, and
imports TorchRL only then. It does not know which transforms there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envkit.transforms.core.base import Transform
from envkit.transforms.core.compose import as_transform

if TYPE_CHECKING:
    from torchrl.envs.transforms import Transform as TorchRLTransform

__all__ = ["for_replay_buffer"]


def for_replay_buffer(transform: Transform) -> TorchRLTransform:
    """Give a transform as one that TorchRL's replay buffers run both ways.

    Pass the result as ``ReplayBuffer(transform=...)``, to ``append_transform`` or to
    ``insert_transform``. What is extended goes through `Transform.inv`, what is sampled through
    `Transform.forward`. Running statistics (`VecNorm`)
    learn from what is sampled too: pass a ``frozen_copy()`` for them to stand still.

    Args:
        transform: a transform, a `Compose`, or a function ``td -> td``.

    Raises:
        ArgumentError: (a ValueError) it is none of these.
        ModuleNotFoundError: TorchRL is not installed.
    """
    from bridges.exports.replay_transform import BothWays

    return BothWays(as_transform(transform))
