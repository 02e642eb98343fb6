"""Gymnasium environments as envkit environments.

`GymCore` steps one gymnasium env on plain NumPy rows; a worker process hosts it without building
a TensorDict. `GymWrapper` is the same core behind the TensorDict interface.

Conventions
    row   what one env owns of a leaf, see `bridges.spaces`.
    done  ``terminated | truncated``, each bool of shape (1,); reward float32 of shape (1,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from bridges.libraries import require
from bridges.spaces import Codec, codec_of
from envkit.base import EnvBase
from envkit.env_specs import as_key
from envkit.errors import ResetMaskError
from envkit.rules import RESET
from envkit.specs import Categorical, Composite, TensorSpec, Unbounded

__all__ = ["GymCore", "GymEnv", "GymRows", "GymWrapper"]

Path = tuple[str, ...]
Rows = Mapping[Path, np.ndarray]

_DONE: tuple[Path, ...] = (("done",), ("terminated",), ("truncated",))


class GymCore:
    """Step one gymnasium env, writing what comes out into rows.

    Args:
        env: a gymnasium env.
        observation, action: codecs of its spaces; ``observation`` is None when only pixels count.
        frame_skip: inner steps per step; rewards are summed, and a finished episode stops them.
        pixels: also write the rendered frame, uint8 (height, width, 3), to ``("pixels",)``.
    """

    def __init__(
        self,
        env: Any,
        observation: Codec | None,
        action: Codec,
        *,
        frame_skip: int = 1,
        pixels: bool = False,
    ):
        self.env = env
        self.observation = observation
        self.action = action
        self.frame_skip = frame_skip
        self.pixels = pixels
        self.step = env.step if frame_skip == 1 else self._repeated_step

    def is_like(self, other: GymCore) -> bool:
        """Say whether another core takes its actions in the same form."""
        return isinstance(other, GymCore) and self.action.space == other.action.space

    def bind(
        self, cores: list[GymCore], rows: range, arrays: Mapping[str, Rows], slot: np.ndarray
    ) -> GymRows:
        """Fix the rows of some cores that are alike; see `envkit.batched.rows.bind_rows`."""
        return GymRows(cores, rows, arrays, slot)

    def writer(self, rows: Rows) -> Callable[[Any], None]:
        """Give the function that writes an observation, and the frame if asked for, into rows."""
        if not self.pixels:
            assert self.observation is not None  # one of the two is observed
            return self.observation.writer(rows)
        write = None if self.observation is None else self.observation.writer(rows)

        def write_both(observation: Any) -> None:
            if write is not None:
                write(observation)
            rows[("pixels",)][...] = self.env.render()

        return write_both

    def _repeated_step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env ``frame_skip`` times, or until the episode ends."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        for _ in range(self.frame_skip - 1):
            if terminated or truncated:
                break
            observation, extra, terminated, truncated, info = self.env.step(action)
            reward += extra
        return observation, reward, terminated, truncated, info


class GymRows:
    """Cores that are alike, bound to their rows: all lookups are done, scalars go out together."""

    def __init__(
        self, cores: list[GymCore], rows: range, arrays: Mapping[str, Rows], slot: np.ndarray
    ):
        self._first, self._count = rows.start, len(rows)
        self._all_rows = slice(rows.start, rows.stop)
        self._slot = memoryview(slot)
        self._cores = cores
        self._read = cores[0].action.read
        self._inputs = {path: arrays["in"][path] for path in cores[0].action.leaves}
        self._roots, self._nexts = arrays["root"], arrays["next"]
        self._resets = [core.env.reset for core in cores]
        self._steps = [core.step for core in cores]
        self._root_writers, self._next_writers = (
            [None] * len(array) for array in (self._roots[_DONE[0]], self._nexts[_DONE[0]])
        )
        self._carried = [
            (self._nexts[path], root) for path, root in self._roots.items() if path not in _DONE
        ]

    def _writers(self, region: Rows, slot: int) -> list[Callable[[Any], None]]:
        return [
            core.writer({path: array[slot, row, ...] for path, array in region.items()})
            for row, core in enumerate(self._cores, self._first)
        ]

    def _write_root(self, slot: int) -> list[Callable[[Any], None]]:
        made = self._root_writers
        if made[slot] is None:
            made[slot] = self._writers(self._roots, slot)
        return made[slot]

    def _write_next(self, slot: int) -> list[Callable[[Any], None]]:
        made = self._next_writers
        if made[slot] is None:
            made[slot] = self._writers(self._nexts, slot)
        return made[slot]

    def reset(self, row: int, **kwargs: Any) -> None:
        """Start an episode and write the root row."""
        index, slot = row - self._first, self._slot[row] + 1
        observation, _ = self._resets[index](**kwargs)
        self._write_root(slot)[index](observation)
        for path in _DONE:
            self._roots[path][slot, row] = False

    def step(self, rows: Sequence[int], *, advance: bool) -> None:
        """Step some rows and write their next rows; with ``advance`` also their next roots."""
        first, steps, slot = self._first, self._steps, self._slot[self._first]
        write = self._write_next(slot)
        chosen = self._all_rows if len(rows) == self._count else list(rows)
        actions = self._read({path: array[slot, chosen] for path, array in self._inputs.items()})
        scalars: list[tuple[Any, bool, bool]] = []
        fresh: list[tuple[int, Any]] = []
        try:
            for row, action in zip(rows, actions, strict=True):
                observation, reward, terminated, truncated, _ = steps[row - first](action)
                write[row - first](observation)
                scalars.append((reward, terminated, truncated))
                if advance and (terminated or truncated):
                    fresh.append((row, self._resets[row - first]()[0]))
        finally:  # what was stepped before an error is not lost
            if scalars:
                made = chosen if len(scalars) == self._count else rows[: len(scalars)]
                self._write_flags(slot, made, *zip(*scalars, strict=True))
                if advance:
                    self._write_following(slot, made, fresh)

    def _write_flags(
        self, slot: int, rows: slice | Sequence[int], rewards: Any, terminated: Any, truncated: Any
    ) -> None:
        nexts = self._nexts
        ended, cut = np.array(terminated, bool), np.array(truncated, bool)
        nexts[("reward",)][slot, rows, 0] = rewards
        for path, flags in zip(_DONE, (ended | cut, ended, cut), strict=True):
            nexts[path][slot, rows, 0] = flags

    def _write_following(
        self, slot: int, rows: slice | Sequence[int], fresh: list[tuple[int, Any]]
    ) -> None:
        """Write the roots after a step: what it made, and a fresh episode where one has ended."""
        for made, root in self._carried:
            root[slot + 1, rows] = made[slot, rows]
        for path in _DONE:
            self._roots[path][slot + 1, rows] = False
        if fresh:
            write = self._write_root(slot + 1)
            for row, observation in fresh:
                write[row - self._first](observation)


class GymWrapper(EnvBase):
    """A gymnasium env behind the TensorDict interface; unbatched and batch-locked.

    Args:
        env: a gymnasium env object.
        categorical_action_encoding: integers for discrete actions and observations, not one-hot.
        frame_skip: inner steps per step, rewards summed, stopping at the end of an episode.
        from_pixels: add ``pixels``, uint8 (height, width, 3); the env must render rgb arrays.
        pixels_only: with ``from_pixels``, leave the state observation out.
        device: where data is delivered, "cpu" by default.
        **kwargs: of `EnvBase`.

    Raises:
        ValueError: ``frame_skip`` is not a positive int, or pixels are asked of an env that does
            not render them.
    """

    libname = "gymnasium"

    def __init__(
        self,
        env: Any,
        categorical_action_encoding: bool = False,
        *,
        frame_skip: int = 1,
        from_pixels: bool = False,
        pixels_only: bool = True,
        device: Any = "cpu",
        **kwargs: Any,
    ):
        super().__init__(device=device, **kwargs)
        if not isinstance(frame_skip, int) or isinstance(frame_skip, bool) or frame_skip < 1:
            raise ValueError(
                f"frame_skip is {frame_skip!r}, but must be an int of at least 1: the number of "
                "simulator steps per step."
            )
        if from_pixels and getattr(env, "render_mode", None) != "rgb_array":
            raise ValueError(
                f"from_pixels=True needs an env that renders rgb arrays, but its render_mode is "
                f"{getattr(env, 'render_mode', None)!r}. Make it with render_mode='rgb_array'."
            )
        self.categorical_action_encoding = categorical_action_encoding
        self.frame_skip = frame_skip
        self.from_pixels = from_pixels
        self.info_dict_reader: list[Callable[[dict, TensorDictBase], Any]] = []
        observation = None
        if not (from_pixels and pixels_only):
            observation = codec_of(
                env.observation_space, categorical=categorical_action_encoding, key="observation"
            )
        action = codec_of(env.action_space, categorical=categorical_action_encoding, key="action")
        self.core = GymCore(env, observation, action, frame_skip=frame_skip, pixels=from_pixels)
        self._declare(env, observation, action)

    def _declare(self, env: Any, observation: Codec | None, action: Codec) -> None:
        device = self.device
        spec = Composite(device=device) if observation is None else observation.spec(device)
        if self.from_pixels:
            env.reset()
            spec["pixels"] = Unbounded(env.render().shape, dtype=torch.uint8, device=device)
        self.observation_spec = spec
        self.action_spec = action.spec(device)
        self.reward_spec = Unbounded((1,), dtype=torch.float32, device=device)
        flag = Categorical(2, shape=(1,), dtype=torch.bool, device=device)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), device=device
        )

    # -------------------------------------------------------------------------------- simulator

    @property
    def _env(self) -> Any:
        """The gymnasium env."""
        return self.core.env

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            core = self.__dict__.get("core")
            if name.startswith("_") or core is None:
                raise
            if hasattr(core.env, name):
                return getattr(core.env, name)
            return core.env.get_wrapper_attr(name)

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        mask = None if td is None else td.get(RESET, None)
        if mask is not None and not bool(mask.all()):
            raise ResetMaskError(
                f"the reset mask of {type(self).__name__} is {mask.tolist()}, but one simulator "
                "cannot be reset in part. Leave the mask out, or do not call reset."
            )
        rows = self._new_rows(rewards=False)
        observation, info = self._env.reset(**kwargs)
        self.core.writer(rows)(observation)
        for path in _DONE:
            rows[path][...] = False
        return self._to_tensordict(rows, info)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        rows = self._new_rows(rewards=True)
        observation, reward, terminated, truncated, info = self.core.step(self.read_action(td))
        self.core.writer(rows)(observation)
        rows[("reward",)][...] = reward
        for path, flag in zip(_DONE, (terminated or truncated, terminated, truncated), strict=True):
            rows[path][...] = flag
        return self._to_tensordict(rows, info)

    def read_action(self, td: TensorDictBase) -> Any:
        """Give the action in ``td`` as a value of the gymnasium action space.

        Raises:
            KeyError: an action entry is missing.
            ValueError: it has another shape than its spec.
        """
        codec = self.core.action
        rows = {path: _action_row(td, path, leaf.spec) for path, (leaf, _) in codec.leaves.items()}
        return codec.read(rows)[0]

    def _new_rows(self, *, rewards: bool) -> dict[Path, np.ndarray]:
        layout = self._cached("row_layout", lambda: list(self._row_layout()))
        return {
            path: np.empty(shape, dtype)
            for path, kind, shape, dtype in layout
            if rewards or kind != "reward"
        }

    def _row_layout(self) -> Iterable[tuple[Path, str, tuple[int, ...], np.dtype]]:
        for path, kind, spec in self._output_leaves:
            yield path, kind, tuple(spec.shape), torch.empty(0, dtype=spec.dtype).numpy().dtype

    def _to_tensordict(self, rows: dict[Path, np.ndarray], info: dict[str, Any]) -> TensorDict:
        td = TensorDict({}, batch_size=(), device=self.device)
        for path, row in rows.items():
            td.set(as_key(path), torch.from_numpy(row))
        for reader in self.info_dict_reader:
            reader(info, td)
        return td

    def _set_seed(self, seed: int | None) -> None:
        self._env.reset(seed=seed)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the gymnasium env."""
        was_open = not self.is_closed
        super().close(raise_if_closed=raise_if_closed)
        if was_open:
            self.core.env.close()

    def render(self) -> Any:
        """Render the gymnasium env as it was made to."""
        return self.core.env.render()

    def row_core(self) -> GymCore | None:
        """Give the core that steps this env on NumPy rows.

        None where the core is not the whole story: infos are read, data goes to another device, or
        a subclass changes how a step is made.
        """
        changed = any(getattr(type(self), name) is not step for name, step in _STEPPING.items())
        if changed or self.info_dict_reader or self.device != torch.device("cpu"):
            return None
        return self.core


