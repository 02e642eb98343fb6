"""When episodes end, besides where the env ends them: at random, by a condition, or with a life.

Conventions
    flags   the done leaf of a level, shape (*batch, *event), most often (*batch, 1).
    beside  an entry of the same node: ``("agents", "done")`` is beside ``("agents", "step_count")``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.data.arguments import as_bool, as_int
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.errors import ArgumentError, PlacementError
from envkit.specs import Categorical, Composite, Unbounded
from envkit.transforms.core.base import editable
from envkit.transforms.episodes import EpisodeTransform

__all__ = ["EndOfLifeTransform", "RandomTruncationTransform", "TerminateTransform"]


def _probability(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ArgumentError(f"{name} is {value}, but must be between 0 and 1.")
    return value


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
        PlacementError: (a RuntimeError) when specs are read: no `StepCounter` stands before it.
    """

    _in_repr = ("min_horizon", "max_horizon", "prob")

    _changes_with_use = (
        "_horizons",
        "_begun",
        "_generator",
    )

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
        known = self._horizons.get(path)
        if known is None or known.shape != count.shape:
            known = torch.zeros_like(count)
            self._begun[path] = torch.zeros_like(count)
        begins = torch.ones_like(count, dtype=torch.bool)
        if mask is not None:
            begins = rules.reduce_mask(mask, count.shape, mask.ndim)
            begins = begins.reshape((*begins.shape, *(1,) * (count.ndim - begins.ndim))).expand_as(
                count
            )
        begun = self._begun[path]
        fresh = self._lengths(begun)
        self._horizons[path] = torch.where(begins, fresh, known)
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
            leaf = shown[as_key(path)]
            flags = Categorical(2, shape=leaf.shape, dtype=torch.bool, device=leaf.device)
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
    """

    def __init__(self, stop: Callable[[TensorDictBase], Any], *, write_done: bool = True):
        super().__init__()
        if not callable(stop):
            raise ArgumentError(
                f"stop is {stop!r}, but must be a function of the data after a step."
            )
        self.stop = stop
        self.write_done = as_bool("write_done", write_done)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        stops = torch.as_tensor(self.stop(next_td), dtype=torch.bool, device=next_td.device)
        names = ("terminated", "done") if self.write_done else ("terminated",)
        for key in self._env().done_keys:
            flags = next_td.get(key)
            if as_path(key)[-1] in names:
                extra = (1,) * (flags.ndim - stops.ndim)
                next_td.set(key, flags | stops.reshape((*stops.shape, *extra)).expand_as(flags))
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
        """Have a loss or an advantage of TorchRL take the flag for its done and terminated flags."""
        loss_or_advantage.set_keys(done=self.eol_key, terminated=self.eol_key)
