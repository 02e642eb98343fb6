"""Policies to look at: an env is played and drawn, or what was recorded of it is drawn without playing.

This module decides what is played and how rows are laid side by side. How a row is drawn is known to `frames`, what a
video is to `video`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.data.arguments import as_bool, as_int
from envkit.env.base import EnvBase
from envkit.env.learning import left_as_it_was
from envkit.env.policy import PolicyLike, as_policy
from envkit.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from envkit_bridges.exports.frames import draws_states, pace_of, painter_of, without_transforms
from envkit_bridges.exports.video import Video, as_video_path, require_pace

__all__ = ["record", "video"]

_LONGEST = 1000
"""Steps after which a recording without ``steps`` stops, whether an episode has ended or not."""


def record(
    env: EnvBase,
    policy: PolicyLike,
    path: str | os.PathLike[str],
    steps: int | None = None,
    rows: int | Sequence[int] = 1,
    fps: float | None = None,
    *,
    update_stats: bool = False,
    **options: Any,
) -> Video:
    """Play a policy from a reset on, draw it, and write the video.

    There is a frame of the first moment and one after each step; that after the last step of an episode shows how
    it ended, and the next one is a step into the new one. Every kind of env is drawn: stateless envs from their
    states, Gymnasium's, PettingZoo's and dm_control's by their own ``render``, pools and `MixedEnv` row by row.
    Afterwards the env is where it was, its generators included, as are the global generators. Where an env cannot say
    where it is (see `record_for_resume`), only its transforms are put back, and the next call must be a reset.

    Args:
        env: one of Gymnasium needs ``render_mode="rgb_array"``.
        policy: what `rollout` takes; None for random actions.
        path: ends in ".mp4" or ".gif". The file is complete or absent; one of that name is replaced.
        steps: None plays until every row that is shown has ended an episode, at most 1000 steps.
        rows: how many rows are shown side by side, from the first on; or their numbers, counted through the batch.
        fps: None takes the pace of the env's own time, at most 60, or 15 where it has none.
        update_stats: True lets transforms that learn, such as `VecNorm`, learn from what is played.
        **options: for the renderer, such as ``height``, ``width`` and ``camera`` of MuJoCo's.

    Returns:
        The video, which shows itself in Jupyter.

    Raises:
        ArgumentError: (a ValueError) another ending, no such row, ``steps`` below 1, ``fps`` not above 0.
        UnsupportedError: (a NotImplementedError) the env draws nothing; the message says what to pass.
        RenderingError: (a RuntimeError) nothing works here that draws without a display; the message says what to
            install.
        MissingLibraryError: (an ImportError) a library that writes the format is not installed.
        WriteError: (an OSError) the file cannot be written.
    """
    _require_env(env)
    path = as_video_path(path)
    if steps is not None:
        steps = as_int(
            "steps", steps, least=1, meaning="how many steps are shown, or None for an episode"
        )
    pace = None if fps is None else require_pace(fps)
    shown = _rows_of(env, rows)
    learns = as_bool("update_stats", update_stats)
    with left_as_it_was(env, update_stats=learns, warns_as="record()"):
        frames = _side_by_side(_played(env, policy, steps, shown, options))
    seen = Video(frames, pace_of(env) if pace is None else pace)
    seen.save(path)
    return seen


def video(
    env: EnvBase,
    data: TensorDictBase,
    row: int = 0,
    path: str | os.PathLike[str] | None = None,
    *,
    every: int = 1,
    fps: float | None = None,
    **options: Any,
) -> Video:
    """Draw what a stateless env recorded, without stepping again.

    Args:
        env: what recorded ``data``, or one like it.
        data: a rollout with "state", batch size ``(*batch, T)``.
        row: which one, counted through the batch without time.
        path: also write the video there; see `record`.
        every: draw one step of so many.
        fps: None keeps the pace of the env's own time.
        **options: for the renderer; see `record`.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env.
        UnsupportedError: (a NotImplementedError) the env is not stateless, or cannot be drawn.
        MissingKeyError: (a KeyError) ``data`` has no state.
        ArgumentError: (a ValueError) there is no such row, or another ending.
        RenderingError, MissingLibraryError, WriteError: see `record`.
    """
    _require_env(env)
    drawing: Any = without_transforms(env)
    if not draws_states(drawing):
        raise UnsupportedError(
            f"{env!r} keeps no states in the data that could be drawn later. record(env, policy, path) plays and "
            "draws it."
        )
    path = None if path is None else as_video_path(path)
    pace = None if fps is None else require_pace(fps)
    frames = drawing.render_rollout(data, row, every, **options)
    seen = Video(frames, pace_of(env) / every if pace is None else pace)
    if path is not None:
        seen.save(path)
    return seen


def _require_env(env: Any) -> None:
    if not isinstance(env, EnvBase):
        raise ArgumentTypeError(
            f"env is {env!r}, of type {type(env).__name__}, but must be an env of envkit. Pass "
            "GymEnv('CartPole-v1', render_mode='rgb_array'), say; GymWrapper(env) makes one of Gymnasium's."
        )


def _rows_of(env: EnvBase, rows: int | Sequence[int]) -> list[int]:
    count = env.numel()
    if isinstance(rows, Sequence):
        wanted = [as_int("a row", row, least=0, meaning="the number of a row") for row in rows]
    else:
        wanted = list(range(as_int("rows", rows, least=1, meaning="how many rows are shown")))
    if not wanted or max(wanted) >= count:
        raise ArgumentError(
            f"rows is {rows!r}, but the env has {count} row{'s' * (count > 1)}. Pass 1 to {count}, or numbers from "
            f"0 to {count - 1}."
        )
    return wanted


def _played(
    env: EnvBase, policy: PolicyLike, steps: int | None, rows: list[int], options: dict[str, Any]
) -> list[torch.Tensor]:
    """Play, and give the frames of each row."""
    painter, act = painter_of(env, rows, options), as_policy(env, policy)
    ended = torch.zeros(len(rows), dtype=torch.bool)
    with torch.no_grad():
        root = env.reset()
        painter.look(root)
        for _ in range(_LONGEST if steps is None else steps):
            data = env.step(act(root))
            moment = env.step_mdp(data)
            painter.look(moment)
            ended |= env._rows_done(data.get("next")).reshape(-1)[rows].cpu()
            if steps is None and bool(ended.all()):
                break
            root = env.maybe_reset(moment)
    return painter.frames()


def _side_by_side(rows: list[torch.Tensor]) -> torch.Tensor:
    """Lay rows out as a grid, each as large as the largest: uint8 (T, 3, H, W)."""
    across = math.ceil(math.sqrt(len(rows)))
    height, width = (max(row.shape[axis] for row in rows) for axis in (2, 3))
    down = math.ceil(len(rows) / across)
    sheet = torch.zeros((len(rows[0]), 3, down * height, across * width), dtype=torch.uint8)
    for number, row in enumerate(rows):
        top, left = number // across * height, number % across * width
        sheet[:, :, top : top + row.shape[2], left : left + row.shape[3]] = row
    return sheet