_STEPPING = {
    name: getattr(GymWrapper, name) for name in ("step", "reset", "_step", "_reset", "read_action")
}


class GymEnv(GymWrapper):
    """A gymnasium env by name; see `GymWrapper`.

    Args:
        env_name: registered id, e.g. "CartPole-v1".
        from_pixels: render rgb arrays and add them as ``pixels``.
        **kwargs: keywords of `GymWrapper`; the rest goes to ``gymnasium.make``.
    """

    def __init__(
        self,
        env_name: str,
        *,
        categorical_action_encoding: bool = False,
        from_pixels: bool = False,
        pixels_only: bool = True,
        frame_skip: int = 1,
        device: Any = "cpu",
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
        **make_kwargs: Any,
    ):
        if from_pixels:
            make_kwargs.setdefault("render_mode", "rgb_array")
        super().__init__(
            require("gymnasium").make(env_name, **make_kwargs),
            categorical_action_encoding,
            frame_skip=frame_skip,
            from_pixels=from_pixels,
            pixels_only=pixels_only,
            device=device,
            run_type_checks=run_type_checks,
            allow_done_after_reset=allow_done_after_reset,
        )
        self.env_name = env_name


def _action_row(td: TensorDictBase, path: Path, spec: TensorSpec) -> np.ndarray:
    value = td.get(as_key(path), None)
    if value is None:
        raise KeyError(
            f"the TensorDict has no {as_key(path)!r}; it has {sorted(map(str, td.keys(True)))}. "
            "Write the action first, e.g. with env.rand_action(td)."
        )
    if value.shape != spec.shape:
        raise ValueError(
            f"{as_key(path)!r} has shape {tuple(value.shape)}, but the env takes "
            f"{tuple(spec.shape)}: {spec}."
        )
    return value.detach().cpu().numpy()[None]
