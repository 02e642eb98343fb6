"""What begins again with every episode, and what ends one: step counts, first-step flags, numbers of trajectories,
ends.

Values travel in the data, beside the done flags they belong to, so a row can be stored and continued
anywhere. `EpisodeTransform` decides which level each value obeys; the merge of a reset
keeps the old values where nothing was reset; the arithmetic is in `episode_counters`. The numbers of
`TrajCounter` are drawn from one counter by all copies of it; only that counter is kept by the transform.
Besides the env, a limit of steps, chance, a condition or a lost life ends an episode.

Conventions
    governing level  a level of done flags with none above it: one reset mask decides for all below.
    flags            the done leaf of a level, shape (*batch, *event), most often (*batch, 1).
    beside           an entry of the same node: ``("agents", "done")`` is beside ``("agents", "step_count")``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right

from envkit import rules
from envkit.arrays import episode_counters
from envkit.arrays.elementwise import Array
from envkit.arrays.integers import as_int
from envkit.arrays.leaves import Changes, Leaves
from envkit.data.arguments import as_bool, as_number, require_callable
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.data.resets import collect_reset_masks
from envkit.errors import (
    ArgumentError,
    KeyCollisionError,
    MissingKeyError,
    NoParentError,
    NotCallableError,
    PlacementError,
    ResetMaskError,
)
from envkit.specs import Bounded, Categorical, Composite, TensorSpec, Unbounded
from envkit.specs.lasting import lasting
from envkit.transforms.core.fusable import FusableTransform
from envkit.transforms.core.transform import Transform, editable
from envkit.transforms.core.wrapper import TransformHolder


class GoverningLevel(NamedTuple):
    """A governing level: its first done leaf, and the levels it decides for, itself too, each with its first."""

    flag: Path
    below: Mapping[Path, Path]


class EpisodeTransform(Transform):
    """Base of transforms whose values begin again with an episode."""

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
        """Return what ``build`` reads of the env before this transform: once where specs are locked."""
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
                flags[path],
                {level: flag for level, flag in flags.items() if level[: len(path)] == path},
            )
            for path in levels
            if rules.governing_level(path, levels) == path
        }

    def _first_flag(self, leaves: Leaves) -> Any:
        """Return the first done leaf, which is like the others of the batch."""
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
        """Return the mask that decides for ``level`` in a reset; None resets all of it."""
        env = self.container
        if env is None:
            raise self._missing_env()
        masks = collect_reset_masks(td, env.done_levels, env.full_done_spec)
        governing = rules.governing_level(level, masks)
        return None if governing is None else masks[governing]

    def _begins(self, td: TensorDictBase, level: Path, flags: torch.Tensor) -> torch.Tensor:
        """Return where a reset begins episodes, like the done flags of a level."""
        begins, mask = torch.ones_like(flags), self._reset_mask(td, level)
        return begins if mask is None else begins & expand_as_right(mask, flags)

    def _level_of(self, key: Key, reset_key: Key | None = None) -> Path:
        """Return the level whose reset an entry obeys: that of ``reset_key``, or found by place.

        Raises:
            ResetMaskError: the entry is at no level, and there are several.
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

        Needed for entries that are not at the level that governs them.
        """
        mask, kept = self._reset_mask(td, level), td.get(key, None)
        if mask is None or kept is None:
            return fresh
        mask = rules.reduce_mask(mask, fresh.shape, len(td.batch_size))
        return rules.choose(mask, fresh, kept)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        raise NotCallableError(
            f"{type(self).__name__} follows the steps of an environment and cannot be called on "
            "data. Put it into a TransformedEnv of envkit."
        )


def _name(name: object, argument: str, example: str) -> str:
    if not isinstance(name, str):
        raise ArgumentError(
            f"{argument} is {name!r}, but must be a string: the entry is put beside the done flags "
            f"of each level. Pass a name, e.g. {argument}={example!r}."
        )
    return name


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

    Example:
        >>> from envkit import GymEnv, StepCounter
        >>> env = GymEnv("CartPole-v1").append_transform(StepCounter(max_steps=2))
        >>> env.rollout(10)["next", "truncated"].flatten()
        tensor([False,  True])
        >>> env.close()
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
        self.truncated_key = _name(truncated_key, "truncated_key", "truncated")
        self.step_count_key = _name(step_count_key, "step_count_key", "step_count")
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

    def _truncated(self, following: Leaves, level: GoverningLevel, cut: Array) -> dict[Path, Any]:
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
            held = state_spec.get(key, None)
            if held is not None and (held.shape, held.dtype) != (leaf.shape, leaf.dtype):
                raise KeyCollisionError(
                    f"StepCounter writes {key!r}, shape {tuple(leaf.shape)}, but the env keeps a state of that name "
                    f"there, {held.dtype} of shape {tuple(held.shape)}. Choose another: "
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
    produced, where it reset; False in every ``next``. Rows that are not reset keep their marks, or get False where the
    data has none.

    Args:
        init_key: name of the entry.

    Example:
        >>> from envkit import GymEnv, InitTracker
        >>> env = GymEnv("CartPole-v1").append_transform(InitTracker())
        >>> env.rollout(3)["is_init"].flatten()
        tensor([ True, False, False])
        >>> env.close()
    """

    _in_repr = ("init_key",)

    keeps_books = True

    def __init__(self, init_key: str = "is_init"):
        super().__init__()
        self.init_key = _name(init_key, "init_key", "is_init")

    @property
    def init_keys(self) -> list[Key]:
        """Where the marks are."""
        return [as_key((*level, self.init_key)) for level in self._levels()]

    def step_leaves(self, root: Leaves, following: Leaves, constants: Mapping[str, Any]) -> Changes:
        return self._marks(following, episode_counters.unset)

    def reset_leaves(self, fresh: Leaves, constants: Mapping[str, Any]) -> Changes:
        return self._marks(fresh, lambda flags: ~episode_counters.unset(flags))

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        for path, level in self._levels().items():
            begins = self._begins(td, path, td_reset.get(level.flag))
            td_reset.set((*path, self.init_key), begins)
        return td_reset

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
        out_key: name of the entry; a nested key is beside the ``done`` of its place alone.

    Raises:
        MissingKeyError: (a KeyError, when specs are read) no done flag is at the place of a nested
            ``out_key``.

    Example:
        >>> from envkit import GymEnv, SerialEnv, TrajCounter
        >>> env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
        >>> env = env.append_transform(TrajCounter())
        >>> env.rollout(3)["traj_count"].squeeze(-1)
        tensor([[0, 0, 0],
                [1, 1, 1]])
        >>> env.reset()["traj_count"].flatten()
        tensor([2, 3])
        >>> env.close()
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
                f"out_key is {self.out_key!r}, but the env has no done flags at {as_key(place)!r}; they are "
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
            begins = self._begins(td, path, td_reset.get(level.flag))
            td_reset.set((*path, self._name), self._draw(begins))
        return td_reset

    def _draw(self, begins: torch.Tensor) -> torch.Tensor:
        """Number the set elements of ``begins``; the others get any number."""
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


