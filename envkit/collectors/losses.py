"""What a batch looks like whose worker was lost: the episodes that nobody goes on with end first.

Conventions
    root  what the next step of a lost env would have begun with, batch size (*env_batch,).
"""

from __future__ import annotations

from typing import cast

import torch
from tensordict import TensorDictBase

from envkit.collectors.runner import POLICY_VERSION
from envkit.data.paths import as_key
from envkit.data.transition import leaves

__all__ = ["with_loss"]

_CUT = ("truncated", "done")


def with_loss(data: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
    """Put a step in front in which the episodes of a lost worker end.

    It begins and ends at ``root``, with no reward, ``truncated`` and ``done``; the action and what a policy writes
    beside it are zero.

    Args:
        data: what the new worker has collected, one step less than a batch has.
        root: of the lost one; it holds ``("collector", "traj_ids")``.
    """
    time = data.batch_dims - 1
    first = cast(TensorDictBase, data[..., :1])
    lost = cast(TensorDictBase, first.apply(torch.zeros_like))
    for path, value in leaves(root):
        if not isinstance(value, torch.Tensor):
            continue
        for place in (path, ("next", *path)):
            if lost.get(as_key(place), None) is not None:
                lost.set(as_key(place), value.unsqueeze(time))
    for path, flags in leaves(lost.get("next")):
        if path[-1] in _CUT:
            lost.set(as_key(("next", *path)), torch.ones_like(flags))
    for key in POLICY_VERSION:
        if (version := lost.get(key, None)) is not None:
            version.copy_(first.get(key))
    return cast(TensorDictBase, torch.cat([lost, data], time))
