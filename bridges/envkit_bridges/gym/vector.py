"""Gymnasium's vector envs without what their autoreset does to the data.

`VectorCore` decides how each autoreset mode is undone, so that a step gives the true last
observation, a reset the first one of the new episode, and no step ignores its action. `VectorRows` makes
steps of all rows in memory, whole arrays at a time.

Conventions
    rows     the envs of the vector env; masks over them are bool arrays of shape (num_envs,).
    ended    rows whose last step ended an episode and that were not reset since, as far as the
             data goes. They must be reset before the next step, or be frozen in it.
    frozen   rows that a step leaves out. Gymnasium steps them nevertheless. In a sync vector env a
             stand-in takes the step, so any row can be frozen. Of others only rows that have ended
             can, and their next reset is a real one.
    modes    NEXT_STEP resets a row in the step after its last: a reset comes before that step.
             SAME_STEP resets it in its last step: what that reset gave is kept for the next reset.
             DISABLED resets nothing.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from envkit.data.merging import choose_arrays
from envkit.data.paths import Path, as_key
from envkit.data.plain import from_plain, plain
from envkit.env.seeding import seed_chain
from envkit.errors import ArgumentError, EncodingError, ResetMaskError, ResumeError, StepMaskError
from envkit.rules import RESET
from envkit_bridges.gym.backend import GymSpace, SpaceValue, library_of
from envkit_bridges.gym.codecs import Codec, lacking
from envkit_bridges.gym.frames import draw
from envkit_bridges.gym.resume import is_without_episode, recorded, restored, saved
from envkit_bridges.gym.simulator_rows import (
    DONE,
    Rows,
    repeated,
    require_flags,
    reward_array,
)

if TYPE_CHECKING:
    from envkit_bridges.libraries import Simulator


Stepped = tuple[Any, Any, Any, Any, Any]
"""Observations, rewards, terminated, truncated and infos."""


def is_vector(env: Simulator) -> bool:
    """Check whether a gymnasium env is a vector env."""
    return hasattr(env, "num_envs") and hasattr(env, "single_observation_space")


class VectorCore:
    """Step and reset a vector env; see `envkit_bridges.gym.simulator_rows.GymCore` for the same of a single env.

    Args:
        env: a vector env.
        observation, action: codecs of its single spaces; ``observation`` is None when only pixels
            count.
        pixels: also give the rendered frames.

    Raises:
        ArgumentError: the spaces have no array form, the mode hides what is needed, or the env
            cannot reset single rows where its mode needs that.
    """

    _frozen: np.ndarray | None = None

    def __init__(
        self, env: Simulator, observation: Codec | None, action: Codec, *, pixels: bool = False
    ):
        self.env = env
        self.observation = observation
        self.action = action
        self.pixels = pixels
        self.batch_size = (env.num_envs,)
        library = library_of(env.unwrapped)
        vector = library.vector
        self._utils = vector.utils
        self._spaces = library.spaces
        self._is_ours = isinstance(env.unwrapped, vector.SyncVectorEnv | vector.AsyncVectorEnv)
        # wrappers would count their steps
        self._has_stand_ins = isinstance(env, vector.SyncVectorEnv)
        mode = vector.AutoresetMode(_mode_of(env))
        self._resets_itself = mode != vector.AutoresetMode.DISABLED
        self._keeps_first = mode == vector.AutoresetMode.SAME_STEP
        self._resets_rows = self._is_ours or not self._resets_itself
        self._check()
        self._forget()

    def _check(self) -> None:
        for codec in (self.observation, self.action):
            if codec is not None and not codec.has_rows:
                raise ArgumentError(
                    f"{codec.space} has no array form of fixed shape, which a vector env needs. "
                    "Use SerialEnv(n, lambda: GymEnv(...)) instead of num_envs=n; flatten a Tuple of unlike shapes "
                    "first: GymWrapper(gymnasium.wrappers.FlattenObservation(env))."
                )
        if self._keeps_first and self.pixels:
            raise ArgumentError(
                "with autoreset in the same step the last frame of an episode cannot be rendered. "
                "Make the vector env with another autoreset_mode, or without pixels."
            )
        if not self._keeps_first and not self._resets_rows:
            raise ArgumentError(
                f"{self.env} resets rows during the step after their last, in which their action is "
                f"ignored, and cannot be asked for it earlier. Use GymEnv(id, num_envs=n, vectorization_mode='sync'){_in_mode(self.env, 'SAME_STEP')}."
            )

    def _forget(self) -> None:
        """Begin with no row that has ended."""
        count = self.batch_size[0]
        self._ended, self._went_on = np.zeros(count, bool), np.zeros(count, bool)
        self._first: dict[int, Any] = {}
        self._first_infos: dict[str, Any] = {}

    # ---------------------------------------------------------------------------------------- steps

    @property
    def has_rows(self) -> bool:
        """Whether observations of all rows come together: no frames, and none that came in the step before."""
        plain = self.observation is not None and not self.pixels and not self._keeps_first
        spaces = (self.env.single_observation_space, self.env.single_action_space)
        return plain and all(_is_of_arrays(space, self._spaces) for space in spaces)

    @property
    def is_recordable(self) -> bool:
        """Whether the episodes of rows can be saved."""
        return self._has_stand_ins

    @property
    def steps_all_rows(self) -> bool:
        """Whether only rows that have ended may be frozen."""
        return not self._has_stand_ins

    @contextmanager
    def freezing(self, rows: np.ndarray) -> Iterator[None]:
        """Exclude rows from the step that is made meanwhile.

        Raises:
            StepMaskError: the env steps all its rows, and one of these has not ended or cannot be
                reset alone.
        """
        can_wait = self._ended if self._resets_rows else np.zeros_like(rows)
        if self.steps_all_rows and bool((rows & ~can_wait).any()):
            raise StepMaskError(
                f"rows {_numbers(rows)} are to be left out of a step, but {self.env} steps all its rows. "
                f"Of them only {_numbers(can_wait)} may be left out: those that have ended, and only with "
                "async vectorisation or without autoreset. A SyncVectorEnv without vector wrappers, "
                "SerialEnv and ParallelEnv step rows as you like: "
                "GymEnv(name, num_envs=k, vectorization_mode='sync')."
            )
        self._frozen = rows.copy()
        try:
            with self._stood_in(_numbers(rows)):
                yield
        finally:
            self._frozen = None

    @contextmanager
    def _stood_in(self, rows: list[int]) -> Iterator[None]:
        """Put stand-ins in the place of some envs, where that can be done."""
        if not self._has_stand_ins:
            yield
            return
        envs = self.env.envs
        kept = {row: envs[row] for row in rows}
        observations = self._blank()
        for row, env in kept.items():
            envs[row] = _StandIn(env, observations[row])
        try:
            yield
        finally:
            for row, env in kept.items():
                envs[row] = env

    def step(self, actions: SpaceValue) -> tuple[list[Any], Any, Any, Any, dict[str, Any]]:
        """Step all rows that are not frozen.

        Returns:
            ``(observations, rewards, terminated, truncated, infos)`` as the simulator's step, with
            one observation for each row; what belongs to frozen rows may be anything.

        Raises:
            StepMaskError: a row that has ended is to be stepped.
        """
        observations, rewards, terminated, truncated, infos = self.advance(actions)
        rows, infos = self._split(observations, "step"), infos or {}
        over = np.logical_or(terminated, truncated)
        if self._keeps_first and over.any():
            infos = self._take_last(rows, over, infos)
        return rows, rewards, terminated, truncated, infos

    def advance(self, actions: SpaceValue) -> Stepped:
        """Step as `step` does, and return the answer of the env, whose observations are those of all rows together."""
        self._require_begun()
        if self._frozen is not None and not self._resets_itself:
            self._reset_rows(self._frozen)
        result = self.env.step(actions)
        self._note_ended(result)
        return result

    def _stepped_among(self, rows: np.ndarray) -> np.ndarray:
        """Return which of some rows are not frozen."""
        return rows if self._frozen is None else rows & ~self._frozen

    def _require_begun(self) -> None:
        if (waiting := self._stepped_among(self._ended)).any():
            raise StepMaskError(
                f"rows {_numbers(waiting)} have ended and were not reset. Reset them first, e.g. with "
                "env.step_and_maybe_reset or env.maybe_reset."
            )

    def _note_ended(self, result: Stepped) -> None:
        frozen, over = self._frozen, np.logical_or(*map(np.asarray, result[2:4]))
        self._ended = over if frozen is None else choose_arrays(frozen, self._ended, over)
        if self._keeps_first:
            stood = np.zeros_like(over) if frozen is None else frozen
            self._went_on = stood & (not self._has_stand_ins)

    def _take_last(
        self, rows: list[Any], over: np.ndarray, infos: dict[str, Any]
    ) -> dict[str, Any]:
        """Put the true last observations into ``rows`` and give the true last infos."""
        infos = dict(infos)
        last = infos.pop("final_obs", None)
        if isinstance(last, Mapping):  # arrays of all rows by name
            last = self._split(last, "step")
        ended = _numbers(over)
        if last is None or any(last[row] is None for row in ended):
            raise EncodingError(
                f"step of {self.env} ended the episodes of rows {ended} and reset them, but returned no infos['final_obs'] "
                "with their last observations, which next must hold. Return infos['final_obs'], an array of dtype object "
                f"with an observation for each row that has ended{_in_mode(self.env, 'DISABLED')}."
            )
        last_infos = infos.pop("final_info", {})
        self._first_infos = infos
        for row in ended:
            self._first[row] = copy.deepcopy(rows[row])
            rows[row] = last[row]
        hidden = ("_final_obs", "_final_info")
        shown = {name: value for name, value in infos.items() if name not in hidden}
        return choose_arrays(over, last_infos, shown)

    def _blank(self) -> list[Any]:
        """Return an observation for each row that its space holds: zeros, and the first of discrete options."""
        space, count = self.env.single_observation_space, self.batch_size[0]
        if self.observation is None:
            return self._split(self._utils.create_empty_array(space, count), "reset")
        zeros = {
            path: torch.zeros(
                (count, *leaf.spec.shape), dtype=leaf.spec.dtype, device="cpu"
            ).numpy()
            for path, (leaf, _) in self.observation.leaves.items()
        }
        return self.observation.read(zeros)

    def _split(self, observations: SpaceValue, method: str) -> list[Any]:
        space = self.env.observation_space
        try:
            return list(self._utils.iterate(space, observations))
        except (KeyError, IndexError, TypeError) as error:
            raise lacking(space, observations, method) or error from None

    # --------------------------------------------------------------------------------------- resets

    def reset(
        self, mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[list[Any], dict[str, Any]]:
        """Start new episodes where ``mask`` says, shape ``(num_envs,)`` or ``(num_envs, 1)``.

        Rows that have begun a new episode by themselves are not reset a second time, unless
        ``kwargs`` ask for something. Rows that are not selected may hold anything.

        Raises:
            ResetMaskError: a partial mask that is not that of the rows that have ended, of an env
                that resets rows by itself.
        """
        count = self.batch_size[0]
        rows = np.ones(count, bool) if mask is None else mask.reshape(count).cpu().numpy()
        if not rows.any():
            return self._blank(), {}
        self._require_resettable(rows)
        have_begun = self._have_begun(rows) if not kwargs else np.zeros(count, bool)
        observations, infos = [None] * count, {}
        if (real := rows & ~have_begun).any():
            together, infos = self._reset_rows(real, **kwargs)
            observations, infos = self._split(together, "reset"), infos or {}
        if have_begun.any():
            for row in have_begun.nonzero()[0].tolist():
                observations[row] = self._first[row]
            observations = _filled(observations)
            infos = choose_arrays(have_begun, self._first_infos, infos)
        self._note_reset(rows)
        self._first = {row: value for row, value in self._first.items() if not rows[row]}
        return observations, infos

    def _require_resettable(self, rows: np.ndarray) -> None:
        if self._resets_itself and not rows.all() and not np.array_equal(rows, self._ended):
            raise ResetMaskError(
                f"rows {_numbers(rows)} are to be reset, but of a vector env that resets by itself "
                f"only the rows that have ended can be, here {_numbers(self._ended)}. Reset all rows, as after loading a "
                "state dict without their episodes, make it with vector_kwargs={'autoreset_mode': AutoresetMode.DISABLED}, "
                "or use SerialEnv."
            )

    def _note_reset(self, rows: np.ndarray) -> None:
        self._ended = self._ended & ~rows
        self._went_on = self._went_on & ~rows

    def begin(self, rows: np.ndarray, **kwargs: Any) -> Rows:
        """Begin episodes in the rows that a bool mask selects, and return the observations of these rows by path.

        Raises:
            ResetMaskError: see `reset`.
        """
        self._require_resettable(rows)
        observations, _ = self._reset_rows(rows, **kwargs)
        self._note_reset(rows)
        return {path: value[rows] for path, value in self.encoded(observations, "reset").items()}

    def encoded(self, observations: SpaceValue, method: str) -> Rows:
        """Turn the observations of all rows, which ``method`` returned, into arrays by path, which may share memory.

        Raises:
            EncodingError: an entry is missing, has another shape than its space says, or not one value for each row.
        """
        assert self.observation is not None
        space, count = self.env.observation_space, self.batch_size[0]
        try:
            entries = self.observation.encode_arrays(observations)
        except (KeyError, IndexError, TypeError) as error:
            raise lacking(space, observations, method) or error from None
        for path, value in entries.items():
            if len(value) != count:
                raise EncodingError(
                    f"{method} of {self.env} returned {len(value)} values of {as_key(path)!r}, but has {count} rows. Return "
                    "one for each row."
                )
        return {path: value.numpy() for path, value in entries.items()}

    def _have_begun(self, rows: np.ndarray) -> np.ndarray:
        """Return which of the rows to reset have done so already, and their first observation kept."""
        kept = np.zeros_like(rows)
        kept[list(self._first)] = True
        have_begun = rows & kept & ~self._went_on
        return (
            have_begun
            if self._resets_rows or have_begun.all() or not rows.all()
            else np.zeros_like(rows)
        )

    def _reset_rows(self, rows: np.ndarray, **kwargs: Any) -> tuple[Any, Any]:
        if not rows.all():
            kwargs["options"] = {**(kwargs.get("options") or {}), "reset_mask": rows.copy()}
        return self.env.reset(**kwargs)

    def seed(self, seed: int | None, *, static: bool = False) -> int:
        """Reset row i with the i-th seed of the chain, and give the seed after the last.

        A vector env of another kind than sync and async takes one seed, the first.
        """
        seeds, following = seed_chain(seed, self.batch_size[0], static=static)
        self._forget()
        self.env.reset(seed=seeds if self._is_ours else seeds[0])
        return following

    # -------------------------------------------------------------------------------------- resuming

    def record(self, mode: bool) -> None:
        """Record the episodes of all rows, where they can be reached; False: record no longer."""
        if self._has_stand_ins:
            self.env.envs = [recorded(env, mode) for env in self.env.envs]

    def state(self, *, exact: bool) -> dict[str, Any]:
        """Return the states of all rows, and which of them have ended, in plain form; see `saved`.

        Raises:
            ResumeError: episodes are asked for, and a row cannot be saved, or the rows cannot be reached.
        """
        if not self._has_stand_ins:
            if exact:
                raise self._out_of_reach()
            return {"is_fresh": False}
        rows = [saved(env, exact=exact) for env in self.env.envs]
        return {
            "rows": rows,
            "own": plain({name: getattr(self, name) for name in _OF_ROWS}, "what was kept of rows"),
            "autoreset": plain(self.env._autoreset_envs),
            "is_fresh": not any(map(is_without_episode, rows)),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned.

        Raises:
            ResumeError: a row did not get where it was.
        """
        self._forget()
        if self._has_stand_ins != ("rows" in state):
            raise self._out_of_reach()
        if not self._has_stand_ins:
            return
        if len(state["rows"]) != len(self.env.envs):
            raise ResumeError(
                f"what is loaded holds {len(state['rows'])} rows, but this env has {len(self.env.envs)}. Make it "
                "with as many envs as the one that was saved."
            )
        self.env._autoreset_envs = np.zeros_like(self.env._autoreset_envs)
        self.env.envs = [
            restored(env, row) for env, row in zip(self.env.envs, state["rows"], strict=True)
        ]
        # a reset of some rows, or a step of some, joins what they give with what the others gave last
        self.env._env_obs = list(self._blank())
        if not is_without_episode(state):
            vars(self).update(from_plain(state["own"]))
            self.env._autoreset_envs = from_plain(state["autoreset"])

    def _out_of_reach(self) -> ResumeError:
        return ResumeError(
            f"the rows of {self.env} cannot be saved from outside, or those of the env that was saved. Make both with "
            "vectorization_mode='sync' and without vector wrappers, or take SerialEnv or ParallelEnv of single envs."
        )

    # ---------------------------------------------------------------------------------------- values

    def encode(self, observations: Sequence[Any]) -> dict[Path, torch.Tensor]:
        """Turn one observation for each row, and the frames if asked for, into tensors by path."""
        entries: dict[Path, torch.Tensor] = {}
        if self.observation is not None:
            parts = [self.observation.encode(value) for value in observations]
            entries = {path: torch.stack([part[path] for part in parts]) for path in parts[0]}
        if self.pixels:
            entries[("pixels",)] = torch.from_numpy(np.stack(draw(self.env)))
        return entries

    def decode(self, actions: Mapping[Path, torch.Tensor]) -> SpaceValue:
        """Turn tensors with the rows in front into an action of the vector env."""
        rows = {path: value.numpy(force=True) for path, value in actions.items()}
        values = self.action.read(rows)
        space = self.action.space
        blank = self._utils.create_empty_array(space, len(values))
        return self._utils.concatenate(space, values, blank)