# -------------------------------------------------------------------------------------------- ends


def _probability(name: str, value: float) -> float:
    return as_number(name, value, least=0, most=1, meaning="a probability")


class RandomTruncationTransform(EpisodeTransform):
    """Cut episodes short at random, so that envs that began together do not end together.

    The first episode of each env is cut after 1 to ``max_horizon`` steps. Each later one is cut after
    ``min_horizon`` to ``max_horizon`` steps with a probability, and else after ``max_horizon``. It reads the
    count of a `StepCounter` before it.

    The horizons belong to this object, one for each element of the flags; they are drawn from the seed
    of the env.

    Args:
        min_horizon, max_horizon: bounds of the drawn lengths, both possible.
        prob: probability that an episode gets a drawn length.
        first_episode_prob: that of the episode after the first one; ``prob`` by default.
        step_count_key: the count; a string is looked for in all nodes.
        truncated_key, done_key: flags that are set; a string names the entry beside the count.

    Raises:
        ArgumentError: (a ValueError) a horizon is below 1, they are in the wrong order, or a probability is
            not between 0 and 1.
        PlacementError: (a RuntimeError) when specs are read: no `StepCounter` comes before it.

    Example:
        >>> from envkit import Compose, GymEnv, RandomTruncationTransform, StepCounter
        >>> cut = RandomTruncationTransform(min_horizon=2, max_horizon=4)
        >>> env = GymEnv("CartPole-v1").append_transform(Compose(StepCounter(), cut))
        >>> len(env.rollout(100)) <= 4
        True
        >>> env.close()
    """

    _in_repr = ("min_horizon", "max_horizon", "prob")

    _changes_with_use = ("_horizons", "_begun", "_generator")

    def __init__(
        self,
        min_horizon: int,
        max_horizon: int,
        prob: float = 0.0,
        first_episode_prob: float | None = None,
        *,
        step_count_key: Key = "step_count",
        truncated_key: Key = "truncated",
        done_key: Key = "done",
    ):
        super().__init__()
        self.min_horizon = as_int("min_horizon", min_horizon, least=1, meaning="a number of steps")
        self.max_horizon = as_int("max_horizon", max_horizon, least=1, meaning="a number of steps")
        if self.min_horizon > self.max_horizon:
            raise ArgumentError(
                f"min_horizon is {min_horizon} and max_horizon {max_horizon}, but must be in that order. "
                "Swap them."
            )
        self.prob = _probability("prob", prob)
        given = self.prob if first_episode_prob is None else first_episode_prob
        self.first_episode_prob = _probability("first_episode_prob", given)
        self.step_count_key = step_count_key
        self.truncated_key = truncated_key
        self.done_key = done_key
        self._counts: list[Path] = []
        self._horizons: dict[Path, torch.Tensor] = {}
        self._begun: dict[Path, torch.Tensor] = {}
        self._generator: torch.Generator | None = None

    def _set_seed(self, seed: int | None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def _beside(self, count: Path, key: Key) -> Path:
        return (*count[:-1], key) if isinstance(key, str) else as_path(key)

    def _carried(self, count: Path) -> Key:
        """Where the horizons travel with the input of a step, of which rows may be left out."""
        return as_key((*count[:-1], "_random_horizon"))

    # ---------------------------------------------------------------------------------------- calls

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        for count, horizon in self._horizons.items():
            if horizon.shape[: td.batch_dims] == td.batch_size:
                td.set(self._carried(count), horizon)
        return td

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        for path in self._counts:
            count = next_td.get(as_key(path))
            horizon = td.get(self._carried(path), None)
            cut = count >= (self.max_horizon if horizon is None else horizon)
            for key in (self.truncated_key, self.done_key):
                flags = as_key(self._beside(path, key))
                before = next_td.get(flags, None)
                next_td.set(flags, cut if before is None else cut | before)
        return next_td

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        for path in self._counts:
            count = td_reset.get(as_key(path))
            self._draw(path, count, self._reset_mask(td, path[:-1]))
            flags = as_key(self._beside(path, self.truncated_key))
            if td_reset.get(flags, None) is None:
                td_reset.set(flags, torch.zeros_like(count, dtype=torch.bool))
        return td_reset

    def _draw(self, path: Path, count: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Draw the horizons of the episodes that begin, of those in ``mask`` or of all."""
        horizons = self._horizons.get(path)
        if horizons is None or horizons.shape != count.shape:
            horizons = torch.zeros_like(count)
            self._begun[path] = torch.zeros_like(count)
        begins = torch.ones_like(count, dtype=torch.bool)
        if mask is not None:
            begins = rules.reduce_mask(mask, count.shape, mask.ndim)
            begins = expand_as_right(begins, count)
        begun = self._begun[path]
        fresh = self._lengths(begun)
        self._horizons[path] = torch.where(begins, fresh, horizons)
        self._begun[path] = begun + begins

    def _lengths(self, begun: torch.Tensor) -> torch.Tensor:
        """Draw a length for each element, of which so many episodes have begun."""
        first, later = (
            torch.randint(least, self.max_horizon + 1, begun.shape, generator=self._generator)
            for least in (1, self.min_horizon)
        )
        chance = torch.where(begun.cpu() == 1, self.first_episode_prob, self.prob)
        cut = torch.rand(begun.shape, generator=self._generator) < chance
        later = torch.where(cut, later, self.max_horizon)
        return torch.where(begun == 0, first.to(begun.device), later.to(begun.device))

    # --------------------------------------------------------------------------------------- specs

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        shown = output_spec["full_observation_spec"]
        keys = [as_path(key) for key in shown.keys(True, True)]
        if isinstance(self.step_count_key, str):
            self._counts = [path for path in keys if path[-1] == self.step_count_key]
        else:
            self._counts = [path for path in keys if path == as_path(self.step_count_key)]
        if not self._counts:
            raise PlacementError(
                f"RandomTruncationTransform reads the count {self.step_count_key!r}, but the env before it "
                f"shows {list(map(as_key, keys))}. Put a StepCounter before it: Compose(StepCounter(), "
                "RandomTruncationTransform(...)), with the same step_count_key."
            )
        output_spec = editable(output_spec)
        done = output_spec["full_done_spec"]
        for path in self._counts:
            flags = _flag_like(shown[as_key(path)])
            done[as_key(self._beside(path, self.truncated_key))] = flags
        return output_spec


class TerminateTransform(EpisodeTransform):
    """End episodes where a condition holds after a step.

    Args:
        stop: function of what a step produced that returns a bool, or a tensor of bools that fits the done
            flags from the left.
        write_done: set ``done`` as well as ``terminated``.

    Raises:
        ArgumentError: (a ValueError) ``stop`` cannot be called.

    Example:
        >>> from envkit import Compose, GymEnv, StepCounter, TerminateTransform
        >>> third = TerminateTransform(lambda td: td["step_count"] == 3)
        >>> env = GymEnv("CartPole-v1").append_transform(Compose(StepCounter(), third))
        >>> env.rollout(10)["next", "terminated"].flatten()
        tensor([False, False,  True])
        >>> env.close()
    """

    def __init__(self, stop: Callable[[TensorDictBase], Any], *, write_done: bool = True):
        super().__init__()
        require_callable("stop", stop)
        self.stop = stop
        self.write_done = as_bool("write_done", write_done)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        stops = torch.as_tensor(self.stop(next_td), dtype=torch.bool, device=next_td.device)
        names = ("terminated", "done") if self.write_done else ("terminated",)
        for key in self._env().done_keys:
            flags = next_td.get(key)
            if as_path(key)[-1] in names:
                next_td.set(key, flags | expand_as_right(stops, flags))
        return next_td


class EndOfLifeTransform(EpisodeTransform):
    """Show how many lives are left, and where a step cost one.

    For games with lives, such as Atari's, where a lost life does not end the episode but is to end what
    a value function sums up. The flag is an observation, so the env is not reset by it.

    Args:
        eol_key: the flag, bool in the shape of ``done``; False after a reset.
        lives_key: the number of lives, int64, shape ``(*batch,)``.
        done_key: the done flag it is like.
        eol_attribute: where the simulator has the number, or a function that gives it.

    Example:
        >>> import gymnasium
        >>> from envkit import EndOfLifeTransform, GymWrapper
        >>> class Lives(gymnasium.Wrapper):
        ...     lives = 3
        ...     def step(self, action):
        ...         self.lives -= 1
        ...         return super().step(action)
        >>> env = GymWrapper(Lives(gymnasium.make("CartPole-v1")))
        >>> env = env.append_transform(EndOfLifeTransform(eol_attribute="lives"))
        >>> data = env.rollout(2)
        >>> data["next", "lives"], data["next", "end-of-life"].flatten()
        (tensor([2, 1]), tensor([True, True]))
        >>> env.close()
    """

    only_adds_done = False  # the simulator is asked after a step, before it is reset

    def __init__(
        self,
        eol_key: Key = "end-of-life",
        lives_key: Key = "lives",
        done_key: Key = "done",
        eol_attribute: str = "unwrapped.ale.lives",
    ):
        super().__init__([done_key], [eol_key, lives_key])
        self.eol_key, self.lives_key = self.out_keys
        (self.done_key,) = self.in_keys
        self.eol_attribute = eol_attribute.split(".")

    def _lives(self, like: TensorDictBase) -> torch.Tensor:
        lives: Any = self._env()
        for name in self.eol_attribute:
            lives = getattr(lives, name)
        # what a batched env looks up can be called whatever it is; numbers and arrays tell by what they have
        are_numbers = hasattr(lives, "numerator") or hasattr(lives, "shape")
        lives = lives() if callable(lives) and not are_numbers else lives
        numbers = list(lives) if isinstance(lives, Iterable) else lives
        return torch.as_tensor(numbers, dtype=torch.int64, device=like.device).expand(
            like.batch_size
        )

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        lives = self._lives(next_td)
        lost = (td.get(self.lives_key) > lives).reshape(next_td.get(self.done_key).shape)
        return next_td.set(self.eol_key, lost).set(self.lives_key, lives.clone())

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        unset = torch.zeros_like(td_reset.get(self.done_key))
        return td_reset.set(self.eol_key, unset).set(self.lives_key, self._lives(td_reset).clone())

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        flags = self._env().full_done_spec[self.done_key]
        observation_spec[self.eol_key] = flags.clone()
        return self._with_lives(observation_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        return self._with_lives(state_spec)

    def _with_lives(self, spec: Composite) -> Composite:
        device = self._env().full_done_spec[self.done_key].device
        spec[self.lives_key] = Unbounded(spec.shape, device, torch.int64)
        return spec

    def register_keys(self, loss_or_advantage: Any) -> None:
        """Set the done and terminated keys of a loss or an advantage of TorchRL to the flag."""
        loss_or_advantage.set_keys(done=self.eol_key, terminated=self.eol_key)
