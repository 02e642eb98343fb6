"""The keywords of every batched env: type, default and meaning of each, and what is refused before any sub-env is built.

`PoolOptions` is the one list of them, which the classes show and type checkers read. Their effect is
decided where they are used, but for limits that outlast a call: of time, and of torch's threads. There is one number of
threads for the whole process, and envs begin and end in any order. The limit of the newest env that runs holds, and
after the last one the number before the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, get_args

import torch

from envkit.arrays.integers import as_int
from envkit.data.arguments import as_bool, as_bool_or_none, require_option
from envkit.data.keywords import Default, refuse_unknown
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


class AsyncOptions(TypedDict, total=False):
    """Keywords of every pool of sub-envs.

    Args:
        device: where data is delivered; None takes the device of the sub-envs.
        num_sub_threads: torch threads of each worker process.
        timeout: seconds a step, reset or any other call may take; None sets no limit.
        start_timeout: seconds that building sub-envs may take, at the start or when they are built again;
            None sets no limit. Both may be assigned while the env runs.
        on_worker_failure: "raise", or "restart": an env that raises loses its row, a process that
            dies or hangs those it held. Lost rows end their episode with ``truncated``, at their
            last root values and no reward, and go on with new envs.
        max_restarts: with "restart", how many there may be before the error is raised after all.
        use_buffers: exchange rows in memory; None does where it can. It cannot where a spec has no
            fixed size or is no tensor, or sub-envs differ in layout; asking for it there warns. Where
            a `SerialEnv` is given None, sub-envs that do not step on NumPy rows hand on TensorDicts all
            the same, which keep the autograd graph; the attribute says True there too.
        allow_done_after_reset: accept done flags right after a reset; those of sub-envs that do so
            are accepted anyway.
    """

    device: Annotated[Device | None, Default(None)]
    num_sub_threads: Annotated[int, Default(1)]
    timeout: Annotated[float | None, Default(60.0)]
    start_timeout: Annotated[float | None, Default(60.0)]
    on_worker_failure: Annotated[Literal["raise", "restart"], Default("raise")]
    max_restarts: Annotated[int, Default(10)]
    use_buffers: Annotated[bool | None, Default(None)]
    allow_done_after_reset: Annotated[bool, Default(False)]


class PoolOptions(AsyncOptions, total=False):
    """Keywords of `SerialEnv` and `ParallelEnv`, beside those of `envkit.batched.settings.AsyncOptions`.

    Args:
        create_env_kwargs: keywords for ``create_env_fn``: a dict, or a list of one dict per sub-env.
        share_individual_td: True gives each sub-env its own TensorDict and results are lazy
            stacks; False gives dense results; None gives those where the sub-envs agree in keys,
            shapes and dtypes.
        shared_memory: rows lie in memory that all processes map.
        memmap: rows lie in a memory-mapped file; needs ``shared_memory=False``. With both False,
            `ParallelEnv` sends TensorDicts. One process shares nothing: `SerialEnv` uses ordinary
            memory, whatever these say.
        policy_proof: policy that writes root entries which no sub-env declares, e.g. hidden states. It is called once,
            on zeros; these entries travel with the data then, and are zero where an episode begins.
        num_threads: torch threads of this process while the workers run; None leaves them alone.
        serial_for_single: give a `SerialEnv` where `ParallelEnv` is asked for one sub-env.
        non_blocking: copies to the device of delivery do not wait for it.
        num_processes: processes that share the sub-envs evenly; None takes one per core, at most
            one per sub-env. Shows in no result.
        backend: "process", or "ray": the workers are actors of a Ray cluster, which may be other machines.
            ``num_processes`` is then the number of actors; None takes one for each CPU of the cluster.
        backend_options: see `envkit.batched.settings.RayOptions`; processes have none.
        pin_memory: False, and nothing else, as in TorchRL; `PinMemoryTransform` pins the data of any env.
        allow_step_when_done: False, and nothing else, as in TorchRL.
        shutdown_timeout: seconds that worker processes may take to close their sub-envs when the env is closed; those
            that take longer are terminated.
        consolidate, daemon, metadata_from_workers: taken as in TorchRL, without effect: data travels as
            ``use_buffers`` says, workers always end with this process, and metadata is read in the workers.

    `SerialEnv` takes the keywords about threads, processes, backends and time too, without effect.
    """

    create_env_kwargs: Annotated[dict[str, Any] | Sequence[dict[str, Any]] | None, Default(None)]
    share_individual_td: Annotated[bool | None, Default(None)]
    shared_memory: Annotated[bool, Default(True)]
    memmap: Annotated[bool, Default(False)]
    policy_proof: Annotated[Callable[..., Any] | None, Default(None)]
    num_threads: Annotated[int | None, Default(None)]
    serial_for_single: Annotated[bool, Default(False)]
    non_blocking: Annotated[bool, Default(True)]
    num_processes: Annotated[int | None, Default(None)]
    backend: Annotated[Backend, Default("process")]
    backend_options: Annotated[RayOptions | None, Default(None)]
    pin_memory: Annotated[bool, Default(False)]
    allow_step_when_done: Annotated[bool, Default(False)]
    shutdown_timeout: Annotated[float, Default(10.0)]
    consolidate: Annotated[bool, Default(True)]
    daemon: Annotated[bool, Default(False)]
    metadata_from_workers: Annotated[bool, Default(False)]


def require_usable(num_workers: int, options: Any) -> None:
    """Check numbers and choices among the options; numbers are written back as ints.

    Args:
        num_workers: number of sub-envs.
        options: the entries of `PoolOptions` as attributes.

    Raises:
        ArgumentTypeError: one is of another type.
        ArgumentError: a number is out of range, there is no such backend, or ``pin_memory`` or
            ``allow_step_when_done`` is True.
        OptionError: (a TypeError) see `backend_options_of`.
        MemoryKindError: ``shared_memory`` and ``memmap`` are both True.
    """
    require_option("backend", options.backend, get_args(Backend))
    options.backend_options = backend_options_of(options.backend, options.backend_options)
    if options.num_processes is not None:
        meaning = "the number of processes, or leave it out to take one for each core"
        options.num_processes = as_int(
            "num_processes", options.num_processes, least=1, meaning=meaning
        )
        if options.num_processes > num_workers:
            raise ArgumentError(
                f"num_processes is {options.num_processes}, but must be between 1 and num_workers "
                f"({num_workers}). Pass {meaning}."
            )
    if options.num_threads is not None:
        meaning = "the torch threads of this process, or leave it out to change nothing"
        options.num_threads = as_int("num_threads", options.num_threads, least=1, meaning=meaning)
    meaning = "the torch threads of each worker"
    options.num_sub_threads = as_int(
        "num_sub_threads", options.num_sub_threads, least=1, meaning=meaning
    )
    for name in ("use_buffers", "share_individual_td"):
        setattr(options, name, _choice(name, getattr(options, name)))
    if as_bool("pin_memory", options.pin_memory):
        raise ArgumentError(
            "pin_memory is True, but rows of sub-envs cannot be pinned; expected False. Append "
            "PinMemoryTransform() to the env to pin what it returns."
        )
    if as_bool("allow_step_when_done", options.allow_step_when_done):
        raise ArgumentError(
            "allow_step_when_done is True, but a finished episode cannot be stepped; expected False. Reset the rows "
            "that are done, e.g. with step_and_maybe_reset."
        )
    for name in _SWITCHES:
        setattr(options, name, as_bool(name, getattr(options, name)))
    if options.shutdown_timeout is None:
        raise ArgumentTypeError(
            "shutdown_timeout is None, but must be a positive number of seconds: workers end in bounded time. Pass 10, for "
            "example."
        )
    as_seconds("shutdown_timeout", options.shutdown_timeout)
    if options.shared_memory and options.memmap:
        raise MemoryKindError(
            "shared_memory and memmap are both True, but rows lie in one of them. "
            "Pass shared_memory=False with memmap=True."
        )


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


_SWITCHES = (
    *("shared_memory", "memmap", "serial_for_single", "non_blocking"),
    *("consolidate", "daemon", "metadata_from_workers"),
)


def _choice(name: str, value: Any) -> bool | None:
    """Return a choice between yes, no and None, which leaves it to the env.

    Raises:
        ArgumentTypeError: it is something else.
    """
    try:
        return as_bool_or_none(name, value)
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"{name} is {value!r}, of type {type(value).__name__}, but must be True, False or None. "
            "Leave it out to let the env choose."
        ) from None


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
    return value


class ThreadLimit:
    """A limit that holds from now on until `end`."""

    _lock = threading.RLock()  # an env may be collected, and end its limit, at any moment
    _running: list[ThreadLimit] = []  # noqa: RUF012  (of this process, as the number itself)
    _before = 0

    def __init__(self, num_threads: int):
        self.num_threads = num_threads
        with self._lock:
            if not self._running:
                ThreadLimit._before = torch.get_num_threads()
            self._running.append(self)
            torch.set_num_threads(num_threads)

    def end(self) -> None:
        """Let the limit of the newest env that still runs hold, or the number before all of them."""
        with self._lock:
            self._running.remove(self)
            newest = self._running[-1].num_threads if self._running else ThreadLimit._before
            torch.set_num_threads(newest)
