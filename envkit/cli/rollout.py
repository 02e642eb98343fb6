"""A rollout with random actions: what it returned, and what of it is written down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tensordict import TensorDictBase

import envkit
from envkit.data.files import require_place
from envkit.data.paths import Key
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError

__all__ = ["roll_out"]

_WRITERS = {".parquet": "to_parquet", ".h5": "to_hdf5", ".hdf5": "to_hdf5"}

_DRAWN = (".mp4", ".gif")

_FRAMES = 500  # of a video at most


def roll_out(
    id: str, num_envs: int | None, steps: int, seed: int, *, video: Path | None, out: Path | None
) -> None:
    """Step an env, print its speed and its returns, and write the data and a video if asked for.

    Raises:
        ArgumentError: (a ValueError) a file has another ending than what can be written; told before anything is made.
        WriteError: (an OSError) one cannot be written where it is to go.
    """
    for option, path, endings in (("--out", out, _WRITERS), ("--video", video, _DRAWN)):
        if path is None:
            continue
        if path.suffix.lower() not in endings:
            raise ArgumentError(
                f"{option} is {str(path)!r}, but its ending must be one of {', '.join(endings)}."
            )
        require_place(path)
    torch.manual_seed(seed)
    drawn = {"render_mode": "rgb_array"} if video is not None and id.startswith("gym/") else {}
    env = envkit.make(id, num_envs, seed=seed, **drawn)
    try:
        if video is not None:  # before the rest, since not every env can be drawn
            envkit.record(env, None, video, steps=min(steps, _FRAMES))
            print(f"wrote {video}")
            env.set_seed(seed)
            torch.manual_seed(seed)
        if out is None:
            list(_played(env, steps))
        else:  # which asks for its library before it asks for data
            getattr(envkit, _WRITERS[out.suffix.lower()])(_played(env, steps), out)
            print(f"wrote {out}")
    finally:
        env.close(raise_if_closed=False)


def _played(env: EnvBase, steps: int) -> Iterator[TensorDictBase]:
    """Step when the data is asked for, and print what came of it."""
    env.reset()
    begin = time.perf_counter()
    data = env.rollout(steps, break_when_any_done=False)
    seconds = time.perf_counter() - begin
    print(f"{data.numel():,} steps in {seconds:.1f} s, compiling included")
    print(_returns(data, env.reward_keys[0]))
    yield data


def _returns(data: TensorDictBase, reward: Key) -> str:
    """Say what the episodes that ended returned in the mean."""
    key = ("next", *((reward,) if isinstance(reward, str) else reward))
    if data.get(("next", "done"), None) is None or data.get(key).shape[-1:] != (1,):
        return f"{data.get(key).double().mean():.3f} reward a step"
    stats = envkit.episode_stats(data, reward_key=key)
    returns = stats.returns[stats.ended]
    if not len(returns):
        return f"no episode ended; {data.get(key).double().mean():.3f} reward a step"
    lengths = stats.lengths[stats.ended].double()
    count = "1 episode" if len(returns) == 1 else f"{len(returns)} episodes"
    return f"{count} ended: mean return {returns.mean():.2f}, mean length {lengths.mean():.1f}"
