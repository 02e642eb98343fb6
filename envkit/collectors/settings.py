"""The kinds of collectors and their keywords: type, default and meaning of each, and what is refused before anything is built.

`CollectorOptions` and `WorkerOptions` are the one list of them, which the classes show and type checkers read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

import torch

from envkit.arrays.integers import as_int
from envkit.batched.recovery import allowed_restarts
from envkit.batched.settings import require_seconds
from envkit.collectors.runner import RunnerOptions
from envkit.data.arguments import as_bool, as_keywords, as_number, require_callable, require_option
from envkit.data.keywords import Default, known_to, refuse_unknown
from envkit.env.policy import ExplorationType, require_policy
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceNameError,
    OptionError,
)
from envkit.lazy_imports import late
from envkit.specs.annotations import Device, as_device


class CollectorOptions(TypedDict, total=False):
    """Keywords of every collector. One of the first two is given.

    Args:
        frames_per_batch: transitions in a batch, over all envs; with a batch of B envs, each makes
            ``ceil(frames_per_batch / B)`` steps, with a warning where that is more. With workers also a list of one
            number for each: of what the worker makes of a batch, or asynchronously of its batches.
        trajs_per_batch: whole episodes in a batch instead, in the order in which they end. Frames of
            unfinished ones wait; none is lost or used twice. ``frames_per_batch`` then is how many transitions are made
            at once; without it, 32 of each env.
        trajs_per_write: with ``trajs_per_batch`` and a ``replay_buffer``, how many episodes one call of ``extend`` puts in;
            None: all that were delivered together.
        traj_format: "padded" gives episodes a row each, with a mask beside ``traj_ids``; "cat" one after the other. Into a
            ``replay_buffer`` they always go one after the other.
        total_frames: frames after which the collector is at its end; None or -1 sets no end. The last batch is whole: a
            number that is no multiple of ``frames_per_batch`` collects some more, with a warning.
        device: stands in for each of the next three that is not given.
        storing_device: where batches are delivered; None leaves them where they are, in memory of the CPU where they come
            from workers, and their device unset.
        env_device: where the env is; its own by default.
        policy_device: where the policy acts, a copy if it is elsewhere.
        create_env_kwargs: keywords for ``create_env_fn``; with workers, a dict for all or a list of one each.
        max_frames_per_traj: steps after which an episode is truncated (`StepCounter`); None, 0 and -1 set no limit.
        init_random_frames: actions are random until so many frames were collected, in whole batches; with
            ``trajs_per_batch``, in what is made at once. Other entries that the policy writes are zero there;
            to learn their shapes, it is called once with the first root. All batches have ``("collector", "random_action")``, bool: which
            actions were drawn.
        reset_at_each_iter: reset all envs before each batch.
        postproc: callable from batch to batch, a transform for instance; called last. It is moved to ``storing_device`` if it
            has ``to``.
        split_trajs: pass each batch through `split_trajectories`.
        exploration_type: how the policy acts.
        reset_when_done: begin a new episode where one has ended, within the batch.
        set_truncated: mark the last step of every batch ``truncated`` and ``done``.
        use_buffers: let batches of workers cross in shared memory; None does where their entries have fixed sizes.
        replay_buffer: what batches are put into, by ``extend``; the iterator then yields None.
        replay_buffer_chunk: put whole batches in; False: ``add`` every step as it comes.
        extend_buffer: TorchRL's name for ``replay_buffer_chunk``.
        trust_policy: call the policy with the TensorDict whatever its signature, and do not try it out.
        compile_policy: `torch.compile` the policy; True, or its keywords.
        cudagraph_policy: capture the policy as a CUDA graph; True, or keywords of ``CudaGraphModule``.
        policy_factory: makes the policy where it acts, instead of ``policy``; with workers, one for all or a
            list of one each.
        prefetch: 1 makes the next batch while the caller trains on this one, with weights one update older.
        track_policy_version: record the version of the policy that acted, ``"policy_version"`` and
            ``("next", "policy_version")``, int64 of the batch size.
        track_traj_ids: False leaves ``("collector", "traj_ids")`` out of batches.
        compact_obs: leave observations and states out of ``next``, which the next root has too; what follows the last
            step of a trajectory is lost then.
        return_contiguous: copy batches that lie time first in memory, as those that a stateless env makes in one program do,
            so that ``batch.view(-1)`` works. All others are contiguous anyway.
        auto_register_policy_transforms: append to the env what a policy with recurrent modules needs, where the env does
            not show it; None does so too, False never.
        seed: seed envs and torch's generators, here and in workers, as `Collector.set_seed` does, before anything is
            collected: the same seed gives the same data.
        progress: show a bar with frames per second, mean return and length of the episodes that ended.
        record_state: keep the state of a stateless env at every step.
        record_for_resume: have envs on simulators write down their episodes, so that `state_dict` can say where they are;
            see `EnvBase.record_for_resume` for what that costs.
        pre_collect_hook: called before each batch is asked for.
        post_collect_hook: called with each batch before it is delivered.
        interruptor: for collectors in this process: has ``collection_stopped()``, which is asked after each step; True ends
            the batch there. Steps that were not made are zero, with number -1 and ``("collector", "mask")`` False.
        worker_idx: number that `Collector.worker_idx` gives, for who runs collectors in their own workers.
        weight_sync_schemes: without effect, as ``{"policy": scheme}`` of TorchRL: weights of the policy travel through
            shared memory whenever ``update_policy_weights_`` is called.
        return_same_td, no_cuda_sync: without effect: batches are always new, and the collector does not synchronise
            devices itself. Programs for TorchRL pass them.
    """

    frames_per_batch: Annotated[int | Sequence[int] | None, Default(None)]
    trajs_per_batch: Annotated[int | None, Default(None)]
    trajs_per_write: Annotated[int | None, Default(None)]
    traj_format: Annotated[Literal["padded", "cat"], Default("padded")]
    total_frames: Annotated[int | None, Default(-1)]
    device: Annotated[Device | None, Default(None)]
    storing_device: Annotated[Device | Sequence[Device] | None, Default(None)]
    env_device: Annotated[Device | Sequence[Device] | None, Default(None)]
    policy_device: Annotated[Device | Sequence[Device] | None, Default(None)]
    create_env_kwargs: Annotated[dict[str, Any] | Sequence[dict[str, Any]] | None, Default(None)]
    max_frames_per_traj: Annotated[int | None, Default(None)]
    init_random_frames: Annotated[int | None, Default(None)]
    reset_at_each_iter: Annotated[bool, Default(False)]
    postproc: Annotated[Callable[[Any], Any] | None, Default(None)]
    split_trajs: Annotated[bool | None, Default(None)]
    exploration_type: Annotated[ExplorationType, Default(ExplorationType.RANDOM)]
    reset_when_done: Annotated[bool, Default(True)]
    set_truncated: Annotated[bool, Default(False)]
    use_buffers: Annotated[bool | None, Default(None)]
    replay_buffer: Annotated[Any, Default(None)]
    replay_buffer_chunk: Annotated[bool, Default(True)]
    extend_buffer: Annotated[bool | None, Default(None)]
    trust_policy: Annotated[bool | None, Default(None)]
    compile_policy: Annotated[bool | Mapping[str, Any] | None, Default(None)]
    cudagraph_policy: Annotated[bool | Mapping[str, Any] | None, Default(None)]
    policy_factory: Annotated[Callable[[], Any] | Sequence[Callable[[], Any]] | None, Default(None)]
    prefetch: Annotated[int, Default(0)]
    track_policy_version: Annotated[bool, Default(False)]
    track_traj_ids: Annotated[bool, Default(True)]
    compact_obs: Annotated[bool, Default(False)]
    return_contiguous: Annotated[bool, Default(False)]
    auto_register_policy_transforms: Annotated[bool | None, Default(None)]
    seed: Annotated[int | None, Default(None)]
    progress: Annotated[bool, Default(False)]
    record_state: Annotated[bool, Default(False)]
    record_for_resume: Annotated[bool, Default(False)]
    pre_collect_hook: Annotated[Callable[[], Any] | None, Default(None)]
    post_collect_hook: Annotated[Callable[[Any], Any] | None, Default(None)]
    interruptor: Annotated[Any, Default(None)]
    worker_idx: Annotated[int | None, Default(None)]
    weight_sync_schemes: Annotated[Mapping[str, Any] | None, Default(None)]
    return_same_td: Annotated[bool, Default(False)]
    no_cuda_sync: Annotated[bool, Default(False)]


class WorkerOptions(CollectorOptions, total=False):
    """Keywords of collectors with workers, beside those of `envkit.collectors.settings.CollectorOptions`.

    Args:
        num_workers: repeats one ``create_env_fn`` so many times.
        update_at_each_batch: call `update_policy_weights_` before (sync) or after (async) each batch.
        preemptive_threshold: share of the workers, in [0, 1]: when so many have finished, the others stop where
            they are.
        num_threads: torch threads of this process while the workers run; None leaves them alone.
        num_sub_threads: torch threads of each worker.
        cat_results: how batches of workers are joined. "stack" puts an axis of workers in front, an int
            concatenates along that axis, -1 along time. None is "stack", -1 where workers make different numbers of
            steps, and with a ``replay_buffer`` it and "stack" are 0: a buffer holds transitions, not workers. Batches of `MultiaSyncDataCollector` come from one worker each.
        on_worker_failure: "raise", or "restart": a lost worker is replaced by one with the newest weights, its
            unfinished episodes end with ``truncated``.
        max_restarts: with "restart", how many there may be before the error is raised after all.
        timeout: seconds a batch may take; None sets no limit.
        start_timeout: seconds that building env and policy may take; None sets no limit.
        init_fn: called in each worker before it builds its env and policy, e.g. to start a simulator's application.
    """

    num_workers: Annotated[int | None, Default(None)]
    update_at_each_batch: Annotated[bool, Default(False)]
    preemptive_threshold: Annotated[float | None, Default(None)]
    num_threads: Annotated[int | None, Default(None)]
    num_sub_threads: Annotated[int, Default(1)]
    cat_results: Annotated[int | Literal["stack"] | None, Default(None)]
    on_worker_failure: Annotated[Literal["raise", "restart"], Default("raise")]
    max_restarts: Annotated[int, Default(10)]
    timeout: Annotated[float | None, Default(60.0)]
    start_timeout: Annotated[float | None, Default(60.0)]
    init_fn: Annotated[Callable[[], Any] | None, Default(None)]


_NUMBERS = {"seed": "the seed of all envs and generators", "worker_idx": "the number of a worker"}
_CALLABLE = ("postproc", "pre_collect_hook", "post_collect_hook")
_DEVICES = ("storing_device", "env_device", "policy_device")
_OF_EACH = (*_DEVICES, "create_env_kwargs", "policy_factory")


def checked(given: Any) -> Any:
    """Check what can be checked before anything is built, and bring numbers and devices into one form.

    Args:
        given: the entries of `CollectorOptions` as attributes; they are written back.

    Raises:
        OptionError: (a TypeError) options exclude each other.
        ArgumentError: (a ValueError) a number is out of range.
        ArgumentTypeError: (a TypeError) something is of another type.
    """
    for name, kind in get_type_hints(CollectorOptions).items():
        value = getattr(given, name)
        if kind is bool or (kind == bool | None and value is not None):
            setattr(given, name, as_bool(name, value))
    for name in _CALLABLE:
        require_callable(name, getattr(given, name), is_optional=True)
    for name in ("compile_policy", "cudagraph_policy"):
        setattr(given, name, _switch_or_keywords(name, getattr(given, name)))
    for factory in _entries(given.policy_factory):
        require_callable("policy_factory", factory, is_optional=True)
    for kwargs in _entries(given.create_env_kwargs):
        as_keywords("create_env_kwargs", kwargs, "{'size': 3}")
    for name, meaning in _NUMBERS.items():
        if (number := getattr(given, name)) is not None:
            setattr(given, name, as_int(name, number, least=0, meaning=meaning))
    require_policy(given.policy)
    _check_schemes(given.weight_sync_schemes)
    _take_extend_buffer(given)
    _check_amounts(given)
    _check_exclusive(given)
    for name in _DEVICES:
        value = getattr(given, name)
        setattr(given, name, _as_devices(name, value, given.device))
    if not isinstance(given.exploration_type, ExplorationType):
        raise ArgumentTypeError(
            f"exploration_type is {given.exploration_type!r}, but must be an ExplorationType. Pass one of "
            f"{', '.join(f'ExplorationType.{name}' for name in ExplorationType.__members__)}."
        )
    if given.replay_buffer is not None:
        _require_buffer(given.replay_buffer, "extend" if given.replay_buffer_chunk else "add")
    return given


def checked_workers(given: Any) -> Any:
    """Check what `WorkerOptions` has beside `CollectorOptions`; see `checked`."""
    given.update_at_each_batch = as_bool("update_at_each_batch", given.update_at_each_batch)
    for name in ("num_threads", "num_sub_threads"):
        if getattr(given, name) is not None or name == "num_sub_threads":
            meaning = "the number of threads that torch uses"
            setattr(given, name, as_int(name, getattr(given, name), least=1, meaning=meaning))
    allowed_restarts(given.on_worker_failure, given.max_restarts)
    require_callable("init_fn", given.init_fn, is_optional=True)
    if given.interruptor is not None:
        raise OptionError(
            "interruptor ends batches of collectors in this process. Workers are stopped by "
            "preemptive_threshold=: pass that, or use SyncDataCollector."
        )
    for name in ("timeout", "start_timeout"):
        require_seconds(name, getattr(given, name))
    _check_threshold(given)
    return given


def _check_schemes(schemes: Any) -> None:
    """Check schemes of TorchRL that say how weights travel, which they do here through shared memory."""
    if schemes is None:
        return
    if not isinstance(schemes, Mapping):
        raise ArgumentTypeError(
            f"weight_sync_schemes is of type {type(schemes).__name__}, but must be a dict. Pass "
            "{'policy': MultiProcessWeightSyncScheme()}, for example, or leave it out."
        )
    if others := [name for name in schemes if name != "policy"]:
        raise OptionError(
            f"weight_sync_schemes has {others}, but a collector sends the weights of its policy alone; expected "
            "'policy'. Change transforms of the envs with collector.call() or set_attr()."
        )
    if type(schemes.get("policy")).__name__ == "NoWeightSyncScheme":
        raise OptionError(
            "weight_sync_schemes has a NoWeightSyncScheme, but update_policy_weights_() always sends weights. Leave it "
            "out, and do not call that method."
        )


def _take_extend_buffer(given: Any) -> None:
    """Take `extend_buffer` over as ``replay_buffer_chunk``, its name here."""
    if given.extend_buffer is None:
        return
    if given.extend_buffer and not given.replay_buffer_chunk:
        raise OptionError(
            "extend_buffer=True and replay_buffer_chunk=False contradict each other: they are two names of one option. "
            "Pass one of them."
        )
    if given.replay_buffer is not None:
        given.replay_buffer_chunk = given.extend_buffer


def _check_threshold(given: Any) -> None:
    threshold = given.preemptive_threshold
    if threshold is None:
        return
    meaning = "the share of the workers that is waited for, e.g. 0.8, or None to wait for all"
    as_number("preemptive_threshold", threshold, least=0, most=1, meaning=meaning)
    for name, reason in (
        ("trajs_per_batch", "whole episodes are waited for"),
        ("split_trajs", "episodes that are stopped short have no end"),
    ):
        if getattr(given, name):
            raise OptionError(
                f"preemptive_threshold and {name} are both given, but {reason}. Leave one of them out."
            )
    if not given.replay_buffer_chunk and given.cat_results in (None, "stack"):
        raise OptionError(
            "replay_buffer_chunk=False puts steps of all workers into the buffer side by side, but with "
            "preemptive_threshold workers make different numbers of them. Pass cat_results=-1."
        )


def _check_amounts(given: Any) -> None:
    if given.frames_per_batch is None and given.trajs_per_batch is None:
        raise OptionError(
            "frames_per_batch and trajs_per_batch are both None. Pass one of them: transitions in a batch, or whole "
            "episodes."
        )
    for name, meaning in (
        ("frames_per_batch", "the transitions of a batch"),
        ("trajs_per_batch", "the episodes of a batch"),
    ):
        value = getattr(given, name)
        if name == "frames_per_batch" and isinstance(value, list | tuple):
            given.frames_per_batch = [
                as_int(f"{name}[{worker}]", frames, least=1, meaning="the transitions of a worker")
                for worker, frames in enumerate(value)
            ]
        elif value is not None:
            setattr(given, name, as_int(name, value, least=1, meaning=meaning))
    if given.total_frames is not None and given.total_frames != -1:
        meaning = "the number of frames to collect, or -1 for no end"
        given.total_frames = as_int("total_frames", given.total_frames, least=1, meaning=meaning)
    else:
        given.total_frames = None
    for name in ("init_random_frames", "max_frames_per_traj"):
        if getattr(given, name) is not None:
            meaning = "a number of frames; None, 0 and -1 set no limit"
            limit = as_int(name, getattr(given, name), least=-1, meaning=meaning)
            setattr(given, name, limit if limit > 0 else None)
    given.prefetch = as_int("prefetch", given.prefetch, least=0, meaning="0, or 1 batch ahead")
    if given.prefetch > 1:
        raise ArgumentError(
            f"prefetch is {given.prefetch}, but at most 1 batch is made ahead. Pass 0 or 1."
        )
    by_episode = given.trajs_per_batch is not None
    require_option("traj_format", given.traj_format, ("padded", "cat"))
    if given.traj_format == "cat" and not by_episode:
        raise ArgumentError(
            "traj_format is 'cat', but batches are of frames_per_batch transitions. Pass trajs_per_batch= for batches of "
            "whole episodes, or leave traj_format out."
        )
    if by_episode and given.replay_buffer is not None:
        given.traj_format = "cat"  # a buffer holds transitions, and no padding
    if given.trajs_per_write is not None:
        meaning = "the episodes that are put into the buffer at once"
        given.trajs_per_write = as_int(
            "trajs_per_write", given.trajs_per_write, least=1, meaning=meaning
        )
        if not by_episode or given.replay_buffer is None:
            raise OptionError(
                "trajs_per_write says how many episodes go into a replay buffer at once, so it needs trajs_per_batch= "
                "and replay_buffer=. Pass both, or leave it out."
            )


def _check_exclusive(given: Any) -> None:
    by_episode = given.trajs_per_batch is not None
    alone = {
        "split_trajs": "batches of whole episodes are split already",
        "set_truncated": "whole episodes have ended already",
        "reset_at_each_iter": "unfinished episodes continue in the next batch",
    }
    for name, reason in alone.items():
        if by_episode and getattr(given, name):
            raise OptionError(
                f"{name} and trajs_per_batch are both given, but {reason}. Leave one of them out."
            )
    if not given.track_traj_ids and (given.split_trajs or by_episode):
        raise ArgumentError(
            "track_traj_ids=False leaves out what tells episodes apart, which split_trajs and trajs_per_batch need. "
            "Leave it out."
        )
    stopped = given.interruptor
    if stopped is not None and not callable(getattr(stopped, "collection_stopped", None)):
        raise ArgumentTypeError(
            f"interruptor is {stopped!r}, of type {type(stopped).__name__}, but must have a method "
            "collection_stopped(), which says whether to stop. Pass an object that has it."
        )
    if stopped is not None and (by_episode or given.split_trajs):
        raise OptionError(
            "interruptor ends batches early, so it does not go with trajs_per_batch or split_trajs. Leave one out."
        )
    if not given.reset_when_done and (given.split_trajs or by_episode):
        raise OptionError(
            "reset_when_done=False steps envs on beyond the end of an episode, so batches cannot be split into "
            "episodes. Leave out split_trajs or trajs_per_batch."
        )
    if given.policy_factory is not None and getattr(given, "policy", None) is not None:
        raise OptionError("policy and policy_factory are both given. Pass one of them.")
    if not given.replay_buffer_chunk:
        if given.postproc is not None or given.split_trajs or by_episode:
            raise OptionError(
                "replay_buffer_chunk=False puts single steps into the buffer, so there are no batches for "
                "postproc, split_trajs or trajs_per_batch. Leave one of them out."
            )
        if given.replay_buffer is None:
            raise OptionError(
                "replay_buffer_chunk=False needs a replay_buffer. Pass replay_buffer=."
            )


def _require_buffer(buffer: Any, method: str) -> None:
    if not callable(getattr(buffer, method, None)):
        raise ArgumentTypeError(
            f"replay_buffer is {buffer!r}, of type {type(buffer).__name__}, but must have a method {method}(batch). Pass "
            "a replay buffer, e.g. one of torchrl.data."
        )


def _entries(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else [given]


def _switch_or_keywords(name: str, value: Any) -> Any:
    if value is None or isinstance(value, Mapping):
        return value
    try:
        return as_bool(name, value)
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"{name} is {value!r}, but must be True, False, or a dict of keywords. Pass one of these."
        ) from None


def _as_devices(name: str, given: Any, default: Any) -> Any:
    """Return a device, or a list of one for each worker."""
    given = default if given is None else given
    if isinstance(given, list | tuple):
        return [_as_device(name, entry) for entry in given]
    return _as_device(name, given)


def _as_device(name: str, given: Any) -> torch.device | None:
    if given is None:
        return None
    try:
        device = as_device(given)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise DeviceNameError(
            f"{name} is {given!r}, which is no device that torch has here ({_first_line(error.__cause__ or error)}). Pass 'cpu', or "
            "'cuda' where there is one."
        ) from error
    return device


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def runner_options(given: Any, own: Callable[[str, Any], Any]) -> RunnerOptions:
    """Return what concerns a single runner; ``own`` says, by name, which entry of an option is that of the runner."""
    told = {field.name: getattr(given, field.name) for field in fields(RunnerOptions)}
    return RunnerOptions(**told | {name: own(name, told[name]) for name in _OF_EACH})


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
    """Make a class of the user's, e.g. ``class Mine(Collector)``, one that collects as ``kind`` does."""
    told = {"__module__": asked.__module__, "__doc__": asked.__doc__}
    return type(asked)(asked.__name__, (asked, kind), told)


def require_known(kind: Any, given: Iterable[str], every: type) -> None:
    """Check the names of keywords that a kind of collector is given.

    Args:
        kind: its class.
        given: the names.
        every: the class that takes those of all kinds.

    Raises:
        OptionError: (a TypeError) one goes with collectors that have workers, or is unknown.
    """
    if (known := known_to(kind)) is None:
        return
    taken = known_to(every) or []
    for name in given:
        if name not in known and name in taken:
            raise OptionError(
                f"{name!r} is a keyword of collectors with workers, but {kind.__name__} collects {kind._kind}. "
                "Use Collector(..., backend='process'), or leave it out."
            )
    refuse_unknown(kind.__name__, given, known)
