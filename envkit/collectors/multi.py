"""Collectors whose envs and policies run in workers elsewhere.

`MultiCollector` holds what both kinds share: what workers are built from, seeds, resets, weights. Workers of a
`MultiSyncDataCollector` make a part each of every batch, and wait while the caller trains. Those of a
`MultiaSyncDataCollector` go on meanwhile: a batch is that of whichever worker is ready first. How workers get orders
is said by `worker_pool`.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Unpack, cast

import torch
from tensordict import TensorDictBase
from torch import nn

from envkit.arrays.integers import as_int
from envkit.batched.attributes import chosen_rows, require_found
from envkit.batched.caller_settings import chosen
from envkit.batched.settings import RayOptions
from envkit.batched.workers import actors_for, processes_for, usable_options
from envkit.collectors.attribute_paths import paired
from envkit.collectors.build_runner import Parts
from envkit.collectors.collector import Collector, MakeEnv, ShownSetting, flat_stats
from envkit.collectors.profiling import ProfileConfig, Seconds
from envkit.collectors.runner import COLLECTOR, Batch
from envkit.collectors.runner_host import (
    BUILDING,
    COMMAND_NAMES,
    Description,
    RunnerFactory,
)
from envkit.collectors.settings import (
    CollectorSettings,
    WorkerOptions,
    require_names,
)
from envkit.collectors.threads import in_turn, require_open
from envkit.collectors.weights import as_weights, extra_of, only_tensors, tensors_of
from envkit.collectors.worker_pool import Part, WorkerPool
from envkit.data.arguments import as_bool, require_option
from envkit.data.plain import from_plain, plain
from envkit.env.base import EnvBase
from envkit.env.policy import HasParams, PolicyLike, policy_device
from envkit.env.seeding import drawn_seed, restart_seed
from envkit.env.torch_threads import ThreadLimit
from envkit.errors import (
    ArgumentCountError,
    ArgumentError,
    ArgumentTypeError,
    BatchCountError,
    CopyError,
    DoneError,
    OptionError,
)
from envkit.process_wide import warn
from envkit.transport import Pool

_CHANGES = 3
"""Batches with changed weights after which workers that were never sent any are warned of."""


class MultiCollector(Collector):
    """Collect in workers, processes or actors of Ray; ``sync`` says whether all make a part of every batch.

    ``MultiCollector(makers, policy, sync=True)`` gives a `MultiSyncDataCollector`, ``sync=False`` a
    `MultiaSyncDataCollector`.

    Args:
        create_env_fn, policy, backend, backend_options, num_collectors, sync: see `Collector`.
        **options: see `Collector`.

    Example:
        >>> from envkit import GymEnv, MultiCollector
        >>> makers = [lambda: GymEnv("CartPole-v1"), lambda: GymEnv("CartPole-v1")]
        >>> with MultiCollector(makers, frames_per_batch=8) as collector:
        ...     type(collector).__name__, collector.num_workers
        ('MultiSyncDataCollector', 2)
    """

    cat_results = ShownSetting()
    num_threads = ShownSetting()
    num_sub_threads = ShownSetting()
    preemptive_threshold = ShownSetting()
    update_at_each_batch = ShownSetting()

    _has_workers = True
    _end_limit: weakref.finalize | None = None
    _makes_parts: bool
    """Whether all workers make a part of every batch, which ``sync`` asks for."""

    def __init__(
        self,
        create_env_fn: MakeEnv,
        policy: PolicyLike = None,
        *,
        backend: str | None = None,
        sync: bool | None = None,
        num_collectors: int | None = None,
        backend_options: RayOptions | None = None,
        **options: Unpack[WorkerOptions],
    ):
        if sync is not None and as_bool("sync", sync) is not self._makes_parts:
            other = "MultiaSyncDataCollector" if self._makes_parts else "MultiSyncDataCollector"
            raise OptionError(
                f"sync={sync}, but a {type(self).__name__} collects {self._kind}. Use {other}."
            )
        settings = self._take(create_env_fn, policy, WorkerOptions, options)
        if settings.interruptor is not None:
            raise OptionError(
                "interruptor ends batches of collectors in this process. Workers are stopped by "
                "preemptive_threshold=: pass that, or use SyncDataCollector."
            )
        self._begin_kind(settings)
        if num_collectors is not None and settings.num_workers is not None:
            raise OptionError("num_collectors and num_workers are the same. Pass one of them.")
        self.backend = _as_backend(backend, settings)
        self.backend_options = usable_options(self.backend, backend_options)
        count = settings.num_workers if num_collectors is None else num_collectors
        makers = _makers(create_env_fn, count)
        self.create_env_fn, self.num_workers = makers, len(makers)
        _each("frames_per_batch", settings.frames_per_batch, self.num_workers)
        self._trained = policy
        self._versions = [tensor._version for tensor in tensors_of(policy).values()]
        self._changes, self._has_warned = 0, False
        self._steps: list[int] = []  # that each worker makes in a batch
        self._seconds = Seconds()  # spent here
        self._storing_devices = _each("storing_device", settings.storing_device, self.num_workers)
        parts = self._parts(makers, policy, settings)
        restarts = settings.max_restarts if settings.on_worker_failure == "restart" else 0
        self._worker_pool = WorkerPool(self._make_pool(parts, settings), self.num_workers, restarts)
        if settings.num_threads is not None:
            limit = ThreadLimit(settings.num_threads)
            self._end_limit = weakref.finalize(self, limit.end)
            self._end_limit.atexit = False
        try:
            described = self._worker_pool.start()
            self._adopt(described)
            self._fit(settings)
            self._delivery.require_room(described.leaves)
            self._worker_pool.bind()
            self._prepare(self.num_workers)
            if settings.seed is not None:
                self.set_seed(settings.seed)
        except BaseException:
            self.shutdown()
            raise

    def _make_pool(self, parts: list[Parts], settings: CollectorSettings) -> Pool:
        base = drawn_seed() if settings.seed is None else settings.seed
        seeds = [restart_seed(base, row, 0) for row in range(len(parts))]
        factory = RunnerFactory(
            parts,
            seeds,
            settings.num_sub_threads,
            chosen(),
            settings.init_fn,
            stops=settings.preemptive_threshold is not None,
            with_root=settings.on_worker_failure == "restart",
        )
        count = len(parts)
        limits: dict[str, Any] = {
            "timeout_s": settings.timeout,
            "start_timeout_s": settings.start_timeout,
            "building": BUILDING,
            "commands": COMMAND_NAMES,
        }
        if self.backend == "ray":
            return actors_for(factory, count, count, limits, self.backend_options)
        own_core = settings.num_sub_threads == 1
        return processes_for(factory, count, count, limits, core_each=own_core)

    def _parts(self, makers: list[Any], policy: Any, settings: CollectorSettings) -> list[Parts]:
        """Return what each worker builds; a policy travels there from the CPU."""
        if policy_device(policy) not in (None, torch.device("cpu")):
            policy = copy.deepcopy(policy).cpu()

        def parts(worker: int) -> Parts:
            def of_worker(name: str, entries: Any) -> Any:
                entry = _each(name, entries, len(makers))[worker]
                # it is moved when it has arrived
                return None if name == "storing_device" else entry

            return Parts(makers[worker], policy, settings.of_runner(of_worker))

        return [parts(worker) for worker in range(len(makers))]

    def _begin_kind(self, settings: CollectorSettings) -> None:
        """Check that options apply to this kind of collector, and set up what it keeps beside the others.

        Raises:
            OptionError: (a TypeError) one does not.
        """
        raise NotImplementedError

    def _fit(self, settings: CollectorSettings) -> None:
        """Set how batches are made, now that the workers have described their envs."""
        raise NotImplementedError

    def _set_steps(self, together: int) -> None:
        """Set how many steps each worker makes in a batch, which so many workers make together."""
        frames, rows = self._settings.frames_per_batch, self._rows_each
        if isinstance(frames, list):
            asked = _each("frames_per_batch", frames, self.num_workers)
            self._steps = [math.ceil(one / rows) for one in asked]
            self._warn_of_numbers(asked, together)
        else:
            self._steps = [self._steps_each(rows, together)] * self.num_workers
        self._worker_pool.steps = self._steps
        if 1 in self._steps and self._settings.on_worker_failure == "restart":
            raise ArgumentError(
                "on_worker_failure='restart' puts a truncated step in front of the batch of a new worker, so batches "
                "need 2 steps or more. Pass a larger frames_per_batch."
            )

    def _warn_of_numbers(self, asked: list[int], together: int) -> None:
        """Warn where more frames are made than the numbers of the workers say."""
        rows, total = self._rows_each, self._settings.total_frames
        if together > 1:
            self._warn_of_more(asked, sum(self._steps) * rows, rows, total)
            return
        for frames, steps in dict(zip(asked, self._steps, strict=True)).items():
            self._warn_of_more(frames, steps * rows, rows, None)

    @property
    def _makes_alike(self) -> bool:
        """Whether all workers make as many steps in a batch."""
        return len(set(self._steps)) == 1

    def frames_per_batch_worker(self, worker_idx: int | None = None) -> int:
        if worker_idx is not None:
            (worker,) = chosen_rows([worker_idx], self.num_workers)
            return self._steps[worker] * self._rows_each
        if not self._makes_alike:
            raise ArgumentError(
                f"the workers make {[steps * self._rows_each for steps in self._steps]} transitions of a batch. Say which "
                "worker is meant: frames_per_batch_worker(0)."
            )
        return self._steps[0] * self._rows_each

    def _adopt(self, first: Description) -> None:
        restarts = self._settings.on_worker_failure == "restart"
        if restarts and not any(path[-1] == "truncated" for path in first.leaves):
            raise DoneError(
                "on_worker_failure='restart' ends the episodes of a lost worker with 'truncated', but its env has no "
                "such entry. Pass lambda: make_env().add_truncated_keys()."
            )
        has_weights = isinstance(self._trained, nn.Module | HasParams)
        from_here = has_weights and first.weights is not None
        if self._settings.update_at_each_batch and not from_here:
            raise OptionError(
                "update_at_each_batch=True sends the weights of the policy that was passed, but none with weights was. "
                "Pass a torch.nn.Module or a JaxPolicy as policy, or call update_policy_weights_(policy_weights)."
            )
        self.batch_size = first.batch_size
        self._rows_each = first.batch_size.numel()

    # ------------------------------------------------------------------------------------- weights

    @property
    def policy(self) -> Any:
        """The policy that was passed, of which the workers have copies; None where they have made their own."""
        return self._trained

    def _update_weights(self, source: Any) -> None:
        # and no turn: a trainer may update while another thread waits for a batch
        require_open(self)
        if not self._worker_pool.has_weights:
            raise ArgumentTypeError(
                "the policy of the workers is neither a torch.nn.Module nor a JaxPolicy, so it has no weights to update. Build "
                "the collector with one of these."
            )
        source = self._trained if source is None else source
        if source is None:
            raise ArgumentTypeError(
                "there are no weights here: the workers have made their policies themselves. Pass policy_weights=."
            )
        weights = as_weights(source, self._trained)
        self._worker_pool.take_weights(only_tensors(weights), extra_of(weights))
        super().increment_version()

    def increment_version(self) -> None:
        super().increment_version()
        self._worker_pool.count_to(self.policy_version)

    def _begin_next(self) -> None:
        self._worker_pool.count_to(self.policy_version)  # a PolicyVersion counts by itself too
        self._warn_of_weights_kept()
        super()._begin_next()

    def _warn_of_weights_kept(self) -> None:
        """Warn once where weights were changed for some batches, and none were ever sent to the workers."""
        if self._has_warned or self.policy_version or not isinstance(self._trained, nn.Module):
            return
        versions = [tensor._version for tensor in tensors_of(self._trained).values()]
        if versions != self._versions:
            self._versions, self._changes = versions, self._changes + 1
        if self._changes < _CHANGES:
            return
        self._has_warned = True
        warn(
            f"the weights of the policy were changed before {_CHANGES} batches, and none were sent to the workers, which "
            "act with those that it had when the collector was built. Call update_policy_weights_() after each update, or "
            "pass update_at_each_batch=True.",
        )

    # ------------------------------------------------------------------------------ seeds and resets

    @in_turn
    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        self._stand_still()
        following: int | None = seed
        for worker in range(self.num_workers):
            (after,) = self._worker_pool.call("seed", following, static_seed, workers=[worker])
            following = seed if static_seed else after
        self._worker_pool.recovery.begin_seeds(seed)
        self._begin_anew(range(self.num_workers))
        return following

    @in_turn
    def reset(self, reset_idx: Sequence[bool] | None = None) -> None:
        """Reset the envs of all workers, or of those named; their next batches begin new trajectories.

        Args:
            reset_idx: one bool for each worker.
        """
        chosen_ones = [True] * self.num_workers if reset_idx is None else list(reset_idx)
        if len(chosen_ones) != self.num_workers:
            raise ArgumentCountError(
                f"reset_idx has {len(chosen_ones)} entries, but there are {self.num_workers} workers. Pass one bool "
                "for each."
            )
        self._stand_still()
        self._begin_anew([worker for worker, chosen_one in enumerate(chosen_ones) if chosen_one])

    def _stored(self, data: TensorDictBase, worker: int = 0) -> TensorDictBase:
        """Move what a worker has made, which arrives in memory of the CPU, to where batches are delivered."""
        device = self._storing_devices[worker]
        return data if device is None else data.to(device)

    def _begin_anew(self, workers: Sequence[int]) -> None:
        ended = self._worker_pool.begin_anew(workers)
        if self._episodes is not None:
            self._episodes.cut(ended)

    def _stand_still(self) -> None:
        """Receive what is under way, so that the workers can be asked something else."""
        self._settle()
        self._require_idle()

    def _require_idle(self) -> None:
        """Wait until no worker has an order."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------ envs of workers

    @in_turn
    def _ask_envs(
        self, ask: Callable[[Any], Any], indices: int | Iterable[int] | None
    ) -> list[Any]:
        self._stand_still()
        every = range(self.num_workers)
        counts = self._worker_pool.call("count_envs", workers=every)
        places = [(worker, row) for worker in every for row in range(counts[worker])]
        wanted = [places[index] for index in chosen_rows(indices, len(places))]
        answers: dict[tuple[int, int], Any] = {}
        for worker in sorted({worker for worker, _ in wanted}):
            rows = sorted({row for one, row in wanted if one == worker})
            (values,) = self._worker_pool.call("ask_envs", ask, rows, workers=[worker])
            answers |= {(worker, row): value for row, value in zip(rows, values, strict=True)}
        values = [answers[place] for place in wanted]
        require_found(values, type(self).__name__)
        return values

    @in_turn
    def _asked_of_first(self, part: str, attr: str) -> Any:
        self._stand_still()
        (found,) = self._worker_pool.call("follow", f"{part}.{attr}", workers=[0])
        return found

    @in_turn
    def get_distant_attr(self, attr: str) -> list[Any]:
        self._stand_still()
        return self._worker_pool.call("follow", attr, workers=range(self.num_workers))

    @in_turn
    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[object]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, object]] | None = None,
    ) -> list[Any]:
        self._stand_still()
        calls = paired(list_of_args, list_of_kwargs, self.num_workers)
        return [
            self._worker_pool.call("execute", method_name, args, kwargs, workers=[worker])[0]
            for worker, (args, kwargs) in enumerate(calls)
        ]

    @in_turn
    def _profile(self, config: ProfileConfig | None) -> None:
        self._stand_still()
        self._worker_pool.call("profile", config, workers=range(self.num_workers))

    # -------------------------------------------------------------------------------------- resume

    @property
    def _runner_names(self) -> Sequence[str]:  # type: ignore[override]
        return ("newest_weights", *(f"worker{row}" for row in range(self.num_workers)))

    def _runner_states(self) -> dict[str, Any]:
        self._require_idle()
        return self._worker_pool.state_dict()

    def _load_runner_states(self, state: Mapping[str, Any], *, strict: bool) -> None:
        if f"worker{self.num_workers}" in state:
            raise ArgumentCountError(
                f"the state dict is of more than {self.num_workers} workers. Load it into a collector with as many."
            )
        self._require_idle()
        self._worker_pool.load_state_dict(state, version=state["policy_version"], strict=strict)

    # ---------------------------------------------------------------------------------------- life

    def stats(
        self, workers: Literal["aggregate", "per_worker", "both"] = "aggregate"
    ) -> dict[str, int | float | bool]:
        """Return what was collected and where time went, as a flat dict of numbers.

        Args:
            workers: "aggregate" sums over the workers, "per_worker" gives the numbers of each, as ``worker_0/frames``;
                "both" gives both.

        Returns:
            The values of `Collector.stats`, including the joining of batches here, and ``workers`` and
            ``workers_alive``, their numbers. Workers have made more frames than were delivered where batches wait.

        Raises:
            ArgumentError: (a ValueError) ``workers`` is something else.
        """
        require_option("workers", workers, ("aggregate", "per_worker", "both"))
        numbers: dict[str, int | float | bool] = {}
        if workers != "per_worker":
            numbers |= {**self._amounts, **self._summed()}
        numbers |= {"workers": self.num_workers, "workers_alive": len(self._worker_pool.pids)}
        if workers != "aggregate":
            for row, one in enumerate(self._worker_pool.counted):
                numbers |= flat_stats(one, f"worker_{row}/")
        return numbers

    def _summed(self) -> dict[str, int | float | bool]:
        """Sum what the workers have counted, and the seconds spent here."""
        total: dict[str, Any] = {
            "frames": 0,
            "episodes": 0,
            **flat_stats({"seconds": dict(self._seconds)}),
        }
        for one in self._worker_pool.counted:
            for name, value in flat_stats(one).items():
                total[name] += value
        return total

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._worker_pool.pids

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CopyError(
            f"{type(self).__name__} cannot be copied or pickled: its workers belong to it alone. Build another one, "
            "and have it go on from state_dict()."
        )

    def _end(self, *, close_env: bool | None = None) -> None:
        self._worker_pool.end()
        if self._end_limit is not None:
            self._end_limit()


