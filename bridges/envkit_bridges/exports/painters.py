"""Pictures of the rows of an env, whichever kind of env it is.

Stateless envs draw stored states, all at the end and in one go; simulators draw the moment they are in. This
module decides which env draws what, and what is said of one that draws nothing.

Conventions
    row     number of a row, counted through the batch.
    moment  TensorDict of one step of the whole batch: a root, or what `step_mdp` makes of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.arrays.elementwise import dtype_name
from envkit.batched.attributes import WorkerAttribute
from envkit.batched.mixed import MixedEnv
from envkit.env.base import EnvBase
from envkit.errors import UnsupportedError
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit_bridges.libraries import keywords_told, parameters_of

_PACE = 15.0
_FASTEST = 60.0


class Painter(Protocol):
    """Draws some rows of an env, moment by moment."""

    def look(self, moment: TensorDictBase) -> None:
        """Draw the moment in which the env is now, or remember it."""
        ...

    def frames(self) -> list[torch.Tensor]:
        """Return what was seen, for each row: uint8 (T, 3, H, W)."""
        ...


def painter_of(env: EnvBase, rows: Sequence[int], options: Mapping[str, Any]) -> Painter:
    """Return what draws these rows.

    Raises:
        UnsupportedError: (a NotImplementedError) the env draws nothing; the message says what to pass.
    """
    env = without_transforms(env)
    if isinstance(env, MixedEnv):
        return _OfMembers(env, rows, options)
    if draws_states(env):
        return _OfStates(env, rows, options)
    return _OfSimulators(env, rows, options)


def without_transforms(env: EnvBase) -> EnvBase:
    """Return the env inside all transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def draws_states(env: EnvBase) -> bool:
    """Check whether an env draws stored states."""
    return callable(getattr(type(env), "render_rollout", None))


def pace_of(env: EnvBase) -> float:
    """Return how many steps an env makes in a second of simulated time, at most 60; 15 where it has none."""
    env = without_transforms(env)
    if isinstance(env, MixedEnv):
        return pace_of(env.members[0].env)
    metadata = _of_one(getattr(env, "metadata", None))
    pace = metadata.get("render_fps") if isinstance(metadata, Mapping) else None
    if not pace and (seconds := _seconds_of(env)):
        pace = 1 / seconds
    skipped = getattr(env, "frame_skip", 1)
    return min(_FASTEST, float(pace or _PACE) / (skipped if isinstance(skipped, int) else 1))


def _seconds_of(env: EnvBase) -> float | None:
    """Return the time that a step takes in the env: ``dt`` of Brax and Playground, ``control_timestep()`` of dm_control."""
    seconds = _of_one(getattr(env, "dt", None))
    if seconds is None and callable(asked := getattr(env, "control_timestep", None)):
        seconds = _of_one(asked())
    found = np.asarray(seconds)
    return float(found) if found.dtype.kind in "fiu" and found.ndim == 0 else None


def _of_one(value: Any) -> Any:
    """Return an attribute of an env; of a pool that of the first sub-env."""
    return value[0] if isinstance(value, list | WorkerAttribute) else value


class _OfStates:
    """Rows of a stateless env: their states are kept, and drawn together."""

    def __init__(self, env: Any, rows: Sequence[int], options: Mapping[str, Any]):
        self.env, self.rows, self.options = env, list(rows), options
        self.seen: list[TensorDictBase] = []

    def look(self, moment: TensorDictBase) -> None:
        states = TensorDict({"state": moment["state"]}, moment.batch_size).reshape(-1)
        self.seen.append(states[self.rows].clone())
        if len(self.seen) == 1:  # what cannot be drawn is said before everything is played
            self.env.render(self.seen[0], **self.options)

    def frames(self) -> list[torch.Tensor]:
        run = TensorDict.stack(self.seen, 1)
        return [self.env.render_rollout(run, row, **self.options) for row in range(len(self.rows))]