class VectorRows:
    """All rows of a vector env as one row of memory, whose leaves have them in front; see `OneRow`.

    Args:
        core: of the vector env, whose observations come together (`VectorCore.has_rows`).
        note: is given the infos of each step.
    """

    def __init__(self, core: VectorCore, note: Callable[[Any], None] | None = None):
        self._core, self._note = core, note

    def bind(
        self, cores: list[VectorRows], rows: range, arrays: Mapping[str, Rows], slot: np.ndarray
    ) -> VectorRows:
        """Fix the memory; see `envkit.batched.bound_envs.bind_rows`."""
        self._slot = slot
        self._inputs, self._roots, self._nexts = (
            {path: ring[:, 0] for path, ring in arrays[region].items()}
            for region in ("in", "root", "next")
        )
        self._selected = arrays["mask"][(RESET,)][0, :, 0]
        return self

    def reset(self, row: int, states: Collection[Path] = (), /, **kwargs: Any) -> None:
        """Begin episodes in the rows that the `_reset` mask in memory selects, and write their root."""
        rows, following = self._selected, int(self._slot[0]) + 1
        if rows.any():
            for path, value in self._core.begin(rows, **kwargs).items():
                self._roots[path][following, rows] = value

    def step(self, rows: Sequence[int], *, advance: bool) -> None:
        """Step all rows and write their `next`; with ``advance`` also their roots, fresh ones where they have ended."""
        core, slot, nexts = self._core, int(self._slot[0]), self._nexts
        taken = {path: ring[slot].copy() for path, ring in self._inputs.items()}
        stepped = core.advance(core.action.decode_arrays(taken))
        observations, rewards, terminated, truncated, infos = stepped
        shown = core.encoded(observations, "step")
        for path, value in shown.items():
            nexts[path][slot] = value
        reward = nexts[("reward",)][slot]
        reward[...] = reward_array(rewards, reward.shape, reward.dtype)
        flags = self._flags(terminated, truncated)
        over = np.logical_or(*flags)
        for path, column in zip(DONE, (over, *flags), strict=True):
            nexts[path][slot, :, 0] = column
        if self._note is not None:
            self._note(infos)
        if not advance:
            return
        for path, value in shown.items():
            self._roots[path][slot + 1] = value
        if over.any():
            for path, value in core.begin(over).items():
                self._roots[path][slot + 1, over] = value

    def _flags(self, terminated: object, truncated: object) -> tuple[np.ndarray, np.ndarray]:
        """Return the flags of all rows as arrays of bools.

        Raises:
            EncodingError: they are none, or not one for each row.
        """
        require_flags(terminated, truncated)
        flags = np.asarray(terminated, bool), np.asarray(truncated, bool)
        for name, found in zip(("terminated", "truncated"), flags, strict=True):
            if found.shape != self._selected.shape:
                raise EncodingError(
                    f"step of the vector env returned {name} of shape {found.shape}, but must return one flag for each of "
                    f"{len(self._selected)} rows."
                )
        return flags