def _as_backend(backend: str | None, settings: CollectorSettings) -> str:
    """Check where the workers of a collector are to be; None: in processes.

    Raises:
        ArgumentError: there are no workers of that kind.
        OptionError: (a TypeError) they cannot be stopped, as an option asks for.
    """
    require_option("backend", backend, ("process", "ray", None))
    if backend == "ray" and settings.preemptive_threshold is not None:
        raise OptionError(
            f"preemptive_threshold={settings.preemptive_threshold!r} stops workers through memory that they share with "
            "this process, which actors of Ray do not. Leave it out, or use backend='process'."
        )
    return backend or "process"


def _makers(create_env_fn: Any, count: Any) -> list[Any]:
    if callable(create_env_fn) or isinstance(create_env_fn, EnvBase):
        if count is None:
            raise ArgumentTypeError(
                "create_env_fn is a single function, so num_workers= must say how many workers call it. Pass that, "
                "or a list of functions."
            )
        return [create_env_fn] * as_int(
            "num_workers", count, least=1, meaning="the number of workers"
        )
    if not isinstance(create_env_fn, Sequence) or not create_env_fn:
        raise ArgumentTypeError(
            f"create_env_fn is {create_env_fn!r}, but must be a function that makes an env, or a list of one for each worker. Pass "
            "lambda: GymEnv('CartPole-v1'), for example."
        )
    for worker, make in enumerate(create_env_fn):
        if not (callable(make) or isinstance(make, EnvBase)):
            raise ArgumentTypeError(
                f"create_env_fn has {make!r} for worker {worker}, but must have a function that makes an env. Pass one for "
                "each worker."
            )
    if count is not None and count != len(create_env_fn):
        raise ArgumentCountError(
            f"num_workers is {count}, but create_env_fn has {len(create_env_fn)} functions. Leave num_workers out."
        )
    return list(create_env_fn)


