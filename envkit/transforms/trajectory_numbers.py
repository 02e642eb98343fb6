"""Numbers of trajectories, drawn from one counter by all copies of a transform.

A number stands in the data beside the done flags whose resets begin a trajectory; `episodes` decides which these
are. Only the counter is kept by the transform.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.arrays import episode_counters
from envkit.data.inference import lasting
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.errors import MissingKeyError
from envkit.specs import Composite
from envkit.transforms.episodes import EpisodeTransform, GoverningLevel, counter_like

__all__ = ["SharedByClones", "TrajCounter"]


class SharedByClones:
    """The memory that an `EnvCreator` gave the clones of a module: another creator gives later clones the same.

    Clones hold one such object; copies and pickles begin with an empty one.

    Attributes:
        state: what holds the memory; None before the first creator.
    """

    def __init__(self) -> None:
        self.state: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class TrajCounter(EpisodeTransform):
    """Number the trajectories from 0 on, in the order in which they begin.

    Adds an int64 entry in the shape of ``done`` beside each governing ``done``, constant within a
    trajectory. Clones, also those in several `EnvCreator`, and copies made by one, draw from the same numbers.

    Args:
        out_key: name of the entry; a nested key stands beside the ``done`` of its place alone.

    Raises:
        MissingKeyError: (a KeyError, when specs are read) no done flag stands at the place of a nested
            ``out_key``.
    """

    keeps_books = True
    next_number: torch.Tensor

    def __init__(self, out_key: Key = "traj_count"):
        super().__init__()
        self.out_key = as_key(as_path(out_key))
        with lasting():
            self.register_buffer("next_number", torch.zeros((), dtype=torch.int64))
        self.shared_lock: AbstractContextManager = nullcontext()  # see envkit.batched.creator
        self.shared_by_clones = SharedByClones()

    def _found_levels(self) -> dict[Path, GoverningLevel]:
        levels = super()._found_levels()
        place = as_path(self.out_key)[:-1]
        if not place:
            return levels
        names = self._env().done_levels.get(place)
        if names is None:
            raise MissingKeyError(
                f"out_key is {self.out_key!r}, but the env has no done flags at {as_key(place)!r}; they stand "
                f"at {[as_key(path) if path else () for path in self._env().done_levels]}. Put it beside "
                "these, or pass a name alone."
            )
        flag = (*place, names[0])
        return {place: GoverningLevel(flag, {place: flag})}

    @property
    def _name(self) -> str:
        return as_path(self.out_key)[-1]

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        for path, level in self._levels().items():
            key = (*path, self._name)
            number = td.get(key, None)
            if number is None:
                number = episode_counters.uncounted(next_td.get(level.flag))
            next_td.set(key, number)
        return next_td

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        for path, level in self._levels().items():
            flags = td_reset.get(level.flag)
            begins = torch.ones_like(flags)
            mask = self._reset_mask(td, path)
            if mask is not None:
                begins &= mask.reshape((*mask.shape, *(1,) * (flags.ndim - mask.ndim)))
            td_reset.set((*path, self._name), self._draw(begins))
        return td_reset

    def _draw(self, begins: torch.Tensor) -> torch.Tensor:
        """Give each set element of ``begins`` a number of its own; the others get any."""
        place = begins.flatten().cumsum(0).reshape(begins.shape)
        with self.shared_lock:
            first = int(self.next_number)
            self.next_number += int(begins.sum())
        return first + place - 1

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        self._declare(observation_spec, self._name, counter_like)
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        self._declare(state_spec, self._name, counter_like)
        return state_spec
