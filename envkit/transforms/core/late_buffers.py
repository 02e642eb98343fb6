"""Buffers of a module that exist once the shape of what they describe is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import nn

from envkit.data.inference import lasting
from envkit.data.paths import Key, as_path
from envkit.env.own_state import loads_strictly

__all__ = ["LateBuffers", "module_name"]


class LateBuffers(nn.Module):
    """Statistics of one entry: none at first, then buffers of the names of the class.

    A state dict that holds them makes them, so a module that has seen nothing loads what another has seen. One that
    holds none is of a module that had seen nothing: then all are zero, which means the same.
    """

    names: ClassVar[tuple[str, ...]] = ()

    @property
    def exist(self) -> bool:
        return self.names[0] in self._buffers

    def begin(self, made: Mapping[str, torch.Tensor]) -> None:
        """Register a buffer of each name, unless there are some. What is given was made in `lasting`."""
        if self.exist:
            return
        for name in self.names:
            self.register_buffer(name, made[name])

    @lasting()
    def copied(self) -> Self:
        """Give statistics of their own that begin where these are."""
        twin = type(self)()
        if self.exist:
            twin.begin({name: tensor.clone() for name, tensor in self.named_buffers()})
        return twin

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        given = {name: state_dict.get(prefix + name) for name in self.names}
        known = {name: value for name, value in given.items() if value is not None}
        if len(known) == len(self.names):
            with lasting():
                self.begin({name: torch.zeros_like(value) for name, value in known.items()})
        elif not known and self.exist and loads_strictly():
            own = dict(self.named_buffers())
            state_dict |= {prefix + name: torch.zeros_like(own[name]) for name in self.names}
        super()._load_from_state_dict(state_dict, prefix, *rest)


def module_name(key: Key) -> str:
    """Name the module that holds the statistics of an entry; names of modules have no dots."""
    return "/".join(as_path(key))
