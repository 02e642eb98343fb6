"""The keywords of collectors: names and types, how each is checked, and what does not go together.

`CollectorOptions` and `WorkerOptions` list the keywords for type checkers, and `Collector` describes them.
`parsed_options` checks them before anything is built and returns `CollectorSettings`, which holds the defaults.
A new keyword has a line in the table, one among the settings and one in the docstring of `Collector`. It has a check
in `_CHECKS` where its type is not enough, and a row in `_require_fitting` where it excludes others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, Literal, TypedDict

import torch

from envkit.arrays.integers import as_int
from envkit.batched.settings import as_seconds
from envkit.collectors.runner import RunnerOptions
from envkit.data.arguments import (
    Check,
    as_bool,
    as_keywords,
    as_number,
    checked,
    require_callable,
    require_option,
)
from envkit.data.keywords import known_to, refuse_unknown
from envkit.data.torchrl_names import as_weight_sync_schemes, without_ignored
from envkit.env.policy import ExplorationType, require_policy
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceNameError,
    OptionError,
)
from envkit.lazy_imports import late
from envkit.specs.annotations import Device, as_device
from envkit.transforms.policy_version import PolicyVersion


class CollectorOptions(TypedDict, total=False):
    """Keywords of every collector, which `envkit.Collector` describes. One of the first two is given."""

    frames_per_batch: int | Sequence[int] | None
    trajs_per_batch: int | None
    trajs_per_write: int | None
    traj_format: Literal["padded", "cat"]
    total_frames: int | None
    device: Device | None
    storing_device: Device | Sequence[Device] | None
    env_device: Device | Sequence[Device] | None
    policy_device: Device | Sequence[Device] | None
    create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None
    max_frames_per_traj: int | None
    init_random_frames: int | None
    reset_at_each_iter: bool
    postproc: Callable[[Any], Any] | None
    split_trajs: bool | None
    exploration_type: ExplorationType
    reset_when_done: bool
    set_truncated: bool
    use_buffers: bool | None
    replay_buffer: Any
    replay_buffer_chunk: bool
    extend_buffer: bool | None
    trust_policy: bool | None
    compile_policy: bool | Mapping[str, Any] | None
    cudagraph_policy: bool | Mapping[str, Any] | None
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None
    prefetch: int
    track_policy_version: bool | PolicyVersion
    track_traj_ids: bool
    compact_obs: bool
    return_contiguous: bool
    auto_register_policy_transforms: bool | None
    seed: int | None
    progress: bool
    record_state: bool
    record_for_resume: bool
    pre_collect_hook: Callable[[], Any] | None
    post_collect_hook: Callable[[Any], Any] | None
    interruptor: Any | None
    worker_idx: int | None
    weight_sync_schemes: Mapping[str, Any] | None
    return_same_td: bool
    no_cuda_sync: bool


class WorkerOptions(CollectorOptions, total=False):
    """Keywords of collectors with workers, which `envkit.Collector` describes too."""

    num_workers: int | None
    update_at_each_batch: bool
    preemptive_threshold: float | None
    num_threads: int | None
    num_sub_threads: int
    cat_results: int | Literal["stack"] | None
    on_worker_failure: Literal["raise", "restart"]
    max_restarts: int
    timeout: float | None
    start_timeout: float | None
    init_fn: Callable[[], Any] | None


@dataclass(frozen=True)
class CollectorSettings(RunnerOptions):
    """`CollectorOptions` and `WorkerOptions`, parsed; what has no effect is left out.

    Numbers are ints; where -1 and 0 stand for no limit, ``total_frames`` is None and the others 0. Devices are those of
    torch, ``device`` stands in for each that was not passed. The first five hold one value, or a list of one for each
    worker.
    """

    create_env_kwargs: Any = None
    policy_factory: Any = None
    storing_device: Any = None
    env_device: Any = None
    policy_device: Any = None
    frames_per_batch: int | list[int] | None = None
    trajs_per_batch: int | None = None
    trajs_per_write: int | None = None
    traj_format: Literal["padded", "cat"] = "padded"
    total_frames: int | None = None
    postproc: Callable[[Any], Any] | None = None
    split_trajs: bool | None = None
    use_buffers: bool | None = None
    replay_buffer: Any = None
    replay_buffer_chunk: bool = True
    prefetch: int = 0
    device: torch.device | None = None
    policy_version_tracker: PolicyVersion | None = None
    track_traj_ids: bool = True
    return_contiguous: bool = False
    seed: int | None = None
    progress: bool = False
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[Any], Any] | None = None
    interruptor: Any = None
    worker_idx: int | None = None
    num_workers: Any = None  # checked where the makers of envs are counted
    update_at_each_batch: bool = False
    preemptive_threshold: float | None = None
    num_threads: int | None = None
    num_sub_threads: int = 1
    cat_results: Any = None  # checked by the collectors that join batches
    on_worker_failure: Literal["raise", "restart"] = "raise"
    max_restarts: int = 10
    timeout: float | None = 60.0
    start_timeout: float | None = 60.0
    init_fn: Callable[[], Any] | None = None

    def of_runner(self, of_worker: Callable[[str, Any], Any]) -> RunnerOptions:
        """Return what concerns one runner; ``of_worker`` returns, by name, its entry of what may be a list."""
        values = {field.name: getattr(self, field.name) for field in fields(RunnerOptions)}
        return RunnerOptions(**values | {name: of_worker(name, values[name]) for name in _OF_EACH})


_DEVICES = ("storing_device", "env_device", "policy_device")
_LIMITS = ("init_random_frames", "max_frames_per_traj")
_OF_EACH = (*_DEVICES, "create_env_kwargs", "policy_factory")


def parsed_options(
    kind: Any, table: type, policy: Any, options: Mapping[str, Any]
) -> CollectorSettings:
    """Check what can be checked before anything is built.

    Args:
        kind: the class of the collector.
        table: of the keywords that it takes, `CollectorOptions` or `WorkerOptions`.
        policy: what was passed as policy.
        options: keywords.

    Raises:
        OptionError: (a TypeError) a keyword is unknown, or options exclude each other.
        ArgumentError: (a ValueError) a number is out of range.
        ArgumentTypeError: (a TypeError) something is of another type.
    """
    require_names(kind, table, options)
    require_policy(policy)
    asked = dict(options)
    device = asked.get("device")
    for name in _DEVICES:
        asked[name] = device if asked.get(name) is None else asked[name]
    values = without_ignored(checked(table, asked, _CHECKS))
    values |= {name: values.get(name) or 0 for name in _LIMITS}
    tracker = values.get("track_policy_version")
    if isinstance(tracker, PolicyVersion):
        values |= {"policy_version_tracker": tracker, "track_policy_version": True}
    extends = values.pop("extend_buffer", None)
    has_buffer = values.get("replay_buffer") is not None
    if extends and not values.get("replay_buffer_chunk", True):
        raise OptionError(
            "extend_buffer=True and replay_buffer_chunk=False contradict each other: they are two names of one option. "
            "Pass one of them."
        )
    if extends is not None and has_buffer:
        values["replay_buffer_chunk"] = extends
    if has_buffer and values.get("trajs_per_batch") is not None:
        values["traj_format"] = "cat"  # a buffer holds transitions, and no padding
    settings = CollectorSettings(**values)
    _require_fitting(settings, policy)
    return settings


def require_names(kind: Any, table: type, names: Iterable[str]) -> None:
    """Check that a table has each of the keywords that a kind of collectors is to take.

    Raises:
        OptionError: (a TypeError) one is for collectors with workers alone, or unknown.
    """
    others = [name for name in names if name not in table.__annotations__]
    of_workers = {*WorkerOptions.__annotations__, "num_collectors", "backend_options"}
    for name in others:
        if name in of_workers:
            raise OptionError(
                f"{name!r} is a keyword of collectors with workers, but {kind.__name__} collects {kind._kind}. "
                "Use Collector(..., backend='process'), or leave it out."
            )
    refuse_unknown(kind.__name__, others, known_to(kind) or list(table.__annotations__))


# -------------------------------------------------------------------------------- one by one


def _count(meaning: str, least: int = 1) -> Check:
    return partial(as_int, least=least, meaning=meaning)


def _each(check: Check) -> Check:
    """Check one value, or a list of one for each worker."""

    def checks(name: str, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return check(name, value)
        return [None if one is None else check(name, one) for one in value]

    return checks


def _as_frames(name: str, value: Any) -> int | list[int]:
    if not isinstance(value, list | tuple):
        return as_int(name, value, least=1, meaning="the transitions of a batch")
    meaning = "the transitions of a worker"
    return [
        as_int(f"{name}[{worker}]", one, least=1, meaning=meaning)
        for worker, one in enumerate(value)
    ]


def _as_limit(name: str, value: Any) -> int:
    meaning = "a number of frames; None, 0 and -1 set no limit"
    return max(0, as_int(name, value, least=-1, meaning=meaning))


def _as_total(name: str, value: Any) -> int | None:
    meaning = "the number of frames to collect, or -1 for no end"
    return None if value == -1 else as_int(name, value, least=1, meaning=meaning)


def _as_factory(name: str, value: Any) -> Any:
    require_callable(name, value, is_optional=True)
    return value


def _as_switch_or_keywords(name: str, value: Any) -> Any:
    try:
        return value if isinstance(value, Mapping) else as_bool(name, value)
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"{name} is {value!r}, but must be True, False, or a dict of keywords. Pass one of these."
        ) from None


def _as_device(name: str, value: Any) -> torch.device:
    try:
        device = as_device(value)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
        raise DeviceNameError(
            f"{name} is {value!r}, which is no device that torch has here ({reason}). Pass 'cpu', or 'cuda' where there "
            "is one."
        ) from error
    return device


def _as_version(name: str, value: Any) -> bool | PolicyVersion:
    if not isinstance(value, PolicyVersion):
        return as_bool(name, value)
    if not value.counts or value.version:
        raise ArgumentError(
            f"{name} is a PolicyVersion whose version is {value.version!r}, but a collector counts updates of its policy from "
            "0. Pass a new PolicyVersion('int')."
        )
    return value


def _as_exploration_type(name: str, value: Any) -> ExplorationType:
    if not isinstance(value, ExplorationType):
        raise ArgumentTypeError(
            f"{name} is {value!r}, but must be an ExplorationType. Pass one of "
            f"{', '.join(f'ExplorationType.{name}' for name in ExplorationType.__members__)}."
        )
    return value


def _as_interruptor(name: str, value: Any) -> Any:
    if not callable(getattr(value, "collection_stopped", None)):
        raise ArgumentTypeError(
            f"{name} is {value!r}, of type {type(value).__name__}, but must have a method "
            "collection_stopped(), which says whether to stop. Pass an object that has it."
        )
    return value


_THREADS = _count("the number of threads that torch uses")
_CHECKS: dict[str, Check] = {
    "frames_per_batch": _as_frames,
    "trajs_per_batch": _count("the episodes of a batch"),
    "trajs_per_write": _count("the episodes that are put into the buffer at once"),
    "total_frames": _as_total,
    **dict.fromkeys(_LIMITS, _as_limit),
    "prefetch": _count("0, or 1 batch ahead", least=0),
    "seed": _count("the seed of all envs and generators", least=0),
    "worker_idx": _count("the number of a worker", least=0),
    **dict.fromkeys(_DEVICES, _each(_as_device)),
    "device": _as_device,
    "create_env_kwargs": _each(partial(as_keywords, example="{'size': 3}")),
    "policy_factory": _each(_as_factory),
    "compile_policy": _as_switch_or_keywords,
    "cudagraph_policy": _as_switch_or_keywords,
    "exploration_type": _as_exploration_type,
    "track_policy_version": _as_version,
    "interruptor": _as_interruptor,
    "weight_sync_schemes": as_weight_sync_schemes,
    "preemptive_threshold": partial(
        as_number,
        least=0,
        most=1,
        meaning="the share of the workers that is waited for, e.g. 0.8, or None to wait for all",
    ),
    "num_threads": _THREADS,
    "num_sub_threads": _THREADS,
    "max_restarts": _count("the most restarts before an error is raised", least=0),
    "timeout": as_seconds,
    "start_timeout": as_seconds,
}


# ---------------------------------------------------------------------------------- together


def _require_fitting(settings: CollectorSettings, policy: Any) -> None:
    """Check that options do not exclude each other.

    Raises:
        OptionError, ArgumentError, ArgumentTypeError: they do.
    """
    by_episode, whole = settings.trajs_per_batch is not None, settings.replay_buffer_chunk
    needs_episodes = by_episode or settings.split_trajs
    buffer, adds = settings.replay_buffer, "extend" if settings.replay_buffer_chunk else "add"
    if settings.frames_per_batch is None and not by_episode:
        raise OptionError(
            "frames_per_batch and trajs_per_batch are both None. Pass one of them: transitions in a batch, or whole "
            "episodes."
        )
    if settings.prefetch > 1:
        raise ArgumentError(
            f"prefetch is {settings.prefetch}, but at most 1 batch is made ahead. Pass 0 or 1."
        )
    if settings.traj_format == "cat" and not by_episode:
        raise ArgumentError(
            "traj_format is 'cat', but batches are of frames_per_batch transitions. Pass trajs_per_batch= for batches of "
            "whole episodes, or leave traj_format out."
        )
    if settings.trajs_per_write is not None and not (by_episode and buffer is not None):
        raise OptionError(
            "trajs_per_write says how many episodes go into a replay buffer at once, so it needs trajs_per_batch= "
            "and replay_buffer=. Pass both, or leave it out."
        )
    if not settings.track_traj_ids and needs_episodes:
        raise ArgumentError(
            "track_traj_ids=False leaves out what tells episodes apart, which split_trajs and trajs_per_batch need. "
            "Leave it out."
        )
    if settings.interruptor is not None and needs_episodes:
        raise OptionError(
            "interruptor ends batches early, so it does not go with trajs_per_batch or split_trajs. Leave one out."
        )
    if not settings.reset_when_done and needs_episodes:
        raise OptionError(
            "reset_when_done=False steps envs on beyond the end of an episode, so batches cannot be split into "
            "episodes. Leave out split_trajs or trajs_per_batch."
        )
    if settings.policy_factory is not None and policy is not None:
        raise OptionError("policy and policy_factory are both given. Pass one of them.")
    if not whole and (settings.postproc is not None or needs_episodes):
        raise OptionError(
            "replay_buffer_chunk=False puts single steps into the buffer, so there are no batches for "
            "postproc, split_trajs or trajs_per_batch. Leave one of them out."
        )
    if not whole and buffer is None:
        raise OptionError("replay_buffer_chunk=False needs a replay_buffer. Pass replay_buffer=.")
    stacks = settings.cat_results in (None, "stack")
    if not whole and stacks and settings.preemptive_threshold is not None:
        raise OptionError(
            "replay_buffer_chunk=False puts steps of all workers into the buffer side by side, but with "
            "preemptive_threshold workers make different numbers of them. Pass cat_results=-1."
        )
    if buffer is not None and not callable(getattr(buffer, adds, None)):
        raise ArgumentTypeError(
            f"replay_buffer is {buffer!r}, of type {type(buffer).__name__}, but must have a method {adds}(batch). Pass "
            "a replay buffer, e.g. one of torchrl.data."
        )
    for name, other, reason in _EXCLUSIVE:
        if getattr(settings, name) is not None and getattr(settings, other):
            raise OptionError(
                f"{name} and {other} are both given, but {reason}. Leave one of them out."
            )


_EXCLUSIVE = (
    ("trajs_per_batch", "split_trajs", "batches of whole episodes are split already"),
    ("trajs_per_batch", "set_truncated", "whole episodes have ended already"),
    ("trajs_per_batch", "reset_at_each_iter", "unfinished episodes continue in the next batch"),
    ("preemptive_threshold", "trajs_per_batch", "whole episodes are waited for"),
    ("preemptive_threshold", "split_trajs", "episodes that are stopped short have no end"),
)


# -------------------------------------------------------------------------------------- kinds


_KINDS: dict[str | None, tuple[str, str]] = {
    None: ("SyncDataCollector", "SyncDataCollector"),
    "direct": ("SyncDataCollector", "SyncDataCollector"),
    "process": ("MultiSyncDataCollector", "MultiaSyncDataCollector"),
    "ray": ("MultiSyncDataCollector", "MultiaSyncDataCollector"),
}


def kind_for(
    backend: str | None, sync: bool, asked: type | None = None, *, has_workers: bool = False
) -> Any:
    """Return the class of collectors with a backend.

    Args:
        backend: see `Collector`.
        sync: see `Collector`.
        asked: the class that was called; one with workers alone has no kind that collects here. A subclass of the
            user's that does not say how it collects gets its own class below it, which does.
        has_workers: a number of workers was passed: without a backend they are processes.

    Raises:
        ArgumentError: (a ValueError) there is no such backend.
    """
    require_option("backend", backend, [*filter(None, _KINDS), None])
    has_workers = has_workers or getattr(asked, "_has_workers", False)
    if backend is None and has_workers:
        backend = "process"
    kind = late(_KINDS[backend][not sync])
    if asked is None or issubclass(kind, asked):
        return kind
    return _completed(asked, kind)


@cache
def _completed(asked: type, kind: type) -> type:
    """Build a class of the user's, e.g. ``class Mine(Collector)``, one that collects as ``kind`` does."""
    members = {"__module__": asked.__module__, "__doc__": asked.__doc__}
    return type(asked)(asked.__name__, (asked, kind), members)
