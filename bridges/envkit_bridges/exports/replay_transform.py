"""A transform of envkit as one of TorchRL's, whose replay buffers run both passes of those.

It stands in a module of its own because importing TorchRL changes the process: how it starts others, for
one. `replay_buffer` imports this when it is called.
"""

from __future__ import annotations

from tensordict import TensorDictBase
from torchrl.envs import transforms as torchrl

from envkit.transforms.core.base import Transform

__all__ = ["BothWays"]


class BothWays(torchrl.Transform):
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
