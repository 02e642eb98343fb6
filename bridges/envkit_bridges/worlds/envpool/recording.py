"""A whole non-stop rollout of a pool, from what the library gives: arrays are stacked over time once.

No TensorDict is built for a step but the one that the policy sees, and none for random actions. The results are those of
`step_and_maybe_reset` in a loop, bit for bit (`test_recording_gives_what_stepping_does`). What a policy does that
this way has no room for is met by going on step by step from there.

Conventions
    leaves  tensors by path, the rows in front.
    time    leading axis in memory; the result shows it last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.data.paths import Path, as_key, tensordict_of
from envkit.data.transition import leaves
from envkit_bridges.gym.codecs import Codec
from envkit_bridges.gym.rows import DONE
from envkit_bridges.worlds.envpool.rows import RowPool

__all__ = ["Recorder"]

REWARD = ("reward",)
Leaves = dict[Path, torch.Tensor]


class Recorder:
    """The roots and outcomes of a rollout.

    Args:
        rows: the pool.
        observed, acted: codecs of one row.
        root: where to start.
    """

    def __init__(self, rows: RowPool, observed: Codec, acted: Codec, root: TensorDictBase):
        self.rows, self.observed, self.acted = rows, observed, acted
        self.paths = [*observed.leaves, *DONE]
        self._root: Leaves = {path: root.get(as_key(path), None) for path in self.paths}
        self._undone = dict.fromkeys(DONE, torch.zeros(rows.count, 1, dtype=torch.bool))
        self._roots: list[Leaves] = []
        self._nexts: list[Leaves] = []

    @property
    def count(self) -> int:
        """Steps that were recorded."""
        return len(self._nexts)

    def others(self, root: TensorDictBase) -> Leaves | None:
        """Give what else a root holds; None where that needs steps one by one, or what the env gives is not there."""
        if any(value is None for value in self._root.values()):
            return None
        own = {*self.paths, *self.acted.leaves}
        others = {path: value for path, value in leaves(root) if path not in own}
        plain = all(path != REWARD and is_plain(path, value) for path, value in others.items())
        return others if plain else None

    def random(self, actions: torch.Tensor, others: Leaves) -> TensorDict:
        """Take steps with actions of shape ``(steps, rows, *action)``; ``others`` stand at each root."""
        (path,) = self.acted.leaves
        for index, drawn in enumerate(actions):
            self.step(self.acted.decode_arrays({path: drawn}), is_last=index == len(actions) - 1)
        kept = {at: value.expand(self.count, *value.shape).clone() for at, value in others.items()}
        return self.result({**kept, path: actions})

    def acting(
        self,
        root: TensorDictBase,
        steps: int,
        act: Callable[[TensorDictBase], TensorDictBase],
        taken: Callable[[TensorDictBase], Any],
        go_on: Callable[[TensorDictBase, int], Iterator[TensorDictBase]],
    ) -> TensorDictBase | list[TensorDictBase]:
        """Act and step.

        Args:
            root: where to start; what else it holds is carried on, as a policy's own entries are.
            steps: most steps.
            act: the policy.
            taken: from its output to actions of the library.
            go_on: does the rest, step by step, from an acted root, with so many steps at most.
        """
        written = Written({*self.acted.leaves, REWARD})
        td, current, batch = root, self._root, root.batch_size
        while True:
            td = act(td)
            given = written.take(td, current)
            if given is None or not given.keys() >= self.acted.leaves.keys():
                rest = go_on(td, steps - self.count)
                done = self.result(written.stacks(self.count)).unbind(-1) if self.count else ()
                return [*done, *rest]
            self.step(taken(td), is_last=self.count == steps - 1)
            if self.count == steps:
                return self.result(written.stacks(steps))
            current = self._root
            td = tensordict_of({**current, **written.others}, batch, root.device)

    def step(self, actions: Any, *, is_last: bool) -> None:
        """Step all rows, and reset what has ended, but after the last step."""
        self._roots.append(self._root)
        stepped = self.rows.recv(self.rows.send(actions))
        observations, rewards, terminated, truncated, _ = stepped
        made = self.observed.encode_arrays(observations)
        over = terminated | truncated
        flags = dict(zip(DONE, (over, terminated, truncated), strict=True))
        column = {path: torch.from_numpy(flag).unsqueeze(-1) for path, flag in flags.items()}
        paid = torch.from_numpy(rewards).unsqueeze(-1)
        self._nexts.append({**made, REWARD: paid, **column})
        if not is_last:
            self._root = {**self._following(made, over), **self._undone}

    def _following(self, made: Leaves, over: np.ndarray) -> Leaves:
        """Give the observations of the next root: fresh ones where an episode has ended."""
        ended = np.flatnonzero(over).astype(np.int32)
        return made if not len(ended) else begun(self.rows, self.observed, made, ended)

    def result(self, others: Leaves) -> TensorDict:
        """Show all steps with time as the last batch axis; ``others`` are stacked over time already."""
        stacks = {
            **{path: _stacked(self._roots, path) for path in self.paths},
            **others,
            **{("next", *path): _stacked(self._nexts, path) for path in (*self.paths, REWARD)},
        }
        last = {path: stack.movedim(0, 1) for path, stack in stacks.items()}
        return tensordict_of(last, torch.Size((self.rows.count, self.count)), torch.device("cpu"))


def begun(rows: RowPool, observed: Codec, known: Leaves, ended: np.ndarray) -> Leaves:
    """Reset what has ended, and give ``known`` with the first observations of these rows, in new tensors."""
    observations, _ = rows.reset(ended)
    index = torch.from_numpy(ended.astype(np.int64))
    fresh = observed.encode_arrays(observations)
    return {path: known[path].index_copy(0, index, value) for path, value in fresh.items()}


def _stacked(steps: list[Leaves], path: Any) -> torch.Tensor:
    return torch.stack([step[path] for step in steps])


def is_plain(path: Path, value: Any) -> bool:
    """Say whether an entry does no more than stand at the root of a step."""
    return (
        isinstance(value, torch.Tensor)
        and path[0] != "next"
        and path[-1] not in (rules.STEP, rules.RESET)
    )


class Written:
    """What the policy leaves at the root, step by step."""

    def __init__(self, dropped: set[Path]):
        self._dropped = dropped
        self._values: dict[Path, list[torch.Tensor]] = {}
        self.others: Leaves = {}

    def take(self, td: TensorDictBase, current: Leaves) -> Leaves | None:
        """Note the entries that the env has not made itself, and give them.

        Returns:
            None, with nothing noted, when ``td`` holds what must be stepped one by one: other
            entries than before, roots that were replaced or taken out, masks, a preset ``next``.
        """
        given: Leaves = {}
        roots = 0
        for path, value in leaves(td):
            known = current.get(path)
            if known is value:
                roots += 1
            elif known is not None or not is_plain(path, value):
                return None
            else:
                given[path] = value
        if roots < len(current) or (self._values and given.keys() != self._values.keys()):
            return None
        for path, value in given.items():
            self._values.setdefault(path, []).append(value)
        dropped = self._dropped
        self.others = {path: value for path, value in given.items() if path not in dropped}
        return given

    def stacks(self, count: int) -> Leaves:
        """Stack the entries of the first ``count`` steps along time."""
        return {path: torch.stack(values[:count]) for path, values in self._values.items()}