def _each(name: str, value: Any, count: int) -> list[Any]:
    """Return the entry of each worker."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ArgumentCountError(
            f"{name} has {len(value)} entries, but there are {count} workers. Pass one for each, or one for all."
        )
    return list(value)


class MultiSyncDataCollector(MultiCollector):
    """Collect in workers, processes or actors of Ray, all of which make a part of every batch.

    No step is made between the delivery of a batch and the request for the next one, unless ``prefetch=1``.

    Args:
        create_env_fn, policy, backend, backend_options, num_collectors, sync: see `Collector`. ``sync`` is True.
        **options: see `Collector`.

    Example:
        >>> from envkit import GymEnv, MultiSyncDataCollector
        >>> collector = MultiSyncDataCollector(
        ...     lambda: GymEnv("CartPole-v1"), frames_per_batch=8, num_workers=2
        ... )
        >>> collector.next().batch_size
        torch.Size([2, 4])
        >>> collector.shutdown()
    """

    _kind = "in workers, a part of every batch in each"
    _makes_parts = True

    def _begin_kind(self, settings: CollectorSettings) -> None:
        self._parts_made: dict[int, Part] = {}
        self._cat_results: int | Literal["stack"] = _way_to_join(settings)

    def _fit(self, settings: CollectorSettings) -> None:
        self._set_steps(self.num_workers)
        _require_axis(settings, self._cat_results, len(self.batch_size), alike=self._makes_alike)

    @property
    def _frames_each(self) -> int:
        return sum(self._steps) * self._rows_each

    def _begin_batch(self, *, random: bool) -> Callable[[], Batch]:
        if self._settings.update_at_each_batch:
            self.update_policy_weights_()
        self._order_missing(random)
        return lambda: self._finish(random)

    def _order_missing(self, random: bool) -> None:
        for worker in range(self.num_workers):
            if worker not in self._worker_pool.jobs and worker not in self._parts_made:
                self._worker_pool.order(worker, random=random)

    def _finish(self, random: bool) -> Batch:
        self._order_missing(random)  # what an error has left out
        threshold = self._settings.preemptive_threshold
        enough = math.inf if threshold is None else int(self.num_workers * threshold)
        while self._worker_pool.jobs:
            if len(self._parts_made) >= enough:
                self._worker_pool.stop(list(self._worker_pool.jobs))
            for worker in self._worker_pool.wait(1):  # who fails is reported at once
                if (part := self._worker_pool.receive(worker)) is not None:
                    self._parts_made[worker] = part
        parts = [self._parts_made[worker] for worker in range(self.num_workers)]
        with self._seconds.transferring():
            joined = self._stored(self._joined(parts))
        batch = Batch(joined, torch.cat([part.following for part in parts]))
        if self._settings.use_buffers is not False:
            self._worker_pool.learn_form(parts)
        stopped = (sum(self._steps) - sum(part.valid for part in parts)) * self._rows_each
        begun = self._begun_frames - stopped  # frames that were not made do not count
        self._parts_made, self._begun_frames = {}, begun
        return batch

    def _joined(self, parts: list[Part]) -> TensorDictBase:
        """Join parts, which this copies."""
        dim = self._cat_results
        datas = [part.data for part in parts]
        if dim == "stack" or self._episodes is not None:
            data = cast(TensorDictBase, torch.stack(cast(Any, datas)))
            if self._settings.preemptive_threshold is not None:
                steps = torch.arange(self._steps[0], device="cpu")
                valid = torch.tensor([part.valid for part in parts], device="cpu")
                mask = steps < valid.reshape(-1, *(1,) * len(self.batch_size), 1)
                data.set((COLLECTOR, "mask"), mask.expand(data.batch_size).clone())
            return data
        time = len(self.batch_size)
        if self._settings.preemptive_threshold is not None:
            datas = [part.data[..., : part.valid] for part in parts]
        data = cast(TensorDictBase, torch.cat(cast(Any, datas), dim))
        data.names = [*[None] * time, None if dim in (time, -1) else "time"]
        return data

    def _require_idle(self) -> None:
        self._worker_pool.recall()
        if self._worker_pool.jobs or self._parts_made:
            if self._pending is None:  # Ctrl-C came while it was begun
                self._begin_next()
            self._settle()


MultiSyncCollector = MultiSyncDataCollector


def _way_to_join(settings: CollectorSettings) -> int | Literal["stack"]:
    """Return how batches of workers are joined: the axis along which, or "stack".

    Raises:
        ArgumentError: (a ValueError) what was asked for is neither.
        OptionError: (a TypeError) whole episodes are joined in their own way, or parts are wanted on several devices.
    """
    dim, devices = settings.cat_results, settings.storing_device
    by_episode = settings.trajs_per_batch is not None
    if isinstance(devices, list) and len(set(devices)) > 1:
        raise OptionError(
            f"storing_device is {list(map(str, devices))}, but the parts of a batch are joined on one device. Pass a single "
            "one, or use MultiaSyncDataCollector, whose batches come from one worker each."
        )
    frames, buffer = settings.frames_per_batch, settings.replay_buffer
    differ = isinstance(frames, list) and len(set(frames)) > 1
    holds_steps = getattr(getattr(buffer, "storage", None), "ndim", 1) == 1
    if buffer is not None and holds_steps and not by_episode and dim in (None, "stack"):
        return -1 if differ or settings.preemptive_threshold is not None else 0
    if dim is None:
        return -1 if differ and not by_episode else "stack"
    if dim != "stack" and by_episode:
        raise OptionError(
            "cat_results and trajs_per_batch are both given, but traj_format says how episodes are joined. Leave "
            "cat_results out."
        )
    if dim != "stack" and (not isinstance(dim, int) or isinstance(dim, bool)):
        raise ArgumentError(
            f"cat_results is {dim!r}, but must be 'stack' or an int. Pass the axis to concatenate along, -1 for time."
        )
    return dim


def _require_axis(
    settings: CollectorSettings, dim: int | Literal["stack"], batch_dims: int, *, alike: bool
) -> None:
    """Check the axis along which batches are to be joined; parts are ``alike`` if all have the same length.

    Raises:
        ArgumentError: (a ValueError) there is none such, or batches that were cut short do not fit along it.
        OptionError: (a TypeError) parts of different lengths cannot be joined as was asked for.
    """
    if dim != "stack" and not -batch_dims - 1 <= dim <= batch_dims:
        raise ArgumentError(
            f"cat_results is {dim}, but batches have {batch_dims + 1} axes. Pass 'stack', or -1 for time."
        )
    is_time = dim in (-1, batch_dims)
    if settings.preemptive_threshold is not None and dim != "stack" and not is_time:
        raise ArgumentError(
            f"cat_results is {dim}, but with preemptive_threshold batches of workers differ in length. Pass -1 or "
            "'stack'."
        )
    if alike:
        return
    numbers = settings.frames_per_batch
    if settings.trajs_per_batch is not None:
        raise OptionError(
            f"frames_per_batch is {numbers}, so parts of workers differ in length, but trajs_per_batch looks for whole "
            "episodes in parts of one length. Pass one number, or use MultiaSyncDataCollector."
        )
    if not is_time:
        raise OptionError(
            f"frames_per_batch is {numbers}, so parts of workers differ in length, but cat_results={dim!r} joins parts of "
            "one length. Pass -1, the axis of time."
        )


class MultiaSyncDataCollector(MultiCollector):
    """Collect in workers, processes or actors of Ray, each of which makes whole batches.

    A worker whose batch was taken begins the next one at once, with the newest weights. One whose batch waits for
    the caller does nothing: there is at most one batch of each worker.

    Args:
        create_env_fn, policy, backend, backend_options, num_collectors, sync: see `Collector`. ``sync`` is False.
        **options: see `Collector`.

    Example:
        >>> from envkit import GymEnv, MultiaSyncDataCollector
        >>> collector = MultiaSyncDataCollector(
        ...     lambda: GymEnv("CartPole-v1"), frames_per_batch=8, num_workers=2
        ... )
        >>> collector.next().batch_size
        torch.Size([8])
        >>> collector.shutdown()
    """

    _kind = "in workers, a batch in each"
    _makes_parts = False

    def _begin_kind(self, settings: CollectorSettings) -> None:
        self._ready: deque[Part] = deque()
        self._taken_frames = 0
        for name, unset in (("prefetch", 0), ("preemptive_threshold", None)):
            if getattr(settings, name) != unset:
                raise OptionError(
                    f"{name} is {getattr(settings, name)!r}, but workers of {type(self).__name__} do not wait for each other "
                    "nor for the caller. Leave it out, or use MultiSyncDataCollector."
                )

    def _fit(self, settings: CollectorSettings) -> None:
        self._set_steps(1)

    @property
    def _frames_each(self) -> int:
        return max(self._steps) * self._rows_each

    def __len__(self) -> int:
        if self._settings.total_frames is None or self._episodes is not None or self._makes_alike:
            return super().__len__()
        raise BatchCountError(
            f"frames_per_batch is {self._settings.frames_per_batch}, so how many batches there will be depends on which "
            "workers are ready first. Pass one number for all, or iterate over it."
        )

    def _begin_batch(self, *, random: bool) -> Callable[[], Batch]:
        self._keep_busy()
        return self._finish

    def _keep_busy(self) -> None:
        """Order a batch from every worker that has no order, as long as there is more to collect."""
        self._worker_pool.recall()
        waiting = {part.worker for part in self._ready}
        total = None if self._episodes is not None else self._settings.total_frames
        for worker in range(self.num_workers):
            if worker in self._worker_pool.jobs or worker in waiting:
                continue
            steps = sum(self._steps[one] for one in (*waiting, *self._worker_pool.jobs))
            ordered = self._taken_frames + steps * self._rows_each
            if total is not None and ordered >= total:
                return
            self._worker_pool.order(worker, random=ordered < self._settings.init_random_frames)

    def _finish(self) -> Batch:
        self._keep_busy()  # what an error has left out
        if not self._worker_pool.packings and self._settings.use_buffers is not False:
            self._receive_all()
            self._worker_pool.learn_form(list(self._ready))
        while not self._ready:
            self._receive_some()
        part = self._ready[0]
        with self._seconds.transferring():
            batch = Batch(self._stored(part.data.clone(), part.worker), part.following)
        self._taken_frames += self.frames_per_batch_worker(part.worker)
        del self._ready[0]
        return batch

    def _go_on(self) -> None:
        if self._settings.update_at_each_batch:
            self.update_policy_weights_()
        self._keep_busy()

    def _receive_some(self) -> None:
        for worker in self._worker_pool.wait(1):
            if (part := self._worker_pool.receive(worker)) is not None:
                self._ready.append(part)

    def _receive_all(self) -> None:
        while self._worker_pool.jobs:
            self._receive_some()

    def _require_idle(self) -> None:
        self._worker_pool.recall()
        self._receive_all()

    def _runner_states(self) -> dict[str, Any]:
        states = super()._runner_states()  # which waits for all workers
        ready = [
            {
                "worker": part.worker,
                "data": plain(part.data),
                "valid": part.valid,
                "following": part.following.clone(),
            }
            for part in self._ready
        ]
        return {**states, "ready": ready, "taken_frames": self._taken_frames}

    def _load_runner_states(self, state: Mapping[str, Any], *, strict: bool) -> None:
        super()._load_runner_states(state, strict=strict)
        if "taken_frames" in state:
            self._taken_frames = state["taken_frames"]
        else:  # as older files say it
            self._taken_frames = state["taken"] * self._frames_each
        self._ready = deque(
            Part(part["worker"], from_plain(part["data"]), part["valid"], part["following"].clone())
            for part in state["ready"]
        )


MultiAsyncCollector = MultiaSyncDataCollector


class AsyncCollector(MultiaSyncDataCollector):
    """Collect in a single worker, which goes on while the caller trains; see `MultiaSyncDataCollector`.

    Args:
        create_env_fn: function that makes the env, in the worker.
        policy, backend, backend_options: see `Collector`.
        **options: see `Collector`.

    Example:
        >>> from envkit import AsyncCollector, GymEnv
        >>> collector = AsyncCollector(lambda: GymEnv("CartPole-v1"), frames_per_batch=64)
        >>> collector.next().batch_size
        torch.Size([64])
        >>> collector.shutdown()
    """

    _kind = "in a worker"

    def __init__(
        self,
        create_env_fn: Callable[..., EnvBase] | EnvBase,
        policy: PolicyLike = None,
        *,
        backend: str | None = None,
        backend_options: RayOptions | None = None,
        **options: Unpack[WorkerOptions],
    ):
        require_names(type(self), WorkerOptions, options)
        super().__init__(
            create_env_fn,
            policy,
            backend=backend,
            backend_options=backend_options,
            num_collectors=1,
            **options,
        )