class _OfSimulators:
    """Rows of an env that draws the moment it is in: one simulator, a vector env, or a pool of them."""

    def __init__(self, env: Any, rows: Sequence[int], options: Mapping[str, Any]):
        self.env, self.rows, self.options = env, list(rows), options
        self.seen: list[list[torch.Tensor]] = [[] for _ in rows]

    def look(self, moment: TensorDictBase) -> None:
        if not self.seen[0]:
            self._require_mode()
        render = self._render()
        with keywords_told(f"render of {self.env!r}", self.options, lambda: _taken_by(render)):
            drawn = self._drawn(render)
        for row, seen in zip(self.rows, self.seen, strict=True):
            seen.append(self._picture(drawn.get(row)))

    def _drawn(self, render: Callable[..., Any]) -> Mapping[int, Any]:
        """Return what is drawn, by row."""
        of_class = getattr(type(self.env), "render", None)  # that of a pool is asked of its workers
        if "env_index" in _taken_by(of_class):  # VMAS draws a row a call
            return {row: render(env_index=row, **self.options) for row in self.rows}
        drawn = render(**self.options)
        is_one = isinstance(drawn, np.ndarray | torch.Tensor) and drawn.ndim == 3
        if self.env.numel() == 1 and is_one:
            drawn = [drawn]
        return dict(enumerate([] if drawn is None else drawn))

    def frames(self) -> list[torch.Tensor]:
        return [torch.stack(seen).movedim(-1, 1) for seen in self.seen]

    def _require_mode(self) -> None:
        mode = getattr(self.env, "render_mode", "rgb_array")
        modes = list(dict.fromkeys([mode] if mode is None or isinstance(mode, str) else mode))
        if modes != ["rgb_array"]:
            raise UnsupportedError(
                f"{self.env!r} gives no frames: its render_mode is {', '.join(map(repr, modes))}. Make it with "
                "render_mode='rgb_array', as in GymEnv('CartPole-v1', render_mode='rgb_array')."
            )

    def _render(self) -> Any:
        try:
            return self.env.render
        except AttributeError as error:
            raise UnsupportedError(
                f"{self.env!r} cannot be drawn: it has no method `render() -> frame`, a uint8 array of shape "
                "(H, W, 3). Write one, or plot what it observes with plot_rollout."
            ) from error

    def _picture(self, frame: Any) -> torch.Tensor:
        frame = frame if isinstance(frame, torch.Tensor) else np.asarray(frame)
        if dtype_name(frame.dtype) != "uint8" or frame.ndim != 3 or frame.shape[2] != 3:
            raise UnsupportedError(
                f"render() of {self.env!r} gave {frame.dtype}{list(frame.shape)}, but a frame is uint8 [H, W, 3], and "
                "an env with a batch gives one for each row. Make it with render_mode='rgb_array' if it has that "
                "option."
            )
        return frame.clone() if isinstance(frame, torch.Tensor) else torch.from_numpy(frame.copy())


def _taken_by(render: Any) -> list[str]:
    """List the keywords of what draws; none where Python knows no signature."""
    try:
        return parameters_of(render)
    except (TypeError, ValueError):
        return []


class _OfMembers:
    """Rows of a `MixedEnv`: each is drawn by its member."""

    def __init__(self, env: MixedEnv, rows: Sequence[int], options: Mapping[str, Any]):
        self.env, self.rows = env, list(rows)
        self.painters: list[tuple[Any, list[int], Painter]] = []
        for member in env.members:
            own = [row for row in self.rows if member.rows.start <= row < member.rows.stop]
            if own:
                inside = [row - member.rows.start for row in own]
                self.painters.append((member, own, painter_of(member.env, inside, options)))

    def look(self, moment: TensorDictBase) -> None:
        for member, _, painter in self.painters:
            painter.look(member.part(moment))

    def frames(self) -> list[torch.Tensor]:
        frames: dict[int, torch.Tensor] = {}
        for _, painted, painter in self.painters:
            frames.update(zip(painted, painter.frames(), strict=True))
        return [frames[row] for row in self.rows]
