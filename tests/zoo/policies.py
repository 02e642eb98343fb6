"""Policies that tests share."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase


class Replay:
    """Plays recorded actions, shape (*batch, time, *event), one a call."""

    def __init__(self, actions: torch.Tensor, key="action"):
        self.actions = actions
        self.key = key
        self.calls = 0

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = self.actions.select(len(tensordict.batch_size), self.calls)
        self.calls += 1
        return tensordict.set(self.key, action.clone())