_OF_ROWS = ("_ended", "_went_on", "_first", "_first_infos")


def _is_of_arrays(space: GymSpace, spaces: ModuleType) -> bool:
    """Check whether values of several rows come as arrays, as they do for the spaces of the library alone."""
    if type(space) is spaces.Dict:
        return all(_is_of_arrays(one, spaces) for one in space.values())
    if type(space) is spaces.Tuple:
        return all(_is_of_arrays(one, spaces) for one in space)
    known = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    return type(space) in known


class _StandIn:
    """Takes calls in the place of an env that is not to move; all else is the env's own."""

    def __init__(self, env: Simulator, observation: SpaceValue):
        self._env, self._observation = env, observation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, action: SpaceValue) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observation, 0.0, False, False, {}

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return self._observation, {}


def frame_skipping(library: ModuleType, repeats: int) -> Any:
    """Return a gymnasium wrapper that repeats actions: rewards summed, stopping at the end."""

    class FrameSkip(library.Wrapper):
        def step(self, action: SpaceValue) -> Any:
            return repeated(self.env.step, repeats, action)

    return FrameSkip


def _mode_of(env: Simulator) -> Any:
    """Ask a vector env for its autoreset mode: Gymnasium's own write it into metadata that all envs of a class share."""
    known = env.metadata.get("autoreset_mode", "NextStep")
    return getattr(env.unwrapped, "autoreset_mode", known)


def _in_mode(env: Simulator, mode: str) -> str:
    """Return the end of a fix: how to make a vector env in another autoreset mode, if its class takes one."""
    kind = type(env.unwrapped)
    if "autoreset_mode" not in inspect.signature(kind.__init__).parameters:
        return ""
    return f", or make {kind.__name__}(..., autoreset_mode=gymnasium.vector.AutoresetMode.{mode})"


def _filled(observations: Sequence[Any]) -> list[Any]:
    """Put any observation where there is none."""
    known = next(value for value in observations if value is not None)
    return [known if value is None else value for value in observations]


def _numbers(rows: np.ndarray) -> list[int]:
    return rows.nonzero()[0].tolist()
