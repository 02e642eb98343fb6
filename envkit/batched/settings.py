"""The keywords of every batched env: names and types, and what is refused before any sub-env is built.

`PoolOptions` lists the keywords for type checkers, and `ParallelEnv` describes them; `PoolSettings` is what they are
parsed to, with the defaults. Their effect is decided where they are used, but for limits of time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict

from envkit.arrays.integers import as_int
from envkit.data.arguments import Check, checked
from envkit.data.keywords import known_to, refuse_unknown
from envkit.data.torchrl_names import FALSE_ONLY, as_false
from envkit.env.options import CallOptions
from envkit.errors import ArgumentError, ArgumentTypeError, MemoryKindError, OptionError
from envkit.specs.annotations import Device

Backend = Literal["process", "ray"]
"""Where the sub-envs of a `ParallelEnv` are: in processes of this machine, or in actors of a Ray cluster."""


class RayOptions(TypedDict, total=False):
    """Keys of ``backend_options`` for ``backend="ray"``; left out, each is as Ray has it.

    Args:
        address: of the cluster, as ``ray.init`` takes it, which is called only if Ray is not initialised.
        num_cpus, num_gpus, resources: what each actor asks of the machine that it is placed on.
        max_restarts: how often Ray may start an actor again by itself. The state of the actor is lost all the same, see
            ``on_worker_failure``.
        runtime_env: surroundings of each actor: environment variables, packages, files.
    """

    address: str | None
    num_cpus: float
    num_gpus: float
    resources: dict[str, float]
    max_restarts: int
    runtime_env: dict[str, Any]


class AsyncOptions(CallOptions, total=False):
    """Keywords of every pool of sub-envs, which `envkit.ParallelEnv` describes."""

    device: Device | None
    num_sub_threads: int
    timeout: float | None
    start_timeout: float | None
    on_worker_failure: Literal["raise", "restart"]
    max_restarts: int
    use_buffers: bool | None
    allow_done_after_reset: bool


class PoolOptions(AsyncOptions, total=False):
    """Keywords of `SerialEnv` and `ParallelEnv`, which `envkit.ParallelEnv` describes."""

    create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None
    share_individual_td: bool | None
    shared_memory: bool
    memmap: bool
    policy_proof: Callable[..., Any] | None
    num_threads: int | None
    serial_for_single: bool
    non_blocking: bool
    num_processes: int | None
    backend: Backend
    backend_options: RayOptions | None
    mp_start_method: str | None
    pin_memory: bool
    allow_step_when_done: bool
    shutdown_timeout: float
    consolidate: bool
    daemon: bool
    metadata_from_workers: bool


@dataclass(frozen=True)
class PoolSettings:
    """`PoolOptions`, checked; see `parsed_options`.

    Raises:
        OptionError: (a TypeError) see `backend_options_of`.
        MemoryKindError: ``shared_memory`` and ``memmap`` are both True.
    """

    device: Device | None = None
    num_sub_threads: int = 1
    timeout: float | None = 60.0
    start_timeout: float | None = 60.0
    on_worker_failure: Literal["raise", "restart"] = "raise"
    max_restarts: int = 10
    use_buffers: bool | None = None
    allow_done_after_reset: bool = False
    create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None
    share_individual_td: bool | None = None
    shared_memory: bool = True
    memmap: bool = False
    policy_proof: Callable[..., Any] | None = None
    num_threads: int | None = None
    serial_for_single: bool = False
    non_blocking: bool = True
    num_processes: int | None = None
    backend: Backend = "process"
    backend_options: RayOptions | None = None
    mp_start_method: str | None = None
    pin_memory: bool = False
    allow_step_when_done: bool = False
    shutdown_timeout: float = 10.0
    consolidate: bool = True
    daemon: bool = False
    metadata_from_workers: bool = False

    def __post_init__(self) -> None:
        backend_options_of(self.backend, self.backend_options)
        if self.shared_memory and self.memmap:
            raise MemoryKindError(
                "shared_memory and memmap are both True, but rows lie in one of them. "
                "Pass shared_memory=False with memmap=True."
            )


def require_names(kind: type, table: type, options: Mapping[str, Any]) -> None:
    """Check that a table has each of the keywords that were passed to a kind of pool.

    Raises:
        OptionError: (a TypeError) one is unknown.
    """
    others = [name for name in options if name not in table.__annotations__]
    hint = "Pass keywords of the sub-envs as create_env_kwargs={...}."
    refuse_unknown(kind.__name__, others, known_to(kind) or list(table.__annotations__), hint)


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check entries of `PoolOptions` one by one, and return them in the form in which they are used.

    Raises:
        ArgumentTypeError: one is of another type.
        ArgumentError: a number is out of range, a word is none of those that there are, or ``pin_memory`` or
            ``allow_step_when_done`` is True.
    """
    return checked(PoolOptions, options, _CHECKS)


def backend_options_of(backend: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check the options of a backend, and give them as a dict of one's own.

    Raises:
        ArgumentTypeError: they are no mapping.
        OptionError: (a TypeError) one is unknown, or the backend has none.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ArgumentTypeError(
            f"backend_options is of type {type(options).__name__}, but must be a dict. Pass "
            "{'num_cpus': 1} with backend='ray'."
        )
    if options and backend != "ray":
        raise OptionError(
            f"backend_options has {sorted(options)}, but backend={backend!r} has no options. Leave them out, "
            "or pass backend='ray'."
        )
    refuse_unknown("backend_options", options, list(RayOptions.__annotations__))
    return dict(options)


def _count(meaning: str, least: int = 1) -> Check:
    return partial(as_int, least=least, meaning=meaning)


def _as_bounded_seconds(name: str, value: Any) -> float:
    if value is None:
        raise ArgumentTypeError(
            f"{name} is None, but must be a positive number of seconds: workers end in bounded time. Pass 10, for example."
        )
    return as_seconds(name, value)


class Limit:
    """An attribute that limits how long a pool may take; a running pool uses a new value at once."""

    def __init__(self, doc: str):
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, env: Any, owner: type | None = None) -> float | None:
        return self if env is None else vars(env)[f"_{self._name}_s"]  # type: ignore[return-value]

    def __set__(self, env: Any, seconds: float | None) -> None:
        as_seconds(self._name, seconds)
        vars(env)[f"_{self._name}_s"] = seconds
        if (pool := vars(env).get("_pool")) is not None:
            setattr(pool, f"{self._name}_s", seconds)


def as_seconds(name: str, value: Any) -> Any:
    """Return a limit of time; None sets none.

    Raises:
        ArgumentTypeError: it is no number.
        ArgumentError: it is not above 0.
    """
    if value is None:
        return None
    try:
        is_positive = bool(value > 0)
    except TypeError:
        raise ArgumentTypeError(
            f"{name} is {value!r}, of type {type(value).__name__}, but must be a positive number of "
            "seconds, or None for no limit. Pass 60, for example."
        ) from None
    if not is_positive:
        raise ArgumentError(
            f"{name} is {value}, but must be a positive number of seconds, or None for no limit. Pass 60, for example."
        )
    return float(value)


_CHECKS: dict[str, Check] = {
    "num_processes": _count("the number of processes, or leave it out to take one for each core"),
    "num_threads": _count("the torch threads of this process, or leave it out to change nothing"),
    "num_sub_threads": _count("the torch threads of each worker"),
    "max_restarts": _count("the most restarts before an error is raised", least=0),
    "timeout": as_seconds,
    "start_timeout": as_seconds,
    "shutdown_timeout": _as_bounded_seconds,
    **dict.fromkeys(FALSE_ONLY, as_false),
}
