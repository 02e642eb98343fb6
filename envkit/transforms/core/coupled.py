"""Transforms in which the rows of a batch have an effect on each other, and the statistics that they keep.

Everything else is computed row by row, wherever a row is stepped. Values that need all rows together (running
statistics, for instance) needs to know which of them are new: `CoupledTransform` decides that, once
for each step and reset, and hands them over. `LateBuffers` holds statistics of one entry, which exist once its shape
is known. `SkipsRows` counts and warns of the rows that statistics leave out: one that is not finite would make them so
forever, and is shown as it came.

Conventions
    event  axes of an entry that belong to one row; all axes before are rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from array_api_compat import array_namespace
from tensordict import TensorDictBase
from torch import nn

from envkit import rules
from envkit.arrays.leaves import Leaves
from envkit.data.paths import Key, as_path
from envkit.env.own_state import loads_strictly
from envkit.process_wide import warn
from envkit.specs.annotations import reading_waits
from envkit.specs.lasting import lasting
from envkit.transforms.episodes import EpisodeTransform


class CoupledTransform(EpisodeTransform):
    """Base of transforms that look at all rows of a batch together.

    A concrete one writes `_observe_rows`, which sees the new values of each in_key before `_call`
    changes any, and for the rest what any `Transform` writes.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import CoupledTransform
        >>> class Centred(CoupledTransform):
        ...     def _observe_rows(self, key, rows):
        ...         self.mean = rows.mean(0)
        ...     def _apply_transform(self, value):
        ...         return value - self.mean
        >>> data = TensorDict(x=torch.tensor([1.0, 3.0]), batch_size=[2])
        >>> Centred(in_keys=["x"])(data)["x"]
        tensor([-1.,  1.])
    """

    def _observe_rows(self, key: Key, rows: torch.Tensor) -> None:
        """Look at the values that an in_key has got, all new rows together.

        Called once for each in_key that is there and has any: after a step with the rows that were
        stepped, after a reset with those that were reset, and with all rows of data the transform is
        called on.

        Args:
            key: the in_key.
            rows: its new values, shape ``(n, *event)``, at least one.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not write _observe_rows. Write it, or derive the class from "
            "Transform if its rows have no effect on each other."
        )

    def _event_of(self, key: Key, shape: Sequence[int]) -> tuple[int, ...]:
        """Return which axes of an entry are the event: by default ``shape``, all after the batch."""
        return tuple(shape)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        stepped = td.get(rules.STEP, None)
        self._observe(next_td, lambda key: stepped)
        return self._call(next_td)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        self._observe(td_reset, lambda key: self._reset_mask(td, as_path(key)[:-1]))
        return super()._reset(td, td_reset)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Look at the values of data, all rows, and transform them.

        Args:
            tensordict: recorded data, any batch size.
        """
        self._observe(tensordict, lambda key: None)
        return self._call(tensordict)

    def _observe(
        self, td: TensorDictBase | Leaves, mask_of: Callable[[Key], torch.Tensor | None]
    ) -> None:
        """Hand over the new rows of each in_key; ``mask_of`` selects them, None means all."""
        for key in self.in_keys:
            value = td.get(as_path(key), None)
            if value is None:
                continue
            event = self._event_of(key, value.shape[td.batch_dims :])
            self._observe_among(key, *by_rows(value, event, mask_of(key), td.batch_dims))

    def _observe_among(self, key: Key, rows: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Hand over the rows that ``mask`` selects, None means all."""
        rows = rows if mask is None else rows[mask]
        if len(rows):
            self._observe_rows(key, rows)


def by_rows(
    value: Any, event: Sequence[int], mask: Any | None, batch_dims: int
) -> tuple[Any, Any | None]:
    """Flatten an entry to rows, and a mask with it.

    Args:
        value: array of any namespace, its last axes ``event``.
        event: see the module.
        mask: which parts are meant; its axes are the leading ones of ``value``, or more. None: all.
        batch_dims: number of batch axes.

    Returns:
        Rows of shape ``(n, *event)``, and the mask ``(n,)``, if there is one.
    """
    xp, lead = array_namespace(value), tuple(value.shape[: value.ndim - len(event)])
    rows = xp.reshape(value, (-1, *event))
    if mask is None:
        return rows, None
    own = rules.reduce_mask(mask, lead, batch_dims)
    own = xp.reshape(own, (*own.shape, *(1,) * (len(lead) - own.ndim)))
    return rows, xp.reshape(xp.broadcast_to(own, lead), (-1,))


class LateBuffers(nn.Module):
    """Statistics of one entry: none at first, then buffers of the names of the class.

    A state dict that holds them makes them, so a module that has seen nothing loads what another has seen. One that
    holds none is of a module that had seen nothing: then all are as they begin, which means the same.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def first(self, name: str) -> float:
        """Return the value that a buffer begins with."""
        return 0.0

    @property
    def exist(self) -> bool:
        return self.names[0] in self._buffers

    def begin(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Register a buffer of each name, unless there are some. The buffers given were made in `lasting`."""
        if self.exist:
            return
        for name in self.names:
            self.register_buffer(name, tensors[name])

    @lasting()
    def copied(self) -> Self:
        """Return separate statistics that begin where these are."""
        twin = type(self)()
        if self.exist:
            twin.begin({name: tensor.clone() for name, tensor in self.named_buffers()})
        return twin

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        entries = {name: state_dict.get(prefix + name) for name in self.names}
        held = {name: value for name, value in entries.items() if value is not None}
        if len(held) == len(self.names):
            with lasting():
                self.begin({name: torch.zeros_like(value) for name, value in held.items()})
        elif not held and self.exist and loads_strictly():
            own = dict(self.named_buffers())
            begun = {name: torch.full_like(own[name], self.first(name)) for name in self.names}
            state_dict |= {prefix + name: value for name, value in begun.items()}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def module_name(key: Key) -> str:
    """Return the name of the module that holds the statistics of an entry; names of modules have no dots."""
    return "/".join(as_path(key))


_NAME = "skipped_rows"


class SkipsRows(nn.Module):
    """The part of a transform that counts the rows it skips.

    Attributes:
        skipped_rows: how many rows held a number that is not finite, int64, shape (); a buffer.
    """

    skipped_rows: torch.Tensor
    _has_warned = False

    def _begin_count(self) -> None:
        with lasting():
            self.register_buffer(_NAME, torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def _count_skipped(self, is_skipped: torch.Tensor) -> None:
        """Count the rows that are set, bool, and warn of the first."""
        self.skipped_rows.add_(is_skipped.sum().to(self.skipped_rows.device))
        self._warn_of_skipped()

    def _warn_of_skipped(self) -> None:
        """Warn once if rows were skipped; on a GPU, where reading the count would wait, do not."""
        if self._has_warned or reading_waits(self.skipped_rows) or not self.skipped_rows:
            return
        self._has_warned = True
        warn(
            f"{type(self).__name__} of {self.in_keys} was given a row that holds NaN or an infinite number. Such rows are left out of its "
            "statistics and shown as they are. Read skipped_rows for their number, and put a "
            "FiniteTensorDictCheck before this transform to find where they come from.",
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        if any(name.startswith(prefix) for name in state_dict):
            with lasting():  # dicts that were saved by other versions do not have it
                state_dict.setdefault(prefix + _NAME, torch.zeros((), dtype=torch.int64))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[call-arg]
