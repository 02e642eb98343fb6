"""Collectors whose envs and policies run in workers elsewhere: building them, ordering batches, taking what they made.

What a batch of several workers looks like, and which worker is waited for, is said by `multi_sync` and `multi_async`.

Conventions
    part    batch of one worker: its data, views of shared memory that the worker will write to when it gets the next
            order, or its own TensorDict where the data has no fixed form.
    loss    a worker whose env raised, or whose process ended, and that was built anew.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from envkit.batched.creation_context import chosen
from envkit.batched.recovery import Recovery, allowed_restarts
from envkit.batched.threads import ThreadLimit
from envkit.batched.workers import actors_for, processes_for, usable_options
from envkit.collectors.acting import Parts
from envkit.collectors.collector import Collector, MakeEnv
from envkit.collectors.host import (
    BATCH,
    BUILDING,
    COMMAND_NAMES,
    STOP,
    WEIGHTS,
    Description,
    Reply,
    RunnerFactory,
    WorkerOrder,
)
from envkit.collectors.losses import with_loss
from envkit.collectors.packing import Packing
from envkit.collectors.runner import Order
from envkit.collectors.settings import WorkerOptions, checked_workers, runner_options
from envkit.collectors.weights import Weights, as_weights, require_same_architecture, tensors_of
from envkit.data.arguments import as_int
from envkit.data.paths import Path, tensordict_of
from envkit.data.transition import leaves
from envkit.env.base import EnvBase
from envkit.env.policy import PolicyLike, policy_device
from envkit.env.seeding import drawn_seed, restart_seed
from envkit.errors import (
    ArgumentCountError,
    ArgumentError,
    ArgumentTypeError,
    BusyEnvError,
    DoneError,
    OptionError,
    SpecError,
    WorkerError,
)
from envkit.transport import Field, Layout, Traffic
from envkit.transport.jobs import Job, JobPool, ProcessJobPool

__all__ = ["Part", "WorkerCollector"]


_PAUSE_S = 0.1


@dataclass(frozen=True)
class Part:
    """What one worker has made; see `Reply` for the other entries.

    Attributes:
        data: batch size ``(*env_batch, steps)``, invalid steps included.
        valid: steps that are valid.
    """

    worker: int
    data: TensorDictBase
    valid: int
    following: torch.Tensor


class WorkerCollector(Collector):
    """What collectors with workers share; see `Collector` and `WorkerOptions`.

    Ctrl-C may come at any moment. An order of which it is not sure whether it was placed is placed again under the same
    number, for which a worker makes one batch only.
    """

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
        self._trained = policy
        self._steps = 0
        parts = self._parts(makers, policy, given)
        pool = self._pool = self._make_pool(parts, given)
        self._recovery = Recovery(
            pool,
            allowed_restarts(given.on_worker_failure, given.max_restarts),
            advice="Build a new collector. With on_worker_failure='restart' such a worker is replaced.",
        )
        self._jobs: dict[int, Job] = {}
        self._ordered: dict[int, Order] = {}
        self._roots: dict[int, TensorDictBase] = {}
        self._next_numbers = list(range(self.num_workers))
        self._counted: list[dict[str, Any]] = [{} for _ in makers]
        self._lost: dict[int, Any] = {}
        self._packing: Packing[Path] | None = None
        self._memory: dict[str, np.ndarray] = {}
        self._loaded = [0] * self.num_workers
        self._replaced: set[int] = set()
        self._received_from = [0] * self.num_workers
        self._unsure: set[int] = set()
        if given.num_threads is not None:
            limit = ThreadLimit(given.num_threads)
            self._end_limit = weakref.finalize(self, limit.end)
            self._end_limit.atexit = False
        try:
            described = cast("list[Description]", pool.start())
            self._adopt(described)
            self._fit(given)
            self._require_room(described[0].leaves)
            self._bind()
            self._prepare(self.num_workers)
        except BaseException:
            self.shutdown()
            raise

    def _make_pool(self, parts: list[Parts], given: Any) -> JobPool:
        base = drawn_seed()
        seeds = [restart_seed(base, row, 0) for row in range(len(parts))]
        factory = RunnerFactory(parts, seeds, given.num_sub_threads, chosen())
        count = len(parts)
        shared: dict[str, Any] = {
            "timeout_s": given.timeout,
            "start_timeout_s": given.start_timeout,
            "building": BUILDING,
            "commands": COMMAND_NAMES,
        }
        if self.backend == "ray":
            return actors_for(factory, count, count, self.backend_options, **shared)
        own_core = given.num_sub_threads == 1
        return processes_for(ProcessJobPool, factory, count, count, core_each=own_core, **shared)

    def _parts(self, makers: list[Any], policy: Any, given: Any) -> list[Parts]:
        """Say what each worker builds; a policy travels there from the CPU."""
        count = len(makers)
        devices = {
            name: _each(name, getattr(given, name), count)
            for name in ("storing_device", "env_device", "policy_device")
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
                runner_options(given, devices["storing_device"][worker]),
                env_kwargs=kwargs[worker] or {},
                policy_factory=factories[worker],
                max_frames_per_traj=given.max_frames_per_traj,
                record_for_resume=given.record_for_resume,
                trust_policy=given.trust_policy,
                compile_policy=given.compile_policy,
                cudagraph_policy=given.cudagraph_policy,
                env_device=devices["env_device"][worker],
                policy_device=devices["policy_device"][worker],
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

    def _set_steps(self, workers: int) -> None:
        """Settle how many steps a batch has, which so many workers make together."""
        self._steps = self._steps_each(self._rows_each, workers, stacklevel=6)
        if self._steps == 1 and self._options.on_worker_failure == "restart":
            raise ArgumentError(
                "on_worker_failure='restart' puts a truncated step in front of the batch of a new worker, so batches "
                "need 2 steps or more. Pass a larger frames_per_batch."
            )

    def _adopt(self, described: Sequence[Description]) -> None:
        first = described[0]
        for worker, one in enumerate(described):
            _require_alike(first, one, worker)
        restarts = self._options.on_worker_failure == "restart"
        if restarts and not any(path[-1] == "truncated" for path in first.leaves):
            raise DoneError(
                "on_worker_failure='restart' ends the episodes of a lost worker with 'truncated', but its env has no "
                "such entry. Pass lambda: make_env().add_truncated_keys()."
            )
        from_here = isinstance(self._trained, nn.Module) and first.weights is not None
        if self._options.update_at_each_batch and not from_here:
            raise OptionError(
                "update_at_each_batch=True sends the weights of the policy that was passed, but none with weights was. "
                "Pass a torch.nn.Module as policy, or call update_policy_weights_(policy_weights)."
            )
        self.batch_size = first.batch_size
        self._rows_each = first.batch_size.numel()
        self._weights = first.weights
        self._newest: np.ndarray | None = None
        if first.weights is not None:
            self._newest = np.zeros(first.weights.size_bytes, np.uint8)

    def _bind(self, packing: Packing[Path] | None = None) -> None:
        """Share memory with the workers; that of batches once their form is known."""
        fields, made = [Field(STOP, (), "uint8")], () if packing is None else (BATCH,)
        traffic = {"collect": Traffic((STOP,), made)}
        if self._weights is not None:
            fields.append(Field(WEIGHTS, (self._weights.size_bytes,), "uint8"))
            traffic["load_and_collect"] = Traffic((STOP, WEIGHTS), made)
        if packing is not None:
            fields.append(Field(BATCH, (packing.size_bytes,), "uint8"))
            self._pool.call("plan", packing)
        self._memory = self._pool.bind(Layout(tuple(fields), self.num_workers, traffic))
        self._packing = packing

    # -------------------------------------------------------------------------------------- orders

    def _order(self, worker: int, *, random: bool) -> None:
        """Have a worker that is free make a batch."""
        if worker in self._unsure:
            self._call("be_there", workers=[worker])  # it may be at work, and reading weights
        if worker in self._replaced:
            self._introduce(worker)
        steps = self._steps - (worker in self._lost)
        order = Order(steps, random, self.policy_version)
        method = "load_and_collect" if self._lay_weights(worker) else "collect"
        self._memory[STOP][worker] = 0
        options = self._options
        wanted = WorkerOrder(
            self._received_from[worker],
            order,
            stops=options.preemptive_threshold is not None,
            with_root=options.on_worker_failure == "restart",
        )
        self._ordered[worker] = order
        self._unsure.add(worker)
        self._jobs[worker] = self._pool.begin_call(worker, method, wanted)
        self._loaded[worker] = self.policy_version
        self._unsure.discard(worker)

    def _order_again(self) -> None:
        """Place orders of which Ctrl-C has left unsure whether they were placed."""
        for worker in self._unsure - self._jobs.keys():
            self._order(worker, random=self._ordered[worker].random)

    def _lay_weights(self, worker: int) -> bool:
        """Put the newest weights where a worker that is free finds them, unless it has them."""
        if self._newest is None or self._loaded[worker] == self.policy_version:
            return False
        self._memory[WEIGHTS][worker] = self._newest
        return True

    def _wait(self, count: int) -> list[int]:
        """Wait until so many of the workers that have an order are done; give all that are."""
        workers = {id(job): worker for worker, job in self._jobs.items()}
        done = self._pool.wait(list(self._jobs.values()), count, None)
        return [workers[id(job)] for job in done]

    def _receive(self, worker: int) -> Part | None:
        """Take what a worker has made; None where it was lost, and has a new order.

        Raises:
            WorkerError: it failed, and is not to be replaced, or too often.
        """
        try:
            reply: Reply = self._pool.outcome(self._jobs[worker])
        except WorkerError as error:
            del self._jobs[worker]
            self._replace(error)
            self._order(worker, random=self._ordered[worker].random)
            return None
        self._next_numbers[worker] = reply.next_number
        self._counted[worker] = reply.stats
        data = self._data_of(worker, reply)
        if worker in self._lost:
            data = with_loss(data, self._lost[worker])
        missing = self._ordered[worker].steps - reply.steps
        if reply.root is not None:
            self._roots[worker] = reply.root
        part = Part(worker, data, self._steps - missing, reply.following)
        if worker in self._lost:  # between here and the end Ctrl-C cannot come
            del self._lost[worker]
        self._received_from[worker] += 1
        del self._jobs[worker]
        return part

    def _replace(self, error: WorkerError) -> None:
        """Build anew what has failed.

        Raises:
            WorkerError: that is not to be, or was too often.
        """
        for failure in error.failures:
            worker = failure.worker
            self._replaced.add(worker)
            if (root := self._roots.pop(worker, None)) is not None:
                self._lost[worker] = root
        self._recovery.repair(error)
        self._recovery.lost.clear()
        self._recovery.unstarted.clear()

    def _introduce(self, worker: int) -> None:
        """Tell a worker that was built anew what the others know."""
        self._call("number_from", self._next_numbers[worker], workers=[worker])
        if self._packing is not None:
            self._call("plan", self._packing, workers=[worker])
        self._loaded[worker] = -1 if self.policy_version else 0
        self._replaced.discard(worker)

    def _persistently(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call something of workers, and again when what has failed is built anew, or who was at work is done."""
        while True:
            try:
                return call(*args, **kwargs)
            except WorkerError as error:
                self._replace(error)
            except BusyEnvError:  # with an order that Ctrl-C has made us forget
                self._pool.wait([], 1, _PAUSE_S)

    def _data_of(self, worker: int, reply: Reply) -> TensorDictBase:
        """Give what a worker has collected, wherever it lies."""
        batch = torch.Size((*self.batch_size, self._ordered[worker].steps))
        if reply.data is None:
            assert self._packing is not None
            views = self._packing.views(self._memory[BATCH][worker])
            data = tensordict_of(views, batch, None)
            data.names = [*[None] * len(self.batch_size), "time"]
            return data
        return reply.data

    def _learn_form(self, parts: Sequence[Part]) -> None:
        """Share memory for batches, once the first ones have shown their form; all workers are free."""
        if self._packing is not None or self._options.use_buffers is False:
            return
        tensors = [dict(leaves(part.data)) for part in parts]
        if not all(isinstance(value, torch.Tensor) for value in tensors[0].values()):
            return
        packing = Packing.of(tensors[0])
        if all(packing.fits(other) for other in tensors[1:]):
            self._persistently(self._bind, packing)

    # ------------------------------------------------------------------------------------- weights

    def update_policy_weights_(self, policy_weights: Any = None) -> None:
        if self._weights is None or self._newest is None:
            raise ArgumentTypeError(
                "the policy of the workers is no torch.nn.Module, so it has no weights to update."
            )
        given = self._trained if policy_weights is None else policy_weights
        if given is None:
            raise ArgumentTypeError(
                "there are no weights here: the workers have made their policies themselves. Pass policy_weights=."
            )
        weights: Weights = tensors_of(given) if isinstance(given, nn.Module) else as_weights(given)
        views = self._weights.views(self._newest)
        require_same_architecture(views, weights)
        with torch.no_grad():
            for name, place in views.items():
                place.copy_(weights[name])
        self.policy_version += 1

    # ------------------------------------------------------------------------------ seeds and resets

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        self._settle()
        self._require_idle()
        following: int | None = seed
        for worker in range(self.num_workers):
            (after,) = self._call("seed", following, static_seed, workers=[worker])
            following = seed if static_seed else after
        self._recovery.begin_seeds(seed)
        self._begin_anew(range(self.num_workers))
        return following

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

    def _begin_anew(self, workers: Sequence[int]) -> None:
        ended = self._call("begin_anew", workers=workers)
        for worker in workers:
            self._roots.pop(worker, None)
            self._lost.pop(worker, None)
        if self._episodes is not None:
            self._episodes.cut([number for numbers in ended for number in numbers])

    def _call(self, method: str, *args: Any, workers: Sequence[int]) -> Any:
        return self._persistently(self._pool.call, method, *args, workers=workers)

    def _require_idle(self) -> None:
        """See to it that no worker has an order."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------- resume

    @property
    def _runner_names(self) -> Sequence[str]:  # type: ignore[override]
        return ("newest_weights", *(f"worker{row}" for row in range(self.num_workers)))

    def _runner_states(self) -> dict[str, Any]:
        self._require_idle()
        states = self._call("state", workers=range(self.num_workers))
        return {
            **{f"worker{row}": state for row, state in enumerate(states)},
            "next_numbers": list(self._next_numbers),
            "newest_weights": None
            if self._newest is None
            else torch.from_numpy(self._newest).clone(),
            "loaded_versions": list(self._loaded),
        }

    def _load_runner_states(self, state: Mapping[str, Any], *, strict: bool) -> None:
        if f"worker{self.num_workers}" in state:
            raise ArgumentCountError(
                f"the state dict is of more than {self.num_workers} workers. Load it into a collector with as many."
            )
        self._require_idle()
        for row in range(self.num_workers):
            self._call("load_state", state[f"worker{row}"], strict, workers=[row])
        self._next_numbers = list(state["next_numbers"])
        self._roots, self._lost = {}, {}
        if self._newest is not None:
            self._newest[:] = state["newest_weights"].numpy()
        self._loaded = list(state["loaded_versions"])

    # ---------------------------------------------------------------------------------------- life

    def stats(self) -> Mapping[str, Any]:
        """Tell what was collected and where time went.

        Returns:
            ``frames``, ``batches``, ``episodes``, ``seconds`` ("envs", "policy", summed over the workers), and
            ``workers``: the same of each, in a list.
        """
        total: dict[str, Any] = {
            "frames": 0,
            "episodes": 0,
            "seconds": {"envs": 0.0, "policy": 0.0},
        }
        for one in self._counted:
            for name in ("frames", "episodes"):
                total[name] += one.get(name, 0)
            for name, spent in one.get("seconds", {}).items():
                total["seconds"][name] += spent
        return {**total, "batches": self.iter, "workers": [dict(one) for one in self._counted]}

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._pool.pids

    def _end(self) -> None:
        self._jobs, self._memory = {}, {}
        self._pool.close()
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


def _require_alike(first: Description, other: Description, worker: int) -> None:
    """Check that workers make batches of one form.

    Raises:
        SpecError: (a ValueError) they do not.
    """
    if other.batch_size != first.batch_size:
        raise SpecError(
            f"the env of worker {worker} has batch size {tuple(other.batch_size)}, that of worker 0 "
            f"{tuple(first.batch_size)}. All workers must make batches of one form."
        )
    for path in first.leaves.keys() | other.leaves.keys():
        own, theirs = first.leaves.get(path), other.leaves.get(path)
        if own != theirs:
            raise SpecError(
                f"the envs of workers are unlike: {path} is {theirs} in worker {worker}, and {own} in worker 0. All "
                "workers must make batches of one form; collect from unlike envs with a collector each."
            )
    if (first.weights is None) != (other.weights is None) or (
        first.weights is not None
        and other.weights is not None
        and first.weights.plan != other.weights.plan
    ):
        raise SpecError(
            f"the policies of workers 0 and {worker} have other weights. Have policy_factory make policies of one "
            "architecture."
        )
