"""How fast envkit steps here, beside the bare simulator and what else is installed: a look, not a record.

Works are timed in turns, so that a busy machine slows all of them alike; the figures are medians over rounds. The
benches of the repository, in ``bench/``, measure more, and write down what they found.

Conventions
    speed  steps of single envs a second.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

import envkit
from envkit.errors import ArgumentError

_ROUNDS = 5
_ROWS = {"cartpole": 8, "brax": 256}

Runs = dict[str, Callable[[], int]]
"""Functions that do some steps and return how many, by name; the others are compared with the first."""


def measure(work: str | None, seconds: float) -> None:
    """Time one work, or all, and print a table of each.

    Raises:
        ArgumentError: there is no such work.
    """
    if work is not None and work not in WORKS:
        raise ArgumentError(f"there is no work {work!r}. Name one of {', '.join(WORKS)}.")
    for name in WORKS if work is None else [work]:
        with ExitStack() as stack, warnings.catch_warnings(action="ignore"):
            title, runs = WORKS[name](stack)
            _print(title, _speeds(runs, seconds))


def _speeds(runs: Runs, seconds: float) -> dict[str, list[float]]:
    for run in runs.values():
        run()
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            begin, steps = time.perf_counter(), 0
            while time.perf_counter() - begin < seconds:
                steps += run()
            speeds[name].append(steps / (time.perf_counter() - begin))
    return speeds


def _print(title: str, speeds: dict[str, list[float]]) -> None:
    first = next(iter(speeds.values()))
    table = Table(title, "steps/s", "ratio", "spread", box=None)
    for name, found in speeds.items():
        ratios = [one / other for one, other in zip(found, first, strict=True)]
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        median = f"{statistics.median(found):,.0f}"
        table.add_row(name, median, f"{statistics.median(ratios):.2f}", spread)
    Console().print(table)


# ------------------------------------------------------------------------------------------ works


def _cartpole(stack: ExitStack) -> tuple[str, Runs]:
    rows, name = _ROWS["cartpole"], "CartPole-v1"
    envkit.make(f"gym/{name}").close()  # says which extra brings what is missing
    import gymnasium

    runs: Runs = {"bare loop, one process": _bare_loop(gymnasium, name)}
    for title, backend in (("envkit SerialEnv", "serial"), ("envkit ParallelEnv", "process")):
        env = envkit.make(f"gym/{name}", rows, backend=backend, seed=0)
        stack.callback(env.close, raise_if_closed=False)
        runs[title] = _recorded(env, 200)
    makers: list[Any] = [partial(gymnasium.make, name)] * rows
    for title, vector in (
        ("gymnasium SyncVectorEnv", gymnasium.vector.SyncVectorEnv),
        ("gymnasium AsyncVectorEnv", gymnasium.vector.AsyncVectorEnv),
    ):
        theirs = vector(makers)
        stack.callback(theirs.close)
        runs[title] = _stepped(theirs, theirs.action_space.sample)
    if peer := _installed("stable_baselines3.common.vec_env"):
        theirs = peer.SubprocVecEnv(makers)
        stack.callback(theirs.close)
        draw = theirs.action_space.sample
        runs["SB3 SubprocVecEnv"] = _stepped(theirs, lambda: [draw() for _ in range(rows)])
    if peer := _installed("torchrl.envs"):
        theirs = peer.ParallelEnv(rows, partial(peer.GymEnv, name))
        stack.callback(theirs.close)
        runs["TorchRL ParallelEnv"] = _recorded(theirs, 50)
    return f"{name} x {rows}, random actions", runs


def _installed(module: str) -> Any:
    """Import what is installed; None where it is not, or fails."""
    if find_spec(module.partition(".")[0]) is None:
        return None
    try:
        return import_module(module)
    except ImportError as error:
        print(f"left out: {module}, whose import fails: {error}")
        return None


def _bare_loop(gymnasium: ModuleType, name: str) -> Callable[[], int]:
    env = gymnasium.make(name)
    env.reset(seed=0)

    def run(steps: int = 1000) -> int:
        for _ in range(steps):
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        return steps

    return run


def _recorded(env: Any, steps: int) -> Callable[[], int]:
    return lambda: env.rollout(steps, break_when_any_done=False).numel()


def _stepped(envs: Any, draw: Callable[[], Any]) -> Callable[[], int]:
    envs.reset()

    def run(steps: int = 100) -> int:
        for _ in range(steps):
            envs.step(draw())
        return steps * envs.num_envs

    return run


def _brax(stack: ExitStack) -> tuple[str, Runs]:
    rows, steps, name = _ROWS["brax"], 64, "inverted_pendulum"
    env: Any = envkit.make(f"brax/{name}", rows, seed=0)  # says which extra brings what is missing
    import jax

    stack.callback(env.close, raise_if_closed=False)
    simulator = env.unwrapped
    reset, step = jax.jit(jax.vmap(simulator.reset)), jax.jit(jax.vmap(simulator.step))
    start = reset(jax.random.split(jax.random.PRNGKey(0), rows))
    actions = jax.numpy.zeros((rows, simulator.action_size))

    def bare() -> int:
        state = start
        for _ in range(steps):
            state = step(state, actions)
        jax.block_until_ready(state)
        return steps * rows

    runs: Runs = {
        "bare jitted steps, no resets": bare,
        "envkit rollout, one program": _recorded(env, steps),
    }
    if peer := _installed("torchrl.envs"):
        theirs = peer.BraxWrapper(
            simulator, batch_size=[rows], device=env.device, cache_clear_frequency=False
        )
        runs["TorchRL BraxWrapper, step by step"] = _recorded(theirs, steps)
    return f"Brax {name} x {rows}", runs


WORKS: dict[str, Callable[[ExitStack], tuple[str, Runs]]] = {"cartpole": _cartpole, "brax": _brax}
