"""Stored steps in less memory: what an observation has changed by, in few bits."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDictBase

from envkit.data.arguments import as_bool
from envkit.data.paths import Path, as_path, take_out
from envkit.errors import ArgumentError, OptionError
from envkit.transforms.core.transform import Keys, Transform

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


class NextObservationDelta(Transform):
    """Store ``("next", key)`` of a replay buffer as its difference to ``key``, in a smaller dtype.

    The buffer holds ``("next", "delta", key)`` in place of ``("next", key)``; samples have ``("next", key)`` again, rounded,
    also at the ends of episodes. An environment that it is in gives whole observations, and so does a collector; pass
    ``postproc=delta.inv`` to the collector to make its batches small.

    Args:
        in_keys: observations. None: all that the environment it is in has; a buffer needs them.
        delta_dtype: in which differences are stored, floating. A number beyond its range becomes infinite.
        restore_dtype: in which samples have the observation; "root": as ``key``.
        drop_delta: samples do not have the difference.
        excluded_dtypes: observations of these are left as they are where ``in_keys`` is None.

    Raises:
        ArgumentError: (a ValueError) a dtype is not floating.
        OptionError: (a TypeError) data is stored or sampled, and there are no ``in_keys``.

    Example:
        >>> from envkit import GymEnv, NextObservationDelta
        >>> env = GymEnv("Pendulum-v1")
        >>> delta = NextObservationDelta(in_keys=["observation"])
        >>> data = env.rollout(3)
        >>> stored = delta.inv(data)
        >>> stored["next", "delta", "observation"].dtype
        torch.float16
        >>> ("next", "observation") in stored.keys(True)
        False
        >>> delta(stored)["next", "observation"].shape
        torch.Size([3, 3])
        >>> env.close()
    """

    computes_only = True
    only_adds_done = True

    _in_repr = ("delta_dtype",)

    def __init__(
        self,
        in_keys: Keys = None,
        *,
        delta_dtype: torch.dtype = torch.float16,
        restore_dtype: torch.dtype | Literal["root"] = "root",
        drop_delta: bool = True,
        excluded_dtypes: tuple[torch.dtype, ...] = _INTEGERS,
    ):
        super().__init__(in_keys)
        self._finds_keys = in_keys is None
        for name, dtype in (("delta_dtype", delta_dtype), ("restore_dtype", restore_dtype)):
            is_root = name == "restore_dtype" and dtype == "root"
            if not is_root and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ArgumentError(
                    f"{name} is {dtype!r}, but must be a floating dtype. Pass torch.float16, for example."
                )
        self.delta_dtype = delta_dtype
        self.restore_dtype = restore_dtype
        self.drop_delta = as_bool("drop_delta", drop_delta)
        self.excluded_dtypes = tuple(excluded_dtypes)

    def _compressed_keys(self) -> list[Path]:
        """Return the observations; without ``in_keys`` those of the environment."""
        if not self._finds_keys:
            return [as_path(key) for key in self.in_keys]
        parent = self.parent
        if parent is None:
            raise OptionError(
                "in_keys is None, but NextObservationDelta is in no environment that could name its observations. Pass "
                "in_keys=['observation'], for example."
            )
        leaves = parent.full_observation_spec.items(True, True)
        return [
            as_path(key)
            for key, leaf in leaves
            if leaf.dtype is not None
            and leaf.dtype.is_floating_point
            and leaf.dtype not in self.excluded_dtypes
        ]

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        """Replace next observations by differences; the input of a step has none."""
        if td.get("next", None) is None:
            return td
        for path in self._compressed_keys():
            before, after = td.get(path, None), td.get(("next", *path), None)
            if before is not None and after is not None:
                td.set(("next", "delta", *path), (after - before).to(self.delta_dtype))
                del td["next", *path]
        return td

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute next observations of recorded steps from differences.

        Args:
            tensordict: steps of a buffer, any batch size; it is written to.
        """
        for path in self._compressed_keys():
            before, delta = (
                tensordict.get(path, None),
                tensordict.get(("next", "delta", *path), None),
            )
            if before is None or delta is None:
                continue
            dtype = before.dtype if self.restore_dtype == "root" else self.restore_dtype
            tensordict.set(("next", *path), before.to(dtype) + delta.to(dtype))
            if self.drop_delta:
                take_out(tensordict, ("next", "delta", *path))
        return tensordict
