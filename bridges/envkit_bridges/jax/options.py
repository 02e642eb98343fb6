"""The keywords of every env over JAX and what they put around each of its rows.

`JaxOptions` lists and describes the keywords, and `JaxSettings` is what they are parsed to, with the defaults. `rows_of`
builds the wrappers that they ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict

import torch

from envkit.arrays.integers import as_int
from envkit.data.arguments import Check, checked
from envkit.env.options import EnvOptions
from envkit.errors import ArgumentTypeError, OptionError
from envkit.functional import (
    BatchedEnv,
    FrameSkip,
    GroupEnds,
    Metrics,
    Randomization,
    RandomizeAt,
    Randomizer,
    ResetMode,
    StatelessEnv,
    TimeLimit,
    groups_of,
)
from envkit.functional.batch import ALL_ON_CARD, ALL_ON_HOST, ON_CARD, ON_HOST, Chunks
from envkit_bridges.jax.side_effects import Traced

ResetRows = Literal["done", "all"]
StateLayout = Literal["packed", "nested"]


class _Own(TypedDict, total=False):
    devices: Sequence[Any] | None
    requires_grad: bool
    episode_length: int | None
    reset_mode: ResetMode
    pool_size: int
    reset_rows: ResetRows
    cache_clear_frequency: int | bool
    state_layout: StateLayout
    categorical_action_encoding: bool
    metrics: bool
    action_repeat: int
    randomize: Randomizer | None
    randomize_at: RandomizeAt | None


@dataclass(frozen=True)
class JaxSettings:
    """The entries of `JaxOptions` that only envs over JAX take, parsed; see `parsed_options`.

    Raises:
        OptionError: (a TypeError) ``randomize_at`` has no ``randomize``.
    """

    devices: Sequence[Any] | None = None
    requires_grad: bool = False
    episode_length: int | None = None
    reset_mode: ResetMode = "fresh"
    pool_size: int = 64
    reset_rows: ResetRows = "done"
    cache_clear_frequency: int = 0
    state_layout: StateLayout = "packed"
    categorical_action_encoding: bool = False
    metrics: bool = False
    action_repeat: int = 1
    randomize: Randomizer | None = None
    randomize_at: RandomizeAt | None = None

    def __post_init__(self) -> None:
        if self.randomize_at is not None and self.randomize is None:
            raise OptionError(
                f"randomize_at={self.randomize_at!r} says when rows draw a model, but nothing says how. Pass "
                "randomize=f too, a function (key, model) -> model, or leave randomize_at out."
            )


class JaxOptions(EnvOptions, _Own, total=False):
    """Keywords of `JaxEnv`, those of every env (`envkit.env.options.EnvOptions`) included.

    Args:
        batch_size: what `reset` without data produces; any other size is accepted too.
        devices: JAX devices of this process (or torch's names of them) over which rows are spread evenly, so that the batch
            must be a multiple of their number. Data stays on ``device``. Random actions are those of one device in runs as
            programs. Draws of a policy there depend on the number of devices. Where steps are made from Python, as around a
            `VecNorm`, which stays out of programs then, random actions are torch's, and differ from those of one device.
        requires_grad: let torch gradients flow from state, observation and reward of a step to the state
            and the action that it was given. They are computed by JAX, and only where autograd
            records and an input requires grad. Otherwise what is returned has no graph.
        episode_length: truncate episodes after this many steps of this env. A limit of the library's own that is shorter
            is raised to it. None leaves the library's own limit alone, and -1 removes it.
        reset_mode: where episodes begin: "fresh", the default, draws each again, "pool" takes one of ``pool_size``
            beginnings, "cached" the one of the row's first episode. All cost the same.
        pool_size: see ``reset_mode``; the default is 64.
        reset_rows: rows for which a program computes a reset after a step. "done", the default, resets finished rows only, for which
            a GPU waits for its host. "all" computes a reset of every row and selects, without that wait. It pays on a
            GPU where a reset costs little beside a step. Episodes are the same, but for rounding.
        cache_clear_frequency: forget all that JAX has compiled, in this process, after this many steps, as
            TorchRL does by default; False never does.
        state_layout: "packed" (two tensors, the default) or "nested" (one tensor a leaf, slower). Data of
            either layout is accepted as input.
        categorical_action_encoding: discrete actions as integers instead of one-hot.
        metrics: show what the simulator reports beside the reward as entries ("metrics", name), zero after a
            reset where only a step reports it. They are infos, which policies do not
            observe.
        action_repeat: steps of the simulator in one step of this env, which sums their rewards and stops where
            the episode ends. ``episode_length`` counts the steps of this env. The default is 1.
        randomize: ``f(key, model) -> model``: every row steps with its own model, which ``f`` draws from
            the one that the simulator was made with. Leaves that ``f`` changes become part of the row's state,
            under ("state", "model") where it is nested or unpacked; see ``drawn_bytes``.
        randomize_at: when a row draws: at the begin of every "episode", which None means too, or once, at the
            "construction" of the row by a reset without state. Refused without ``randomize``.
    """


LIMIT = "the steps of an episode, None for the library's own limit, or -1 for no limit"


def of_every_env(options: JaxOptions) -> EnvOptions:
    """Return the keywords without those that only envs over JAX take; unknown ones stay, for `EnvBase` to refuse."""
    own = _Own.__annotations__
    return {name: value for name, value in options.items() if name not in own}  # type: ignore[return-value]


def parsed_options(options: JaxOptions) -> JaxSettings:
    """Check the keywords that only envs over JAX take.

    Raises:
        ArgumentTypeError: (a TypeError) what switches something on or off is no bool, or a number of things no int.
        ArgumentError: (a ValueError) a number of things is below 1, or a word none of those that there are.
        OptionError: (a TypeError) see `JaxSettings`.
    """
    own = {name: value for name, value in options.items() if name in _Own.__annotations__}
    return JaxSettings(**checked(_Own, own, _CHECKS))


def _as_episode_length(name: str, value: Any) -> int | None:
    return None if value == -1 else as_int(name, value, least=1, meaning=LIMIT)


def _as_clearing(name: str, frequency: Any) -> int:
    """Return after how many steps caches are cleared; 0 is never."""
    if frequency is None or frequency is False:
        return 0
    if frequency is True:
        raise ArgumentTypeError(
            f"{name} is True, which does not say how often. Pass a number of steps, or "
            "False to keep what is compiled."
        )
    meaning = "the number of steps after which JAX forgets what it compiled, or False for never"
    return as_int(name, frequency, least=0, meaning=meaning)


def _as_randomize(name: str, value: Any) -> Any:
    if callable(value):
        return value
    raise ArgumentTypeError(
        f"{name} is {value!r}, but must be a function (key, model) -> model, or None. Pass one."
    )


_CHECKS: dict[str, Check] = {
    "randomize": _as_randomize,
    "episode_length": _as_episode_length,
    "pool_size": partial(as_int, least=1, meaning="how many beginnings there are"),
    "action_repeat": partial(as_int, least=1, meaning="action_repeat=1 for no repetition"),
    "cache_clear_frequency": _as_clearing,
}


def chunks_on(device: torch.device | None, reset_rows: ResetRows) -> Chunks:
    """Return how rows begin again together in programs on a device."""
    if device is None or device.type == "cpu":
        return ALL_ON_HOST if reset_rows == "all" else ON_HOST
    return ALL_ON_CARD if reset_rows == "all" else ON_CARD


def rows_of(
    env: StatelessEnv, settings: JaxSettings, device: torch.device, *, axis: str | None
) -> BatchedEnv:
    """Put what the keywords ask for around one env: checks of what is traced, metrics, then repeated actions, the time limit, the ends of agents."""
    env, drawn = Traced(env), None
    if settings.randomize is not None:
        drawn = Randomization.of(env, settings.randomize, settings.randomize_at or "episode")
    if settings.metrics:
        env = Metrics(env)
    if settings.action_repeat != 1:
        env = FrameSkip(env, settings.action_repeat)
    env = TimeLimit(env, settings.episode_length)
    return BatchedEnv(
        GroupEnds(env) if groups_of(env) else env,
        reset_mode=settings.reset_mode,
        pool_size=settings.pool_size,
        randomization=drawn,
        axis=axis,
        chunks=chunks_on(device, settings.reset_rows),
    )


def padded_size(rows: int, rows_of_env: int, multiple: int) -> int:
    """Return the size to compile for: the env's own as it is, any other rounded up to a power of two.

    Sizes from 1 to N thus take about log2(N) programs. ``multiple`` must divide all but the own size.
    """
    if rows == rows_of_env:
        return rows_of_env
    size = 1 << max(rows - 1, 0).bit_length()
    return -(-size // multiple) * multiple
