"""What can be made here, and what one env takes and gives.

Conventions
    role  "action", "state", "observation", "reward" or "done": the spec that declares an entry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import envkit
from envkit import EnvBase
from envkit.errors import ArgumentError
from envkit.installing import install_command

__all__ = ["print_ids", "print_info", "print_worlds", "steps_per_second"]


def print_ids(pattern: str | None, world: str | None) -> None:
    """Print the ids that match, with a remark at those that need the network.

    Raises:
        ArgumentError: (a ValueError) none does.
    """
    found = envkit.list_envs(pattern, world)
    if not found:
        asked = "no env can be made here" if pattern is None else f"no id here matches {pattern!r}"
        where = "" if world is None else f" in the world {world!r}"
        raise ArgumentError(
            f"{asked}{where}. Try a part of the name; envkit list --worlds shows which libraries are installed."
        )
    for id in found:
        print(f"{id}  (fetches its models)" if id.needs_network else id)


def print_worlds() -> None:
    """Print a table of the worlds, installed or not."""
    table = Table("world", "kind", "library", "version", "envs", box=None)
    for world in envkit.worlds():
        missing = install_command(str(world.extra))
        version = world.version or missing
        envs = world.problem or ("" if world.num_envs is None else str(world.num_envs))
        told = (world.name, world.kind, world.library, version, envs)
        table.add_row(*map(escape, told))  # extras stand in brackets
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
            speed = steps_per_second(env, seconds)
            console.print(f"{speed:,.0f} steps a second with random actions", highlight=False)
    finally:
        env.close(raise_if_closed=False)


def _entries(env: EnvBase) -> Iterator[tuple[str, str, str, str, str]]:
    roles = {
        "action": env.full_action_spec,
        "state": env.full_state_spec,
        "observation": env.full_observation_spec,
        "reward": env.full_reward_spec,
        "done": env.full_done_spec,
    }
    for role, specs in roles.items():
        for key, spec in specs.items(True, True):
            name = key if isinstance(key, str) else ".".join(key)
            dtype = str(spec.dtype).removeprefix("torch.")
            yield role, name, type(spec).__name__, str(tuple(spec.shape)), dtype


def steps_per_second(env: EnvBase, seconds: float, chunk: int = 64) -> float:
    """Roll an env out for about so long, after a warm-up; every row counts."""
    env.rollout(chunk, break_when_any_done=False)
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        steps += env.rollout(chunk, break_when_any_done=False).numel()
    return steps / (time.perf_counter() - begin)
