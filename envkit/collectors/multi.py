"""Collectors whose envs and policies run in workers elsewhere: what they are built from, seeds, resets, weights.

How workers get orders is said by `worker_pool`, what a batch of several workers looks like by `multi_sync` and `multi_async`.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import nn

from envkit.batched.attributes import chosen_rows, require_found
from envkit.batched.caller_settings import chosen
from envkit.batched.recovery import allowed_restarts
from envkit.batched.settings import ThreadLimit
from envkit.batched.workers import actors_for, processes_for, usable_options
from envkit.collectors.build_runner import Parts
from envkit.collectors.collector import Collector, MakeEnv, flat_stats
from envkit.collectors.distant import paired
from envkit.collectors.host import (
    BUILDING,
    COMMAND_NAMES,
    Description,
    RunnerFactory,
)
from envkit.collectors.profiling import ProfileConfig
from envkit.collectors.settings import WorkerOptions, checked_workers, runner_options
from envkit.collectors.thread_guard import in_turn, require_open
from envkit.collectors.timing import Seconds
from envkit.collectors.weights import as_weights, extra_of, only_tensors, tensors_of
from envkit.collectors.worker_pool import WorkerPool
from envkit.data.arguments import as_int
from envkit.env.base import EnvBase
from envkit.env.policy import HasParams, PolicyLike, policy_device
from envkit.env.seeding import drawn_seed, restart_seed
from envkit.errors import (
    ArgumentCountError,
    ArgumentError,
    ArgumentTypeError,
    CopyError,
    DoneError,
    OptionError,
)
from envkit.transport import Pool

__all__ = ["MultiCollector"]

_CHANGES = 3
"""Batches with changed weights after which workers that were never sent any are warned of."""


class MultiCollector(Collector):
    """Collect in workers, processes or actors of Ray; ``sync`` says whether all make a part of every batch.

    ``MultiCollector(makers, policy, sync=True)`` gives a `MultiSyncDataCollector`, ``sync=False`` a
    `MultiaSyncDataCollector`. See `Collector` and `envkit.collectors.settings.WorkerOptions` for the arguments.
    """

    _has_workers = True
    _end_limit: weakref.finalize | None = None

    def _build(
        self,
        create_env_fn: MakeEnv,
        policy: PolicyLike,
        options: Mapping[str, Any],
        *,
        count: Any,
        backend: str | None,
        backend_options: Mapping[str, Any] | None,
    ) -> None:
        given = checked_workers(self._take(policy, WorkerOptions, options))
        self._require_kind(given)
        if count is not None and given.num_workers is not None:
            raise OptionError("num_collectors and num_workers are the same. Pass one of them.")
        self.backend = _as_backend(backend, given)
        self.backend_options = usable_options(self.backend, backend_options)
        makers = _makers(create_env_fn, given.num_workers if count is None else count)
        self.num_workers = len(makers)
        _each("frames_per_batch", given.frames_per_batch, self.num_workers)
        self._trained = policy
        self._versions = [tensor._version for tensor in tensors_of(policy).values()]
        self._changes, self._has_warned = 0, False
        self._steps: list[int] = []  # that each worker makes in a batch
        self._seconds = Seconds()  # spent here
        self._storing_devices = _each("storing_device", given.storing_device, self.num_workers)
        parts = self._parts(makers, policy, given)
        restarts = allowed_restarts(given.on_worker_failure, given.max_restarts)
        self._worker_pool = WorkerPool(
            self._make_pool(parts, given),
            self.num_workers,
            restarts=restarts if given.on_worker_failure == "restart" else None,
            stops=given.preemptive_threshold is not None,
        )
        if given.num_threads is not None:
            limit = ThreadLimit(given.num_threads)
            self._end_limit = weakref.finalize(self, limit.end)
            self._end_limit.atexit = False
        try:
            described = self._worker_pool.start()
            self._adopt(described)
            self._fit(given)
            self._delivery.require_room(described.leaves)
            self._worker_pool.bind()
            self._prepare(self.num_workers)
            if given.seed is not None:
                self.set_seed(given.seed)
        except BaseException:
            self.shutdown()
            raise

    def _make_pool(self, parts: list[Parts], given: Any) -> Pool:
        base = drawn_seed() if given.seed is None else given.seed
        seeds = [restart_seed(base, row, 0) for row in range(len(parts))]
        factory = RunnerFactory(parts, seeds, given.num_sub_threads, chosen(), given.init_fn)
        count = len(parts)
        limits: dict[str, Any] = {
            "timeout_s": given.timeout,
            "start_timeout_s": given.start_timeout,
            "building": BUILDING,
            "commands": COMMAND_NAMES,
        }
        if self.backend == "ray":
            return actors_for(factory, count, count, limits, self.backend_options)
        own_core = given.num_sub_threads == 1
        return processes_for(factory, count, count, limits, core_each=own_core)

    def _parts(self, makers: list[Any], policy: Any, given: Any) -> list[Parts]:
        """Say what each worker builds; a policy travels there from the CPU."""
        count = len(makers)
        devices = {
            name: _each(name, getattr(given, name), count)
            for name in ("env_device", "policy_device")
        }
        kwargs = _each("create_env_kwargs", given.create_env_kwargs, count)
        factories = _each("policy_factory", given.policy_factory, count)
        travelling = policy
        if policy_device(policy) not in (None, torch.device("cpu")):
            travelling = copy.deepcopy(policy).cpu()
        return [
            Parts(
                make,
                travelling,
                runner_options(given, None),
                env_kwargs=kwargs[worker] or {},
                policy_factory=factories[worker],
                max_frames_per_traj=given.max_frames_per_traj,
                record_for_resume=given.record_for_resume,
                trust_policy=given.trust_policy,
                compile_policy=given.compile_policy,
                cudagraph_policy=given.cudagraph_policy,
                env_device=devices["env_device"][worker],
                policy_device=devices["policy_device"][worker],
                completes_env=given.auto_register_policy_transforms is not False,
            )
            for worker, make in enumerate(makers)
        ]

    def _require_kind(self, given: Any) -> None:
        """Check that options apply to this kind of collector.

        Raises:
            OptionError: (a TypeError) one does not.
        """
        raise NotImplementedError

    def _fit(self, given: Any) -> None:
        """Settle how batches are made, now that the workers have told of their envs."""
        raise NotImplementedError

    def _set_steps(self, together: int) -> None:
        """Settle how many steps each worker makes in a batch, which so many workers make together."""
        frames, rows = self._options.frames_per_batch, self._rows_each
        if isinstance(frames, list):
            asked = _each("frames_per_batch", frames, self.num_workers)
            self._steps = [math.ceil(one / rows) for one in asked]
            self._warn_of_numbers(asked, together)
        else:
            self._steps = [self._steps_each(rows, together, stacklevel=6)] * self.num_workers
        self._worker_pool.steps = self._steps
        if 1 in self._steps and self._options.on_worker_failure == "restart":
            raise ArgumentError(
                "on_worker_failure='restart' puts a truncated step in front of the batch of a new worker, so batches "
                "need 2 steps or more. Pass a larger frames_per_batch."
            )

    def _warn_of_numbers(self, asked: list[int], together: int) -> None:
        """Warn where more frames are made than the numbers of the workers say."""
        rows, total = self._rows_each, self._options.total_frames
        if together > 1:
            self._warn_of_more(asked, sum(self._steps) * rows, rows, total, stacklevel=7)
            return
        for frames, steps in dict(zip(asked, self._steps, strict=True)).items():
            self._warn_of_more(frames, steps * rows, rows, None, stacklevel=7)

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
        restarts = self._options.on_worker_failure == "restart"
        if restarts and not any(path[-1] == "truncated" for path in first.leaves):
            raise DoneError(
                "on_worker_failure='restart' ends the episodes of a lost worker with 'truncated', but its env has no "
                "such entry. Pass lambda: make_env().add_truncated_keys()."
            )
        has_weights = isinstance(self._trained, nn.Module | HasParams)
        from_here = has_weights and first.weights is not None
        if self._options.update_at_each_batch and not from_here:
            raise OptionError(
                "update_at_each_batch=True sends the weights of the policy that was passed, but none with weights was. "
                "Pass a torch.nn.Module or a JaxPolicy as policy, or call update_policy_weights_(policy_weights)."
            )
        self.batch_size = first.batch_size
        self._rows_each = first.batch_size.numel()

    # ------------------------------------------------------------------------------------- weights

    def _update_weights(self, given: Any) -> None:
        require_open(
            self
        )  # and no turn: a trainer may update while another thread waits for a batch
        if not self._worker_pool.has_weights:
            raise ArgumentTypeError(
                "the policy of the workers is no torch.nn.Module and no JaxPolicy, so it has no weights to update."
            )
        given = self._trained if given is None else given
        if given is None:
            raise ArgumentTypeError(
                "there are no weights here: the workers have made their policies themselves. Pass policy_weights=."
            )
        weights = as_weights(given, self._trained)
        self._worker_pool.take_weights(only_tensors(weights), extra_of(weights))
        super().increment_version()

    def increment_version(self) -> None:
        super().increment_version()
        self._worker_pool.count_version()

    def _begin_next(self) -> None:
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
        warnings.warn(
            f"the weights of the policy were changed before {_CHANGES} batches, and none were sent to the workers, which "
            "act with those that it had when the collector was built. Call update_policy_weights_() after each update, or "
            "pass update_at_each_batch=True.",
            stacklevel=6,
        )

    # ------------------------------------------------------------------------------ seeds and resets

    @in_turn
    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        self._settle()
        self._require_idle()
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
        self._settle()
        self._require_idle()
        self._begin_anew([worker for worker, chosen_one in enumerate(chosen_ones) if chosen_one])

    def _stored(self, data: TensorDictBase, worker: int = 0) -> TensorDictBase:
        """Move what a worker has made, which arrives in memory of the CPU, to where batches are delivered."""
        device = self._storing_devices[worker]
        return data if device is None else data.to(device)

    def _begin_anew(self, workers: Sequence[int]) -> None:
        ended = self._worker_pool.begin_anew(workers)
        if self._episodes is not None:
            self._episodes.cut(ended)

    def _require_idle(self) -> None:
        """See to it that no worker has an order."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------ envs of workers

    @in_turn
    def _ask_envs(
        self, ask: Callable[[Any], Any], indices: int | Iterable[int] | None
    ) -> list[Any]:
        self._settle()
        self._require_idle()
        every = range(self.num_workers)
        counts = self._worker_pool.call("count_envs", workers=every)
        places = [(worker, row) for worker in every for row in range(counts[worker])]
        wanted = [places[index] for index in chosen_rows(indices, len(places))]
        found: dict[tuple[int, int], Any] = {}
        for worker in sorted({worker for worker, _ in wanted}):
            rows = sorted({row for one, row in wanted if one == worker})
            (values,) = self._worker_pool.call("ask_envs", ask, rows, workers=[worker])
            found |= {(worker, row): value for row, value in zip(rows, values, strict=True)}
        values = [found[place] for place in wanted]
        require_found(values, type(self).__name__)
        return values

    @in_turn
    def _asked_of_first(self, part: str, attr: str) -> Any:
        self._settle()
        self._require_idle()
        (found,) = self._worker_pool.call("follow", f"{part}.{attr}", workers=[0])
        return found

    @in_turn
    def get_distant_attr(self, attr: str) -> list[Any]:
        self._settle()
        self._require_idle()
        return self._worker_pool.call("follow", attr, workers=range(self.num_workers))

    @in_turn
    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[object]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, object]] | None = None,
    ) -> list[Any]:
        self._settle()
        self._require_idle()
        calls = paired(list_of_args, list_of_kwargs, self.num_workers)
        return [
            self._worker_pool.call("execute", method_name, args, kwargs, workers=[worker])[0]
            for worker, (args, kwargs) in enumerate(calls)
        ]

    @in_turn
    def _profile(self, config: ProfileConfig | None) -> None:
        self._settle()
        self._require_idle()
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
        """Give what was collected and where time went, as a flat dict of numbers.

        Args:
            workers: "aggregate" sums over the workers, "per_worker" gives the numbers of each, as ``worker_0/frames``;
                "both" gives both.

        Returns:
            What `Collector.stats` says, joining of batches here included, and ``workers`` and ``workers_alive``, their
            numbers. Workers have made more frames than were delivered where batches wait.

        Raises:
            ArgumentError: (a ValueError) ``workers`` is something else.
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise ArgumentError(
                f"workers is {workers!r}, but must be 'aggregate', 'per_worker' or 'both'."
            )
        told: dict[str, int | float | bool] = {}
        if workers != "per_worker":
            told |= {**self._amounts, **self._summed()}
        told |= {"workers": self.num_workers, "workers_alive": len(self._worker_pool.pids)}
        if workers != "aggregate":
            for row, one in enumerate(self._worker_pool.counted):
                told |= flat_stats(one, f"worker_{row}/")
        return told

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
            f"a {type(self).__name__} cannot be copied or pickled: its workers belong to it alone. Build another one, "
            "and have it go on from state_dict()."
        )

    def _end(self, *, close_env: bool = True) -> None:
        self._worker_pool.end()
        if self._end_limit is not None:
            self._end_limit()


def _as_backend(backend: str | None, given: Any) -> str:
    """Check where the workers of a collector are to be; None: in processes.

    Raises:
        ArgumentError: there are no workers of that kind.
        OptionError: (a TypeError) they cannot be stopped, as an option asks for.
    """
    if backend not in (None, "process", "ray"):
        raise ArgumentError(f"backend is {backend!r}, but workers are of 'process' or 'ray'.")
    if backend == "ray" and given.preemptive_threshold is not None:
        raise OptionError(
            f"preemptive_threshold={given.preemptive_threshold!r} stops workers through memory that they share with "
            "this process, which actors of Ray do not. Leave it out, or use backend='process'."
        )
    return backend or "process"


def _makers(given: Any, count: Any) -> list[Any]:
    if callable(given) or isinstance(given, EnvBase):
        if count is None:
            raise ArgumentTypeError(
                "create_env_fn is a single function, so num_workers= must say how many workers call it. Pass that, "
                "or a list of functions."
            )
        return [given] * as_int("num_workers", count, least=1, meaning="the number of workers")
    if not isinstance(given, Sequence) or not given:
        raise ArgumentTypeError(
            f"create_env_fn is {given!r}, but must be a function that makes an env, or a list of one for each "
            "worker."
        )
    for worker, make in enumerate(given):
        if not (callable(make) or isinstance(make, EnvBase)):
            raise ArgumentTypeError(
                f"create_env_fn has {make!r} for worker {worker}, but must have a function that makes an env for each."
            )
    if count is not None and count != len(given):
        raise ArgumentCountError(
            f"num_workers is {count}, but create_env_fn has {len(given)} functions. Leave num_workers out."
        )
    return list(given)


def _each(name: str, given: Any, count: int) -> list[Any]:
    """Give the entry of each worker."""
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise ArgumentCountError(
            f"{name} has {len(given)} entries, but there are {count} workers. Pass one for each, or one for all."
        )
    return list(given)
