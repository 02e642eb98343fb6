"""What `envkit list`, `envkit info` and `envkit rollout` do: tables of what can be made, one env, and its random steps.

Conventions
    role  "action", "state", "observation", "reward" or "done": the spec that declares an entry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tensordict import TensorDictBase

import envkit
from envkit.arrays.elementwise import dtype_name
from envkit.data.files import require_place
from envkit.data.paths import Key
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError
from envkit.installing import install_command


def print_ids(pattern: str | None, world: str | None) -> None:
    """Print the ids that match, with a remark at those that need the network.

    Raises:
        ArgumentError: (a ValueError) none does.
    """
    ids = envkit.list_envs(pattern, world)
    if not ids:
        asked = "no env can be made here" if pattern is None else f"no id here matches {pattern!r}"
        where = "" if world is None else f" in the library {world!r}"
        raise ArgumentError(
            f"{asked}{where}. Try a part of the name; envkit list --worlds shows which libraries are installed."
        )
    for id in ids:
        print(f"{id}  (fetches its models)" if id.needs_network else id)


def print_worlds() -> None:
    """Print a table of the libraries, installed or not."""
    table = Table("prefix", "kind", "library", "version", "envs", box=None)
    for world in envkit.worlds():
        missing = install_command(str(world.extra))
        version = world.version or missing
        envs = world.problem or ("" if world.num_envs is None else str(world.num_envs))
        told = (world.name, world.kind, world.library, version, envs)
        table.add_row(*map(escape, told))  # extras are in brackets
    Console().print(table)


def print_info(id: str, num_envs: int | None, seconds: float) -> None:
    """Print an env, its entries, and its speed."""
    env = envkit.make(id, num_envs, seed=0)
    try:
        console = Console()
        console.print(f"{env!r}", highlight=False, markup=False)
        table = Table("entry", "role", "shape", "dtype", "kind", box=None)
        for role, key, kind, shape, dtype in _entries(env):
            table.add_row(*map(escape, (key, role, shape, dtype, kind)))
        console.print(table)
        if seconds:
            speed = _steps_per_second(env, seconds)
            console.print(f"{speed:,.0f} steps a second with random actions", highlight=False)
    finally:
        env.close(raise_if_closed=False)


def _entries(env: EnvBase) -> Iterator[tuple[str, str, str, str, str]]:
    for role in ("action", "state", "observation", "reward", "done"):
        for key, spec in getattr(env, f"full_{role}_spec").items(True, True):
            name = key if isinstance(key, str) else ".".join(key)
            dtype = dtype_name(spec.dtype)
            yield role, name, type(spec).__name__, str(tuple(spec.shape)), dtype


def _steps_per_second(env: EnvBase, seconds: float, chunk: int = 64) -> float:
    """Roll an env out for about so long, after a warm-up; every row counts."""
    env.rollout(chunk, break_when_any_done=False)
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        steps += env.rollout(chunk, break_when_any_done=False).numel()
    return steps / (time.perf_counter() - begin)


_WRITERS = {".parquet": "to_parquet", ".h5": "to_hdf5", ".hdf5": "to_hdf5"}

_DRAWN = (".mp4", ".gif")

_FRAMES = 500  # of a video at most


def roll_out(
    id: str, num_envs: int | None, steps: int, seed: int, *, video: Path | None, out: Path | None
) -> None:
    """Step an env, print its speed and its returns, and write the data and a video if asked for.

    Raises:
        ArgumentError: (a ValueError) a file has another ending than what can be written; raised before anything is
            made.
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
    drawn: dict[str, Any] = (
        {"render_mode": "rgb_array"} if video is not None and id.startswith("gym/") else {}
    )
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
    print(_returns(data, "reward" if "reward" in env.reward_keys else env.reward_keys[0]))
    yield data


def _returns(data: TensorDictBase, reward: Key) -> str:
    """Return what the episodes that ended returned in the mean."""
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
