"""Values that begin anew with every episode: step counts, first-step flags and numbers of trajectories.

They travel in the data, beside the done flags they belong to, so a row can be stored and continued
anywhere. `EpisodeTransform` decides which level each value obeys; the merge of a reset
keeps the old values where nothing was reset; the arithmetic stands in `episode_counters`. The numbers of
`TrajCounter` are drawn from one counter by all copies of it; only that counter is kept by the transform.

Conventions
    governing level  a level of done flags with none above it: one reset mask decides for all below.
    flags            the done leaf of a level, shape (*batch, *event), most often (*batch, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.arrays import episode_counters
from envkit.arrays.leaves import Changes, Leaves
from envkit.data.arguments import as_bool, as_int
from envkit.data.inference import lasting
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.data.resets import collect_reset_masks
from envkit.errors import (
    ArgumentError,
    KeyCollisionError,
    MissingKeyError,
    NoParentError,
    ResetMaskError,
)
from envkit.specs import Bounded, Categorical, Composite, TensorSpec
from envkit.transforms.core.base import Transform
from envkit.transforms.core.fusable import FusableTransform
from envkit.transforms.core.wrapper import TransformHolder

__all__ = [
    "EpisodeTransform",
    "GoverningLevel",
    "InitTracker",
    "SharedByClones",
    "StepCounter",
    "TrajCounter",
    "counter_like",
]


class GoverningLevel(NamedTuple):
    """A governing level: its first done leaf, and the levels it decides for, itself too, each with its first."""

    flag: Path
    below: Mapping[Path, Path]


class EpisodeTransform(Transform):
    """Base of transforms whose values begin anew with an episode."""

    only_adds_done = True

    def _env(self) -> TransformHolder:
        """The env as seen just before this transform."""
        parent = self.parent
        if parent is None:
            raise self._missing_env()
        return parent

    def _missing_env(self) -> NoParentError:
        return NoParentError(
            f"{type(self).__name__} follows the episodes of an environment, and works only in "
            "one: TransformedEnv(env, transform)."
        )

    def _read_once(self, name: str, build: Callable[[], Any]) -> Any:
        """Give what ``build`` reads of the env before this transform: once where specs are locked."""
        holder = self.container
        return build() if holder is None else holder._declared.cached(f"{name}_{id(self)}", build)

    def _levels(self) -> dict[Path, GoverningLevel]:
        """The governing levels by path."""
        return self._read_once("levels", self._found_levels)

    def _found_levels(self) -> dict[Path, GoverningLevel]:
        levels = self._env().done_levels
        flags = {level: (*level, names[0]) for level, names in levels.items()}
        return {
            path: GoverningLevel(
                flags[path], {level: flag for level, flag in flags.items() if _is_in(level, path)}
            )
            for path in levels
            if rules.governing_level(path, levels) == path
        }

    def _first_flag(self, leaves: Leaves) -> Any:
        """Give the first done leaf, which is like the others of the batch."""
        return leaves[next(iter(self._levels().values())).flag]

    def _declare(
        self, spec: Composite, name: str, make: Callable[[TensorSpec], TensorSpec]
    ) -> None:
        """Declare ``name`` at every governing level, like the done leaf there."""
        for key, leaf in self._declared(name, make).items():
            spec[key] = leaf

    def _declared(
        self, name: str, make: Callable[[TensorSpec], TensorSpec]
    ) -> dict[Key, TensorSpec]:
        flags = self._env().full_done_spec
        return {
            as_key((*path, name)): make(flags[as_key(level.flag)])
            for path, level in self._levels().items()
        }

    def _reset_mask(self, td: TensorDictBase, level: Path) -> torch.Tensor | None:
        """Give the mask that decides for ``level`` in a reset; None resets all of it."""
        env = self.container
        if env is None:
            raise self._missing_env()
        masks = collect_reset_masks(td, env.done_levels, env.full_done_spec)
        governing = rules.governing_level(level, masks)
        return None if governing is None else masks[governing]

    def _level_of(self, key: Key, reset_key: Key | None = None) -> Path:
        """Give the level whose reset an entry obeys: that of ``reset_key``, or found by place.

        Raises:
            ResetMaskError: the entry stands at no level, and there are several.
        """
        if reset_key is not None:
            return as_path(reset_key)[:-1]
        levels = self._levels()
        governing = rules.governing_level(as_path(key)[:-1], levels)
        if governing is not None:
            return governing
        if len(levels) == 1:
            return next(iter(levels))
        raise ResetMaskError(
            f"{type(self).__name__} cannot tell which reset {key!r} obeys: the env has "
            f"{self._env().reset_keys}. Say so: pass reset_key=, or reset_keys= where there are several "
            "entries."
        )

    def _kept_elsewhere(
        self, td: TensorDictBase, level: Path, key: Key, fresh: torch.Tensor
    ) -> torch.Tensor:
        """Take ``fresh`` where ``level`` is reset and what ``td`` has at ``key`` elsewhere.

        Needed for entries that do not stand at the level that governs them.
        """
        mask, kept = self._reset_mask(td, level), td.get(key, None)
        if mask is None or kept is None:
            return fresh
        mask = rules.reduce_mask(mask, fresh.shape, len(td.batch_size))
        return rules.choose(mask, fresh, kept)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError(
            f"{type(self).__name__} follows the steps of an environment and cannot be called on "
            "data. Put it into a TransformedEnv."
        )


def _is_in(level: Path, other: Path) -> bool:
    return level[: len(other)] == other


def _name(given: Any, argument: str) -> str:
    if not isinstance(given, str):
        raise ArgumentError(
            f"{argument} is {given!r}, but must be a string: the entry is put beside the done flags "
            "of each level."
        )
    return given


def counter_like(flags: TensorSpec) -> TensorSpec:
    """Declare a count for each done flag."""
    most = torch.iinfo(torch.int64).max
    counter = Bounded(0, most, flags.shape, "cpu", torch.int64)  # other devices compare no bounds
    return counter if flags.device is None else counter.to(flags.device)


def _flag_like(flags: TensorSpec) -> TensorSpec:
    return Categorical(2, shape=flags.shape, dtype=torch.bool, device=flags.device)


# ------------------------------------------------------------------------------------------- counts


class StepCounter(FusableTransform, EpisodeTransform):
    """Count the steps of each episode, and cut episodes short at a limit.

    Adds ``step_count``, int64, in the shape of ``done``: 0 at a reset, one more at each step. With
    ``max_steps`` also ``truncated``, which is set from step ``max_steps`` on; ``terminated`` is never
    touched. Truncation of a level reaches the done levels below it.

    Args:
        max_steps: length of an episode in steps; None never truncates.
        truncated_key: name of the truncation flag beside each ``done``.
        step_count_key: name of the count beside each governing ``done``.
        update_done: set ``done`` where an episode is truncated.

    Raises:
        ArgumentError: (a ValueError) ``max_steps`` is below 1, or a name is not a string.
        KeyCollisionError: (a RuntimeError) at a look at the specs: the env has a state of that name in another form.
    """

    _in_repr = ("max_steps",)

    keeps_books = True

    def __init__(
        self,
        max_steps: int | None = None,
        truncated_key: str = "truncated",
        step_count_key: str = "step_count",
        update_done: bool = True,
    ):
        super().__init__()
        if max_steps is not None:
            meaning = "the length of an episode, or None for no limit"
            max_steps = as_int("max_steps", max_steps, least=1, meaning=meaning)
        self.max_steps = max_steps
        self.truncated_key = _name(truncated_key, "truncated_key")
        self.step_count_key = _name(step_count_key, "step_count_key")
        self.update_done = as_bool("update_done", update_done)

    @property
    def fuses(self) -> bool:
        """False where ``done`` is not to follow truncation: programs make it of the other two."""
        ends_alike = self.max_steps is None or (
            self.update_done and self.truncated_key == "truncated"
        )
        return ends_alike and super().fuses

    @property
    def step_count_keys(self) -> list[Key]:
        """Where the counts are."""
        return [as_key(path) for path in self.memory()]

    @property
    def all_done_keys(self) -> list[Key]:
        """The ``done`` flags of all levels of the env."""
        return self._beside_done("done")

    @property
    def all_truncated_keys(self) -> list[Key]:
        """Where truncation is written: one flag beside each ``done``."""
        return self._beside_done(self.truncated_key)

    def _beside_done(self, name: str) -> list[Key]:
        return [as_key((*path, name)) for path in self._env().done_levels]

    def memory(self) -> list[Path]:
        return [(*path, self.step_count_key) for path in self._levels()]

    def constants(self) -> dict[str, Any]:
        return {} if self.max_steps is None else {"max_steps": self.max_steps}

    def step_leaves(self, root: Leaves, following: Leaves, constants: Mapping[str, Any]) -> Changes:
        changes: dict[Path, Any] = {}
        for path, level in self._levels().items():
            count_path = (*path, self.step_count_key)
            before = root.get(count_path)
            if before is None:
                before = episode_counters.uncounted(following[level.flag])
            count = changes[count_path] = episode_counters.counted(before)
            if self.max_steps is not None:
                cut = count >= constants["max_steps"]
                changes |= self._truncated(following, level, cut)
        return changes

    def _truncated(self, following: Leaves, level: GoverningLevel, cut: Any) -> dict[Path, Any]:
        changes = {}
        for below, flag in level.below.items():
            path, done = (*below, self.truncated_key), (*below, "done")
            own, before = episode_counters.spread(cut, following[flag]), following.get(path)
            truncated = changes[path] = own if before is None else own | before
            if self.update_done and following.get(done) is not None:
                changes[done] = rules.done_from(following[done], truncated)
        return changes

    def reset_leaves(self, fresh: Leaves, constants: Mapping[str, Any]) -> Changes:
        changes: dict[Path, Any] = {}
        for path, level in self._levels().items():
            changes[(*path, self.step_count_key)] = episode_counters.uncounted(fresh[level.flag])
            for below, flag in level.below.items() if self.max_steps is not None else ():
                if fresh.get((*below, self.truncated_key)) is None:
                    unset = episode_counters.unset(fresh[flag])
                    changes[(*below, self.truncated_key)] = unset
        return changes

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        self._declare(observation_spec, self.step_count_key, counter_like)
        return observation_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        for key, leaf in self._declared(self.step_count_key, counter_like).items():
            own = state_spec.get(key, None)
            if own is not None and (own.shape, own.dtype) != (leaf.shape, leaf.dtype):
                raise KeyCollisionError(
                    f"StepCounter writes {key!r}, shape {tuple(leaf.shape)}, but the env keeps a state of that name "
                    f"there, {own.dtype} of shape {tuple(own.shape)}. Choose another: "
                    f"StepCounter(max_steps={self.max_steps}, step_count_key='elapsed')."
                )
        self._declare(state_spec, self.step_count_key, counter_like)
        return state_spec

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        if self.max_steps is None:
            return done_spec
        levels = self._env().done_levels
        for level, names in levels.items():
            done_spec[as_key((*level, self.truncated_key))] = _flag_like(
                done_spec[as_key((*level, names[0]))]
            )
        return done_spec


class InitTracker(FusableTransform, EpisodeTransform):
    """Mark the first root of every episode.

    Adds a bool entry in the shape of ``done`` beside each governing ``done``: True in what a reset
    produced, where it reset; False in every ``next``.

    Args:
        init_key: name of the entry.
    """

    _in_repr = ("init_key",)

    keeps_books = True

    def __init__(self, init_key: str = "is_init"):
        super().__init__()
        self.init_key = _name(init_key, "init_key")

    @property
    def init_keys(self) -> list[Key]:
        """Where the marks are."""
        return [as_key((*level, self.init_key)) for level in self._levels()]

    def step_leaves(self, root: Leaves, following: Leaves, constants: Mapping[str, Any]) -> Changes:
        return self._marks(following, episode_counters.unset)

    def reset_leaves(self, fresh: Leaves, constants: Mapping[str, Any]) -> Changes:
        return self._marks(fresh, lambda flags: ~episode_counters.unset(flags))

    def _update_unreset_rows(self, td: TensorDictBase, td_reset: TensorDictBase) -> None:
        dones = self._env().full_done_spec
        for path, level in self._levels().items():  # what is not reset now is not at its start
            event = dones[as_key(level.flag)].shape[dones.ndim :]
            began = torch.zeros(*td.batch_size, *event, dtype=torch.bool, device=td_reset.device)
            td.set((*path, self.init_key), began)

    def _marks(self, leaves: Leaves, make: Callable[[Any], Any]) -> Changes:
        changes = {}
        for path, level in self._levels().items():
            changes[(*path, self.init_key)] = make(leaves[level.flag])
        return changes

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        self._declare(observation_spec, self.init_key, _flag_like)
        return observation_spec


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
